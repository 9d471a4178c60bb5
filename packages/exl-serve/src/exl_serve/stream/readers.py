"""Read tool calls whose syntax is not one JSON value: a name and JSON, tagged parameters, Python calls.

Each reader gets the text inside one region, in any pieces, and passes arguments on as JSON as they arrive.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exl_serve.stream.calls import SPACE, Value, is_json, no_constant
from exl_serve.stream.events import AnswerEvent, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.families.table import Format, Named, Tags
from exl_serve.stream.family import ToolSpec

__all__ = ["NamedReader", "PythonReader", "TaggedReader", "value_kind"]

LONGEST_NAME = 256


def value_kind(schema: Any) -> str:
    """Return the form of a parameter in a tagged call: "string" raw, "optional" raw or null, "json" as JSON."""
    if not isinstance(schema, Mapping):
        return "json"
    kinds = schema.get("type")
    if kinds == "string":
        return "string"
    plain = {key for key in schema if key not in ("title", "description", "default", "examples")}
    if plain == {"type"} and isinstance(kinds, list) and set(kinds) == {"string", "null"}:
        return "optional"
    either = schema.get("anyOf")
    if plain == {"anyOf"} and isinstance(either, list) and [one for one in either if one == {"type": "string"}]:
        return "optional" if all(one in ({"type": "string"}, {"type": "null"}) for one in either) else "json"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kinds is None and isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return "string"
    return "json"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Reader:
    """The common part of all readers: numbers, names and ends of calls."""

    def __init__(
        self,
        choice: int,
        first_index: int,
        new_id: Callable[[int], str],
        tools: Sequence[ToolSpec],
        form: Format,
        special: Mapping[str, int],
    ) -> None:
        self._choice, self._new_id, self._form, self._special = choice, new_id, form, special
        self._tools = {tool.name: tool.parameters for tool in tools}
        self.index = first_index
        self.closed = 0
        self.ended = self.broken = self.took_closing = False
        self.open = False
        self._unread: list[str] = []
        self._events: list[AnswerEvent] = []
        self._pending: list[str] = []

    def _begin(self, name: str) -> bool:
        if name not in self._tools:
            return False
        self._events.append(ToolBegin(self._choice, self.index, self._new_id(self.index), name))
        self.open = True
        self._unread.clear()
        return True

    @property
    def unread(self) -> str:
        """The text since the last call's end that is part of no call."""
        return "".join(self._unread)

    def _flush(self) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        if text:
            self._events.append(ToolArgs(self._choice, self.index, text))

    def _end(self) -> None:
        self._flush()
        self._events.append(ToolEnd(self._choice, self.index))
        self.index += 1
        self.closed += 1
        self.open = False
        self._unread.clear()

    def _taken(self) -> list[AnswerEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def marker(self, spelled: str) -> list[AnswerEvent] | None:
        """Read a special token inside the region; returns None where it is not part of this syntax."""
        return None

    def finish(self) -> list[AnswerEvent]:
        """End the answer: a call that needs only the region's end is closed."""
        return []


class _MarkedReader(_Reader):
    """A reader whose states each end at one of a few markers: texts or special tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._state = "before"
        self._held = ""
        self._name = ""

    def _wanted(self) -> Sequence[str]:
        """Return the markers that may come in this state."""
        raise NotImplementedError

    def _text(self, text: str) -> bool:
        """Read text of this state, in pieces; returns whether it is allowed there."""
        raise NotImplementedError

    def _reached(self, marker: str) -> bool:
        """Complete the state's text at a marker; returns whether it is allowed."""
        raise NotImplementedError

    def feed(self, text: str) -> tuple[list[AnswerEvent], str]:
        """Return (events, text after the end of the region's calls, or after the place where they are broken)."""
        text = self._held + text
        self._held = ""
        at = 0
        while not (self.ended or self.broken) and at < len(text):
            if self._state == "json":
                at = self._json(text, at)
                continue
            found = [(text.find(one, at), one) for one in self._wanted() if one and one not in self._special]
            found = [(where, one) for where, one in found if where >= 0]
            if found:
                where, one = min(found, key=lambda pair: (pair[0], -len(pair[1])))
                if not self._text(text[at:where]):
                    return self._broken(text[at:])
                self._pass(text[at : where + len(one)])
                self.broken = not self._reached(one)
                at = where + len(one)
                continue
            keep = self._keep(text, at)
            if not self._text(text[at : len(text) - keep]):
                return self._broken(text[at:])
            self._pass(text[at : len(text) - keep])
            self._held = text[len(text) - keep :]
            return self._taken(), ""
        return self._taken(), text[at:]

    def _broken(self, text: str) -> tuple[list[AnswerEvent], str]:
        """Handle text that is not allowed here: it is not part of the calls, wherever it was cut."""
        self.broken = True
        # The spaces before it, in an open call, are part of neither.
        return self._taken(), text.lstrip() if self.open else text

    def _pass(self, text: str) -> None:
        if not self.open:
            self._unread.append(text)

    @property
    def unread(self) -> str:
        """The text since the last call's end that is part of no call."""
        return super().unread + self._held

    def _json(self, text: str, at: int) -> int:
        raise NotImplementedError

    def _keep(self, text: str, at: int) -> int:
        """Return the number of characters at the end that may begin a marker."""
        most = 0
        for one in self._wanted():
            if one and one not in self._special:
                for size in range(min(len(one) - 1, len(text) - at), most, -1):
                    if text.endswith(one[:size]):
                        most = size
                        break
        return most

    def marker(self, spelled: str) -> list[AnswerEvent] | None:
        if spelled not in self._wanted():
            return None
        held, self._held = self._held, ""
        self._pass(held)
        self.broken = not (self._text(held) and self._reached(spelled))
        return self._taken()

    def _name_piece(self, text: str) -> bool:
        self._name += text
        return len(self._name) <= LONGEST_NAME


class NamedReader(_MarkedReader):
    """Read NAME, a marker, and the arguments as JSON, by the format's `Named`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._form.inside, Named)
        self._inside: Named = self._form.inside
        self._state = "before" if self._inside.begin else "name"
        self._scan = Value()
        #: the call's id, which is not passed on: ids of this server are unique in an answer
        self._ident = ""

    def _closing(self) -> str:
        return self._form.call[1] if self._form.call is not None else ""

    def _wanted(self) -> Sequence[str]:
        inside = self._inside
        if self._state == "before":
            return (inside.begin, self._closing())
        if self._state in ("word", "name"):
            return (inside.word_end,) if self._state == "word" else (inside.separator, inside.ident)
        if self._state == "ident":
            return (inside.separator,)
        return (inside.end,) if self._state == "tail" else ()

    def _text(self, text: str) -> bool:
        if self._state in ("word", "name"):
            return self._name_piece(text)
        if self._state == "ident":
            self._ident += text
            return len(self._ident) <= LONGEST_NAME
        return not text.strip() or (self._state == "tail" and set(text) <= {"`", "\n", " "})

    def _reached(self, marker: str) -> bool:
        inside = self._inside
        if self._state == "before" and marker != inside.begin:
            self.ended = self.took_closing = True
        elif self._state == "before":
            self._state, self._name = ("word" if inside.word_end else "name"), ""
        elif self._state == "word":
            self._state, self._name = "name", ""
        elif self._state == "name" and marker == inside.ident:
            self._state, self._ident = "ident", ""
        elif self._state in ("name", "ident"):
            if not self._begin(self._name.strip()):
                return False
            self._state, self._scan = "json", Value()
        else:
            self._state = "before"
        return True

    def _json(self, text: str, at: int) -> int:
        while at < len(text):
            c = text[at]
            at += 1
            if self._scan.empty and c in SPACE:
                continue
            if self._scan.empty and c != "{":
                self.broken = True
                return at - 1
            # Some models write line breaks into strings as they are.
            self._pending.append(_dumps(c)[1:-1] if c < " " and self._scan.inside else c)
            if self._scan.feed(c):
                self._closed_json()
                break
        return at

    def _closed_json(self) -> None:
        if not is_json(self._scan.text):
            self.broken = True
            return
        self._end()
        if self._inside.end:
            self._state = "tail"
        else:
            self.ended = True


class TaggedReader(_MarkedReader):
    """Read parameters between tags, by the format's `Tags`; each becomes JSON by its schema."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._form.inside, Tags)
        self._tags: Tags = self._form.inside
        self._state = "before" if self._tags.name_begin else "name"
        self._schemas: Mapping[str, Any] = {}
        self._key, self._count = "", 0
        self._kind = "json"
        self._value: list[str] = []
        self._newline = ""
        self._fresh = False

    def _closing(self) -> str:
        return self._tags.end or (self._form.call[1] if self._form.call is not None else "")

    def _wanted(self) -> Sequence[str]:
        tags = self._tags
        if self._state == "name":
            return (tags.name_end,) if tags.name_end else (tags.key_begin, self._closing())
        return {
            "before": (tags.name_begin,),
            "gap": (tags.key_begin, self._closing()),
            "key": (tags.key_end,),
            "between": (tags.value_begin,),
            "value": (tags.value_end,),
        }[self._state]

    def _text(self, text: str) -> bool:
        if self._state == "name":
            return self._name_piece(text)
        if self._state == "key":
            self._key += text
            return len(self._key) <= LONGEST_NAME
        if self._state == "value":
            self._value_piece(text)
            return True
        return not text.strip()

    def _value_piece(self, text: str) -> None:
        if self._kind != "string":
            self._value.append(text)
            return
        if self._fresh and text and self._tags.lines:
            text = text.removeprefix("\n")
            self._fresh = False
        text = self._newline + text
        self._newline = "\n" if self._tags.lines and text.endswith("\n") else ""
        if self._newline:
            text = text[:-1]
        self._pending.append(_dumps(text)[1:-1])

    def _reached(self, marker: str) -> bool:
        tags = self._tags
        if self._state == "before":
            self._state = "name"
        elif self._state == "name":
            name = self._name.strip()
            if not self._begin(name):
                return False
            found = self._tools.get(name, {}).get("properties")
            self._schemas = found if isinstance(found, Mapping) else {}
            self._state = "gap"
            return True if marker == tags.name_end else self._reached(marker)
        elif self._state == "gap" and marker != tags.key_begin:
            self._close()
        elif self._state == "gap":
            self._state, self._key = "key", ""
        elif self._state == "key" and tags.value_begin:
            self._state = "between"
        elif self._state in ("key", "between"):
            self._open_value()
        else:
            self._close_value()
        return True

    def _close(self) -> None:
        self._pending.append("}" if self._count else "{}")
        self._end()
        self.ended = True
        self.took_closing = not self._tags.end

    def _open_value(self) -> None:
        key = self._key.strip()
        self._kind = value_kind(self._schemas.get(key))
        self._pending.append(("{" if not self._count else ", ") + _dumps(key) + ": ")
        if self._kind == "string":
            self._pending.append('"')
        self._count += 1
        self._state, self._fresh, self._newline = "value", True, ""
        self._value.clear()

    def _close_value(self) -> None:
        self._state = "gap"
        if self._kind == "string":
            self._pending.append('"')
            return
        text = "".join(self._value)
        if self._tags.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._pending.append(_json_or_text(text, self._kind))

    def finish(self) -> list[AnswerEvent]:
        """End the answer: a call without an end marker is closed."""
        # A call without an end marker ends with the region; the end of a grammar is such an end.
        if self.ended or self.broken or self._tags.end or self._held.strip() or self._state not in ("name", "gap"):
            return []
        if self._state == "name" and not self._name.strip():
            return []
        self._reached(self._closing())
        return self._taken()


def _json_or_text(text: str, kind: str) -> str:
    """Return the JSON of a value: the text as it is where it is JSON of this kind, so that no digit is lost; else a
    string of it.
    """
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return _dumps(text)
    return text.strip() if kind == "json" or value is None else _dumps(text)


class PythonReader(_Reader):
    """Read calls in Python's syntax: `[name(key=value), name()]`, or with `listed` off one call a line."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._listed = self._form.listed
        self._state = "list" if self._listed else "name"
        self._part: list[str] = []
        self._quote, self._escaped, self._depth = "", False, 0
        self._count = 0

    def feed(self, text: str) -> tuple[list[AnswerEvent], str]:
        """Return (events, text after the end of the region's calls, or after the place where they are broken)."""
        for at, c in enumerate(text):
            if self.ended or self.broken:
                return self._taken(), text[at:]
            if not self.open:
                self._unread.append(c)
            if not getattr(self, f"_in_{self._state}")(c):
                self.broken = True
                if not self.open:
                    self._unread.pop()
                return self._taken(), text[at:]
        return self._taken(), ""

    def _in_list(self, c: str) -> bool:
        if c == "[":
            self._state = "name"
        return c == "[" or c in SPACE

    def _in_name(self, c: str) -> bool:
        if c == "(" and self._part:
            name = "".join(self._part)
            self._part.clear()
            self._state, self._count = "key", 0
            return self._begin(name)
        if not self._part and c in SPACE:
            return True
        if not self._part and not self._listed and c == "`" and self.closed:
            self._part.append(c)  # the fence's end
            return True
        self._part.append(c)
        if not self._listed and self.closed and set(self._part) == {"`"}:
            self.ended = self.took_closing = len(self._part) == 3
            return True
        return (c.isalnum() or c in "_.-") and len(self._part) <= LONGEST_NAME

    def _in_key(self, c: str) -> bool:
        if c == ")" and not self._part:
            return self._in_call_end()
        if c in SPACE and not self._part:
            return True
        if c == "=" and self._part:
            key = "".join(self._part).strip()
            self._part.clear()
            self._pending.append(("{" if not self._count else ", ") + _dumps(key) + ": ")
            self._count += 1
            self._state = "value"
            return key.isidentifier()
        self._part.append(c)
        return len(self._part) <= LONGEST_NAME

    def _in_value(self, c: str) -> bool:
        if self._quote:
            self._part.append(c)
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == self._quote:
                self._quote = ""
            return True
        if self._depth == 0 and c in ",)":
            if not self._value_done():
                return False
            self._state = "key"
            return True if c == "," else self._in_call_end()
        self._part.append(c)
        if c in "\"'":
            self._quote = c
        elif c in "[{(":
            self._depth += 1
        elif c in "]})":
            self._depth -= 1
        return self._depth >= 0

    def _value_done(self) -> bool:
        text = "".join(self._part).strip()
        self._part.clear()
        try:
            json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(text)
                said = json.dumps(value, ensure_ascii=False, allow_nan=False)
                said.encode()  # raises ValueError for a lone surrogate
                self._pending.append(said)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return False
            return True
        self._pending.append(text)
        return True

    def _in_call_end(self) -> bool:
        self._pending.append("}" if self._count else "{}")
        self._end()
        self._state = "after" if self._listed else "name"
        return True

    def _in_after(self, c: str) -> bool:
        if c == "]":
            self.ended = True
            return True
        if c == ",":
            self._state = "name"
            return True
        return c in SPACE
