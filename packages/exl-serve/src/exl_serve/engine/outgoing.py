"""Results of a step on their way to the workers: one message a worker, tokens as columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exl_serve.engine import wire
from exl_serve.engine.events import EngineEvent
from exl_serve.engine.groups import Running
from exl_serve.engine.jobs import HELD

if TYPE_CHECKING:
    from exl_generate import StepColumns
    from exl_generate.dynamic.columns import Extra

__all__ = ["Entry", "Outgoing"]

_Message = tuple[bytes, wire.StepEvents]
"""A worker and its message."""
_NOTHING_ELSE = bytes([0, HELD])
"""Flags of an entry that holds nothing but tokens."""


class Entry(NamedTuple):
    """All that a step says of a completion which is more than tokens."""

    running: Running
    ids: tuple[int, ...]
    text: str
    flags: int
    extra: Extra | None


class _Plan:
    """How the tokens of one set of completions are sent. Most steps have the set of the step before."""

    def __init__(self, serials: bytes, ones: Sequence[Running]) -> None:
        self.serials, self._ones = serials, ones
        #: the column of each step that `flush` has not counted yet
        self._counts: list[bytes] = []
        places: dict[bytes, list[int]] = {}
        for i, one in enumerate(ones):
            places.setdefault(one.worker, []).append(i)
        #: of each worker: addresses, and places of its entries
        self._workers = [(worker, b"".join([ones[i].address for i in own]), own) for worker, own in places.items()]

    def count(self, counts: bytes) -> None:
        """Take note of a step's numbers of tokens. A step that touched each request would cost more than all else."""
        self._counts.append(counts)

    def flush(self) -> None:
        """Add all tokens to their requests."""
        if not self._counts:
            return
        found = np.frombuffer(b"".join(self._counts), "<u2").reshape(len(self._counts), len(self._ones))
        for one, new in zip(self._ones, found.sum(0).tolist(), strict=True):
            one.group.generated += new
        self._counts.clear()

    def split(self, counts: bytes, ids: bytes, texts: list[str]) -> list[_Message]:
        """Return the message of each worker."""
        if len(self._workers) == 1:
            worker, to, _ = self._workers[0]
            return [(worker, wire.StepEvents([], wire.TokenColumns(to, counts, ids, texts)))]
        messages: list[_Message] = []
        for worker, to, own in self._workers:  # not a comprehension: a closure over the arguments costs more
            messages.append((worker, wire.StepEvents([], wire.TokenColumns(to, *_picked(own, counts, ids, texts)))))
        return messages


class Outgoing:
    """Events that were not sent yet, by worker."""

    def __init__(self) -> None:
        self._events: defaultdict[bytes, list[tuple[int, EngineEvent]]] = defaultdict(list)
        #: the messages of a step, which hold its tokens but not `_events`
        self._tokens: list[_Message] = []
        self._plan = _Plan(b"", ())

    def add(self, worker: bytes, tag: int, events: Sequence[EngineEvent]) -> None:
        """Queue events of a request."""
        self._events[worker] += [(tag, event) for event in events]

    def forget(self, worker: bytes, tag: int) -> None:
        """Drop the events of a request. Workers ignore tokens of a request that they have cancelled."""
        if (left := self._events.get(worker)) is not None:
            self._events[worker] = [pair for pair in left if pair[0] != tag]

    def take(self) -> list[_Message]:
        """Return the message of each worker and forget them."""
        messages, self._tokens = self._tokens, []
        if not self._events:
            return messages
        events, self._events = self._events, defaultdict(list)
        found = {worker: wire.StepEvents(own) for worker, own in events.items()}
        found |= {worker: wire.StepEvents(events.get(worker, []), told.tokens) for worker, told in messages}
        return list(found.items())

    def count(self) -> None:
        """Add all tokens sent so far to `generated` of their requests. Call it before that is read."""
        self._plan.flush()

    def forget_running(self) -> None:
        """Hold no completion any more: one has ended."""
        self._plan.flush()
        self._plan = _Plan(b"", ())

    def add_step(self, columns: StepColumns, running: Mapping[int, Running]) -> tuple[int, list[Entry]]:
        """Queue the entries of a step that hold nothing but tokens. Call `take` before the next step.

        Returns the number of tokens, and the other entries of running completions. Where all entries are of the first
        kind and of the completions of the step before, no object of a completion is touched.
        """
        serials, counts, flags = columns.serials.tobytes(), columns.counts.tobytes(), columns.flags.tobytes()
        ids, texts = columns.ids, columns.texts
        others: list[Entry] = []
        known = serials == self._plan.serials or running.keys() >= set(columns.serials.tolist())
        if columns.extra or not known or flags.lstrip(_NOTHING_ELSE):
            kept, others = _sorted_out(columns, running)
            serials = columns.serials[kept].tobytes()
            counts, ids, texts = _picked(kept, counts, ids, texts)
        if serials != self._plan.serials:
            self._plan.flush()
            self._plan = _Plan(serials, [running[serial] for serial in memoryview(serials).cast("I")])
        self._tokens = self._plan.split(counts, ids, texts)
        self._plan.count(counts)
        new = len(ids) // 4
        for entry in others:
            new += len(entry.ids)
            entry.running.group.generated += len(entry.ids)
        return new, others


def _sorted_out(columns: StepColumns, running: Mapping[int, Running]) -> tuple[list[int], list[Entry]]:
    """Return the places of entries that hold nothing but tokens, and the other entries of running completions."""
    kept: list[int] = []
    others: list[Entry] = []
    ids, extra = memoryview(columns.ids).cast("i"), columns.extra
    end = 0
    rows = zip(columns.serials.tolist(), columns.counts.tolist(), columns.flags.tolist(), strict=True)
    for i, (serial, count, flags) in enumerate(rows):
        begin, end = end, end + count
        one = running.get(serial)
        if one is None:
            continue
        if flags & ~HELD or (extra and one.number in extra):
            own = tuple(ids[begin:end].tolist())
            others.append(Entry(one, own, columns.texts[i], flags, extra.get(one.number)))
        else:
            kept.append(i)
    return kept, others


def _picked(places: Sequence[int], counts: bytes, ids: bytes, texts: list[str]) -> tuple[bytes, bytes, list[str]]:
    """Return counts, ids and texts of some entries."""
    ends = [0, *accumulate(memoryview(counts).cast("H"))]
    return (
        b"".join([counts[2 * i : 2 * i + 2] for i in places]),
        b"".join([ids[4 * ends[i] : 4 * ends[i + 1]] for i in places]),
        [texts[i] for i in places],
    )
