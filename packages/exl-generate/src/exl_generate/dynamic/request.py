"""The parameters of a job, checked at the door: each function returns the clean value or raises `RequestError`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from exl_generate.errors import RequestError

__all__ = ["count_of", "sequences_of", "stop_conditions_of", "strings_of"]


def count_of(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise RequestError(f"{name} is {value!r}; it must be an integer of at least 0")
    return int(value)


def strings_of(name: str, values: Iterable[str] | None) -> list[str]:
    if isinstance(values, str):
        raise RequestError(f"{name} is the bare string {values!r}; pass a list: [{values!r}]")
    found = list(values or [])
    for value in found:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} holds {value!r}; each entry must be a non-empty string")
    return found


def stop_conditions_of(conditions: Iterable[int | str] | None) -> tuple[frozenset[int], list[str]]:
    """Ids and strings, the strings in the order given."""
    if isinstance(conditions, str | bytes | int | float):
        raise RequestError(f"stop_conditions is {conditions!r}; pass a list of ids and strings: [{conditions!r}]")
    tokens: set[int] = set()
    strings: list[str] = []
    for condition in conditions or []:
        if isinstance(condition, str) and condition:
            strings.append(condition)
        elif isinstance(condition, int | np.integer) and not isinstance(condition, bool) and condition >= 0:
            tokens.add(int(condition))
        else:
            raise RequestError(
                f"stop condition {condition!r} is neither a token id of at least 0 nor a non-empty string"
            )
    return frozenset(tokens), strings


def sequences_of(input_ids: object) -> list[NDArray[np.int64]]:
    """The prompt, or the pair of prompts, as checked int64 vectors."""
    rows = list(input_ids) if isinstance(input_ids, list | tuple) else [input_ids]
    if not 1 <= len(rows) <= 2:
        raise RequestError(f"input_ids holds {len(rows)} sequences; a job takes one, or a pair for CFG")
    return [_ids(row) for row in rows]


def _ids(input_ids: object) -> NDArray[np.int64]:
    if not isinstance(input_ids, torch.Tensor):
        raise RequestError(f"input_ids is a {type(input_ids).__name__}; pass an int64 tensor of shape [1, n]")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise RequestError(f"input_ids has shape {list(input_ids.shape)}; a job takes one sequence of shape [1, n]")
    if input_ids.shape[1] == 0:
        raise RequestError("input_ids is empty; a job needs at least one token (add_bos=True gives a prompt its BOS)")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise RequestError(f"input_ids is {input_ids.dtype}; pass int64 token ids")
    return input_ids.detach().cpu().numpy().reshape(-1).astype(np.int64)
