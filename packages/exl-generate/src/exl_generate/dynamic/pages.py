"""The page table: which physical page of the cache holds which tokens, who uses it, and what may be reused.

A page is `page_size` tokens of K/V. Full pages are labelled with a chained hash over everything that decides their
content: the namespace of model, cache and adapters, then every token from the start. So an equal label means an equal
prefix, in other processes too; the tokens are compared as well. A label may be set before the content exists: jobs that
need the same prefix share the page, and the first one that runs fills it.

Unused pages keep their content and wait in least-recently-used order. A sequence releases its last page first, and
every user of a page holds all pages before it. So a prefix is never evicted before the pages that follow it.

Reservations are counted, not taken: a job reserves the pages that its output may need, and takes each when it writes
there. So an unused reservation evicts nothing, and a started job can never run out of pages.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["PAGED_PAGE_SIZE", "Page", "PageTable", "namespace_digest", "page_hash"]

PAGED_PAGE_SIZE = 256

Ids = NDArray[np.int64]


def page_hash(previous: bytes, ids: Ids) -> bytes:
    """16-byte BLAKE2b over the previous page's digest and this page's ids as little-endian int64."""
    return hashlib.blake2b(previous + ids.astype("<i8").tobytes(), digest_size=16).digest()


def namespace_digest(parts: Sequence[str]) -> bytes:
    """Return the digest that precedes the first page, 16 bytes: of everything besides the tokens that decides K/V."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16, person=b"exl-namespace").digest()


class Page:
    """One physical page. `tokens[:valid]` are the ids whose K/V it holds; a labelled page stores all its ids
    beforehand.
    """

    __slots__ = ("broken", "drafted", "index", "label", "parent", "ref_count", "tokens", "valid")

    def __init__(self, index: int, tokens: Ids) -> None:
        self.index = index
        self.tokens = tokens
        self.ref_count = 0
        self.valid = 0
        #: the K/V may be NaN: the page cannot be found, and is forgotten with its last user
        self.broken = False
        #: leading ids whose K/V the draft model's cache holds
        self.drafted = 0
        #: chained hash of the full page, None while its end is open
        self.label: bytes | None = None
        #: label of the page before it (namespace digest for the first), None for a page without content
        self.parent: bytes | None = None

    def __repr__(self) -> str:
        return f"Page({self.index}, refs={self.ref_count}, valid={self.valid}, labelled={self.label is not None})"


