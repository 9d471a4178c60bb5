"""Time and peak memory of `exl convert` on this machine, for a float folder of a real shape with random weights.

    python benchmarks/bench_convert.py [--shape tinyllama] [--layers N] [--option="--bits 4.5" ...]

Prints a JSON line for each conversion, which runs in a separate process. The folder is read once before its time
counts, so that a cold disk does not count. `load` is the average number of runnable processes during the last minute,
the conversion included. Compare `processor_seconds` where other programs run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_random_model import SHAPES, WEIGHT_STD, Shape, llama_config, random_halves, write_tokenizer

from exl_kernels.safetensors_file import write_safetensors


def make_float_model(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Write a float16 folder of `shape` with normal weights, equal in all layers; return the number of weights.

    Each layer has a file, so memory holds one layer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.Generator(np.random.SFC64(seed))
    ones = torch.ones(shape.hidden, dtype=torch.float16)
    layer = {
        f"{part}.weight": random_halves(out_features, in_features, WEIGHT_STD, generator)
        for part, (in_features, out_features) in shape.linears().items()
    }
    layer |= {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
    for number in range(shape.layers):
        named = {f"model.layers.{number}.{part}": tensor for part, tensor in layer.items()}
        write_safetensors(folder / f"layer-{number:02}.safetensors", named)
    weights = shape.layers * sum(tensor.numel() for tensor in layer.values())
    for name, std in (("model.embed_tokens", 1.0), ("lm_head", WEIGHT_STD)):
        tensors = {f"{name}.weight": random_halves(shape.vocab, shape.hidden, std, generator)}
        write_safetensors(folder / f"{name}.safetensors", tensors)
        weights += shape.vocab * shape.hidden
    write_safetensors(folder / "norm.safetensors", {"model.norm.weight": ones})
    (folder / "config.json").write_text(json.dumps(llama_config(shape, 4096, rope_theta=10000.0)), encoding="utf-8")
    write_tokenizer(folder, shape.vocab)
    return weights + shape.hidden


def processor() -> str:
    """The processor's model as Linux names it, or the machine's architecture."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return platform.machine()


def commit() -> str | None:
    """The commit of the checkout, or None outside of one."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = ["git", "rev-parse", "--short=8", "HEAD"]
        return subprocess.check_output(done, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL).strip()
    return None


def quantized_weights(shape: Shape) -> int:
    """The number of weights that a conversion with a quantized head rounds."""
    layer = sum(inputs * outputs for inputs, outputs in shape.linears().values())
    return shape.layers * layer + shape.hidden * shape.vocab


def own_bytes(process: int) -> int:
    """The memory of a process without pages of files, which the kernel can drop."""
    with contextlib.suppress(OSError, StopIteration):  # it may end meanwhile
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
    return 0


def measure(source: Path, target: Path, options: list[str]) -> dict[str, Any]:
    """Convert `source` once in a process of its own; its memory is looked at 50 times a second."""
    for file in source.glob("*.safetensors"):
        file.read_bytes()
    begin = time.perf_counter()
    command = [sys.executable, "-m", "exl_generate", "convert", str(source), str(target), *options, "--json"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        peak, ended = 0, 0
        while not ended:
            time.sleep(0.02)
            peak = max(peak, own_bytes(process.pid))
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        if process.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with status {process.returncode}")
        output.seek(0)
        report = json.load(output)
    return {
        "options": shlex.join(options),
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(seconds, 1),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gib": round(peak / 2**30, 2),
        "bytes": report["bytes"],
        "bits_per_weight": round(report["bits_per_weight"], 3),
    }


def main() -> None:
    """Make the folder, convert it with each set of options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--option", action="append", help="options of one conversion, as one text")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.layers:
        shape = replace(shape, layers=args.layers)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "float", Path(folder) / "quantized"
        weights = make_float_model(source, shape)
        for options in args.option or ["--bits 4.5", "--bits 4", "--bits 4.5 --fast", "--format gptq --bits 4"]:
            figures = measure(source, target, shlex.split(options))
            shutil.rmtree(target)
            line = {
                "bench": "convert",
                "date": str(date.today()),
                "machine": processor(),
                "commit": commit(),
                "shape": args.shape,
                "layers": shape.layers,
                "weights": weights,
                "quantized_weights": quantized_weights(shape),
                "cores": os.cpu_count(),
            }
            print(json.dumps(line | figures), flush=True)


if __name__ == "__main__":
    main()
