"""Read tool calls from JSON, character by character; arguments are passed on as they arrive."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Collection
from typing import Any

from exl_serve.stream.events import AnswerEvent, ToolArgs, ToolBegin, ToolEnd

__all__ = ["SPACE", "CallReader", "Value", "call_id", "is_json", "no_constant"]

SPACE = " \t\r\n"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def call_id(request_id: str, choice: int, index: int, length: int | None = None) -> str:
    """Return the id of a call; equal requests get equal ids. `length`: number of letters and digits."""
    digest = hashlib.blake2b(f"{request_id} {choice} {index}".encode(), digest_size=15).digest()
    letters = base64.b32encode(digest).decode().lower()
    return f"call_{letters[:24]}" if length is None else letters[:length]


class CallReader:
    """Read the inside of one region: an object for a call, or with `listed` an array of them.

    `tools` are the names that a call may have, `names` and `arguments` the keys of a format. `ended` is true once the
    region's JSON is complete; `broken` once the text cannot be a call. Events that were returned before stay valid.
    """

    def __init__(
        self,
        choice: int,
        first_index: int,
        new_id: Callable[[int], str],
        tools: Collection[str],
        *,
        listed: bool,
        names: tuple[str, ...] = ("name",),
        arguments: tuple[str, ...] = ("arguments", "parameters"),
    ) -> None:
        self._choice, self._new_id, self._tools = choice, new_id, tools
        self._listed, self._names, self._arguments = listed, names, arguments
        self.index = first_index
        self.closed = 0
        self.ended = self.broken = self.took_closing = False
        #: whether a call was begun and not ended
        self.open = False
        self._unread: list[str] = []
        self._events: list[AnswerEvent] = []
        self._step = self._list_start if listed else self._object_start
        self._scan = Value()
        self._key = self._name = ""
        #: arguments that came before the name
        self._early: str | None = None
        self._streaming = False
        self._pending = ""
        self._said_arguments = False

    def feed(self, text: str) -> tuple[list[AnswerEvent], str]:
        """Return (events, text after the end of the region's JSON, or after the place where it is broken)."""
        for at, c in enumerate(text):
            if self.ended or self.broken:
                return self._flushed(), text[at:]
            if not self.open:
                self._unread.append(c)
            if not self._step(c):
                self.broken = True
                if not self.open:
                    self._unread.pop()
                return self._flushed(), text[at:]
        return self._flushed(), ""

    @property
    def unread(self) -> str:
        """The text since the last call's end that is part of no call."""
        return "".join(self._unread)

    def _flushed(self) -> list[AnswerEvent]:
        if self._pending:
            self._events.append(ToolArgs(self._choice, self.index, self._pending))
            self._pending = ""
        events, self._events = self._events, []
        return events

    def marker(self, spelled: str) -> list[AnswerEvent] | None:
        """Return None: this syntax has no special tokens."""
        return None

    def finish(self) -> list[AnswerEvent]:
        """Return no events: a JSON text shows its own end."""
        return []

    # Each step takes one character, and returns whether it is allowed there.

    def _list_start(self, c: str) -> bool:
        if c == "[":
            self._step = self._object_start
        return c == "[" or c in SPACE

    def _object_start(self, c: str) -> bool:
        if c == "{":
            self._name, self._early, self._streaming, self._said_arguments = "", None, False, False
            self._step = self._key_start
            return True
        if c == "]" and self._listed and not self.closed:  # an empty list
            self.ended = True
            return True
        return c in SPACE

    def _key_start(self, c: str) -> bool:
        if c == '"':
            self._scan = Value()
            self._scan.feed(c)
            self._step = self._in_key
            return True
        return c in SPACE

    def _in_key(self, c: str) -> bool:
        if self._scan.feed(c):
            self._key = str(_loads(self._scan.text))
            self._step = self._colon
        return True

    def _colon(self, c: str) -> bool:
        if c == ":":
            if self._key in self._arguments and (self._said_arguments or self._early is not None):
                return False  # arguments twice
            self._scan = Value()
            self._step = self._in_value
            self._streaming = False
        return c == ":" or c in SPACE

    def _in_value(self, c: str) -> bool:
        if self._scan.empty and c in SPACE:
            return True
        if self._scan.empty and self._key in self._arguments and self._name and c != '"':
            self._streaming = True
        if self._scan.bare and c in ",}" + SPACE:  # a number, true, false or null ends at what follows it
            return self._value_done() and self._after_value(c)
        done = self._scan.feed(c)
        if self._scan.wrong:
            return False
        if self._streaming:
            # Some models write line breaks into strings as they are.
            self._pending += json.dumps(c)[1:-1] if c < " " and self._scan.inside else c
            self._said_arguments = True
        return self._value_done() if done else True

    def _value_done(self) -> bool:
        self._step = self._after_value
        text = self._scan.text
        if self._key in self._names and not self._name:
            name = _loads(text)
            if not isinstance(name, str) or name not in self._tools:
                return False
            self._name, self.open = name, True
            self._unread.clear()
            self._events.append(ToolBegin(self._choice, self.index, self._new_id(self.index), name))
            if self._early is not None:
                self._pending, self._said_arguments = self._early, True
        elif self._streaming:
            # A call whose arguments are not JSON is not closed.
            return is_json(text)
        elif self._key in self._arguments:
            value = _loads(text)
            # Some models write the arguments' JSON as a string.
            said = _escaped((value.strip() or "{}") if isinstance(value, str) else text)
            if not is_json(said):
                return False
            if self._name:
                self._pending, self._said_arguments = said, True
            else:
                self._early = said
        return True

    def _after_value(self, c: str) -> bool:
        if c == ",":
            self._step = self._key_start
            return True
        if c == "}":
            if not self._name:
                return False
            if not self._said_arguments:
                self._pending = "{}"
            self._events += [ToolArgs(self._choice, self.index, self._pending)] if self._pending else []
            self._pending = ""
            self._events.append(ToolEnd(self._choice, self.index))
            self.index += 1
            self.closed += 1
            self._name, self.open = "", False
            if self._listed:
                self._step = self._after_object
            else:
                self.ended = True
            return True
        return c in SPACE

    def _after_object(self, c: str) -> bool:
        if c == "]":
            self.ended = True
            return True
        if c == ",":
            self._step = self._object_start
            return True
        return c in SPACE


class Value:
    """Read one JSON value, character by character, up to its end."""

    __slots__ = ("_depth", "_escaped", "_parts", "bare", "inside", "wrong")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._depth = 0
        self.inside = self._escaped = False
        #: a number or a word, which has no closing sign
        self.bare = self.wrong = False

    @property
    def empty(self) -> bool:
        """Whether no character was read."""
        return not self._parts

    @property
    def text(self) -> str:
        """The characters read so far."""
        return "".join(self._parts)

    def feed(self, c: str) -> bool:
        """Read a character. Returns whether the value is complete with it."""
        first = not self._parts
        self._parts.append(c)
        if self.inside:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self.inside = False
                return self._depth == 0
            return False
        if c == '"':
            self.inside = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            self.wrong = self._depth < 0
            return self._depth == 0
        elif first:
            self.bare = c.isalnum() or c == "-"
            self.wrong = not self.bare
        return False


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _escaped(text: str) -> str:
    """Return a JSON text whose strings have line breaks as escapes: some models write them as they are."""
    return _STRING.sub(lambda found: _CONTROL.sub(lambda c: json.dumps(c[0])[1:-1], found[0]), text)


def is_json(text: str) -> bool:
    """Whether a text is JSON that can be read, but for control characters in its strings. NaN is not JSON."""
    try:
        json.loads(text, strict=False, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def no_constant(word: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's reader takes."""
    raise ValueError(f"{word} is not JSON")
