"""Conversations of untrusted users as token ids: what they spell stays text.

A template's own markers become special tokens, but a marker that a user or a tool wrote into a message must not forge
a turn. Where such a spelling occurs it is replaced before rendering, and put back as ordinary text in the prompt.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ChatTemplateError
from .text import TextTokenizer

__all__ = ["conversation_ids"]

UNTRUSTED = ("user", "tool", "function", "ipython")
"""Roles whose content is others' text. The model's own earlier answers keep their markers: templates look for them."""


def conversation_ids(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    parse_special: bool = False,
    **options: Any,
) -> tuple[str, list[int]]:
    """The rendered prompt and its ids; `options` are those of `apply_chat_template`.

    parse_special: the text of special tokens in any message becomes these tokens. Raises ChatTemplateError, also where
    the template alters or drops text that has to stay text.
    """
    spellings = [] if parse_special else sorted(filter(None, tokenizer.extended_piece_to_id), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
    if pattern is None or not any(_spells(pattern, message) for message in messages):
        text = tokenizer.apply_chat_template(messages, **options)
        return text, tokenizer.encode_ids(text, special=True)
    found: list[str] = []
    nonce = "".join(chr(0xE100 + byte) for byte in secrets.token_bytes(8))

    def hide(match: re.Match[str]) -> str:
        found.append(match.group())
        return f"\ue000{nonce}{len(found) - 1}\ue001"

    hidden = [_replaced(pattern, hide, message) for message in messages]
    rendered = tokenizer.apply_chat_template(hidden, **options)
    parts = re.split(f"\ue000{nonce}(\\d+)\ue001", rendered)
    if {int(number) for number in parts[1::2]} != set(range(len(found))) or nonce in "".join(parts[::2]):
        raise ChatTemplateError(
            f"a message holds the text of a special token ({found[0]!r}), and the chat template does not keep such "
            "text as it is: leave it out of the message"
        )
    pieces = [(found[int(part)], False) if at % 2 else (part, True) for at, part in enumerate(parts)]
    return "".join(text for text, _ in pieces), tokenizer.encode_parts(pieces)


def _spells(pattern: re.Pattern[str], message: Mapping[str, Any]) -> bool:
    return message.get("role") in UNTRUSTED and any(map(pattern.search, _texts(message.get("content"))))


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list | tuple) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _replaced(pattern: re.Pattern[str], hide: Any, message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message.get("role") not in UNTRUSTED or content is None:
        return message
    if isinstance(content, str):
        return {**message, "content": pattern.sub(hide, content)}
    if not isinstance(content, list | tuple):
        return message
    parts = [
        {**part, "text": pattern.sub(hide, part["text"])}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    return {**message, "content": parts}
