"""The gated MLP with its norm and residual."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from exl_kernels.activation import gated_activation
from exl_kernels.block import GatedMlpBlock

from ..loading.checkpoint import TensorSource
from .linear import Linear
from .module import Module, Step
from .norm import RMSNorm

if TYPE_CHECKING:
    from ..lora import ExLlamaV2Lora

__all__ = ["GatedMLP"]


class GatedMLP(Module):
    """x + down(act(gate(h)) * up(h)) with h = norm(x) (spec core.md 4.4)."""

    name = "MLP"

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: RMSNorm,
        projections: tuple[Linear, Linear, Linear],
        activation: Literal["silu", "gelu"],
    ) -> None:
        self.key = key
        self.layer_idx = layer_idx
        self.norm = norm
        self.gate_proj, self.up_proj, self.down_proj = projections
        self.activation: Literal["silu", "gelu"] = activation
        self.block: GatedMlpBlock | None = None

    def submodules(self) -> Iterator[Linear]:
        yield from (self.gate_proj, self.up_proj, self.down_proj)

    def load(self, source: TensorSource, device: torch.device) -> None:
        try:
            self.norm.load(source, device)
            for linear in self.submodules():
                linear.load(source, device)
            self.block = self._fuse()
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        self.block = None
        self.norm.unload()
        for linear in self.submodules():
            linear.unload()

    @property
    def loaded(self) -> bool:
        return self.down_proj.matrix is not None

    def weight_bytes(self) -> int:
        return self.norm.weight_bytes() + sum(p.weight_bytes() for p in self.submodules())

    def _fuse(self) -> GatedMlpBlock | None:
        """All of `forward` as one native call, where the matrices allow it."""
        linears = (self.gate_proj, self.up_proj, self.down_proj)
        if self.norm.weight is None or not all(linear.fusable() for linear in linears):
            return None
        matrices = (self.gate_proj.quant, self.up_proj.quant, self.down_proj.quant)
        return GatedMlpBlock(self.norm.weight, self.norm.eps, matrices, self.activation)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        if self.block is not None and not any(linear.adapted(step.loras) for linear in self.submodules()):
            return self.block.forward(x)
        return self.forward_unfused(x, step.loras)

    def forward_unfused(self, x: Tensor, loras: Sequence[ExLlamaV2Lora] = ()) -> Tensor:
        """The same step by step and to the same bits: for padded matrices, adapters, and as the fused block's twin."""
        h = self.norm.forward(x)
        gate = self.gate_proj.forward(h, loras)
        gated_activation(gate, self.up_proj.forward(h, loras), self.activation, out=gate)
        return x.add_(self.down_proj.forward(gate, loras))
