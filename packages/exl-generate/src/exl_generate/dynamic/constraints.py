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

    __slots__ = ("_excluded", "_pieces", "_request", "avoided", "begun_filters", "filters", "rewinds")

    def __init__(self, request: Request, pieces: PieceTable, filters: FilterStack | None) -> None:
        self._request = request
        self._pieces = pieces
        #: None, too, once the job is over
        self.filters = filters
        #: `filters` from their first use on: their masks can be computed beforehand
        self.begun_filters: FilterStack | None = None
        #: place among the generated tokens -> tokens that led into a banned string there
        self._excluded: dict[int, set[int]] = {}
        #: ids to avoid in the next step if any other token is possible
        self.avoided: tuple[int, ...] = ()
        #: banned strings withdrawn so far
        self.rewinds = 0

    def at(self, generated: int) -> Constraint:
        """Return the constraint on the token after `generated` others, a healed token counted."""
        mask = None if self.filters is None else self._mask(self.filters)
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

    def heals(self, generated: int, token: int) -> bool:
        """Whether token healing allows `token` after `generated` others."""
        return generated >= self._request.healing or token in self._healing_candidates()

    def compile_ahead(self, pool: Callable[[], Executor]) -> None:
        """Compile in `pool` what the filters of many jobs share."""
        if self.filters is not None:
            with interruptible():
                self.filters.compile_ahead(pool())

    def prefetch(self, pool: Callable[[], Executor]) -> None:
        """Compute the filters' next masks in `pool` while the model runs."""
        if self.begun_filters is not None and self.begun_filters.is_due:
            with interruptible():
                self.begun_filters.prefetch(pool())

    def feed(self, record: Record) -> bool:
        """Feed a token to the filters. Returns True if the filters end with it."""
        if self.filters is None or not record.fed:
            return False
        with interruptible():
            self._begin(self.filters)
            return self.filters.feed(record.token)

    def rewind(self, gone: list[Record], generated: int) -> None:
        """Exclude a banned string's first token, and the token that a hook replaced by it, at its position.

        `gone` are the removed tokens; `generated` others come before them.
        """
        if self.filters is not None:
            with interruptible():
                self.filters.rewind(sum(record.fed for record in gone))
        for position in [p for p in self._excluded if p > generated]:
            del self._excluded[position]
        self._excluded.setdefault(generated, set()).update((gone[0].token, gone[0].drawn))
        self.rewinds += 1

    def close(self) -> None:
        """Release the filters. Their errors are ignored here: the job is over."""
        filters, self.filters, self.begun_filters = self.filters, None, None
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
        if self.begun_filters is None:
            healed = self._request.healed_id
            filters.begin("" if healed is None else self._pieces[healed])
            self.begun_filters = filters

    def _healing_candidates(self) -> NDArray[np.int64]:
        """Return the ids whose bytes begin with the removed token's. A token without text is its only candidate."""
        healed = self._request.healed_id
        assert healed is not None
        prefix = self._pieces[healed]
        return self._pieces.starting_with(prefix) if prefix else np.array([healed], dtype=np.int64)
