"""RMSNorm and LayerNorm: of the hidden state, and of the heads of q and k."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from exl_kernels.block import BlockNorm
from exl_kernels.norm import layer_norm, rms_norm

from ..device import activation_dtype
from ..errors import FormatError
from ..execution.batch import Step
from ..loading.checkpoint import TensorSource
from ..loading.linears import require_finite_float
from .module import WeightModule, is_changed

__all__ = ["LayerNorm", "Norm", "RMSNorm", "block_norm", "layer_of", "rms_of"]


class Norm(WeightModule):
    """A norm with a float32 weight of one of the given shapes.

    Args:
        key: name of the module in the files.
        shape: shape of the weight, [hidden] or, for a norm per head, [heads, head_dim].
        eps: added to the mean square or variance.
        *shapes: further valid shapes.
    """

    def __init__(self, key: str, shape: int | tuple[int, ...], eps: float, *shapes: tuple[int, ...]) -> None:
        self.key = key
        self.shapes = ((shape,) if isinstance(shape, int) else shape, *shapes)
        self.eps = eps
        self.weight: Tensor | None = None  # float32

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read and check the weight. Raises FormatError."""
        name = f"{self.key}.weight" if source.has(f"{self.key}.weight") else self.key
        self.weight = self._read(source, name).to(device)

    def _read(self, source: TensorSource, name: str) -> Tensor:
        tensor = source.read(name)
        if tuple(tensor.shape) not in self.shapes:
            expected = " or ".join(str(list(shape)) for shape in self.shapes)
            raise FormatError(f"{source.describe(name)}: shape {list(tensor.shape)}, expected {expected}")
        require_finite_float(tensor, source.describe(name))
        return tensor.float()

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        """Return the normalised x in the type that linears take: float32, on a GPU half."""
        return self.apply(x).to(activation_dtype(x.device))

    @abstractmethod
    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the normalised x [.., *shape of the weight] in x's own type."""

    @abstractmethod
    def block(self) -> BlockNorm:
        """Return the loaded norm as a part of a CPU block."""


def block_norm(norm: Norm | None) -> BlockNorm | None:
    """Return a loaded norm as a part of a CPU block; None for no norm."""
    return None if norm is None else norm.block()


class RMSNorm(Norm):
    """x * (w + offset) / sqrt(mean(x^2) + eps), float32. The offset is added at load, in float32."""

    name = "RMSNorm"

    def __init__(
        self, key: str, shape: int | tuple[int, ...], eps: float, *shapes: tuple[int, ...], offset: float = 0.0
    ) -> None:
        super().__init__(key, shape, eps, *shapes)
        self.offset = offset

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read the weight and add the offset. Raises FormatError."""
        if source.has(f"{self.key}.bias"):
            raise FormatError(f"{source.describe(f'{self.key}.bias')}: an RMSNorm has no bias")
        super().load(source, device)
        if self.offset and self.weight is not None:
            self.weight += self.offset

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the RMS norm of x in x's own type."""
        return rms_norm(x, self.loaded_weight, self.eps, out=out)

    def block(self) -> BlockNorm:
        """Return the loaded norm as a part of a CPU block."""
        return BlockNorm(self.loaded_weight, self.eps)


class LayerNorm(Norm):
    """(x - mean) * w / sqrt(var + eps) + b, float32."""

    name = "LayerNorm"

    def __init__(
        self, key: str, shape: int | tuple[int, ...], eps: float, *shapes: tuple[int, ...], bias: bool = False
    ) -> None:
        super().__init__(key, shape, eps, *shapes)
        self.has_bias = bias
        self.bias: Tensor | None = None  # float32

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read weight and bias. Raises FormatError."""
        name = f"{self.key}.bias"
        if source.has(name) and not self.has_bias:
            raise FormatError(f"{source.describe(name)}: this architecture's LayerNorm has no bias")
        bias = self._read(source, name).to(device) if self.has_bias else None
        super().load(source, device)
        self.bias = bias

    def unload(self) -> None:
        """Drop weight and bias."""
        super().unload()
        self.bias = None

    def weight_bytes(self) -> int:
        """Return the bytes of the loaded weight and bias."""
        return super().weight_bytes() + (0 if self.bias is None else self.bias.nbytes)

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the layer norm of x in x's own type."""
        return layer_norm(x, self.loaded_weight, self.bias, self.eps, out=out)

    def block(self) -> BlockNorm:
        """Return the loaded norm as a part of a CPU block."""
        return BlockNorm(self.loaded_weight, self.eps, self.bias, layer=True)


def rms_of(norm: Norm | None) -> RMSNorm | None:
    """Return the norm if launches that include an RMS norm compute it: no subclass or replaced method changes it."""
    return norm if type(norm) is RMSNorm and not is_changed(norm) else None


def layer_of(norm: Norm | None) -> LayerNorm | None:
    """Return the norm if launches that include a LayerNorm compute it; as `rms_of`."""
    return norm if type(norm) is LayerNorm and not is_changed(norm) else None
