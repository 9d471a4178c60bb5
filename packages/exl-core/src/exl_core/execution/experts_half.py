"""The steps of a mixture: norm and router; the chosen experts in shared launches; the shared expert and the residual.

Where a kernel routes the rows, its launch also norms them. Experts that do not share launches for a number of rows run
as their module's own pass. Results are bitwise identical to the module's.
"""

from __future__ import annotations

from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.moe import ExpertGroup

from ..layers.description import ExpertsDescription
from ..layers.mlp import activated
from ..layers.moe import chosen_experts
from ..layers.norm import RMSNorm, rms_of
from .batch import Step
from .half import NO_PROLOGUE, Half, HalfInput, NextPrologue, OutputTokens, input_norm, last_rows
from .operators import Operators

__all__ = ["ExpertsHalf", "router_norm"]


class ExpertsHalf(Half):
    """Norm and router, experts in shared launches, shared expert and residual."""

    def __init__(self, about: ExpertsDescription) -> None:
        self.module, self.about = about.module, about
        self._router_norm = input_norm(router_norm(about))

    def takes_adapters(self, step: Step) -> bool:
        """Return whether the adapters of the step change none of the matrices."""
        return not any(linear.adapted(step.loras) for linear in self.module.submodules())

    def run(
        self,
        x: Tensor,
        h: HalfInput,
        step: Step,
        ops: Operators,
        next_prologue: NextPrologue = NO_PROLOGUE,
        output_tokens: OutputTokens = "all",
    ) -> tuple[Tensor, HalfInput]:
        """Run the half; see `Half.run`. It has no matmuls that `ops` could join."""
        grouped = self._grouped_for(x, step)
        x = self.module.forward(x, step) if grouped is None else self._together(x, grouped, step)
        return last_rows(x, step.batch_size) if output_tokens == "last" else x, None

    def _grouped_for(self, x: Tensor, step: Step) -> ExpertGroup | None:
        """Return the experts in shared launches, if these take so many rows of the type of x, or of its norm."""
        about, grouped = self.about, self.about.grouped
        if grouped is None or (about.norm is None and x.dtype != grouped.dtype):
            return None
        return grouped if grouped.shares(x.shape[0], about.chosen, step.invariant) else None

    def _together(self, x: Tensor, grouped: ExpertGroup, step: Step) -> Tensor:
        """Run the half with the experts in shared launches, which also add x where nothing is in between."""
        about, invariant = self.about, step.invariant
        into = x if about.post is None and x.dtype == grouped.dtype else None
        h, weights, ids = self._routed(x, step)
        shared = gate = None
        if about.shared is not None and not grouped.joins_shared:
            features = activated(
                [linear.forward(h, invariant=invariant) for linear in about.shared.first], about.shared.activation
            )
            shared = about.shared.last.forward(features, invariant=invariant)
        if about.shared_gate is not None:
            gate = activate(about.shared_gate.forward_precise(h, invariant=invariant), "sigmoid")
        y = grouped(h, weights, ids, shared=shared, shared_weights=gate, residual=into, out=into, invariant=invariant)
        if into is not None:
            return y
        return x.add_(y if about.post is None else about.post.apply(y.to(x.dtype)))

    def _routed(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed x, the weights of the chosen experts and their numbers."""
        about, norm = self.about, self._router_norm
        routing = about.routing
        if routing is not None and norm is not None and routing.plan(x.shape[0], norm).norms:
            return routing.norm_and_route(x, norm)
        h = x if about.norm is None else about.norm.forward(x)
        if routing is not None:
            return h, *routing(h)
        logits = about.router.forward_precise(h, invariant=step.invariant)
        return h, *chosen_experts(logits, about.chosen, about.normalize, about.jitter)


def router_norm(about: ExpertsDescription) -> RMSNorm | None:
    """Return the norm that a router's launch on a GPU may apply: it takes a hidden state of halves."""
    return None if about.float_residual else rms_of(about.norm)
