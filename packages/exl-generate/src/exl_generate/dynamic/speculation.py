"""Speculative decoding: cheap guesses at the next tokens, which the model then evaluates together.

A guess never decides anything. Each position is sampled from the model's own logits with the request's own settings and
random numbers. A guess that agrees with the sample saves a pass; the first one that does not ends the step. So tokens
are the same with any drafter, with a failing one, and without one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exl_generate.dynamic.draft_length import Acceptance, DraftLength, geometric
from exl_generate.dynamic.runner import Chunk
from exl_generate.dynamic.sequence import EMBEDDING_INDEX

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Drafter", "Drafts", "NGramTrie"]

Drafts = dict["ExLlamaV2DynamicJob", list[int]]


class Drafter:
    """Draft nothing: the base class of drafters. `most` is the longest draft of a step; `length` chooses its length."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.length = DraftLength(most)
        #: seconds that the last `propose` took for guesses
        self.seconds = 0.0

    def propose(self, jobs: list[ExLlamaV2DynamicJob], fixed: bool = False, prelaunched: bool = False) -> Drafts:
        """Return guesses for each job: the number that `length` chooses, or always `most` if `fixed`.

        A job never gets more than it may still generate after its next token. `prelaunched`: the step runs already,
        without guesses.
        """
        self.seconds = 0.0
        if not self.most or not jobs:
            return {}
        chances = [geometric(job.drafts.acceptance.rate, self.room(job)) for job in jobs]
        length = self.most if fixed else self.length.plan(chances, lambda: self._overhead(jobs))
        clock = self.length.clock
        start = clock()
        if length == 0:
            if self.length.review_due():
                self._review(jobs)
                self.length.reviewed(clock() - start)
            return {}
        ready = self._catch_up(jobs)
        start = clock()
        drafts = self._guess(ready, length)
        self.seconds = clock() - start
        return drafts

    def new_acceptance(self) -> Acceptance:
        """Return statistics for a job that has drafted nothing yet."""
        return self.length.acceptance()

    def prefill(self, chunks: SequenceOf[Chunk]) -> None:
        """Prepare for these parts of prompts, which the model computes next."""

    def copy_page_head(self, source: int, target: int, tokens: int) -> None:
        """Follow a copy of the head of a page, whose main K/V have been copied."""

    def room(self, job: ExLlamaV2DynamicJob) -> int:
        """Return the number of guesses that the job has room for."""
        return max(0, min(self.most, job.remaining_tokens - 1, job.pages.room))

    def _guess(self, jobs: list[ExLlamaV2DynamicJob], length: int) -> Drafts:
        """Return up to `length` guesses for each of these jobs."""
        return {}

    def _catch_up(self, jobs: list[ExLlamaV2DynamicJob]) -> list[ExLlamaV2DynamicJob]:
        """Catch up after steps without drafting; returns the jobs that can get guesses."""
        return jobs

    def _overhead(self, jobs: list[ExLlamaV2DynamicJob]) -> float:
        """Return the seconds that `_catch_up` would take."""
        return 0.0

    def _review(self, jobs: list[ExLlamaV2DynamicJob]) -> None:
        """Record in the jobs' `acceptance` how many guesses at their last tokens would have held."""


class NGramTrie:
    """A name of exllamav2, which the generators do not use: `exl_kernels.drafting` guesses from text.

    Holds the token that followed each context of up to `max_ngram` - 1 tokens most often, the latest among equals.

    Rows of embeddings are not tokens: they are part of contexts, and never predicted.
    """

    def __init__(self, max_ngram: int) -> None:
        self._depth = max_ngram - 1
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        self._best: dict[tuple[int, ...], int] = {}
        self._seen = 0

    @property
    def seen(self) -> int:
        """Number of ids that the trie has read."""
        return self._seen

    def update(self, ids: NDArray[np.int64]) -> None:
        """Read the ids that were appended to `ids` since the last call."""
        start = min(self._seen, len(ids))
        tail = ids[max(0, start - self._depth) :].tolist()
        shift = len(ids) - len(tail)
        for at in range(max(start, 1), len(ids)):
            token = tail[at - shift]
            if token >= EMBEDDING_INDEX:
                continue
            for n in range(1, min(self._depth, at - shift) + 1):
                context = tuple(tail[at - shift - n : at - shift])
                counts = self._counts[context]
                counts[token] = counts.get(token, 0) + 1
                best = self._best.get(context)
                if best is None or counts[token] >= counts[best]:
                    self._best[context] = token
        self._seen = len(ids)

    def predict(self, context: SequenceOf[int], shortest: int = 1, threshold: int = 1) -> int | None:
        """Return the id that followed the longest known suffix of `context`, or None.

        The suffix has at least `shortest` tokens, and the id must have followed it `threshold` times.
        """
        for n in range(min(self._depth, len(context)), shortest - 1, -1):
            key = tuple(context[len(context) - n :])
            best = self._best.get(key)
            if best is not None and self._counts[key][best] >= threshold:
                return best
        return None
