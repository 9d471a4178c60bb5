"""Limit how many of the processes that render chat templates one client may occupy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

__all__ = ["RENDERS_OF_A_KEY", "RenderTurns"]

RENDERS_OF_A_KEY = 2
"""Half of the processes that an API worker has for chat templates."""


class RenderTurns:
    """Turns of keys: at most `most` renderings of a key run at a time, in the order in which they were asked for."""

    def __init__(self, most: int = RENDERS_OF_A_KEY) -> None:
        self._most = most
        #: a semaphore exists while somebody holds it or waits for it
        self._of_keys: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def __len__(self) -> int:
        """Return the number of keys that render or wait."""
        return len(self._of_keys)

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn of the key, and hold it. Clients without a key cannot be told apart and have no limit."""
        if not key:
            yield
            return
        turns = self._of_keys.get(key)
        if turns is None:
            turns = self._of_keys[key] = asyncio.Semaphore(self._most)
        async with turns:
            yield
