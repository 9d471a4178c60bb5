"""How halves of layers run as their modules: chosen for each half when its weights are loaded.

| way | runs | for |
|---|---|---|
| block | one native call | halves on the CPU with whole matrices without padding columns, in steps that it covers |
| shared calls (`experts_pass.py`) | norm and router, all experts | mixtures whose experts share calls, in most steps |
| operators | `SubLayer.forward_by_operator`, the block's twin | every other half or step |

Results are bitwise identical. Blocks and shared calls are made from the description of a half: code that it does not
know runs operator by operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exl_kernels.block import AttentionBlock, MlpBlock
from exl_kernels.linear import QuantMatrix
from exl_kernels.moe import ExpertGroup, group_experts

from ..layers import Linear, Module
from ..layers.description import AttentionDescription, ExpertsDescription, HalfDescription, MlpDescription
from ..layers.matrix import ShardedMatrix
from ..layers.norm import block_norm
from ..layers.sublayer import BY_OPERATOR, OwnPass, SubLayer
from .batch import Step
from .experts_pass import ExpertsTogether

__all__ = ["AttentionInBlock", "MlpInBlock", "choose_own_pass"]


def choose_own_pass(module: Module) -> None:
    """Let a loaded half run in the first of these ways that applies, also one that hooks or other code hold.

    An error leaves the half unloaded.
    """
    found, left = set[int](), list[object]([module])
    while left:
        part = left.pop()
        if id(part) in found:
            continue
        found.add(id(part))
        if isinstance(part, SubLayer):
            if part.loaded:
                _choose(part)
        elif isinstance(part, Module):
            left += vars(part).values()
        elif isinstance(part, list | tuple):
            left += part
        elif isinstance(part, dict):
            left += part.values()


def _choose(half: SubLayer) -> None:
    try:
        half.own_pass = _own_pass(half.describe())
    except BaseException:
        half.unload()
        raise


def _own_pass(about: HalfDescription) -> OwnPass:
    if isinstance(about, AttentionDescription) and about.mlp is None and _fits_block(about):
        return AttentionInBlock(about)
    if isinstance(about, MlpDescription) and _fits_block(about):
        return MlpInBlock(about)
    if isinstance(about, ExpertsDescription) and about.holds:
        grouped = _grouped(about)
        return BY_OPERATOR if grouped is None else ExpertsTogether(about, grouped)
    return BY_OPERATOR


def _grouped(about: ExpertsDescription) -> ExpertGroup | None:
    """Return the loaded experts in shared calls; None where they have none."""
    if about.apart:
        return None
    experts = [_whole(expert) for expert in about.experts]
    whole = [parts for parts in experts if parts is not None]
    if len(whole) < len(experts) or whole[0][0].device != about.router.loaded_matrix.device:
        return None
    shared = None if about.shared is None else _whole((*about.shared.first, about.shared.last))
    return group_experts(whole, about.activation, about.chosen, shared)


def _whole(expert: Sequence[Linear]) -> tuple[QuantMatrix, QuantMatrix, QuantMatrix] | None:
    """Return gate, up and down of an expert; None where one is sharded over devices or has padding columns."""
    if any(isinstance(m.matrix, ShardedMatrix) or m.stored_features != m.out_features for m in expert):
        return None
    gate, up, down = (linear.quant for linear in expert)
    return gate, up, down


def _fits_block(about: AttentionDescription | MlpDescription) -> bool:
    return about.holds and all(map(_is_plain, (*about.first, about.last)))


def _is_plain(linear: Linear) -> bool:
    """Return whether a loaded matrix is on the CPU, in one piece, without padding columns."""
    matrix = linear.loaded_matrix
    if isinstance(matrix, ShardedMatrix):
        return False
    return matrix.device.type == "cpu" and matrix.out_features == linear.out_features


def _adapted(half: SubLayer, step: Step) -> bool:
    return any(linear.adapted(step.loras) for linear in half.submodules())


class AttentionInBlock:
    """Attention as one native call."""

    def __init__(self, about: AttentionDescription) -> None:
        self._layer, self._rope, self._interleaved = about.layer_idx, about.rope, about.interleaved
        self._window = about.window
        q, k, v, o = (linear.quant for linear in (*about.first, about.last))
        self._block = AttentionBlock(
            block_norm(about.norm),
            (q, k, v, o),
            head_dim=about.head_dim,
            scale=about.scale,
            window=about.window,
            softcap=about.softcap,
            clip=about.clip,
            q_norm=block_norm(about.q_norm),
            k_norm=block_norm(about.k_norm),
            post=block_norm(about.post),
        )

    def run(self, half: SubLayer, x: Tensor, step: Step) -> Tensor:
        """Run x [T, hidden] in place; by operators with adapters, and where images see themselves beyond a window."""
        if (self._window and step.pictures is not None) or _adapted(half, step):
            return half.forward_by_operator(x, step)
        return self._block.forward(x, step.tokens(self._interleaved, self._rope), step.pages(self._layer))


class MlpInBlock:
    """An MLP as one native call."""

    def __init__(self, about: MlpDescription) -> None:
        *gate, up = (linear.quant for linear in about.first)
        matrices = (up, about.last.quant)
        self._block = MlpBlock(
            block_norm(about.norm), gate[0] if gate else None, matrices, about.activation, post=block_norm(about.post)
        )

    def run(self, half: SubLayer, x: Tensor, step: Step) -> Tensor:
        """Run x [T, hidden] in place; by operators with adapters."""
        return half.forward_by_operator(x, step) if _adapted(half, step) else self._block.forward(x)
