"""Run laws: one law under hypothesis, or all laws of a filter; and report the outcomes."""

from __future__ import annotations

import contextlib
import io
import os
import random
import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import hypothesis
import hypothesis.errors
from hypothesis import strategies as st

from exl_filters.base import ExLlamaV2Filter
from exl_filters.context import FilterContext
from exl_filters.errors import FilterError, FilterUsageError
from exl_filters.testing.case import Broken, Case, Factory
from exl_filters.testing.languages import Language, as_language
from exl_filters.testing.laws import LAWS, Law, applicable
from exl_filters.testing.vocabularies import standard_vocabulary, vocabularies
from exl_filters.tokens import fed_token
from exl_filters.vocabulary import Vocabulary

__all__ = ["PROFILES", "Outcome", "Report", "Subject", "check_filter", "next_times", "read_xfail"]

PROFILES: Mapping[str, Mapping[str, Any]] = {
    "quick": {"max_examples": 20, "derandomize": True, "database": None},
    "ci": {"max_examples": 60, "derandomize": True, "database": None},
    "deep": {"max_examples": 1000},
}
"""Examples per law. `quick` and `ci` repeat exactly the same cases; `deep` draws new ones and keeps failures."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one law. `message` is the failure, or the reason that the law does not apply.

    `status` "known" is a failure that was listed as such, "unexpected" a listed law that holds. `reproduction` is
    Python source that repeats a failure.
    """

    law: Law
    status: Literal["holds", "broken", "known", "unexpected", "not applicable"]
    message: str = ""
    reproduction: str = ""

    @property
    def ok(self) -> bool:
        """Whether the law holds, does not apply, or fails as listed."""
        return self.status not in ("broken", "unexpected")

    def __str__(self) -> str:
        line = f"{self.law.id} {self.law.title}: {self.status}"
        if self.message:
            line += f"\n    {self.message}"
        if self.reproduction and not self.ok:
            line += "\n" + "\n".join("    | " + text for text in self.reproduction.splitlines())
        return line


