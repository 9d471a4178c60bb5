"""Every behaviour that the guide for exllamav2's users promises names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "compat.md"


def rows() -> list[list[str]]:
    """The cells of every row below a header whose last cell is "test"."""
    found: list[list[str]] = []
    promised = False
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if not cells or set(line) <= set("|- "):
            promised = promised and bool(cells)
        elif cells[-1] == "test":
            promised = True
        elif promised:
            found.append(cells)
    return found


def names_in(file: str) -> set[str]:
    """Names of the tests in a file of tests/compat."""
    tree = ast.parse((ROOT / "tests" / "compat" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_a_row_names_tests_that_exist(row: list[str]) -> None:
    assert len(row) == 3, row
    named = re.findall(r"`(\w+\.py)::(test_\w+)`", row[-1])
    assert named, row
    assert len(named) == row[-1].count("`") // 2, row
    for file, test in named:
        assert test in names_in(file), f"{file} has no {test}"


@pytest.mark.parametrize("line", re.findall(r"`(from [\w.]+ import [^`]+)`", GUIDE.read_text(encoding="utf-8")))
def test_a_line_of_the_table_of_imports_works(line: str) -> None:
    names: dict[str, object] = {}
    exec(line, names)  # noqa: S102
    assert all(name in names for name in re.findall(r"ExLlamaV2\w*", line))


def test_both_columns_of_the_table_of_imports_have_the_same_names() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    pairs = re.findall(
        r"^\| `from exllamav2[\w.]* import ([^`]+)` \| `from exl_\w+ import ([^`]+)` \|$", text, re.MULTILINE
    )
    assert len(pairs) == 6
    assert all(old == new for old, new in pairs)


def test_the_tables_are_found() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert text.count("| test |") == 3
    assert len(rows()) == sum(".py::" in line for line in text.splitlines())
    assert len(rows()) > 20


def test_readmes_link_the_guide() -> None:
    assert "docs/guides/compat.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/guides/compat.md" in (ROOT / "packages/exl-compat/README.md").read_text(encoding="utf-8")


def test_links_of_the_guide_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (GUIDE.parent / link).exists(), link
