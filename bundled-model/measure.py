"""Held-out loss of a model folder through exl_core, as it will run: FP16 or EXL2, exact or int8 matmuls.

    python measure.py MODEL_DIR... [--rows 48] [--compute exact int8]

One JSON line a measurement: mean cross entropy in nats a token over documents of both held-out splits.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from shards import shard_tokens
from tokenizers import Tokenizer
from torch.nn import functional

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config

BOS = 1


def held_out_rows(folder: Path, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return token rows [rows, length + 1] of each held-out split, every row from a document's start."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    result = {}
    for split in ("seed", "combo"):
        tokens = torch.from_numpy(shard_tokens(tokenizer, split, 0, rows * length * 2).astype("int64"))
        starts = (tokens[: -length - 1] == BOS).nonzero().flatten()
        starts = starts[torch.linspace(0, starts.numel() - 1, rows).long()]
        result[split] = tokens[starts[:, None] + torch.arange(length + 1)]
    return result


def loss(folder: Path, compute: str, rows: torch.Tensor) -> float:
    """Return the mean cross entropy of the rows under the model."""
    config = ExLlamaV2Config(str(folder))
    config.cpu_matmul = compute
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, batch_size=1, max_seq_len=1024, lazy=True)
    model.load_autosplit(cache)
    total, count = 0.0, 0
    for row in rows:
        cache.current_seq_len = 0
        logits = model.forward(row[None, :-1], cache)
        total += float(functional.cross_entropy(logits[0, :, : config.vocab_size].float(), row[1:], reduction="sum"))
        count += row.numel() - 1
    return total / count


def main() -> None:
    """Measure each folder."""
    os.environ["EXL_DEVICE"] = "cpu"  # exact and int8 are arithmetics of the CPU
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--compute", nargs="+", default=["exact", "int8"])
    a = parser.parse_args()
    batches = held_out_rows(a.folders[0], a.rows, a.length)
    for folder in a.folders:
        for compute in a.compute:
            for split, rows in batches.items():
                value = round(loss(folder, compute, rows), 4)
                print(
                    json.dumps({"folder": folder.name, "compute": compute, "split": split, "nats": value}), flush=True
                )


if __name__ == "__main__":
    main()
