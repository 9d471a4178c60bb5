"""Whole decode steps on a GPU: time, share of the read roof, host time, allocations; through model and generator.

    python benchmarks/bench_step.py [--case SHAPE:BITS:CACHE:CONTEXT:BATCH ...] [--generator] [--profile] [--plain]

Random weights of true shapes (gpu_model.py), keys and values random. First a small model is checked: captured steps
must equal eager ones bitwise and the CPU's within bounds; a failed check prints no speed. JSON lines.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from gpu_bars import BARS
from gpu_model import build
from gpu_timing import emit, environment, read_roof, timed_events
from torch._C._autograd import DeviceType

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    PagedParams,
)
from exl_core.execution.environment import GRAPHS_VARIABLE
from exl_core.layers import Embedding, PositionEmbedding
from exl_kernels.device import programmatic_launch, set_programmatic_launch
from exl_kernels.selection import Card

CACHES = {
    "fp16": ExLlamaV2Cache,
    "fp8": ExLlamaV2Cache_8bit,
    "q8": ExLlamaV2Cache_Q8,
    "q6": ExLlamaV2Cache_Q6,
    "q4": ExLlamaV2Cache_Q4,
}
NAMES = {"tinyllama": "1b"}
PAGE = 256
DEFAULT = ["8b:4.0:fp16:256:1"]
SPARE = 2304  # tokens a sequence may grow by while it is measured


def paged(cache: ExLlamaV2CacheBase, batch: int, past: int, q_len: int = 1) -> PagedParams:
    """`batch` sequences of `past` tokens, each with an equal share of the cache's pages, in mixed order."""
    pages = cache.max_seq_len // PAGE
    each = pages // batch
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table, lengths = order[: batch * each].view(batch, each), torch.full((batch,), past, dtype=torch.int32)
    return PagedParams(batch, table, lengths, past, PAGE, q_len)


def fill_cache(cache: ExLlamaV2CacheBase) -> None:
    for tensor in cache.all_tensors():
        if tensor.dtype == torch.float16:
            tensor.normal_(0.0, 1.0 if cache.kind == "fp16" else 0.01)
        else:
            tensor.random_(0, 120)


# ----------------------------------------------------------------------------------------------------- correctness
def check(worst: list[float] | None = None) -> bool:
    """Check that captured steps equal eager ones bitwise, alone and in a batch, and that both are near the CPU's.

    Divergences from the CPU are added to `worst`."""
    return all([_check("tiny", worst), _check("tiny-qwen3", worst)])


def _check(shape: str, worst: list[float] | None) -> bool:
    gpu, cpu = build(shape, "4.0", 2048), build(shape, "4.0", 2048, "cpu")
    right = True
    for name in ("fp16", "q4"):
        caches = [CACHES[name](m, max_seq_len=8 * PAGE) for m in (gpu, gpu, cpu)]
        ids = torch.randint(0, 2048, (4, 40), generator=torch.Generator().manual_seed(5))
        for begin, q_len in [(0, 33), (33, 1), (34, 1), (35, 4), (39, 1)]:
            part = ids[:, begin : begin + q_len]
            out = []
            for i, (model, cache) in enumerate(zip((gpu, gpu, cpu), caches, strict=True)):
                model.decode.clear()
                with unittest.mock.patch.dict(os.environ, {GRAPHS_VARIABLE: "0"} if i == 0 else {}):
                    logits = model.forward_chunk(part, cache, attn_params=paged(cache, 4, begin, q_len))["logits"]
                out.append(logits.clone())
                if i == 0 and model.decode.count:
                    right = report("what captured steps are checked against is one")
            if q_len < 9:
                right &= gpu.decode.count == 1 or report(f"{name}: no captured step ({gpu.decode.reason})")
            right &= torch.equal(out[0], out[1]) or report(f"{name}: captured and eager logits differ at {begin}")
            p, q = out[2].double().log_softmax(-1), out[1].cpu().double().log_softmax(-1)
            kl = float((p.exp() * (p - q)).sum(-1).mean())
            if worst is not None:
                worst.append(kl)
            right &= kl < 1e-3 or report(f"{name}: KL {kl:.2e} from the CPU at {begin}")
        # Alone, in another bucket, the same row.
        params = paged(caches[1], 4, 39)
        alone = PagedParams(1, params.block_index[2:3], params.cache_seqlens[2:3], 39, PAGE, 1)
        one = gpu.forward_chunk(ids[2:3, 39:], caches[1], attn_params=alone)["logits"]
        right &= torch.equal(one[0], out[1][2]) or report(f"{name}: a row alone differs from the row in a batch")
    return right


