"""The signatures of the native module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from exl_kernels import _native

MOST_POSITIONAL = 6
MOST_POSITIONAL_TENSORS = 3


def entries() -> Iterator[tuple[str, object]]:
    """Every function of the native module, and every method and constructor of its classes."""
    for name, found in vars(_native).items():
        if inspect.isclass(found):
            yield name, found
            yield from ((f"{name}.{each}", held) for each, held in vars(found).items() if not each.startswith("_"))
        elif callable(found):
            yield name, found


def positional(entry: object) -> list[str]:
    """The names of the arguments that a call may give by position."""
    if isinstance(entry, staticmethod | classmethod):
        entry = entry.__func__
    if not callable(entry):
        return []
    try:
        parameters = inspect.signature(entry).parameters.values()
    except ValueError:  # a class without a constructor
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in kinds and one.name not in ("self", "cls")]


def test_long_native_calls_name_their_arguments() -> None:
    found = {name: positional(entry) for name, entry in entries()}
    assert found["cuda_add_rms_norm"] == ["x"], "signatures are read"
    assert {name: names for name, names in found.items() if len(names) > MOST_POSITIONAL} == {}


def positional_tensors() -> dict[str, list[str]]:
    """The tensors that functions and methods take by position, by the generated signatures."""
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text())
    found = {}
    for top in stub.body:
        inside = top.body if isinstance(top, ast.ClassDef) else [top]
        owner = f"{top.name}." if isinstance(top, ast.ClassDef) else ""
        for one in inside:
            if isinstance(one, ast.FunctionDef) and one.name != "__new__":
                held = [a.arg for a in one.args.args if a.annotation and "Tensor" in ast.unparse(a.annotation)]
                found[owner + one.name] = held
    return found


def test_calls_name_their_tensors() -> None:
    found = positional_tensors()
    assert found["CudaExperts.run"] == ["table", "h"], "signatures are read"
    long = {name: held for name, held in found.items() if len(held) > MOST_POSITIONAL_TENSORS}
    assert long == {}


def test_tensors_of_one_kind_cannot_change_places() -> None:
    with pytest.raises(TypeError, match="positional"):
        _native.cuda_add_rms_norm(None, None)  # type: ignore[call-arg, arg-type]
