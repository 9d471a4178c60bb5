"""Names in Python sources: of what code reads, and of what a file gives to values."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from functools import lru_cache


@lru_cache(maxsize=1)  # checks of a file follow one another
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a Python file, its module first."""
    return list(ast.walk(ast.parse(source)))


def sides(node: ast.Compare | ast.Call) -> list[ast.expr]:
    """The operands of a comparison or of a call of min or max."""
    return [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.args


def given_names(source: str) -> Iterator[tuple[str, ast.AST]]:
    """(name, value) of the assignments, default values and renaming imports of a Python file."""
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            yield from ((name.asname, ast.Name(name.name)) for name in node.names if name.asname)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(map(identifier, target.elts), node.value.elts, strict=False)
                else:
                    yield identifier(target), node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield identifier(node.target), node.value
        elif isinstance(node, ast.arguments):
            arguments = [*node.posonlyargs, *node.args]
            arguments = arguments[len(arguments) - len(node.defaults) :] + node.kwonlyargs
            values = [*node.defaults, *node.kw_defaults]
            yield from ((argument.arg, value) for argument, value in zip(arguments, values, strict=True) if value)


def aliases(given: list[tuple[str, ast.AST]], known: Set[str]) -> Set[str]:
    """`known`, and the names that a file gives to those objects or to members of them."""
    while found := {name for name, value in given if name and known & parts(value)} - known:
        known = known | found
    return known


def parts(value: ast.AST) -> set[str]:
    """The names in a chain of members (`a.b.c`), which may end with calls."""
    while isinstance(value, ast.Call):
        value = value.func
    return {identifier(value)} | (parts(value.value) if isinstance(value, ast.Attribute) else set())


def outside_calls(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and the nodes in it, of calls the function and not the arguments."""
    yield node
    for inner in [node.func] if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
        yield from outside_calls(inner)


def identifier(node: ast.AST) -> str:
    """The last part of a name; "rows" for `x.shape[0]`; "" for other code."""
    if isinstance(node, ast.Subscript) and identifier(node.value) == "shape" and ast.unparse(node.slice) == "0":
        return "rows"
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
