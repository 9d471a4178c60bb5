"""tests/sampled.py: what a default run keeps of a test with the marker `sampled`."""

from __future__ import annotations

from pathlib import Path

import preloaded

CONFTEST = """
from sampled import thin

def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(n)")
    config.addinivalue_line("markers", "full")

def pytest_collection_modifyitems(items):
    thin(items)
"""
TESTS = """
import pytest
from pytest import mark

@mark.sampled(4)
@mark.parametrize("inner", ["fp16", "q4"])
@mark.parametrize("outer", range(8))
def test_pairs(outer, inner): pass

@mark.sampled(5)
@mark.parametrize("seed", range(20))
def test_seeds(seed): pass

@mark.sampled(9)
@mark.parametrize("value", [1, True, [1], [2], {"a": 1}])
def test_kinds(value): pass

@mark.sampled(3)
@mark.parametrize("size", [1, pytest.param(2, marks=mark.full)])
@mark.parametrize("bits", [pytest.param(4, marks=mark.full), 8])
def test_long(bits, size): pass

@mark.sampled(2)
def test_alone(): pass

@mark.parametrize("seed", range(20))
def test_whole(seed): pass
"""


def kept(folder: Path, mark: str, tests: str = TESTS) -> dict[str, list[str]]:
    """Collect the tests with a mark; return the cases of each."""
    for name, text in {"conftest": CONFTEST, "test_cases": tests}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", mark]
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found: dict[str, list[str]] = {}
    for line in preloaded.run(words, env=env, folder=folder).stdout.splitlines():
        test, bracket, case = line.removeprefix("test_cases.py::").partition("[")
        if test.startswith("test_"):
            found.setdefault(test, []).extend([case.removesuffix("]")] if bracket else [])
    return found


def test_every_value_occurs_and_the_rest_is_full(tmp_path: Path) -> None:
    default = kept(tmp_path, "not full")
    pairs = [case.split("-") for case in default["test_pairs"]]
    assert {outer for outer, _ in pairs} == {str(i) for i in range(8)}
    assert {inner for _, inner in pairs} == {"fp16", "q4"}
    assert len(pairs) == 8
    assert len(default["test_seeds"]) == 4, "a parameter with many values is thinned"
    assert len(default["test_kinds"]) == 5, "True is not 1, and values without a hash are told apart"
    assert default["test_long"] == ["8-1"], "a value that only cases of the full run have is not missing"
    assert default["test_alone"] == []
    assert len(default["test_whole"]) == 20

    full = kept(tmp_path, "full")
    assert len(full["test_pairs"]) == 16 - 8
    assert not set(full["test_pairs"]) & set(default["test_pairs"])
    assert len(full["test_seeds"]) == 20 - 4
    assert len(full["test_long"]) == 3


def test_tests_with_the_same_many_values_keep_every_one(tmp_path: Path) -> None:
    law = '@mark.sampled(3)\n@mark.parametrize("seed", range(20))\ndef test_{name}(seed): pass\n'
    default = kept(tmp_path, "not full", "from pytest import mark\n" + "".join(law.format(name=name) for name in "abc"))
    assert sorted(int(case) for cases in default.values() for case in cases) == list(range(20))