class PageTable:
    """Own all pages of one cache. Every page is either referenced by `ref_count` sequences or waits in eviction
    order.
    """

    def __init__(self, num_pages: int, page_size: int = PAGED_PAGE_SIZE) -> None:
        self.page_size = page_size
        tokens = np.zeros((num_pages, page_size), dtype=np.int64)
        self.pages = [Page(i, tokens[i]) for i in range(num_pages)]
        self.reserved = 0
        #: unreferenced pages whose content can be found again
        self.cached = 0
        #: how often a sequence was given a page, new or shared
        self.access_serial = 0
        self._waiting: OrderedDict[int, Page] = OrderedDict((p.index, p) for p in self.pages)
        self._by_label: dict[bytes, Page] = {}
        #: (parent, first id) -> pages that continue `parent` with that id
        self._children: dict[tuple[bytes, int], dict[int, Page]] = {}

    @property
    def available(self) -> int:
        """Unreferenced pages that no reservation has claimed."""
        return len(self._waiting) - self.reserved

    @property
    def unreferenced(self) -> int:
        """Pages that no sequence uses."""
        return len(self._waiting)

    def reset(self) -> None:
        """Forget all cached content. Only while no page is referenced."""
        assert len(self._waiting) == len(self.pages), "reset of a page table in use"
        for page in self.pages:
            self._forget(page)
        self.cached = 0

    def find(self, label: bytes, ids: Ids) -> Page | None:
        """Return the page with this label if its ids are `ids`, else None."""
        page = self._by_label.get(label)
        return page if page is not None and np.array_equal(page.tokens, ids) else None

    def held(self, labels: Sequence[bytes]) -> int:
        """Return how many of a sequence's leading pages are in use.

        Every user of a page holds the pages before it; pages after a private copy are not counted. The ids are not
        compared, because this runs for every waiting job in every step.
        """
        for count, label in enumerate(labels):
            page = self._by_label.get(label)
            if page is None or page.ref_count == 0:
                return count
        return len(labels)

    def computed(self, labels: Sequence[bytes]) -> int:
        """Return how many of these leading full pages are in the cache, used or not.

        The ids are not compared. May be called from any thread.
        """
        for count, label in enumerate(labels):
            page = self._by_label.get(label)
            if page is None or page.valid < self.page_size:
                return count
        return len(labels)

    def reserve(self, count: int) -> None:
        """Reserve free pages, to be taken later."""
        assert 0 <= count <= self.available, "reservation beyond the free pages"
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Return reservations that are used up or not needed."""
        assert 0 <= count <= self.reserved, "more reservations returned than made"
        self.reserved -= count

    def share(self, page: Page) -> Page:
        """Add a reference to an existing page."""
        page.ref_count += 1
        self.access_serial += 1
        if self._waiting.pop(page.index, None) is not None and page.valid:
            self.cached -= 1
        return page

    def take(self, parent: bytes | None, keep: Page | None = None) -> Page:
        """Return an empty page that will follow `parent` (None = not known yet).

        The least recently used page is taken; `keep` last of all.
        """
        assert self._waiting, "a page was taken that was not reserved"
        index = next((i for i in self._waiting if keep is None or i != keep.index), None)
        page = self._waiting.pop(next(iter(self._waiting)) if index is None else index)
        self.cached -= page.valid > 0
        self._forget(page)
        page.ref_count = 1
        page.parent = parent
        self.access_serial += 1
        return page

    def label(self, page: Page, label: bytes, ids: Ids) -> None:
        """Label a full page with its present or future content, so that other sequences may share it."""
        assert label not in self._by_label, "a label belongs to one page"
        page.tokens[:] = ids
        page.label = label
        self._by_label[label] = page
        self._index(page)

    def adopt(self, page: Page, parent: bytes) -> None:
        """Set the parent of a page that was taken before its parent was complete."""
        if page.parent is None:
            page.parent = parent
            if page.valid > 0:
                self._index(page)

    def fill(self, page: Page, start: int, ids: Ids) -> None:
        """Record that the K/V of `ids` are at offsets start.. of the page (at or below `valid`)."""
        assert start <= page.valid, "a gap of unwritten K/V inside a page"
        end = start + len(ids)
        if page.label is None:
            page.tokens[start:end] = ids
        if page.valid == 0:
            self._index(page)
        page.valid = max(page.valid, end)

    def truncate(self, page: Page, valid: int) -> None:
        """Forget the K/V at offsets valid.. of an unlabelled page."""
        page.drafted = min(page.drafted, valid)
        if valid >= page.valid:
            return
        assert page.label is None, "a published page does not shrink"
        if valid == 0:
            self._unindex(page)
        page.valid = valid

    def publish(self, page: Page, label: bytes) -> Page:
        """Label a page that has just become full. Returns the page to use from now on.

        An older page with the same content wins.
        """
        assert page.valid == self.page_size
        if page.label is not None:
            return page
        other = self._by_label.get(label)
        if other is None:
            self.label(page, label, page.tokens.copy())
            return page
        if other.valid < self.page_size or not np.array_equal(other.tokens, page.tokens):
            return page  # a job is still filling the other page; this one stays private
        self.share(other)
        self.release(page)
        return other

    def release(self, page: Page, *, broken: bool = False) -> None:
        """Drop one reference. An unreferenced page keeps its valid content; a label without full content is removed.

        broken: the K/V may be NaN. No further sequence finds the page, also while others use it.
        """
        assert page.ref_count > 0, "a page was released more often than it was taken"
        page.ref_count -= 1
        if broken:
            page.broken = True
            self._hide(page)
        if page.ref_count > 0:
            return
        page.drafted = min(page.drafted, page.valid)  # the next user of the page may have other ids from there on
        if page.broken or page.parent is None or (page.valid == self.page_size and page.label is None):
            self._forget(page)  # without a known prefix, or a private duplicate of a published page
        if page.valid < self.page_size:
            self._unlabel(page)
        self._waiting[page.index] = page
        if page.valid == 0:
            self._forget(page)
            self._waiting.move_to_end(page.index, last=False)
        else:
            self.cached += 1

    def partial(self, parent: bytes, ids: Ids) -> tuple[Page, int] | None:
        """Return the page after `parent` whose valid ids share the longest prefix with `ids`, and its length (at least
        2).
        """
        best, most = None, 1
        for page in self._children.get((parent, int(ids[0])), {}).values() if len(ids) > 1 else ():
            length = min(page.valid, len(ids))
            if length <= most or page.tokens[most] != ids[most]:
                continue  # no longer than the best one: of many pages with one head only a few are compared
            differ = np.flatnonzero(page.tokens[:length] != ids[:length])
            common = int(differ[0]) if len(differ) else length
            if common > most:
                best, most = page, common
            if most == len(ids):
                break
        return None if best is None else (best, most)

    def _index(self, page: Page) -> None:
        if page.parent is not None:
            self._children.setdefault((page.parent, int(page.tokens[0])), {})[page.index] = page

    def _unindex(self, page: Page) -> None:
        if page.parent is None:
            return
        key = (page.parent, int(page.tokens[0]))
        siblings = self._children.get(key)
        if siblings is not None:
            siblings.pop(page.index, None)
            if not siblings:
                del self._children[key]

    def _unlabel(self, page: Page) -> None:
        if page.label is not None:
            del self._by_label[page.label]
            page.label = None

    def _hide(self, page: Page) -> None:
        self._unindex(page)
        self._unlabel(page)

    def _forget(self, page: Page) -> None:
        self._hide(page)
        page.parent, page.broken = None, False
        page.valid = page.drafted = 0
