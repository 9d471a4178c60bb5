"""Check that the docstring of every public function mentions each of its parameters and of the errors it raises.

Public is what docs/reference shows and what the packages list in `__all__`. A parameter is explained where its name is
a word of the docstring of the function, of its class, or of a method that the function overrides. An error is explained
where its class is named, or where the docstring names the function whose errors they are. Prints every function that
leaves something out, and exits 1 if there is one. `--count` prints one line for each package instead.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("exl_kernels", "exl_core", "exl_filters", "exl_generate", "exllamav2", "exl_serve")
# Names whose meaning is the signature's: the object itself, what Python passes, and values that are taken and dropped.
UNNAMED = re.compile(r"self|cls|_.*")


# A docstring that refers to the errors of another function or of the class.
ERRORS_OF = re.compile(r"\berrors\b[^.]*\bof\b|\bRaises the error\b")


class Gap(NamedTuple):
    """A public function and the parameters and errors that its docstring does not mention."""

    name: str
    place: str
    missing: tuple[str, ...]


def identifiers() -> list[str]:
    """The names that the reference pages render, then those that the packages export."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    found = (re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in pages)
    rendered = [name for names in found for name in names]
    exported = [
        f"{package}.{name}" for package in PACKAGES for name in getattr(importlib.import_module(package), "__all__", ())
    ]
    return rendered + exported


def resolve(identifier: str) -> Any:
    """The module, class or function of a dotted name."""
    try:
        return importlib.import_module(identifier)
    except ModuleNotFoundError:
        module, _, name = identifier.rpartition(".")
        return getattr(importlib.import_module(module), name)


def ours(thing: Any) -> bool:
    """Whether a class or function is defined in one of the packages."""
    return getattr(thing, "__module__", "").partition(".")[0] in PACKAGES


def public(module: ModuleType) -> Iterator[Any]:
    """The public classes and functions of a module: those in `__all__`, or else those that it defines."""
    for name in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
        thing = getattr(module, name)
        listed = hasattr(module, "__all__") or getattr(thing, "__module__", "") == module.__name__
        if listed and ours(thing) and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield thing


def functions(cls: type) -> Iterator[FunctionType]:
    """The functions that a class shows: its constructor and its public methods, inherited ones included."""
    for name in dir(cls):
        found = inspect.getattr_static(cls, name)
        if isinstance(found, functools.cached_property | property):
            continue
        function = inspect.unwrap(getattr(found, "__func__", found))
        if inspect.isfunction(function) and ours(function) and (name == "__init__" or not name.startswith("_")):
            yield function


def owner(function: FunctionType, cls: type) -> type:
    """The class in whose body a method is defined."""
    for base in cls.__mro__:
        if any(inspect.unwrap(getattr(f, "__func__", f)) is function for f in vars(base).values()):
            return base
    return cls


def field_docstrings(cls: type) -> Iterator[str]:
    """The names of a dataclass's fields that have a docstring below them, those of its bases included."""
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, after in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(field.target, ast.Name):
                yield field.target.id


def raised(function: FunctionType) -> Iterator[str]:
    """The errors that a function's own body raises, without NotImplementedError: it marks what subclasses define."""
    todo = list(ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body)  # type: ignore[attr-defined]
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(error).rpartition(".")[2]
            if re.fullmatch(r"[A-Z]\w*", name) and name != "NotImplementedError":
                yield name
        todo += ast.iter_child_nodes(node)


def gap(function: FunctionType, cls: type | None) -> Gap:
    """The parameters and errors that the docstrings of a function and of its class leave out."""
    code = function.__code__
    name = f"{function.__module__}.{function.__qualname__}"
    texts = [function.__doc__ or "", getattr(cls, "__doc__", None) or ""]
    overridden = [getattr(base, function.__name__, None) for base in (cls.__mro__[1:-1] if cls else ())]
    texts += [getattr(method, "__doc__", None) or "" for method in overridden]
    file, line = inspect.getsourcefile(inspect.getmodule(function) or function) or "", code.co_firstlineno
    if cls and code.co_filename == "<string>":  # a dataclass's constructor
        name = f"{cls.__module__}.{cls.__qualname__}"
        texts = [cls.__doc__ or "", *field_docstrings(cls)]
        file, line = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1]
    names = [name for name in inspect.signature(function).parameters if not UNNAMED.fullmatch(name)]
    text = " ".join(texts)
    if code.co_filename != "<string>" and not ERRORS_OF.search(function.__doc__ or ""):
        names += dict.fromkeys(raised(function))
    left_out = tuple(name for name in names if not re.search(rf"\b{re.escape(name)}\b", text))
    return Gap(name, f"{Path(file).relative_to(ROOT)}:{line}", left_out)


def checked() -> Iterator[Gap]:
    """One record for each public function that the reference shows, with what its docstring leaves out."""
    seen: set[Any] = set()
    for identifier in identifiers():
        thing = resolve(identifier)
        for member in public(thing) if isinstance(thing, ModuleType) else [thing]:
            for function in functions(member) if inspect.isclass(member) else [member]:
                if inspect.isfunction(function) and ours(function) and function not in seen:
                    seen.add(function)
                    yield gap(function, owner(function, member) if inspect.isclass(member) else None)


def main() -> int:
    """Print gaps, or counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", action="store_true", help="print a count for each package")
    if parser.parse_args().count:
        total, bare = Counter[str](), Counter[str]()
        for found in checked():
            package = found.name.partition(".")[0]
            total[package] += 1
            bare[package] += bool(found.missing)
        for package, count in total.items():
            print(f"{package}: {count - bare[package]} of {count} public functions explain every parameter and error")
        return 0
    gaps = [found for found in checked() if found.missing]
    for found in gaps:
        print(f"error: {found.place}: {found.name} does not explain {', '.join(found.missing)}")
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main())
