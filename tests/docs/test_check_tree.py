"""scripts/check_tree.py finds long functions and files, and Python that chooses by limits of rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_tree.py"
FILE = "packages/p/src/p/x.py"


@pytest.fixture(scope="module")
def tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tree", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "code",
    [
        "many = rows > PACKED_ROWS",
        "many = x.numel() // 2 >= selection.STEP_ROWS",
        "some = 8 < count_of_rows",
        "one = given.columns != FEW_ROWS",
        "MOST_ROWS = 64",
    ],
)
def test_a_comparison_of_rows_needs_a_reason(tree: ModuleType, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = tree.row_errors(FILE, code)
    assert error.startswith(f"{FILE}:1: {code.partition('= ')[2] if 'ROWS =' not in code else code}")
    monkeypatch.setitem(tree.COMPARE_ROWS, FILE, "a reason")
    assert tree.row_errors(FILE, code) == []
    (stale,) = tree.row_errors(FILE, "x = 1")
    assert "take it out of COMPARE_ROWS" in stale


@pytest.mark.parametrize(
    "code",
    ["x = rows % 8 == 0", "x = refusal(PACKED_ROWS) is None", "x = f(BLOCK_ROWS) > 1", "x = rows > 1", "ROWS = 5"],
)
def test_other_comparisons_need_none(tree: ModuleType, code: str) -> None:
    assert tree.row_errors(FILE, code) == []


def test_functions_that_are_too_long_may_not_grow(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(lines: int) -> str:
        return "def f():\n" + "    pass\n" * (lines - 1)

    assert tree.long_functions(FILE, source(80)) == []
    assert "f has 81 lines" in tree.long_functions(FILE, source(81))[0]
    monkeypatch.setitem(tree.LONG_FUNCTIONS, f"{FILE}:f", 81)
    assert tree.long_functions(FILE, source(81)) == []
    assert "f has 82 lines" in tree.long_functions(FILE, source(82))[0]
    assert "take it out of LONG_FUNCTIONS" in tree.long_functions(FILE, source(80))[0]
    errors, _ = tree.findings()
    assert any(error.startswith("LONG_FUNCTIONS has 3 names, at most 2") for error in errors)


def test_the_model_is_a_facade(tree: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "packages/exl-core/src/exl_core/model.py"
    monkeypatch.setitem(tree.LINES, path, 10)
    errors, _ = tree.findings()
    assert next(error for error in errors if error.startswith(path)).endswith("lines; at most 10")
