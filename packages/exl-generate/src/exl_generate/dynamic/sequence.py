"""One token sequence of a job: its ids, its pages, and how far their K/V have been computed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl_core import SeqTensor
from exl_generate.dynamic.pages import Page, PageTable, page_hash

if TYPE_CHECKING:
    from exl_generate.contracts import Embedding, RequestAdapter
    from exl_generate.dynamic.prompt_scores import PromptScores

__all__ = ["EMBEDDING_INDEX", "NO_PICTURES", "PageHead", "Pictures", "Sequence", "full_pages"]

Ids = NDArray[np.int64]

#: Ids from here on are rows of embeddings.
EMBEDDING_INDEX = 1_000_000_000


@dataclass(frozen=True)
class Pictures:
    """Effects of images in the prompt besides their rows."""

    #: (place, offset of positions from there on): after images on three axes
    offsets: tuple[tuple[int, int], ...] = ()
    #: (first, last + 1) of images whose rows see each other: no chunk of the prompt ends inside one
    whole: tuple[tuple[int, int], ...] = ()

    def offset_at(self, place: int) -> int:
        """Return the position of the token at `place`, minus `place` (inside an image: of its first token)."""
        found = bisect_right(self.offsets, place, key=lambda mark: mark[0])
        return self.offsets[found - 1][1] if found else 0


NO_PICTURES = Pictures()


@dataclass(frozen=True, slots=True)
class PageHead:
    """The head of a sequence's page number `page` in another page (`found`), and the position where it ends."""

    page: int
    end: int
    found: tuple[Page, int] | None


