"""transformers: filters as a `LogitsProcessor` for `generate`.

```python
processor = FilterLogitsProcessor([ExLlamaV2SelectFilter(None, tokenizer, ["yes", "no"])], tokenizer)
model.generate(**inputs, logits_processor=[processor])
```
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from exl_filters.adapters.rows import RowTracker
from exl_filters.masking import apply_mask
from exl_filters.vocabulary import vocabulary_of

__all__ = ["FilterLogitsProcessor"]


class FilterLogitsProcessor:
    """Filters as a logits processor for `generate`.

    It is called with `(input_ids [rows, length], scores [rows, width])` and returns scores with excluded entries at
    -inf. It works with batches, beams (rows may change places), padded finished rows, and candidates that are undone
    (assisted generation).

    The ids of the first call are the prompt. Rows start anew, with their ids as the prompt, if they do not continue the
    previous call by one token, or if all rows of that call had stopped. So one processor serves one `generate` after
    another, also where a prompt is the conversation so far. Call `reset()` first where a prompt is the last text and
    exactly one more token. A row with a token that was not allowed gets the stop tokens only.

    Args:
        filters: Templates, as for `FilterStack`; they must be copyable for more than one row.
        tokenizer: The model's tokenizer, or a `Vocabulary`.
        stop_ids: Every id on which `generate` stops; default: the tokenizer's.

    Raises:
        FilterDeadEnd: on a call, when no token is left for a row.
    """

    def __init__(self, filters: Sequence[object], tokenizer: Any, stop_ids: Collection[int] | None = None) -> None:
        vocabulary = vocabulary_of(tokenizer)
        self._rows = RowTracker(filters, vocabulary, stop_ids, may_guess=True)
        self._prompt: list[list[int]] = []
        self._before: list[list[int]] = []
        self._length = 0

    def reset(self) -> None:
        """Prepare for another `generate`, whatever its prompt."""
        self._rows.reset()
        self._before = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return a copy of `scores` with the excluded entries of every row at -inf."""
        rows = input_ids.tolist()
        if not self._continues(rows):
            self._begin(rows)
        masks = self._rows.masks([row[self._length :] for row in rows])
        self._before = rows
        result = scores.clone()
        for row, mask in zip(result, masks, strict=True):
            apply_mask(row, mask)
        return result

    def _begin(self, rows: list[list[int]]) -> None:
        self._rows.reset()
        self._prompt = rows
        self._length = len(rows[0])

    def _continues(self, rows: list[list[int]]) -> bool:
        """Whether every row is a row of the previous call, as far as that is kept, and one more token.

        False if all of those rows have stopped: no engine asks for more of them.
        """
        length = len(rows[0])
        if not self._before or not self._length < length <= len(self._before[0]) + 1:
            return False
        if all(self._rows.is_finished(row[self._length :]) for row in rows):
            return False
        pasts = {tuple(row[: length - 1]) for row in self._before}
        return all(tuple(row[:-1]) in pasts and row[: self._length] in self._prompt for row in rows)
