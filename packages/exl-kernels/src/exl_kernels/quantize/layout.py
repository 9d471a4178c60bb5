"""Which matrices a float model folder holds, and where: what `quantize_folder` works from.

`layout_by_names` knows the names that most llama-like models use. `exl_core.convert` makes the list for every
architecture that the package runs, from the same tables that load it.
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
"""Tensors of towers and projectors, which stay as they are."""


@dataclass(frozen=True, slots=True)
class FolderMatrix:
    """One linear of a model folder: W [out_features, in_features], the name it is written under, and where it is.

    slot: matrices of one slot (a layer's attention or MLP) take their widths together; "" is the head. tensor: its name
    in the files, of which `rows` are this matrix (None: all), counted after a third dimension is folded into the first
    and `transposed` turned the tensor around ([in, out] in the file). rows_are_inputs: those rows are [in, out]. bias:
    the name of its bias, of which the same rows are this matrix's. unit_rows: the model scales its rows to unit
    vectors. kept: the tensor has another use and stays beside the quantized one (an embedding that is also the head).
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
    """The float tensors of a folder. The last one read is kept, since parts of a fused one follow each other."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self.entries = entries
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str) -> Tensor:
        """A tensor of the files; not to be written to."""
        if self._last is None or self._last[0] != name:
            self._last = None  # free it before another is read
            self._last = (name, read_tensor(self.entries[name]))
        return self._last[1]

    def weight(self, matrix: FolderMatrix) -> Tensor:
        """[out_features, in_features], of the files' type. Raises FormatError where the tensor has another size."""
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
        """[out_features], or None."""
        if matrix.bias is None:
            return None
        whole = self.read(matrix.bias)
        return whole if matrix.rows is None else torch.cat([whole[begin:end] for begin, end in matrix.rows])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


def layout_by_names(source: FolderSource, config: Mapping[str, Any]) -> list[FolderMatrix]:
    """The matrices of a folder whose tensors have llama-like names, the head last.

    Raises FormatError (a matrix of a shape that is none) and UnsupportedError (names that are not known).
    """
    found = [matrix for name in source for matrix in _matrices(source, name, config)]
    if not found:
        raise UnsupportedError(
            "no matrices to quantize: expected layers.N with q_proj, k_proj, v_proj, o_proj and gate_proj, up_proj, "
            "down_proj (or fc1 and fc2, or w1, w2 and w3); for other names use python -m exl_core.convert"
        )
    return [*sorted(found, key=lambda m: (_natural(m.slot), m.key)), _head(source)]


def _natural(text: str) -> tuple[Any, ...]:
    """Texts and numbers in turn, so that layer 10 follows layer 9."""
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
    """The head's own tensor, or the tied embedding (2.9.4)."""
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
