"""Time and peak memory of `exl convert` on this machine, for a float folder of a real shape with random weights.

    python benchmarks/bench_convert.py [--shape tinyllama] [--layers N] [--option="--bits 4.5" ...]

Prints a JSON line for each conversion, which runs in a process of its own. The folder is read once before its time
counts: the figures are those of the computation, not of a cold disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
    """Write a float16 folder of `shape` with normal weights; return the number of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.Generator(np.random.SFC64(seed))
    tensors = {
        "model.embed_tokens.weight": random_halves(shape.vocab, shape.hidden, 1.0, generator),
        "lm_head.weight": random_halves(shape.vocab, shape.hidden, WEIGHT_STD, generator),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.float16),
    }
    for layer in range(shape.layers):
        key = f"model.layers.{layer}"
        for part, (in_features, out_features) in shape.linears().items():
            tensors[f"{key}.{part}.weight"] = random_halves(out_features, in_features, WEIGHT_STD, generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{key}.{norm}.weight"] = torch.ones(shape.hidden, dtype=torch.float16)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(llama_config(shape, 4096, rope_theta=10000.0)), encoding="utf-8")
    write_tokenizer(folder, shape.vocab)
    return sum(tensor.numel() for tensor in tensors.values())


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
    (source / "model.safetensors").read_bytes()
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
                "shape": args.shape,
                "layers": shape.layers,
                "weights": weights,
                "quantized_weights": quantized_weights(shape),
                "cores": os.cpu_count(),
            }
            print(json.dumps(line | figures), flush=True)


if __name__ == "__main__":
    main()
