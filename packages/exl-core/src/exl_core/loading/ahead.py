"""Read file ranges into the system's cache before they are needed: the disk works while matrices are repacked."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..layers import Module
from .checkpoint import Checkpoint
from .sizes import module_tensors

__all__ = ["ReadAhead"]

BLOCK = 4 << 20
THREADS = 4  # disks are fastest with several requests in flight
WINDOW = 256 << 20  # most bytes ahead of the module that is being loaded

Range = tuple[Path, int, int]


class ReadAhead:
    """Reads the tensors of the next modules, at most WINDOW bytes ahead, in separate threads that discard the data.

    Blocks that the system has in memory already are skipped. Errors are left to the actual reads. Does nothing on
    systems without positional reads.
    """

    def __init__(self, modules: Sequence[Module], checkpoint: Checkpoint) -> None:
        self._ranges = [_blocks(names, checkpoint) for names in module_tensors(modules, checkpoint)]
        self._sizes = [sum(size for _, _, size in ranges) for ranges in self._ranges]
        self._asked = 0  # number of modules whose tensors were requested
        self._queue: queue.SimpleQueue[Range | None] = queue.SimpleQueue()
        self._stopped = False
        count = THREADS if hasattr(os, "preadv") else 0
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def advance(self, index: int) -> None:
        """Note that module `index` is about to be read."""
        self._asked = max(self._asked, index + 1)  # the module's own reads begin now
        while self._asked < len(self._ranges):
            if sum(self._sizes[index + 1 : self._asked]) > WINDOW:
                return
            for block in self._ranges[self._asked]:
                self._queue.put(block)
            self._asked += 1

    def close(self) -> None:
        """Stop the threads."""
        self._stopped = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        buffer = bytearray(BLOCK)
        files: dict[Path, int] = {}
        try:
            while (block := self._queue.get()) is not None and not self._stopped:
                path, offset, size = block
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY)
                if not (_cached(files[path], offset) and _cached(files[path], offset + size - 1)):
                    os.preadv(files[path], [memoryview(buffer)[:size]], offset)
        except OSError:
            pass
        finally:
            for descriptor in files.values():
                os.close(descriptor)


def _blocks(names: set[str], checkpoint: Checkpoint) -> list[Range]:
    """Return the data of these tensors in blocks, in the order of the files."""
    entries = sorted((checkpoint.tensors[name] for name in names), key=lambda e: (e.path, e.offset))
    return [
        (e.path, offset, min(BLOCK, e.offset + e.nbytes - offset))
        for e in entries
        for offset in range(e.offset, e.offset + e.nbytes, BLOCK)
    ]


def _cached(descriptor: int, offset: int) -> bool:
    """Return whether the byte at `offset` can be read without waiting for the disk.

    False where the system cannot tell.
    """
    flag = getattr(os, "RWF_NOWAIT", 0)
    if flag:
        with suppress(OSError):
            return os.preadv(descriptor, [bytearray(1)], offset, flag) == 1
    return False
