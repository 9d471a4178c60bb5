"""Which sharded models have exchange kernels, and the memory that these need.

Load plans ask before anything is read (`StoredWeights`), captured steps ask about the loaded weights (`LoadedWeights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from exl_kernels.linear import QuantMatrix
from exl_kernels.selection import MOST_EXCHANGES, MOST_GPUS

from ...layers import Embedding, Head, Linear, Module, Norm, RMSNorm
from ...layers.description import AttentionDescription, MatmulDescription, MlpDescription
from ...layers.module import is_changed
from ...layers.norm import layer_of, rms_of
from ...loading.linears import Ranges, columns_at, is_quantized
from ..half import description_of, why_apart
from ..half_matmuls import norms_of_heads
from .matrix import SplitMatrix
from .shares import Bounds

if TYPE_CHECKING:
    from ...loading.checkpoint import TensorSource

__all__ = [
    "ANSWER",
    "LoadedWeights",
    "RowBytes",
    "StoredWeights",
    "Weights",
    "pairs_of",
    "part_of",
    "refusal_of_exchange",
    "row_bytes",
]

ANSWER = 2
"""Columns without meaning that the other devices send while they receive the embedded ids: a device must hear from all
others in each exchange."""


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row: of the widest result that all devices receive, and of the logits, which the first receives."""

    shared: int
    logits: int


class Weights(ABC):
    """Facts about the weights of a sharded model."""

    @abstractmethod
    def in_pieces(self, linear: Linear) -> bool:
        """Return whether each device has outputs of a quantized matrix, as one matrix without padding."""

    @abstractmethod
    def shape(self, norm: RMSNorm) -> tuple[int, ...]:
        """Return the shape of a norm's weight."""


class LoadedWeights(Weights):
    """The weights of a loaded model over `shards` devices."""

    def __init__(self, shards: int) -> None:
        self._shards = range(shards)

    def in_pieces(self, linear: Linear) -> bool:
        """Return whether each device has outputs of a quantized matrix, as one matrix without padding."""
        return all(part_of(linear, shard) is not None for shard in self._shards)

    def shape(self, norm: RMSNorm) -> tuple[int, ...]:
        """Return the shape of a norm's weight."""
        return tuple(norm.loaded_weight.shape)


class StoredWeights(Weights):
    """The weights in files, from their headers.

    Args:
        source: the tensors.
        bounds: the outputs of each device, of every matrix that is to be cut by outputs (`output_bounds`).
        shards: number of devices.
    """

    def __init__(self, source: TensorSource, bounds: Mapping[Linear, Bounds], shards: int) -> None:
        self._source, self._bounds, self._shards = source, bounds, shards

    def in_pieces(self, linear: Linear) -> bool:
        """Return whether each device will have outputs of a quantized matrix, as one matrix without padding."""
        bounds = self._bounds.get(linear, ())
        if [shard for shard, _, _ in bounds] != list(range(self._shards)):
            return False
        return is_quantized(self._source, linear.spec) and all(
            _is_piece(end - begin, *self._cut(linear, begin, end)) for _, begin, end in bounds
        )

    def _cut(self, linear: Linear, begin: int, end: int) -> tuple[Ranges, int]:
        read, kept, _ = columns_at(self._source, linear.spec, begin, end)
        return kept, sum(last - first for first, last in read)

    def shape(self, norm: RMSNorm) -> tuple[int, ...]:
        """Return the shape of a norm's weight; () where the files have none."""
        name = f"{norm.key}.weight"
        return self._source.shape(name) if self._source.has(name) else ()


def part_of(linear: Linear, shard: int) -> QuantMatrix | None:
    """Return a device's outputs of a loaded quantized matrix, if they are one piece without padding."""
    matrix = linear.matrix
    if not isinstance(matrix, SplitMatrix) or matrix.format == "float":
        return None
    found = [part for part in matrix.parts if part.shard == shard]
    if len(found) != 1 or found[0].matrix is None or not isinstance(found[0].columns, slice):
        return None
    part = found[0]
    assert part.matrix is not None
    return part.matrix if _is_piece(part.width, part.kept, part.matrix.out_features) else None


def _is_piece(width: int, kept: Ranges, columns: int) -> bool:
    """Return whether outputs, as many as `width`, are all `columns` of a matrix; kernels exchange them in pairs."""
    return kept == ((0, columns),) and width == columns and width % 2 == 0


def refusal_of_exchange(modules: Sequence[Module], shards: int, weights: Weights) -> str | None:
    """Return why the layers of a model, loaded or not, have no launches with exchanges over `shards` GPUs, or None."""
    if not 2 <= shards <= MOST_GPUS:
        return f"{shards} devices exchange results; kernels do so for 2 to {MOST_GPUS}"
    embedding, last, head = modules[0], modules[-2], modules[-1]
    middle = modules[1:-2]
    if 2 * len(middle) + 2 > MOST_EXCHANGES:
        return f"{len(middle) // 2} layers have more exchanges than a step may have"
    if type(embedding) is not Embedding or is_changed(embedding):
        return "the embedding has code of its own"
    if not isinstance(last, Norm) or not _is_known(last) or type(head) is not Head or is_changed(head):
        return "the last norm or the head has code of its own"
    why = next((why for module in middle if (why := _half_uncovered(module, weights)) is not None), None)
    if why is not None:
        return why
    if 2 * len(pairs_of(modules)) != len(middle):
        return "the layers are not attention and MLP in turns"
    for linear in (linear for module in modules for linear in module.submodules()):
        if not weights.in_pieces(linear):
            return f"{linear.key} is not quantized in one piece on each device"
    return None


def _half_uncovered(module: Module, weights: Weights) -> str | None:
    """Return why the launches of a half do not cover a module between embedding and last norm, or None."""
    why, about = why_apart(module), description_of(module)
    if why is not None:
        return why
    assert isinstance(about, MatmulDescription), "why_apart"
    if not all(norm is None or _is_known(norm) for norm in (about.norm, about.post)):
        return f"{module.key} has norms with code of their own"
    if isinstance(about, MlpDescription):
        return None
    assert isinstance(about, AttentionDescription), "the other kind"
    if about.mlp is not None:
        return f"{module.key} has attention and MLP side by side"
    normed = about.q_norm is not None or about.k_norm is not None
    if about.clip or (normed and norms_of_heads(about, weights.shape) is None):
        return f"{module.key} clamps q, k and v, or norms them over all heads"
    return None


def _is_known(norm: Norm | None) -> bool:
    """Return whether launches compute a norm: it has no code of its own."""
    return rms_of(norm) is not None or layer_of(norm) is not None


def row_bytes(modules: Sequence[Module], shards: int) -> RowBytes:
    """Return the bytes of a row of the results that the devices of a covered model exchange."""
    (attention, mlp), embedding, head = pairs_of(modules[:3])[0], modules[0], modules[-1]
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Head)
    embedded = (1 + embedding.float_residual) * attention.last.out_features + ANSWER * (shards - 1)
    widest = max(embedded, attention.widths[0], mlp.first[0].out_features)
    return RowBytes(2 * widest, 4 * head.linear.out_features)


def pairs_of(modules: Sequence[Module]) -> list[tuple[AttentionDescription, MlpDescription]]:
    """Return the descriptions of each layer of a covered model, from the embedding on."""
    found = [description_of(module) for module in modules[1:]]
    return [
        (attention, mlp)
        for attention, mlp in pairwise(found)
        if isinstance(attention, AttentionDescription) and isinstance(mlp, MlpDescription)
    ]
