"""What tests replace by its dotted name is there: one that has moved is found otherwise only where that test runs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def replaced() -> Iterator[tuple[str, str]]:
    """(test file, dotted name) of every `setattr("package.module.name", ...)` of ours."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("exl_"):
                    yield file.relative_to(TESTS).as_posix(), first.value


FOUND = sorted(set(replaced()))


def test_there_are_some() -> None:
    assert any("cuda" in file for file, _ in FOUND)


@pytest.mark.parametrize(("file", "name"), FOUND)
def test_it_is_there(file: str, name: str) -> None:
    module, attribute = name.rsplit(".", 1)
    assert hasattr(importlib.import_module(module), attribute), f"{file} replaces {name}, which is not there"
