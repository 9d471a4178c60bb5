"""The decode step of dense models, and the pass of a prompt, with the launches between matrix products joined
(performance 4.2).

A plan is read off the loaded modules. It covers the Llama shape: RMS norms before attention and before a gated MLP,
nothing else between. Whatever a module has beyond that makes the plan refuse, and the step is captured as the modules'
own forward pass. Results are the modules' own to the bit.

Of up to 64 rows a layer is five launches: norm and q, k, v; rotation, storing and attention; o and residual; norm,
gate, up and activation; down and residual. Of three to eight rows products take their inputs from one another, laid out
already, and the last norm is the head's; of more, and of BF16, the input of a product is normed and laid out by a
launch of its own. Where the matrices do not allow that it is ten launches, and more to lay out. A prompt of more rows
than have bits of their own (`INVARIANT_ROWS`) is multiplied by torch, residual sums included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast, get_args

import torch
from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.attention_cuda import ProductInput, attend_own
from exl_kernels.device import row_invariant
from exl_kernels.fused import add_rms_norm, embed, rope_store
from exl_kernels.fused_linear import Activation, FusedLinear, Prepared
from exl_kernels.fused_linear import Norm as InputNorm
from exl_kernels.kv import store_kv
from exl_kernels.linear_cuda import INVARIANT_ROWS, CudaQuantMatrix
from exl_kernels.norm import rms_norm
from exl_kernels.rope import apply_rope
from exl_kernels.selection import FEW_ROWS, GEMV_ROWS, PACKED_ROWS

from ..errors import InputError
from ..execution.batch import Step
from ..modules import Attention, Embedding, GatedMLP, Head, Linear, Module, Norm, RMSNorm

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["DecodePlan", "plan_of"]

# What a covered module may hold, by name; anything else must be at rest.
_ATTENTION = {"key", "layer_idx", "norm", "q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "num_attention_heads"}
_ATTENTION |= {"num_key_value_heads", "scale", "window", "softcap", "interleaved", "block", "rope"}
_MLP = {"key", "layer_idx", "norm", "gate_proj", "up_proj", "down_proj", "activation", "block"}
_NORM = {"key", "shapes", "eps", "weight", "offset"}
_EMBEDDING = {"key", "vocab_size", "hidden_size", "scale", "weight"}

_PACKED_COLUMNS = FEW_ROWS
"""Columns of the input that `gemm_few` takes: one for each row that it can have."""

JOINED_ROWS_VARIABLE = "EXL_DECODE_JOINED_ROWS"
JOINED_ROWS = PACKED_ROWS
"""Rows up to which they are joined, unless the variable says otherwise."""


def joined_rows() -> int:
    """JOINED_ROWS or what EXL_DECODE_JOINED_ROWS says (0: never join), at most PACKED_ROWS."""
    text = os.environ.get(JOINED_ROWS_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise InputError(f"{JOINED_ROWS_VARIABLE} is {text!r}, must be a number of rows from 0 to {PACKED_ROWS}")
    return min(int(text or JOINED_ROWS), PACKED_ROWS)


class _Layer:
    """Attention and MLP of one layer, and their joined products."""

    def __init__(self, attention: Attention, mlp: GatedMLP) -> None:
        a, m = attention, mlp
        self.attention, self.mlp = a, m
        self.norms = (_rms(a.norm), _rms(m.norm))
        self.qkv = _joined(a.q_proj, a.k_proj, a.v_proj, norm=self.norms[0])
        self.o = _joined(a.o_proj)
        self.gate_up = _joined(m.gate_proj, m.up_proj, norm=self.norms[1], activation=cast(Activation, m.activation))
        self.down = _joined(m.down_proj)
        # Of inputs that are normed already.
        self.qkv_normed = _joined(a.q_proj, a.k_proj, a.v_proj)
        self.gate_up_normed = _joined(m.gate_proj, m.up_proj, activation=cast(Activation, m.activation))

    def join(self, rows: int) -> bool:
        """Whether the products of `rows` rows can be joined with what stands around them (the last may not be)."""
        return all(rows <= joined.joined_rows for joined in (self.qkv, self.o, self.gate_up))

    def run_joined(self, x: Tensor, step: Step) -> None:
        """x [T, hidden] half, changed in place."""
        a, rows = self.attention, x.shape[0]
        q, k, v = self._split(self.qkv(x, x.new_empty(rows, self.qkv.out_features)))
        given = self.o.input_of(rows) if step.q_len == 1 else None
        if given is None:
            self.o(_attend(a, q, k, v, step).view(rows, -1), x, residual=x)
        else:
            _attend_one(a, q, k, v, step, given)
            self.o.from_input(given, x, residual=x)
        self.gate_up.then(self.down, x, x, residual=x)

    def in_a_row(self, rows: int) -> bool:
        """Whether the products of `rows` rows can have their inputs from one another."""
        joined = (self.qkv, self.gate_up, self.down)
        return (
            self.join(rows)
            and GEMV_ROWS < rows <= FEW_ROWS
            and all(product.takes_prepared for product in joined)
            and self.o.goes_on_to(self.gate_up)
        )

    def run_in_a_row(
        self, x: Tensor, prepared: Prepared | None, following: FusedLinear | None, step: Step
    ) -> Prepared | None:
        """x [T, hidden] half, changed in place; what the product before has prepared of it; what of x is to be prepared
        for the product that comes next."""
        a, rows = self.attention, x.shape[0]
        qkv = x.new_empty(rows, self.qkv.out_features)
        self.qkv.in_a_row(x if prepared is None else prepared, qkv)
        attended: Tensor | Prepared
        if step.q_len == 1 and self.o.takes_prepared:
            attended = Prepared(self.o.room(), rows)
            _attend_one(
                a, *self._split(qkv), step, into=ProductInput(_cuda(a.o_proj), _PACKED_COLUMNS, attended.scratch)
            )
        else:
            attended = _attend(a, *self._split(qkv), step).view(rows, -1)
        normed = self.o.in_a_row(attended, x, x, self.gate_up)
        assert normed is not None
        gated = self.gate_up.in_a_row(normed, following=self.down)
        assert gated is not None
        return self.down.in_a_row(gated, x, x, following)

    def run(self, x: Tensor, h: Tensor, following: RMSNorm, step: Step) -> None:
        """h = norm(x) on the way in, `following`(x) on the way out; both changed in place."""
        a, rows = self.attention, x.shape[0]
        qkv = _in_blocks(self.qkv_normed, h)
        if qkv is None:
            q, k, v = (p.quant.matmul(h).view(rows, -1, a.head_dim) for p in (a.q_proj, a.k_proj, a.v_proj))
        else:
            q, k, v = self._split(qkv)
        _add_product(x, a.o_proj, _attend(a, q, k, v, step).view(rows, -1), self.norms[1], h)
        self._run_mlp(x, h, following)

    def _run_mlp(self, x: Tensor, h: Tensor, following: RMSNorm) -> None:
        m = self.mlp
        gated = _in_blocks(self.gate_up_normed, h)
        if gated is None:
            gate, up = m.gate_proj.quant.matmul(h), m.up_proj.quant.matmul(h)
            gated = gated_activation(gate, up, m.activation, out=gate)
        _add_product(x, m.down_proj, gated, following, h)

    def run_last(self, x: Tensor, h: Tensor, following: RMSNorm, step: Step, batch: int) -> Tensor:
        """`run`, but for the last token of each of `batch` rows alone: `following`(x) of these, [batch, hidden]."""
        a = self.attention
        self.store(h, step)
        x, h, rows, places, turns = (
            t.view(batch, -1, *t.shape[1:])[:, -1].contiguous()
            for t in (x, h, step.rows, step.positions, step.rope_positions)
        )
        q = a.q_proj.quant.matmul(h).view(batch, -1, a.head_dim)
        apply_rope(q, *step.table(a.rope), turns, interleaved=a.interleaved)
        mixed = _attend_stored(a, q, step, rows, places)
        _add_product(x, a.o_proj, mixed.view(batch, -1), self.norms[1], h)
        self._run_mlp(x, h, following)
        return h

    def store(self, h: Tensor, step: Step) -> None:
        """Keys and values of the normed h [T, hidden] into the cache."""
        a, rows = self.attention, h.shape[0]
        k, v = (p.quant.matmul(h).view(rows, -1, a.head_dim) for p in (a.k_proj, a.v_proj))
        apply_rope(k, *step.table(a.rope), step.rope_positions, interleaved=a.interleaved)
        store_kv(step.pages(a.layer_idx), k, v, step.slots)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [T, heads, head_dim], views of rows that hold them side by side."""
        a = self.attention
        heads, kv_heads = a.num_attention_heads, a.num_key_value_heads
        qkv = qkv.view(qkv.shape[0], -1, a.head_dim)
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