class Sequence:
    """Ids and K/V of one sequence. `kv_position` is the number of leading ids whose K/V are in the pages.

    The last id of the context is never prefilled: it is the first input of the decode step, so prefill is done when
    `kv_position` reaches `prefill_end`. Pages are identified by `keys`: the ids, with rows of embeddings named by their
    content. So the same image is found again under other ids.
    """

    def __init__(
        self,
        input_ids: Ids,
        embeddings: SequenceOf[Embedding] = (),
        keys: Ids | None = None,
        pictures: Pictures = NO_PICTURES,
        generated: SequenceOf[int] = (),
        scores: PromptScores | None = None,
    ) -> None:
        self.prompt_length = len(input_ids)
        self.embeddings = tuple(embeddings)
        self.pictures = pictures
        #: takes the logits of the prompt, where they are asked for
        self.scores = scores
        #: adapters that are active for this sequence; set when the job is queued
        self.loras: tuple[RequestAdapter, ...] = ()
        known = np.array(generated, dtype=np.int64)
        self._buffer = np.concatenate([np.asarray(input_ids, dtype=np.int64), known])
        self._keys = self._buffer if keys is None else np.concatenate([keys, known])
        #: number of ids so far
        self.length = len(self._buffer)
        #: tokens a page; 0 before `prepare`
        self.page_size = 0
        #: ids before this one are prefilled, the rest is generated
        self.prefill_end = self.length - 1
        self.kv_position = 0
        #: physical page numbers of `allocated_pages`, int32
        self.block = np.zeros(0, dtype=np.int32)
        self.allocated_pages: list[Page] = []
        #: pages taken that did not follow the page before them in the cache
        self.non_sequential_pages = 0
        #: labels of the leading full pages, as far as they are known
        self.labels: list[bytes] = []
        self.cached_pages = 0
        self.cached_tokens = 0
        self._root = b""
        #: first page whose name follows `_root` instead of the page before it; 0 unless `make_private` was called
        self._private_from = 0
        self._reserved = 0
        self._resumed = False
        self._table: PageTable | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def generated(self) -> int:
        """Number of ids after the prompt."""
        return self.length - self.prompt_length

    @property
    def ids(self) -> Ids:
        """All ids so far, as a view."""
        return self._buffer[: self.length]

    @property
    def input_ids(self) -> Tensor:
        """A copy of the prompt's ids, int64 [1, n]."""
        return torch.tensor(self._buffer[: self.prompt_length])[None]

    @property
    def sequence_ids(self) -> SeqTensor:
        """A copy of all ids so far, int64 [1, n]."""
        return SeqTensor.from_tensor(torch.tensor(self.ids)[None], seq_dim=-1)

    @property
    def keys(self) -> Ids:
        """The name of each id in the page table, as a view."""
        return self._keys[: self.length]

    @property
    def prefilled(self) -> bool:
        """Whether K/V of all prompt ids but the last are in the pages."""
        return self.kv_position >= self.prefill_end

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.scores is not None and not self.scores.complete

    def append(self, token: int) -> None:
        """Append a generated id."""
        if self.length == len(self._buffer):
            more = np.zeros(max(256, self.length), dtype=np.int64)
            one = self._keys is self._buffer
            self._buffer = np.concatenate([self._buffer, more])
            self._keys = self._buffer if one else np.concatenate([self._keys, more])
        self._buffer[self.length] = token
        if self._keys is not self._buffer:
            self._keys[self.length] = token
        self.length += 1

    # ---- admission -------------------------------------------------------------------------------------------------

    def prepare(self, table: PageTable, root: bytes) -> None:
        """Compute the labels of the context's full pages under namespace `root`.

        After `give_way`, the pages that had labels are labelled.
        """
        self._table, self._root, self._private_from = table, root, 0
        size = self.page_size = table.page_size
        count = len(self.labels) if self._resumed else self.prefill_end // size
        self.labels.clear()
        for k in range(count):
            self.labels.append(page_hash(self._parent(k), self.keys[k * size : (k + 1) * size]))

    def make_private(self, root: bytes) -> None:
        """Name all further pages under namespace `root`, which is unique, so that none of them is shared."""
        self._root, self._private_from = root, len(self.labels)

    def context_pages(self) -> Iterator[tuple[bytes, Ids]]:
        """Yield label and keys of each full page of the context."""
        size = self.page_size
        for k, label in enumerate(self.labels):
            yield label, self.keys[k * size : (k + 1) * size]

    def pages_needed(self, max_new_tokens: int, page_size: int) -> int:
        """Return the pages under the prompt and `max_new_tokens` more, shared or not."""
        return -(-(self.length + max_new_tokens) // page_size)

    def acquire(self, max_new_tokens: int) -> int:
        """Hold the context's full pages, shared where they exist, and reserve pages for `max_new_tokens` more ids.

        Returns the number of all of them.
        """
        table = self._pages
        total_pages = self.pages_needed(max_new_tokens, table.page_size)
        self.non_sequential_pages = 0
        for k, (label, ids) in enumerate(self.context_pages()):
            page = table.find(label, ids)
            if page is not None:
                table.share(page)
            else:
                page = table.take(self._parent(k))
                table.label(page, label, ids)
            self._hold(page)
        self._reserved = total_pages - len(self.labels)
        table.reserve(self._reserved)
        return total_pages

    @property
    def room(self) -> int:
        """Number of ids that still fit under the pages held and reserved."""
        return (len(self.allocated_pages) + self._reserved) * self.page_size - self.length

    def pages_missing(self, more: int) -> int:
        """Return the pages to reserve before `more` ids fit."""
        return max(0, -(-(more - self.room) // self.page_size))

    def reserve_more(self, count: int) -> None:
        """Reserve more pages."""
        self._pages.reserve(count)
        self._reserved += count

    def release(self, *, broken: bool = False) -> None:
        """Release every page, last page first, and the rest of the reservation.

        Computed K/V stay reusable, unless they may be broken: then no further sequence finds the pages.
        """
        if not broken:
            self.publish(self.kv_position)
        self._let_go(broken=broken)

    def give_way(self, settled: int) -> None:
        """Release every page, and prepare to resume from the prefix cache.

        Ids from `settled` on may still be withdrawn, so their pages get no names.
        """
        self.publish(settled)
        self._let_go()
        self.kv_position = 0
        self.prefill_end = self.length - 1
        self._resumed = True

    # ---- running ---------------------------------------------------------------------------------------------------

    def skip_cached(self, copy: Callable[[int, int, int], None], head: PageHead | None = None) -> int:
        """Advance over prompt K/V that exist already; `copy(source, target, tokens)` copies the head of a page.

        Returns the number of tokens gained. Stops where something has to be computed. `head` is a fresh result of
        `head_elsewhere`.
        """
        start = self.kv_position
        size = self.page_size
        while not self.prefilled:
            k, offset = divmod(self.kv_position, size)
            if self._valid(k) <= offset and not (offset == 0 and self._copy_partial(k, copy, head)):
                break
            valid = self.allocated_pages[k].valid
            self.cached_pages += int(valid == size and offset == 0 and not self._resumed)
            self.kv_position = min(k * size + valid, self.prefill_end)
        gained = self.kv_position - start
        self.cached_tokens += 0 if self._resumed else gained
        return gained

    def computed_end(self) -> int:
        """Return the position in the prompt up to which the pages held contain K/V."""
        at, size = self.kv_position, self.page_size
        while at < self.prefill_end:
            k, offset = divmod(at, size)
            if (valid := self._valid(k)) <= offset:
                break
            at = min(k * size + valid, self.prefill_end)
        return at

    def head_elsewhere(self) -> PageHead:
        """Return the page whose head `skip_cached` would copy after the K/V in the pages held."""
        at = self.computed_end()
        k, offset = divmod(at, self.page_size)
        found = None if offset or at >= self.prefill_end else self._partial(k)
        return PageHead(k, at, None) if found is None else PageHead(k, at + found[1], found)

    def begins_like(self, other: Sequence, length: int) -> bool:
        """Whether both prompts begin with the same `length` ids, before their last, under the same adapters."""
        if length > min(self.prefill_end, other.prefill_end) or self._keys[length - 1] != other._keys[length - 1]:
            return False
        return self._root == other._root and np.array_equal(self._keys[:length], other._keys[:length])

    def pages_between(self, start: int, end: int) -> set[int]:
        """Return the numbers of the pages held under ids start..end."""
        size = self.page_size
        return {page.index for page in self.allocated_pages[start // size : -(-end // size)]}

    def next_chunk(self, budget: int) -> tuple[int, int]:
        """Return the bounds of the next prompt ids to compute.

        At most `budget` ids, up to a page boundary unless they are the whole rest; more where an image must stay whole.
        """
        start = self.kv_position
        end = start + budget
        size = self.page_size
        if end < self.prefill_end and end // size * size > start:
            end = end // size * size
        end = min(end, self.prefill_end)
        for first, last in self.pictures.whole:
            if first < end < last:
                end = first if first > start else last
        return start, end

    def provide(self, end: int) -> None:
        """Take pages until ids up to `end` (exclusive) fit."""
        while len(self.allocated_pages) * self.page_size < end:
            self._take_next()

    def commit(self, end: int) -> None:
        """Record that the K/V of ids kv_position..end are in the pages."""
        size = self.page_size
        at = self.kv_position
        if end - at == 1 and (offset := at % size) and (page := self.allocated_pages[at // size]).label is None:
            # One token after others of its page, as in most steps: what `fill` does.
            page.tokens[offset] = self._keys[at]
            if page.valid == offset:
                page.valid = offset + 1
                self.kv_position = end
                return
        while self.kv_position < end:
            k, offset = divmod(self.kv_position, size)
            stop = min(end, (k + 1) * size)
            self._pages.fill(self.allocated_pages[k], offset, self.keys[self.kv_position : stop])
            self.kv_position = stop

    def rewind(self, length: int) -> None:
        """Drop all ids from `length` on, and their K/V; the last remaining id is computed again."""
        size = self.page_size
        self.length = length
        self.kv_position = min(self.kv_position, length - 1)
        self.prefill_end = min(self.prefill_end, length - 1)
        for k, page in enumerate(self.allocated_pages):
            if (k + 1) * size > self.kv_position and page.label is None:
                self._pages.truncate(page, max(0, self.kv_position - k * size))

    def publish(self, settled: int) -> None:
        """Label full pages whose first `settled` ids can no longer be withdrawn, so that others may share them."""
        size = self.page_size
        while (len(self.labels) + 1) * size <= min(settled, self.kv_position):
            k = len(self.labels)
            label = page_hash(self._parent(k), self.keys[k * size : (k + 1) * size])
            page = self.allocated_pages[k] = self._pages.publish(self.allocated_pages[k], label)
            self.block[k] = page.index
            self.labels.append(label)
            if k + 1 < len(self.allocated_pages):
                self._pages.adopt(self.allocated_pages[k + 1], label)

    # ---- internals -------------------------------------------------------------------------------------------------

    @property
    def _pages(self) -> PageTable:
        assert self._table is not None, "the sequence has not been enqueued"
        return self._table

    def _parent(self, k: int) -> bytes:
        return self._root if k in (0, self._private_from) else self.labels[k - 1]

    def _take_next(self, keep: Page | None = None) -> Page:
        k = len(self.allocated_pages)
        page = self._pages.take(self._parent(k) if k <= len(self.labels) else None, keep)
        self._pages.unreserve(1)
        self._reserved -= 1
        self._hold(page)
        return page

    def _hold(self, page: Page) -> None:
        if self.allocated_pages and page.index != self.allocated_pages[-1].index + 1:
            self.non_sequential_pages += 1
        self.allocated_pages.append(page)
        self.block = np.append(self.block, np.int32(page.index))

    def _let_go(self, *, broken: bool = False) -> None:
        for page in reversed(self.allocated_pages):
            self._pages.release(page, broken=broken)
        self.allocated_pages = []
        self.block = self.block[:0]
        self._pages.unreserve(self._reserved)
        self._reserved = 0

    def _valid(self, k: int) -> int:
        """Return the number of page `k`'s ids with valid K/V, if the page is held."""
        return self.allocated_pages[k].valid if k < len(self.allocated_pages) else 0

    def _copy_partial(self, k: int, copy: Callable[[int, int, int], None], head: PageHead | None) -> bool:
        """Reuse the head of a page that begins like the prompt's page `k` after the same prefix."""
        found = self._partial(k) if head is None or head.page != k else head.found
        if found is None:
            return False
        source, length = found
        target = self.allocated_pages[k] if k < len(self.allocated_pages) else self._take_next(keep=source)
        if target is not source:
            copy(source.index, target.index, length)
        start = k * self.page_size
        self._pages.fill(target, 0, self.keys[start : start + length])
        return True

    def _partial(self, k: int) -> tuple[Page, int] | None:
        """Return a page that begins like the prompt's page `k` after the same prefix, and the length in common."""
        if self._private_from or k > len(self.labels):
            return None  # private, or released with ids that may still be withdrawn: it has no name
        size = self.page_size
        return self._pages.partial(self._parent(k), self.keys[k * size : min((k + 1) * size, self.prefill_end)])


def full_pages(sequences: SequenceOf[Sequence], held_in: PageTable | None = None) -> int:
    """Return the full pages of the contexts of a job's sequences; pages of a common prefix count once.

    With a table, only pages in use there count.
    """
    labels = [s.labels if held_in is None else s.labels[: held_in.held(s.labels)] for s in sequences]
    return len(labels[0]) if len(labels) == 1 else len(set().union(*labels))  # in one sequence no two are the same
