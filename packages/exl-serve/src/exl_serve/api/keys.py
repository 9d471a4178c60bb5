"""The file of keys, and the use of each key."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
import tomllib
from collections import deque
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec

from exl_serve.config.load import ConfigError

__all__ = ["SCOPES", "Key", "KeyFile", "KeyLimits", "Usage", "new_key", "read_keys"]

SCOPES = frozenset({"infer", "admin", "metrics"})
MINUTE = 60.0
MAX_FILE = 1 << 20


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a key; None means no limit."""

    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    key: str | None = None
    sha256: str | None = None
    scopes: tuple[str, ...] = ("infer",)
    weight: float = 1.0
    #: lowest number that it may ask for: 0 urgent, 1 interactive, 2 batch
    priority: int = 1
    limits: KeyLimits = KeyLimits()
    models: tuple[str, ...] | None = None
    #: a date or time of TOML; without zone UTC
    expires: Any = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: tuple[_Entry, ...] = ()


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the key file, with the SHA-256 of the key instead of the key."""

    name: str
    digest: bytes
    scopes: frozenset[str]
    weight: float
    priority: int
    limits: KeyLimits
    models: frozenset[str] | None
    #: seconds since the epoch, or None
    expires: float | None


def new_key() -> str:
    """Return a new key of 32 random bytes."""
    return "exl-" + secrets.token_urlsafe(32)


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read the key file.

    Raises ConfigError, also where others than its owner may read the file. The messages hold no key.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o177:
                text = f"the key file {path} has mode {mode:04o}; others could read it: chmod 600"
                raise ConfigError(text, "auth.key_file")
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"the key file {path} is larger than {MAX_FILE} bytes", "auth.key_file")
        found = msgspec.convert(tomllib.loads(data.decode()), _File)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}", "auth.key_file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(f"the key file {path} is not TOML", "auth.key_file") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"the key file {path}: {error}", "auth.key_file") from None
    names = [entry.name for entry in found.key]
    if len(set(names)) != len(names):
        raise ConfigError(f"the key file {path} has two entries of one name", "auth.key_file")
    return tuple(_key(entry, path) for entry in found.key)


def _key(entry: _Entry, path: Path) -> Key:
    def bad(what: str) -> ConfigError:
        return ConfigError(f"the key file {path}, entry {entry.name[:64]!r}: {what}", "auth.key_file")

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", entry.name):
        raise bad("a name has 1 to 64 letters, digits, dots, dashes and underscores")
    if (entry.key is None) == (entry.sha256 is None):
        raise bad("give either key or sha256")
    if entry.key is not None:
        if len(entry.key) < 16:
            raise bad(f"the key has {len(entry.key)} characters; use at least 16 (exl serve key new)")
        digest = hashlib.sha256(entry.key.encode()).digest()
    elif entry.sha256 is not None and re.fullmatch(r"[0-9a-fA-F]{64}", entry.sha256):
        digest = bytes.fromhex(entry.sha256)
    else:
        raise bad("sha256 has 64 hexadecimal digits")
    if not entry.scopes or not set(entry.scopes) <= SCOPES:
        raise bad(f"scopes are {', '.join(sorted(SCOPES))}")
    limits = [entry.limits.concurrent, entry.limits.requests_per_minute, entry.limits.tokens_per_minute]
    if any(limit is not None and limit < 1 for limit in limits):
        raise bad("a limit is at least 1; leave it out for none")
    if not 0.001 <= entry.weight <= 1000:
        raise bad(f"weight is {entry.weight}; allowed are 0.001 to 1000")
    if entry.priority not in (0, 1, 2):
        raise bad(f"priority is {entry.priority}; 0 is urgent, 1 interactive, 2 batch")
    if entry.expires is not None and not isinstance(entry.expires, date):
        raise bad("expires is a date or a time, without quotes")
    return Key(
        name=entry.name,
        digest=digest,
        scopes=frozenset(entry.scopes),
        weight=entry.weight,
        priority=entry.priority,
        limits=entry.limits,
        models=None if entry.models is None else frozenset(entry.models),
        expires=_seconds(entry.expires),
    )


def _seconds(when: datetime | date | None) -> float | None:
    if when is None:
        return None
    if not isinstance(when, datetime):
        when = datetime(when.year, when.month, when.day, tzinfo=UTC)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


class KeyFile:
    """Keys that follow their file: it is read again when it has changed.

    A file that has become unusable leaves the keys as they were, and `problem` holds the reason. The constructor raises
    ConfigError.
    """

    CHECK_SECONDS = 1.0

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        self.path = path
        self.keys = read_keys(path)
        self.problem: str | None = None
        self._mark = self._look()
        self._checked = time.monotonic()

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode

    def refresh(self, now: float, *, force: bool = False) -> None:
        """Read the file again if it has changed; at most once in `CHECK_SECONDS` seconds unless `force`."""
        if not force and now - self._checked < self.CHECK_SECONDS:
            return
        self._checked = now
        mark = self._look()
        if mark == self._mark and not force:
            return
        self._mark = mark
        try:
            self.keys, self.problem = read_keys(self.path), None
        except ConfigError as error:
            self.problem = str(error)

    def find(self, given: str, wall: float) -> Key | None:
        """Return the entry of a key. Compares with every entry, so that the time reveals nothing about them."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return None if found is None or (found.expires is not None and wall >= found.expires) else found


class Usage:
    """The use of a key: requests and tokens of the last minute, and open requests."""

    def __init__(self) -> None:
        self.open = 0
        self.requests: deque[float] = deque()
        self.tokens: deque[tuple[float, int]] = deque()
        self.sum = 0

    def trim(self, now: float) -> None:
        """Forget the use before the last minute."""
        while self.requests and self.requests[0] <= now - MINUTE:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - MINUTE:
            self.sum -= self.tokens.popleft()[1]

    def spend(self, now: float, tokens: int) -> None:
        """Record tokens."""
        self.trim(now)
        self.tokens.append((now, tokens))
        self.sum += tokens

    def requests_reset(self, now: float) -> float:
        """Return the seconds until a request leaves the window."""
        return max(0.0, self.requests[0] + MINUTE - now) if self.requests else 0.0

    def tokens_reset(self, now: float, limit: int) -> float:
        """Return the seconds until the window holds fewer tokens than `limit`."""
        left, over = 0.0, self.sum - limit
        for at, count in self.tokens:
            if over < 0:
                break
            over -= count
            left = at + MINUTE - now
        return max(0.0, left)
