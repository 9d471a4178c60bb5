"""The CPU path against this machine's read bandwidth, measured in the same run: one JSON line a case.

    python benchmarks/bench_cpu.py [--quick] [--bits 4.0 4.5] [--shape tinyllama] [--family NAME ...] [--threads N]
        [--peer PYTHON SCRIPT WORKDIR]

Lines: "roof" (read bandwidth of all threads), "pool" (cost of an empty job), "matrix" (one matmul by shape, width,
mode and rows: GB/s of weight memory and its share of the roof), "experts" (with --family, cpu_experts.py: a layer's
experts in one call over one after the other and over a dense MLP), "model" (a random model of a shape of
make_random_model.py through exl_core: load, decode, prefill, eight sequences at once, peak memory; the generator's
tokens a second), "modes" (exact over int8). Threads are pinned to one core each. Roofs are
measured with each case, because on shared machines they drift.

--peer runs another engine's script before and after ours in the same minute and reprints its lines with the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exl_kernels import threads
from exl_kernels.linear import QuantMatrix

sys.path.insert(0, str(Path(__file__).parent))
from make_random_model import SHAPES, make_model, random_exl2

ROOF_WORDS = 1 << 25  # 256 MiB: no cache holds it
ROTATION_BYTES = 256 << 20  # matrices of one shape take turns over this much memory
PROMPT = 512
MATRICES = {"q/o 2048x2048": (2048, 2048), "gate/up 2048x5632": (2048, 5632), "down 5632x2048": (5632, 2048)}


def emit(**fields: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def median_seconds(call: Callable[[], object], seconds: float, least: int = 5) -> float:
    call()
    times: list[float] = []
    while len(times) < least or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Roof:
    """Read bandwidth of this machine, bytes a second."""

    def __init__(self) -> None:
        self.data = torch.randint(0, 2**60, (ROOF_WORDS,))
        self.now()

    def now(self) -> float:
        return statistics.median(threads.read_bandwidth(self.data) for _ in range(5))


def bench_pool() -> None:
    for tasks in (1, threads.num_threads(), 4 * threads.num_threads()):

        def jobs(tasks: int = tasks) -> None:
            for _ in range(1000):
                threads.run_empty(tasks)

        seconds = median_seconds(jobs, 0.1)
        emit(case="pool", tasks=tasks, us=seconds * 1e3)


def bench_matrices(roof: Roof, quick: bool) -> None:
    generator = np.random.default_rng(0)
    widths = (4,) if quick else (2, 3, 4, 5, 6, 8)
    for name, (k, n) in list(MATRICES.items())[: 1 if quick else None]:
        for bits in widths:
            tensors = random_exl2(k, n, bits, generator)
            for mode in ("int8", "exact"):
                first = QuantMatrix.from_exl2(tensors, compute=mode)
                copies = max(1, ROTATION_BYTES // first.nbytes)
                ring = [first, *(QuantMatrix.from_exl2(tensors, compute=mode) for _ in range(copies - 1))]
                for rows in (1, 8) if quick else (1, 2, 4, 8, 64, 512):
                    bench_matrix(roof, ring, name, bits, mode, rows)


def bench_matrix(roof: Roof, ring: list[QuantMatrix], name: str, bits: int, mode: str, rows: int) -> None:
    k, n = ring[0].in_features, ring[0].out_features
    x, out = torch.randn(rows, k), torch.empty(rows, n)
    use = ring if rows < 64 else ring[:2]

    def once() -> None:
        for matrix in use:
            matrix.matmul(x, out)

    before = roof.now()
    seconds = median_seconds(once, 0.15) / len(use)
    bandwidth = (before + roof.now()) / 2
    emit(
        case="matrix",
        shape=name,
        bits=bits,
        mode=mode,
        rows=rows,
        us=seconds * 1e6,
        gb_s=ring[0].nbytes / seconds / 1e9,
        roof_gb_s=bandwidth / 1e9,
        share=ring[0].nbytes / seconds / bandwidth,
        gmac_s=rows * k * n / seconds / 1e9,
    )


def status_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process; 0 where the system does not say."""
    path = Path("/proc/self/status")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def warm_page_cache(folder: Path) -> None:
    buffer = bytearray(16 << 20)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_model(folder: Path, mode: str, seconds: float) -> dict[str, Any]:
    """Load, decode and prefill in this process, which should be fresh: peak memory counts from its start."""
    # Here, so that the matrix cases run where exl_core is not installed.
    from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
    from exl_core.layers import MoE
    from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler

    file_bytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    warm_page_cache(folder)
    base, start = status_bytes("VmHWM"), time.perf_counter()
    config = ExLlamaV2Config(str(folder))
    config.cpu_matmul = mode
    model = ExLlamaV2(config)
    model.load()
    load = time.perf_counter() - start
    peak = status_bytes("VmHWM")
    streamed = model.weight_bytes() - model.modules[0].weight_bytes()
    mixtures = [m for m in model.modules if isinstance(m, MoE)]
    streamed -= sum(_expert_bytes(m) * (len(m.experts) - m.chosen) // len(m.experts) for m in mixtures)
    cache = ExLlamaV2Cache(model, max_seq_len=PROMPT + 512, batch_size=1)
    many = ExLlamaV2Cache(model, max_seq_len=512, batch_size=8)
    ids = torch.randint(3, config.vocab_size - 3, (1, PROMPT))
    roof = Roof()
    roofs: list[float] = []
    steps: list[float] = []
    steps8: list[float] = []
    prefill: list[float] = []
    generated: list[float] = []
    pages = ExLlamaV2Cache(model, max_seq_len=512, batch_size=1)
    generator = ExLlamaV2DynamicGenerator(model=model, cache=pages, tokenizer=ExLlamaV2Tokenizer(config))
    settings = ExLlamaV2Sampler.Settings.greedy()

    def decode(cache: ExLlamaV2Cache, batch: int, times: list[float]) -> None:
        cache.current_seq_len = 0
        tokens = ids[:, :16].expand(batch, -1)
        tokens = model.forward(tokens, cache)[:, -1:].argmax(-1)
        for _ in range(32):
            begin = time.perf_counter()
            tokens = model.forward(tokens, cache)[:, -1:].argmax(-1)
            times.append(time.perf_counter() - begin)

    decode(cache, 1, [])
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(prefill) < 3:
        roofs.append(roof.now())
        decode(cache, 1, steps)
        roofs.append(roof.now())
        decode(many, 8, steps8)
        begin = time.perf_counter()
        generator.generate("a", max_new_tokens=64, gen_settings=settings, stop_conditions=[])
        generated.append(64 / (time.perf_counter() - begin))
        cache.current_seq_len = 0
        begin = time.perf_counter()
        model.forward(ids, cache, last_id_only=True)
        prefill.append(PROMPT / (time.perf_counter() - begin))
    step, bandwidth = statistics.median(steps), statistics.median(roofs)
    return {
        "mode": mode,
        "decode_tok_s": 1 / step,
        "decode_best_tok_s": 1 / min(steps),
        "gb_s": streamed / step / 1e9,
        "roof_gb_s": bandwidth / 1e9,
        "share": streamed / step / bandwidth,
        "prefill_tok_s": statistics.median(prefill),
        "decode8_tok_s": 8 / statistics.median(steps8),
        "generator_tok_s": statistics.median(generated),
        "batch8_over_1": 8 * step / statistics.median(steps8),
        "streamed_bytes": streamed,
        "file_bytes": file_bytes,
        "load_s": load,
        "load_gb_s": file_bytes / load / 1e9,
        "peak_over_file": (peak - base) / file_bytes if base else None,
    }


def _expert_bytes(mixture: Any) -> int:
    """Return the bytes of all experts of a layer that rows choose among."""
    return sum(linear.weight_bytes() for expert in mixture.experts for linear in expert)


def run_fresh(folder: Path, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """`measure_model` in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(folder), mode, "--threads", str(threads.num_threads())]
    if args.quick:
        command.append("--quick")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def run_peer(peer: list[str] | None) -> list[dict[str, Any]]:
    """JSON lines of the peer's script, called as PYTHON SCRIPT WORKDIR --threads N."""
    if not peer:
        return []
    python, script, workdir = peer
    command = [python, script, workdir, "--threads", str(threads.num_threads()), "--prompt", str(PROMPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def bench_models(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for bits in args.bits:
            folder = Path(scratch) / f"{bits}"
            make_model(folder, SHAPES[args.shape], bits)
            before = run_peer(args.peer)
            ours = {mode: run_fresh(folder, mode, args) for mode in ("int8", "exact")}
            after = run_peer(args.peer)
            for result in ours.values():
                emit(case="model", shape=args.shape, bits=bits, threads=threads.num_threads(), **result)
            emit(case="modes", bits=bits, exact_over_int8=ours["exact"]["decode_tok_s"] / ours["int8"]["decode_tok_s"])
            for line, again in zip(before, after, strict=True):
                decode, prefill = (statistics.mean((line[k], again[k])) for k in ("decode_tok_s", "prefill_tok_s"))
                emit(
                    case="peer",
                    bits=bits,
                    **{k: line[k] for k in ("engine", "quant", "file_bytes") if k in line},
                    decode_tok_s=decode,
                    prefill_tok_s=prefill,
                    decode_ratio=ours["int8"]["decode_tok_s"] / decode,
                    prefill_ratio=ours["int8"]["prefill_tok_s"] / prefill,
                )


def main() -> None:
    os.environ["EXL_DEVICE"] = "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape and width, short runs")
    parser.add_argument("--bits", type=float, nargs="*", default=[4.0, 4.5], help="models; none: matrices only")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama", help="of the models")
    parser.add_argument("--family", nargs="*", default=[], help="mixtures of experts, of cpu_experts.py")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-matrices", action="store_true")
    parser.add_argument("--peer", nargs=3, metavar=("PYTHON", "SCRIPT", "WORKDIR"))
    parser.add_argument("--measure", nargs=2, metavar=("DIR", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.threads:
        threads.set_num_threads(args.threads)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    threads.pin()
    if args.measure:
        print(json.dumps(measure_model(Path(args.measure[0]), args.measure[1], 1.0 if args.quick else 6.0)))
        return
    roof = Roof()
    emit(case="roof", gb_s=roof.now() / 1e9, threads=threads.num_threads(), isa=threads.isa(), cores=os.cpu_count())
    bench_pool()
    if not args.no_matrices:
        bench_matrices(roof, args.quick)
    for family in args.family:
        from cpu_experts import bench_family  # matrix cases run with older versions of the package, too

        for line in bench_family(family, 4.0, (1, 8), 2.0 if args.quick else 20.0, roof.now):
            emit(case="experts", threads=threads.num_threads(), **line)
    del roof
    if allowed is not None:
        os.sched_setaffinity(0, allowed)  # what the processes of the models inherit
    bench_models(args)


if __name__ == "__main__":
    main()
