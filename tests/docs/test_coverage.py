"""Every row that a test claims to cover exists in a checklist, and a claim of an unknown row is an error."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "coverage_table.py"


@pytest.fixture
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_claimed_row_exists(coverage: ModuleType) -> None:
    text = coverage.table()
    for title, rows in coverage.checklists().values():
        assert f"## {title}" in text
        assert all(f"| {row} |" in text for row in rows)
    assert "test_coverage.py" not in text


def test_a_claim_of_an_unknown_row_is_an_error(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "claims", lambda: [("core: no-such-row", "tests/test_x.py::test_y")])
    with pytest.raises(coverage.UnknownRowError, match="no-such-row"):
        coverage.table()


def test_a_row_without_a_test_is_open(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "claims", lambda: [])
    assert coverage.table().count("**open** |") == sum(len(rows) for _, rows in coverage.checklists().values())
