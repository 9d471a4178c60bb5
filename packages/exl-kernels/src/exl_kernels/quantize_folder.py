"""A float model folder in, an EXL2 folder out, by round to nearest: no data, no calibration (formats.md 2.8 to 2.11).

Quantized: the attention and MLP projections of every layer, each expert's three matrices, and the head, which a model
with tied embeddings gets of its own. Embeddings, norms, routers and biases become F16; vision towers and projectors
stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _native
from .errors import FormatError, UnsupportedError
from .formats import exl2_quantize, importance_order
from .quantize_plans import ATTENTION_ROLES, HEAD_PLANS, Matrix, Slot, allocate
from .safetensors_file import TensorEntry, read_safetensors_folder, read_tensor, write_safetensors

__all__ = ["QuantizeReport", "quantize_folder"]

Progress = Callable[[int, int, str], None]

_ROLES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "fc1": "up",
    "fc2": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_LAYER = re.compile(r"^(?P<block>(?:.*\.)?layers\.\d+)\.(?P<module>.+)\.weight$")
_FOREIGN = re.compile(r"(^|\.)(vision|visual|multi_modal|audio)")
_EMBEDDING = re.compile(r"^(?P<prefix>.*?)(?:model\.)?(?:language_model\.)?embed_tokens\.weight$")
_LEFT_BEHIND = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".partial")


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What was written: the plan of each matrix and the bits it took."""

    plans: dict[str, str]
    bits_per_weight: float
    head_bits_per_weight: float
    files: tuple[Path, ...]
    nbytes: int


@dataclass(slots=True)
class _Source:
    """The float tensors of the folder, fused matrices seen as the split ones they become."""

    entries: dict[str, TensorEntry]
    rows: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def shape(self, key: str) -> tuple[int, ...]:
        if key in self.rows:
            fused, begin, end = self.rows[key]
            return (end - begin, *self.entries[fused].shape[1:])
        return self.entries[key].shape

    def read(self, key: str) -> Tensor:
        if key in self.rows:
            fused, begin, end = self.rows[key]
            return read_tensor(self.entries[fused])[begin:end].clone()
        return read_tensor(self.entries[key])

    def names(self) -> Iterator[str]:
        fused = {name for name, _, _ in self.rows.values()}
        yield from (key for key in self.entries if key not in fused)
        yield from self.rows


