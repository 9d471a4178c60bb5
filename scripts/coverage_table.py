"""Print a table of every row of the checklists in docs/coverage/*.toml with the tests that cover it.

A test names its rows with the marker `covers`: `@pytest.mark.covers("generators: healing", "core: caches")`, each with
the checklist before it. The marks are read from the sources; no test runs. `--into FILE` writes the table to a file. CI
builds it into the documentation site.
"""

from __future__ import annotations

import argparse
import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("core", "generators", "filters")

HEAD = """# Coverage

Every row of the checklists in `docs/coverage`, and the tests that cover it. A row without a test is **open**.
"""


class UnknownRowError(Exception):
    """A test claims a row that no checklist has."""


def checklists() -> dict[str, tuple[str, dict[str, str]]]:
    """Name of a checklist -> (title, row -> what it asks for)."""
    found = {}
    for name in ORDER:
        data = tomllib.loads((ROOT / "docs" / "coverage" / f"{name}.toml").read_text(encoding="utf-8"))
        found[name] = (data["title"], data["rows"])
    return found


def claims() -> Iterator[tuple[str, str]]:
    """(row as written in the mark, test) of every mark under tests/."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        place = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        if "mark.covers" not in source:
            continue
        tree = ast.parse(source)
        for row in _rows_of(value for value in _module_marks(tree)):
            yield row, place
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _claims_of(node, place)


def table() -> str:
    """The whole file."""
    lists = checklists()
    tests: dict[tuple[str, str], set[str]] = defaultdict(set)
    for claim, test in claims():
        name, _, row = claim.partition(": ")
        if name not in lists or row not in lists[name][1]:
            known = ", ".join(lists[name][1]) if name in lists else f"checklists {', '.join(lists)}"
            raise UnknownRowError(f"{test} covers {claim!r}, which is no row: there are {known}")
        tests[name, row].add(test)
    lines = [HEAD]
    for name, (title, rows) in lists.items():
        lines += [f"## {title} ({name})", "", "| row | capability | tests |", "|---|---|---|"]
        for row, what in rows.items():
            lines.append(f"| {row} | {what} | {_shown(tests[name, row]) if (name, row) in tests else '**open**'} |")
        lines.append("")
    return "\n".join(lines)


def _shown(tests: set[str]) -> str:
    """Tests by file: `tests/a/test_b.py`: one, two."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        file, _, name = test.partition("::")
        by_file[file].append(name)
    return "; ".join(
        f"`{file.removeprefix('tests/')}`" + (f": {', '.join(n for n in names if n)}" if any(names) else "")
        for file, names in by_file.items()
    )


def _claims_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, place: str) -> Iterator[tuple[str, str]]:
    here = f"{place}::{node.name}"
    for row in _rows_of(node.decorator_list):
        yield row, here
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _claims_of(child, here)


def _module_marks(tree: ast.Module) -> Iterator[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            yield from node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]


def _rows_of(marks: Iterator[ast.expr] | list[ast.expr]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
            for argument in mark.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise UnknownRowError(f"covers takes plain strings, not {ast.unparse(argument)}")
                yield argument.value


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="write the table to this file")
    into = parser.parse_args().into
    text = table()
    if into is None:
        print(text)
        return
    into.write_text(text, encoding="utf-8")
    print(f"{text.count('**open** |')} of {text.count(chr(10) + '| ') - len(ORDER)} rows are open")


if __name__ == "__main__":
    main()
