"""Speculative decoding: cheap guesses at the next tokens, which the model then evaluates together.

A guess never decides anything. Each position is sampled from the model's own logits with the request's own settings
and random numbers; a guess that agrees with the sample saves a pass, the first that does not ends the step. So
tokens are the same with any drafter, with a failing one, and without.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exl_generate.dynamic.runner import Chunk, Runner
from exl_generate.dynamic.sequence import EMBEDDING_INDEX

if TYPE_CHECKING:
    from exl_generate.dynamic.job import ExLlamaV2DynamicJob

__all__ = ["Drafter", "ModelDrafter", "NGramTrie", "NgramDrafter"]

log = logging.getLogger(__name__)

Drafts = dict["ExLlamaV2DynamicJob", list[int]]


class Drafter:
    """Guesses nothing. `most` is the longest draft per step."""

    most = 0

    def propose(self, jobs: list[ExLlamaV2DynamicJob]) -> Drafts:
        """Up to `most` guesses for each job, and never more than it may still generate after its next token."""
        return {}

    def prefill(self, chunks: SequenceOf[Chunk]) -> None:
        """The model is about to compute these parts of prompts."""

    def copy_page_head(self, source: int, target: int, tokens: int) -> None:
        """The model's K/V of the head of a page have been copied."""

    def room(self, job: ExLlamaV2DynamicJob) -> int:
        return max(0, min(self.most, job.draft_length, job.remaining_tokens - 1, job.room))


class NGramTrie:
    """Which token followed each context of up to `max_ngram` - 1 tokens most often, the latest of equals. Rows of
    embeddings are no tokens: they are part of contexts, and never what follows."""

    def __init__(self, max_ngram: int) -> None:
        self._depth = max_ngram - 1
        self._counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        self._best: dict[tuple[int, ...], int] = {}
        self._seen = 0

    def update(self, ids: NDArray[np.int64]) -> None:
        """Take in what has been appended to `ids` since the last call."""
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
        """What followed the longest known ending of `context` of at least `shortest` tokens, if it did `threshold`
        times."""
        for n in range(min(self._depth, len(context)), shortest - 1, -1):
            key = tuple(context[len(context) - n :])
            best = self._best.get(key)
            if best is not None and self._counts[key][best] >= threshold:
                return best
        return None


class NgramDrafter(Drafter):
    """Guesses by what followed the last few tokens earlier in the same request, or in a preloaded example text."""

    def __init__(self, most: int, max_ngram: int) -> None:
        self.most = most
        self._max_ngram = max_ngram
        self._shortest = self._threshold = 1
        self._preloaded: list[int] | None = None
        self._example: NGramTrie | None = None
        self._tries: weakref.WeakKeyDictionary[ExLlamaV2DynamicJob, NGramTrie] = weakref.WeakKeyDictionary()

    def configure(self, shortest: int, threshold: int, preloaded: list[int] | None) -> None:
        """Shortest context to go by, count that the first guess needs (one more for each further), example text."""
        self._shortest, self._threshold = shortest, threshold
        if preloaded is not self._preloaded:
            self._preloaded = preloaded
            self._example = NGramTrie(self._max_ngram) if preloaded else None
            if self._example is not None:
                self._example.update(np.array(preloaded, dtype=np.int64))

    def propose(self, jobs: list[ExLlamaV2DynamicJob]) -> Drafts:
        return {job: self._guess(job) for job in jobs if self.room(job)}

    def _guess(self, job: ExLlamaV2DynamicJob) -> list[int]:
        trie = self._tries.get(job)
        if trie is None:
            trie = self._tries[job] = NGramTrie(self._max_ngram)
        ids = job.sequence.ids
        trie.update(ids)
        context = ids[-self._max_ngram :].tolist()
        found: list[int] = []
        while len(found) < self.room(job):
            needed = self._threshold + len(found) if self._threshold > 1 else 1
            token = trie.predict(context, self._shortest, needed)
            if token is None and self._example is not None:
                token = self._example.predict(context, self._shortest, needed)
            if token is None:
                break
            found.append(token)
            context.append(token)
        return found


class ModelDrafter(Drafter):
    """Guesses greedily with a smaller model of the same vocabulary. Its cache has the main cache's pages: wherever
    the main cache holds K/V, this one holds the draft model's for the same tokens. If the draft model fails, the
    step goes on without."""

    def __init__(self, runner: Runner, most: int, vocab_size: int) -> None:
        self.most = most
        #: a guess less probable than this ends the draft
        self.threshold = 0.0
        self._runner = runner
        self._vocab_size = vocab_size

    def prefill(self, chunks: SequenceOf[Chunk]) -> None:
        for together in [[chunk] for chunk in chunks] if self._runner.hooked else [chunks]:
            for error in self._runner.compute(together):
                if error is not None:
                    log.warning("the draft model failed in prefill: %s", error)

    def copy_page_head(self, source: int, target: int, tokens: int) -> None:
        self._runner.copy_page_head(source, target, tokens)

    def propose(self, jobs: list[ExLlamaV2DynamicJob]) -> Drafts:
        """Every job's last token is fed, and every guess, so that the draft cache keeps pace whatever is accepted."""
        drafts: Drafts = {job: [] for job in jobs}
        rooms = {job: self.room(job) for job in jobs}
        try:
            for i in range(self.most + 1):
                rows = [job for job in jobs if i <= len(drafts[job])]
                if not rows:
                    break
                fed = [drafts[job][i - 1] if i else None for job in rows]
                for job, (guess, probability) in zip(rows, self._feed(rows, fed, i), strict=True):
                    if i < rooms[job] and probability >= self.threshold:
                        drafts[job].append(guess)
        except Exception as error:
            log.warning("the draft model failed: %s", error)
            return {}
        return drafts

    def _feed(self, jobs: list[ExLlamaV2DynamicJob], tokens: list[int | None], offset: int) -> list[tuple[int, float]]:
        """Feed one token per job (None = the last of each sequence), `offset` places behind the K/V that stand, to all
        its sequences. The most probable next token of each job's first sequence, and its probability where a threshold
        asks for it."""
        rows = [
            (sequence, int(sequence.ids[-1]) if token is None else token)
            for job, token in zip(jobs, tokens, strict=True)
            for sequence in job.sequences
        ]
        for sequence, _ in rows:
            sequence.provide(sequence.kv_position + offset + 1)
        ids = np.array([[token] for _, token in rows], dtype=np.int64)
        sequences = [sequence for sequence, _ in rows]
        out = self._runner.forward(ids, sequences, [s.kv_position + offset for s in sequences])
        logits = out["logits"].float()
        firsts = np.cumsum([0, *(len(job.sequences) for job in jobs[:-1])])
        first = logits[firsts, 0, : self._vocab_size]
        best = first.argmax(dim=-1)
        if self.threshold <= 0:
            return [(token, 1.0) for token in best.tolist()]
        probabilities = first.softmax(dim=-1).gather(1, best[:, None])[:, 0]
        return list(zip(best.tolist(), probabilities.tolist(), strict=True))
