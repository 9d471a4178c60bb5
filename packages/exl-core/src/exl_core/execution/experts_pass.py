"""A loaded mixture whose experts share calls: norm and router, the chosen experts, the shared expert and the residual.

Where a kernel routes the rows, its launch also norms them. Steps whose rows or adapters the shared calls do not take
run operator by operator. Results are bitwise identical.
"""

from __future__ import annotations

from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.moe import ExpertGroup

from ..layers import MoE
from ..layers.description import ExpertsDescription
from ..layers.moe import SharedCalls
from ..layers.norm import RMSNorm, rms_of
from ..layers.sublayer import SubLayer
from .batch import Step
from .half import input_norm

__all__ = ["ExpertsTogether", "router_norm"]


def router_norm(about: ExpertsDescription) -> RMSNorm | None:
    """Return the norm that a router's launch on a GPU may apply: it takes a hidden state of halves."""
    return None if about.float_residual else rms_of(about.norm)


class ExpertsTogether(SharedCalls):
    """A mixture with its experts in one call.

    Args:
        about: the description of the mixture.
        grouped: its experts.
    """

    def __init__(self, about: ExpertsDescription, grouped: ExpertGroup) -> None:
        self._about, self._grouped = about, grouped
        routing, norm = about.routing, input_norm(router_norm(about))
        self._norming = None if routing is None or norm is None else (routing, norm)

    @property
    def on_gpu(self) -> bool:
        """Whether the calls are launches on a GPU."""
        return self._grouped.device.type == "cuda"

    def shares(self, rows: int) -> bool:
        """Return whether the experts of so many batch-invariant rows share calls."""
        return self._grouped.shares(rows, self._about.chosen, True)

    def run(self, half: SubLayer, x: Tensor, step: Step) -> Tensor:
        """Run x [T, hidden] in place; by operators where experts have adapters or do not share calls for T rows."""
        assert isinstance(half, MoE), "only a mixture has such a description"
        if not self._takes(half, x, step):
            return half.forward_by_operator(x, step)
        grouped, loras, invariant = self._grouped, step.loras, step.invariant
        h, weights, ids = self._routed(half, x, step)
        shared = gate = None
        if half.shared is not None and not (grouped.joins_shared and not _adapted(half.shared, step)):
            shared = half.shared.inner(h, loras, invariant=invariant)
        if half.shared_gate is not None:
            gate = activate(half.shared_gate.forward_precise(h, loras, invariant=invariant), "sigmoid")
        residual = x if half.post is None and x.dtype == grouped.dtype else None
        y = grouped(
            h, weights, ids, shared=shared, shared_weights=gate, residual=residual, out=residual, invariant=invariant
        )
        return half.added(x, y) if residual is None else y

    def _takes(self, half: MoE, x: Tensor, step: Step) -> bool:
        """Return whether the experts share a call for the rows of x and the adapters of the step."""
        if half.norm is None and x.dtype != self._grouped.dtype:
            return False
        if not self._grouped.shares(x.shape[0], self._about.chosen, step.invariant):
            return False
        return not step.loras or not any(linear.adapted(step.loras) for expert in half.experts for linear in expert)

    def _routed(self, half: MoE, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed x, the weights of the chosen experts and their numbers."""
        if self._norming is not None and not half.router.adapted(step.loras):
            routing, norm = self._norming
            if routing.plan(x.shape[0], norm).norms:
                return routing.norm_and_route(x, norm)
        h = half.normed(x)
        return h, *half.route(h, step.loras, invariant=step.invariant)


def _adapted(mlp: SubLayer, step: Step) -> bool:
    return any(linear.adapted(step.loras) for linear in mlp.submodules())