def report(text: str) -> bool:
    print(f"CHECK FAILED: {text}", file=sys.stderr, flush=True)
    return False


# ----------------------------------------------------------------------------------------------------- measurement
def bytes_of_step(model: ExLlamaV2, cache: ExLlamaV2CacheBase, context: int, batch: int) -> int:
    """Bytes a step must read: every weight but embeddings of tokens and positions, and all keys and values."""
    weights = sum(m.weight_bytes() for m in model.modules if not isinstance(m, Embedding | PositionEmbedding))
    stored = sum(t.nbytes for t in cache.all_tensors()) / cache.max_seq_len
    return int(weights + stored * context * batch)


def nodes_of(model: ExLlamaV2, step: Callable[[], object]) -> int:
    """Nodes of the graph that a step launches, from a capture of its own."""
    driver, made = ctypes.CDLL("libcuda.so.1"), torch.cuda.CUDAGraph
    model.decode.clear()
    with unittest.mock.patch("torch.cuda.CUDAGraph", partial(made, keep_graph=True)):
        step()
    graphs = [held.graph for group in model.decode._graphs.values() for held in group.values()]
    count = ctypes.c_size_t(0)
    if graphs:
        assert isinstance(graphs[-1], torch.cuda.CUDAGraph), "this benchmark builds models on one GPU"
        driver.cuGraphGetNodes(ctypes.c_void_p(graphs[-1].raw_cuda_graph()), None, ctypes.byref(count))
    return count.value


