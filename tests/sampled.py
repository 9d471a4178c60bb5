"""Which cases of a test with the marker `sampled(n)` are in the default run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from pathlib import Path

import pytest

__all__ = ["thin"]

# A parameter with more values, such as a seed or a table of inputs, is a sample itself: not all have to occur.
MOST_VALUES = 16

Value = tuple[str, type, Hashable]


def thin(items: list[pytest.Item]) -> None:
    """Mark cases of tests with the marker `sampled(n)` as `full`, which the default run leaves out.

    It keeps every n-th case of a test, and as many more as it takes for each value of each parameter to occur once:
    where n is a multiple of the number of an inner parameter's values, every n-th case has the same one. Each test of
    a file begins with the next case: n tests with the same parameters, such as the laws of filters, keep every case
    once.
    """
    files: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("full"):
            tests = files.setdefault(item.path, {})
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for tests in files.values():
        numbers: dict[str, int] = {}  # of the cases of all tests of the file, by their parameters
        for rank, cases in enumerate(tests.values()):
            step = next(cases[0].iter_markers("sampled")).args[0]
            places = [numbers.setdefault(item.nodeid.partition("[")[2], len(numbers)) for item in cases]
            kept = [place % step == rank % step for place in places]
            if not any(kept):
                kept[rank % len(kept)] = True
            _keep_every_value(cases, kept)
            for item, stays in zip(cases, kept, strict=True):
                if not stays:
                    item.add_marker(pytest.mark.full)


def _keep_every_value(cases: list[pytest.Item], kept: list[bool]) -> None:
    """Set `kept` of further cases, first those with the most values that no kept case has."""
    values = [_values(item) for item in cases]
    of_parameter = Counter(name for name, _, _ in set().union(*values))
    missing = {value for value in set().union(*values) if of_parameter[value[0]] <= MOST_VALUES}
    for found, stays in zip(values, kept, strict=True):
        if stays:
            missing -= found
    while missing:
        place = max(range(len(cases)), key=lambda i: len(missing & values[i]))
        kept[place] = True
        missing -= values[place]


def _values(item: pytest.Item) -> set[Value]:
    """Return the case's parameters; what has no hash counts by its text, and True is not 1."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return set()
    return {(name, type(value), _hashable(value)) for name, value in item.callspec.params.items()}


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
