"""Reasoning as an opaque text, which a client sends back with the next request of a conversation."""

from __future__ import annotations

import base64

__all__ = ["carried", "carried_text"]

_MARK = "exl1:"
"""The beginning of each, by which the server knows those that it has made."""


def carried(text: str) -> str:
    """Return reasoning in the form of `encrypted_content`. It is not secret: the client has the text as well."""
    return _MARK + base64.b64encode(text.encode()).decode()


def carried_text(value: str) -> str:
    """Return the reasoning that `carried` has packed; an empty text for what another server has encrypted."""
    if not value.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
