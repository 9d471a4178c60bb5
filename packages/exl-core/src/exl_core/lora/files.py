"""The tensors of an adapter folder: safetensors, or a PyTorch archive read without running any of its code."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from exl_kernels.safetensors_file import read_safetensors_header, read_tensor

from ..errors import AdapterError

__all__ = ["AdapterTensors", "find_tensor_file"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def find_tensor_file(folder: Path) -> Path:
    """Return adapter_model.safetensors, else adapter_model.bin. Raises AdapterError."""
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).is_file():
            return folder / name
    raise AdapterError(f"No LoRA found in {folder}: neither adapter_model.safetensors nor adapter_model.bin is there")


class AdapterTensors:
    """Names of an adapter file's tensors, and their data on demand. Raises AdapterError and FormatError."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._loaded: dict[str, Tensor] = {}
        self._digests: dict[str, bytes] = {}
        self._entries = {} if file.suffix == ".bin" else read_safetensors_header(file).entries
        if file.suffix == ".bin":
            self._loaded = _read_archive(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded or self._entries)

    def read(self, name: str) -> Tensor:
        """Return a tensor, F16, BF16 or F32, contiguous and finite, and include it in `digest`."""
        tensor = self._loaded[name] if name in self._loaded else read_tensor(self._entries[name])
        if tensor.dtype not in FLOATS:
            raise AdapterError(f"{self.file}: {name}: element type {tensor.dtype}; an adapter is F16, BF16 or F32")
        if not torch.isfinite(tensor).all():
            raise AdapterError(f"{self.file}: {name}: holds NaN or infinity; the adapter is damaged or diverged")
        tensor = tensor.contiguous()
        one = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
        one.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self._digests[name] = one.digest()
        return tensor

    def digest(self, settings: str) -> bytes:
        """Return 16 bytes over the tensors read so far and `settings`, independent of the order of reading."""
        whole = hashlib.blake2b(settings.encode(), digest_size=16, person=b"exl-adapter")
        for name in sorted(self._digests):
            whole.update(self._digests[name])
        return whole.digest()


def _read_archive(file: Path) -> dict[str, Tensor]:
    """Read a PyTorch zip archive of tensors; the pickle inside may only build tensors and plain containers."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
        packed = [m.filename for m in members if m.file_size > m.compress_size]
        if sum(m.file_size for m in members) > file.stat().st_size:
            raise AdapterError(f"{file}: its parts claim more bytes than the file has")
        if packed:
            raise AdapterError(f"{file}: {packed[0][:80]!r} is compressed; PyTorch stores its archives plainly")
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as e:
        raise AdapterError(f"{file}: not a PyTorch archive of tensors; use safetensors ({str(e)[:200]})") from e
    except (AttributeError, TypeError, IndexError, OSError, OverflowError, NotImplementedError) as e:
        raise AdapterError(f"{file}: a damaged PyTorch archive; use safetensors ({str(e)[:200]})") from e
    size = file.stat().st_size
    tensors: dict[str, Tensor] = {}
    for name, tensor in found.items() if isinstance(found, dict) else ():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise AdapterError(f"{file}: {str(name)[:80]!r} is a {type(tensor).__name__}; expected named tensors only")
        if tensor.nbytes > size:
            raise AdapterError(f"{file}: {name[:80]!r} claims {tensor.nbytes} bytes of a file of {size}")
        tensors[name] = tensor
    if not tensors:
        raise AdapterError(f"{file}: holds no named tensors")
    return tensors
