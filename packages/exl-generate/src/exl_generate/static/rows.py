"""Present a cache of several rows as one long row from which pages are cut: the same memory with other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from exl_core.cache.view import PagedView
from exl_core.contracts import Cache as PassCache
from exl_generate.contracts import Cache, CacheView, first_missing

if TYPE_CHECKING:
    from exl_core.language_model import LoadedModel

__all__ = ["OneRow", "one_row", "page_size_of"]


class OneRow(CacheView):
    """Present `cache` with batch_size 1 and the length of all its rows together."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.batch_size = 1
        self.max_seq_len = cache.batch_size * cache.max_seq_len
        self.current_seq_len = 0

    @property
    def underlying(self) -> Cache:
        """The cache that owns the memory."""
        return self._cache

    @property
    def model(self) -> LoadedModel:
        """The model that the cache was made for."""
        return self._cache.model

    @property
    def kind(self) -> str:
        """The format of the stored keys and values."""
        return self._cache.kind

    def copy_states(
        self,
        target: Cache | OneRow,
        from_column: int,
        from_columns: int,
        to_column: int,
        to_columns: int,
        from_row: int,
        from_rows: int,
        to_row: int,
        to_rows: int,
    ) -> None:
        """Copy tokens inside one page to another page; pages never cross the end of a row.

        Rows are found from the columns: those that are given are of the one row.
        """
        length = self._cache.max_seq_len
        from_row, from_column = divmod(from_column, length)
        to_row, to_column = divmod(to_column, length)
        other = target._cache if isinstance(target, OneRow) else target
        self._cache.copy_states(
            other, from_column, from_columns, to_column, to_columns, from_row, from_rows, to_row, to_rows
        )


class PagedOneRow(OneRow, PagedView):
    """`OneRow` of a cache that executors take, with all that they read of a cache whose rows are pages."""

    def __init__(self, cache: Cache) -> None:
        OneRow.__init__(self, cache)
        PagedView.__init__(self, cast(PassCache, cache))


def one_row(cache: Cache) -> OneRow:
    """Return the view of `cache` for a generator over all of its rows."""
    return PagedOneRow(cache) if first_missing(cache, PassCache) is None else OneRow(cache)


def page_size_of(cache: Cache) -> int:
    """Return the largest page size up to 64 tokens that divides the cache's length; short, since few sequences share
    it.
    """
    return next(size for size in range(min(64, cache.max_seq_len), 0, -1) if cache.max_seq_len % size == 0)
