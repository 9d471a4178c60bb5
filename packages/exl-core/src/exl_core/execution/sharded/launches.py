"""The launches of each device of a sharded model in a captured step.

Every device has the whole hidden state as input of its matmuls, and the columns of it that its parts of o and down
compute. Four times a layer the devices gather what they computed, by kernels that store into one another's memory:
attention's outputs, o's, the gated features, down's. Each output is computed on one device in the order of one
device's sum, so results are bitwise identical to one device's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from exl_kernels.attention.cuda import HeadNorms
from exl_kernels.fused import embed
from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.fused import Activation, FusedLinear
from exl_kernels.linear.fused import Norm as InputNorm
from exl_kernels.norm import rms_norm
from exl_kernels.peer import MOST_EXCHANGES, MOST_GPUS
from exl_kernels.selection import PACKED_ROWS

from ...device import activation_dtype
from ...layers import Attention, Embedding, GatedMLP, Head, Linear, Module, RMSNorm
from ...layers.description import AttentionDescription, MlpDescription
from ...layers.mlp import FeedForward
from ..attention_half import attend_heads, head_norms_of
from ..half import is_changed, why_apart
from .matrix import SplitMatrix

if TYPE_CHECKING:
    from ...language_model import LanguageModel
    from ..batch import Step

__all__ = ["Gather", "ShardLaunches", "ShardLayer", "shard_launches_of"]

ANSWER = 2
"""Columns without meaning that the other devices send while they receive the embedded ids: a device must hear from all
others in each exchange."""


Gather = Callable[[Tensor, Sequence[int], "Tensor | None", "Sequence[int] | None"], Tensor]
"""(own columns [rows, width], first column of each device and their number, result or None, receivers or None) -> all
columns [rows, columns]. Called by all devices in the same order."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of each device of one kind of result: `begins` as `Gather` takes them."""

    begins: tuple[int, ...]

    def width(self, shard: int) -> int:
        return self.begins[shard + 1] - self.begins[shard]


