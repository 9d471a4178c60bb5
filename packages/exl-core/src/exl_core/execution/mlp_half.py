"""The MLP of a layer as joined launches: gate and up (or up), activation, down and residual.

An activation without gate that the first matmul does not apply is a separate launch. Results are bitwise identical to
the module's.
"""

from __future__ import annotations

from typing import cast, get_args

from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.activation import gated_activation
from exl_kernels.linear.cuda import CudaQuantMatrix
from exl_kernels.linear.fused import Activation, FusedLinear, Packed

from ..layers import FeedForward, GatedMLP, PlainMLP, RMSNorm
from .adapted import MatmulAdapters, adapters_of, takes_adapters
from .batch import Step
from .half import JoinedHalf, Normed, joined, multiplied, multiply_apart

__all__ = ["MlpHalf"]


class MlpHalf(JoinedHalf):
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
        self._activation = cast(Activation, mlp.activation) if fuses else None
        """The activation of the first matmul; None where it is a launch behind it."""
        self.up_bare = joined(*linears)
        """The first matmul with neither norm nor activation, for adapters."""
        self.up_normed = joined(*linears, activation=self._activation)
        self.up = self.up_normed
        if self._own_norm is not None:
            self.up = joined(*linears, norm=self._own_norm, activation=self._activation)
        self._own_up = self.own_first(self.up, *linears, activation=self._activation)
        self.first_matmul = self.up_normed
        self.down = joined(mlp.down_proj)

    def join(self, rows: int) -> bool:
        """Return whether gate and up (or up) have a fused kernel for `rows` rows."""
        return self.up.joins(rows)  # down may run separately

    @property
    def matmuls(self) -> tuple[FusedLinear, FusedLinear]:
        """The matmuls of gate and up (or up), and of down."""
        return self.up, self.down

    def chains(self, rows: int) -> bool:
        """Return whether gate and up can also pack the input of down."""
        return self.plain and self.up.chains_to(self.down, rows)

    def run_chained(self, x: Tensor, packed: Packed | None, following: FusedLinear | None, step: Step) -> Packed | None:
        """Run norm, gate, up, activation, down and residual; see `JoinedHalf.run_chained`."""
        gated = self.up.chained(x if packed is None else packed, following=self.down)
        assert gated is not None
        return self.down.chained(gated, x, x, following)

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
        matmul, taken = self.first_of(self._own_up, self.up_normed, x, h)
        out, residual = self.result(x)
        if self._activation is not None:
            matmul.then(self.down, taken, out, residual)
        else:
            up = multiplied(matmul, taken, x)
            self.down(activate(up, self.mlp.activation, out=up), out, residual)
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
            inner = multiplied(*self.first_of(self._own_up, self.up_normed, x, h), x)
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
        inner = multiply_apart(self.up_normed, h)
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
