"""Train the two small real vocabularies that the law kit ships: byte-level BPE, and unigram with byte fallback.

    uv run python scripts/filter_vocabularies.py

Text: the bundled models' corpus (ours), and JSON made of it. The unigram trainer does not repeat itself exactly, so the
files are committed and not made anew without need.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "packages" / "exl-filters" / "src" / "exl_filters" / "testing" / "data"
SIZE = 2000
SPECIALS = ["<unk>", "<s>", "</s>", "<pad>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]

sys.path.insert(0, str(ROOT / "bundled-model"))


def texts(count: int = 3000) -> Iterator[str]:
    from corpus import SPECIALS as MARKS
    from corpus import document

    rng = random.Random(1)
    for index in range(count):
        text = document(rng, "train")
        for mark in MARKS:
            text = text.replace(mark, "\n")
        yield text
        if index % 4 == 0:
            words = text.split()[:6]
            yield json.dumps({"name": words, "n": index, "ok": True, "none": None}, indent=2 if index % 8 else None)


def bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def unigram() -> Tokenizer:
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=SIZE - len(BYTES) - len(SPECIALS), show_progress=False)
    trained.train_from_iterator(texts(), trainer)
    scored = json.loads(trained.to_str())["model"]["vocab"]
    lowest = min(score for _, score in scored)
    pieces = [(name, 0.0) for name in SPECIALS] + [(name, lowest - 5) for name in BYTES]
    pieces += [(name, round(score, 4)) for name, score in scored if name not in SPECIALS]
    tokenizer = Tokenizer(models.Unigram(pieces[:SIZE], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return tokenizer


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    for name, make in (("bpe", bpe), ("unigram", unigram)):
        (TARGET / f"{name}.json").write_text(make().to_str() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
