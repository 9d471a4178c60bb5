"""A prompt on a GPU: tokens a second, share of this card's half-precision matmul rate, time to the first token.

    python benchmarks/bench_prefill.py [--case SHAPE:BITS:CACHE:TOKENS[:PAST] ...] [--strict]

PAST: tokens in the cache before the prompt, as at the next message of a chat. Random weights of true shapes
(gpu_model.py). The check of bench_step runs first; a failed one prints no speed. JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from bench_step import CACHES, NAMES, PAGE, check, fill_cache, paged, replay_time
from gpu_bars import PREFILL_BARS
from gpu_model import build
from gpu_timing import emit, environment

from exl_core import ExLlamaV2
from exl_core.layers import Embedding
from exl_kernels.device import set_row_invariant

DEFAULT = ["8b:4.0:fp16:2048"]
PAUSE = 0.15
"""Seconds between prompts of `paused_us`. Consecutive prompts draw all the power that a card may have, which lowers its
clock: to compare two versions, compare these."""


def matmul_rate() -> float:
    """FLOP a second of torch's half-precision matmul of 2,048 rows."""
    a, b = (torch.randn(n, k, device="cuda").half() for n, k in ((2048, 8192), (8192, 8192)))
    us, _, _ = replay_time(lambda: torch.nn.functional.linear(a, b))
    return 2.0 * a.shape[0] * b.numel() / (us * 1e-6)


def measure(model: ExLlamaV2, kind: str, tokens: int, past: int, rate: float) -> dict[str, object]:
    """Medians of a whole prompt in one chunk, its last token's logits brought to the host."""
    pages = -(-(past + tokens) // PAGE) + 1
    cache = CACHES[kind](model, max_seq_len=pages * PAGE)
    fill_cache(cache)
    params = paged(cache, 1, past, tokens)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))

    def run() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        logits = model.forward_chunk(ids, cache, attn_params=params, last_id_only=True)["logits"]
        int(logits.argmax())
        return time.perf_counter() - begin

    taken = [run() for _ in range(8)]
    first, taken = taken[0], sorted(taken[2:])
    seconds = taken[len(taken) // 2]
    paused = []
    for _ in range(8):
        time.sleep(PAUSE)
        paused.append(run())
    weights = sum(
        linear.in_features * linear.out_features
        for module in model.modules[1:-1]
        if not isinstance(module, Embedding)
        for linear in module.submodules()
    )
    work = 2.0 * weights * tokens
    return {
        "tokens": tokens,
        **({"past": past} if past else {}),
        "p50_us": seconds * 1e6,
        "paused_us": statistics.median(paused) * 1e6,
        "first_us": first * 1e6,
        "tok_s": tokens / seconds,
        "tflop_s": work / seconds / 1e12,
        "pct_product_rate": 100.0 * work / seconds / rate,
        "memory_bytes": torch.cuda.max_memory_reserved(),
        **stored(lambda: model.forward_chunk(ids, cache, attn_params=params, preprocess_only=True)),
    }


def stored(run: Callable[[], object]) -> dict[str, float]:
    """Medians of a pass without logits, as the generator runs prompts: until it is queued, and until it is done."""
    queued, done = [], []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        queued.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - begin)
    # The first passes run eagerly and capture the step, if the prompt is short enough.
    return {name: statistics.median(taken[3:]) * 1e6 for name, taken in (("queue_us", queued), ("store_us", done))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="SHAPE:BITS:CACHE:TOKENS[:PAST], e.g. 8b:4.0:fp16:2048")
    parser.add_argument(
        "--strict", action="store_true", help="also with rows independent of their number, on a line more"
    )
    args = parser.parse_args()
    if not check():
        sys.exit("the check failed: no speed is printed")
    rate, about = matmul_rate(), environment()
    model: ExLlamaV2 | None = None
    built: list[str] = []
    cases = sorted((*case.split(":"), "0")[:5] for case in args.case or DEFAULT)
    longest = max(32768, *(int(tokens) + int(past) + 1 for *_, tokens, past in cases))
    for shape, bits, kind, tokens, past in cases:
        if built != [shape, bits]:
            model = None
            gc.collect()
            torch.cuda.empty_cache()
            model, built = build(shape, bits, longest), [shape, bits]
        assert model is not None
        found = measure(model, kind, int(tokens), int(past), rate)
        if (shape, bits, past) == ("8b", "4.0", "0") and int(tokens) in PREFILL_BARS:
            found |= PREFILL_BARS[int(tokens)].keys(str(about["gpu"]), float(str(found["tok_s"])))
        line = {
            "bench": "prefill",
            **about,
            "model_shape": NAMES.get(shape, shape),
            "bpw": bits,
            "cache": kind,
            "batch": 1,
            "product_tflop_s": rate / 1e12,
        }
        emit({**line, **found})
        if args.strict:
            set_row_invariant(True)
            emit({**line, "strict": True, **measure(model, kind, int(tokens), int(past), rate)})
            set_row_invariant(False)


if __name__ == "__main__":
    main()
