"""The signatures of the native module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from exl_kernels import _native

MOST_POSITIONAL = 6


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
    assert len(found["cuda_add_rms_norm"]) == 4, "signatures are read"
    assert {name: names for name, names in found.items() if len(names) > MOST_POSITIONAL} == {}


def test_tensors_of_one_kind_cannot_change_places() -> None:
    with pytest.raises(TypeError, match="positional"):
        _native.cuda_add_rms_norm(*[None] * 4, 1e-5, 0.0, None)  # type: ignore[call-arg, arg-type]
