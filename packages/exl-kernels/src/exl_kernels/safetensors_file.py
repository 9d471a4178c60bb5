"""Safetensors containers: headers checked before anything is read, positional reads into torch memory, a small writer.

Nothing here maps files into memory, so the memory a process holds is the tensors it asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import _native
from .errors import DTypeError, FormatError, ShapeError

__all__ = [
    "SafetensorsHeader",
    "TensorEntry",
    "read_into",
    "read_safetensors_folder",
    "read_safetensors_header",
    "read_tensor",
    "write_safetensors",
]

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file. `offset` counts from the start of the file; `nbytes` equals dtype times shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises FormatError for an element type that torch does not have."""
        if self.dtype not in _DTYPES:
            raise FormatError(
                f"{self.path}: tensor {self.name!r}: dtype {self.dtype} cannot be read; "
                f"readable are {', '.join(_DTYPES)}"
            )
        return _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A checked header: every entry lies within the file, has the size its shape asks for, overlaps no other."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_safetensors_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of one file; the data is not touched.

    Raises FormatError, naming file and tensor, for anything that is not a well-formed file: unreadable or truncated,
    header too long or no JSON, names given twice, unknown element types, sizes that overflow or disagree with the
    offsets, offsets beyond the file or overlapping.
    """
    path = Path(path)
    rows, metadata = _native.safetensors_header(path)
    entries = {
        name: TensorEntry(name, dtype, tuple(shape), offset, nbytes, path)
        for name, dtype, shape, offset, nbytes in rows
    }
    return SafetensorsHeader(path, entries, metadata)


def read_safetensors_folder(folder: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Entries of every `*.safetensors` file of a folder, files in name order; no index file is needed.

    Raises FormatError for a broken header, for a name that two files hold, and for a folder without such files.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FormatError(f"{folder}: no .safetensors files here")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_safetensors_header(file).entries.items():
            if name in entries:
                raise FormatError(
                    f"{file}: tensor {name!r} is also in {entries[name].path.name}; remove one of the two files"
                )
            entries[name] = entry
    return entries


def read_into(path: str | os.PathLike[str], offset: int, tensor: Tensor, *, name: str = "") -> None:
    """Fill `tensor` (contiguous, CPU, any dtype and shape) with the file's bytes at `offset`, without a copy between.

    The GIL is released. `name` goes into errors. Raises FormatError if the file cannot be read or ends early.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise DTypeError(f"read_into: the tensor for {name or 'data'} must be contiguous and in CPU memory")
    if not 0 <= offset < 2**63:
        raise ShapeError(f"read_into: offset {offset} for {name or 'data'}; offsets count from the file's start")
    if tensor.numel():
        _native.read_into(Path(path), offset, tensor.reshape(-1).view(torch.uint8), name)


def read_tensor(entry: TensorEntry) -> Tensor:
    """A new CPU tensor with the entry's data. Raises FormatError."""
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
    read_into(entry.path, entry.offset, tensor, name=entry.name)
    return tensor


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write CPU tensors to one file, wide element types first so that each is aligned; appears whole or not at all.

    Raises DTypeError for an element type the format lacks.
    """
    path = Path(path)
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.device.type != "cpu":
            raise DTypeError(f"{path}: tensor {name!r} is {tensor.dtype} on {tensor.device}; expected CPU memory")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    offset = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in order:
                if tensors[name].numel():
                    raw = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
                    file.write(raw.numpy().data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
