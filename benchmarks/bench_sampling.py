"""Cost of sampling a token: microseconds a row on the CPU, and on a GPU where there is one. JSON lines.

python benchmarks/bench_sampling.py [--width 128256] [--rows 1 8 32 64]

Logits: "model" has a few hundred likely tokens, as a language model gives; "flat" is normal with deviation 1, the worst
there is. Each case is first compared with the plain twin (CPU) or the CPU (GPU); a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from exl_kernels import sampling
from exl_kernels.reference import sampling as twin
from exl_kernels.sampling import Dry, Failure, LateTemperature, Penalties, Plan, Row, Sampled, Xtc, pack_ids
from exl_kernels.sampling import cuda as sampling_cuda

PENALTIES = Penalties(repetition=1.025)


def cases(width: int, rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    some = pack_ids(rng.integers(0, width, 2000), width)
    everything = {
        "temperature": 0.8,
        "smoothing": 0.1,
        "top_p": 0.95,
        "top_a": 0.01,
        "min_p": 0.01,
        "tfs": 0.98,
        "typical": 0.97,
        "late": LateTemperature(0.5, 1.5, 1.0),
        "xtc": Xtc(0.3, 0.1),
        "xtc_ignored": some,
        "descending": True,
        "penalties": Penalties(1.1, 0.1, 0.1, -1, 0),
        "dry": Dry(0.8, 1.75, 2, 20, 0, some),
        "bias": torch.zeros(width),
    }
    return {
        "greedy": {"greedy": True},
        "default": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "penalties": PENALTIES},
        "temperature": {"temperature": 0.8},
        "top-p": {"temperature": 0.8, "top_p": 0.9},
        "min-p": {"min_p": 0.05, "late": LateTemperature(1.5, 1.5, 1.0)},
        "chat": {
            "min_p": 0.05,
            "xtc": Xtc(0.5, 0.1),
            "penalties": Penalties(1.05, 0.0, 0.0, 1024, 0),
            "dry": Dry(0.8, 1.75, 2, 20, 0, pack_ids([13], width)),
        },
        "typical": {"typical": 0.95},
        "tail-free": {"tfs": 0.95},
        "cfg": {"temperature": 0.8, "top_k": 50, "top_p": 0.8, "cfg_scale": 1.5},
        "all but top-k": everything,
        "all": {**everything, "top_k": 50},
    }


def rows_of(
    name: str, fields: dict[str, Any], kind: str, width: int, count: int, rng: np.random.Generator
) -> list[Row]:
    plan = Plan(size=width, **fields)
    x = rng.normal(0, 1, (count, width)).astype(np.float32)
    if kind == "model":
        x *= 2
        for row in x:
            row[rng.integers(0, width, 300)] += np.linspace(14, 4, 300).astype(np.float32)
    context = rng.integers(0, width, 2000)
    mask = pack_ids(rng.integers(0, width, width // 2), width)
    every = name.startswith("all")
    return [
        Row(
            plan,
            logits,
            uniform=float(rng.random()),
            context=context,
            mask=mask if every else None,
            mirostat=2.0**-9 if every else 0.0,
            negative=logits.flip(0) if plan.cfg_scale is not None else None,
        )
        for logits in torch.from_numpy(x)
    ]


def median_us(work: Callable[[], object], seconds: float = 0.5) -> float:
    work()
    taken, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2] * 1e6


def queue(rows: list[Row]) -> None:
    """Launch on the current stream alone, so that a capture may contain the launches."""
    place = sampling_cuda._place(rows[0].logits.device)
    if place.uncollected is not None:
        place.uncollected.collect()
    place.under_way = True
    place.launch(rows)


def host_us(rows: list[Row]) -> float:
    """Return the microseconds that the calling thread spends until everything is launched."""
    taken = []
    for _ in range(60):
        torch.cuda.synchronize()
        start = time.perf_counter()
        queue(rows)
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(taken)[30] * 1e6


def check(got: Sampled | Failure, want: Sampled | Failure, what: str) -> None:
    same = isinstance(got, Sampled) and isinstance(want, Sampled)
    if not (same and (got.token, got.probability) == (want.token, want.probability)):  # type: ignore[union-attr]
        raise SystemExit(f"{what}: sampled {got}, expected {want}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--gpu-only", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    for kind in () if args.gpu_only else ("model", "flat"):
        for name, fields in cases(args.width, rng).items():
            rows = rows_of(name, fields, kind, args.width, 1, rng)
            check(sampling.sample(rows)[0], twin.sample(rows[0]), f"CPU, {name}, {kind}")
            us = median_us(lambda rows=rows: sampling.sample(rows))  # type: ignore[misc]
            line = {"bench": "sampling", "device": "cpu", "logits": kind, "settings": name, "vocab": args.width}
            print(json.dumps({**line, "us": round(us, 1)}), flush=True)
    if torch.cuda.is_available():
        on_gpu(args.width, args.rows, rng)


def on_gpu(width: int, counts: list[int], rng: np.random.Generator) -> None:
    from gpu_timing import environment, time_graph

    asked = [(kind, *case) for kind in ("model", "flat") for case in cases(width, rng).items()]
    for kind, name, fields in asked:
        for count in counts:
            rows = rows_of(name, fields, kind, width, count, rng)
            there = [
                replace(row, logits=row.logits.cuda(), negative=None if row.negative is None else row.negative.cuda())
                for row in rows
            ]
            for got, want in zip(sampling.sample(there), sampling.sample(rows), strict=True):
                check(got, want, f"GPU, {name}, {kind}")
            line = {
                "bench": "sampling",
                "logits": kind,
                "settings": name,
                "vocab": width,
                "rows": count,
                "left_to_cpu": sampling_cuda.launch(there).collect().count(None),
                "call_us": round(median_us(partial(sampling.sample, there), 0.15), 1),
                "host_us": round(host_us(there), 1),
                "gpu_us": round(time_graph(partial(queue, there), 1, samples=5).p50, 1),
            }
            print(json.dumps({**line, **environment()}), flush=True)


if __name__ == "__main__":
    main()
