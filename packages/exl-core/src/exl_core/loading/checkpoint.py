"""The tensors of a model folder: which file holds what, and reading them once, into bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from exl_kernels.safetensors_file import TensorEntry, read_into, read_safetensors_header

from ..config.json_reader import read_json_file
from ..errors import ConfigError, ConfigFileError, FormatError, MissingTensorError

__all__ = ["Checkpoint", "TensorReader", "TensorSource"]

log = logging.getLogger(__name__)

MODULE_SUFFIXES = ("q_weight", "qweight", "weight")  # EXL2, GPTQ, float: the order in which a format is looked for
ALIGNMENT = 64
USELESS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # tables that some exporters write beside the weights

TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.")  # image encoders load by themselves


@dataclass(frozen=True)
class Checkpoint:
    """Index of every tensor in the `*.safetensors` files of a folder; headers are checked, data is not touched."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    stamps: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)  # which file it was, and when last written

    @classmethod
    def scan(cls, folder: Path, map_key: Callable[[str], str] = lambda key: key) -> Checkpoint:
        """Raises ConfigFileError without weight files, FormatError for a broken header or a tensor stored twice."""
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
        """FormatError if a weight file is another one, or was written to, since its header was read."""
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise FormatError(f"{file}: the file changed after its header was read: call config.prepare() again")

    def has_module(self, key: str) -> bool:
        """Whether the files hold weights of the module `key`, in any format."""
        return key in self.tensors or any(f"{key}.{s}" in self.tensors for s in MODULE_SUFFIXES)

    def entry(self, name: str) -> TensorEntry:
        """Raises MissingTensorError."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensorError(f"{self.folder}: no tensor {name} in {len(self.files)} weight file(s)") from None

    def lost_files(self) -> str:
        """What an error about a missing tensor goes on with: the files that the folder's index names and that are not
        there. An index alone is no proof: quantizers leave those of the float model behind."""
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
    """The remedy where the weights are there in a form that is not read."""
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
    """Bytes behind the last tensor are no part of the model; whoever put them there may have meant something."""
    end = max((entry.offset + entry.nbytes for entry in entries.values()), default=0)
    size = file.stat().st_size
    if entries and size > end:
        log.warning("%s: %d bytes behind the last tensor are ignored", file, size - end)


class TensorSource(Protocol):
    """What modules load from; tests may hand in tensors that come from no file."""

    def has(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> Tensor: ...
    def read_group(self, names: Collection[str]) -> dict[str, Tensor]: ...
    def describe(self, name: str) -> str: ...


class TensorReader:
    """Reads tensors of a checkpoint with positional reads.

    `read` gives a tensor of its own. `read_group` gives views into one staging buffer that the next `read_group`
    overwrites: the caller repacks and drops them, so host memory stays at the largest group. Tensors named in `shared`
    are wanted twice (an embedding that is also the head): they are remembered and read only once.
    """

    def __init__(self, checkpoint: Checkpoint, shared: Collection[str] = ()) -> None:
        self.checkpoint = checkpoint
        self.bytes_read = 0
        self.used: set[str] = set()  # names that were read
        self._shared = frozenset(shared)
        self._remembered: dict[str, Tensor] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._staged: dict[str, Tensor] = {}  # the last group: parts of a fused matrix ask for it one after the other

    def has(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there. Raises MissingTensorError."""
        return tuple(self.checkpoint.entry(name).shape)

    def describe(self, name: str) -> str:
        """`file: tensor`, for error messages."""
        entry = self.checkpoint.tensors.get(name)
        return f"{entry.path}: {name}" if entry else name

    def read(self, name: str) -> Tensor:
        """The tensor in memory of its own. Raises FormatError, MissingTensorError."""
        if name in self._remembered:
            return self._remembered[name]
        entry = self.checkpoint.entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        self._fill(tensor, entry, name)
        if name in self._shared:
            self._remembered[name] = tensor
        return tensor

    def read_group(self, names: Collection[str]) -> dict[str, Tensor]:
        """Tensors by name, valid until the next `read_group` of others. Raises FormatError, MissingTensorError."""
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
            self._staging = torch.empty(0, dtype=torch.uint8)  # free the old one before asking for more
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
        """Names of the files that nothing has read, less those that are known to be of no use or of an image tower."""
        left = (n for n in self.checkpoint.tensors if n not in self.used)
        return sorted(n for n in left if not n.endswith(USELESS) and not n.startswith(TOWERS))
