"""Private names of the packages that tests reach by a string or an import, which ruff's SLF001 does not see."""

from __future__ import annotations

import ast
import re

from python_names import identifier, nodes

# Private names that tests may patch or import, by file, for want of a public way. The list may only shrink.
ALLOWED = {
    "tests/core/test_ways.py": {"_native_experts"},
    "tests/kernels/test_sampling_memory.py": {"_places"},
    "tests/kernels/test_workspace.py": {"_by_stream"},
}
# Lines of tests that use a private name, of these or by an attribute (`noqa: SLF001`), also of other libraries.
MOST_PRIVATE_LINES = 27
PRIVATE = re.compile(r"_[a-z]\w*")
PATH = re.compile(r"(?:exl_\w+|exllamav2)(?:\.\w+)*\.(_[a-z]\w*)")
BY_NAME = {"setattr", "getattr", "hasattr", "delattr", "object"}
# The native module has a stub: its names are the public API of the Rust crates. `os._exit` is Python's own.
PUBLIC = {"_native", "_exit", "_fields", "_nothing"}


def private_names(source: str) -> list[tuple[int, str]]:
    """(line, name) of each private name that a test patches, asks for or imports."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and re.match(r"exl_|exllamav2", node.module or ""):
            found += [(node.lineno, alias.name) for alias in node.names if PRIVATE.fullmatch(alias.name)]
        if isinstance(node, ast.Call) and identifier(node.func) in BY_NAME and node.args:
            for given in node.args[:2]:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    name = PATH.fullmatch(given.value) or re.fullmatch(f"({PRIVATE.pattern})", given.value)
                    found += [(node.lineno, name[1])] if name else []
    return [(line, name) for line, name in found if name not in PUBLIC]


def private_lines(source: str) -> set[int]:
    """Numbers of the lines of a test file that use a private name."""
    by_attribute = {number for number, line in enumerate(source.splitlines(), 1) if "noqa: SLF001" in line}
    return by_attribute | {line for line, _ in private_names(source)}


def private_errors(name: str, source: str) -> list[str]:
    """Private names of a test file that ALLOWED does not name, and names in ALLOWED that the file has no more."""
    found = private_names(source)
    allowed = ALLOWED.get(name, set())
    gone = sorted(allowed - {private for _, private in found})
    return [
        f"{name}:{line}: {private}: tests use public names; give the package one"
        for line, private in found
        if private not in allowed
    ] + [f"{name}: does not name {private} any more; take it out of ALLOWED" for private in gone]
