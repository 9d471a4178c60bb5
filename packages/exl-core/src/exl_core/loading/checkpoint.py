"""The tensors of a model folder: an index of the files, and reading each tensor once, into bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from exl_kernels.safetensors_file import TensorEntry, read_into, read_safetensors_header

from ..errors import ConfigError, ConfigFileError, FormatError, MissingTensorError
from ..json_reader import read_json_file

__all__ = ["Checkpoint", "TensorReader", "TensorSource"]

log = logging.getLogger(__name__)

MODULE_SUFFIXES = ("q_weight", "qweight", "weight")  # EXL2, GPTQ, float: the order in which formats are tried
ALIGNMENT = 64
USELESS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # tables that some exporters write as well

TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.")  # image encoders load separately


@dataclass(frozen=True)
class Checkpoint:
    """Index of every tensor in the `*.safetensors` files of a folder; headers are checked, data is not read."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    stamps: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)  # identity and time of the last write

    @classmethod
    def scan(cls, folder: Path, map_key: Callable[[str], str] = lambda key: key) -> Checkpoint:
        """Read the headers of a folder's weight files.

        Args:
            folder: the model folder.
            map_key: maps a tensor's name in the files to the name for look-ups.

        Raises:
            ConfigFileError: there are no weight files.
            FormatError: a header is broken, or a tensor is stored twice.
        """
        files = tuple(sorted(folder.glob("*.safetensors")))
        if not files:
            raise ConfigFileError(f"No .safetensors files found in {folder}{_other_weights(folder)}")
        tensors: dict[str, TensorEntry] = {}
        stamps = {}
        for file in files:
            stamps[file] = _stamp(file)
            entries = read_safetensors_header(file).entries
            _warn_of_leftovers(file, entries)
            for name, entry in entries.items():
                key = map_key(name)
                if key in tensors:
                    other = tensors[key].path.name
                    raise FormatError(f"{file}: tensor {key!r} is also in {other}; remove one of the two")
                tensors[key] = entry
        return cls(folder, files, tensors, stamps)

    def check_unchanged(self) -> None:
        """Raise FormatError if a weight file was replaced or written to since its header was read."""
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise FormatError(f"{file}: the file changed after its header was read: call config.prepare() again")

    def has_module(self, key: str) -> bool:
        """Return whether the files hold weights of the module `key`, in any format."""
        return key in self.tensors or any(f"{key}.{s}" in self.tensors for s in MODULE_SUFFIXES)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor. Raises MissingTensorError."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensorError(f"{self.folder}: no tensor {name} in {len(self.files)} weight file(s)") from None

    def lost_files(self) -> str:
        """Return the end of a message about a missing tensor: files that the folder's index names and the folder lacks.

        An index alone proves nothing, since quantizers may keep that of the float model.
        """
        file = self.folder / "model.safetensors.index.json"
        try:
            named = read_json_file(file).get("weight_map")
        except (ConfigError, ConfigFileError):
            return ""
        names = {n for n in named.values() if isinstance(n, str)} if isinstance(named, dict) else set()
        lost = sorted(names - {f.name for f in self.files})
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"; {file.name} names {lost[0]:.100}{more}, which the folder lacks: download it again" if lost else ""


def _other_weights(folder: Path) -> str:
    """Return the remedy where the weights exist in an unsupported format."""
    for pattern, remedy in (
        ("*.bin", "a pickle, which may run code when it is read"),
        ("*.pt*", "a pickle, which may run code when it is read"),
        ("*.gguf", "GGUF, which is not read here"),
    ):
        for file in sorted(folder.glob(pattern))[:1]:
            return f"; {file.name} is {remedy}: get or save the model as safetensors"
    return ""


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError as e:
        raise FormatError(f"{file}: cannot be read ({e.strerror or e})") from e
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _warn_of_leftovers(file: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Warn of bytes after the last tensor, which are no part of the model."""
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=0)
    size = file.stat().st_size
    if entries and size > end:
        log.warning("%s: %d bytes after the last tensor are ignored", file, size - end)


class TensorSource(Protocol):
    """A source of tensors for modules; tests may provide tensors without files."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises MissingTensorError."""

    def read(self, name: str) -> Tensor:
        """Return a tensor that the caller owns. Raises FormatError, MissingTensorError."""

    def read_group(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors by name, valid until the next call. Raises FormatError, MissingTensorError."""

    def describe(self, name: str) -> str:
        """Return `file: tensor` for error messages."""


class TensorReader:
    """Reads tensors of a checkpoint with positional reads.

    `read` returns a tensor that the caller owns. `read_group` returns views into one staging buffer, which the next
    `read_group` overwrites. The caller repacks and drops the views, so host memory is bounded by the largest group.
    Tensors named in `shared` are needed twice (an embedding that is also the head): they are kept after the first read.
    """

    def __init__(self, checkpoint: Checkpoint, shared: Collection[str] = ()) -> None:
        self.checkpoint = checkpoint
        self.bytes_read = 0
        self.used: set[str] = set()  # names of tensors that were read
        self._shared = frozenset(shared)
        self._remembered: dict[str, Tensor] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._staged: dict[str, Tensor] = {}  # the last group: parts of a fused matrix request it one after the other

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""
        return name in self.checkpoint.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises MissingTensorError."""
        return tuple(self.checkpoint.entry(name).shape)

    def describe(self, name: str) -> str:
        """Return `file: tensor` for error messages."""
        entry = self.checkpoint.tensors.get(name)
        return f"{entry.path}: {name}" if entry else name

    def read(self, name: str) -> Tensor:
        """Return the tensor in separate memory. Raises FormatError, MissingTensorError."""
        if name in self._remembered:
            return self._remembered[name]
        entry = self.checkpoint.entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        self._fill(tensor, entry, name)
        if name in self._shared:
            self._remembered[name] = tensor
        return tensor

    def read_group(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors by name, valid until the next `read_group` of others.

        Raises FormatError, MissingTensorError.
        """
        if self._staged and self._staged.keys() == set(names):
            return dict(self._staged)
        self._staged = {}
        group = {name: self._remembered[name] for name in names if name in self._remembered}
        entries = {name: self.checkpoint.entry(name) for name in names if name not in group}
        offsets, total = {}, 0
        for name, entry in entries.items():
            offsets[name] = total
            total += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        if total > self._staging.numel():
            self._staging = torch.empty(0, dtype=torch.uint8)  # free the old buffer before allocating another
            self._staging = torch.empty(total, dtype=torch.uint8)
        for name, entry in entries.items():
            raw = self._staging[offsets[name] : offsets[name] + entry.nbytes]
            group[name] = raw.view(entry.torch_dtype).view(entry.shape)
            self._fill(group[name], entry, name)
        self._staged = dict(group)
        return group

    def _fill(self, tensor: Tensor, entry: TensorEntry, key: str) -> None:
        self.used.add(key)
        read_into(entry.path, entry.offset, tensor, name=entry.name)
        self.bytes_read += entry.nbytes

    def unused(self) -> list[str]:
        """Return the names of tensors that were never read, except known useless ones and those of image towers."""
        left = (n for n in self.checkpoint.tensors if n not in self.used)
        return sorted(n for n in left if not n.endswith(USELESS) and not n.startswith(TOWERS))
