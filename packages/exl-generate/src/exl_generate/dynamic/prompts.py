"""Prefill: choose which parts of the prompts a step computes, and which of them share a forward pass.

On a GPU a pass over several prompts costs little more than a pass over one short prompt: every matrix is read once and,
beyond a few rows, dequantized once. Tokens must not depend on the choice. Passes of up to `ExLlamaV2.invariant_tokens`
tokens are batch-invariant: short prompts share passes up to that length, longer prompts share passes among themselves.
A batch-invariant pass evaluates the last token of its prompts, too: the first new token then needs no decode step.
Where a hook of the caller (`Intervention`) reads the hidden states, each prompt has its own pass. A prompt waits for an
earlier pass that computes a prefix which both have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from exl_generate.dynamic.events import Events
from exl_generate.dynamic.prompt_pace import PromptPace
from exl_generate.dynamic.prompt_wait import PromptWait
from exl_generate.dynamic.runner import Chunk, Runner, Window
from exl_generate.dynamic.scheduler import Scheduler
from exl_generate.dynamic.sequence import Sequence
from exl_generate.dynamic.snapshot import Counters
from exl_generate.dynamic.speculation import Drafter
from exl_kernels.selection import PACKED_ROWS

if TYPE_CHECKING:
    import torch

    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Prompts"]

#: A common prefix that is at least as long is computed once, whatever else could share the pass.
WORTH_WAITING = 16


class Prompts:
    """Compute prompt tokens for jobs in the order they started.

    A step computes at most so many tokens in all as `pace` allows. This bounds the time that running streams wait. New
    prompts may wait up to `wait_seconds` for others (`PromptWait`).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter,
        pace: PromptPace,
        wait_seconds: float,
        deliver: Callable[[Events], None],
        counters: Counters,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._drafter = drafter
        self._pace = pace
        self._deliver = deliver
        self.counters = counters
        #: logits float32 [Vp] of the prompts that this step has closed
        self.closed: dict[Sequence, torch.Tensor] = {}
        #: ids in common from which on a prompt waits for another
        self.worth = max(2, min(WORTH_WAITING, scheduler.table.page_size // 8))
        self._wait = PromptWait(wait_seconds, runner, self.worth)

    def step(self, waiting: list[ExLlamaV2DynamicJob]) -> bool:
        """Compute one step's tokens for the jobs in `waiting`, at most one chunk of each sequence.

        Returns False if the step computes no prompts, since there are none or all of them wait for others. After an
        interrupt the computed part is kept and the next step computes the rest.
        """
        if not waiting and not self._pace.limited:
            return False  # a limit is learned from steps without prompts, too
        budget = left = self._most()
        step = _PrefillStep(self, budget)
        try:
            ready = self._wait.ready(waiting, budget, self._decoding() if self._wait.holds else 0)
            for job in ready:
                if job.is_finished:  # meanwhile: a pass of this step may have failed
                    continue
                left -= step.take(job, left)
                if left < min(budget, self._scheduler.table.page_size):
                    break
            step.compute()
        finally:
            self._pace.spent(budget - left)
            self._deliver(step.events())
        return bool(ready)

    def serve(self, windows: list[Window]) -> list[Window]:
        """Give the windows of prompts that this step has closed their logits; return the others."""
        if not self.closed:
            return windows
        left = []
        for window in windows:
            row = self.closed.get(window.sequence)
            if row is None or len(window.ids) > 1 or window.wants_state:
                left.append(window)
            else:
                window.logits = [row]
        return left

    def has_closed(self, job: ExLlamaV2DynamicJob) -> bool:
        """Whether this step has closed all prompts of a job, so that its next token needs no pass."""
        return bool(self.closed) and all(sequence in self.closed for sequence in job.sequences)

    def _most(self) -> int:
        """Return the most tokens of this step."""
        # A hook may see how a prompt is cut: that must not depend on a clock.
        return self._pace.begin(self._pace.limited and self._decoding() > 0 and not self._runner.hooked)

    def _decoding(self) -> int:
        """Return the number of sequences whose jobs decode in this step."""
        active = self._scheduler.active
        decoding = (job for job in active if job.pages.prefilled and not job.paused and not job.is_finished)
        return sum(len(job.sequences) for job in decoding)


class _PrefillStep:
    """The prefill of one step. Chunks are collected until the chunks that can share their pass are known.

    A pass has at most `budget` tokens.
    """

    def __init__(self, owner: Prompts, budget: int) -> None:
        self._owner, self._budget = owner, budget
        self._runner, self._drafter = owner._runner, owner._drafter
        self._waiting: dict[object, list[tuple[ExLlamaV2DynamicJob, Chunk]]] = {}
        #: chunks that wait, and the pages they write, by how their prompts begin
        self._heads: dict[bytes, dict[Chunk, set[int]]] = {}
        self._failed: dict[ExLlamaV2DynamicJob, Events] = {}
        #: jobs in order, and whether they have made progress
        self._moved: dict[ExLlamaV2DynamicJob, bool] = {}

    def take(self, job: ExLlamaV2DynamicJob, budget: int) -> int:
        """Plan one chunk of each of the job's sequences, of at most `budget` tokens in all; returns the tokens."""
        job.times.mark_prefill()
        self._moved[job] = False
        spent = 0
        try:
            for sequence in job.sequences:
                self._catch_up(job, sequence)
                if sequence.prefilled or spent >= budget:
                    continue
                # Scored prompts need all logits, and a row of them is as large as the vocabulary.
                most = min(budget - spent, PACKED_ROWS) if sequence.scoring else budget - spent
                chunk = Chunk(sequence, *sequence.next_chunk(most))
                sequence.provide(chunk.end + (chunk.end == sequence.prefill_end))
                spent += len(chunk)
                self._put(job, chunk)
        except Exception as error:
            self._fail(job, error)
        return spent

    def compute(self) -> None:
        """Compute all collected chunks."""
        for kind in list(self._waiting):
            self._compute(kind)

    def events(self) -> Events:
        """The events of the jobs, in their order."""
        said: Events = []
        for job, moved in self._moved.items():
            if job in self._failed:
                said += self._failed[job]
            elif moved and not job.resumed:
                said += job.progress()
        return said

    def _catch_up(self, job: ExLlamaV2DynamicJob, sequence: Sequence) -> None:
        """Skip prompt K/V that is in the cache already.

        First compute the collected chunks if one of them computes a page that both sequences share, or a long common
        prefix.
        """
        alike = self._heads.get(self._head(sequence), {})
        head = None
        if alike:
            ours = sequence.pages_between(sequence.kv_position, sequence.prefill_end)
            if any(not ours.isdisjoint(pages) for pages in alike.values()):
                self.compute()
            elif self._worth_waiting(alike, sequence, sequence.computed_end()):
                head = sequence.head_elsewhere()
                if self._worth_waiting(alike, sequence, head.end):
                    self.compute()
                    head = None  # there may be a better one now
        gained = sequence.skip_cached(partial(self._copy_page_head, job), head)
        if not job.resumed:
            self._owner.counters.found_tokens += gained

    def _worth_waiting(self, alike: Iterable[Chunk], sequence: Sequence, start: int) -> bool:
        """Whether one of these chunks computes enough of the sequence after `start`."""
        end = start + self._owner.worth
        if end > sequence.prefill_end:
            return False
        return any(chunk.end >= end and sequence.begins_like(chunk.sequence, end) for chunk in alike)

    def _head(self, sequence: Sequence) -> bytes:
        """Return the first ids of the prompt; prompts that may wait for each other have them in common."""
        return sequence.keys[: min(self._owner.worth, sequence.page_size)].tobytes()

    def _put(self, job: ExLlamaV2DynamicJob, chunk: Chunk) -> None:
        kind, most = self._runner.kind_of(chunk)
        held = self._waiting.setdefault(kind, [])
        if held and sum(len(other) for _, other in held) + len(chunk) > most:
            self._compute(kind)
            held = self._waiting.setdefault(kind, [])
        held.append((job, chunk))
        pages = chunk.sequence.pages_between(chunk.start, chunk.end)
        self._heads.setdefault(self._head(chunk.sequence), {})[chunk] = pages

    def _compute(self, kind: object) -> None:
        held = self._waiting.pop(kind)
        for _, chunk in held:
            del self._heads[self._head(chunk.sequence)][chunk]
        held = [(job, chunk) for job, chunk in held if job not in self._failed]
        chunks = [chunk for _, chunk in held]
        if not chunks:
            return
        self._close(held)
        self._drafter.prefill(chunks)
        for (job, chunk), error in zip(held, self._runner.compute(chunks), strict=True):
            if error is not None:
                self._fail(job, error)
                continue
            chunk.sequence.commit(chunk.end)
            if chunk.logits is not None:
                self._owner.closed[chunk.sequence] = chunk.logits
            self._owner.counters.prefilled_tokens += len(chunk)
            self._moved[job] = True

    def _close(self, held: list[tuple[ExLlamaV2DynamicJob, Chunk]]) -> None:
        """Let the pass over these chunks close prompts whose first step needs no more than logits, as far as it has
        room for the last tokens.
        """
        room = min(self._budget, self._runner.kind_of(held[0][1])[1]) - sum(len(chunk) for _, chunk in held)
        for job, chunk in held:
            if room > 0 and not job.request.return_hidden_state and self._runner.may_close(chunk):
                chunk.closes = True
                room -= 1

    def _fail(self, job: ExLlamaV2DynamicJob, error: Exception) -> None:
        if job not in self._failed:
            self._failed[job] = [job.fail(error)]

    def _copy_page_head(self, job: ExLlamaV2DynamicJob, source: int, target: int, tokens: int) -> None:
        self._runner.copy_page_head(source, target, tokens)
        self._drafter.copy_page_head(source, target, tokens)
        self._moved[job] = True
