"""Make the corpus as token shards, in parallel processes, while training already reads them.

    python shards.py TOKENIZER_DIR OUT_DIR --workers 14 --shards 140

A shard is an uint16 .npy of about 2.5 M tokens; shard i of a split depends on its number alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from corpus import document
from corpus.splits import Split
from tokenizers import Tokenizer

TOKENS_PER_SHARD = 2_500_000
_SEEDS = {"train": 1_000, "seed": 900_000_000, "combo": 950_000_000}


def shard_tokens(tokenizer: Tokenizer, split: Split, number: int, size: int, kinds: Sequence[str] = ()) -> np.ndarray:
    """Return shard `number` of the split: at least `size` tokens of whole documents, of these kinds in turn if any."""
    rng = random.Random(_SEEDS[split] + number)
    parts: list[np.ndarray] = []
    total = 0
    while total < size:
        batch = tokenizer.encode_batch_fast(
            [document(rng, split, rng.choice(kinds) if kinds else None) for _ in range(500)], add_special_tokens=False
        )
        parts += [np.asarray(e.ids, dtype=np.uint16) for e in batch]
        total = sum(map(len, parts[-500:])) + total
    return np.concatenate(parts)


_Job = tuple[str, str, Split, int, int, tuple[str, ...]]


def _work(job: _Job) -> str:
    tokenizer_file, folder, split, number, size, kinds = job
    tokenizer = Tokenizer.from_file(tokenizer_file)
    path = Path(folder) / f"{split}-{number:04d}.npy"
    if path.exists():
        return str(path)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.save(file, shard_tokens(tokenizer, split, number, size, kinds))
    partial.rename(path)
    return str(path)


def make(tokenizer_file: Path, folder: Path, workers: int, shards: int, size: int, kinds: tuple[str, ...] = ()) -> None:
    """Write one small shard of each held-out split, then the training shards."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[_Job] = [
        (str(tokenizer_file), str(folder), "seed", 0, min(size, 600_000), ()),
        (str(tokenizer_file), str(folder), "combo", 0, min(size, 600_000), ()),
    ]
    jobs += [(str(tokenizer_file), str(folder), "train", i, size, kinds) for i in range(shards)]
    # spawn: the trainer has CUDA and threads in it, which a fork would not survive.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(_work, jobs):
            pass


def main() -> None:
    """Make all shards."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--size", type=int, default=TOKENS_PER_SHARD)
    parser.add_argument("--kinds", nargs="*", default=[], help="draw documents from this list, e.g. chat chat story")
    a = parser.parse_args()
    make(a.tokenizer / "tokenizer.json", a.out, a.workers, a.shards, a.size, tuple(a.kinds))


if __name__ == "__main__":
    main()
