"""KL divergence and perplexity of conversions of a float folder, against that folder.

    python benchmarks/bench_convert_quality.py SRC [--text FILE ...] [--folder DIR ...] [--option="--bits 4.5" ...]

Prints a JSON line for each conversion and each `--folder`, another quantized folder of the same model. Weights alone
are compared: matmuls are exact, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Tokenizer

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 250
OPTIONS = [
    *(f"--bits {bits}" for bits in (3, 3.5, 4, 4.5, 5, 6)),
    "--bits 4.5 --fast",
    "--format gptq --bits 4",
    "--format gptq --bits 8",
]


def log_probabilities(folder: Path, windows: list[Tensor]) -> Iterator[Tensor]:
    """Yield the log-probabilities [n - 1, vocabulary] after each token of each window but its last."""
    config = ExLlamaV2Config(str(folder))
    config.cpu_matmul = "exact"
    model = ExLlamaV2(config)
    model.load()
    for ids in windows:
        yield log_softmax(model.forward(ids)[0, :-1, : config.vocab_size].double(), dim=-1)


def windows_of(folder: Path, files: list[Path]) -> list[Tensor]:
    """The ids of the files in windows [1, 250], each with a BOS in front."""
    tokenizer = ExLlamaV2Tokenizer(ExLlamaV2Config(str(folder)))
    bos = torch.tensor([[tokenizer.bos_token_id]])
    ids = torch.cat([tokenizer.encode(path.read_text(encoding="utf-8")) for path in files], dim=1)
    return [
        torch.cat([bos, part], dim=1) for part in torch.split(ids, WINDOW - 1, dim=1) if part.shape[1] == WINDOW - 1
    ]


def measure(folder: Path, reference: list[Tensor], windows: list[Tensor]) -> dict[str, Any]:
    """KL(reference || folder) in nats, the perplexity, and how often both choose the same token."""
    divergence, loss, same, count = 0.0, 0.0, 0, 0
    for found, wanted, ids in zip(log_probabilities(folder, windows), reference, windows, strict=True):
        divergence += kl_div(found, wanted, reduction="sum", log_target=True).item()
        loss += cross_entropy(found, ids[0, 1:], reduction="sum").item()
        same += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        count += len(found)
    return {
        "kl": round(divergence / count, 4),
        "perplexity": round(math.exp(loss / count), 3),
        "same_choice": round(same / count, 4),
        "tokens": count,
        "bench": "convert_quality",
        "date": str(date.today()),
    }


def main() -> None:
    """Convert SRC with each set of options and compare."""
    os.environ["EXL_DEVICE"] = "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", help="default: the programs of examples/")
    parser.add_argument("--folder", type=Path, nargs="*", default=[])
    parser.add_argument("--option", action="append", help="options of one conversion, as one text")
    args = parser.parse_args()
    windows = windows_of(args.source, args.text or sorted(ROOT.glob("examples/**/*.py")))
    reference = list(log_probabilities(args.source, windows))
    for folder in (args.source, *args.folder):
        print(json.dumps({"model": folder.name} | measure(folder, reference, windows)), flush=True)
    for options in args.option or OPTIONS:
        with tempfile.TemporaryDirectory() as target:
            command = [sys.executable, "-m", "exl_core.convert", str(args.source), target, *shlex.split(options)]
            subprocess.run(command, check=True, capture_output=True)
            print(json.dumps({"model": options} | measure(Path(target), reference, windows)), flush=True)


if __name__ == "__main__":
    main()
