"""Choose which jobs run: first come, first served. Smaller jobs may overtake one that does not fit, a few times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from exl_generate.errors import CapacityError

if TYPE_CHECKING:
    from exl_generate.dynamic.context import JobContext
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Scheduler"]

#: Queued jobs considered in a step, so that its cost does not grow with the queue.
LOOKAHEAD = 64


class Scheduler:
    """Own the queue and the set of running jobs.

    A job starts when there are free pages for everything that it reserves: usually for `max_new_tokens`, so that it
    never waits for pages again. A job with `max_rq_tokens` reserves for so many tokens at a time. When they are used up
    and others wait, it goes to the end of the queue with its state and later resumes from the prefix cache. The queue
    always advances: when nothing runs, any job that passed `check` fits.
    """

    def __init__(
        self,
        context: JobContext,
        max_batch_size: int,
        max_seq_len: int,
    ) -> None:
        self._context = context
        self.table = context.page_table
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        #: waiting jobs in order, with their prompt tokens that were not in the cache; a dict, so that any of them can
        #: be taken out at once
        self._queue: dict[ExLlamaV2DynamicJob, int] = {}
        #: the sum of those tokens
        self.queued_tokens = 0
        self.active: list[ExLlamaV2DynamicJob] = []
        #: sequences of the running jobs
        self.active_sequences = 0
        self._lock = threading.Lock()

    @property
    def pending(self) -> list[ExLlamaV2DynamicJob]:
        """A copy of the waiting jobs, in order."""
        with self._lock:
            return list(self._queue)

    @property
    def num_pending(self) -> int:
        """Number of waiting jobs."""
        return len(self._queue)

    def check(self, job: ExLlamaV2DynamicJob) -> None:
        """Raise `CapacityError` for a job that could never run."""
        if len(job.sequences) > self.max_batch_size:
            raise CapacityError(f"the job has {len(job.sequences)} sequences, the batch holds {self.max_batch_size}")
        longest = max(sequence.prompt_length for sequence in job.sequences) + job.request.healing
        wanted = longest + job.max_new_tokens
        asked = f"the prompt has {longest} tokens and max_new_tokens is {job.max_new_tokens}, together {wanted}"
        if wanted > self.max_seq_len:
            raise CapacityError(f"{asked}; the model's limit is {self.max_seq_len}: shorten one of them")
        pages, size = len(self.table.pages), self.table.page_size
        needed = job.pages.count(size)
        if needed > pages:
            raise CapacityError(
                f"{asked}, which takes {needed} pages of {size}; the cache has {pages}: "
                f"shorten one of them or give the cache max_seq_len >= {needed * size}"
            )

    def add(self, jobs: list[ExLlamaV2DynamicJob]) -> None:
        """Queue jobs; may be called while a step runs in another thread."""
        entries = {job: job.pages.uncached_tokens(self.table) for job in jobs}
        with self._lock:
            self._queue.update(entries)
            self.queued_tokens += sum(entries.values())

    def remove(self, job: ExLlamaV2DynamicJob) -> bool:
        """Take a waiting job out of the queue; False if it is not there."""
        with self._lock:
            return self._take_out(job)

    def _take_out(self, job: ExLlamaV2DynamicJob) -> bool:
        tokens = self._queue.pop(job, None)
        if tokens is None:
            return False
        self.queued_tokens -= tokens
        return True

    def holds(self, job: ExLlamaV2DynamicJob) -> bool:
        """Whether the job is waiting in the queue."""
        return job in self._queue

    def admit(self) -> list[ExLlamaV2DynamicJob]:
        """Start the jobs that fit, in order; returns the started jobs."""
        if not self._queue:
            return []
        with self._lock:
            return list(self._choose())

    def _choose(self) -> Iterator[ExLlamaV2DynamicJob]:
        skipped: list[ExLlamaV2DynamicJob] = []
        for job in list(islice(self._queue, LOOKAHEAD)):
            if self.table.available <= 0 or self.active_sequences >= self.max_batch_size:
                return
            job.pages.refresh_names(self._context)
            if not self.can_start(job):
                skipped.append(job)
                continue
            if any(_skipped_enough(other) for other in skipped):
                return
            for other in skipped:
                other.skips += 1
            job.pages.acquire()
            self._take_out(job)
            self.active.append(job)
            self.active_sequences += len(job.sequences)
            yield job

    def can_start(self, job: ExLlamaV2DynamicJob) -> bool:
        """Whether the batch and the free pages can take the job now."""
        if self.active_sequences + len(job.sequences) > self.max_batch_size:
            return False
        if job.pages.own(self.table.page_size) > self.table.available:
            return False  # without looking at what it could share
        return job.pages.missing(self.table) <= self.table.available

    def extend(self, job: ExLlamaV2DynamicJob) -> bool:
        """Give the job pages for one more token. Returns False if it must wait for them.

        It waits when none are free, or when its share is used up and others wait.
        """
        for sequence in job.sequences:
            if sequence.room < 0:
                return not self._queue and job.pages.reserve_more(self.table)
        return True

    def requeue(self, job: ExLlamaV2DynamicJob) -> None:
        """Put a running job at the end of the queue; its pages stay in the prefix cache."""
        job.give_way()
        self.active.remove(job)
        self.active_sequences -= len(job.sequences)
        self.add([job])

    def retire(self) -> None:
        """Remove finished jobs and release their pages."""
        finished = [job for job in self.active if job.is_finished]
        if not finished:
            return
        for job in finished:
            job.detach()
            self.active_sequences -= len(job.sequences)
        self.active = [job for job in self.active if not job.is_finished]


def _skipped_enough(job: ExLlamaV2DynamicJob) -> bool:
    most = job.request.max_skips
    return most is not None and job.skips >= most
