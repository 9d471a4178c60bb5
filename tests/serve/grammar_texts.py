"""A tool, texts and grammars, for tests."""

from __future__ import annotations

from typing import Any

from exl_core.tokenizer import TextTokenizer
from exl_serve.stream.family import ToolSpec

__all__ = ["LOOK", "takes"]

LOOK = ToolSpec(
    "look",
    "",
    {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
)


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
