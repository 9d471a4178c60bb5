"""The corpus of the bundled models: documents of a small world, made from templates without outside data.

`document(rng, split)` returns one document as a list of pieces; a piece is text or the name of a special token.
"""

from __future__ import annotations

import random

from . import chat, prose, records, stories
from .splits import Split

BOS, EOS, END = "<s>", "</s>", "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
#: Special tokens in the order of their ids.
SPECIALS = ("<unk>", BOS, EOS, "<pad>", "<|system|>", "<|user|>", "<|assistant|>", END)
#: kind of document -> share of documents.
SHARES = {"story": 0.37, "chat": 0.48, "record": 0.07, "prose": 0.08}


def document(rng: random.Random, split: Split, kind: str | None = None) -> str:
    """Return one document with its special tokens written out, from `<s>` to `</s>`."""
    kind = kind or rng.choices(list(SHARES), list(SHARES.values()))[0]
    if kind == "chat":
        messages = chat.conversation(rng, split)
        return BOS + "".join(f"{ROLE_TOKENS[role]}{text}{END}" for role, text in messages) + EOS
    maker = {"story": stories.plain, "record": records.plain, "prose": prose.plain}[kind]
    return BOS + maker(rng, split) + EOS
