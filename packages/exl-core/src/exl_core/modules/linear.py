"""One matrix of the model, whatever format it is stored in."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix

from ..errors import ModelStateError
from ..loading.checkpoint import TensorSource
from ..loading.linears import LinearOptions, LinearSpec, load_linear

__all__ = ["Linear"]


class Linear:
    """y = (x @ W + bias) * prescale; W is [in, out]."""

    def __init__(self, spec: LinearSpec, options: LinearOptions) -> None:
        self.spec = spec
        self.options = options
        self.key = spec.key
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self.matrix: QuantMatrix | None = None

    def load(self, source: TensorSource, device: torch.device) -> None:
        self.matrix = load_linear(source, self.spec, replace(self.options, device=str(device)))

    def unload(self) -> None:
        self.matrix = None

    def is_quant(self) -> bool:
        """Whether the loaded matrix is EXL2 or GPTQ."""
        return self.quant.format != "float"

    @property
    def quant(self) -> QuantMatrix:
        """The loaded matrix. Raises ModelStateError before load()."""
        if self.matrix is None:
            raise ModelStateError(f"{self.key} is not loaded: call model.load() first")
        return self.matrix

    def fusable(self) -> bool:
        """Whether the matrix can be part of a fused block: on the CPU, without padding columns."""
        return self.quant.device.type == "cpu" and self.quant.out_features == self.out_features

    def weight_bytes(self) -> int:
        return 0 if self.matrix is None else self.matrix.nbytes

    def get_weight_tensor_dq(self) -> Tensor:
        """W float16 [in, out] as the file encodes it, rows in the model's (unpermuted) order, padding columns cut."""
        return self.quant.dequantize()[:, : self.out_features].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of its type (float32, on a GPU half); columns that pad the file's are cut off."""
        y = self.quant.matmul(x)
        return y if y.shape[-1] == self.out_features else y[..., : self.out_features].contiguous()

    def forward_into(self, x: Tensor, out: Tensor) -> None:
        """The product written into `out` [..., columns >= out]; columns beyond `out_features` are left alone."""
        if out.shape[-1] == self.quant.out_features and self.quant.out_features == self.out_features:
            self.quant.matmul(x, out=out)
        else:
            whole = torch.empty((*x.shape[:-1], self.quant.out_features), dtype=out.dtype, device=out.device)
            out[..., : self.out_features] = self.quant.matmul(x, out=whole)[..., : self.out_features]

    @property
    def device(self) -> torch.device:
        return self.quant.device