class DecodePlan:
    """One step of few tokens."""

    def __init__(self, embedding: Embedding, layers: Sequence[tuple[Attention, GatedMLP]], norm: RMSNorm, head: Head):
        self._embedding = embedding
        self._layers = [_Layer(attention, mlp) for attention, mlp in layers]
        self._norm = norm
        self._head = head
        whole = head.linear.quant.out_features == head.linear.out_features
        self._joined_head = _joined(head.linear, norm=norm) if whole else None

    def run(self, ids: Tensor, step: Step, logits: Tensor) -> None:
        """ids int64 [T] on the device; writes logits float32 [T, padded vocabulary]."""
        x, joined = self._begin(ids)
        if joined and all(layer.in_a_row(x.shape[0]) for layer in self._layers):
            self._run_in_a_row(x, step, logits)
        else:
            self._head.forward(self._hidden(x, joined, step), step, out=logits)

    def hidden(self, ids: Tensor, step: Step, last_of: int = 0) -> Tensor:
        """ids int64 [T] on the device; what the head takes, [T, hidden], or with `last_of` that of the last token of
        each of so many rows of equal length."""
        return self._hidden(*self._begin(ids), step, last_of)

    def _hidden(self, x: Tensor, joined: bool, step: Step, last_of: int = 0) -> Tensor:
        if joined:
            for layer in self._layers:
                layer.run_joined(x, step)
            h = rms_norm(x, _weight(self._norm), self._norm.eps)
            return h.view(last_of, -1, h.shape[1])[:, -1].contiguous() if last_of else h
        first = [layer.norms[0] for layer in self._layers] + [self._norm]
        h = rms_norm(x, _weight(first[0]), first[0].eps)
        for layer, following in zip(self._layers, first[1:], strict=True):
            if last_of and following is self._norm:
                return layer.run_last(x, h, following, step, last_of)
            layer.run(x, h, following, step)
        return h

    def head(self, h: Tensor, step: Step) -> Tensor:
        """Logits float32 [T, padded vocabulary] of what `hidden` gives."""
        return self._head.forward(h, step)

    def store(self, ids: Tensor, step: Step) -> None:
        """The keys and values of ids int64 [T] into the cache, and nothing else."""
        x, joined = self._begin(ids)
        *layers, last = self._layers
        h = rms_norm(x, _weight(layers[0].norms[0] if layers else last.norms[0]), last.norms[0].eps)
        for layer, following in zip(layers, self._layers[1:], strict=True):
            if joined:
                layer.run_joined(x, step)
            else:
                layer.run(x, h, following.norms[0], step)
        last.store(rms_norm(x, _weight(last.norms[0]), last.norms[0].eps) if joined else h, step)

    def _begin(self, ids: Tensor) -> tuple[Tensor, bool]:
        """The embedded ids, and whether layers take them joined."""
        assert self._embedding.weight is not None
        x = embed(self._embedding.weight, ids, factor=self._embedding.scale)
        return x, x.shape[0] <= joined_rows() and all(layer.join(x.shape[0]) for layer in self._layers)

    def _run_in_a_row(self, x: Tensor, step: Step, logits: Tensor) -> None:
        head = self._normed_head(step, logits)
        prepared: Prepared | None = None
        for layer, following in zip(self._layers, [*(layer.qkv for layer in self._layers[1:]), head], strict=True):
            prepared = layer.run_in_a_row(x, prepared, following, step)
        if head is None or prepared is None:
            self._head.forward(rms_norm(x, _weight(self._norm), self._norm.eps), step, out=logits)
        else:
            head.in_a_row(prepared, logits)
            self._head.finish(logits)

    def _normed_head(self, step: Step, logits: Tensor) -> FusedLinear | None:
        """The last norm and the head as one product, where it is that of few rows."""
        head = self._joined_head
        fits = head is not None and head.takes_prepared and head.out_features == logits.shape[-1]
        return head if fits and not step.loras else None


