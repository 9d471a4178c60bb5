"""Texts and grammars, for tests."""

from __future__ import annotations

from typing import Any

from exl_core.tokenizer import TextTokenizer

__all__ = ["takes"]


def takes(grammar: Any, tokenizer: TextTokenizer, text: str, *, whole: bool = True) -> bool:
    """Whether the grammar takes the text; `whole`: and is complete with it."""
    one = grammar.clone()
    one.begin("")
    for token in tokenizer.encode_ids(text):
        allowed, _ = one.next()
        if allowed is not None and token not in allowed:
            return False
        one.feed(token)
    return not whole or bool(one.is_complete())
