"""`FilterContext`: the facts that a host gives its filters before they begin."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from exl_filters.errors import FilterUsageError

__all__ = ["FilterContext"]


@dataclass(frozen=True)
class FilterContext:
    """Facts of one generation.

    Args:
        vocab_size: Token ids are in [0, vocab_size).
        stop_ids: Every id at which this host stops: the tokenizer's EOS, generation_config's and the job's. A filter
            offers
            all of them once its text is complete, and none before.
        special_ids: Control tokens. They are never matched by their spelling.
        logits_width: Entries of a row of logits, at least `vocab_size`.
    """

    vocab_size: int
    stop_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    logits_width: int = field(default=0)

    @classmethod
    def make(
        cls,
        vocab_size: int,
        stop_ids: Iterable[int | None] = (),
        special_ids: Collection[int] = (),
        logits_width: int | None = None,
    ) -> FilterContext:
        """Build a context from checked arguments. None and ids outside the vocabulary are left out of the stop ids.

        Raises:
            FilterUsageError: `vocab_size` is below 1, or `logits_width` is below `vocab_size`.
        """
        if vocab_size < 1:
            raise FilterUsageError(f"vocab_size is {vocab_size}; it must be at least 1")
        width = vocab_size if logits_width is None else logits_width
        if width < vocab_size:
            raise FilterUsageError(f"logits_width {width} is less than vocab_size {vocab_size}")
        stops = frozenset(int(i) for i in stop_ids if i is not None and 0 <= int(i) < vocab_size)
        return cls(vocab_size, stops, frozenset(int(i) for i in special_ids), width)
