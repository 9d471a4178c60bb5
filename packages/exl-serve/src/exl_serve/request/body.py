"""Read a JSON body strictly and within limits."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from exl_serve.config.model import Limits
from exl_serve.errors import ServeError

__all__ = ["LongUrl", "check_depth", "read_json"]

LONG_URL = 1 << 16
"""A `data:` URL of more characters is not parsed with the rest of its body."""
PIECE = 1 << 18
_URL = b'"data:'
_BACKSLASH = ord("\\")
_IMAGES = ("image_url", "input_image")
"""Types of content parts whose URL stays a `LongUrl`."""
_COLON = re.compile(rb"[ \t\n\r]*:")
_BRACKET = re.compile(r"[{}\[\]]")


class LongUrl:
    """An ASCII text in the memory of its body, with the methods of `str` that images need.

    A string of its own would be made in one call, during which no other thread runs.
    """

    __slots__ = ("_begin", "_data", "_end")

    def __init__(self, data: bytes | bytearray, begin: int, end: int) -> None:
        self._data, self._begin, self._end = data, begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> str:
        begin, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a step of {step}: a part of a long URL has a step of 1")
        with memoryview(self._data) as whole:
            return str(whole[self._begin + begin : self._begin + max(begin, end)], "ascii")

    def find(self, text: str) -> int:
        """Return where a text begins, -1 for one that is not there."""
        at = self._data.find(text.encode(), self._begin, self._end)
        return at if at < 0 else at - self._begin

    def startswith(self, text: str) -> bool:
        """Whether it begins with a text."""
        return self._data.startswith(text.encode(), self._begin, self._end)

    def write_to(self, file: IO[bytes], begin: int) -> None:
        """Write the text from `begin` on to a file, without a copy."""
        with memoryview(self._data) as whole, whole[self._begin + begin : self._end] as part:
            file.write(part)

    def sha256(self) -> str:
        """Return the SHA-256 digest of the text. Other threads run meanwhile."""
        with memoryview(self._data) as whole, whole[self._begin : self._end] as part:
            return hashlib.sha256(part).hexdigest()

    def text(self) -> str:
        """Return all of it as a string."""
        return "".join([self[at : at + PIECE] for at in range(0, len(self), PIECE)])


def read_json(data: bytes | bytearray, limits: Limits) -> dict[str, Any]:
    """Return the object of a body.

    Long `data:` URLs are cut out before the rest is parsed: the parser would keep all other threads from running while
    it goes through an image of 20 MB, character by character. Those of images in the messages become `LongUrl`.

    Raises ServeError 400 for a body that is not UTF-8, not JSON or not an object. Repeated keys, NaN, infinity, and
    nesting deeper than `limits.max_depth` raise it, too.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    short, cut = _cut_urls(data)
    if not cut:
        return _parsed(data, limits)
    try:
        found = _parsed(short, limits)
    except ServeError:
        return _parsed(data, limits)  # so that the error has the body's own positions and keys
    _keep_images(found, cut)
    restored: dict[str, Any] = _restored(found, cut)
    return restored