def _in_blocks(product: FusedLinear, h: Tensor) -> Tensor | None:
    """The product of the normed h on the packed weights, at most 64 rows at a time; None where that is not the way."""
    rows = h.shape[0]
    if rows <= FEW_ROWS or not product.batch_rows or (rows > INVARIANT_ROWS and not row_invariant()):
        return None
    out = h.new_empty(rows, product.out_features)
    for some, to in zip(torch.split(h, product.batch_rows), torch.split(out, product.batch_rows), strict=True):
        product(some, to)
    return out


def _add_product(x: Tensor, linear: Linear, y: Tensor, norm: RMSNorm, h: Tensor) -> None:
    """x += y @ W, h = norm(x)."""
    matrix = linear.quant
    if isinstance(matrix, CudaQuantMatrix) and x.shape[0] > INVARIANT_ROWS:
        matrix.add_matmul(y, x)
        rms_norm(x, _weight(norm), norm.eps, out=h)
    else:
        add_rms_norm(x, matrix.matmul(y), _weight(norm), norm.eps, out=h)


def _joined(*linears: Linear, norm: RMSNorm | None = None, activation: Activation | None = None) -> FusedLinear:
    before = None if norm is None else InputNorm(_weight(norm), norm.eps)
    return FusedLinear([linear.quant for linear in linears], norm=before, activation=activation)


