"""Decode steps with adapters and plain ones, on a GPU: JSON lines.

    python benchmarks/bench_lora.py [--shape tinyllama] [--rank 16] [--layers 8] [--batch 1 --batch 32] [--apart]

`same`: all rows have one adapter; `mixed`: four adapters and none in turn. `share_of_plain` is the speed divided by
that of steps without adapters in the same run, and `us_a_layer` the time that adapters add to a layer. With `--apart`
the cases run again as the modules' own passes, `apart`. Random weights; adapters of every projection.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from gpu_timing import environment
from make_random_model import SHAPES, Shape, make_model

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, PagedParams
from exl_kernels.safetensors_file import write_safetensors

STEPS, PAST = 48, 128


def make_adapter(folder: Path, shape: Shape, rank: int, seed: int) -> Path:
    """An adapter of every projection, of random values."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for part, (inputs, outputs) in shape.linears().items():
            key = f"base_model.model.model.layers.{layer}.{part}"
            tensors[f"{key}.lora_A.weight"] = (torch.randn(rank, inputs, generator=generator) * 0.01).half()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(outputs, rank, generator=generator) * 0.01).half()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def seconds(model: ExLlamaV2, batch: int, rows: list[list[ExLlamaV2Lora]]) -> float:
    """Return the seconds of a step with one token for each sequence."""
    cache = ExLlamaV2Cache(model, max_seq_len=batch * 256)
    table = torch.arange(batch, dtype=torch.int32)[:, None]
    params = PagedParams(batch, table, torch.full((batch,), PAST, dtype=torch.int32), PAST)
    ids = torch.arange(batch)[:, None]
    for count in (5, STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            model.forward_chunk(ids, cache, attn_params=params, row_loras=rows)
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) / count
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--apart", action="store_true", help="also as the modules' own passes")
    args = parser.parse_args()
    shape = replace(SHAPES[args.shape], layers=args.layers or SHAPES[args.shape].layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", shape, 4.0)
        model = ExLlamaV2(ExLlamaV2Config(folder / "model"))
        model.load()
        adapters = [
            ExLlamaV2Lora.from_directory(model, make_adapter(folder / str(seed), shape, args.rank, seed))
            for seed in range(4)
        ]
    for batch in args.batch or (1, 8, 32):
        plain: float | None = None
        sets: list[list[ExLlamaV2Lora]] = [[], *([one] for one in adapters)]
        cases: list[tuple[str, bool, list[list[ExLlamaV2Lora]]]] = [
            ("plain", True, [[]] * batch),
            ("same", True, [[adapters[0]]] * batch),
            ("mixed", True, [sets[(row + 1) % 5] for row in range(batch)]),
        ]
        if args.apart:
            cases += [(f"{case} apart", False, rows) for case, _, rows in cases[1:]]
        for case, joined, rows in cases:
            os.environ["EXL_DECODE_JOINED_ADAPTERS"] = str(int(joined))
            model.decode.forget_adapters()
            taken = seconds(model, batch, rows)
            plain = plain or taken
            line = {"bench": "lora", **environment(), "shape": args.shape, "layers": shape.layers, "bpw": "4.0"}
            line |= {"rank": args.rank, "case": case, "batch": batch, "us": round(taken * 1e6, 1)}
            line |= {"tok_s": round(batch / taken, 1), "share_of_plain": round(plain / taken, 3)}
            line |= {"us_a_layer": round((taken - plain) * 1e6 / shape.layers, 2), "eager": model.decode.reason}
            print(json.dumps(line))


if __name__ == "__main__":
    main()
