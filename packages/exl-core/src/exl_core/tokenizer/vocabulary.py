"""The bytes of each id, from the decoder in tokenizer.json, so that streams decode exactly."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ["byte_decoder"]

PieceToBytes = Callable[[str], bytes]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the 256 printable characters that byte-level BPE writes bytes as (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in printable]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


ALPHABET = _byte_level_alphabet()
TO_LATIN = dict.fromkeys(range(256), 65535) | {ord(char): byte for char, byte in ALPHABET.items()}
"""The alphabet's characters as those of Latin-1, whose bytes they stand for; other characters are none of Latin-1."""


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:  # an added token outside the alphabet is its own text
        return piece.encode("utf-8")


def byte_decoder(tokenizer_json: dict[str, Any]) -> PieceToBytes | None:
    """Return a function from a vocabulary piece to the bytes that it adds to a text.

    None for decoders that cannot be described so. Changes at the very start of a sequence (the stripped first space)
    are not considered.
    """
    decoder = tokenizer_json.get("decoder")
    if decoder is None:
        return None
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {s.get("type") for s in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            pattern = step.get("pattern", {})
            if "String" not in pattern:
                return None
            replacements.append((pattern["String"], step.get("content", "")))
        elif step["type"] == "Metaspace":
            replacements.append((step.get("replacement", "▁"), " "))
    has_bytes = "ByteFallback" in kinds

    def piece_to_bytes(piece: str) -> bytes:
        match = BYTE_TOKEN.fullmatch(piece) if has_bytes else None
        if match:
            return bytes([int(match.group(1), 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode("utf-8")

    return piece_to_bytes
