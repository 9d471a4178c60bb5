"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

__all__ = ["PromptScores", "TokenScore", "scores_of"]


class TokenScore(NamedTuple):
    """Natural logarithms of the model's own probabilities at one position, before any transform."""

    token: int
    #: None for the first token of a prompt, which nothing precedes
    logprob: float | None
    #: (token, logprob) of the most probable tokens, best first; of equal ones the lower id
    top: tuple[tuple[int, float], ...] = ()


def scores_of(logits: torch.Tensor, tokens: Iterable[int], vocab_size: int, top: int) -> list[TokenScore]:
    """Return the scores of `tokens`, one for each row of `logits` (float [n, padded vocabulary]).

    `top` is the number of candidates in each score; columns from `vocab_size` on do not count.
    """
    rows = torch.log_softmax(logits[:, :vocab_size].double(), dim=-1)
    found = list(tokens)
    own = rows[torch.arange(len(found)), torch.tensor(found, device=rows.device)].tolist()
    if not top:
        return [TokenScore(token, value) for token, value in zip(found, own, strict=True)]
    values, ids = torch.topk(rows, min(top, vocab_size), dim=-1)
    least, kept = values[:, -1:], ids.shape[1]
    # `topk` chooses among equal values as it likes: where more are equal to the last one, take the lower ids.
    tied = (torch.count_nonzero(rows >= least, dim=-1) > kept).tolist()
    scores = []
    for at, token in enumerate(found):
        pairs = zip(ids[at].tolist(), values[at].tolist(), strict=True)
        if tied[at]:
            at_least = torch.nonzero(rows[at] >= least[at]).flatten()
            pairs = zip(at_least.tolist(), rows[at][at_least].tolist(), strict=True)
        best = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:kept]
        scores.append(TokenScore(token, own[at], tuple(best)))
    return scores


class PromptScores:
    """The scores of one prompt, found while its parts are computed. `top`: candidates for each token."""

    def __init__(self, top: int, prompt: list[int]) -> None:
        self._top, self._prompt = top, prompt
        #: those found so far, in the order of the prompt
        self.found = [TokenScore(prompt[0], None)]

    @property
    def complete(self) -> bool:
        """Whether every token has its score."""
        return len(self.found) >= len(self._prompt)

    def add(self, start: int, logits: torch.Tensor, vocab_size: int) -> None:
        """Take the logits (float [n, padded vocabulary]) of the ids at `start` and after it."""
        begin = len(self.found)
        targets = self._prompt[begin : start + 1 + len(logits)]
        if targets:
            rows = logits[begin - start - 1 : begin - start - 1 + len(targets)]
            self.found += scores_of(rows, targets, vocab_size, self._top)
