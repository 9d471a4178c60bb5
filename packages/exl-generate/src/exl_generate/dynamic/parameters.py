"""Checks of public parameters: each function returns the clean value or raises `RequestError`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from numbers import Real
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from exl_core.axes import marks_of, runs_of
from exl_core.errors import InputError
from exl_generate.contracts import Embedding, RequestAdapter, first_missing
from exl_generate.dynamic.sequence import EMBEDDING_INDEX, NO_PICTURES, Pictures
from exl_generate.errors import RequestError
from exl_generate.sampling import FrozenSettings, Settings

__all__ = [
    "adapters_of",
    "check_abort_event",
    "count_of",
    "embeddings_of",
    "flag_of",
    "keys_of",
    "listed",
    "optional_count_of",
    "pictures_of",
    "resumed_of",
    "salt_of",
    "seed_of",
    "sequences_of",
    "settings_of",
    "stop_conditions_of",
    "strings_of",
]

T = TypeVar("T")

MAX_SALT = 256


def count_of(name: str, value: object) -> int:
    """Check an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise RequestError(f"{name} is {value!r}; it must be an integer of at least 0")
    return int(value)


def optional_count_of(name: str, value: object) -> int | None:
    """Check an integer of at least 0, or None."""
    return None if value is None else count_of(name, value)


def flag_of(name: str, value: object) -> bool:
    """Check True, False, 0 or 1; None means False. Strings are rejected: "false" would be true."""
    if value is None or isinstance(value, np.bool_) or (isinstance(value, Real) and value in (0, 1)):
        return bool(value)
    raise RequestError(f"{name} is {value!r}; it must be True or False")


def listed(name: str, values: Iterable[T] | None) -> list[T]:
    """Return the entries of any iterable as a new list; an empty one for None."""
    try:
        return [] if values is None else list(values)
    except TypeError as error:
        raise RequestError(f"{name} is {values!r:.80}; pass a list: [{values!r:.80}]") from error


def salt_of(salt: object) -> bytes:
    """Check bytes, at most 256."""
    if not isinstance(salt, bytes) or len(salt) > MAX_SALT:
        raise RequestError(f"cache_salt is {salt!r:.80}; pass at most {MAX_SALT} bytes")
    return salt


def resumed_of(ids: object) -> tuple[int, ...]:
    """Ids of at least 0 from a list or an int64 tensor [n] or [1, n]; none for None."""
    if isinstance(ids, torch.Tensor):
        numbers = ids.numel() == 0 or not (ids.is_floating_point() or ids.dtype == torch.bool)
        if not numbers or ids.shape[:-1] not in ((), (1,)):
            raise RequestError(f"resume_from is {ids.dtype} {list(ids.shape)}; pass int64 ids of shape [n] or [1, n]")
    values = ids.reshape(-1).tolist() if isinstance(ids, torch.Tensor) else ids
    tokens = listed("resume_from", cast("Iterable[object]", values))  # which checks it
    return tuple(count_of("an id in resume_from", token) for token in tokens)


def seed_of(seed: object) -> int | None:
    """Check an integer of any size, or None."""
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise RequestError(f"seed is {seed!r}; pass an int or None")
    return int(seed)


def settings_of(settings: object) -> FrozenSettings:
    """Return the settings of a request: a copy of the given ones, with every value in its range, or the defaults for
    None.
    """
    if settings is not None and not isinstance(settings, Settings):
        raise RequestError(f"gen_settings is a {type(settings).__name__}; pass ExLlamaV2Sampler.Settings or None")
    given = Settings() if settings is None else settings
    return given.resolve().frozen()


def check_abort_event(event: object) -> None:
    """Reject an object without `is_set`."""
    if event is not None and not callable(getattr(event, "is_set", None)):
        raise RequestError(f"abort_event is {event!r:.80}; pass a threading.Event or None")


def strings_of(name: str, values: Iterable[str] | None) -> list[str]:
    """Check a list of non-empty texts."""
    if isinstance(values, str):
        raise RequestError(f"{name} is the bare string {values!r}; pass a list: [{values!r}]")
    found: list[str] = listed(name, values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name} holds {value!r}; each entry must be a non-empty string")
    return found


