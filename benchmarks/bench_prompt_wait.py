"""How `prompt_wait_seconds` changes throughput and first tokens, by a model of time: no GPU, and nothing is measured.

    python benchmarks/bench_prompt_wait.py [--streams 8 16 32 64] [--wait-ms 0 25 50 100] [--requests 8] [--one-kind]

The generator runs a scripted model whose passes move a clock as far as those of an 8B model on an H200 take outside
strict mode (http_engine.py); the host takes no time. Each stream sends its next request when an answer ends. Requests
are those of bench_http.py. With --one-kind short and long prompts share passes. One JSON line for each number of
streams and each wait: tokens a second, passes over prompts, and milliseconds to the first token.
"""

from __future__ import annotations

import argparse
import json
from typing import Any
from unittest import mock

import torch
from http_engine import PassTimes
from http_load import percentile, work

from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic import prompt_wait
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel, ScriptedTokenizer

VOCAB = 3000
LONGEST = 1024
STEP_SECONDS = (0.00149, 0.00413)
"""Seconds of a decode step of 1 and of 64 sequences."""


class ConstantModel(ScriptedModel):
    """A model that always generates the same token, and checks nothing: the least work a step."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config, records=False)
        self.passes = 0

    def forward_chunk(self, input_ids: Any, *_: Any, **named: Any) -> Any:
        """Return logits whose greatest is that of one token."""
        stores, last = bool(named.get("preprocess_only")), bool(named.get("last_id_only"))
        self.passes += stores or last
        if stores:
            return {}
        rows = (1, named["attn_params"].batch_size) if last else input_ids.shape
        logits = torch.zeros(*rows, VOCAB + -VOCAB % 32)
        logits[..., VOCAB - 1] = 1.0
        return {"logits": logits}


def decoding(rows: int) -> float:
    one, many = STEP_SECONDS
    return one + (many - one) * min(rows - 1, 63) / 63


def modelled(streams: int, wait_ms: float, requests: int, one_kind: bool) -> dict[str, Any]:
    """Run `requests` for each stream; return the figures of all of them."""
    config = ScriptedConfig(vocab_size=VOCAB, max_seq_len=LONGEST, max_input_len=2048, max_batch_size=streams)
    model = ConstantModel(config)
    taken = PassTimes(model, decoding)
    if one_kind:
        model.invariant_tokens = lambda: None  # type: ignore[method-assign]
    generator = ExLlamaV2DynamicGenerator(
        model,
        ScriptedCache(model, max_seq_len=streams * LONGEST),
        ScriptedTokenizer([f"{number} " for number in range(VOCAB - 3)], config),
        max_batch_size=streams,
        prompt_wait_seconds=wait_ms / 1e3,
    )
    waiting = work(requests * streams, VOCAB, 128, 513)[::-1]
    sent: dict[Any, float] = {}
    first: list[float] = []
    now, tokens, running = 0.0, 0, 0

    def clock() -> float:
        return now

    with mock.patch.object(prompt_wait, "monotonic", clock):
        while waiting or running:
            while waiting and running < streams:
                asked = waiting.pop()
                job = ExLlamaV2DynamicJob(
                    torch.tensor([asked["prompt"]]),
                    asked["max_tokens"],
                    gen_settings=ExLlamaV2Sampler.Settings.greedy(),
                )
                generator.enqueue(job)
                sent[job], running = now, running + 1
            found = generator.iterate()
            now += taken(running)
            for result in found:
                if "token_ids" in result:
                    tokens += result["token_ids"].shape[1]
                    if result["job"] in sent:
                        first.append((now - sent.pop(result["job"])) * 1e3)
                running -= result["eos"]
    return {
        "tok_s": tokens / now,
        "passes": model.passes,
        "first_token_ms_p50": percentile(first, 0.5),
        "first_token_ms_p90": percentile(first, 0.9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--wait-ms", type=float, nargs="+", default=[0.0, 25.0, 50.0, 100.0])
    parser.add_argument("--requests", type=int, default=8, help="of each stream")
    parser.add_argument("--one-kind", action="store_true", help="short prompts share passes with longer ones")
    args = parser.parse_args()
    for streams in args.streams:
        for wait_ms in args.wait_ms:
            figures = modelled(streams, wait_ms, args.requests, args.one_kind)
            line = {"bench": "prompt wait", "streams": streams, "prompt_wait_ms": wait_ms, "one_kind": args.one_kind}
            print(json.dumps(line | {name: round(value, 1) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
