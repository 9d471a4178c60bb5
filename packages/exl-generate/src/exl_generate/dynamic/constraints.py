"""Constraints on the next token of one job, besides its sampler settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from exl_generate.interrupts import as_job_error, interruptible
from exl_generate.sampling import UNCONSTRAINED, Constraint

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from exl_filters import FilterStack
    from exl_generate.dynamic.detokenize import PieceTable
    from exl_generate.dynamic.output import Record
    from exl_generate.dynamic.request import Request

__all__ = ["TokenConstraints"]


class TokenConstraints:
    """Filters, banned strings, `min_new_tokens` and token healing, as one `Constraint` for each position.

    Filters are user code, so each call into them runs inside `interruptible`. All methods pass their errors on.
    """

    __slots__ = ("_begun", "_excluded", "_filters", "_pieces", "_request", "avoided", "rewinds")

    def __init__(self, request: Request, pieces: PieceTable, filters: FilterStack | None) -> None:
        self._request = request
        self._pieces = pieces
        self._filters = filters
        self._begun = False
        #: place among the generated tokens -> tokens that led into a banned string there
        self._excluded: dict[int, set[int]] = {}
        #: ids to avoid in the next step if any other token is possible
        self.avoided: tuple[int, ...] = ()
        #: banned strings withdrawn so far
        self.rewinds = 0

    def at(self, generated: int) -> Constraint:
        """Return the constraint on the token after `generated` others, a healed token counted."""
        mask = None if self._filters is None else self._mask(self._filters)
        request = self._request
        early = request.stop_tokens if generated - request.healing < request.min_new_tokens else ()
        heal = generated < request.healing
        excluded = self._excluded.get(generated) if self._excluded else None
        if mask is None and not (excluded or early or heal or self.avoided):
            return UNCONSTRAINED
        return Constraint(
            mask=mask,
            blocked=tuple(sorted(excluded or ())),
            discouraged=(*self.avoided, *early),
            prefix=self._healing_candidates() if heal else None,
        )

    @property
    def needs_text(self) -> bool:
        """Whether a constraint depends on the tokens before it, not on their number alone."""
        return self._filters is not None

    def heals(self, generated: int, token: int) -> bool:
        """Whether token healing allows `token` after `generated` others."""
        return generated >= self._request.healing or token in self._healing_candidates()

    @property
    def begun_filters(self) -> FilterStack | None:
        """The filters whose masks can be computed beforehand."""
        return self._filters if self._begun else None

    def compile_ahead(self, pool: Callable[[], Executor]) -> None:
        """Compile in `pool` what the filters of many jobs share."""
        if self._filters is not None:
            with interruptible():
                self._filters.compile_ahead(pool())

    def prefetch(self, pool: Callable[[], Executor]) -> None:
        """Compute the filters' next masks in `pool` while the model runs."""
        if self._filters is not None and self._begun and self._filters.is_due:
            with interruptible():
                self._filters.prefetch(pool())

    def feed(self, record: Record) -> bool:
        """Feed a token to the filters. Returns True if the filters end with it."""
        if self._filters is None or not record.fed:
            return False
        with interruptible():
            self._begin(self._filters)
            return self._filters.feed(record.token)

    def rewind(self, gone: list[Record], generated: int) -> None:
        """Exclude a banned string's first token, and the token that a hook replaced by it, at its position.

        `gone` are the removed tokens; `generated` others come before them.
        """
        if self._filters is not None:
            with interruptible():
                self._filters.rewind(sum(record.fed for record in gone))
        for position in [p for p in self._excluded if p > generated]:
            del self._excluded[position]
        self._excluded.setdefault(generated, set()).update((gone[0].token, gone[0].drawn))
        self.rewinds += 1

    def close(self) -> None:
        """Release the filters. Their errors are ignored here: the job is over."""
        filters, self._filters = self._filters, None
        if filters is not None:
            try:
                with interruptible():
                    filters.close()
            except BaseException as error:
                as_job_error(error)

    def _mask(self, filters: FilterStack) -> NDArray[np.int32] | None:
        with interruptible():
            self._begin(filters)
            return filters.next_mask()

    def _begin(self, filters: FilterStack) -> None:
        if not self._begun:
            healed = self._request.healed_id
            filters.begin("" if healed is None else self._pieces[healed])
            self._begun = True

    def _healing_candidates(self) -> NDArray[np.int64]:
        """Return the ids whose bytes begin with the removed token's. A token without text is its only candidate."""
        healed = self._request.healed_id
        assert healed is not None
        prefix = self._pieces[healed]
        return self._pieces.starting_with(prefix) if prefix else np.array([healed], dtype=np.int64)
