"""The halves of a layer as joined launches, and any other module as its own forward pass.

The description of a half decides whether it is joined; `why_apart` names the reason if not. Some parts of a joined half
are separate launches between the others: norms of q and k over all heads, a clamp, a norm that is no RMS norm, an
activation without gate that the first matmul does not apply. A norm of the result, and the addition to a hidden state
of float32, are one launch with the norm that follows. Results are bitwise identical to the module's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast, get_args

import torch
from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.activation import gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.attention.cuda import HeadNorms, MatmulInput, attend_own, attend_stored
from exl_kernels.device import row_invariant
from exl_kernels.fused import add_post_norm, add_rms_norm, layer_norm_packed, norm_parts, rope_store
from exl_kernels.kv import store_kv
from exl_kernels.linear.cuda import CudaQuantMatrix
from exl_kernels.linear.fused import Activation, FusedLinear, Packed
from exl_kernels.linear.fused import Norm as InputNorm
from exl_kernels.norm import rms_norm
from exl_kernels.rope import apply_rope
from exl_kernels.selection import BLOCK_ROWS, FEW_ROWS, PACKED_ROWS

from ..device import activation_dtype
from ..layers import Attention, FeedForward, GatedMLP, Linear, Module, Norm, ParallelDecoder, PlainMLP, RMSNorm
from ..layers.description import AttentionDescription, MlpDescription
from ..layers.norm import LayerNorm
from .adapted import MatmulAdapters, adapters_of, takes_adapters
from .batch import Step

__all__ = [
    "AttentionHalf",
    "Half",
    "MlpHalf",
    "ModuleHalf",
    "Normed",
    "ParallelHalf",
    "attend_heads",
    "chains",
    "half_of",
    "head_norms_of",
    "is_changed",
    "row_blocks",
    "run_chained",
    "why_apart",
]


Normed = Tensor | Packed | None
"""The normed hidden state, if an earlier launch has computed it: [T, hidden], or packed for one matmul."""


def why_apart(module: Module) -> str | None:
    """Return why a module, loaded or not, runs as its own forward pass; None where its launches are joined."""
    found = module.describe()
    if found is None:
        return f"{module.key} is not the attention or the MLP of a layer"
    if "describe" not in vars(type(module)) or is_changed(module):
        return f"{module.key} has code that its description does not know"
    if isinstance(found, AttentionDescription):
        if found.with_mlp and not isinstance(module, ParallelDecoder):
            return f"{module.key} has attention and MLP side by side"
        return why_apart(module.mlp) if isinstance(module, ParallelDecoder) else None
    if found.experts:
        return f"{module.key} chooses among {found.experts} experts"
    if found.gated and found.activation not in get_args(Activation):
        return f"{module.key} has activation {found.activation}"
    return None


def is_changed(module: Module) -> bool:
    """Return whether a method of its class was replaced in this one module (`module.forward = ...`)."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


class Half(ABC):
    """A module between embedding and last norm."""

    module: Module
    input_norm: RMSNorm | None = None
    """Norm of the input, if the preceding half may compute it."""
    first_matmul: FusedLinear | None = None
    """The only reader of the normed input, if the preceding half may pack it for this matmul."""

    def takes_adapters(self, step: Step) -> bool:
        """Return whether `run_joined` adds the adapters of the step."""
        return True

    def join(self, rows: int) -> bool:
        """Return whether the matmuls of `rows` rows can run with their prologue and epilogue.

        More than BLOCK_ROWS rows run in blocks of so many.
        """
        return True

    @abstractmethod
    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run the half with joined matmuls; arguments and results as for `run`.

        `h` may be packed as the input of `first_matmul`, and `following`(x) as that of `into`, the next half's.
        """

    @abstractmethod
    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run the half with separate matmuls.

        Args:
            x: [T, hidden]; may be changed in place.
            h: input_norm(x), if it is computed already; may be changed in place.
            following: norm of the next half, or None.
            step: the step.

        Returns:
            x and, if it was computed, `following`(x). Both may be changed in place.
        """


