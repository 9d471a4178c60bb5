"""Guesses from text by a search through all of it: the twin of `exl_kernels.drafting`, without estimates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["continuation", "guesses"]

#: First id of rows of embeddings.
FIRST_NO_TOKEN = 1_000_000_000


def continuation(
    texts: Sequence[Sequence[int]], context: Sequence[int], max_ngram: int, shortest: int = 1, needed: int = 1
) -> tuple[int, int] | None:
    """Return the token that most often followed the longest known end of `context`, and that end's length.

    The end has `shortest` to `max_ngram` - 1 tokens, and the token, the latest among equals, followed it at least
    `needed` times. None if there is no such end.
    """
    for length in range(min(max_ngram - 1, len(context)), shortest - 1, -1):
        end = list(context[len(context) - length :])
        followed: Counter[int] = Counter()
        latest: dict[int, tuple[int, int]] = {}
        for number, text in enumerate(texts):
            for at in range(length, len(text)):
                if text[at] < FIRST_NO_TOKEN and list(text[at - length : at]) == end:
                    followed[text[at]] += 1
                    latest[text[at]] = (number, at)
        if followed:
            token = max(followed, key=lambda t: (followed[t], latest[t]))
            if followed[token] >= needed:
                return token, length
    return None


def guesses(
    text: Sequence[int],
    most: int,
    max_ngram: int,
    shared: Sequence[Sequence[int]] = (),
    *,
    shortest: int = 1,
    threshold: int = 1,
    fallback: bool = False,
) -> list[int]:
    """Return the guesses of `DraftText.guess` after a text that has been read whole."""
    found: list[int] = []
    while len(found) < most:
        needed = threshold + len(found) if threshold > 1 else 1
        context = [*text, *found]
        own = continuation([text], context, max_ngram, shortest, needed)
        best = own
        if own is None or not fallback:
            theirs = continuation(shared, context, max_ngram, shortest, needed)
            if theirs is not None and (own is None or theirs[1] > own[1]):
                best = theirs
        if best is None:
            break
        found.append(best[0])
    return found
