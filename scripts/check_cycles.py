"""Fail if more than two files of the packages import one another in a circle, imports for types counted.

Every import statement counts, wherever it is in a file. `import package.module` and `from package.module import name`
lead to that module, `from package import name` to the module of that name or, where there is none, to the package.
Python also runs the `__init__` of the packages above an imported module. Those imports are not counted.
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
    """Module -> the modules that it imports."""
    return {
        name: {target for target in _targets(name, file, files) if target not in ("", name)}
        for name, file in files.items()
    }


def _targets(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _nearest(alias.name, known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else _nearest(base, known)


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
