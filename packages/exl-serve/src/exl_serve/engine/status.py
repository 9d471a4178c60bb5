"""The status page: the state of an engine in a file that any process may map and read without asking the engine.

The engine's thread writes plain stores between two increments of a sequence number. A reader that finds the number odd
or changed reads again. So a hung engine still shows that it is inside a step, and since when.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Literal

from exl_serve.engine.client import EngineStatus

__all__ = ["STATES", "HalfWrittenError", "StatusReader", "StatusWriter", "status_path"]

State = Literal["loading", "warming", "ready", "draining", "failed"]
STATES: tuple[State, ...] = ("loading", "warming", "ready", "draining", "failed")
_SEQUENCE = struct.Struct("<Q")
# Fields after the sequence number: boot, state, step, began, ended, seven counts, two rates, seconds of all steps,
# preemptions, page size.
_BODY = struct.Struct("<16sQQddQQQQQQQdddQQ")
# Offsets in the page, in units of 8 bytes.
_SEQUENCE_AT, _STEP_AT, _BEGAN_AT, _ENDED_AT = 0, 4, 5, 6
_SIZE = 4096
_TRIES = 1000


class StatusWriter:
    """Write the status page. The constructor creates the file with mode 0600."""

    def __init__(self, path: Path, boot: bytes) -> None:
        self.path = path
        self.boot = boot
        # A new file: truncating the page of a killed engine would end the processes that still map it.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        # Stores through views take a third of the time of a struct.
        self._counts, self._times = memoryview(self._map).cast("Q"), memoryview(self._map).cast("d")
        self._sequence = 0
        self.state: State = "loading"
        self.step = 0
        self.began = self.ended = time.monotonic()
        self.counts = (0, 0, 0, 0, 0, 0, 0)
        self.rates = (0.0, 0.0)
        self.step_seconds = 0.0
        self.preemptions = self.page_size = 0
        self.write()

    def write(self) -> None:
        """Write the current state."""
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, 0, self._sequence)
        _BODY.pack_into(
            self._map,
            8,
            self.boot,
            STATES.index(self.state),
            self.step,
            self.began,
            self.ended,
            *self.counts,
            *self.rates,
            self.step_seconds,
            self.preemptions,
            self.page_size,
        )
        self._sequence += 1
        _SEQUENCE.pack_into(self._map, 0, self._sequence)

    def begin_step(self, began: float) -> None:
        """Count a step and write only its number and times, which is faster than `write`."""
        self.step += 1
        self.began = began
        counts, times, sequence = self._counts, self._times, self._sequence
        counts[_SEQUENCE_AT] = sequence + 1
        counts[_STEP_AT] = self.step
        times[_BEGAN_AT] = began
        times[_ENDED_AT] = self.ended
        self._sequence = counts[_SEQUENCE_AT] = sequence + 2

    def close(self) -> None:
        """Close and delete the file."""
        self._counts.release()
        self._times.release()
        self._map.close()
        self.path.unlink(missing_ok=True)


class HalfWrittenError(Exception):
    """The status page of an engine that died, or was stopped, while it wrote."""


class StatusReader:
    """Read a status page. The constructor raises OSError where there is no such file."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)

    @property
    def writes(self) -> int:
        """A number that changes with every write: an engine that stops writing makes no progress."""
        found: int = _SEQUENCE.unpack_from(self._map, 0)[0]
        return found

    def read(self) -> EngineStatus:
        """Return the last complete state. Raises HalfWrittenError if the engine died or was stopped while it wrote."""
        for _ in range(_TRIES):
            before = _SEQUENCE.unpack_from(self._map, 0)[0]
            values = _BODY.unpack_from(self._map, 8)
            if before % 2 == 0 and before == _SEQUENCE.unpack_from(self._map, 0)[0]:
                boot, state, number, began, ended, *counts = values
                decoding, prefilling, queued, queued_tokens, pinned, cached, free, *others = counts
                prefill, decode, step_seconds, preemptions, page_size = others
                return EngineStatus(
                    boot=boot,
                    state=STATES[state],
                    step=number,
                    began=began,
                    ended=ended,
                    decoding=decoding,
                    prefilling=prefilling,
                    queued=queued,
                    queued_prompt_tokens=queued_tokens,
                    pages_pinned=pinned,
                    pages_cached=cached,
                    pages_free=free,
                    prefill_rate=prefill,
                    decode_rate=decode,
                    step_seconds=step_seconds,
                    preemptions=preemptions,
                    page_size=page_size,
                )
            time.sleep(0)
        raise HalfWrittenError("the engine's status page was left half written")

    def close(self) -> None:
        """Close the file."""
        self._map.close()


def status_path(folder: Path, model: str) -> Path:
    """Return the path of an engine's status page."""
    return folder / f"status-{model.replace('/', '_')}"
