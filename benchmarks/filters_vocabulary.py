"""A byte-level BPE vocabulary of any size for benchmarks, trained on the Python and Markdown text of this machine."""

from __future__ import annotations

import json
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIALS = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
# More text than this makes no better words for a benchmark, only a longer training.
MAX_CHARACTERS = 120_000_000


def texts() -> Iterator[str]:
    """The standard library's and the installed packages' .py and .md files, in a fixed order."""
    left = MAX_CHARACTERS
    folders = {Path(json.__file__).parents[1], Path(sysconfig.get_paths()["purelib"])}
    for folder in sorted(folders):
        for path in sorted([*folder.rglob("*.md"), *folder.rglob("*.py")]):
            text = path.read_text(encoding="utf-8", errors="ignore")
            left -= len(text)
            if left < 0:
                return
            yield text


def trained_tokenizer(size: int) -> Any:
    """A `tokenizers.Tokenizer` of exactly `size` entries, 5 of them special.

    Trained once (20 s at 128,000) and kept in the temporary folder.
    """
    import tokenizers

    kept = Path(tempfile.gettempdir()) / f"exl-bench-bpe-{size}.json"
    if not kept.exists():
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=SPECIALS,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts(), trainer)
        part = kept.with_suffix(".part")
        tokenizer.save(str(part))
        part.rename(kept)
    return tokenizers.Tokenizer.from_file(str(kept))
