"""Which jobs run: first come first served, and smaller ones may overtake one that does not fit a few times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from exl_generate.dynamic.pages import PageTable
from exl_generate.errors import CapacityError

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Scheduler"]

#: Queued jobs looked at per round, so that a round costs the same with ten or ten thousand of them waiting.
LOOKAHEAD = 64


class Scheduler:
    """Owns the queue and the set of running jobs. A job starts when every page it can ever need is free or reserved
    for it, so running jobs never wait for pages and the queue always moves: when nothing runs, any job that was let
    in fits."""

    def __init__(self, table: PageTable, max_batch_size: int, max_seq_len: int) -> None:
        self.table = table
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.pending: list[ExLlamaV2DynamicJob] = []
        self.active: list[ExLlamaV2DynamicJob] = []
        self._lock = threading.Lock()

    def check(self, job: ExLlamaV2DynamicJob) -> None:
        """Refuse a job that could never run."""
        if len(job.sequences) > self.max_batch_size:
            raise CapacityError(f"the job has {len(job.sequences)} sequences, the batch holds {self.max_batch_size}")
        longest = max(len(sequence) for sequence in job.sequences) + job.healing
        wanted = longest + job.max_new_tokens
        asked = f"the prompt has {longest} tokens and max_new_tokens is {job.max_new_tokens}, together {wanted}"
        if wanted > self.max_seq_len:
            raise CapacityError(f"{asked}; the model's limit is {self.max_seq_len}: shorten one of them")
        pages, size = len(self.table.pages), self.table.page_size
        needed = job.count_pages(size)
        if needed > pages:
            raise CapacityError(
                f"{asked}, which takes {needed} pages of {size}; the cache has {pages}: "
                f"shorten one of them or give the cache max_seq_len >= {needed * size}"
            )

    def add(self, jobs: list[ExLlamaV2DynamicJob]) -> None:
        """Queue jobs; may be called while a round is running in another thread."""
        with self._lock:
            self.pending.extend(jobs)

    def remove(self, job: ExLlamaV2DynamicJob) -> bool:
        """Take a waiting job out of the queue; False if it is not there."""
        with self._lock:
            if job not in self.pending:
                return False
            self.pending.remove(job)
            return True

    def admit(self) -> list[ExLlamaV2DynamicJob]:
        """Start what fits, in order; returns the started jobs."""
        started: list[ExLlamaV2DynamicJob] = []
        with self._lock:
            for job in self._choose():
                self.pending.remove(job)
                started.append(job)
        return started

    def _choose(self) -> Iterator[ExLlamaV2DynamicJob]:
        skipped: list[ExLlamaV2DynamicJob] = []
        for job in self.pending[:LOOKAHEAD]:
            if self.table.available <= 0 or self.active_sequences >= self.max_batch_size:
                return
            if not self.can_start(job):
                skipped.append(job)
                continue
            if any(other.max_skips is not None and other.skips >= other.max_skips for other in skipped):
                return
            for other in skipped:
                other.skips += 1
            job.acquire_pages()
            self.active.append(job)
            yield job

    def can_start(self, job: ExLlamaV2DynamicJob) -> bool:
        """Whether the batch and the free pages can take the job now."""
        if self.active_sequences + len(job.sequences) > self.max_batch_size:
            return False
        if job.own_pages(self.table.page_size) > self.table.available:
            return False  # without looking at what it could share
        return job.missing_pages(self.table) <= self.table.available

    def retire(self) -> None:
        """Take finished jobs out and give their pages back."""
        for job in self.active:
            if job.is_finished:
                job.detach()
        self.active = [job for job in self.active if not job.is_finished]

    @property
    def active_sequences(self) -> int:
        return sum(len(job.sequences) for job in self.active)
