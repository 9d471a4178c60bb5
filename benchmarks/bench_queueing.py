"""Host time of a prompt pass on a GPU, without one: microseconds a layer to queue its launches. JSON lines.

    python benchmarks/bench_queueing.py [--family NAME ...] [--tokens 512] [--layers 8] [--step ROWS ...] [--profile]

`stand_in_cuda.c`, which the C compiler of this machine builds, replaces the CUDA driver, CUDA's runtime and cuBLAS:
launches cost nothing, so the time is that of Python, torch and the native module. A real driver adds some microseconds
a launch. With --step: of a captured decode step, whose depth does not matter. Passes store a prompt's keys and values,
as those of the generator do. Matrices of mixtures of experts have their true sizes, on which the number of launches
depends; others are small. The time of a layer is the difference between models of different depth.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

LIBRARY = "EXL_STAND_IN_CUDA"
"""Environment variable: the library of the stand-in, set where it is loaded."""
SMALL = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 4096}


def restart() -> None:
    """Build the stand-in and run this program again with it in place of CUDA."""
    library = Path(tempfile.mkdtemp(prefix="exl-stand-in-")) / "libcuda.so.1"
    headers = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "include"
    source = Path(__file__).with_name("stand_in_cuda.c")
    command = ["cc", "-w", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), LIBRARY: str(library)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def queued(family: str, layers: int, tokens: int) -> Callable[[], object]:
    """Return a function that queues one prompt pass of a model of so many layers."""
    from bench_families import EXPERTS, FAMILIES
    from bench_step import CACHES, PAGE
    from gpu_model import build_config

    from exl_core import PagedParams

    config = {**FAMILIES[family], **({} if family in EXPERTS else SMALL), "num_hidden_layers": layers}
    model = build_config(config, "4.0")
    cache = CACHES["fp16"](model, max_seq_len=-(-tokens // PAGE) * PAGE)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    table = torch.arange(cache.max_seq_len // PAGE, dtype=torch.int32)[None]

    def run() -> None:
        params = PagedParams(1, table, torch.zeros(1, dtype=torch.int32), 0, PAGE, tokens)
        with torch.inference_mode():
            model.forward_chunk(ids, cache, attn_params=params, preprocess_only=True)

    return run


def stepped(family: str, rows: int) -> Callable[[], object]:
    """Return a function that queues one captured decode step of so many sequences, with 256 tokens each."""
    from bench_families import FAMILIES
    from bench_step import CACHES, PAGE, paged
    from gpu_model import build_config

    model = build_config({**FAMILIES[family], **SMALL, "num_hidden_layers": 2}, "4.0")
    cache = CACHES["fp16"](model, max_seq_len=2 * PAGE * rows)
    params, ids = paged(cache, rows, PAGE), torch.zeros(rows, 1, dtype=torch.int64)

    def run() -> None:
        before = model.decode.steps
        model.forward_chunk(ids, cache, attn_params=params)
        if model.decode.steps == before:
            raise SystemExit(f"{family}: steps are not captured: {model.decode.reason}")

    return run


def choose_evenly() -> None:
    """Let every expert get as many rows: launches write nothing, and the host reads how many rows experts got."""
    made: dict[tuple[int, int], torch.Tensor] = {}

    def begins(chosen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        key = len(chosen), len(numbers)
        if key not in made:
            made[key] = (torch.arange(key[1]) * key[0] // (key[1] - 1)).to(numbers.device)
        return made[key]

    torch.searchsorted = begins  # type: ignore[assignment]


def cost(run: Callable[[], object], rounds: int) -> tuple[float, int]:
    """Return the least microseconds of CPU time of a pass, since other work only adds to it, and its launches."""
    launches = ctypes.c_long.in_dll(ctypes.CDLL(os.environ[LIBRARY]), "stand_in_launches")
    for _ in range(5):
        run()
    before = launches.value
    taken = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        taken.append((time.thread_time() - began) * 1e6)
    return min(taken), (launches.value - before) // rounds


def profile(run: Callable[[], object]) -> None:
    """Print the functions that take most time."""
    import cProfile
    import pstats

    with cProfile.Profile() as found:
        for _ in range(20):
            run()
    pstats.Stats(found).sort_stats("tottime").print_stats(45)


def measure_step(args: argparse.Namespace, family: str, rows: int) -> Callable[[], object]:
    """Print the host time of a captured step; return what queues one."""
    run = stepped(family, rows)
    gc.collect()
    us, _ = cost(run, args.rounds)
    print(json.dumps({"bench": "queueing a step", "family": family, "rows": rows, "us": round(us, 1)}), flush=True)
    return run


def measure_prompt(args: argparse.Namespace, family: str) -> Callable[[], object]:
    """Print the host time of a layer of a prompt pass; return what queues one."""
    found: dict[int, tuple[float, int]] = {}
    for layers in (2, 2 + args.layers):
        run = queued(family, layers, args.tokens)
        gc.collect()
        found[layers] = cost(run, args.rounds)
    (few, few_launches), (many, launches) = found.values()
    line: dict[str, Any] = {"bench": "queueing a prompt", "family": family, "tokens": args.tokens}
    line["us_per_layer"] = round((many - few) / args.layers, 1)
    line["launches_per_layer"] = (launches - few_launches) / args.layers
    line["us_per_pass"] = round(many, 1)
    print(json.dumps(line), flush=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["llama3-8b", "qwen3-8b", "gemma3-12b", "mixtral-8x7b"])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--step", type=int, nargs="+", default=[], help="rows of captured steps, instead of prompts")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if LIBRARY not in os.environ:
        restart()
    torch.set_num_threads(1)
    choose_evenly()
    for family in args.family:
        measures = [partial(measure_step, args, family, rows) for rows in args.step]
        for measure in measures or [partial(measure_prompt, args, family)]:
            run = measure()
            if args.profile:
                profile(run)


if __name__ == "__main__":
    main()