@dataclass(frozen=True, slots=True)
class ShardLayer:
    """One device's share of a layer."""

    attention: Attention
    qkv: FusedLinear
    widths: tuple[int, int, int]
    """Columns of q, k and v."""
    head_norms: HeadNorms | None
    o: FusedLinear
    up: FusedLinear
    down: FusedLinear

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Return the attention of this device's heads, [T, heads * head_dim], and store k and v.

        q, k and v are [T, heads * head_dim] of theirs, parts of wider rows or not.
        """
        a, rows = self.attention, q.shape[0]
        q, k, v = (t.view(rows, -1, a.head_dim) for t in (q, k, v))
        if step.q_len > 1 and self.head_norms is not None:
            norms = self.head_norms
            q, k = (rms_norm(t.contiguous(), weight, norms.eps) for t, weight in ((q, norms.q), (k, norms.k)))
        return attend_heads(a, q, k, v, step, None, self.head_norms).view(rows, -1)


@dataclass(frozen=True, slots=True)
class Shape:
    """Columns of each kind of result, the same on all devices."""

    heads: Columns
    hidden: Columns
    inner: Columns
    vocabulary: Columns


class ShardLaunches:
    """The launches of one device.

    `run` launches all of a step on torch's current stream of the device.

    Attributes:
        layers: this device's share of each layer.
        shape: the columns of each device.
    """

    def __init__(
        self,
        shard: int,
        shape: Shape,
        layers: Sequence[ShardLayer],
        embedding: Embedding | None,
        last: RMSNorm,
        head: Head,
    ) -> None:
        """embedding: on the home device, which is device 0; None on others."""
        part = _part(head.linear, shard)
        assert part is not None, "shard_launches_of has checked it"
        self.layers, self.shape = list(layers), shape
        self._shard, self._embedding = shard, embedding
        self._taken: dict[int, bool] = {}
        hidden, others = shape.hidden.begins[-1], len(shape.hidden.begins) - 2
        self._answered = (0, *(hidden + ANSWER * other for other in range(others + 1)))
        self._norm, self._head, self._matrix = _norm_on(last, part.device), head, part

    def takes(self, rows: int) -> bool:
        """Return whether every matmul of `rows` rows has a kernel with norm, gate and residual."""
        if rows > PACKED_ROWS:
            return False
        if rows not in self._taken:
            matmuls = (matmul for layer in self.layers for matmul in (layer.qkv, layer.o, layer.up, layer.down))
            self._taken[rows] = all(matmul.kernel(rows) is not None for matmul in matmuls)
        return self._taken[rows]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the widest result that the devices exchange."""
        shape = self.shape
        halves = (self._answered[-1], shape.heads.begins[-1], shape.inner.begins[-1])
        return max(4 * shape.vocabulary.begins[-1], *(2 * columns for columns in halves))

    def body(self, ids: Tensor, step: Step, exchanges: Callable[[bool], Gather]) -> Callable[[Tensor | None], Tensor]:
        """Return `run` as a function of the logits, for a capture: a run that is not recorded exchanges nothing.

        exchanges: makes the exchanges of a step; True: they send and wait.
        """
        device = self._matrix.device

        def run(logits: Tensor | None) -> Tensor:
            with torch.cuda.device(device):
                live = torch.cuda.is_current_stream_capturing()
            return self.run(ids, step, exchanges(live), logits)

        return run

    def run(self, ids: Tensor, step: Step, gather: Gather, logits: Tensor | None) -> Tensor:
        """Run ids int64 [T] on this device.

        Args:
            ids: read on the home device only.
            step: the step with its tensors, and the pages of this device's heads, on this device.
            gather: exchanges results, 4 times a layer and twice more.
            logits: float32 [T, padded vocabulary], filled on the home device; None on others.

        Returns:
            The logits; on other devices a part of them.
        """
        shape, shard, device = self.shape, self._shard, self._matrix.device
        rows = ids.shape[0]
        x = self._embedded(ids, gather)
        begin, width = shape.hidden.begins[shard], shape.hidden.width(shard)
        own = x[:, begin : begin + width].contiguous()
        for layer in self.layers:
            qkv = layer.qkv(x, x.new_empty(rows, layer.qkv.out_features))
            q, k, v = torch.split(qkv, list(layer.widths), dim=1)
            mixed = gather(layer.attend(q, k, v, step), shape.heads.begins, None, None)
            x = gather(layer.o(mixed, own, own), shape.hidden.begins, x, None)
            inner = gather(layer.up(x, x.new_empty(rows, layer.up.out_features)), shape.inner.begins, None, None)
            x = gather(layer.down(inner, own, own), shape.hidden.begins, x, None)
        h = rms_norm(x, self._norm.weight, self._norm.eps)
        part = self._matrix.matmul(h, out=torch.empty((rows, self._matrix.out_features), device=device))
        if logits is None:
            # Others only send: their result is never read.
            gather(part, shape.vocabulary.begins, torch.empty((rows, shape.vocabulary.begins[-1]), device=device), (0,))
            return part
        whole = logits
        if logits.shape[1] != shape.vocabulary.begins[-1]:
            whole = torch.empty((rows, shape.vocabulary.begins[-1]), device=device)
        gather(part, shape.vocabulary.begins, whole, (0,))
        if whole is not logits:
            logits[:, : whole.shape[1]] = whole
        return self._head.finish(logits)

    def _embedded(self, ids: Tensor, gather: Gather) -> Tensor:
        """Return the embedded ids [T, hidden], which the home device sends to the others."""
        hidden, device = self.shape.hidden.begins[-1], self._matrix.device
        if self._embedding is None:
            first = torch.empty((ids.shape[0], ANSWER), dtype=activation_dtype(device), device=device)
        else:
            assert self._embedding.weight is not None
            first = embed(self._embedding.weight, ids, factor=self._embedding.scale, dtype="float16")
        whole = gather(first, self._answered, None, None)
        return whole[:, :hidden].contiguous() if self._embedding is None else first


def shard_launches_of(model: LanguageModel) -> list[ShardLaunches] | str:
    """Return the launches of each device of a model loaded by `load_tp`, or the reason why there are none."""
    why = _uncovered(model)
    if why is not None:
        return why
    embedding, last, head = model.modules[0], model.modules[-2], model.modules[-1]
    assert isinstance(embedding, Embedding)
    assert isinstance(last, RMSNorm)
    assert isinstance(head, Head)
    assert model.tp_context is not None
    pairs = list(zip(model.modules[1:-2:2], model.modules[2:-2:2], strict=True))
    attention, mlp = pairs[0]
    assert isinstance(attention, Attention)
    assert isinstance(mlp, GatedMLP)
    columns = [_columns(linear) for linear in (attention.q_proj, attention.o_proj, mlp.up_proj, head.linear)]
    shape = Shape(*columns)
    made = []
    for shard in range(len(model.tp_context.names)):
        layers = [_layer(cast(Attention, a), cast(GatedMLP, m), shard) for a, m in pairs]
        first = embedding if shard == 0 else None
        made.append(ShardLaunches(shard, shape, layers, first, last, head))
    return made


