"""One matrix of the model, whatever format it is stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix

from ..errors import ModelStateError
from ..execution.sharded.matrix import SplitMatrix, load_split
from ..loading.checkpoint import TensorSource
from ..loading.linears import LinearOptions, LinearSpec, load_linear

if TYPE_CHECKING:
    from ..contracts import Adapter
    from ..execution.sharded.context import TensorParallel
    from ..execution.sharded.shares import Bounds

__all__ = ["Linear"]


class Linear:
    """y = (x @ W + bias) * prescale; W is [in, out]."""

    def __init__(self, spec: LinearSpec, options: LinearOptions) -> None:
        self.spec = spec
        self.options = options
        self.key = spec.key
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self.matrix: QuantMatrix | SplitMatrix | None = None
        self.cut: tuple[TensorParallel, Bounds] | None = None  # which outputs go to which device; None = all to one
        self.place: torch.device | None = None  # another device than the module's

    def load(self, source: TensorSource, device: torch.device) -> None:
        if self.cut is not None:
            self.matrix = load_split(source, self.spec, self.options, *self.cut)
        else:
            options = replace(self.options, device=str(self.place or device))
            self.matrix = load_linear(source, self.spec, options)

    def unload(self) -> None:
        self.matrix = None

    def is_quant(self) -> bool:
        """Whether the loaded matrix is EXL2 or GPTQ."""
        return self.loaded_matrix.format != "float"

    @property
    def loaded_matrix(self) -> QuantMatrix | SplitMatrix:
        """The loaded matrix, cut over devices or not. Raises ModelStateError before load()."""
        if self.matrix is None:
            raise ModelStateError(f"{self.key} is not loaded: call model.load() first")
        return self.matrix

    @property
    def quant(self) -> QuantMatrix:
        """The loaded matrix in one piece. Raises ModelStateError before load(), and where it is cut over devices."""
        matrix = self.loaded_matrix
        if isinstance(matrix, SplitMatrix):
            raise ModelStateError(f"{self.key} is cut over several devices: there is no one matrix of it")
        return matrix

    def fusable(self) -> bool:
        """Whether the matrix can be part of a fused block: on the CPU, in one piece, without padding columns."""
        if isinstance(self.matrix, SplitMatrix):
            return False
        return self.quant.device.type == "cpu" and self.quant.out_features == self.out_features

    @property
    def stored_features(self) -> int:
        """Outputs in the files: heads may have more than the vocabulary, quantized matrices are padded."""
        matrix = self.loaded_matrix
        return matrix.stored_features if isinstance(matrix, SplitMatrix) else matrix.out_features

    def weight_bytes(self) -> int:
        return 0 if self.matrix is None else self.matrix.nbytes

    def get_weight_tensor_dq(self) -> Tensor:
        """W float16 [in, out] as the file encodes it, rows in the model's (unpermuted) order, padding columns cut."""
        return self.loaded_matrix.dequantize()[:, : self.out_features].contiguous()

    def adapted(self, loras: Sequence[Adapter]) -> bool:
        """Whether any of `loras` changes this matrix: fused blocks, which know of none, must then step aside."""
        return any(self.key in lora.touched for lora in loras)

    def forward(self, x: Tensor, loras: Sequence[Adapter] = ()) -> Tensor:
        """x [T, in] -> [T, out] of its type (float32, on a GPU half); columns that pad the file's are cut off.

        Every adapter adds (x @ A @ B) * its scaling, in the order given.
        """
        y = self._matrix(loras).matmul(x)
        y = y if y.shape[-1] == self.out_features else y[..., : self.out_features].contiguous()
        return self._add_adapters(x, y, loras)

    def forward_into(self, x: Tensor, out: Tensor, loras: Sequence[Adapter] = ()) -> None:
        """The product written into `out` [T, columns >= out]; columns beyond `out_features` are left alone."""
        matrix = self._matrix(loras)
        if out.shape[-1] == matrix.out_features and matrix.out_features == self.out_features:
            matrix.matmul(x, out=out)
        else:
            whole = torch.empty((*x.shape[:-1], matrix.out_features), dtype=out.dtype, device=out.device)
            out[..., : self.out_features] = matrix.matmul(x, out=whole)[..., : self.out_features]
        self._add_adapters(x, out[..., : self.out_features], loras)

    def forward_precise(self, x: Tensor, loras: Sequence[Adapter] = ()) -> Tensor:
        """As `forward`, to float32 on a GPU too: for logits that choose experts, where half's rounding would decide.
        float matrices are summed so that a row's result does not depend on the number of rows."""
        matrix = self._matrix(loras)
        if isinstance(matrix, CudaFloatMatrix):
            y = matrix.matmul_precise(x)
        else:
            y = matrix.matmul(x, out=x.new_empty((*x.shape[:-1], matrix.out_features), dtype=torch.float32))
        return self._add_adapters(x, y[..., : self.out_features].contiguous(), loras)

    def _matrix(self, loras: Sequence[Adapter]) -> QuantMatrix | SplitMatrix:
        """The matrix that is multiplied by: the first replacement an adapter brings, else the model's own."""
        for lora in loras:
            replacement = lora.replacements.get(self.key)
            if replacement is not None:
                return replacement
        return self.loaded_matrix

    def _add_adapters(self, x: Tensor, y: Tensor, loras: Sequence[Adapter]) -> Tensor:
        for lora in loras:
            pair = lora.pairs.get(self.key)
            if pair is not None:
                pair.add_to(x, y)
        return y

    @property
    def device(self) -> torch.device:
        """Where x is taken and y is given."""
        return self.loaded_matrix.device

    def parts_for(self, loras: Sequence[Adapter]) -> SplitMatrix | None:
        """The matrix, if it is cut over devices and no adapter changes it: results may stay where they are."""
        return self.matrix if isinstance(self.matrix, SplitMatrix) and not self.adapted(loras) else None
