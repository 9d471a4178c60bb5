"""The decode step of dense models with the launches between matrix products joined (performance 4.2).

A plan is read off the loaded modules. It covers the Llama shape: RMS norms before attention and before a gated MLP,
nothing else between. Whatever a module has beyond that makes the plan refuse, and the step is captured as the modules'
own forward pass. Results are the modules' own to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.fused import add_rms_norm, embed, rope_store
from exl_kernels.norm import rms_norm

from ..modules import Attention, Embedding, GatedMLP, Head, Linear, Module, RMSNorm, Step
from ..modules.norm import Norm

if TYPE_CHECKING:
    from ..model import ExLlamaV2

__all__ = ["DecodePlan", "plan_of"]

# What a covered module may hold, by name; anything else must be at rest.
_ATTENTION = {"key", "layer_idx", "norm", "q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "num_attention_heads"}
_ATTENTION |= {"num_key_value_heads", "scale", "window", "softcap", "interleaved", "block", "rope"}
_MLP = {"key", "layer_idx", "norm", "gate_proj", "up_proj", "down_proj", "activation", "block"}
_NORM = {"key", "shapes", "eps", "weight", "offset"}
_EMBEDDING = {"key", "vocab_size", "hidden_size", "scale", "weight"}


class DecodePlan:
    """One step of few tokens: 11 launches a layer where the modules make 15."""

    def __init__(self, embedding: Embedding, layers: Sequence[tuple[Attention, GatedMLP]], norm: RMSNorm, head: Head):
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def run(self, ids: Tensor, step: Step, logits: Tensor) -> None:
        """ids int64 [T] on the device; writes logits float32 [T, padded vocabulary]."""
        assert self._embedding.weight is not None
        x = embed(self._embedding.weight, ids, factor=self._embedding.scale)
        norms = [*(n for pair in self._layers for layer in pair if isinstance(n := layer.norm, RMSNorm)), self._norm]
        h = rms_norm(x, _weight(norms[0]), norms[0].eps)
        for i, (attention, mlp) in enumerate(self._layers):
            h = _add(x, _attend(attention, h, step), norms[2 * i + 1], h)
            h = _add(x, _feed(mlp, h), norms[2 * i + 2], h)
        self._head.forward(h, step, out=logits)


def _add(x: Tensor, y: Tensor, norm: RMSNorm, out: Tensor) -> Tensor:
    return add_rms_norm(x, y, _weight(norm), norm.eps, out=out)


def _attend(m: Attention, h: Tensor, step: Step) -> Tensor:
    tokens = h.shape[0]
    q = m.q_proj.quant.matmul(h).view(tokens, m.num_attention_heads, m.head_dim)
    k = m.k_proj.quant.matmul(h).view(tokens, m.num_key_value_heads, m.head_dim)
    v = m.v_proj.quant.matmul(h).view(tokens, m.num_key_value_heads, m.head_dim)
    pages, (cos, sin) = step.pages(m.layer_idx), step.table(m.rope)
    rope_store(pages, q, k, v, cos, sin, step.rope_positions, step.slots, interleaved=m.interleaved)
    mixed = paged_attention(
        q,
        pages,
        step.block_table,
        step.rows,
        step.positions,
        scale=m.scale,
        window=m.window,
        softcap=m.softcap,
        key_mask=None,
        max_keys=step.max_keys,
    )
    return m.o_proj.quant.matmul(mixed.view(tokens, -1))


def _feed(m: GatedMLP, h: Tensor) -> Tensor:
    gate, up = m.gate_proj.quant.matmul(h), m.up_proj.quant.matmul(h)
    return m.down_proj.quant.matmul(gated_activation(gate, up, m.activation, out=gate))


def _rms(norm: Norm | None) -> RMSNorm:
    assert isinstance(norm, RMSNorm)
    return norm


def _weight(norm: RMSNorm) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def plan_of(model: ExLlamaV2) -> DecodePlan | str:
    """The plan of a loaded model, or why it is not covered."""
    modules = model.modules
    first, norm, head, middle = modules[0], modules[-2], modules[-1], modules[1:-2]
    if type(first) is not Embedding or type(norm) is not RMSNorm or type(head) is not Head or len(middle) % 2:
        return "the model's modules are not those of a dense decoder"
    layers = list(zip(middle[::2], middle[1::2], strict=True))
    pairs: list[tuple[Attention, GatedMLP]] = []
    reasons = [_odd(first, _EMBEDDING), _odd(norm, _NORM)]
    for attention, mlp in layers:
        if type(attention) is not Attention or type(mlp) is not GatedMLP:
            return f"{attention.key} is not attention followed by a gated MLP"
        pairs.append((attention, mlp))
        for module, known in ((attention, _ATTENTION), (mlp, _MLP)):
            reasons.append(_odd(module, known))
            if type(module.norm) is not RMSNorm:
                return f"{module.key} has no RMS norm of its own"
            reasons += [_odd(module.norm, _NORM), *(_padded(linear) for linear in module.submodules())]
        if attention.rope == "none":
            return f"{attention.key} does not rotate"
    why = next((reason for reason in reasons if reason is not None), None)
    return why or DecodePlan(first, pairs, norm, head)


def _odd(module: Module, known: set[str]) -> str | None:
    for name, value in vars(module).items():
        if name not in known and (isinstance(value, Tensor) or value):
            return f"{module.key} has {name}, which the plan does not know"
    return None


def _padded(linear: Linear) -> str | None:
    if linear.quant.out_features != linear.out_features:
        return f"{linear.key} has padding columns"
    return None
