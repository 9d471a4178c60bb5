"""Draft tokens from text: from the same request, from an example text, and from the answers to earlier requests.

A step looks up the guesses of every job, which takes microseconds, and knows how probably each of them holds. The
number of guesses follows from these chances and from the measured costs of steps.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exl_generate.dynamic.speculation import Drafter, Drafts
from exl_kernels.drafting import MOST_NGRAM, MOST_TOKENS, DraftHistory, DraftRates, DraftText

if TYPE_CHECKING:
    import torch

    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["TextDrafter"]

#: Most ids of long texts read in a step; all jobs share them.
READ = 4096
#: Ids of a text that are read in any case: more than a step adds.
READ_ALWAYS = 64

Found = tuple[list[int], list[float]]
_NOTHING: Found = ([], [])


class TextDrafter(Drafter):
    """Draft the tokens that followed the longest match of the text's end earlier in the same request or in other texts.

    Args:
        most: Most guesses in a step.
        max_ngram: Tokens of the longest n-gram: the matched end of the text and its continuation.
        capacity: Most tokens of a request's text that are searched.
        device: Device of the model. Jobs of a step on a GPU get equally many guesses, since windows of one length
            share a pass; on a CPU a job gets those that are worth their row.
        history: Tokens of earlier answers that the guesses may come from; 0 for none. Requests with a `cache_salt`
            neither leave their answers there nor guess from them.
    """

    def __init__(
        self, most: int, max_ngram: int, capacity: int, device: torch.device | None = None, history: int = 0
    ) -> None:
        super().__init__(most)
        self._max_ngram, self._capacity = min(max_ngram, MOST_NGRAM), min(capacity, MOST_TOKENS)
        self._even = device is not None and device.type == "cuda"
        self._rates = DraftRates()
        self._shortest = self._threshold = 1
        self._preloaded: list[int] | None = None
        self._example: DraftHistory | None = None
        self._answers = DraftHistory(self._max_ngram, history) if history else None
        self._history = history
        #: answers that are still to be read
        self._unread: deque[NDArray[np.int64]] = deque()

    def configure(self, shortest: int, threshold: int, preloaded: list[int] | None) -> None:
        """Set the shortest context, the count that the first guess needs (one more for each further), and the example
        text, which is used where the request's own text has no match.
        """
        self._shortest, self._threshold = (max(1, min(given, MOST_TOKENS)) for given in (shortest, threshold))
        if preloaded is not self._preloaded:
            self._preloaded = preloaded
            self._example = DraftHistory(self._max_ngram, max(1, 2 * len(preloaded))) if preloaded else None
            if self._example is not None:
                self._example.append(np.array(preloaded, dtype=np.int64))

    def propose(self, jobs: list[ExLlamaV2DynamicJob], fixed: bool = False, prelaunched: bool = False) -> Drafts:
        """Return guesses for each job.

        Before a prelaunched step they only decide whether the step after it is prelaunched, too.
        """
        self.seconds = 0.0
        if not self.most or not jobs:
            return {}
        clock = self.length.clock
        start = clock()
        found = self._look_up(jobs)
        length = self.most if fixed else self.length.plan([chances for _, chances in found])
        drafts: Drafts = {}
        if length and not prelaunched:
            least = 0.0 if fixed or (self._even and len(jobs) > 1) else self.length.least_chance
            for job, (tokens, chances) in zip(jobs, found, strict=True):
                worth = sum(chance >= least for chance in chances[:length])
                if worth:
                    drafts[job] = tokens[:worth]
        self.seconds = clock() - start
        return drafts

    def _look_up(self, jobs: list[ExLlamaV2DynamicJob]) -> list[Found]:
        """Return guesses for each job that has room for them, and their chances."""
        left = READ - self._read_answers(READ // 4)
        found = []
        for job in jobs:
            text = job.drafts.text
            if text is None:
                text = self._begin(job)
            ids = job.sequence.ids
            unread = len(ids) - text.read
            budget = max(left, READ_ALWAYS)
            left -= min(budget, max(unread, 0))
            known = text.follow(ids, self._rates, budget)
            room = self.room(job)
            found.append(self._guesses(job, text, room) if known and room else _NOTHING)
        return found

    def _guesses(self, job: ExLlamaV2DynamicJob, text: DraftText, room: int) -> Found:
        example = self._example
        shared = self._answers if example is None and not job.request.cache_salt else example
        return text.guess(
            room,
            self._rates,
            shared,
            shortest=self._shortest,
            threshold=self._threshold,
            fallback=example is not None,
        )

    def _begin(self, job: ExLlamaV2DynamicJob) -> DraftText:
        text = job.drafts.text = DraftText(self._max_ngram, self._capacity)
        if self._answers is not None and not job.request.cache_salt:
            prompt = job.sequence.prompt_length
            job.drafts.on_end = lambda ids: self._keep(ids[max(0, prompt - self._max_ngram) :])
        return text

    def _keep(self, ids: NDArray[np.int64]) -> None:
        """Queue an answer, with the end of its prompt, to be read."""
        self._unread.append(ids[-self._history :].copy())
        while sum(map(len, self._unread)) > self._history:
            self._unread.popleft()

    def _read_answers(self, budget: int) -> int:
        """Read at most `budget` ids of the answers of finished jobs; returns their number."""
        answers = self._answers
        if answers is None or not self._unread:
            return 0
        ids = self._unread.popleft()
        answers.append(ids[:budget])
        if len(ids) > budget:
            self._unread.appendleft(ids[budget:])
        else:
            answers.cut()
        return min(len(ids), budget)
