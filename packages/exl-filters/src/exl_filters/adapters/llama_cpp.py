"""llama-cpp-python: filters as an entry of a `LogitsProcessorList`: `(input_ids, scores) -> scores`, numpy arrays of
one row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from exl_filters.adapters.rows import RowTracker
from exl_filters.masking import apply_mask
from exl_filters.vocabulary import vocabulary_of

__all__ = ["LlamaCppFilterProcessor"]


class LlamaCppFilterProcessor:
    """For one completion: the ids of the first call are the prompt. `reset()` before the next one."""

    def __init__(self, filters: Sequence[object], tokenizer: Any, stop_ids: Collection[int] | None = None) -> None:
        self._rows = RowTracker(filters, vocabulary_of(tokenizer), stop_ids)
        self._length: int | None = None

    def reset(self) -> None:
        """Make ready for another completion."""
        self._rows.reset()
        self._length = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        row = [int(i) for i in input_ids]
        if self._length is None or len(row) < self._length:
            self.reset()
            self._length = len(row)
        (mask,) = self._rows.masks([row[self._length :]])
        return apply_mask(scores.copy(), mask)
