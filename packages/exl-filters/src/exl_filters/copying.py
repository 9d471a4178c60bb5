"""Copy a filter's state without the objects that it refers to.

`ExLlamaV2Filter.clone` must give an independent filter for classes that it does not know. Containers are state and are
copied. Values, the model, the tokenizer and objects that declare it are shared. An object of any other kind is
rejected: a shared parser would mix up two jobs, and a deep copy of a generator would take gigabytes.
"""

from __future__ import annotations

import enum
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from concurrent.futures import Executor
from dataclasses import is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from exl_filters.errors import FilterUsageError

__all__ = ["CopiesItself", "copy_state"]

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, type(Ellipsis), type(NotImplemented)),
    *(enum.Enum, re.Pattern, PurePath, np.generic, np.dtype, Executor),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)

_UNKNOWN = object()


def copy_state(value: Any, shared: dict[int, Any], where: str) -> Any:
    """Return a private copy of `value`; objects in `shared` stay shared. Raises `FilterUsageError` naming `where`."""
    if id(value) in shared:
        return shared[id(value)]
    if isinstance(value, _VALUES) or getattr(type(value), "shared_between_clones", False):
        return value
    copied = _copy_container(value, shared, where)
    if copied is _UNKNOWN:
        raise FilterUsageError(
            f"{where} holds a {type(value).__name__}, which cannot be told apart as state or shared table: "
            "override clone(), or give each job its own filter"
        )
    return copied


def _copy_container(value: Any, shared: dict[int, Any], where: str) -> Any:
    def each(item: Any) -> Any:
        return copy_state(item, shared, where)

    kind = type(value)
    result: Any = _UNKNOWN
    if kind in (list, set, tuple, frozenset):
        result = kind(each(item) for item in value)
    elif kind is deque:
        result = deque((each(item) for item in value), value.maxlen)
    elif kind in (dict, OrderedDict, Counter):
        result = kind()
        for key, item in value.items():
            result[each(key)] = each(item)
    elif kind is defaultdict:
        result = defaultdict(value.default_factory, {each(key): each(item) for key, item in value.items()})
    elif kind is bytearray or isinstance(value, np.ndarray):
        return value.copy()
    elif (hasattr(value, "detach") and hasattr(value, "clone")) or isinstance(value, CopiesItself):
        return value.clone()
    elif is_dataclass(value):
        result = object.__new__(kind)
        for name, item in vars(value).items():
            object.__setattr__(result, name, each(item))
    return result


class CopiesItself:
    """Marks classes whose `clone()` copies an object with its state."""
