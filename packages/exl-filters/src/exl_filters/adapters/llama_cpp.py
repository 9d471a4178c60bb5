"""llama-cpp-python: filters as an entry of a `LogitsProcessorList`.

The entry maps `(input_ids, scores)` to scores; both are numpy arrays of one row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from exl_filters.adapters.rows import RowTracker
from exl_filters.masking import apply_mask
from exl_filters.vocabulary import vocabulary_of

__all__ = ["LlamaCppFilterProcessor"]


class LlamaCppFilterProcessor:
    """The filters of one completion. The ids of the first call are the prompt; call `reset()` before the next
    completion.

    Args:
        filters: Templates, as for `FilterStack`.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        stop_ids: Every id on which the engine stops; default: the tokenizer's.
    """

    def __init__(self, filters: Sequence[object], tokenizer: Any, stop_ids: Collection[int] | None = None) -> None:
        self._rows = RowTracker(filters, vocabulary_of(tokenizer), stop_ids)
        self._length: int | None = None

    def reset(self) -> None:
        """Prepare for another completion."""
        self._rows.reset()
        self._length = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return a copy of `scores` with the excluded entries at -inf."""
        row = [int(i) for i in input_ids]
        if self._length is None or len(row) < self._length:
            self.reset()
            self._length = len(row)
        (mask,) = self._rows.masks([row[self._length :]])
        return apply_mask(scores.copy(), mask)
