"""Safetensors containers: headers checked before any data is read, positional reads into torch memory, a small writer.

No file is mapped into memory, so a process holds only the tensors that it asked for.
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
    """The tensor `name` of the file `path`.

    `offset` counts bytes from the start of the file; `nbytes` equals dtype times shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype. Raises FormatError for an element type that torch does not have."""
        if self.dtype not in _DTYPES:
            raise FormatError(
                f"{self.path}: tensor {self.name!r}: dtype {self.dtype} cannot be read; "
                f"readable are {', '.join(_DTYPES)}"
            )
        return _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The checked header of the file `path`: its `entries` by name, and its `metadata`.

    Every entry lies within the file, has the size of its shape, and overlaps no other entry.
    """

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_safetensors_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of the file `path` without reading the data.

    Raises:
        FormatError: the file is malformed: unreadable or truncated; header too long or no JSON; duplicate names;
            unknown element types; sizes that overflow or disagree with the offsets; offsets beyond the file or
            overlapping. The message names file and tensor.
    """
    path = Path(path)
    header = _native.safetensors_header(path)
    entries = [TensorEntry(e.name, e.dtype, tuple(e.shape), e.offset, e.nbytes, path) for e in header.entries]
    return SafetensorsHeader(path, {entry.name: entry for entry in entries}, header.metadata)


def read_safetensors_folder(folder: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Return the entries of every `*.safetensors` file of a folder, files in name order. No index file is needed.

    Raises:
        FormatError: a header is broken, two files hold one name, or the folder has no such files.
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
    """Fill a tensor with the bytes of a file from `offset` on, without an intermediate copy. The GIL is released.

    Args:
        path: the file.
        offset: first byte, counted from the start of the file.
        tensor: contiguous, on the CPU, any dtype and shape.
        name: name of the tensor for error messages.

    Raises:
        FormatError: the file cannot be read or ends early.
        DTypeError: the tensor is not contiguous CPU memory.
        ShapeError: the offset is negative or too large.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise DTypeError(f"read_into: the tensor for {name or 'data'} must be contiguous and in CPU memory")
    if not 0 <= offset < 2**63:
        raise ShapeError(f"read_into: offset {offset} for {name or 'data'}; offsets count from the file's start")
    if tensor.numel():
        _native.read_into(Path(path), offset, tensor.reshape(-1).view(torch.uint8), name)


def read_tensor(entry: TensorEntry) -> Tensor:
    """Read an entry into a new CPU tensor. Raises FormatError."""
    tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
    read_into(entry.path, entry.offset, tensor, name=entry.name)
    return tensor


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write CPU tensors to one file, wide element types first for alignment. The file appears complete or not at all.

    Args:
        path: the file, replaced if it exists.
        tensors: CPU tensors by name.
        metadata: texts of the header's `__metadata__`.

    Raises:
        DTypeError: the format lacks an element type, or a tensor is not on the CPU.
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