def quantize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    bits: float = 4.0,
    head_bits: int = 6,
    fast: bool = False,
    reorder: bool = True,
    shard_bytes: int = 4 << 30,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantize the Hugging Face folder `source` into the new or empty folder `target`.

    bits: average over the layers' matrices, everything stored counted, between about 2.2 and 8.1. head_bits: 2, 3, 4,
    5, 6 or 8, or 16 for a float head. fast: skip the search for each group's best scale. reorder: sort input features
    by weight norm, so that the widest codes go to the largest. shard_bytes: start another file beyond this size.
    progress(done, total, key) is called after each matrix.

    Raises FormatError (broken or already quantized source, target not empty, bits out of reach, NaN in weights) and
    UnsupportedError (no known projections). On an error the target's files are removed again.
    """
    source, target = Path(source), Path(target)
    if not 1.0 <= bits <= 9.0:
        raise FormatError(f"bits {bits}; expected an average between about 2.2 and 8.1 bits per weight")
    if head_bits != 16 and head_bits not in HEAD_PLANS:
        raise FormatError(f"head_bits {head_bits}; expected one of {', '.join(map(str, HEAD_PLANS))} or 16")
    config = _read_config(source)
    tensors = _split_fused(read_safetensors_folder(source), config)
    slots = _find_slots(tensors)
    plans = allocate(slots, bits)
    head_key, head_source = _find_head(tensors)
    if head_bits != 16 and tensors.shape(head_source)[1] % 32 == 0:
        plans[head_key] = HEAD_PLANS[head_bits]
    if target.exists() and any(target.iterdir()):
        raise FormatError(f"{target}: the target folder must be new or empty")
    writer = _Writer(target, shard_bytes, fast, reorder)
    try:
        writer.write(tensors, plans, {head_key: head_source}, progress)
        writer.finish(source, config, bits, head_bits)
    except BaseException:
        writer.discard()
        raise
    weights = sum(m.weights for slot in slots for m in slot.matrices)
    head = tensors.shape(head_source)
    body = sum(writer.stored_bits[m.key] for slot in slots for m in slot.matrices)
    return QuantizeReport(
        plans,
        body / weights,
        writer.stored_bits.get(head_key, 16 * head[0] * head[1]) / (head[0] * head[1]),
        tuple(writer.files),
        sum(file.stat().st_size for file in writer.files),
    )


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


def _split_fused(entries: dict[str, TensorEntry], config: Mapping[str, Any]) -> _Source:
    """Rows of `qkv_proj` and `gate_up_proj` under the names of the split projections (2.9.2)."""
    source = _Source(entries)
    for key, entry in entries.items():
        head, _, tail = key.rpartition(".")
        parent, _, module = head.rpartition(".")
        if module not in _FUSED or _FOREIGN.search(key):
            continue
        rows = _fused_rows(module, entry, config)
        begin = 0
        for part, count in zip(_FUSED[module], rows, strict=True):
            source.rows[f"{parent}.{part}.{tail}"] = (key, begin, begin + count)
            begin += count
    return source


def _fused_rows(module: str, entry: TensorEntry, config: Mapping[str, Any]) -> tuple[int, ...]:
    total = entry.shape[0] if entry.shape else 0
    if module == "gate_up_proj":
        rows: tuple[int, ...] = (total // 2, total // 2)
    else:
        try:
            heads = int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(f"{entry.path}: {entry.name} cannot be split: config.json: {error!r}") from error
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    if sum(rows) != total:
        raise FormatError(f"{entry.path}: {entry.name} has {total} rows, config.json asks for {sum(rows)}")
    return rows


def _find_slots(source: _Source) -> list[Slot]:
    """Attention and MLP of every layer, in layer order; a slot that EXL2 cannot hold whole stays float (1.5)."""
    # Keys cut at their numbers, so that layer 10 follows layer 9; texts and numbers alternate, so they compare.
    found: dict[tuple[tuple[Any, ...], bool], list[Matrix]] = {}
    for key in source.names():
        match = _LAYER.match(key)
        role = _ROLES.get(match["module"].rpartition(".")[2]) if match else None
        if match is None or role is None or _FOREIGN.search(key):
            continue
        shape = source.shape(key)
        if len(shape) != 2 or 0 in shape:
            raise FormatError(f"{key} has shape {list(shape)}; a linear weight is [out_features, in_features]")
        order = tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", match["block"]))
        slot = found.setdefault((order, role not in ATTENTION_ROLES), [])
        slot.append(Matrix(key.removesuffix(".weight"), role, shape[1], shape[0]))
    slots = [
        Slot("".join(map(str, order)) + (".mlp" if is_mlp else ".self_attn"), tuple(sorted(ms, key=lambda m: m.key)))
        for (order, is_mlp), ms in sorted(found.items(), key=lambda item: item[0])
        if all(m.in_features % 32 == 0 for m in ms)
    ]
    if not slots:
        raise UnsupportedError(
            "no matrices to quantize: expected layers.N with q_proj, k_proj, v_proj, o_proj and gate_proj, up_proj, "
            "down_proj (or fc1 and fc2, or w1, w2 and w3)"
        )
    return slots


def _find_head(source: _Source) -> tuple[str, str]:
    """Key the head is written under and the tensor it is made from: its own, or the tied embedding (2.9.4)."""
    heads = [key for key in source.entries if key.endswith("lm_head.weight")]
    if heads:
        return heads[0].removesuffix(".weight"), heads[0]
    for key in source.entries:
        match = _EMBEDDING.match(key)
        if match:
            return f"{match['prefix']}lm_head", key
    raise UnsupportedError("no lm_head.weight and no embed_tokens.weight: this layout is not known")


class _Writer:
    """Collects quantized tensors and writes them in shards."""

    def __init__(self, target: Path, shard_bytes: int, fast: bool, reorder: bool) -> None:
        self.target = target
        self.files: list[Path] = []
        self.stored_bits: dict[str, int] = {}
        self._made_target = not target.exists()
        self._shard_bytes = shard_bytes
        self._fast, self._reorder = fast, reorder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        target.mkdir(parents=True, exist_ok=True)

    def write(
        self, source: _Source, plans: Mapping[str, str], heads: Mapping[str, str], progress: Progress | None
    ) -> None:
        jobs = {key: f"{key}.weight" for key in plans} | {key: at for key, at in heads.items() if key in plans}
        for done, (key, tensor_key) in enumerate(jobs.items(), 1):
            self._quantize(key, source.read(tensor_key), plans[key])
            if progress is not None:
                progress(done, len(jobs), key)
        quantized = {f"{key}.weight" for key in jobs}
        for key in source.names():
            if key in quantized:
                continue
            tensor = source.read(key)
            if not _FOREIGN.search(key):
                tensor = _half(tensor, key)
            module = key.removesuffix(".bias")
            if key != module and module in jobs:
                tensor = torch.nn.functional.pad(tensor, (0, -tensor.shape[0] % 32))
            self._add({key: tensor})

    def _quantize(self, key: str, weight: Tensor, plan: str) -> None:
        if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            weight = weight.float()
        perm = importance_order(weight) if self._reorder else None
        parts = exl2_quantize(weight, plan, perm=perm, fast=self._fast, name=key)
        self.stored_bits[key] = 8 * sum(tensor.nbytes for tensor in parts.values())
        self._add({f"{key}.{part}": tensor for part, tensor in parts.items()})

    def _add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending |= tensors
        self._pending_bytes += size

    def _flush(self) -> None:
        path = self.target / f"output_temp_{len(self.files) + 1}.safetensors"
        self.files.append(path)
        write_safetensors(path, self._pending, {"format": "pt", "quant_method": "exl2", "writer": "exl_kernels"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self, source: Path, config: dict[str, Any], bits: float, head_bits: int) -> None:
        """Final names, index, config and the other files of the folder (2.11)."""
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
        block = {
            "quant_method": "exl2",
            "version": _native.__version__,
            "bits": float(bits),
            "head_bits": head_bits,
            "calibration": {"rows": 0, "length": 0, "dataset": "(none: round to nearest)"},
        }
        _write_json(self.target / "config.json", config | {"quantization_config": block})

    def discard(self) -> None:
        """Remove what was written."""
        for path in list(self.target.iterdir()):
            if path.is_file():
                path.unlink()
        if self._made_target:
            self.target.rmdir()


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
