"""The control tokens in the files of a model: begin, end and padding of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError, ConfigTypeError
from .json_reader import MAX_INTEGER, JsonReader, read_json_file

__all__ = ["MAX_VOCAB", "ControlIds", "read_control_ids"]

MAX_VOCAB = 1 << 24


@dataclass(frozen=True, slots=True)
class ControlIds:
    """Control ids of a model; None where the model has no such token."""

    bos_token_id: int | None
    pad_token_id: int | None
    #: every id that ends a text, those of config.json first
    eos_token_ids: tuple[int, ...]
    #: the ids in generation_config.json; None where there is no such file
    generation_eos_ids: tuple[int, ...] | None
    #: the first of config.json's ids
    eos_token_id: int | None


def read_control_ids(read: JsonReader, folder: Path) -> ControlIds:
    """Read the control ids of a folder's config.json (`read`) and generation_config.json. Raises ConfigError."""
    bos = read.integer("bos_token_id", default=None, text=True)
    eos = _id_list(read, "eos_token_id")
    file = folder / "generation_config.json"
    said = _id_list(JsonReader(read_json_file(file), file), "eos_token_id") if file.exists() else None
    return ControlIds(
        bos_token_id=None if bos is None or bos < 0 else bos,  # files write -1 for none
        pad_token_id=read.integer("pad_token_id", default=None, text=True),
        eos_token_ids=tuple(dict.fromkeys([*eos, *(said or ())])),
        generation_eos_ids=None if said is None else tuple(said),
        eos_token_id=eos[0] if eos else None,
    )


def _id_list(read: JsonReader, key: str) -> list[int]:
    """Return a token id, or a list of ids, as a list without repetitions and without -1."""
    found = read.raw(key, text=True)
    if found is None:
        return []
    values = found[1] if isinstance(found[1], list) else [found[1]]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ConfigTypeError(f"{read.file}: Value for {key} is not of expected type int or list of int: {found[1]!r}")
    if any(value > MAX_INTEGER for value in values):
        raise ConfigError(f"{read.file}: {key} holds a number of more than 63 bits, must be at most {MAX_INTEGER}")
    return list(dict.fromkeys(value for value in values if value >= 0))
