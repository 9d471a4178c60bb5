"""Read the answer of a foreign `next()` as token ids. Anything that is not a list of ids is rejected."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from exl_filters import bits
from exl_filters.context import FilterContext
from exl_filters.errors import FilterFailed

__all__ = ["token_ids"]

ACCEPTED = "a list, set, tuple, array or tensor of integer ids, or a bool array with one entry per id of the vocabulary"


def token_ids(given: Any, context: FilterContext | None, what: str) -> npt.NDArray[np.int64]:
    """Return the ids in `given`, ascending and unique; ids outside the vocabulary are left out.

    `given` is a container of integers, or a numpy array or torch tensor of one row. An array holds integers, or bools
    with vocab_size or logits_width entries (a mask). The contract of `next()` has no packed words and no additive rows.
    Raises `FilterFailed`, naming `what`, for floats, strings, masks of other lengths, ids out of range in an array, and
    integer arrays that may be packed words.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.double().numpy() if given.is_floating_point() else given.numpy()
    is_array = isinstance(given, np.ndarray)
    if isinstance(given, str | bytes | bytearray | Mapping):
        raise _refused(what, given)
    try:
        array = given if is_array else np.asarray(list(given))
    except (TypeError, ValueError, OverflowError) as error:
        raise _refused(what, given) from error
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if is_array and array.size != max(array.shape, default=0):
        raise FilterFailed(f"{what}: an array of shape {list(array.shape)}; accepted is one row: {ACCEPTED}")
    array = array.reshape(-1)
    if array.dtype.kind == "b" and is_array:
        return _ids_of_mask(array, context, what)
    if array.dtype.kind not in "iu":
        raise _refused(what, given)
    if context is not None:
        if is_array:
            _check_array(array, context, what)
        _check_repeats(array, context, what)
    size = context.vocab_size if context is not None else np.iinfo(np.int64).max
    return np.unique(array[(array >= 0) & (array < size)].astype(np.int64))


def _ids_of_mask(mask: npt.NDArray[Any], context: FilterContext | None, what: str) -> npt.NDArray[np.int64]:
    if context is None:
        raise FilterFailed(f"{what}: a bool array; attach a context with the vocabulary size before asking for it")
    if len(mask) not in (context.vocab_size, context.logits_width):
        raise FilterFailed(
            f"{what}: a bool array of {len(mask)} entries; a mask has one for each of the {context.vocab_size} ids"
        )
    return np.flatnonzero(mask[: context.vocab_size]).astype(np.int64)


def _check_array(array: npt.NDArray[Any], context: FilterContext, what: str) -> None:
    """Reject an integer array that holds no ids, above all packed words: some of their values look like ids."""
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= context.logits_width:
        raise FilterFailed(
            f"{what}: {array.dtype} values from {low} to {high}, outside [0, {context.logits_width}); accepted is "
            f"{ACCEPTED} (packed words go through fill_bitmask)"
        )
    lengths = {bits.word_count(context.vocab_size), bits.word_count(context.logits_width)}
    if array.dtype.itemsize == 4 and len(array) in lengths and bool((np.diff(array.astype(np.int64)) <= 0).any()):
        raise FilterFailed(
            f"{what}: {len(array)} {array.dtype} values out of order, as many as packed words for the vocabulary; "
            f"accepted is {ACCEPTED} (ids of this many in ascending order; packed words go through fill_bitmask)"
        )


def _check_repeats(array: npt.NDArray[Any], context: FilterContext, what: str) -> None:
    """Reject repeated values in a container as long as a mask or packed words (zeros and ones for bools)."""
    widths = (context.vocab_size, context.logits_width)
    if len(array) in {*widths, *map(bits.word_count, widths)} and len(array) > 1 and len(np.unique(array)) < len(array):
        raise FilterFailed(
            f"{what}: {len(array)} integers, some of them repeated, as many as a mask has entries; accepted is "
            f"{ACCEPTED}"
        )


def _refused(what: str, given: Any) -> FilterFailed:
    kind = f"{type(given).__name__} of {given.dtype}" if isinstance(given, np.ndarray) else type(given).__name__
    return FilterFailed(f"{what}: {kind} {given!r:.60}, which is not a list of token ids; accepted is {ACCEPTED}")
