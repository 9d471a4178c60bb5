"""Assign constraints to the rows of a batch, by the rows' ids alone.

Engines that pass `(ids so far, logits)` reorder rows without notice (beam search) and go on calling for finished rows.
So the state of a row is looked up by its generated ids. A stack that has seen all but the last id takes that id. Where
two rows share a past, the second gets a copy. Where no stack fits, the ids are fed from the start.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from exl_filters import bits
from exl_filters.bits import Words
from exl_filters.errors import FilterRejected, FilterUsageError
from exl_filters.host import FilterStack
from exl_filters.vocabulary import Vocabulary

__all__ = ["RowTracker"]


class RowTracker:
    """The masks of a batch, call after call.

    Args:
        filters: Templates, as for `FilterStack`.
        vocabulary: The vocabulary that masks cover.
        stop_ids: Every id on which the engine stops; default: the vocabulary's.
        may_guess: Rows may hold a token that was not allowed and is undone later. Such rows get the stop ids meanwhile.

    Raises:
        FilterUsageError: no stop id is known.
    """

    def __init__(
        self,
        filters: Sequence[object],
        vocabulary: Vocabulary,
        stop_ids: Collection[int] | None = None,
        *,
        may_guess: bool = False,
    ) -> None:
        self.filters = list(filters)
        self.vocabulary = vocabulary
        self.stop_ids = frozenset(vocabulary.stop_ids if stop_ids is None else stop_ids)
        if not self.stop_ids:
            raise FilterUsageError("no stop ids are known, so no text could end: pass stop_ids")
        self._may_guess = may_guess
        self._stop_words = bits.from_ids(self.stop_ids, vocabulary.size)
        self._known: dict[tuple[int, ...], FilterStack] = {}

    def reset(self) -> None:
        """Forget all rows."""
        for stack in self._known.values():
            stack.close()
        self._known = {}

    def masks(self, rows: Sequence[Sequence[int]]) -> list[Words | None]:
        """Return for each row of generated ids the mask of the next id; None where the row is finished or unrestricted.

        A row whose constraint has ended without a stop token may only stop.
        """
        found: dict[tuple[int, ...], FilterStack] = {}
        masks: list[Words | None] = []
        for row in rows:
            generated = tuple(row)
            stack = found.get(generated)
            if stack is None:
                try:
                    stack = found[generated] = self._stack_for(generated, rows)
                except FilterRejected:
                    if not self._may_guess:
                        raise
                    masks.append(self._stop_words)
                    continue
            masks.append(self._mask(stack, generated))
        kept = set(map(id, found.values()))
        for stack in self._known.values():
            if id(stack) not in kept:
                stack.close()
        self._known = found
        return masks

    def _stack_for(self, generated: tuple[int, ...], rows: Sequence[Sequence[int]]) -> FilterStack:
        past = generated[:-1]
        stack = self._known.get(past) if generated else None
        if stack is None:
            stack = self._known.pop(generated, None)
            if stack is not None:
                return stack
            stack = FilterStack(self.filters, vocab_size=self.vocabulary.size, stop_ids=self.stop_ids)
            try:
                stack.begin("")
                for token in generated:
                    stack.feed(token)
            except FilterRejected:
                stack.close()
                raise
            return stack
        heirs = sum(tuple(row[:-1]) == past and tuple(row) != generated for row in rows)
        if heirs:
            stack = stack.copy()
        else:
            del self._known[past]
        stack.feed(generated[-1])
        return stack

    def is_finished(self, generated: Sequence[int]) -> bool:
        """Whether the row ends with a stop token."""
        return any(token in self.stop_ids for token in generated)

    def _mask(self, stack: FilterStack, generated: tuple[int, ...]) -> Words | None:
        if self.is_finished(generated):
            return None
        return self._stop_words if stack.ended else stack.next_mask()
