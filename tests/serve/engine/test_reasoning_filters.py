"""Triggers that know of reasoning obey the contract of filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from effort import trials

from exl_filters import ExLlamaV2SelectFilter
from exl_filters.testing import filter_laws
from exl_serve.engine.reasoning import AwaitedFilter, OutsideFilter


def select(v: Any) -> ExLlamaV2SelectFilter:
    return ExLlamaV2SelectFilter(None, v, ["yes", "no"])


@filter_laws(
    lambda v: AwaitedFilter(select(v), on="the"),
    profile="quick",
    examples=trials(10, 4),
    xfail={"LAW-27": "no end is in reach of a text that never has the trigger"},
)
def test_a_trigger_that_must_come(law: Callable[[], None]) -> None:
    law()


@filter_laws(
    lambda v: OutsideFilter(select(v), "the", "stop", v, None, "a", True), profile="quick", examples=trials(10, 4)
)
def test_a_trigger_outside_of_reasoning(law: Callable[[], None]) -> None:
    law()
