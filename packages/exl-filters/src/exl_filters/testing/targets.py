"""Targets of the shell entry points: `module:factory`, a registered name, or all installed plugins."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from exl_filters import registry
from exl_filters.errors import FilterUsageError, PluginError

__all__ = ["LANGUAGES", "imported", "targets"]

LANGUAGES = "exl_filters.languages"
"""Entry-point group of oracles: filter name to `Language`, list of texts, pattern, or a function that returns one."""


def targets(target: str, params: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield `(name, factory)` pairs. `params` are the parameters of a registered filter.

    Raises `FilterUsageError` for a missing module or attribute, `PluginError` for an unknown name.
    """
    if target == "installed":
        for name in registry.names():
            if registry.info(name).dist != "exl-filters":
                yield name, _made(registry.get(name), name, params or {})
    elif ":" in target and not _is_registered(target):
        found = imported(target)
        if not callable(found):
            raise FilterUsageError(f"{target} is a {type(found).__name__}, not a factory that takes a vocabulary")
        yield target, _made(found, target, {}) if registry.takes_model(found) else found
    else:
        yield target, _made(registry.get(target), target, params or {})


def _is_registered(name: str) -> bool:
    return name in registry.names()


def imported(target: str) -> Any:
    """Import the object of `module:name`. Raises `FilterUsageError` for a missing module or name."""
    module_name, _, attribute = target.partition(":")
    # As `python -m` does: the author's project is usually the current directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise FilterUsageError(f"{target}: cannot import {module_name!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FilterUsageError(f"{target}: {module_name} has no {attribute}")
        found = getattr(found, part)
    return found


def _made(factory: Any, name: str, params: Mapping[str, Any]) -> Any:
    """Convert a class or factory to a factory of one argument; default parameters: its `contract_params`."""
    given = dict(params) or dict(getattr(factory, "contract_params", {}))

    def make(vocabulary: Any) -> Any:
        return registry.build(factory, vocabulary, name, given)

    language = getattr(factory, "contract_language", getattr(factory, "language", None))
    make.language = _entry_point_language(name) if language is None else language  # type: ignore[attr-defined]
    make.capabilities = getattr(factory, "capabilities", ())  # type: ignore[attr-defined]
    return make


def _entry_point_language(name: str) -> Any:
    """Return the oracle that a distribution registers for its filter under the same name; a function is called."""
    for point in importlib.metadata.entry_points(group=LANGUAGES):
        if point.name == name.rpartition(":")[2]:
            try:
                found = point.load()
            except Exception as error:
                raise PluginError(f"language {name!r} ({point.value}) cannot be loaded: {error}") from error
            return found() if callable(found) else found
    return None
