"""Matrices that are not in one piece on one device, as a linear sees them. Executors know where their parts are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from exl_kernels.linear import Compute, Format, QuantMatrix

from ..loading.checkpoint import TensorSource
from ..loading.linears import LinearOptions, LinearSpec

__all__ = ["Cut", "ShardedMatrix"]


class ShardedMatrix(ABC):
    """The counterpart of a `QuantMatrix` over several devices, with x and y on the home device.

    Attributes:
        in_features: inputs.
        out_features: outputs.
        stored_features: outputs of the matrix in the files.
        name: name in the files.
        format: format in the files.
        compute: arithmetic on the CPU.
        bits_per_weight: of the files' form.
        nbytes: bytes on the devices of this process.
        device: torch's home device.
    """

    def __init__(self, spec: LinearSpec, home: torch.device, held: Iterable[QuantMatrix]) -> None:
        """held: the matrices on this process' devices, at least one."""
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.stored_features = spec.out_features
        self.name = spec.key
        own = list(held)
        self.format: Format = own[0].format
        self.compute: Compute = own[0].compute
        weights = [matrix.in_features * matrix.out_features for matrix in own]
        bits = sum(w * m.bits_per_weight for w, m in zip(weights, own, strict=True))
        self.bits_per_weight = bits / sum(weights)
        self.nbytes = sum(matrix.nbytes for matrix in own)
        self.device = home

    @abstractmethod
    def matmul(self, x: Tensor, out: Tensor | None = None, *, invariant: bool | None = None) -> Tensor:
        """Multiply x [T, in] on the home device -> [T, out], in `out` if given.

        `invariant` is as for `QuantMatrix.matmul`.
        """

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return W float16 [in, out] on the CPU without padding columns. All processes call this, else PeerError."""


class Cut(ABC):
    """How the matrix of a linear is cut for several devices."""

    @abstractmethod
    def load(self, source: TensorSource, spec: LinearSpec, options: LinearOptions) -> ShardedMatrix:
        """Read the parts of this process' devices to them. Raises as `load_linear`."""
