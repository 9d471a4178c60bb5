"""Draft tokens from text: the tokens that followed the longest match of a text's end.

`DraftText` follows the text of one request and guesses its next tokens. `DraftHistory` holds texts of other requests in
bounded memory. `DraftRates` learns how often guesses hold. A guess is the most frequent continuation, the latest among
equals, of the longest context that has one. `exl_kernels.reference.drafting` is the same search in plain Python.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import _native
from .errors import DTypeError, UnsupportedError

__all__ = ["MOST_NGRAM", "MOST_TOKENS", "DraftHistory", "DraftRates", "DraftText"]

#: Longest n-gram.
MOST_NGRAM = 1024
#: Most tokens of a history.
MOST_TOKENS = 1 << 28
#: First id of rows of embeddings, which are parts of contexts and never guessed.
FIRST_NO_TOKEN = 1_000_000_000

Ids = NDArray[np.int64]


class DraftRates:
    """The share of guesses that held, by the evidence for them. Recent guesses count more.

    After `memory` guesses of one kind, earlier ones count half. Raises UnsupportedError if it is out of its range.
    """

    def __init__(self, memory: int = 256) -> None:
        #: the rates of the native module
        self.native = _native.DraftRates(_within("memory", memory, 1, MOST_TOKENS))


class DraftHistory:
    """Texts of many requests, of which at least the last half of `capacity` tokens can be found.

    Args:
        max_ngram: Tokens of the longest context and its continuation, 2 to 1024.
        capacity: Most tokens kept; at least 2 * `max_ngram` are. A token takes about 100 bytes.

    Raises UnsupportedError for a number out of its range.
    """

    def __init__(self, max_ngram: int, capacity: int) -> None:
        _within("max_ngram", max_ngram, 2, MOST_NGRAM)
        #: the history of the native module
        self.native = _native.DraftHistory(max_ngram, _within("capacity", capacity, 1, MOST_TOKENS), FIRST_NO_TOKEN)

    def append(self, ids: Ids) -> None:
        """Append int64 [n] ids to the present text. Raises DTypeError for anything else."""
        try:
            self.native.append(ids)
        except (TypeError, ValueError, BufferError) as error:
            raise _wrong(ids) from error

    def cut(self) -> None:
        """End the present text: no context reaches from it into the next one."""
        self.native.cut()

    @property
    def tokens(self) -> int:
        """Number of tokens kept; the few that are kept twice, as contexts, count twice."""
        return self.native.tokens

    @property
    def memory(self) -> int:
        """Bytes in use."""
        return self.native.memory


class DraftText:
    """The text of one request, and guesses at its next tokens.

    `max_ngram`, `capacity` and the errors are those of `DraftHistory`.
    """

    def __init__(self, max_ngram: int, capacity: int) -> None:
        _within("max_ngram", max_ngram, 2, MOST_NGRAM)
        self._native = _native.DraftText(max_ngram, _within("capacity", capacity, 1, MOST_TOKENS), FIRST_NO_TOKEN)

    def follow(self, ids: Ids, rates: DraftRates, budget: int = MOST_TOKENS) -> bool:
        """Read at most `budget` further ids of the text, int64 [n]. Returns whether all of them have been read.

        Ids that were read may have been withdrawn from the text's end. `rates` learns how the last guesses fared.
        Raises DTypeError for anything but a contiguous array of int64.
        """
        try:
            return self._native.follow(ids, budget, rates.native)
        except (TypeError, ValueError, BufferError) as error:
            raise _wrong(ids) from error

    def guess(
        self,
        most: int,
        rates: DraftRates,
        shared: DraftHistory | None = None,
        *,
        shortest: int = 1,
        threshold: int = 1,
        fallback: bool = False,
    ) -> tuple[list[int], list[float]]:
        """Return guesses at the tokens after those that `follow` has read.

        Args:
            most: Most guesses.
            rates: The rates of all requests; the request's own ones weigh more where they have evidence.
            shared: Texts that the guesses may depend on, too.
            shortest: Fewest tokens of a context.
            threshold: Times that the first guess must have followed its context. If it is more than 1, each further
                guess needs one more.
            fallback: Consult `shared` only where the text itself has no match; otherwise the longer match decides.

        Returns:
            The guesses, and for each the probability that it and all guesses before it hold.
        """
        return self._native.guess(
            most,
            None if shared is None else shared.native,
            rates.native,
            shortest=shortest,
            threshold=threshold,
            fallback=fallback,
        )

    @property
    def read(self) -> int:
        """Number of ids read."""
        return self._native.read

    @property
    def memory(self) -> int:
        """Bytes in use."""
        return self._native.memory


def _within(what: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UnsupportedError(f"{what} is {value}; it must be from {low} to {high}")
    return value


def _wrong(ids: object) -> DTypeError:
    found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
    return DTypeError(f"ids: found {found}, expected a contiguous numpy array of int64")