def replay_time(run: Callable[[], object], samples: int = 30) -> tuple[float, float, float]:
    """(p50, p10, p90) us of a call by events around eight calls."""
    start, end = timed_events()
    taken: list[float] = []
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until or len(taken) < samples:
        start.record()
        for _ in range(8):
            run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / 8)
    taken = sorted(taken[-samples:])
    return taken[len(taken) // 2], taken[len(taken) // 10], taken[len(taken) * 9 // 10]


def host_time(run: Callable[[], object]) -> float:
    """Median us that a call keeps the host, the device idle before it."""
    taken = []
    for _ in range(200):
        begin = time.perf_counter()
        run()
        taken.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(taken)


def measure(model: ExLlamaV2, kind: str, context: int, batch: int, roof: float, steps: int) -> dict[str, object]:
    each = -(-(context + SPARE) // PAGE) * PAGE
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    cache = CACHES[kind](model, max_seq_len=each * batch)
    fill_cache(cache)
    params = paged(cache, batch, context)
    ids = torch.randint(0, model.config.vocab_size, (batch, 1))
    began = time.perf_counter()
    model.forward_chunk(ids, cache, attn_params=params)
    torch.cuda.synchronize()
    capture = time.perf_counter() - began

    def step() -> None:
        model.forward_chunk(ids, cache, attn_params=params)

    p50, p10, p90 = replay_time(step)
    graphs = [held.graph for group in model.decode._graphs.values() for held in group.values()]
    device = replay_time(graphs[-1].replay)[0] if graphs else p50
    replays = host_time(graphs[-1].replay) if graphs else 0.0
    host = host_time(step)
    for length in range(context, context + SPARE - 8, PAGE):  # every bucket that the growing sequence meets
        params.cache_seqlens.fill_(length)
        step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for i in range(steps):
        params.cache_seqlens.fill_(context + i % (SPARE - 8 - PAGE))
        step()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    reserved = torch.cuda.max_memory_reserved()  # before `nodes_of` captures again
    read = bytes_of_step(model, cache, context, batch)
    nodes = nodes_of(model, step)
    held = sum(m.weight_bytes() for m in model.modules) + sum(t.nbytes for t in cache.all_tensors())
    model.decode.clear()
    return {
        "ms_p50": p50 / 1e3,
        "ms_p10": p10 / 1e3,
        "ms_p90": p90 / 1e3,
        "bytes_per_step": read,
        "gbps": read / p50 / 1e3,
        "pct_of_read_roof": 100.0 * read / (p50 * 1e-6) / roof,
        "nodes": nodes,
        "p50_us": p50,
        "graph_us": device,
        "tok_s": batch * 1e6 / p50,
        "host_us": host,
        "host_replay_us": replays,
        "capture_ms": capture * 1e3,
        "captured": bool(graphs),
        "pdl": programmatic_launch() and Card.device().code >= 90,  # older code has no such launches
        "allocations_while_growing": grown,
        "memory_bytes": reserved,
        "memory_over_mb": (reserved - held) / 1e6,
    }


def through_generator(model: ExLlamaV2, kind: str, context: int, batch: int, rounds: int = 64) -> dict[str, object]:
    """Greedy jobs of equal length through the dynamic generator, all of them running: tokens a second, and what a round
    takes beyond the graph it launches: the host's share that nothing hides, sampling, copies. The graph is timed in
    the midst of the rounds, on what they work with."""
    from exl_core import ExLlamaV2Tokenizer
    from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
    from exl_generate.sampling import Settings

    new_tokens = 2 * rounds + 96
    each = -(-(context + new_tokens + 8) // PAGE) * PAGE
    cache = CACHES[kind](model, max_seq_len=each * batch)
    fill_cache(cache)
    generator = ExLlamaV2DynamicGenerator(
        model, cache, ExLlamaV2Tokenizer(model.config), max_batch_size=batch, max_chunk_size=2048
    )

    def go(count: int) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(count):
            for end in generator.iterate():
                if end.get("eos") and end["eos_reason"] != "cancelled":
                    sys.exit(f"a job ended early ({end['eos_reason']}): {end.get('exception')!r}")
            times.append(time.perf_counter())
        return [b - a for a, b in pairwise(times)]

    def started() -> list[ExLlamaV2DynamicJob]:
        jobs = []
        for i in range(batch):
            ids = torch.randint(300, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(i))
            jobs.append(
                ExLlamaV2DynamicJob(
                    ids, new_tokens, gen_settings=Settings.greedy(), stop_conditions=[], decode_special_tokens=True
                )
            )
        generator.enqueue(jobs)
        while min(job.new_tokens for job in jobs) < 8:
            go(1)
        return jobs

    for job in started():  # captures the steps
        go(1)
        generator.cancel(job)
    go(1)
    jobs = started()
    contexts = [len(jobs[0].sequence)]
    spans = go(rounds)
    torch.cuda.synchronize()
    pages = -(-(max(len(job.sequence) for job in jobs) + 1) // PAGE)
    fit = [
        (bucket.batch, bucket.pages, id(held), held.graph)
        for group in model.decode._graphs.values()
        for bucket, held in group.items()
        if bucket.batch >= batch and bucket.pages >= pages
    ]
    graph_us = replay_time(min(fit)[-1].replay)[0] if fit else 0.0  # once more what was queued last
    spans += go(rounds)[1:]
    assert all(not job.is_finished for job in jobs), "a job ended while it was measured"
    contexts.append(len(jobs[0].sequence))
    generator.clear_queue()
    model.decode.clear()
    step = statistics.median(spans)
    result: dict[str, object] = {
        "generator_step_us": step * 1e6,
        "generator_tok_s": batch / step,
        "generator_steps": len(spans),
        "generator_contexts": contexts,  # at the first and the last of these rounds
    }
    return result | ({"generator_graph_us": graph_us, "generator_host_us": step * 1e6 - graph_us} if fit else {})


def profile(model: ExLlamaV2, kind: str, context: int, batch: int) -> str:
    """Kernel times of captured steps, by the profiler: name, launches a step, mean us, us a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    cache = CACHES[kind](model, max_seq_len=(-(-(context + 8) // PAGE) * PAGE) * batch)
    fill_cache(cache)
    params = paged(cache, batch, context)
    ids = torch.randint(0, model.config.vocab_size, (batch, 1))
    for _ in range(3):
        model.forward_chunk(ids, cache, attn_params=params)
    torch.cuda.synchronize()
    rounds = 5
    with profiler(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(rounds):
            model.forward_chunk(ids, cache, attn_params=params)
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == DeviceType.CUDA]
    spans: dict[str, list[float]] = {}
    grown: dict[str, float] = {}
    previous = 0.0
    for e in sorted(events, key=lambda e: e.time_range.start):
        name = e.name.split("(")[0][:60]
        spans.setdefault(name, []).append(e.time_range.elapsed_us())
        # The growth of the step from end to end, which counts overlap once.
        grown[name] = grown.get(name, 0.0) + (max(0.0, e.time_range.end - previous) if previous else 0.0)
        previous = max(previous, e.time_range.end)
    lines = [f"{'kernel':60} {'a step':>7} {'mean us':>8} {'end to end, us a step':>22}"]
    for name, taken in sorted(spans.items(), key=lambda item: -grown[item[0]]):
        lines.append(f"{name:60} {len(taken) / rounds:7.1f} {statistics.mean(taken):8.2f} {grown[name] / rounds:22.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="SHAPE:BITS:CACHE:CONTEXT:BATCH, e.g. 8b:4.0:fp16:256:1")
    parser.add_argument("--generator", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--plain", action="store_true", help="also without programmatic dependent launch")
    parser.add_argument("--apart", action="store_true", help="also captured as the modules' own passes")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    worst: list[float] = []
    if not check(worst):
        sys.exit("the check failed: no speed is printed")
    roof, about = read_roof(), environment()
    cases = [case.split(":") for case in args.case or DEFAULT]
    cases.sort(key=lambda c: c[:2])
    model: ExLlamaV2 | None = None
    built: list[str] = []
    for shape, bits, kind, context, batch in cases:
        if built != [shape, bits]:
            del model
            gc.collect()
            torch.cuda.empty_cache()
            began = time.perf_counter()
            model, built = build(shape, bits, 32768), [shape, bits]
            print(f"# built {shape} {bits} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        assert model is not None
        line: dict[str, object] = {
            "bench": "step",
            **about,
            "model_shape": NAMES.get(shape, shape),
            "bpw": bits,
            "cache": kind,
            "batch": int(batch),
            "bs": int(batch),
            "ctx": int(context),
            "roof_gb_s": roof / 1e9,
            "max_err": max(worst),
            **measure(model, kind, int(context), int(batch), roof, args.steps),
        }
        if args.generator:
            line |= through_generator(model, kind, int(context), int(batch))
        bar = BARS.get((shape, bits, kind, int(context), int(batch)))
        if bar is not None:
            speed = float(str(line.get("generator_tok_s", line["tok_s"])))
            line |= bar.keys(str(line["gpu"]), speed, speed / int(batch) * float(str(line["bytes_per_step"])) / roof)
        emit(line)
        if line["captured"] and line["allocations_while_growing"]:
            sys.exit(f"{line['allocations_while_growing']} allocations in {args.steps} steps after warming up")
        if args.plain:
            set_programmatic_launch(False)
            emit({**line, **measure(model, kind, int(context), int(batch), roof, 0)})
            set_programmatic_launch(True)
        if args.apart:
            with unittest.mock.patch(
                "exl_core.execution.captured.joined_launches_of", return_value="asked for with --apart"
            ):
                emit({**line, "apart": True, **measure(model, kind, int(context), int(batch), roof, 0)})
        if args.profile:
            print(profile(model, kind, int(context), int(batch)), flush=True)


if __name__ == "__main__":
    main()
