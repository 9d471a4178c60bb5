"""The pages of one job: how many it needs, what they are named, and when it takes and returns them."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from exl_generate.dynamic.pages import PageTable, namespace_digest
from exl_generate.dynamic.prompt_scores import PromptScores
from exl_generate.dynamic.sequence import Sequence, full_pages

if TYPE_CHECKING:
    from exl_generate.contracts import RequestAdapter
    from exl_generate.dynamic.context import JobContext
    from exl_generate.dynamic.request import Request

__all__ = ["JobPages"]


class JobPages:
    """The sequences of one job with their pages.

    A job reserves pages for `max_new_tokens` or, with `max_rq_tokens`, for that many new tokens at a time. A job that
    has used up its share while others wait releases all pages (`give_way`) and resumes from the prefix cache.
    """

    __slots__ = ("_arrangements", "_own_name", "_request", "requeues", "sequence", "sequences", "total")

    def __init__(self, request: Request) -> None:
        self._request = request
        #: one sequence, or the positive and the negative prompt of a CFG pair
        top, first = request.prompt_logprobs, request.prompts[0]
        scores = None if top is None else PromptScores(top, first.ids.tolist())
        self.sequences = [
            Sequence(p.ids, request.embeddings, p.keys, p.pictures, request.resumed, scores if p is first else None)
            for p in request.prompts
        ]
        #: names pages that no other job finds, so that the whole prompt is computed
        self._own_name = "" if top is None else secrets.token_hex(16)
        #: the sequence that is decoded: the only one, or the positive prompt
        self.sequence = self.sequences[0]
        #: pages under all sequences when the job started last, reserved pages included
        self.total = 0
        #: times the job went back to the queue
        self.requeues = 0
        #: `JobContext.arrangements` when the pages were named last; -1 before
        self._arrangements = -1

    # ---- progress --------------------------------------------------------------------------------------------------

    @property
    def new_tokens(self) -> int:
        """Tokens generated so far, a healed one not counted; -1 before the healed token."""
        return self.sequence.generated - self._request.healing

    @property
    def prefilled(self) -> bool:
        """Whether K/V of all prompt tokens but the last of each sequence are in the pages."""
        first = self.sequence
        if first.kv_position < first.prefill_end:
            return False
        return len(self.sequences) == 1 or all(sequence.prefilled for sequence in self.sequences)

    @property
    def progress(self) -> tuple[int, int]:
        """Prompt tokens whose K/V are in the pages, and prompt tokens to compute, over all sequences."""
        done = sum(min(s.kv_position, s.prefill_end) for s in self.sequences)
        return done, sum(s.prefill_end for s in self.sequences)

    def commit(self) -> None:
        """Record that the K/V of all ids so far have been computed."""
        for sequence in self.sequences:
            sequence.commit(sequence.length)

    def append(self, token: int) -> None:
        """Append a generated token to every sequence."""
        for sequence in self.sequences:
            sequence.append(token)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens that the job has not accepted; `shorten` before it accepts any."""
        for token in tokens:
            self.append(token)

    def shorten(self, count: int) -> None:
        """Remove the last `count` tokens of every sequence; no K/V of theirs are known."""
        for sequence in self.sequences:
            sequence.length -= count

    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens of every sequence, with their K/V."""
        for sequence in self.sequences:
            sequence.rewind(sequence.length - count)

    def publish(self, held_tokens: int) -> None:
        """Share full pages.

        The last token, whose K/V is not computed yet, and the `held_tokens` last tokens, which may still be withdrawn,
        stay private.
        """
        for sequence in self.sequences:
            sequence.publish(sequence.length - held_tokens - 1)

    # ---- names -----------------------------------------------------------------------------------------------------

    def name(self, context: JobContext, loras: tuple[RequestAdapter, ...]) -> None:
        """Name the full pages of the prompts for these adapters and the present modules of the model."""
        for sequence in self.sequences:
            sequence.loras = loras
        self._name(context)

    def refresh_names(self, context: JobContext) -> None:
        """Name the pages again if a module of the model was replaced meanwhile.

        Call it before the job starts, for the first time or after `give_way`.
        """
        if self._arrangements != context.arrangements:
            self._name(context)

    def make_private(self, context: JobContext, serial: int | None) -> None:
        """Share no page that is named from now on: a module of the model was replaced while the job runs.

        The job keeps its pages. Running jobs that share prompt pages still fill them in any order: all these jobs have
        run with the same modules.
        """
        root = self._namespace(context)
        for number, sequence in enumerate(self.sequences):
            own = (root.hex(), f"job {serial}", f"sequence {number}")
            sequence.make_private(namespace_digest(own))

    def forget_names(self) -> None:
        """Undo `name`."""
        for sequence in self.sequences:
            sequence.labels.clear()

    def _name(self, context: JobContext) -> None:
        # Read first: a replacement while the names are computed must make them stale.
        self._arrangements = context.arrangements
        root = self._namespace(context)
        for sequence in self.sequences:
            sequence.prepare(context.page_table, root)

    def _namespace(self, context: JobContext) -> bytes:
        root = context.namespace_of(self.sequence.loras)
        salt = self._request.cache_salt
        if self._own_name:
            root = namespace_digest((root.hex(), f"scored {self._own_name}"))
        return namespace_digest((root.hex(), f"salt {salt.hex()}")) if salt else root

    # ---- counts ----------------------------------------------------------------------------------------------------

    @property
    def _share(self) -> int:
        """New tokens to reserve pages for at once."""
        left, most = self._request.max_new_tokens - self.new_tokens, self._request.max_rq_tokens
        return left if most is None else min(left, most)

    def count(self, page_size: int) -> int:
        """Return the pages under all sequences at their longest; pages of a common prefix count once."""
        return full_pages(self.sequences) + self._own(page_size, self._request.max_new_tokens - self.new_tokens)

    def own(self, page_size: int) -> int:
        """Return the pages to reserve at a start that no other job can share: those after the prompts' full pages."""
        return self._own(page_size, self._share)

    def _own(self, page_size: int, new: int) -> int:
        return sum(sequence.pages_needed(new, page_size) - len(sequence.labels) for sequence in self.sequences)

    def missing(self, table: PageTable) -> int:
        """Return the free pages that a start would use: all pages but those that running jobs hold already."""
        return full_pages(self.sequences) - full_pages(self.sequences, table) + self.own(table.page_size)

    def uncached_tokens(self, table: PageTable) -> int:
        """Return the tokens to compute before decoding that are not in leading full pages of the cache."""
        size = table.page_size
        return sum(max(0, s.prefill_end - size * table.computed(s.labels)) for s in self.sequences)

    @property
    def cached_pages(self) -> int:
        """Full pages found in the cache, per sequence."""
        return sum(s.cached_pages for s in self.sequences) // len(self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, per sequence."""
        return sum(min(s.cached_tokens, s.prompt_length) for s in self.sequences) // len(self.sequences)

    @property
    def non_sequential(self) -> int:
        """Number of pages taken so far that do not follow, in the cache, the previous page of their sequence."""
        return sum(s.non_sequential_pages for s in self.sequences)

    # ---- taking and returning --------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Take the prompts' full pages, shared where they exist, and reserve the rest of the job's share."""
        self.total = sum(sequence.acquire(self._share) for sequence in self.sequences)

    @property
    def room(self) -> int:
        """Number of tokens that fit in every sequence's pages, besides the next step's token; -1 if that does not
        fit.
        """
        return self.sequence.room if len(self.sequences) == 1 else min(sequence.room for sequence in self.sequences)

    def reserve_more(self, table: PageTable) -> bool:
        """Reserve another share; False if there are not enough free pages for it."""
        missing = [sequence.pages_missing(self._share) for sequence in self.sequences]
        if sum(missing) > table.available:
            return False
        for sequence, count in zip(self.sequences, missing, strict=True):
            sequence.reserve_more(count)
        return True

    def give_way(self, held_tokens: int) -> None:
        """Release all pages and prepare to start again. `held_tokens` as in `publish`."""
        self.requeues += 1
        for sequence in self.sequences:
            sequence.give_way(sequence.length - held_tokens - 1)

    def release(self, *, broken: bool = False) -> None:
        """Release all pages at the end of the job; their content stays reusable unless it may be `broken`."""
        for sequence in self.sequences:
            sequence.release(broken=broken)
