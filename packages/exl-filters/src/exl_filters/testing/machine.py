"""A state machine of filters: long mixed histories of feeds, clones, rewinds and background work.

The model is the journal of accepted tokens: a new filter that is fed the journal must give the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from exl_filters import bits
from exl_filters.base import ExLlamaV2Filter, overrides
from exl_filters.context import FilterContext
from exl_filters.errors import FilterError, FilterRejected
from exl_filters.testing.case import Factory, Observed
from exl_filters.testing.languages import as_language
from exl_filters.testing.runner import PROFILES
from exl_filters.testing.vocabularies import vocabularies
from exl_filters.tokens import fed_token

__all__ = ["check_machine", "filter_machine"]


class _Held:
    """A filter and its journal."""

    def __init__(self, filter_: Any, prefix: str) -> None:
        self.filter, self.prefix = filter_, prefix
        self.journal: list[int] = []
        self.over = False


def filter_machine(
    factory: Factory, language: Any = None, capabilities: Iterable[str] = ()
) -> type[RuleBasedStateMachine]:
    """Return a `RuleBasedStateMachine` class over the filters of `factory(vocabulary)`.

    `language` and `capabilities` are those of `Subject`. Run it as `Machine.TestCase`, or by `check_machine`.
    """
    oracle = as_language(language)
    claims = frozenset(capabilities)

    class FilterMachine(RuleBasedStateMachine):
        filters = Bundle("filters")

        def __init__(self) -> None:
            super().__init__()
            self.pool = ThreadPoolExecutor(2)

        def teardown(self) -> None:
            self.pool.shutdown(wait=True)

        @initialize(target=filters, vocabulary=vocabularies(oracle))
        def start(self, vocabulary: Any) -> _Held:
            self.vocabulary = vocabulary
            return _Held(self.fresh(""), "")

        def fresh(self, prefix: str) -> Any:
            f = factory(self.vocabulary)
            v = self.vocabulary
            if callable(getattr(f, "attach", None)):
                f.attach(FilterContext.make(v.size, v.stop_ids, v.special_ids))
            f.begin(prefix)
            return f

        def replayed(self, held: _Held) -> Observed:
            f = self.fresh(held.prefix)
            for token in held.journal:
                f.next()
                _feed(f, token)
            return _observed(f.next())

        def agrees(self, held: _Held) -> None:
            got, expected = _observed(held.filter.next()), self.replayed(held)
            assert got == expected, f"after {held.journal} a fresh filter answers {expected}, this one {got}"

        @rule(held=filters, prefix=st.sampled_from(["", "a"]))
        def begin_with_prefix(self, held: _Held, prefix: str) -> None:
            held.filter.begin(prefix)
            held.prefix, held.journal, held.over = prefix, [], False
            self.agrees(held)

        @rule(held=filters)
        def observe(self, held: _Held) -> None:
            self.agrees(held)

        @rule(held=filters, words=st.integers(0, 3))
        def observe_mask(self, held: _Held, words: int) -> None:
            if not overrides(held.filter, "fill_bitmask"):
                return
            expected, _ = self.replayed(held)
            mask = np.full(bits.word_count(self.vocabulary.size) + words, -1, dtype=np.int32)
            spoke = held.filter.fill_bitmask(mask)
            assert bool(spoke) == (expected is not None), f"after {held.journal} fill_bitmask() said {spoke}"
            assert expected is None or frozenset(bits.to_ids(mask)) == expected, "the mask is of another state"

        @rule(held=filters)
        def abort(self, held: _Held) -> None:
            """Cancel a job with work pending, and use the filter for another."""
            if held.filter.background_result is None:
                held.filter.background_next(self.pool)
            held.filter.background_drop()
            held.filter.begin("")
            held.prefix, held.journal, held.over = "", [], False
            self.agrees(held)

        @rule(held=filters, data=st.data())
        def feed_allowed(self, held: _Held, data: st.DataObject) -> None:
            allowed, ends = _observed(held.filter.next())
            tokens = sorted(allowed) if allowed is not None else self.vocabulary.defined.tolist()
            if not tokens or held.over:
                return
            token = data.draw(st.sampled_from(tokens))
            _feed(held.filter, token)
            held.journal.append(token)
            held.over = token in ends or token in self.vocabulary.stop_ids
            self.agrees(held)

        @rule(held=filters, token=st.integers(0, 400))
        def feed_disallowed(self, held: _Held, token: int) -> None:
            allowed, _ = _observed(held.filter.next())
            if allowed is None or token in allowed or held.over:
                return
            if "canonical_only" in {*claims, *getattr(held.filter, "capabilities", ())}:
                return  # another spelling may be taken, see LAW-10
            try:
                _feed(held.filter, token)
            except FilterRejected:
                self.agrees(held)
            else:
                raise AssertionError(f"token {token} is not allowed and was accepted")

        @rule(target=filters, held=filters)
        def clone(self, held: _Held) -> _Held:
            copy = _Held(held.filter.clone(), held.prefix)
            copy.journal, copy.over = list(held.journal), held.over
            self.agrees(copy)
            return copy

        @rule(held=filters)
        def background_start(self, held: _Held) -> None:
            if held.filter.background_result is None:
                held.filter.background_next(self.pool)

        @rule(held=filters)
        def background_collect(self, held: _Held) -> None:
            assert _observed(held.filter.get_next()) == self.replayed(held), (
                "the background's answer is of another state"
            )

        @rule(held=filters)
        def background_drop(self, held: _Held) -> None:
            held.filter.background_drop()
            self.agrees(held)

        @rule(held=filters, data=st.data())
        def rewind(self, held: _Held, data: st.DataObject) -> None:
            if not overrides(held.filter, "rewind"):
                return
            n = data.draw(st.integers(0, len(held.journal) + 1))
            if n > len(held.journal):
                try:
                    held.filter.rewind(n)
                except FilterError:
                    pass
                else:
                    raise AssertionError(f"rewind({n}) after {len(held.journal)} tokens was accepted")
            else:
                held.filter.rewind(n)
                del held.journal[len(held.journal) - n :]
                held.over = held.over and n == 0
            self.agrees(held)

    return FilterMachine


def check_machine(
    factory: Factory,
    language: Any = None,
    *,
    capabilities: Iterable[str] = (),
    profile: str = "ci",
    examples: int | None = None,
    steps: int = 30,
    shrink: bool = True,
) -> None:
    """Run the state machine; raises hypothesis' errors. Shrinking the history of a slow filter may take minutes.

    Args:
        factory: Builds the filter from a `Vocabulary`.
        language: Oracle of the filter's texts, see `as_language`.
        capabilities: Claims of the filter, see `Subject`.
        profile: "quick", "ci" or "deep".
        examples: Number of histories, instead of the profile's.
        steps: Steps of a history.
        shrink: Whether to look for the smallest failing history.
    """
    options: dict[str, Any] = dict(PROFILES[profile])
    if examples:
        options["max_examples"] = examples
    run_state_machine_as_test(
        filter_machine(factory, language, capabilities),
        settings=hypothesis.settings(
            **options,
            phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])],
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def _feed(f: Any, token: int) -> None:
    f.feed(token if isinstance(f, ExLlamaV2Filter) else fed_token(token))


def _observed(answer: Any) -> Observed:
    allowed, ends = answer
    return (None if allowed is None else frozenset(allowed)), frozenset(ends)
