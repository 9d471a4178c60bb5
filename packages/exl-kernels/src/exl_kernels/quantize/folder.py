"""Convert a float model folder to an EXL2 or GPTQ folder by round to nearest, without data or calibration.

Quantized are the attention and MLP projections of every layer and each expert's matrices. For EXL2 the head is
quantized too; a model with tied embeddings gets a separate head. Embeddings, norms, routers and biases become F16.
Vision towers and projectors are copied unchanged. A layout (`exl_kernels.quantize.layout`) says which tensors these
are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _native
from ..errors import FormatError, UnsupportedError
from ..formats import exl2_quantize, gptq_quantize, importance_order
from ..safetensors_file import read_safetensors_folder, write_safetensors
from .layout import FOREIGN, FolderMatrix, FolderSource, layout_by_names
from .plans import HEAD_PLANS, Matrix, Slot, allocate

__all__ = ["QuantizeReport", "quantize_folder"]

Progress = Callable[[int, int, str], None]
_LEFT_BEHIND = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".partial")
_GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """The result of `quantize_folder`.

    Attributes:
        plans: the plan of each matrix ("4b_128g" for GPTQ).
        bits_per_weight: average over the layers' matrices.
        head_bits_per_weight: of the head.
        files: the files written.
        nbytes: their size in bytes.
    """

    plans: dict[str, str]
    bits_per_weight: float
    head_bits_per_weight: float
    files: tuple[Path, ...]
    nbytes: int


def quantize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    bits: float = 4.0,
    head_bits: int | None = None,
    fast: bool = False,
    reorder: bool = True,
    shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
    format: Literal["exl2", "gptq"] = "exl2",
    group_size: int = 128,
    layout: Sequence[FolderMatrix] | None = None,
) -> QuantizeReport:
    """Quantize the Hugging Face folder `source` into the new or empty folder `target`.

    After an error the target's files are removed.

    Args:
        source: folder with config.json and float .safetensors files.
        target: new or empty folder.
        bits: for EXL2 the average over the layers' matrices, everything stored counted, between about 2.2 and 8.1; for
            GPTQ 2, 3, 4 or 8.
        head_bits: 2, 3, 4, 5, 6 (the default), 8, or 16 for a float head. GPTQ has float heads only.
        fast: skip the search for each group's best scale (EXL2).
        reorder: sort input features by weight norm, so that the largest get the widest codes or separate groups.
        shard_bytes: start another file beyond this size.
        progress: called as progress(done, total, key) after each matrix.
        format: "exl2" or "gptq".
        group_size: rows of a GPTQ group; -1 for one group.
        layout: the matrices, if their names are not those of llama-like models (see `exl_core.convert`).

    Raises:
        FormatError: the source is broken or already quantized, the target is not empty, the bits are out of reach, or a
            weight is NaN.
        UnsupportedError: no known projections.
    """
    source, target = Path(source), Path(target)
    head_bits = _check_options(format, bits, head_bits)
    config = _read_config(source)
    tensors = FolderSource(read_safetensors_folder(source))
    matrices = _check_layout(tensors, layout_by_names(tensors, config) if layout is None else layout)
    slots = _slots(matrices, 32 if format == "gptq" else 1)
    heads = [m for m in matrices if not m.slot]
    plans = allocate(slots, bits) if format == "exl2" else _gptq_plans(slots, int(bits), group_size)
    plans |= {m.key: HEAD_PLANS[head_bits] for m in heads if head_bits != 16 and m.in_features % 32 == 0}
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FormatError(f"{target}: the target folder must be new or empty")

    def quantize(weight: Tensor, key: str) -> dict[str, Tensor]:
        perm = importance_order(weight) if reorder else None
        if format == "gptq":
            return gptq_quantize(weight, bits=int(bits), group_size=group_size, perm=perm, name=key)
        return exl2_quantize(weight, plans[key], perm=perm, fast=fast, name=key)

    writer = _Writer(target, shard_bytes, format)
    try:
        writer.write(tensors, matrices, plans, quantize, progress)
        exl2 = {"head_bits": head_bits, "calibration": {"rows": 0, "length": 0, "dataset": "(none: round to nearest)"}}
        gptq = {"group_size": group_size, "desc_act": reorder, "sym": False, "checkpoint_format": "gptq"}
        block = {"quant_method": format, "version": _native.__version__, "bits": float(bits)} | exl2
        if format == "gptq":
            block = {"quant_method": format, "bits": int(bits)} | gptq
        writer.finish(source, config | {"quantization_config": block})
    except BaseException:
        writer.discard()
        raise
    weights = sum(m.weights for slot in slots for m in slot.matrices)
    body = sum(writer.stored_bits[m.key] for slot in slots for m in slot.matrices)
    in_head = sum(m.in_features * m.out_features for m in heads)
    head = sum(writer.stored_bits.get(m.key, 16 * m.in_features * m.out_features) for m in heads)
    return QuantizeReport(
        plans,
        body / weights,
        head / max(in_head, 1),
        tuple(writer.files),
        sum(file.stat().st_size for file in writer.files),
    )


def _check_options(format: str, bits: float, head_bits: int | None) -> int:
    """Return head_bits or its default. Raises FormatError for options that the format does not have."""
    if format == "gptq":
        if bits not in _GPTQ_BITS or head_bits not in (None, 16):
            raise FormatError(
                f"bits {bits}, head_bits {head_bits}: GPTQ has {', '.join(map(str, _GPTQ_BITS))} bits and a float head"
            )
        return 16
    if format != "exl2":
        raise UnsupportedError(f'format={format!r}; use "exl2" or "gptq"')
    if not 1.0 <= bits <= 9.0:
        raise FormatError(f"bits {bits}; expected an average between about 2.2 and 8.1 bits per weight")
    head_bits = 6 if head_bits is None else head_bits
    if head_bits != 16 and head_bits not in HEAD_PLANS:
        raise FormatError(f"head_bits {head_bits}; expected one of {', '.join(map(str, HEAD_PLANS))} or 16")
    return head_bits


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise FormatError(f"{path}: expected a JSON object")
    if config.get("quantization_config"):
        raise FormatError(f"{path}: this model is already quantized; start from the float model")
    return config


def _check_layout(source: FolderSource, layout: Iterable[FolderMatrix]) -> list[FolderMatrix]:
    matrices = list(layout)
    for matrix in matrices:
        for name in (matrix.tensor, matrix.bias):
            if name is not None and name not in source.entries:
                raise FormatError(f"{matrix.key}: the files hold no tensor {name}")
    if len({m.key for m in matrices}) < len(matrices):
        raise FormatError("the layout names a matrix twice")
    return matrices


def _slots(matrices: Iterable[FolderMatrix], columns: int) -> list[Slot]:
    """Return attention and MLP of every layer, in order. A slot with a size that the format cannot hold stays float."""
    found: dict[str, list[FolderMatrix]] = {}
    for matrix in matrices:
        if matrix.slot:
            found.setdefault(matrix.slot, []).append(matrix)
    slots = [
        Slot(name, tuple(Matrix(m.key, m.role, m.in_features, m.out_features) for m in members))
        for name, members in found.items()
        if all(m.in_features % 32 == 0 and m.out_features % columns == 0 for m in members)
    ]
    if not slots:
        raise UnsupportedError("no matrices to quantize: none has sizes in multiples of 32, which the format needs")
    return slots


def _gptq_plans(slots: Iterable[Slot], bits: int, group_size: int) -> dict[str, str]:
    return {m.key: f"{bits}b_{group_size}g" for slot in slots for m in slot.matrices}


class _Writer:
    """Collects quantized tensors and writes them in shards."""

    def __init__(self, target: Path, shard_bytes: int, method: str) -> None:
        self.target = target
        self.files: list[Path] = []
        self.stored_bits: dict[str, int] = {}
        self._made = [folder for folder in (target, *target.parents) if not folder.exists()]
        self._shard_bytes = shard_bytes
        self._method = method
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError:
            self._remove_folders()  # some parents may exist already when a name is rejected
            raise

    def write(
        self,
        source: FolderSource,
        matrices: Sequence[FolderMatrix],
        plans: Mapping[str, str],
        quantize: Callable[[Tensor, str], dict[str, Tensor]],
        progress: Progress | None,
    ) -> None:
        jobs = [m for m in matrices if m.key in plans]
        used = {m.tensor for m in jobs if not m.kept}
        left = next((m for m in matrices if m.key not in plans and m.tensor in used), None)
        if left is not None:
            raise FormatError(f"{left.key}: {left.tensor} is quantized in part; its parts belong in one slot")
        for done, matrix in enumerate(jobs, 1):
            self._quantize(matrix, source.weight(matrix), quantize)
            if progress is not None:
                progress(done, len(jobs), matrix.key)
        for matrix in jobs:
            bias = source.bias(matrix)
            if bias is not None and matrix.bias is not None:
                used.add(matrix.bias)
                padded = torch.nn.functional.pad(_half(bias, matrix.bias), (0, -bias.shape[0] % 32))
                self._add({f"{matrix.key}.bias": padded})
        for name in source:
            if name not in used:
                tensor = source.read(name)
                self._add({name: tensor if FOREIGN.search(name) else _half(tensor, name)})

    def _quantize(
        self, matrix: FolderMatrix, weight: Tensor, quantize: Callable[[Tensor, str], dict[str, Tensor]]
    ) -> None:
        if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            weight = weight.float()
        parts = quantize(weight, matrix.key)
        self.stored_bits[matrix.key] = 8 * sum(tensor.nbytes for tensor in parts.values())
        self._add({f"{matrix.key}.{part}": tensor for part, tensor in parts.items()})

    def _add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending |= tensors
        self._pending_bytes += size

    def _flush(self) -> None:
        path = self.target / f"output_temp_{len(self.files) + 1}.safetensors"
        self.files.append(path)
        write_safetensors(path, self._pending, {"format": "pt", "quant_method": self._method, "writer": "exl_kernels"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self, source: Path, config: dict[str, Any]) -> None:
        """Give the files their final names and write index, config and the other files of the folder."""
        if self._pending:
            self._flush()
        count = len(self.files)
        for i, path in enumerate(self.files):
            name = "output.safetensors" if count == 1 else f"output-{i + 1:05d}-of-{count:05d}.safetensors"
            self.files[i] = path.rename(self.target / name)
        if count > 1:
            index = {key: self.files[i].name for i, keys in enumerate(self._shards) for key in keys}
            _write_json(self.target / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(_LEFT_BEHIND):
                shutil.copyfile(file, self.target / file.name)
        _write_json(self.target / "config.json", config)

    def discard(self) -> None:
        """Remove the files written so far, and the folders made for them."""
        for path in list(self.target.iterdir()):
            if path.is_file():
                path.unlink()
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):  # it was never made, or another process has put a file there
                folder.rmdir()


def _half(tensor: Tensor, key: str) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype == torch.float16:
        return tensor
    half = tensor.to(torch.float16)
    if not torch.isfinite(half).all():
        worst = tensor.abs().max().item()
        raise FormatError(f"{key}: the value {worst} does not fit half precision (65504), which EXL2 files keep it in")
    return half


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False) + "\n", encoding="utf-8")
