"""The results of a step as parallel arrays, for servers: no object for each job, no tensor for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.dynamic.events import END, FIRST, HELD, STARTED, Ending, Event, Events
from exl_generate.dynamic.output import Record, Released
from exl_generate.errors import RequestError

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["COLUMN_FLAGS", "Extra", "JobEnd", "StepColumns", "check_columns", "columns_of"]

#: The bits of `StepColumns.flags`. "started": the job has left the queue. "first": its first token was sampled. "end":
#: this is its last entry. "held": tokens after the text are held back.
COLUMN_FLAGS = {"started": STARTED, "first": FIRST, "end": END, "held": HELD}


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job. `reason` and `statistics` are those of the last result dict."""

    reason: str
    statistics: dict[str, Any]
    #: the token or string that was the stop condition
    stop: int | str | None = None
    #: text that is not shown: the stop condition's, or what an error or a cancellation kept from coming out
    held_text: str = ""
    held_ids: tuple[int, ...] = ()
    error: BaseException | None = None


@dataclass(slots=True)
class Extra:
    """Results of a job that have no column. Fields without content are None or empty."""

    #: prompt tokens in the cache, and all of them
    progress: tuple[int, int] | None = None
    end: JobEnd | None = None
    #: final probabilities of the tokens, for `return_probs`
    probabilities: list[float] = field(default_factory=list)
    #: (ids int64 [k], probabilities float32 [k]) of each token, for `return_top_tokens`
    top_tokens: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=list)
    #: raw logits, one [padded_vocab] on the CPU for each token, for `return_logits`
    logits: list[torch.Tensor] = field(default_factory=list)
    #: (text, ids) of banned strings that were taken back
    suppressed: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepColumns:
    """The results since the last call, one entry for each job.

    `ids` holds the tokens of all entries in order: `counts[i]` of them belong to entry i.
    """

    serials: NDArray[np.uint32]
    """uint32 [n]: the jobs' serial numbers, modulo 2^32."""
    counts: NDArray[np.uint16]
    """uint16 [n]: tokens released."""
    ids: bytes
    """Tokens as little-endian int32."""
    texts: list[str]
    """Text released."""
    flags: NDArray[np.uint8]
    """uint8 [n]: sums of 1 (the job has left the queue), 2 (its first token was sampled), 4 (its last entry) and 8
    (tokens after the text are held back)."""
    extra: dict[int, Extra]
    """Serial number -> what else the job says; most jobs have no entry in most steps."""

    def __len__(self) -> int:
        return len(self.texts)


def _unreadable(job: ExLlamaV2DynamicJob) -> str:
    """Return the option that keeps a job's results from being written as columns; "" if there is none."""
    return "return_hidden_state" if job.request.return_hidden_state else ""


def check_columns(job: ExLlamaV2DynamicJob) -> None:
    """Raise `RequestError` for a job whose results columns cannot hold."""
    if name := _unreadable(job):
        raise RequestError(
            f"job {job.serial_number} has {name}, which columns cannot hold: leave it out, or read with iterate()"
        )


def columns_of(events: Events) -> StepColumns:
    """Write all events of a step; several events of one job make one entry."""
    serials = [event.job.serial_number or 0 for event in events]
    if len(set(serials)) < len(serials):
        groups: dict[int, Events] = {}
        for serial, event in zip(serials, events, strict=True):
            groups.setdefault(serial, []).append(event)
        return _columns(list(groups), [_joined(group) for group in groups.values()], events)
    return _columns(serials, events, events)


def _columns(serials: list[int], entries: Events, events: Events) -> StepColumns:
    records = [entry.released.records for entry in entries]
    extra: dict[int, Extra] = {}
    for event in events:
        if not event.plain or event.job.request.reports_more:
            _note(extra, event)
    return StepColumns(
        serials=np.array(serials, dtype=np.int64).astype(np.uint32),
        counts=np.array([len(own) for own in records], dtype=np.uint16),
        ids=np.array([record.token for own in records for record in own], dtype="<i4").tobytes(),
        texts=[entry.released.text for entry in entries],
        flags=np.array([entry.flags for entry in entries], dtype=np.uint8),
        extra=extra,
    )


def _joined(events: Events) -> Event:
    """Merge events of one job into one: its released tokens and text, and its flags."""
    if len(events) == 1:
        return events[0]
    flags = events[-1].flags & HELD
    for event in events:
        flags |= event.flags & ~HELD
    text = "".join(event.released.text for event in events)
    records = [record for event in events for record in event.released.records]
    return Event(events[0].job, "streaming", Released(text, records), flags)


def _note(extra: dict[int, Extra], event: Event) -> None:
    """Add the results that have no column."""
    note = extra.setdefault(event.job.serial_number or 0, Extra())
    if event.progress is not None:
        note.progress = event.progress
    if event.suppressed is not None:
        text, gone = event.suppressed
        note.suppressed.append((text, tuple(record.token for record in gone)))
    if event.ending is not None:
        note.end = _end(event.ending)
    if event.job.request.reports_more:
        _report(note, event.job, event.released.records)


def _report(note: Extra, job: ExLlamaV2DynamicJob, records: list[Record]) -> None:
    """Add the requested reports of these tokens."""
    asked = job.request
    if asked.return_probs:
        note.probabilities += [record.probability for record in records]
    if asked.return_top_tokens:
        for record in records:
            assert record.top_tokens is not None
            assert record.top_probabilities is not None
            note.top_tokens.append((record.top_tokens, record.top_probabilities))
    if asked.return_logits:
        note.logits += [record.logits for record in records if record.logits is not None]


def _end(ending: Ending) -> JobEnd:
    text, ids = ending.held_text, tuple[int, ...]()
    if ending.token is not None:
        text, ids = ending.token_texts[1], (ending.token.token,)
    elif ending.kept is not None:
        text, ids = ending.kept.text, tuple(record.token for record in ending.kept.records)
    stop = ending.string if ending.token is None else ending.token.token
    return JobEnd(ending.reason, ending.statistics, stop, text, ids, ending.error)
