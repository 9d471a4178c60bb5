"""Authenticate requests, and check their scopes and limits."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exl_serve.api.forwarded import TrustedProxies
from exl_serve.api.keys import MINUTE, KeyFile, Usage
from exl_serve.api.state import Caller
from exl_serve.config.load import ConfigError
from exl_serve.config.model import Auth, ServeConfig
from exl_serve.errors import ServeError

__all__ = ["Authenticator", "Ticket", "check_bind", "is_loopback"]

MAX_ADDRESSES = 10_000
"""Addresses whose failures are remembered."""
HEADERS = (b"authorization", b"x-api-key", b"api-key", b"x-admin-key")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    return host in ("localhost", "::1", "[::1]") or (host.startswith("127.") and host.replace(".", "").isdigit())


def check_bind(config: ServeConfig) -> None:
    """Raise ConfigError where anyone who reaches the port could use the server without a key."""
    server = config.server
    if server.uds is not None or is_loopback(server.host) or config.auth.key_file is not None or server.no_auth:
        return
    raise ConfigError(
        f"server.host is {server.host}, which others can reach, and there are no keys: give --key-file FILE (exl serve "
        "key new makes one), or --no-auth-i-know",
        "server.host",
    )


class Ticket:
    """One admitted request, counted against its key's limits. Call `spend` for its tokens and `release` at its end."""

    __slots__ = ("_choices", "_clock", "_released", "_usage", "headers")

    def __init__(self, usage: Usage, clock: Callable[[], float], headers: dict[str, str], choices: int = 1) -> None:
        self._usage, self._clock, self.headers, self._choices = usage, clock, headers, choices
        self._released = False
        usage.open += choices

    def spend(self, tokens: int) -> None:
        """Count tokens against the key's limit."""
        self._usage.spend(self._clock(), tokens)

    def release(self) -> None:
        """End the request. Further calls do nothing."""
        if not self._released:
            self._released = True
            self._usage.open -= self._choices


