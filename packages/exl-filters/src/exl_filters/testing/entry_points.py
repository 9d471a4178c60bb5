"""The decorator and the mixin: the laws as pytest items of the author's own test file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import pytest

from exl_filters.testing.case import Broken, Factory
from exl_filters.testing.laws import LAWS
from exl_filters.testing.runner import Subject, read_xfail, select_laws

__all__ = ["FilterContract", "filter_laws"]


def filter_laws(
    factory: Factory,
    *,
    language: Any = None,
    laws: Collection[str] | None = None,
    xfail: Mapping[str, str] | str | None = None,
    capabilities: Iterable[str] = (),
    profile: str = "ci",
    examples: int | None = None,
    seed: int | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Parametrize a test with one `law` after another; the test calls it.

    ```python
    @filter_laws(lambda vocab: MyFilter(None, vocab, ["yes", "no"]), language=["yes", "no"])
    def test_contract(law):
        law()
    ```

    Laws that do not apply (no language given, a method not overridden) make no item.

    Args:
        factory: Builds the filter from a `Vocabulary`, which serves as its tokenizer.
        language: Oracle of the filter's texts, see `as_language`; None: laws about languages do not apply.
        laws: Law numbers ("LAW-07" or "7"); None: all.
        xfail: Known failures, law numbers with reasons, or a file of them. They are strict: a law that holds fails.
        capabilities: Claims of the filter, see `Subject`.
        profile: "quick", "ci" or "deep".
        examples: Examples per law, instead of the profile's number.
        seed: Seed of hypothesis.
    """
    subject = Subject.of(
        factory, language=language, capabilities=capabilities, profile=profile, examples=examples, seed=seed
    )
    known = read_xfail(xfail)
    params = []
    for law in select_laws(laws):
        if subject.not_applicable(law):
            continue
        marks = [pytest.mark.xfail(reason=known[law.id], strict=True)] if law.id in known else []
        params.append(pytest.param(_Run(subject, law.id), id=f"{law.id} {law.title}", marks=marks))
    return pytest.mark.parametrize("law", params)


class _Run:
    """One law of one filter, to be called."""

    def __init__(self, subject: Subject, law_id: str) -> None:
        self.subject, self.law = subject, LAWS[law_id]

    def __call__(self) -> None:
        __tracebackhide__ = True
        run_law(self.subject, self.law.id)


def run_law(subject: Subject, law_id: str) -> None:
    """Fail the running test with the law, the counterexample and its reproduction."""
    __tracebackhide__ = True
    law = LAWS[law_id]
    try:
        subject.run(law)
    except Broken as broken:
        told = f"{law.id} {law.title}\n{broken}"
        if broken.case is not None:
            told += f"\n\nto repeat it:\n{broken.case.reproduction()}"
        failure = told
    else:
        return
    pytest.fail(failure, pytrace=False)


class FilterContract:
    """A test class of all laws. Subclass it with a name `Test...` and set `make_filter`.

    The class attributes have the meaning of `filter_laws`' parameters.

    ```python
    class TestMine(FilterContract):
        make_filter = staticmethod(lambda vocab: MyFilter(None, vocab, ["yes", "no"]))
        language = ["yes", "no"]
        xfail = {"LAW-07": "asks before it knows"}
    ```
    """

    make_filter: ClassVar[Any] = None
    language: ClassVar[Any] = None
    xfail: ClassVar[Any] = None
    capabilities: ClassVar[Any] = ()
    profile: ClassVar[str] = "ci"
    examples: ClassVar[int | None] = None
    seed: ClassVar[int | None] = None

    @pytest.mark.parametrize("law_id", sorted(LAWS), ids=lambda name: f"{name} {LAWS[name].title}")
    def test_law(self, law_id: str) -> None:
        """Check the law `law_id`; skipped where it does not apply."""
        __tracebackhide__ = True
        cls = type(self)
        # A function stored on the class is bound to the instance; take the plain factory.
        factory = cls.__dict__.get("make_filter", cls.make_filter)
        factory = getattr(factory, "__func__", factory)
        subject = Subject.of(
            factory,
            language=cls.language,
            capabilities=cls.capabilities,
            profile=cls.profile,
            examples=cls.examples,
            seed=cls.seed,
        )
        reason = subject.not_applicable(LAWS[law_id])
        if reason:
            pytest.skip(f"does not apply: {reason}")
        known = read_xfail(cls.xfail)
        outcome = subject.outcome(LAWS[law_id], known)
        if outcome.status == "known":
            pytest.xfail(outcome.message)
        if not outcome.ok:
            pytest.fail(str(outcome), pytrace=False)