def _attend(a: Attention, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
    """Rotation, storing and attention: one launch where a row is one token."""
    return _attend_one(a, q, k, v, step) if step.q_len == 1 else _attend_many(a, q, k, v, step)


def _attend_one(a: Attention, q: Tensor, k: Tensor, v: Tensor, step: Step, into: ProductInput | None = None) -> Tensor:
    return attend_own(
        q,
        k,
        v,
        step.pages(a.layer_idx),
        step.block_table,
        step.rows,
        step.positions,
        step.slots,
        *step.table(a.rope),
        step.rope_positions,
        scale=a.scale,
        interleaved=a.interleaved,
        window=a.window,
        softcap=a.softcap,
        max_keys=step.max_keys,
        # The step's tensors are older than the graph's launches, and so are all keys but the tokens' own.
        early=True,
        into=into,
    )


def _attend_many(a: Attention, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
    q, k, v, pages = q.contiguous(), k.contiguous(), v.contiguous(), step.pages(a.layer_idx)
    rope_store(pages, q, k, v, *step.table(a.rope), step.rope_positions, step.slots, interleaved=a.interleaved)
    return _attend_stored(a, q, step, step.rows, step.positions)


def _attend_stored(a: Attention, q: Tensor, step: Step, rows: Tensor, positions: Tensor) -> Tensor:
    return paged_attention(
        q,
        step.pages(a.layer_idx),
        step.block_table,
        rows,
        positions,
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
        max_keys=step.max_keys,
    )


def _cuda(linear: Linear) -> CudaQuantMatrix:
    matrix = linear.quant
    assert isinstance(matrix, CudaQuantMatrix)
    return matrix


def _rms(norm: Norm | None) -> RMSNorm:
    assert isinstance(norm, RMSNorm)
    return norm


def _weight(norm: RMSNorm) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def plan_of(model: LanguageModel) -> DecodePlan | str:
    """The plan of a loaded model, or why it is not covered."""
    why = uncovered(model.modules)
    if why is not None:
        return why
    first, norm, head, middle = _parts(model.modules)
    assert isinstance(first, Embedding)
    assert isinstance(norm, RMSNorm)
    assert isinstance(head, Head)
    pairs: list[tuple[Attention, GatedMLP]] = []
    for attention, mlp in zip(middle[::2], middle[1::2], strict=True):
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GatedMLP)
        pairs.append((attention, mlp))
        padded = (_padded(linear) for module in (attention, mlp) for linear in module.submodules())
        why = next((reason for reason in padded if reason is not None), None)
        if why is not None:
            return why
    return DecodePlan(first, pairs, norm, head)


def _parts(modules: Sequence[Module]) -> tuple[Module, Module, Module, Sequence[Module]]:
    """The embedding, the last norm, the head, and what is between."""
    return modules[0], modules[-2], modules[-1], modules[1:-2]


def uncovered(modules: Sequence[Module]) -> str | None:
    """Why the plan does not cover a model of these modules, loaded or not; None where it does, as far as shapes of
    unread files allow."""
    first, norm, head, middle = _parts(modules)
    if type(first) is not Embedding or type(norm) is not RMSNorm or type(head) is not Head or len(middle) % 2:
        return "the model's modules are not those of a dense decoder"
    reasons = [_odd(first, _EMBEDDING), _odd(norm, _NORM)]
    for attention, mlp in zip(middle[::2], middle[1::2], strict=True):
        if type(attention) is not Attention or type(mlp) is not GatedMLP:
            return f"{attention.key} is not attention followed by a gated MLP"
        if mlp.activation not in get_args(Activation):
            return f"{mlp.key} has activation {mlp.activation}"
        for module, known in ((attention, _ATTENTION), (mlp, _MLP)):
            reasons.append(_odd(module, known))
            if type(module.norm) is not RMSNorm:
                return f"{module.key} has no RMS norm of its own"
            reasons.append(_odd(module.norm, _NORM))
        if attention.rope == "none":
            return f"{attention.key} does not rotate"
    return next((reason for reason in reasons if reason is not None), None)


def _odd(module: Module, known: set[str]) -> str | None:
    for name, value in vars(module).items():
        if name not in known and (isinstance(value, Tensor) or value):
            return f"{module.key} has {name}, which the plan does not know"
    return None


def _padded(linear: Linear) -> str | None:
    if linear.quant.out_features != linear.out_features:
        return f"{linear.key} has padding columns"
    return None