def _parsed(data: bytes | bytearray, limits: Limits) -> dict[str, Any]:
    """Return the object of a body. Raises ServeError 400 as `read_json` does."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ServeError.invalid(f"the body is not UTF-8 (byte {error.start})") from None
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except ServeError:
        raise
    except json.JSONDecodeError as error:
        raise ServeError.invalid(f"the body is not valid JSON: {error}"[:300]) from None
    except ValueError:
        raise ServeError.invalid("a number in the body has too many digits: write at most 4300") from None
    except RecursionError:
        raise _too_deep(limits.max_depth) from None
    if text.count("{") + text.count("[") > limits.max_depth:
        _check_value_depth(found, limits.max_depth)
    if not isinstance(found, dict):
        raise ServeError.invalid(f"the body must be a JSON object, not {_kind(found)}")
    return found


def _cut_urls(data: bytes | bytearray) -> tuple[bytes | bytearray, dict[str, LongUrl]]:
    """Replace the content of each long string that is a `data:` URL and no key by a marker.

    Returns the rest, and the text of each marker. Every step goes over the data as fast as memory allows.
    """
    if len(data) < LONG_URL:
        return data, {}
    mark = secrets.token_hex(16)
    cut: dict[str, LongUrl] = {}
    parts: list[bytes | bytearray] = []
    copied = at = 0
    while (quote := data.find(_URL, at)) >= 0:
        end = _end_of(data, quote + 1)
        if end < 0:
            break
        if end - quote > LONG_URL and data[quote - 1 : quote] != b"\\" and _is_plain(data, quote + 1, end):
            if _COLON.match(data, end + 1):  # a key, of which an object may have only one
                at = end
                continue
            name = f"{mark}{len(cut)}"
            cut[name] = LongUrl(data, quote + 1, end)
            parts += [data[copied : quote + 1], name.encode()]
            copied = end
        at = end
    return (b"".join([*parts, data[copied:]]), cut) if cut else (data, cut)


def _end_of(data: bytes | bytearray, begin: int) -> int:
    """Return where the next quotation mark is, -1 if there is none. Other threads may run after each piece."""
    for at in range(begin, len(data), PIECE):
        if (end := data.find(b'"', at, at + PIECE)) >= 0:
            return end
    return -1


def _is_plain(data: bytes | bytearray, begin: int, end: int) -> bool:
    """Whether a string's content is ASCII that JSON holds as it is. Other threads run while numpy looks."""
    import numpy as np  # late import: a worker without large images takes less memory

    whole = np.frombuffer(data, np.uint8)[begin:end]
    pieces = (whole[at : at + PIECE] for at in range(0, len(whole), PIECE))
    return all(one.min() >= 0x20 and one.max() < 0x80 and not (one == _BACKSLASH).any() for one in pieces)


def _keep_images(body: dict[str, Any], cut: Mapping[str, LongUrl]) -> None:
    """Put URLs back in place of the markers in the images of messages (or of items of a response)."""
    lists = [one for one in (body.get("messages"), body.get("input")) if isinstance(one, list)]
    messages = [one for some in lists for one in some if isinstance(one, dict)]
    for content in [one.get(name) for one in messages for name in ("content", "output")]:
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") not in _IMAGES:
                continue
            holder, name = (
                (part["image_url"], "url") if isinstance(part.get("image_url"), dict) else (part, "image_url")
            )
            given = holder.get(name)
            if isinstance(given, str) and given in cut:
                holder[name] = cut[given]


def _restored(value: Any, cut: Mapping[str, LongUrl]) -> Any:
    """Return a value with the texts that were cut out."""
    if isinstance(value, str):
        return cut[value].text() if value in cut else value
    if isinstance(value, list):
        return [_restored(one, cut) for one in value]
    if isinstance(value, dict):
        return {key: _restored(one, cut) for key, one in value.items()}
    return value


def check_depth(text: str, most: int) -> None:
    """Raise ServeError 400 for a JSON text that is nested deeper than `most`."""
    if text.count("{") + text.count("[") <= most:
        return
    depth = at = 0
    while at < len(text):
        quote = text.find('"', at)
        end = len(text) if quote < 0 else quote
        for found in _BRACKET.finditer(text, at, end):
            if found.group() in "{[":
                depth += 1
                if depth > most:
                    raise _too_deep(most)
            else:
                depth -= 1
        at = _after_string(text, end + 1)


def _check_value_depth(value: Any, most: int) -> None:
    """Raise ServeError 400 for a value that is nested deeper than `most`."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep(most)


def _too_deep(most: int) -> ServeError:
    return ServeError.invalid(f"the body is nested more than {most} levels deep")


def _after_string(text: str, at: int) -> int:
    """Return the position after the string whose content begins at `at`.

    A body may be one string of 32 MiB: it is searched, not read character by character.
    """
    while (quote := text.find('"', at)) >= 0:
        before = quote
        while before > at and text[before - 1] == "\\":
            before -= 1
        if (quote - before) % 2 == 0:
            return quote + 1
        at = quote + 1
    return len(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ServeError.invalid(f"the key {key[:64]!r} comes twice in an object", key[:64])
            seen.add(key)
    for key in found:
        if not key.isascii() and any("\ud800" <= letter <= "\udfff" for letter in key):
            raise ServeError.invalid("a key holds a lone surrogate")
    return found


def _constant(name: str) -> NoReturn:
    raise ServeError.invalid(f"{name} is not a number in JSON")


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