class ModuleHalf(Half):
    """A module as its own forward pass."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run the module's own forward pass."""
        return self.module.forward(x, step), None

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run the module's own forward pass."""
        return self.module.forward(x, step), None


class _JoinedHalf(Half):
    """Norms and residual of a half whose launches are joined."""

    def __init__(
        self, module: Module, norm: Norm | None, post: Norm | None, last: Linear, float_residual: bool
    ) -> None:
        """float_residual: x is float32 on a GPU, where matmuls take halves."""
        self.module = module
        self.norm, self.post, self.last, self.float_residual = norm, post, last, float_residual
        self.input_norm = norm if type(norm) is RMSNorm and not is_changed(norm) else None
        self._own_norm = None if float_residual else self.input_norm
        """The norm that the first matmul applies."""
        self._post = post if type(post) is RMSNorm and not is_changed(post) else None
        self._adds_apart = self._post is not None or (float_residual and post is None)
        """One launch norms the last matmul's result, adds it to x, and norms x for the next half."""
        self.plain = self._own_norm is not None and post is None
        """The half has only an RMS norm and the residual besides its matmuls."""

    def first_of(
        self, own: FusedLinear | None, normed: FusedLinear, x: Tensor, h: Normed
    ) -> tuple[FusedLinear, Tensor | Packed]:
        """Return the first matmul and its input: with a fused norm, if no other launch has computed the norm."""
        if h is None and own is None:
            h = self._packed_norm(normed, x)
        if isinstance(h, Packed):
            return normed, h
        return (own, x) if own is not None and h is None else (normed, self.normed(x, h))

    def _packed_norm(self, first: FusedLinear, x: Tensor) -> Packed | None:
        """Return the LayerNorm of x, packed for the first matmul, if one launch does both."""
        norm = self.norm
        if type(norm) is not LayerNorm or is_changed(norm) or self.float_residual:
            return None
        given = first.input_of(x.shape[0])
        if given is None:
            return None
        scratch = layer_norm_packed(x, norm.loaded_weight, norm.bias, norm.eps, given)
        return Packed(scratch, x.shape[0], by_matmul=False)

    def normed(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Return the input of matmuls without a fused norm: h, if given."""
        if h is not None:
            return h
        return x if self.norm is None else self.norm.forward(x)

    def adapt_input(self, adapters: MatmulAdapters, x: Tensor, h: Normed) -> tuple[Tensor, Tensor]:
        """Return the input of the first matmul without a fused norm, and its product with the adapters' A."""
        assert not isinstance(h, Packed), "steps with adapters pack no input"
        if h is None and self._own_norm is not None:
            h = torch.empty_like(x)
            return h, adapters.shrink(x, norm=_input_norm(self._own_norm), normed=h)
        h = self.normed(x, h)
        return h, adapters.shrink(h)

    def result(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output tensor of the last matmul, and its residual."""
        if self.post is None and not self._adds_apart:
            return x, x
        return torch.empty_like(x, dtype=activation_dtype(x.device)), None

    def left(self, x: Tensor, y: Tensor, following: RMSNorm | None, h: Tensor | None = None) -> Tensor | None:
        """Do the work after the last matmul: x += post(y) where y is not in x yet.

        Returns `following`(x), in h if given, where that needs no further launch.
        """
        if y is x:
            return None
        if self._adds_apart:
            return add_post_norm(x, y, _input_norm(self._post), _input_norm(following), out=h)
        x.add_(y if self.post is None else self.post.apply(y.to(x.dtype)))
        return None

    def left_packed(
        self, x: Tensor, y: Tensor, following: RMSNorm | None, h: Normed, into: FusedLinear | None
    ) -> Normed:
        """Do the work of `left`, and pack `following`(x) as the input of `into` where the same launch can."""
        given = into.input_of(x.shape[0]) if into is not None and self._adds_apart and following is not None else None
        if given is None or given.columns != FEW_ROWS:
            return self.left(x, y, following, None if isinstance(h, Packed) else h)
        scratch = add_post_norm(x, y, _input_norm(self._post), _input_norm(following), into=given)
        assert scratch is not None
        return Packed(scratch, x.shape[0])

    def add_matmul(self, x: Tensor, y: Tensor, h: Tensor | None, following: RMSNorm | None) -> Tensor | None:
        """Compute x += post(y @ W) with the last matmul; return `following`(x), in h if given."""
        matrix = self.last.quant
        plain = self.post is None and not self.float_residual
        if plain and isinstance(matrix, CudaQuantMatrix) and x.shape[0] > PACKED_ROWS:
            matrix.add_matmul(y, x)
            return None if following is None else rms_norm(x, following.loaded_weight, following.eps, out=h)
        y = matrix.matmul(y)
        if self._adds_apart or following is None:
            return self.left(x, y, following, h)
        y = y if self.post is None else self.post.apply(y.to(x.dtype))
        if self.float_residual:
            return following.forward(x.add_(y))
        return add_rms_norm(x, y, following.loaded_weight, following.eps, out=h)


class AttentionHalf(_JoinedHalf):
    """Norm and q, k, v; rotation, storing and attention; o and residual."""

    def __init__(self, attention: Attention, float_residual: bool = False) -> None:
        a = self.attention = attention
        super().__init__(a, a.norm, a.post, a.o_proj, float_residual)
        self._first_linears = (a.q_proj, a.k_proj, a.v_proj)
        self.qkv_normed = _joined(a.q_proj, a.k_proj, a.v_proj)
        self.qkv = self.qkv_normed
        if self._own_norm is not None:
            self.qkv = _joined(a.q_proj, a.k_proj, a.v_proj, norm=self._own_norm)
        self.o = _joined(a.o_proj)
        self.head_norms = head_norms_of(a)
        """Norms of q and k that attention of one token a row applies."""
        self.first_matmul = self.qkv_normed
        self._part_norms = _part_norms_of(a) if self.head_norms is None else None
        """Norms of all of q and of all of k, which one launch applies where the matmul has left them."""
        self._shapes = a.q_norm is not None or a.k_norm is not None or bool(a.clip)
        self.plain = self.plain and (not self._shapes or self.head_norms is not None)

    def join(self, rows: int) -> bool:
        """Return whether the matmuls qkv and o have fused kernels for `rows` rows."""
        return all(_joins(matmul, rows) for matmul in (self.qkv, self.o))

    def takes_adapters(self, step: Step) -> bool:
        """Return whether the adapters of q, k and v and of o can be added behind the joined matmuls."""
        return takes_adapters(step, self._first_linears) and takes_adapters(step, (self.last,))

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run norm, q, k, v, attention, o and residual with joined launches."""
        adapters = adapters_of(step, self._first_linears)
        if adapters is None:
            own = self.qkv if self._own_norm is not None else None
            qkv = _multiplied(*self.first_of(own, self.qkv_normed, x, h), x)
        else:
            taken, middle = self.adapt_input(adapters, x, h)
            qkv = self.qkv_normed(taken, taken.new_empty(x.shape[0], self.qkv_normed.out_features))
            adapters.expand(qkv, middle)
        out, residual = self.result(x)
        self._attend_to(out, residual, qkv, step)
        return x, self.left_packed(x, out, following, h, into)

    def _attend_to(self, out: Tensor, residual: Tensor | None, qkv: Tensor, step: Step) -> None:
        """Compute o of the attention plus the residual; attention packs o's input if possible."""
        rows, o = qkv.shape[0], self.o
        adapters = adapters_of(step, (self.last,))
        if adapters is not None:
            adapters.multiply(o, self.attend(qkv, step).view(rows, -1), out, residual)
            return
        given = o.input_of(rows) if step.decodes else None
        if given is not None:
            self.attend(qkv, step, given)
            o.from_input(given, out, residual=residual)
        else:
            _multiply(o, self.attend(qkv, step).view(rows, -1), out, residual)

    def attend(self, qkv: Tensor, step: Step, into: MatmulInput | None = None) -> Tensor:
        """Return the attention of rows that hold q, k and v side by side: [T, heads, head_dim]. May change qkv."""
        if self._part_norms is not None and qkv.dtype == torch.float16 and qkv.is_cuda:
            q_norm, k_norm = self._part_norms
            norm_parts(qkv, q_norm.loaded_weight, k_norm.loaded_weight, q_norm.eps)
            q, k, v = self._split(qkv)
        else:
            q, k, v = self._split(qkv)
            if step.q_len > 1 or self.head_norms is None:
                q, k, v = self._shaped(q, k, v)
        return attend_heads(self.attention, q, k, v, step, into, self.head_norms)

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run norm, q, k, v, attention, o and residual as separate launches."""
        a, rows = self.attention, x.shape[0]
        given, h = h, self.normed(x, h)
        qkv = _in_blocks(self.qkv_normed, h)
        if qkv is None:
            q = a.shaped(a.q_proj.quant.matmul(h), a.q_norm)
            k = a.shaped(a.k_proj.quant.matmul(h), a.k_norm)
            v = a.shaped(a.v_proj.quant.matmul(h))
            mixed = attend_heads(a, q, k, v, step)
        else:
            mixed = self.attend(qkv, step)
        return x, self.add_matmul(x, mixed.view(rows, -1), given, following)

    def run_last(
        self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the half for the last token of each of `batch` rows; x and h of these, [batch, hidden]."""
        x, _, mixed = self._attend_last(x, h, step, batch)
        return x, self.add_matmul(x, mixed, None, following)

    def _attend_last(self, x: Tensor, h: Tensor | None, step: Step, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, h and the attention of the last token of each row; keys and values of all tokens are stored."""
        a, h = self.attention, self.normed(x, h)
        self.store(x, h, step)
        x, h, rows, places, turns = (
            t.view(batch, -1, *t.shape[1:])[:, -1].contiguous()
            for t in (x, h, step.rows, step.positions, step.rope_positions)
        )
        q = a.shaped(a.q_proj.quant.matmul(h), a.q_norm)
        if a.rope != "none":
            apply_rope(q, *step.table(a.rope), turns, interleaved=a.interleaved)
        return x, h, _attend_stored(a, q, step, rows, places).view(batch, -1)

    def store(self, x: Tensor, h: Tensor | None, step: Step) -> None:
        """Store keys and values of x [T, hidden] in the cache; h as for `run`."""
        a, h = self.attention, self.normed(x, h)
        k, v = a.shaped(a.k_proj.quant.matmul(h), a.k_norm), a.shaped(a.v_proj.quant.matmul(h))
        if a.rope != "none":
            apply_rope(k, *step.table(a.rope), step.rope_positions, interleaved=a.interleaved)
        store_kv(step.pages(a.layer_idx), k, v, step.slots)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of q, k and v [T, heads, head_dim] in rows that hold them side by side."""
        a, d, rows = self.attention, self.attention.head_dim, qkv.shape[0]
        widths = [a.num_attention_heads * d, a.num_key_value_heads * d, a.num_key_value_heads * d]
        q, k, v = torch.split(qkv, widths, dim=1)
        return q.view(rows, -1, d), k.view(rows, -1, d), v.view(rows, -1, d)

    def _shaped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Clamp and norm q, k and v before the rotation; returns new tensors if there is anything to do."""
        if not self._shapes:
            return q, k, v
        a = self.attention
        q, k, v = (t.flatten(1).contiguous() for t in (q, k, v))
        return a.shaped(q, a.q_norm), a.shaped(k, a.k_norm), a.shaped(v)


class MlpHalf(_JoinedHalf):
    """Norm, gate, up and activation, or norm and up; down and residual."""

    def __init__(self, mlp: FeedForward, float_residual: bool = False) -> None:
        assert isinstance(mlp, GatedMLP | PlainMLP), "why_apart lets no other through"
        self.mlp = mlp
        super().__init__(mlp, mlp.norm, mlp.post, mlp.down_proj, float_residual)
        gate = mlp.gate_proj if isinstance(mlp, GatedMLP) else None
        self.gated = gate is not None
        self.plain = self.plain and self.gated
        linears = (mlp.up_proj,) if gate is None else (gate, mlp.up_proj)
        self._first_linears = linears
        fuses = mlp.activation in get_args(Activation)  # always where there is a gate: see `why_apart`
        self._activation = joins = cast(Activation, mlp.activation) if fuses else None
        """The activation of the first matmul; None where it is a launch behind it."""
        self.up_bare = _joined(*linears)
        """The first matmul with neither norm nor activation, for adapters."""
        self.up_normed = _joined(*linears, activation=joins)
        self.up = self.up_normed
        if self._own_norm is not None:
            self.up = _joined(*linears, norm=self._own_norm, activation=joins)
        self.first_matmul = self.up_normed
        self.down = _joined(mlp.down_proj)

    def join(self, rows: int) -> bool:
        """Return whether gate and up (or up) have a fused kernel for `rows` rows."""
        return _joins(self.up, rows)  # down may run separately

    def takes_adapters(self, step: Step) -> bool:
        """Return whether the adapters of gate and up (or up) and of down can be added behind the joined matmuls."""
        return takes_adapters(step, self._first_linears) and takes_adapters(step, (self.last,))

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run the MLP with joined launches."""
        first, last = adapters_of(step, self._first_linears), adapters_of(step, (self.last,))
        if first is not None or last is not None:
            return self._run_adapted(first, last, x, h, following)
        own = self.up if self._own_norm is not None else None
        matmul, taken = self.first_of(own, self.up_normed, x, h)
        out, residual = self.result(x)
        if isinstance(taken, Packed) and self._activation is not None:
            matmul.then(self.down, taken, out, residual)
        elif self._activation is not None:
            assert not isinstance(taken, Packed)
            for rows in row_blocks(x.shape[0]):
                matmul.then(self.down, taken[rows], out[rows], None if residual is None else residual[rows])
        else:
            up = _multiplied(matmul, taken, x)
            _multiply(self.down, activate(up, self.mlp.activation, out=up), out, residual)
        return x, self.left_packed(x, out, following, h, into)

    def _run_adapted(
        self,
        first: MatmulAdapters | None,
        last: MatmulAdapters | None,
        x: Tensor,
        h: Normed,
        following: RMSNorm | None,
    ) -> tuple[Tensor, Normed]:
        """Run the MLP with the adapters of its first matmul, of down, or of both."""
        if first is None:
            own = self.up if self._own_norm is not None else None
            inner = _multiplied(*self.first_of(own, self.up_normed, x, h), x)
            activated = self._activation is not None
        else:
            taken, middle = self.adapt_input(first, x, h)
            inner = self.up_bare(taken, taken.new_empty(x.shape[0], self.up_bare.out_features))
            inner = first.expand(inner, middle, activation=self._activation if self.gated else None)
            activated = self.gated
        if not activated:
            activate(inner, self.mlp.activation, out=inner)
        out, residual = self.result(x)
        if last is None:
            self.down(inner, out, residual)
        else:
            last.multiply(self.down, inner, out, residual)
        return x, self.left_packed(x, out, following, h, None)

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run the MLP as separate launches."""
        given, h = h, self.normed(x, h)
        inner = _in_blocks(self.up_normed, h)
        activated = inner is not None and self._activation is not None
        if inner is None:
            inner, *up = (matrix.matmul(h) for matrix in self.matrices)
            if up:
                inner = gated_activation(inner, up[0], self.mlp.activation, out=inner)
        if not self.gated and not activated:
            activate(inner, self.mlp.activation, out=inner)
        return x, self.add_matmul(x, inner, given, following)

    @property
    def matrices(self) -> list[CudaQuantMatrix]:
        """Matrices of the first matmul."""
        *first, _ = self.mlp.submodules()
        return [cast(CudaQuantMatrix, linear.quant) for linear in first]


class ParallelHalf(AttentionHalf):
    """A whole layer whose attention and MLP take the same normed input.

    The results of both are added to the hidden state.
    """

    def __init__(self, decoder: ParallelDecoder, float_residual: bool = False) -> None:
        super().__init__(decoder, float_residual)
        self.mlp = MlpHalf(decoder.mlp, float_residual)
        self.first_matmul = None  # the MLP reads the normed input, too
        self.plain = False

    def join(self, rows: int) -> bool:
        """Return whether both halves can run joined."""
        return super().join(rows) and self.mlp.join(rows)

    def takes_adapters(self, step: Step) -> bool:
        """Return whether both halves add the adapters of the step."""
        return super().takes_adapters(step) and self.mlp.takes_adapters(step)

    def run_joined(
        self, x: Tensor, h: Normed, following: RMSNorm | None, step: Step, into: FusedLinear | None = None
    ) -> tuple[Tensor, Normed]:
        """Run attention, then MLP, on one normed input with joined launches."""
        assert not isinstance(h, Packed), "two matmuls read the input"
        h = self.normed(x, h)
        x, _ = super().run_joined(x, h, None, step)
        return self.mlp.run_joined(x, h, following, step, into)

    def run(self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run attention, then MLP, on one normed input as separate launches."""
        h = self.normed(x, h)
        x, _ = super().run(x, h, None, step)
        return self.mlp.run(x, h, following, step)

    def run_last(
        self, x: Tensor, h: Tensor | None, following: RMSNorm | None, step: Step, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer for the last token of each of `batch` rows."""
        x, h, mixed = self._attend_last(x, h, step, batch)
        self.add_matmul(x, mixed, None, None)
        return self.mlp.run(x, h, following, step)


def half_of(module: Module, float_residual: bool = False) -> Half:
    """Return the half of a loaded module; float_residual: the hidden state is float32 on a GPU."""
    if why_apart(module) is not None or any(_padded(linear) for linear in module.submodules()):
        return ModuleHalf(module)
    if isinstance(module.describe(), MlpDescription):
        assert isinstance(module, FeedForward)
        return MlpHalf(module, float_residual)
    assert isinstance(module, Attention)
    if isinstance(module, ParallelDecoder):
        return ParallelHalf(module, float_residual)
    return AttentionHalf(module, float_residual)


def chains(attention: AttentionHalf, mlp: MlpHalf, rows: int) -> bool:
    """Return whether the matmuls of a layer can pack one another's inputs of `rows` rows."""
    return (
        attention.plain
        and mlp.plain
        and all(matmul.takes_packed(rows) for matmul in (attention.qkv, mlp.up, mlp.down))
        and attention.o.chains_to(mlp.up, rows)
    )


def run_chained(
    attention: AttentionHalf,
    mlp: MlpHalf,
    x: Tensor,
    packed: Packed | None,
    following: FusedLinear | None,
    step: Step,
) -> Packed | None:
    """Run a layer on x [T, hidden] half, changed in place, or on `packed` from the preceding matmul.

    Returns x packed for `following`.
    """
    rows, first, o = x.shape[0], attention.qkv, attention.o
    qkv = x.new_empty(rows, first.out_features)
    first.chained(x if packed is None else packed, qkv)
    given = o.input_of(rows) if step.decodes else None
    mixed = attention.attend(qkv, step, given)
    attended: Tensor | Packed = mixed.view(rows, -1) if given is None else Packed(given.scratch, rows)
    normed = o.chained(attended, x, x, mlp.up)
    assert normed is not None
    gated = mlp.up.chained(normed, following=mlp.down)
    assert gated is not None
    return mlp.down.chained(gated, x, x, following)


def row_blocks(rows: int) -> list[slice]:
    """Return the rows of a matmul in blocks of at most BLOCK_ROWS, whose results do not depend on their number."""
    return [slice(begin, min(begin + BLOCK_ROWS, rows)) for begin in range(0, rows, BLOCK_ROWS)]


def _joins(matmul: FusedLinear, rows: int) -> bool:
    """Return whether a joined kernel takes every block of `rows` rows."""
    return all(matmul.kernel(some.stop - some.start) is not None for some in row_blocks(rows))


def _multiply(matmul: FusedLinear, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """Compute matmul(x, out, residual) block by block; returns out."""
    if x.shape[0] <= BLOCK_ROWS:
        return matmul(x, out, residual)
    for rows in row_blocks(x.shape[0]):
        matmul(x[rows], out[rows], None if residual is None else residual[rows])
    return out


def _in_blocks(matmul: FusedLinear, h: Tensor) -> Tensor | None:
    """Return the matmul of the normed h by `gemm_batch`, block by block; None where another kernel runs."""
    rows = h.shape[0]
    if rows > PACKED_ROWS and not row_invariant():
        return None
    if matmul.kernel(min(rows, BLOCK_ROWS)) != "gemm_batch":
        return None
    out = h.new_empty(rows, matmul.out_features)
    for some in row_blocks(rows):
        matmul(h[some], out[some])
    return out


def _multiplied(matmul: FusedLinear, taken: Tensor | Packed, x: Tensor) -> Tensor:
    """Return the matmul of `taken`, in rows like those of the hidden state x."""
    out = x.new_empty(x.shape[0], matmul.out_features, dtype=activation_dtype(x.device))
    if not isinstance(taken, Packed):
        return _multiply(matmul, taken, out)
    matmul.chained(taken, out)
    return out


def _joined(*linears: Linear, norm: RMSNorm | None = None, activation: Activation | None = None) -> FusedLinear:
    matrices = [linear.quant for linear in linears]
    return FusedLinear(matrices, norm=_input_norm(norm), activation=activation, max_rows=BLOCK_ROWS)


def _input_norm(norm: RMSNorm | None) -> InputNorm | None:
    return None if norm is None else InputNorm(norm.loaded_weight, norm.eps)


def head_norms_of(a: Attention) -> HeadNorms | None:
    """Return norms of q and k that attention of one token a row can apply, or None.

    These are RMS norms whose weight all heads share.
    """
    norms = [norm for norm in (a.q_norm, a.k_norm) if type(norm) is RMSNorm and not is_changed(norm)]
    if len(norms) < 2 or a.clip or any(norm.loaded_weight.shape != (a.head_dim,) for norm in norms):
        return None
    q, k = norms
    return HeadNorms(q.loaded_weight, k.loaded_weight, q.eps) if q.eps == k.eps else None


def _part_norms_of(a: Attention) -> tuple[RMSNorm, RMSNorm] | None:
    """Return RMS norms of all heads of q together and of k, if `norm_parts` applies them."""
    q, k = a.q_norm, a.k_norm
    if type(q) is not RMSNorm or type(k) is not RMSNorm or is_changed(q) or is_changed(k) or a.clip or q.eps != k.eps:
        return None
    whole = q.loaded_weight.shape == (a.num_attention_heads * a.head_dim,)
    whole &= k.loaded_weight.shape == (a.num_key_value_heads * a.head_dim,)
    return (q, k) if whole and q.loaded_weight.dtype == k.loaded_weight.dtype == torch.float32 else None


def attend_heads(
    a: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    into: MatmulInput | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate, store and attend: one launch, which also applies `norms`, where a row is one token."""
    if step.q_len > 1:
        return _attend_many(a, q, k, v, step, into)
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
        # The step's tensors, and all keys but the tokens' own, were written before the graph's launches.
        early=True,
        into=into,
        norms=norms,
    )


def _attend_many(a: Attention, q: Tensor, k: Tensor, v: Tensor, step: Step, into: MatmulInput | None = None) -> Tensor:
    pages = step.pages(a.layer_idx)
    if not step.decodes:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if a.rope == "none":
        store_kv(pages, k, v, step.slots)
    else:
        rope_store(pages, q, k, v, *step.table(a.rope), step.rope_positions, step.slots, interleaved=a.interleaved)
    if not step.decodes:
        return _attend_stored(a, q, step, step.rows, step.positions)
    return attend_stored(
        q,
        pages,
        step.block_table,
        step.rows,
        step.positions,
        scale=a.scale,
        window=a.window,
        softcap=a.softcap,
        max_keys=step.max_keys,
        into=into,
    )


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


def _padded(linear: Linear) -> bool:
    return linear.quant.out_features != linear.out_features
