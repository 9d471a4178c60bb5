"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from exl_kernels.norm import rms_norm

from ..errors import FormatError, ModelStateError
from ..loading.checkpoint import TensorSource
from ..loading.linears import require_finite_float
from .module import Module, Step

__all__ = ["RMSNorm"]


class RMSNorm(Module):
    """x * w / sqrt(mean(x^2) + eps), float32 (spec core.md 4.3)."""

    name = "RMSNorm"

    def __init__(self, key: str, hidden_size: int, eps: float) -> None:
        self.key = key
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight: Tensor | None = None  # float32 [hidden]

    def load(self, source: TensorSource, device: torch.device) -> None:
        name = f"{self.key}.weight" if source.has(f"{self.key}.weight") else self.key
        weight = source.read(name)
        if tuple(weight.shape) != (self.hidden_size,):
            raise FormatError(f"{source.describe(name)}: shape {list(weight.shape)}, expected [{self.hidden_size}]")
        require_finite_float(weight, source.describe(name))
        if source.has(f"{self.key}.bias"):
            raise FormatError(f"{source.describe(f'{self.key}.bias')}: an RMSNorm has no bias")
        self.weight = weight.float().to(device)

    def unload(self) -> None:
        self.weight = None

    @property
    def loaded(self) -> bool:
        return self.weight is not None

    def weight_bytes(self) -> int:
        return 0 if self.weight is None else self.weight.nbytes

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        if self.weight is None:
            raise ModelStateError(f"{self.key} is not loaded: call model.load() first")
        return rms_norm(x, self.weight, self.eps)