@dataclass(frozen=True)
class Report:
    """All outcomes of one filter."""

    outcomes: list[Outcome]

    @property
    def ok(self) -> bool:
        """Whether every outcome is as expected."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def broken(self) -> list[str]:
        """Numbers of the laws that do not hold, known failures included."""
        return [o.law.id for o in self.outcomes if o.status in ("broken", "known")]

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for outcome in self.outcomes:
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        return "\n".join([*(str(o) for o in self.outcomes if o.status != "holds"), summary])


@dataclass
class Subject:
    """A filter under test, and the effort of the tests.

    Args:
        factory: Takes a `Vocabulary` (which serves as the filter's tokenizer) and returns a filter.
        language: Oracle of its texts, or None.
        capabilities: Claims beyond the overridden methods: "canonical_only" (spells forced text in one way),
            "token_level"
            (constrains ids, not text), "names_specials" (allows control ids by number), or the name of a method.
        profile: "quick", "ci" or "deep".
        examples: Examples per law, instead of the profile's number.
        seed: Seed of hypothesis.
        vocabulary: The vocabulary to test on; None: generated ones.
        shrink: Whether to look for the smallest counterexample.
    """

    factory: Factory
    language: Language | None = None
    capabilities: frozenset[str] = frozenset()
    profile: str = "ci"
    examples: int | None = None
    seed: int | None = None
    vocabulary: Vocabulary | None = None
    shrink: bool = True
    _sample: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, factory: Factory, *, language: Any = None, capabilities: Iterable[str] = (), **options: Any) -> Subject:
        """Build a subject. `language` and `capabilities` default to attributes of `factory`; `options` are the other
        fields. Raises `FilterUsageError`.
        """
        if not callable(factory):
            raise FilterUsageError(f"the factory must take a vocabulary and return a filter; got {factory!r:.60}")
        if options.get("profile", "ci") not in PROFILES:
            raise FilterUsageError(f"profiles are {', '.join(PROFILES)}; got {options['profile']!r}")
        language = as_language(language if language is not None else getattr(factory, "language", None))
        claims = frozenset(capabilities) | frozenset(getattr(factory, "capabilities", ()))
        return cls(factory, language, claims, **options)

    def require_filter(self) -> None:
        """Build one filter before any law runs, so that a factory error is not reported as a broken law.

        Raises `FilterUsageError` with the cause when the factory returns no filter.
        """
        try:
            made = self.factory(self.vocabulary or standard_vocabulary(self.language))
        except FilterError:
            raise
        except (Exception, SystemExit) as error:
            raise FilterUsageError(f"no filter can be made: {_own_failure(error, 'factory')}") from error
        missing = [name for name in ("begin", "feed", "next") if not callable(getattr(made, name, None))]
        if missing:
            raise FilterUsageError(
                f"no filter can be made: the factory returned {made!r:.60}, which has no {', '.join(missing)}"
            )

    def sample(self) -> Any:
        """Return one filter, built once, to inspect which methods it overrides."""
        if self._sample is None:
            v = self.vocabulary or standard_vocabulary(self.language)
            self._sample = self.factory(v)
            if callable(getattr(self._sample, "attach", None)):
                self._sample.attach(FilterContext.make(v.size, v.stop_ids, v.special_ids))
        return self._sample

    def claims(self) -> frozenset[str]:
        """Return the capabilities claimed for the filter, by the caller and by its class."""
        try:
            return self.capabilities | frozenset(getattr(self.sample(), "capabilities", ()))
        except Exception:  # no filter can be built: the laws report it
            return self.capabilities

    def not_applicable(self, law: Law) -> str:
        """Return the reason that a law does not apply; "" if it does, or if no filter can be built to find out."""
        try:
            sample = self.sample()
        except Exception:
            return ""
        return applicable(law, sample, self.language, self.claims())

    def run(self, law: Law) -> None:
        """Raise `Broken`, or the filter's own error, if the law does not hold.

        With `shrink`, the report prefers a counterexample with a short walk.
        """
        try:
            return self._run(law, deep=True)
        except Broken as broken:
            found = broken
        if self.shrink:
            self._run(law, deep=False)
        raise found

    def _run(self, law: Law, *, deep: bool) -> None:
        options = dict(PROFILES[self.profile])
        count = self.examples or options["max_examples"]
        options["max_examples"] = max(1, round(count * law.examples))
        settings = hypothesis.settings(
            **options,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
            # Laws with few examples are the slow ones: their counterexamples are shown as found.
            phases=[
                hypothesis.Phase.generate,
                *([hypothesis.Phase.shrink] if self.shrink and law.examples >= 0.1 else []),
            ],
        )
        words = st.just(self.vocabulary) if self.vocabulary is not None else vocabularies(self.language)
        last: list[Case] = []
        claims = self.claims()

        def example(data: st.DataObject) -> None:
            case = Case(data, self.factory, data.draw(words), self.language, claims, deep=deep)
            last[:] = [case]
            law.check(case)

        test = settings(hypothesis.given(data=st.data())(example))
        if self.seed is not None:
            test = hypothesis.seed(self.seed)(test)
        try:
            # hypothesis prints the failing draw; the report replaces it.
            with contextlib.redirect_stdout(io.StringIO()):
                test()
        except Broken:
            raise
        except hypothesis.errors.FlakyFailure as error:
            raise Broken(_not_again(error), last[0] if last else None) from error
        except Exception as error:
            raise Broken(_own_failure(error), last[0] if last else None) from error

    def outcome(self, law: Law, xfail: Mapping[str, str]) -> Outcome:
        """Run a law and compare the result with `xfail`: the known failures, a reason by the law's number."""
        reason = self.not_applicable(law)
        if reason:
            return Outcome(law, "not applicable", reason)
        try:
            self.run(law)
        except Broken as broken:
            if law.id in xfail:
                return Outcome(law, "known", xfail[law.id])
            where = broken.case.reproduction() if broken.case is not None else ""
            return Outcome(law, "broken", str(broken), where)
        if law.id in xfail:
            return Outcome(
                law, "unexpected", f"listed as a known failure ({xfail[law.id]}), and holds: take it off the list"
            )
        return Outcome(law, "holds")


def check_filter(
    factory: Factory,
    *,
    language: Any = None,
    laws: Collection[str] | None = None,
    xfail: Mapping[str, str] | str | os.PathLike[str] | None = None,
    capabilities: Iterable[str] = (),
    profile: str = "ci",
    examples: int | None = None,
    seed: int | None = None,
    vocabulary: Vocabulary | None = None,
    shrink: bool = True,
    raise_on_failure: bool = False,
) -> Report:
    """Run the laws on the filters of `factory(vocabulary)` and return a report.

    Args:
        factory: Builds the filter from a `Vocabulary`, which serves as its tokenizer.
        language: Oracle of the filter's texts, see `as_language`; None: laws about languages do not apply.
        laws: Law numbers ("LAW-07" or "7"); None: all.
        xfail: Known failures: law numbers with reasons, or a file of them. Strict: a listed law that holds is a
            failure.
        capabilities: Claims of the filter, see `Subject`.
        profile: "quick" (20 examples), "ci" (60) or "deep" (1000).
        examples: Examples per law, instead of the profile's number.
        seed: Seed of hypothesis.
        vocabulary: The vocabulary to test on; None: generated ones.
        shrink: Look for the smallest counterexample instead of the first.
        raise_on_failure: Raise an `AssertionError` with the report when a law is broken.

    Raises:
        FilterError: before any law runs, when the factory raises or returns no filter.
    """
    options = {"profile": profile, "examples": examples, "seed": seed, "vocabulary": vocabulary, "shrink": shrink}
    subject = Subject.of(factory, language=language, capabilities=capabilities, **options)
    known, chosen = read_xfail(xfail), select_laws(laws)
    subject.require_filter()
    report = Report([subject.outcome(law, known) for law in chosen])
    if raise_on_failure and not report.ok:
        raise AssertionError(str(report))
    return report


def next_times(factory: Factory, vocabulary: Vocabulary, calls: int = 300, seed: int = 0) -> tuple[float, float]:
    """Return median and 99th percentile of the time of `next()` in microseconds, on random permitted paths.

    They are reported with LAW-36, not judged.
    """
    rng = random.Random(seed)
    taken: list[float] = []
    f = factory(vocabulary)
    if callable(getattr(f, "attach", None)):
        f.attach(FilterContext.make(vocabulary.size, vocabulary.stop_ids, vocabulary.special_ids))
    ordinary = [i for i in range(vocabulary.size) if vocabulary.bytes_of(i)]
    while len(taken) < calls:
        f.begin("")
        for _ in range(20):
            start = time.perf_counter()
            allowed, ends = f.next()
            taken.append((time.perf_counter() - start) * 1e6)
            tokens = sorted(set(ordinary if allowed is None else allowed) - vocabulary.stop_ids)
            if not tokens:
                break
            token = rng.choice(tokens)
            f.feed(token if isinstance(f, ExLlamaV2Filter) else fed_token(token))
            if token in ends:
                break
    taken.sort()
    return taken[len(taken) // 2], taken[len(taken) * 99 // 100]


def select_laws(names: Collection[str] | None) -> list[Law]:
    """Return the laws of these numbers ("LAW-07" or "7"), or all, in order. Raises `FilterUsageError` for others."""
    if names is None:
        return [LAWS[name] for name in sorted(LAWS)]
    chosen = [f"LAW-{int(n):02d}" if str(n).isdigit() else str(n).upper() for n in names]
    unknown = [n for n in chosen if n not in LAWS]
    if unknown:
        raise FilterUsageError(f"no law is called {', '.join(unknown)}; there are {', '.join(sorted(LAWS))}")
    return [LAWS[name] for name in sorted(set(chosen))]


def read_xfail(given: Mapping[str, str] | str | os.PathLike[str] | None) -> dict[str, str]:
    """Read known failures: a mapping, or a file with `LAW-07 reason` lines, blank lines and # comments.

    Raises `FilterUsageError` for an unknown law or a missing reason.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        entries = dict(given)
    else:
        lines = [line.split("#")[0].strip() for line in Path(given).read_text(encoding="utf-8").splitlines()]
        entries = {}
        for line in filter(None, lines):
            name, _, reason = line.partition(" ")
            entries[name] = reason.strip()
    select_laws(list(entries))
    missing = [name for name, reason in entries.items() if not reason]
    if missing:
        raise FilterUsageError(f"known failures need a reason: {', '.join(missing)}")
    return entries


def _not_again(error: hypothesis.errors.FlakyFailure) -> str:
    """Describe a failure that the same calls did not reproduce: the filter, or its surroundings, changed meanwhile."""
    first = next((e for e in error.exceptions if isinstance(e, Exception)), error)
    seen = str(first) if isinstance(first, Broken) else _own_failure(first)
    return f"{seen} (not every time: the same calls did not show it again)"


def _own_failure(error: BaseException, whose: str = "filter") -> str:
    """Describe an exception of the filter, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if "hypothesis" not in f.filename and f"testing{os.sep}" not in f.filename]
    where = f" at {Path(outside[-1].filename).name}:{outside[-1].lineno} {outside[-1].line}" if outside else ""
    return f"the {whose} raised {type(error).__name__}: {error}{where}"