def _uncovered(model: LanguageModel) -> str | None:
    context = model.tp_context
    assert context is not None
    if not context.exchange.whole:
        return "each device has a process of its own"
    shards = len(context.names)
    if not 2 <= shards <= MOST_GPUS:
        return f"{shards} devices exchange results; kernels do so for 2 to {MOST_GPUS}"
    embedding, last, head = model.modules[0], model.modules[-2], model.modules[-1]
    middle = model.modules[1:-2]
    if 2 * len(middle) + 2 > MOST_EXCHANGES:
        return f"{len(middle) // 2} layers have more exchanges than a step may have"
    if type(embedding) is not Embedding or is_changed(embedding) or embedding.float_residual:
        return "the hidden state is float32, or the embedding has code of its own"
    if type(last) is not RMSNorm or is_changed(last) or type(head) is not Head or is_changed(head):
        return "the last norm is no RMSNorm, or the head has code of its own"
    why = next((why for module in middle if (why := _half_uncovered(module)) is not None), None)
    if why is not None:
        return why
    kinds = [type(module.describe()) for module in middle]
    if kinds != [AttentionDescription, MlpDescription] * (len(middle) // 2):
        return "the layers are not attention and MLP in turns"
    for linear in (linear for module in model.modules for linear in module.submodules()):
        if any(_part(linear, shard) is None for shard in range(shards)):
            return f"{linear.key} is not quantized in one piece on each device"
    return None


def _half_uncovered(module: Module) -> str | None:
    """Return why the launches of a half do not cover a module between embedding and last norm, or None."""
    why, found = why_apart(module), module.describe()
    if why is not None:
        return why
    assert found is not None, "why_apart"
    norm = module.norm if isinstance(module, Attention | FeedForward) else None
    if found.norm != "rms" or found.post is not None or type(norm) is not RMSNorm or is_changed(norm):
        return f"{module.key} has norms that matmuls do not apply"
    if isinstance(found, MlpDescription):
        return None if found.gated else f"{module.key} has no gate"
    if found.with_mlp:
        return f"{module.key} has attention and MLP side by side"
    assert isinstance(module, Attention)
    if found.clipped or ((found.q_norm or found.k_norm) and head_norms_of(module) is None):
        return f"{module.key} clamps q, k and v, or norms them over all heads"
    return None


def _part(linear: Linear, shard: int) -> QuantMatrix | None:
    """Return a device's outputs of a quantized matrix, if they are one piece without padding."""
    matrix = linear.matrix
    if not isinstance(matrix, SplitMatrix) or matrix.format == "float":
        return None
    found = [part for part in matrix.parts if part.shard == shard]
    if len(found) != 1 or found[0].matrix is None or not isinstance(found[0].columns, slice):
        return None
    part = found[0]
    assert part.matrix is not None
    whole = part.kept == ((0, part.matrix.out_features),) and part.width == part.matrix.out_features
    return part.matrix if whole and part.width % 2 == 0 else None


def _columns(linear: Linear) -> Columns:
    matrix = linear.matrix
    assert isinstance(matrix, SplitMatrix)
    begins = [0]
    for part in matrix.parts:
        begins.append(begins[-1] + part.width)
    return Columns(tuple(begins))


def _norm_on(norm: RMSNorm, device: torch.device) -> InputNorm:
    with torch.inference_mode(False):
        return InputNorm(norm.loaded_weight.to(device), norm.eps)


def _layer(attention: Attention, mlp: GatedMLP, shard: int) -> ShardLayer:
    def parts(*linears: Linear) -> list[QuantMatrix]:
        found = [_part(linear, shard) for linear in linears]
        return [part for part in found if part is not None]

    a = attention
    qkv, (o,) = parts(a.q_proj, a.k_proj, a.v_proj), parts(a.o_proj)
    gated, (down,) = parts(mlp.gate_proj, mlp.up_proj), parts(mlp.down_proj)
    device = o.device
    assert isinstance(a.norm, RMSNorm)
    assert isinstance(mlp.norm, RMSNorm)
    norms = head_norms_of(a)
    if norms is not None:
        with torch.inference_mode(False):
            norms = HeadNorms(norms.q.to(device), norms.k.to(device), norms.eps)
    q, k, v = (matrix.out_features for matrix in qkv)
    return ShardLayer(
        a,
        FusedLinear(qkv, norm=_norm_on(a.norm, device)),
        (q, k, v),
        norms,
        FusedLinear([o]),
        FusedLinear(gated, norm=_norm_on(mlp.norm, device), activation=cast(Activation, mlp.activation)),
        FusedLinear([down]),
    )
