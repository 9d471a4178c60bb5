"""One round of the generator: schedule, run, sample, settle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from exl_generate.dynamic.runner import Runner, Window
from exl_generate.dynamic.scheduler import Scheduler
from exl_generate.dynamic.speculation import Drafter

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Engine"]

Results = list[dict[str, Any]]


class Engine:
    """Moves every running job one step on. `deliver` gets all results, in the order in which they arise."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter,
        max_chunk_size: int,
        deliver: Callable[[Results], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._drafter = drafter
        self._max_chunk_size = max_chunk_size
        self._deliver = deliver

    def step(self) -> None:
        """Schedule, run, sample, settle."""
        for job in self._scheduler.admit():
            self._deliver(job.start())
        self._prefill()
        windows = self._windows()
        self._runner.decode([window for pair in windows.values() for window in pair])
        for job, pair in windows.items():
            self._guarded(job, partial(self._settle, job, pair))
        self._scheduler.retire()

    def _prefill(self) -> None:
        """Prompt tokens for jobs in the order they started, a fixed number in all, so that running streams never wait
        longer than for one chunk."""
        left = self._max_chunk_size
        for job in self._scheduler.active:
            if job.is_finished or job.prefilled:
                continue
            spent: list[int] = []
            self._guarded(job, partial(self._prefill_job, job, left, spent))
            left -= sum(spent)
            if left < min(self._max_chunk_size, self._scheduler.table.page_size):
                break

    def _prefill_job(self, job: ExLlamaV2DynamicJob, budget: int, spent: list[int]) -> Results:
        """One chunk of one job; what it computed is appended to `spent`."""
        job.mark_prefill()
        copied: list[int] = []

        def copy(source: int, target: int, tokens: int) -> None:
            self._runner.copy_page_head(source, target, tokens)
            self._drafter.copy_page_head(source, target, tokens)
            copied.append(tokens)

        for sequence in job.sequences:
            sequence.skip_cached(copy)
            if not sequence.prefilled and budget > sum(spent):
                start, end = sequence.next_chunk(budget - sum(spent))
                sequence.provide(end)
                self._drafter.prefill(sequence, start, end)
                self._runner.compute(sequence, start, end)
                sequence.commit(end)
                spent.append(end - start)
        return [job.progress()] if spent or copied else []

    def _windows(self) -> dict[ExLlamaV2DynamicJob, list[Window]]:
        """What every job that is past its prompt evaluates in this round, for each of its sequences."""
        ready = [job for job in self._scheduler.active if job.prefilled and not (job.is_finished or job.paused)]
        for job in ready:
            job.mark_decode()
        drafts = self._drafter.propose(ready)
        return {job: [Window(sequence, drafts.get(job, [])) for sequence in job.sequences] for job in ready}

    def _settle(self, job: ExLlamaV2DynamicJob, windows: list[Window]) -> Results:
        """Turn logits into accepted tokens and results, position by position while the guesses hold."""
        for window in windows:
            if window.error is not None:
                raise window.error
        rows = [window.take_logits() for window in windows]
        drafts = windows[0].ids[1:]
        before = job.accepted_draft_tokens
        job.note_drafts(len(drafts))
        for i, guess in enumerate([*drafts, None]):
            job.commit()
            held = job.advance([row[i] for row in rows], guess, self._deliver)
            if job.is_finished or not held:
                break
        job.adapt_drafts(len(drafts), job.accepted_draft_tokens - before)
        job.settle()
        return []

    def _guarded(self, job: ExLlamaV2DynamicJob, work: Callable[[], Results]) -> None:
        """Run one job's part of a round; its exception becomes its last result and nobody else's problem."""
        try:
            self._deliver(work())
        except Exception as error:
            self._deliver([job.fail(error)])
