"""A filter that lets a model write one date that exists, as YYYY-MM-DD.

It is a `StateFilter`: the state is the text so far, and four functions of it say what may follow. Copies, rewinding,
masks, stop tokens and the checks of arguments come from there.
"""

from __future__ import annotations

import calendar
from typing import Any

from exl_filters import Choice, StateFilter, bits

__all__ = ["IsoDateFilter", "possible", "whole"]
__exl_filters_api__ = (1, 0)

SHAPE = b"dddd-dd-dd"
DIGITS = b"0123456789"


def possible(text: bytes) -> bool:
    """Whether `text` is the beginning of a date that exists."""
    if len(text) > len(SHAPE):
        return False
    if any((c not in DIGITS) if s == ord("d") else (c != s) for c, s in zip(text, SHAPE, strict=False)):
        return False
    if text[:4] == b"0000":
        return False
    month = text[5:7]
    if month and not any(b"%02d" % m == month or (b"%02d" % m).startswith(month) for m in range(1, 13)):
        return False
    day = text[8:10]
    if not day:
        return True
    last = calendar.monthrange(int(text[:4]), int(month))[1]
    return any((b"%02d" % d).startswith(day) for d in range(1, last + 1))


def whole(text: bytes) -> bool:
    """Whether `text` is a date."""
    return len(text) == len(SHAPE) and possible(text)


# (text so far, text still to be regenerated: token healing)
_State = tuple[bytes, bytes]


class IsoDateFilter(StateFilter[_State]):
    """One date that exists, as YYYY-MM-DD."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        v = self.vocabulary
        # Only tokens of digits and dashes can ever fit: look through those few at each step, not through all.
        self._few = [
            (i, v.bytes_of(i)) for i in range(v.size) if v.bytes_of(i) and not v.bytes_of(i).strip(b"-" + DIGITS)
        ]
        self.begin("")

    def _start(self, prefix: bytes) -> _State:
        return b"", prefix

    def _choice(self, state: _State) -> Choice:
        text, pending = state
        if pending:
            ids = [i for i, rest in self.vocabulary.tokens_starting_with(pending) if possible(rest)]
            ids = ids or [i for n in range(1, len(pending)) for i in self.vocabulary.ids_of(pending[:n])]
            ends = {i for i in ids if whole(self.vocabulary.bytes_of(i)[len(pending) :])}
        else:
            ids = [i for i, raw in self._few if possible(text + raw)]
            ends = {i for i in ids if whole(text + self.vocabulary.bytes_of(i))}
        return Choice(bits.from_ids(ids, self.vocabulary.size), frozenset(ends))

    def _advance(self, state: _State, token: int) -> _State:
        text, pending = state
        raw = self.vocabulary.bytes_of(token)
        return text + raw[len(pending) :], pending[len(raw) :]

    def _whole(self, state: _State) -> bool:
        return whole(state[0]) and not state[1]

    def spec(self) -> dict[str, Any]:
        return {"type": "iso-date"}