def stop_conditions_of(conditions: Iterable[int | str] | None) -> tuple[frozenset[int], list[str]]:
    """Split into ids and strings, the strings in the given order."""
    if isinstance(conditions, str | bytes | int | float):
        raise RequestError(f"stop_conditions is {conditions!r}; pass a list of ids and strings: [{conditions!r}]")
    tokens: set[int] = set()
    strings: list[str] = []
    for condition in listed("stop_conditions", conditions):
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
    """Return the prompt, or the pair of prompts, as checked int64 vectors."""
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


def adapters_of(loras: object) -> tuple[RequestAdapter, ...] | None:
    """Return adapters as a tuple; None stays None (those of the generator)."""
    if loras is None:
        return None
    found: tuple[object, ...] = tuple(loras) if isinstance(loras, list | tuple) else (loras,)
    for lora in found:
        if first_missing(lora, RequestAdapter) is not None:
            raise RequestError(
                f"loras holds a {type(lora).__name__}; pass adapters: ExLlamaV2Lora.from_directory(model, folder)"
            )
    if len(set(map(id, found))) != len(found):
        raise RequestError("loras holds an adapter twice; name each once and use its lora_scaling")
    return cast("tuple[RequestAdapter, ...]", found)


def embeddings_of(embeddings: object) -> tuple[Embedding, ...]:
    """Return embeddings as a tuple of objects whose ids do not overlap."""
    if embeddings is None:
        return ()
    if not isinstance(embeddings, list | tuple):
        raise RequestError(f"embeddings is a {type(embeddings).__name__}; pass a list of ExLlamaV2MMEmbedding")
    for one in embeddings:
        if first_missing(one, Embedding) is not None:
            raise RequestError(f"embeddings holds a {type(one).__name__}; pass ExLlamaV2MMEmbedding objects")
    found: list[Embedding] = sorted(set(embeddings), key=lambda one: int(one.first_index))
    for one, other in itertools.pairwise(found):
        if one.first_index + one.length > other.first_index:
            raise RequestError(
                f"two embeddings share ids from {other.first_index} on; each needs ids of its own, as its constructor "
                "gives them"
            )
    return tuple(found)


def keys_of(ids: NDArray[np.int64], embeddings: SequenceOf[Embedding]) -> NDArray[np.int64] | None:
    """Return the name of each id in the page table, or None if no id is a row of an embedding.

    The names of such rows are negative numbers made from their content, so that equal images are found again. Raises
    `RequestError` for an id that no embedding holds.
    """
    indexed = ids >= EMBEDDING_INDEX
    if not indexed.any():
        return None
    keys = ids.copy()
    for one in embeddings:
        mine = indexed & (ids >= one.first_index) & (ids < one.first_index + one.length)
        keys[mine] = -1 - ((_content(one) + ids[mine] - one.first_index) & 0x7FFF_FFFF_FFFF_FFFF)
        indexed &= ~mine
    if indexed.any():
        raise RequestError(
            f"input_ids holds {int(ids[indexed][0])}, a row of an embedding that is not in the job's embeddings"
        )
    return keys


def pictures_of(ids: NDArray[np.int64], embeddings: SequenceOf[Embedding]) -> Pictures:
    """Return position offsets after images, and images that must stay whole.

    Raises `RequestError` for a part of an image.
    """
    if not any(one.grid is not None for one in embeddings):
        return NO_PICTURES
    try:
        runs = runs_of(ids, embeddings)
    except InputError as error:
        raise RequestError(str(error)) from error
    for run in runs:
        if run.first or not run.complete:
            raise RequestError(
                f"input_ids holds a part of the image {run.embedding.text_alias}; all rows must be there"
            )
    whole = tuple((run.start, run.end) for run in runs if run.embedding.sees_itself)
    if whole and whole[-1][1] == len(ids):
        raise RequestError("input_ids ends with a row of an image whose rows see each other; let a token follow it")
    return Pictures(tuple(marks_of(ids, embeddings)), whole)


def _content(embedding: Embedding) -> np.int64:
    """Return 63 bits of everything about an embedding that decides the K/V of its rows."""
    digest = hashlib.blake2b(digest_size=8, person=b"exl-embedding")
    rows = embedding.embeddings.detach().to("cpu", torch.float32).contiguous()
    grid, frame = embedding.thw_grid, (embedding.pre_tokens, embedding.post_tokens)
    step = float(embedding.time_step)
    digest.update(repr((tuple(rows.shape), None if grid is None else tuple(grid), frame, step)).encode())
    digest.update(rows.numpy().tobytes())
    return np.int64(int.from_bytes(digest.digest(), "little") >> 1)
