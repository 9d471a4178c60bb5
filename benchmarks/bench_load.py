"""Times loading a model folder and measures what it costs in memory; one JSON line.

    python benchmarks/bench_load.py [MODEL_DIR] [--gigabytes 1.0] [--bits 4.5] [--runs 3] [--prompt 0] [--cold] [--gpu]

Without MODEL_DIR a random model of that size is written to a temporary folder first (by another process, so that its
memory does not count). Each run is a fresh process with the file in the page cache. The figures are medians over the
runs; `read_s` is the time to merely read the file into a buffer in the same state, the floor for any loader. With
--prompt N the peak after a prompt of N tokens through an FP16 cache is reported too.

With --cold the file is taken out of the page cache before each reading and each load, so that `read_s` is the disk's
sequential rate (one stream, 16 MiB at a time; `direct_s` the same past the page cache) and `of_read_rate` how much of
it loading reaches: the target is 0.8, and less than 1.2 GB of host memory beyond the weights.

With --gpu the model is loaded on the first GPU: until all copies are made, without the time to start CUDA. `--gpu
--gigabytes 5` is a model of 8 billion weights at 4 bits; the target is 2.5 s. `pcie_gb_s` is the rate of copies from
pinned memory in the same process, `of_pcie` how much of it loading reaches.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def read_all(folder: Path) -> float:
    """Seconds to read all weight files once through a 16 MiB buffer; leaves them in the page cache."""
    buffer = bytearray(16 << 20)
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    return time.perf_counter() - start


def evict(folder: Path) -> None:
    """Take the weight files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_direct(folder: Path) -> float:
    """Seconds to read all weight files past the page cache, one stream, 16 MiB at a time."""
    buffer = mmap.mmap(-1, 16 << 20)
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        offset, size = 0, os.fstat(descriptor).st_size
        while offset < size:
            offset += os.preadv(descriptor, [buffer], offset) or size
        os.close(descriptor)
    return time.perf_counter() - start


def rss_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pinned_copy_rate() -> float:
    """Return the bytes a second of copies from pinned memory to the GPU, the best of a few."""
    import torch

    size = 256 << 20
    source, target = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8).cuda()
    rates = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - start))
    return max(rates)


def measure(folder: Path, prompt: int, cold: bool) -> dict[str, Any]:
    """Load once in this process."""
    import torch

    from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config

    if cold:
        direct_s = read_direct(folder)
        evict(folder)
        read_s = read_all(folder)
        evict(folder)
    else:
        direct_s = 0.0
        read_all(folder)
        read_s = min(read_all(folder) for _ in range(2))
    gpu = os.environ["EXL_DEVICE"] != "cpu"
    if gpu:
        torch.zeros(1, device="cuda").item()
    before = rss_bytes("VmRSS")
    start = time.perf_counter()
    config = ExLlamaV2Config(folder)
    prepared = time.perf_counter()
    model = ExLlamaV2(config)
    model.load()
    if gpu:
        torch.cuda.synchronize()
    end = time.perf_counter()
    assert config.checkpoint is not None
    figures = {
        "model_bytes": sum(t.nbytes for t in config.checkpoint.tensors.values()),
        "weight_bytes": model.weight_bytes(),
        "load_s": end - start,
        "prepare_s": prepared - start,
        "read_s": read_s,
        "direct_s": direct_s,
        "rss_before": before,
        "rss_after": rss_bytes("VmRSS"),
        "rss_peak": rss_bytes("VmHWM"),
        "pcie": pinned_copy_rate() if gpu else 0.0,
    }
    if prompt:
        cache = ExLlamaV2Cache(model, max_seq_len=prompt)
        model.forward(torch.randint(0, config.vocab_size, (1, prompt)), cache, last_id_only=True)
    return {**figures, "rss_peak_prompt": rss_bytes("VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shape", help="of the random model's layers; default 8b with --gpu, else tinyllama")
    parser.add_argument("--bits", type=float, default=4.5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="take the file out of the page cache before each step")
    parser.add_argument("--gpu", action="store_true", help="load on the first GPU")
    parser.add_argument("--one", action="store_true", help="measure in this process (what the runs do)")
    args = parser.parse_args()
    if args.gpu:
        from gpu_timing import environment
    os.environ["EXL_DEVICE"] = "cuda:0" if args.gpu else "cpu"
    if args.one:
        print(json.dumps(measure(args.model, args.prompt, args.cold)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "model"
        if args.model is None:
            shape = args.shape or ("8b" if args.gpu else "tinyllama")
            size = ["--shape", shape, "--gigabytes", str(args.gigabytes), "--bits", str(args.bits)]
            command = [sys.executable, str(HERE / "make_random_model.py"), str(folder), *size]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, __file__, str(folder), "--one", "--prompt", str(args.prompt)]
        command += [option for option, given in (("--cold", args.cold), ("--gpu", args.gpu)) if given]
        runs = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(args.runs)
        ]
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    model_bytes = middle["model_bytes"]
    print(
        json.dumps(
            {
                "bench": "load",
                **(environment() if args.gpu else {}),
                "model_gb": round(model_bytes / 1e9, 3),
                "load_s": round(middle["load_s"], 3),
                "load_best_s": round(min(run["load_s"] for run in runs), 3),
                "read_s": round(middle["read_s"], 3),
                "direct_s": round(middle["direct_s"], 3),
                "cold": args.cold,
                "of_read_rate": round(middle["read_s"] / middle["load_s"], 3),
                "peak_rss_beyond_weights_gb": round((middle["rss_peak"] - middle["weight_bytes"]) / 1e9, 3),
                "gb_per_s": round(model_bytes / middle["load_s"] / 1e9, 2),
                "pcie_gb_s": round(middle["pcie"] / 1e9, 2) if args.gpu else None,
                "of_pcie": round(model_bytes / middle["load_s"] / middle["pcie"], 3) if args.gpu else None,
                "peak_rss_over_model": round((middle["rss_peak"] - middle["rss_before"]) / model_bytes, 3),
                "held_rss_over_model": round((middle["rss_after"] - middle["rss_before"]) / model_bytes, 3),
                "peak_rss_with_prompt_over_model": round(
                    (middle["rss_peak_prompt"] - middle["rss_before"]) / model_bytes, 3
                ),
                "rss_before_mb": round(middle["rss_before"] / 1e6),
                "cores": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
