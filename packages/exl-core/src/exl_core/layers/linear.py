"""One matrix of the model, in any storage format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.linear import QuantMatrix
from exl_kernels.linear.cuda import CudaFloatMatrix

from ..errors import ModelStateError
from ..loading.checkpoint import TensorSource
from ..loading.linears import LinearOptions, LinearSpec, StoredAlike, load_linear
from .matrix import Cut, ShardedMatrix

if TYPE_CHECKING:
    from ..contracts import Adapter

__all__ = ["Linear", "store_alike"]


class Linear:
    """y = (x @ W + bias) * prescale; W is [in, out]."""

    def __init__(self, spec: LinearSpec, options: LinearOptions) -> None:
        self.spec = spec
        self.options = options
        self.key = spec.key
        self.in_features = spec.in_features
        self.out_features = spec.out_features
        self.matrix: QuantMatrix | ShardedMatrix | None = None
        self.cut: Cut | None = None  # how the matrix is cut for several devices; None: whole on one
        self.place: torch.device | None = None  # another device than the module's
        self.together: StoredAlike | None = None  # the matrices that one launch may take, this one included

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read, check and repack the matrix. Raises as `load_linear`."""
        place = self.place or device
        options = replace(self.stored(source) if self.cut or place.type == "cuda" else self.options, device=str(place))
        if self.cut is not None:
            self.matrix = self.cut.load(source, self.spec, options)
        else:
            self.matrix = load_linear(source, self.spec, options)

    def stored(self, source: TensorSource) -> LinearOptions:
        """Return the options with which the matrix is stored on a GPU: alike for all that one launch may take."""
        fine = self.together is not None and self.together.fine_scales(source)
        return replace(self.options, fine_scales=fine)

    def unload(self) -> None:
        """Drop the matrix."""
        self.matrix = None

    def is_quant(self) -> bool:
        """Return whether the loaded matrix is EXL2 or GPTQ."""
        return self.loaded_matrix.format != "float"

    @property
    def loaded_matrix(self) -> QuantMatrix | ShardedMatrix:
        """The loaded matrix, sharded over devices or not. Raises ModelStateError before load()."""
        if self.matrix is None:
            raise ModelStateError(f"{self.key} is not loaded: call model.load() first")
        return self.matrix

    @property
    def quant(self) -> QuantMatrix:
        """The loaded matrix in one piece.

        Raises ModelStateError before load(), and where it is sharded over devices.
        """
        matrix = self.loaded_matrix
        if isinstance(matrix, ShardedMatrix):
            raise ModelStateError(f"{self.key} is sharded over several devices: it has no single matrix")
        return matrix

    @property
    def stored_features(self) -> int:
        """Number of outputs in the files: heads may have more than the vocabulary, quantized matrices are padded."""
        matrix = self.loaded_matrix
        return matrix.stored_features if isinstance(matrix, ShardedMatrix) else matrix.out_features

    def weight_bytes(self) -> int:
        """Return the bytes of the loaded matrix."""
        return 0 if self.matrix is None else self.matrix.nbytes

    def get_weight_tensor_dq(self) -> Tensor:
        """Return W float16 [in, out] as the file encodes it, in the model's row order, without padding columns."""
        return self.loaded_matrix.dequantize()[:, : self.out_features].contiguous()

    def adapted(self, loras: Sequence[Adapter]) -> bool:
        """Return whether any of `loras` changes this matrix."""
        return any(self.key in lora.touched for lora in loras)

    def forward(self, x: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None) -> Tensor:
        """Multiply x [T, in] -> [T, out] of its type (float32, on a GPU half), without the file's padding columns.

        Every adapter adds (x @ A @ B) * its scaling, in the given order. `invariant` is as for `QuantMatrix.matmul`.
        """
        y = self._matrix(loras).matmul(x, invariant=invariant)
        y = y if y.shape[-1] == self.out_features else y[..., : self.out_features].contiguous()
        return self._add_adapters(x, y, loras, invariant)

    def forward_into(
        self, x: Tensor, out: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None
    ) -> None:
        """Write the result into `out` [T, columns >= out]; columns beyond `out_features` are not changed."""
        matrix = self._matrix(loras)
        if out.shape[-1] == matrix.out_features and matrix.out_features == self.out_features:
            matrix.matmul(x, out=out, invariant=invariant)
        else:
            whole = torch.empty((*x.shape[:-1], matrix.out_features), dtype=out.dtype, device=out.device)
            out[..., : self.out_features] = matrix.matmul(x, out=whole, invariant=invariant)[..., : self.out_features]
        self._add_adapters(x, out[..., : self.out_features], loras, invariant)

    def forward_precise(self, x: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None) -> Tensor:
        """Multiply as `forward`, to float32 on a GPU too, since half's rounding could change the choice of experts.

        Float matrices are summed so that a row's result does not depend on the number of rows.
        """
        matrix = self._matrix(loras)
        if isinstance(matrix, CudaFloatMatrix):
            y = matrix.matmul_precise(x)
        else:
            y = x.new_empty((*x.shape[:-1], matrix.out_features), dtype=torch.float32)
            matrix.matmul(x, out=y, invariant=invariant)
        return self._add_adapters(x, y[..., : self.out_features].contiguous(), loras, invariant)

    def _matrix(self, loras: Sequence[Adapter]) -> QuantMatrix | ShardedMatrix:
        """Return the matrix to multiply by: an adapter's first replacement, else the model's own."""
        for lora in loras:
            replacement = lora.replacements.get(self.key)
            if replacement is not None:
                return replacement
        return self.loaded_matrix

    def _add_adapters(self, x: Tensor, y: Tensor, loras: Sequence[Adapter], invariant: bool | None) -> Tensor:
        for lora in loras:
            pair = lora.pairs.get(self.key)
            if pair is not None:
                pair.add_to(x, y, invariant=invariant)
        return y

    @property
    def device(self) -> torch.device:
        """Device of inputs and results."""
        return self.loaded_matrix.device


def store_alike(linears: Iterable[Linear]) -> None:
    """Have these matrices stored alike on a GPU, so that one launch may take them."""
    found = list(linears)
    together = StoredAlike(linear.spec for linear in found)
    for linear in found:
        linear.together = together
