"""Fail if more than two files of the packages import one another in a circle.

`import package.module` and `from package.module import name` lead to that module, `from package import name` to the
module of that name or, where there is none, to the package. Every import statement counts, for types too, wherever it
is in a file, and so does a call of `import_module` or `__import__` with the name of a module. An import that Python
runs also leads to the `__init__` of the packages above the module, which Python runs first; a package that is above the
importing module is running already.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 2
"""Files of a circle that are allowed: two files about one subject may name each other's types."""

Graph = dict[str, set[str]]


def main() -> int:
    """Print the circles that are too large; the exit status."""
    graph = imports(modules(ROOT))
    large = [circle for circle in circles(graph) if len(circle) > MOST]
    for circle in large:
        print(f"{len(circle)} files import one another in a circle; at most {MOST} may:")
        for name in sorted(circle):
            print(f"  {name} imports {', '.join(sorted(graph[name] & circle))}")
    return 1 if large else 0


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module of packages/*/src."""
    found = {}
    for source in root.glob("packages/*/src"):
        for file in source.rglob("*.py"):
            parts = file.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(files: dict[str, Path]) -> Graph:
    """Module -> the modules that it imports, for types or not, and those that Python runs for these imports."""
    found: Graph = {}
    for name, file in files.items():
        run = {target for target in _targets(name, file, files, types=False) if target != name}
        parents = {parent for target in run for parent in _above(target) if parent in files}
        running = {parent for parent in parents if f"{name}.".startswith(f"{parent}.")}
        found[name] = {*_targets(name, file, files, types=True), *(parents - running)} - {"", name}
    return found


def _above(name: str) -> Iterator[str]:
    """Yield the packages above a module."""
    while name := name.rpartition(".")[0]:
        yield name


def _statements(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    """Yield the nodes of a file; without `types` not those under `if TYPE_CHECKING`."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.If) and ast.unparse(inner.test).endswith("TYPE_CHECKING") and not types:
            for other in inner.orelse:
                yield other
                yield from _statements(other, types)
            continue
        yield inner
        yield from _statements(inner, types)


def _targets(name: str, file: Path, known: dict[str, Path], *, types: bool) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(ast.parse(file.read_text(encoding="utf-8")), types):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _nearest(alias.name, known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else _nearest(base, known)
        elif isinstance(node, ast.Call):
            called = _called(node, name, package)
            yield called if called in known else ""


def _called(node: ast.Call, name: str, package: str) -> str:
    """The module that a call of module `name` imports, if it is written there; "" for other calls."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function not in ("import_module", "__import__"):
        return ""
    given = [*node.args, *(word.value for word in node.keywords if word.arg == "name")]
    text = _text(given[0], {"__name__": name, "__package__": package}) if given else ""
    level = len(text) - len(text.lstrip("."))
    return text if not level else ".".join([*package.split(".")[: len(package.split(".")) - level + 1], text[level:]])


def _text(node: ast.AST, values: dict[str, str]) -> str:
    """The string that a node is, with the names of `values` in it; "" if it depends on anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return values.get(node.id, "")
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else parts
    texts = [_text(part.value if isinstance(part, ast.FormattedValue) else part, values) for part in parts]
    return "".join(texts) if all(texts) else ""


def _nearest(name: str, known: dict[str, Path]) -> str:
    """The module itself or the nearest package above it; "" for other people's modules."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Graph) -> list[set[str]]:
    """Strongly connected components of more than one module (Tarjan 1972, with a stack of its own)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []
    for start in graph:
        if start in number:
            continue
        work: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(graph[start])))]
        number[start] = lowest[start] = len(number)
        path.append(start)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is not None:
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    path.append(target)
                    work.append((target, iter(sorted(graph[target]))))
                elif target in path:
                    lowest[node] = min(lowest[node], number[target])
                continue
            work.pop()
            if work:
                lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
            if lowest[node] == number[node]:
                at = path.index(node)
                component, path = set(path[at:]), path[:at]
                if len(component) > 1:
                    found.append(component)
    return found


if __name__ == "__main__":
    sys.exit(main())
