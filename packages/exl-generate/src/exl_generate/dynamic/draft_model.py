"""Draft tokens with a smaller model of the same vocabulary.

The draft cache has the same pages as the main cache. `Page.drafted` is the number of the page's tokens whose draft K/V
it holds. Steps without drafting leave a gap, which is computed when drafting resumes.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.dynamic.pages import Page, PageTable
from exl_generate.dynamic.runner import Chunk, Runner
from exl_generate.dynamic.sequence import Sequence
from exl_generate.dynamic.speculation import Drafter, Drafts
from exl_kernels.sampling import Failure, Sampled, launch

if TYPE_CHECKING:
    from exl_generate.contracts import PrelaunchableStep
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob
    from exl_kernels.sampling import TokenTarget

_Logits = dict["ExLlamaV2DynamicJob", torch.Tensor]
"""Logits of each job: a row, float32 [V]."""

__all__ = ["ModelDrafter"]

log = logging.getLogger(__name__)

#: Missing ids that the first draft pass of a step may compute together with the last id.
WINDOW = 2
#: Ids whose guesses a review tests.
REVIEWED = 64


@dataclass(frozen=True, slots=True)
class _ComputedGuesses:
    """Guesses whose draft K/V were computed, at positions from `start` on, in these pages."""

    start: int
    tokens: list[int]
    pages: list[Page]
    requeues: int


@dataclass(slots=True)
class _PrelaunchedPass:
    """A pass of the draft model that is queued before the host has seen its ids."""

    jobs: list[ExLlamaV2DynamicJob]
    step: PrelaunchableStep
    inputs: TokenTarget
    #: [B, 1, Vp], once queued with the right ids
    logits: torch.Tensor | None = None


class ModelDrafter(Drafter):
    """Draft with a model. If the draft model fails, the step continues without guesses.

    On a GPU each pass is queued before the host has seen the guesses that it computes.

    A guess is drawn from the draft model's logits with the settings and the random number of the token that it guesses:
    the more alike both distributions are, the more often both draw the same token.

    Args:
        runner: Runs the draft model over its cache.
        table: The pages of the main cache.
        most: Most guesses in a step.
        vocab_size: Ids of the main model. Guesses are ids that both models have.
        budget: Most ids in a pass that catches up.
    """

    def __init__(self, runner: Runner, table: PageTable, most: int, vocab_size: int, budget: int) -> None:
        super().__init__(most)
        #: a guess less probable than this ends the draft
        self.threshold = 0.0
        self._runner = runner
        self._table = table
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._budget = budget
        self._computed: weakref.WeakKeyDictionary[ExLlamaV2DynamicJob, _ComputedGuesses] = weakref.WeakKeyDictionary()
        #: seconds per token of the last pass that computed tokens which the draft model had missed
        self._pace = 0.0
        self._reviews = 0

    def prefill(self, chunks: SequenceOf[Chunk]) -> None:
        """Compute the draft K/V of these parts of prompts, unless drafting is off."""
        if self.length.current == 0:
            return  # computed if drafting resumes
        mine = []
        for chunk in chunks:
            known = self._known(chunk.sequence)
            if chunk.start <= known < chunk.end:
                mine.append(Chunk(chunk.sequence, known, chunk.end))
        self._compute(mine)

    def copy_page_head(self, source: int, target: int, tokens: int) -> None:
        """Copy the draft K/V of the head of a page, as far as they exist."""
        drafted = min(tokens, self._table.pages[source].drafted)
        if drafted > self._table.pages[target].drafted:
            self._runner.copy_page_head(source, target, drafted)
            self._table.pages[target].drafted = drafted

    # ---- guesses ---------------------------------------------------------------------------------------------------

    def _guess(self, jobs: list[ExLlamaV2DynamicJob], length: int) -> Drafts:
        rooms = {job: min(length, room) for job in jobs if (room := self.room(job))}
        drafts: Drafts = {job: [] for job in rooms}
        fed: dict[ExLlamaV2DynamicJob, list[int]] = {job: [] for job in rooms}
        # The last id is always computed, because the logits after it are needed.
        starts = {job: min(self._known(job.sequence), len(job.sequence) - 1) for job in rooms}
        try:
            logits = self._first(starts)
            while logits:
                prelaunched = self._prelaunched_pass(list(logits), drafts, rooms)
                guesses = self._draw(logits, drafts, prelaunched)
                for job, (guess, probability) in guesses.items():
                    if probability >= self.threshold:
                        drafts[job].append(guess)
                live = [job for job in guesses if len(fed[job]) < len(drafts[job]) < rooms[job]]
                logits = self._further(live, drafts, prelaunched)
                for job in live:
                    fed[job].append(drafts[job][-1])
        except Exception as error:
            log.warning("the draft model failed: %s", error)
            for job, start in starts.items():
                self._unmark(job.sequence, start)
            return {}
        for job, tokens in fed.items():
            self._remember(job, tokens)
        return drafts

    def _first(self, starts: dict[ExLlamaV2DynamicJob, int]) -> _Logits:
        """Return the logits after the last id of each job; the job's few ids without K/V, from `starts` on, are
        computed in the same pass.
        """
        windows: dict[int, list[tuple[ExLlamaV2DynamicJob, int]]] = defaultdict(list)
        for job, start in starts.items():
            windows[len(job.sequence) - start].append((job, start))
        found: _Logits = {}
        for group in windows.values():
            ids = np.stack([job.sequence.ids[start:] for job, start in group])
            # The next pass may overwrite these logits.
            found |= self._feed(ids, [job for job, _ in group], [start for _, start in group], keep=len(windows) > 1)
            for job, start in group:
                self._mark(job.sequence, start, len(job.sequence))
        return found

    def _further(
        self, jobs: list[ExLlamaV2DynamicJob], drafts: Drafts, prelaunched: _PrelaunchedPass | None
    ) -> _Logits:
        """Return the logits after the last guess of each job: those of the prelaunched pass, if it has run."""
        if not jobs:
            return {}
        if prelaunched is not None and prelaunched.logits is not None:
            return {job: row for job, row in self._rows(prelaunched.jobs, prelaunched.logits).items() if job in jobs}
        ids = np.array([[drafts[job][-1]] for job in jobs], dtype=np.int64)
        places = [len(job.sequence) + len(drafts[job]) - 1 for job in jobs]
        return self._feed(ids, jobs, places)

    def _feed(
        self, ids: NDArray[np.int64], jobs: list[ExLlamaV2DynamicJob], places: list[int], keep: bool = False
    ) -> _Logits:
        """Compute `ids` [B, q] at these positions, one row for each job; returns the logits after each row."""
        sequences = [job.sequence for job in jobs]
        for sequence, place in zip(sequences, places, strict=True):
            sequence.provide(place + ids.shape[1])
        logits = self._runner.forward(ids, sequences, places)["logits"]
        return self._rows(jobs, logits.clone() if keep else logits)

    def _rows(self, jobs: list[ExLlamaV2DynamicJob], logits: torch.Tensor) -> _Logits:
        return dict(zip(jobs, logits[:, -1, : self._vocab_size].float(), strict=True))

    def _prelaunched_pass(
        self, jobs: list[ExLlamaV2DynamicJob], drafts: Drafts, rooms: dict[ExLlamaV2DynamicJob, int]
    ) -> _PrelaunchedPass | None:
        """Prepare the pass over the guesses that are drawn next, for the sampler to fill in on a GPU.

        None where a job needs no further guess, or a guess may end a draft.
        """
        if self.threshold > 0 or not self._runner.asynchronous:
            return None
        if any(len(drafts[job]) + 1 >= rooms[job] for job in jobs):
            return None
        sequences = [job.sequence for job in jobs]
        places = [len(job.sequence) + len(drafts[job]) for job in jobs]
        for sequence, place in zip(sequences, places, strict=True):
            sequence.provide(place + 1)
        _, step = self._runner.prelaunchable_step(sequences, places)
        inputs = None if step is None else step.inputs()
        return None if step is None or inputs is None else _PrelaunchedPass(jobs, step, inputs)

    def _draw(
        self, logits: _Logits, drafts: Drafts, prelaunched: _PrelaunchedPass | None
    ) -> dict[ExLlamaV2DynamicJob, tuple[int, float]]:
        """Return the token that each job draws, and the draft model's probability of it where a threshold needs it.

        A job that can draw none has no guess. The pass `prelaunched` is queued before the tokens are read. Raises
        DeviceError if devices of the draft model lost one another.
        """
        rows = [job.guess_row(row, drafts[job]) for job, row in logits.items()]
        launched = launch(rows, None if prelaunched is None else prelaunched.inputs)
        if prelaunched is not None and launched.written:
            prelaunched.logits = prelaunched.step.launch()
        drawn = self._checked(launched.collect())
        if prelaunched is not None and not launched.written:
            prelaunched.logits = None
        tokens = {job: found.token for job, found in zip(logits, drawn, strict=True) if isinstance(found, Sampled)}
        if self.threshold <= 0:
            return {job: (token, 1.0) for job, token in tokens.items()}
        chances = torch.stack(list(logits.values())).softmax(dim=-1).cpu()
        return {
            job: (tokens[job], float(row[tokens[job]]))
            for job, row in zip(logits, chances, strict=True)
            if job in tokens
        }

    def _checked(self, drawn: list[Sampled | Failure]) -> list[Sampled | Failure]:
        """Return these guesses. Raises DeviceError if some are missing because devices lost one another."""
        if not all(isinstance(found, Sampled) for found in drawn):
            self._runner.check_peers()
        return drawn

    # ---- the draft cache -------------------------------------------------------------------------------------------

    def _known(self, sequence: Sequence) -> int:
        """Return the number of leading ids of a sequence whose K/V the draft cache holds."""
        known, size = 0, self._table.page_size
        for page in sequence.allocated_pages:
            known += page.drafted
            if page.drafted < size:
                break
        return min(known, len(sequence))

    def _unmark(self, sequence: Sequence, start: int) -> None:
        """Record that the K/V of ids from `start` on are of no use: a failed pass may have written them."""
        size = self._table.page_size
        for k in range(start // size, len(sequence.allocated_pages)):
            page = sequence.allocated_pages[k]
            page.drafted = min(page.drafted, max(0, start - k * size))

    def _mark(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that the K/V of ids start..end were computed; those before exist already."""
        size = self._table.page_size
        for k in range(start // size, -(-end // size)):
            page = sequence.allocated_pages[k]
            page.drafted = max(page.drafted, min(size, end - k * size))

    def _remember(self, job: ExLlamaV2DynamicJob, tokens: list[int]) -> None:
        """Record that these guesses were computed after the job's ids: K/V of guesses that hold are kept."""
        start, size = len(job.sequence), self._table.page_size
        pages = job.sequence.allocated_pages[start // size : -(-(start + len(tokens)) // size)]
        self._computed[job] = _ComputedGuesses(start, tokens, pages, job.pages.requeues)

    def _settle(self, job: ExLlamaV2DynamicJob) -> None:
        """Mark the guesses of the last step that held."""
        found = self._computed.pop(job, None)
        if found is None or found.requeues != job.pages.requeues or self._known(job.sequence) != found.start:
            return
        held = 0
        for token, guess in zip(job.sequence.ids[found.start :].tolist(), found.tokens, strict=False):
            if token != guess:
                break
            held += 1
        first = found.start // self._table.page_size
        now = job.sequence.allocated_pages[first : first + len(found.pages)]
        if held and all(a is b for a, b in zip(found.pages, now, strict=False)):  # not replaced by an older page
            self._mark(job.sequence, found.start, found.start + held)

    def _catch_up(self, jobs: list[ExLlamaV2DynamicJob]) -> list[ExLlamaV2DynamicJob]:
        budget, start = self._budget, self.length.clock()
        chunks: list[Chunk] = []
        pages: set[int] = set()
        for job in jobs:
            self._settle(job)
            sequence = job.sequence
            known = self._known(sequence)
            if budget <= 0 or not self._lags(sequence, known):
                continue
            if not pages.isdisjoint(sequence.pages_between(known, len(sequence))):
                self._compute(chunks)  # some of these pages belong to this job, too
                chunks, known = [], self._known(sequence)
                if not self._lags(sequence, known):
                    continue
            chunks.append(Chunk(sequence, known, min(len(sequence) - 1, known + budget)))
            pages |= sequence.pages_between(known, len(sequence))
            budget -= len(chunks[-1])
        self._compute(chunks)
        if budget < self._budget:
            self._pace = (self.length.clock() - start) / (self._budget - budget)
        return [job for job in jobs if not self._lags(job.sequence, self._known(job.sequence))]

    def _lags(self, sequence: Sequence, known: int) -> bool:
        """Whether more ids are missing than the first draft pass of a step computes, or some in a shared page."""
        if known >= len(sequence) - 1:
            return False
        page = sequence.allocated_pages[known // self._table.page_size]
        return len(sequence) - known > WINDOW or page.ref_count > 1

    def _overhead(self, jobs: list[ExLlamaV2DynamicJob]) -> float:
        return self._pace * sum(len(job.sequence) - self._known(job.sequence) for job in jobs)

    def _compute(self, chunks: list[Chunk]) -> None:
        """Compute the draft K/V of these ids; each chunk follows existing K/V."""
        groups = [[chunk] for chunk in chunks] if self._runner.hooked else [chunks] if chunks else []
        for group in groups:
            for chunk, error in zip(group, self._runner.compute(group), strict=True):
                if error is not None:
                    log.warning("the draft model failed on a prompt: %s", error)
                else:
                    self._mark(chunk.sequence, chunk.start, chunk.end)

    def _review(self, jobs: list[ExLlamaV2DynamicJob]) -> None:
        """Let the draft model guess each of the last tokens of one job, in one pass; the jobs alternate.

        The pass uses a free page, as if the text began there. Without such a page it follows the K/V of the draft
        cache.
        """
        self._reviews += 1
        job = jobs[self._reviews % len(jobs)]
        self._settle(job)
        sequence = job.sequence
        known, end = self._known(sequence), len(sequence) - 1
        free = next((page for page in reversed(sequence.allocated_pages) if page.drafted == 0), None)
        start = end - min(REVIEWED, self._table.page_size, end)
        if free is None or known >= start:
            start, free = min(known, end), None
        start = max(start, end - self._budget)
        if start >= end or (free is None and start > known):
            return
        try:
            if free is None:
                out = self._runner.forward(sequence.ids[None, start:end], [sequence], [start])
                self._mark(sequence, start, end)
            else:
                scratch = cast(Sequence, SimpleNamespace(block=np.array([free.index], dtype=np.int32)))
                out = self._runner.forward(sequence.ids[None, start:end], [scratch], [0])
        except Exception as error:
            log.warning("the draft model failed: %s", error)
            return
        skipped = 0 if free is None else (end - start) // 4  # guesses that have seen too little of the text
        first = max(start + 1 + skipped, sequence.prompt_length)
        logits = out["logits"][0, first - start - 1 :, : self._vocab_size].float()
        rows = [job.guess_row(row, [], at) for at, row in enumerate(logits, first)]
        wanted = sequence.ids[first : end + 1].tolist()
        try:
            drawn = self._checked(launch(rows).collect())
        except Exception as error:
            log.warning("the draft model failed: %s", error)
            if free is None:
                self._unmark(sequence, start)
            return
        guesses = [found.token if isinstance(found, Sampled) else None for found in drawn]
        job.drafts.acceptance.review(len(wanted), sum(map(operator.eq, guesses, wanted)))
