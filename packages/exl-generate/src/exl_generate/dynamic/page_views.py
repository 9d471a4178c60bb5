"""The generator's pages as exllamav2's names show them: for tests, tools and reports, read only."""

from __future__ import annotations

from torch import Tensor

from exl_core import PagedParams
from exl_generate.dynamic.pages import Page, PageTable

__all__ = ["PageViews"]


class PageViews:
    """Base of a generator over `page_table`, whose pages have `page_size` tokens."""

    page_table: PageTable
    page_size: int

    @property
    def all_pages(self) -> list[Page]:
        """Every page of the cache, in the cache's order."""
        return list(self.page_table.pages)

    @property
    def referenced_pages(self) -> dict[int, Page]:
        """Pages that jobs use, by index."""
        return {page.index: page for page in self.page_table.pages if page.ref_count}

    @property
    def unreferenced_pages(self) -> dict[int, Page]:
        """Pages that no job uses, by index; their content may be reused."""
        return {page.index: page for page in self.page_table.pages if not page.ref_count}

    @property
    def access_serial(self) -> int:
        """Number of times that a sequence was given a page, new or shared."""
        return self.page_table.access_serial

    def get_paged_params(
        self, batch_size: int, block_index: Tensor, cache_seqlens: Tensor, max_cache_seqlen: int, q_len: int = 0
    ) -> PagedParams:
        """Return the parameters of an attention call over this generator's pages.

        `batch_size`, `block_index`, `cache_seqlens`, `max_cache_seqlen` and `q_len` are those of
        `exl_core.PagedParams`.
        """
        return PagedParams(batch_size, block_index, cache_seqlens, max_cache_seqlen, self.page_size, q_len)

    def print_page_list(self, short: bool = True) -> None:
        """Print one character a page: its number of users (+ beyond 9), . for none. Without `short`, one line a
        page.
        """
        pages = self.page_table.pages
        if short:
            print("".join("." if p.ref_count == 0 else str(p.ref_count) if p.ref_count < 10 else "+" for p in pages))
            return
        for page in pages:
            print(page)
