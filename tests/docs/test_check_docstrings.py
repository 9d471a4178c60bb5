"""scripts/check_docstrings.py finds parameters and errors that no docstring mentions, and the packages have none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_docstrings.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docstrings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """Run passes over `weights`."""

    def __init__(self, weights: Any, cache: Any) -> None:
        self.weights, self.cache = weights, cache

    def step(self, ids: Any, mask: Any = None) -> None:
        """Run a step over `ids`."""


class Quiet(Engine):
    """An engine that prints nothing."""

    def step(self, ids: Any, mask: Any = None, *, id: int = 0) -> None:
        """Run a step, as every engine, ignoring `mask`."""


@dataclass
class Record:
    """A record of `count` events."""

    count: int
    names: list[str]
    """Their names."""
    times: list[float]


def strict(size: int) -> None:
    """Reserve `size` bytes."""
    if size < 0:
        raise ValueError(size)


def documented(size: int) -> None:
    """Reserve `size` bytes. Raises ValueError for less than none."""
    if size < 0:
        raise ValueError(size)


def deferring(size: int) -> None:
    """Reserve `size` bytes, with the errors of `documented`."""
    if size < 0:
        raise ValueError(size)


def abstract(size: int) -> None:
    """Reserve `size` bytes."""

    def inner() -> None:
        raise ValueError(size)

    raise NotImplementedError(inner)


def free(one: int, other: int, _unused: int = 0) -> None:
    """Add another number to `one`."""


@pytest.mark.parametrize(
    ("function", "cls", "left_out"),
    [
        pytest.param(free, None, ("other",), id="a part of a word is no mention"),
        pytest.param(Engine.__init__, Engine, ("cache",), id="the class explains its constructor"),
        pytest.param(Engine.step, Engine, ("mask",), id="method"),
        pytest.param(Quiet.step, Quiet, ("id",), id="the overridden method explains"),
        pytest.param(strict, None, ("ValueError",), id="an error that is raised"),
        pytest.param(documented, None, (), id="an error that is explained"),
        pytest.param(deferring, None, (), id="errors of another function"),
        pytest.param(abstract, None, (), id="what subclasses define"),
        pytest.param(Record.__init__, Record, ("times",), id="docstrings of fields"),
    ],
)
def test_a_gap_names_what_is_left_out(
    check: ModuleType, function: Callable[..., None], cls: type | None, left_out: tuple[str, ...]
) -> None:
    assert isinstance(function, FunctionType)
    found = check.gap(function, cls)
    assert found.missing == left_out
    assert found.place.startswith("tests/docs/test_check_docstrings.py:")


@pytest.mark.full  # `make lint` checks it too
def test_the_packages_explain_every_parameter(check: ModuleType) -> None:
    found = list(check.checked())
    assert {gap.name.partition(".")[0] for gap in found} >= {"exl_kernels", "exl_core", "exl_filters", "exl_generate"}
    assert not [f"{gap.place}: {gap.name}: {', '.join(gap.missing)}" for gap in found if gap.missing]
    assert "exl_generate.dynamic.job.ExLlamaV2DynamicJob.__init__" in {gap.name for gap in found}
