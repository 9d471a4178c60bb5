"""The tensors of a model folder: which file holds what, and reading them once, into bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .._standin import read_safetensors_header
from ..errors import ConfigFileError, FormatError, MissingTensorError

__all__ = ["Checkpoint", "TensorEntry", "TensorReader", "TensorSource"]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MODULE_SUFFIXES = ("q_weight", "qweight", "weight")  # EXL2, GPTQ, float: the order in which a format is looked for
ALIGNMENT = 64


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file; `begin` and `end` are absolute file offsets in bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises FormatError for an element type that nothing here reads."""
        if self.dtype not in DTYPES:
            raise FormatError(f"{self.file}: {self.name}: Unknown dtype {self.dtype}; known: {', '.join(DTYPES)}")
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Checkpoint:
    """Index of every tensor in the `*.safetensors` files of a folder; headers are validated, data is not touched."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def scan(cls, folder: Path, map_key: Callable[[str], str] = lambda key: key) -> Checkpoint:
        """Raises ConfigFileError without weight files, FormatError for a broken header or a tensor stored twice."""
        files = tuple(sorted(folder.glob("*.safetensors")))
        if not files:
            raise ConfigFileError(f"No .safetensors files found in {folder}")
        tensors: dict[str, TensorEntry] = {}
        for file in files:
            for name, dtype, shape, begin, end in read_safetensors_header(file):
                key = map_key(name)
                if key in tensors:
                    raise FormatError(f"{file}: {key} is also in {tensors[key].file.name}; remove one of the two files")
                tensors[key] = TensorEntry(key, file, dtype, tuple(shape), begin, end)
        return cls(folder, files, tensors)

    def has_module(self, key: str) -> bool:
        """Whether the files hold weights of the module `key`, in any format."""
        return key in self.tensors or any(f"{key}.{s}" in self.tensors for s in MODULE_SUFFIXES)

    def module_bytes(self, key: str) -> int:
        """Bytes in the files of all tensors directly below `key`."""
        head = key + "."
        return sum(t.nbytes for n, t in self.tensors.items() if n.startswith(head) and "." not in n[len(head) :])

    def entry(self, name: str) -> TensorEntry:
        """Raises MissingTensorError."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensorError(f"{self.folder}: no tensor {name} in {len(self.files)} weight file(s)") from None


class TensorSource(Protocol):
    """What modules load from; tests may hand in tensors that come from no file."""

    def has(self, name: str) -> bool: ...
    def read(self, name: str) -> Tensor: ...
    def read_group(self, names: Iterable[str]) -> dict[str, Tensor]: ...
    def describe(self, name: str) -> str: ...


class TensorReader:
    """Reads tensors of a checkpoint with positional reads. Use as a context manager: files close on every way out.

    `read` gives a tensor of its own. `read_group` gives views into one staging buffer that the next `read_group`
    overwrites: the caller repacks and drops them, so host memory stays at the largest group.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.bytes_read = 0
        self._handles: dict[Path, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])
        self._staging = torch.empty(0, dtype=torch.uint8)

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def describe(self, name: str) -> str:
        """`file: tensor`, for error messages."""
        entry = self.checkpoint.tensors.get(name)
        return f"{entry.file}: {name}" if entry else name

    def read(self, name: str) -> Tensor:
        entry = self.checkpoint.entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        if entry.nbytes:
            self._fill(tensor.view(-1).view(torch.uint8), entry)
        return tensor

    def read_group(self, names: Iterable[str]) -> dict[str, Tensor]:
        entries = [self.checkpoint.entry(n) for n in names]
        offsets, total = [], 0
        for e in entries:
            offsets.append(total)
            total += -(-e.nbytes // ALIGNMENT) * ALIGNMENT
        if total > self._staging.numel():
            self._staging = torch.empty(0, dtype=torch.uint8)  # free the old one before asking for more
            self._staging = torch.empty(total, dtype=torch.uint8)
        group: dict[str, Tensor] = {}
        for e, offset in zip(entries, offsets, strict=True):
            raw = self._staging[offset : offset + e.nbytes]
            self._fill(raw, e)
            group[e.name] = raw.view(e.torch_dtype).view(e.shape)
        return group

    def _fill(self, raw: Tensor, entry: TensorEntry) -> None:
        if entry.file not in self._handles:
            try:
                self._handles[entry.file] = os.open(entry.file, os.O_RDONLY)
            except OSError as e:
                raise FormatError(f"{entry.file}: I/O error reading {entry.name}: {e.strerror}") from e
        view, done = memoryview(raw.numpy().data), 0
        while done < entry.nbytes:
            try:
                n = os.preadv(self._handles[entry.file], [view[done:]], entry.begin + done)
            except OSError as e:
                raise FormatError(f"{entry.file}: I/O error reading {entry.name}: {e.strerror}") from e
            if n == 0:
                raise FormatError(
                    f"{entry.file}: truncated: {entry.name} ends at byte {entry.end}, the file at {entry.begin + done}"
                )
            done += n
        self.bytes_read += done