class Authenticator:
    """Authenticate an ASGI scope for the scope that a route needs; "open" needs none, "own" admin or infer.

    Without a key file everyone has all scopes, as far as `check_bind` allows that. Limits are those of one worker
    process: each of N workers grants 1/N of them, at least 1.

    Args:
        auth: The configuration of keys.
        proxies: Addresses and networks of trusted proxies: `server.trusted_proxies`.
        workers: Number of worker processes.
        clock: Returns monotonic seconds.
        wall: Returns seconds since the epoch.

    Raises:
        ServeError: on a call: 401, 403 or 429.
        ConfigError: the key file cannot be used.
    """

    def __init__(
        self,
        auth: Auth,
        *,
        proxies: Sequence[str] = (),
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError."""
        self._proxies = TrustedProxies(proxies)
        self._auth, self._workers, self._clock, self._wall = auth, workers, clock, wall
        self.file = None if auth.key_file is None else KeyFile(Path(auth.key_file))
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._usage: dict[str, Usage] = {}

    def reload(self, auth: Auth) -> None:
        """Use another configuration. Raises ConfigError and keeps the old one."""
        if (auth.key_file is None) != (self._auth.key_file is None):
            raise ConfigError("auth.key_file was added or removed: restart", "auth.key_file")
        if auth.key_file is not None and auth.key_file != self._auth.key_file:
            self.file = KeyFile(Path(auth.key_file))
        elif self.file is not None:
            self.file.refresh(self._clock(), force=True)
        self._auth = auth

    def __call__(self, scope: Mapping[str, Any], needed: str) -> Caller:
        """Return the caller of a request. Raises ServeError 401, 403 or 429."""
        address = self._address(scope)
        if self.file is None:
            return Caller(name=address if self._auth.per_address else "")
        if needed == "open":
            return Caller(scopes=frozenset())
        now = self._clock()
        self.file.refresh(now)
        given = _given(scope)
        if not given:
            raise ServeError(
                401, "authentication_error", "invalid_api_key", "this server needs a key: Authorization: Bearer KEY"
            )
        found = [key for key in (self.file.find(text, self._wall()) for text in given) if key is not None]
        if not found:
            self._count_failure(address, now)
            raise ServeError(401, "authentication_error", "invalid_api_key", "the key is not known or has expired")
        allowed = ("admin", "infer") if needed == "own" else (needed,)
        key = next((k for one in allowed for k in found if one in k.scopes), None)
        if key is None:
            wanted, has = " or ".join(allowed), ", ".join(sorted(found[0].scopes))
            text = f"this needs the scope {wanted}; the key {found[0].name!r} has {has}"
            raise ServeError(403, "permission_error", "insufficient_scope", text)
        salt = hashlib.sha256(b"exl-salt\0" + key.digest).digest()[:16] if self._auth.per_key_salt else b""
        return Caller(key.name, key.scopes, key.weight, key.priority, key.models, salt)

    def admit(self, caller: Caller, choices: int = 1) -> Ticket | None:
        """Count a request against its key's limits. Returns None for a key without limits.

        Raises ServeError 429, or 400 for more choices than the key may ever have at a time.
        """
        key = next((k for k in self.file.keys if k.name == caller.name), None) if self.file is not None else None
        if key is None:
            return None
        usage = self._usage.setdefault(key.name, Usage())
        now = self._clock()
        usage.trim(now)
        concurrent, requests, tokens = (
            None if limit is None else max(1, limit // self._workers)
            for limit in (key.limits.concurrent, key.limits.requests_per_minute, key.limits.tokens_per_minute)
        )
        if (most := key.limits.concurrent) is not None and choices > most:
            text = f"the request has {choices} choices, the key may have {most} at a time: ask for fewer"
            raise ServeError.invalid(text, "n")
        if (most := key.limits.requests_per_minute) is not None and choices > most:
            text = f"the request has {choices} choices, the key may ask for {most} a minute: ask for fewer"
            raise ServeError.invalid(text, "n")

        def headers(new: int = 0) -> dict[str, str]:
            found: dict[str, str] = {}
            if requests is not None:
                left = requests - len(usage.requests) - new
                found |= _headers("requests", requests, left, usage.requests_reset(now))
            if tokens is not None:
                found |= _headers("tokens", tokens, tokens - usage.sum, usage.tokens_reset(now, tokens))
            return found

        # A worker's share of the limit may be less than one request.
        if concurrent is not None and usage.open and usage.open + choices > concurrent:
            text = f"{usage.open} choices of this key's requests are open, it may have {concurrent}"
            raise _over("too_many_requests", text, 1, headers())
        if requests is not None and usage.requests and len(usage.requests) + choices > requests:
            text = f"{len(usage.requests)} requests in the last minute, the key may send {requests}"
            raise _over("rate_limit_exceeded", text, usage.requests_reset(now), headers())
        if tokens is not None and usage.sum >= tokens:
            text = f"{usage.sum} tokens in the last minute, the key may use {tokens}"
            raise _over("rate_limit_exceeded", text, usage.tokens_reset(now, tokens), headers())
        told = headers(choices)
        usage.requests.extend([now] * choices)
        return Ticket(usage, self._clock, told, choices)

    def _count_failure(self, address: str, now: float) -> None:
        """Count a request with a wrong key. Raises ServeError 429 where the address has sent too many.

        Requests with a right key are not affected: clients behind a proxy or a router may have one address.
        """
        failures = self._failures.setdefault(address, deque())
        self._failures.move_to_end(address)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)
        while failures and failures[0] <= now - MINUTE:
            failures.popleft()
        if len(failures) >= self._auth.max_failures_per_minute:
            text = f"{len(failures)} requests with wrong keys came from this address in the last minute"
            raise _over("too_many_requests", text, failures[0] + MINUTE - now)
        failures.append(now)

    def _address(self, scope: Mapping[str, Any]) -> str:
        client = scope.get("client")
        return self._proxies.client(str(client[0]) if client else None, scope.get("headers", ()))


def _given(scope: Mapping[str, Any]) -> list[str]:
    """Return the keys in the headers of a request."""
    found = []
    for name, value in scope.get("headers", ()):
        if name not in HEADERS:
            continue
        text = value.decode("latin-1").strip()
        if name == b"authorization":
            kind, _, text = text.partition(" ")
            if kind.lower() != "bearer":
                continue
        if text.strip():
            found.append(text.strip())
    return found[:4]


def _headers(what: str, limit: int, remaining: int, reset: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, remaining)),
        f"x-ratelimit-reset-{what}": f"{reset:.3f}s",
    }


def _over(code: str, message: str, retry_after: float, headers: Mapping[str, str] | None = None) -> ServeError:
    wait = max(1.0, retry_after)
    return ServeError(429, "rate_limit_error", code, f"{message}: wait", retry_after=wait, headers=headers)
