"""Requests on which replicas have ended: rejected for a while, so that clients that try again end no more of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import msgspec

from exl_serve.errors import ServeError
from exl_serve.request.internal import EngineRequest

__all__ = ["QUARANTINE_SECONDS", "Quarantine"]

QUARANTINE_SECONDS = 600.0
MOST = 4096
"""Digests that are kept; the oldest are dropped first."""


class Quarantine:
    """The digests of such requests, each for `QUARANTINE_SECONDS`.

    A digest covers the whole prompt, what the engine computes with it, and the client's key, not seeds, limits or
    sampling. A wrong guess hurts one key. The label of the first page would not do: requests with the same system
    prompt share it, and short prompts have none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: by digest, in the order of time
        self._until: dict[bytes, float] = {}

    def add(self, request: EngineRequest) -> None:
        """Reject such requests from now on."""
        digest = _digest(request)
        self._until.pop(digest, None)
        self._until[digest] = self._clock() + QUARANTINE_SECONDS
        while len(self._until) > MOST:
            del self._until[next(iter(self._until))]

    def check(self, request: EngineRequest) -> None:
        """Raise ServeError 500 for a request that is in quarantine."""
        if not self._until:  # as nearly always: then no digest is computed
            return
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            del self._until[next(iter(self._until))]
        until = self._until.get(_digest(request))
        if until is not None:
            raise ServeError.engine(
                "two replicas ended while they ran this prompt, so it is rejected for another "
                f"{until - now:.0f} seconds: send another one, or look for the cause in the replicas' logs"
            )


def _digest(request: EngineRequest) -> bytes:
    images = [one.digest for one in request.media]
    parts = (request.key, request.prompt, request.negative_prompt, request.adapter, request.constraints, images)
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
