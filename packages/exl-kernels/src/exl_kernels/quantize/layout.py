"""The matrices of a float model folder and the tensors that hold them, as `quantize_folder` needs them.

`layout_by_names` knows the names that most llama-like models use. `exl_core.convert` makes the list for every supported
architecture, from the tables that load it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import FormatError, UnsupportedError
from ..safetensors_file import TensorEntry, read_tensor
from .plans import ATTENTION_ROLES

__all__ = ["FOREIGN", "FolderMatrix", "FolderSource", "layout_by_names"]

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
_EMBEDDING = re.compile(r"^(?P<prefix>.*?)(?:model\.)?(?:language_model\.)?embed_tokens\.weight$")
FOREIGN = re.compile(r"(^|\.)(vision|visual|multi_modal|audio)")
"""Prefixes of tensors of towers and projectors, which are copied unchanged."""


@dataclass(frozen=True, slots=True)
class FolderMatrix:
    """One linear of a model folder: W [out_features, in_features].

    Attributes:
        key: name that the quantized tensors are written under.
        slot: matrices of one slot (a layer's attention or MLP) get their bit widths together; "" is the head.
        role: part of the matrix in its layer, such as "q_proj".
        tensor: name of the tensor in the files.
        in_features: inputs K.
        out_features: outputs N.
        rows: ranges of rows of the tensor that form this matrix, counted after a third dimension is folded into the
            first and after the transposition; None for all rows.
        bias: name of the bias tensor; the same rows belong to this matrix.
        transposed: the tensor in the file is [in, out].
        rows_are_inputs: the selected rows are [in, out].
        unit_rows: the model scales the rows to unit vectors.
        kept: the tensor has another use (an embedding that is also the head) and stays in the folder.
    """

    key: str
    slot: str
    role: str
    tensor: str
    in_features: int
    out_features: int
    rows: tuple[tuple[int, int], ...] | None = None
    bias: str | None = None
    transposed: bool = False
    rows_are_inputs: bool = False
    unit_rows: bool = False
    kept: bool = False


class FolderSource:
    """The float tensors of a folder. The last tensor is cached, since the parts of a fused tensor follow each other."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self.entries = entries
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """Return a tensor of the files, which the caller must not modify."""
        if self._last is None or self._last[0] != name:
            self._last = None  # free it before another is read
            self._last = (name, read_tensor(self.entries[name]))
        return self._last[1]

    def weight(self, matrix: FolderMatrix) -> Tensor:
        """Return the weight [out_features, in_features] in the dtype of the files.

        Raises:
            FormatError: the tensor has another size.
        """
        tensor = self.read(matrix.tensor)
        if matrix.rows is not None and tensor.dim() == 3:
            tensor = tensor.flatten(0, 1)
        shape = list(tensor.shape)
        if tensor.dim() == 2 and matrix.transposed:
            tensor = tensor.T
        if matrix.rows is not None:
            tensor = torch.cat([tensor[begin:end] for begin, end in matrix.rows])
        if tensor.dim() == 2 and matrix.rows_are_inputs:
            tensor = tensor.T
        if tuple(tensor.shape) != (matrix.out_features, matrix.in_features):
            raise FormatError(
                f"{matrix.tensor} has shape {shape}; {matrix.key} needs [{matrix.out_features}, {matrix.in_features}]"
            )
        if matrix.unit_rows:
            tensor = torch.nn.functional.normalize(tensor.float())
        return tensor.contiguous()

    def bias(self, matrix: FolderMatrix) -> Tensor | None:
        """Return the bias [out_features], or None."""
        if matrix.bias is None:
            return None
        whole = self.read(matrix.bias)
        return whole if matrix.rows is None else torch.cat([whole[begin:end] for begin, end in matrix.rows])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


def layout_by_names(source: FolderSource, config: Mapping[str, Any]) -> list[FolderMatrix]:
    """Return the matrices of a folder with llama-like tensor names, the head last.

    Args:
        source: the tensors of the folder.
        config: the contents of config.json.

    Raises:
        FormatError: a tensor does not have the shape of a matrix.
        UnsupportedError: the names are not known.
    """
    found = [matrix for name in source for matrix in _matrices(source, name, config)]
    if not found:
        raise UnsupportedError(
            "no matrices to quantize: expected layers.N with q_proj, k_proj, v_proj, o_proj and gate_proj, up_proj, "
            "down_proj (or fc1 and fc2, or w1, w2 and w3); for other names use python -m exl_core.convert"
        )
    return [*sorted(found, key=lambda m: (_natural(m.slot), m.key)), _head(source)]


def _natural(text: str) -> tuple[str | int, ...]:
    """Return alternating texts and numbers as a sort key, so that layer 10 follows layer 9."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text))


def _matrices(source: FolderSource, name: str, config: Mapping[str, Any]) -> Sequence[FolderMatrix]:
    match = _LAYER.match(name)
    if match is None or FOREIGN.search(name):
        return ()
    key, block, module = name.removesuffix(".weight"), match["block"], match["module"].rpartition(".")[2]
    parts = _FUSED.get(module, (module,))
    if any(part not in _ROLES for part in parts):
        return ()
    shape = source.entries[name].shape
    if len(shape) != 2 or 0 in shape:
        raise FormatError(f"{name} has shape {list(shape)}; a linear weight is [out_features, in_features]")
    bias = f"{key}.bias" if f"{key}.bias" in source.entries else None
    rows = _fused_rows(module, source.entries[name], config) if module in _FUSED else (shape[0],)
    found, begin = [], 0
    for part, count in zip(parts, rows, strict=True):
        own = key if module not in _FUSED else f"{key.removesuffix(module)}{part}"
        slot = block + (".self_attn" if _ROLES[part] in ATTENTION_ROLES else ".mlp")
        span = ((begin, begin + count),) if module in _FUSED else None
        found.append(FolderMatrix(own, slot, _ROLES[part], name, shape[1], count, span, bias))
        begin += count
    return found


def _fused_rows(module: str, entry: TensorEntry, config: Mapping[str, Any]) -> tuple[int, ...]:
    total = entry.shape[0]
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


def _head(source: FolderSource) -> FolderMatrix:
    """Return the head: its own tensor, or the tied embedding."""
    heads = [name for name in source if name.endswith("lm_head.weight")]
    if heads:
        return _head_of(source, heads[0].removesuffix(".weight"), heads[0], kept=False)
    for name in source:
        match = _EMBEDDING.match(name)
        if match:
            return _head_of(source, f"{match['prefix']}lm_head", name, kept=True)
    raise UnsupportedError("no lm_head.weight and no embed_tokens.weight: this layout is not known")


def _head_of(source: FolderSource, key: str, name: str, *, kept: bool) -> FolderMatrix:
    shape = source.entries[name].shape
    if len(shape) != 2 or 0 in shape:
        raise FormatError(f"{name} has shape {list(shape)}; a head is [vocabulary, hidden]")
    return FolderMatrix(key, "", "head", name, shape[1], shape[0], kept=kept)
