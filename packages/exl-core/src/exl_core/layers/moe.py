"""A mixture of experts in place of the MLP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from exl_kernels.activation import activation as activate
from exl_kernels.linear import QuantMatrix
from exl_kernels.moe import ExpertRouter, expert_router

from ..architectures.base import Activation
from ..loading.checkpoint import TensorSource
from ..transfer import send
from .description import ExpertsDescription
from .linear import Linear, store_alike
from .mlp import FeedForward, GatedMLP, activated
from .norm import Norm
from .sublayer import OwnPass

if TYPE_CHECKING:
    from ..contracts import Adapter

__all__ = ["WHOLE_EXPERTS", "Expert", "ExpertSharding", "MoE", "SharedCalls", "chosen_experts", "sparse_mixture"]


def sparse_mixture(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Choose two experts by router logits [T, experts] as Phi-3.5-MoE does.

    Returns weights float32 and expert numbers int64, both [T, 2]. The first is the likeliest expert, weighted by a
    softmax over those within a relative distance of 2 * jitter; the second is chosen likewise among the others. The
    weights are not scaled to sum 1.
    """
    left = logits
    weights, indices = [], []
    for _ in range(2):
        highest, chosen = left.max(dim=-1, keepdim=True)
        far = (highest - logits) / logits.abs().clamp(min=highest) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, chosen))
        indices.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(indices, dim=-1)


def chosen_experts(logits: Tensor, chosen: int, normalize: bool, jitter: float | None) -> tuple[Tensor, Tensor]:
    """Return (weights float32, expert numbers int64), both [T, chosen], likeliest first, of router logits [T, experts].

    The arguments are those of `ExpertsDescription`.
    """
    if jitter is not None:
        return sparse_mixture(logits, jitter)
    weights, indices = logits.softmax(dim=-1).topk(chosen, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights, indices


@dataclass(frozen=True)
class Expert:
    """One gated MLP among many."""

    gate: Linear
    up: Linear
    down: Linear

    def __iter__(self) -> Iterator[Linear]:
        return iter((self.gate, self.up, self.down))


class ExpertSharding(Protocol):
    """Runs experts one after the other: all of them in this process, or some in others.

    Attributes:
        apart: they never share calls, since processes exchange the outputs of each.
    """

    apart: bool

    def outputs(
        self,
        mixture: MoE,
        h: Tensor,
        places: Sequence[Tensor],
        out: Tensor,
        loras: Sequence[Adapter],
        *,
        invariant: bool | None,
    ) -> None:
        """Fill `out` with the outputs of all experts.

        Args:
            mixture: the experts.
            h: [T, hidden].
            places: for each expert its rows of `out`, of which h has one for every `chosen`.
            out: [T * chosen, hidden], float32.
            loras: the adapters.
            invariant: as for `QuantMatrix.matmul`.
        """
        ...


class WholeExperts:
    """All experts in this process, each on its device."""

    apart = False

    def outputs(
        self,
        mixture: MoE,
        h: Tensor,
        places: Sequence[Tensor],
        out: Tensor,
        loras: Sequence[Adapter],
        *,
        invariant: bool | None,
    ) -> None:
        """See `ExpertSharding`."""
        for expert, rows in zip(mixture.experts, places, strict=True):
            if len(rows):
                x = send(h[rows // mixture.chosen], expert.gate.device)
                y = mixture.run_expert(expert, x, loras, invariant=invariant)
                out[rows] = send(y, out.device).float()


WHOLE_EXPERTS = WholeExperts()


class SharedCalls(OwnPass):
    """The pass of a mixture whose experts share calls (`execution/experts_pass.py`)."""

    @property
    @abstractmethod
    def on_gpu(self) -> bool:
        """Whether the calls are launches on a GPU."""

    @abstractmethod
    def shares(self, rows: int) -> bool:
        """Return whether the experts of so many batch-invariant rows share calls."""


class MoE(FeedForward):
    """inner(h) = sum over the chosen experts of p_e * down_e(act(gate_e(h)) * up_e(h)) [+ the shared expert's output].

    Probabilities are a softmax over all experts in float32. The `chosen` largest are kept and, if `normalize`, divided
    by their sum; with `jitter` they are those of `sparse_mixture`. The router's logits are float32 on a GPU too, since
    rounding them to half would choose other experts where two are nearly as likely. Each row's contributions are added
    from the likeliest expert to the least, so the result does not depend on the other rows of the batch.

    `inner` runs the experts one after the other: those with adapters or on several devices, and on a GPU experts of
    which some are float and others quantized. Others share calls (`execution/experts_pass.py`): one native call on the
    CPU; on a GPU launches that read on the device which experts few rows chose, or for prompts a call that dequantizes
    some experts at a time or sorts rows by expert (`exl_kernels.moe`). With batch-invariant matmuls all ways give
    bitwise identical results.
    """

    name = "MoEMLP"

    def __init__(
        self,
        key: str,
        layer_idx: int,
        norm: Norm | None,
        router: Linear,
        experts: Sequence[Expert],
        *,
        chosen: int,
        normalize: bool,
        jitter: float | None = None,
        activation: Activation,
        post: Norm | None = None,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        super().__init__(key, layer_idx, norm, post, activation)
        self.router = router
        self.experts = list(experts)
        store_alike(linear for expert in experts for linear in expert)
        self.chosen = chosen
        self.normalize = normalize
        self.jitter = jitter
        self.shared = shared
        self.shared_gate = shared_gate
        self.sharding: ExpertSharding = WHOLE_EXPERTS  # `execution/sharded/cutting.py` may give another one
        self._router: ExpertRouter | None = None

    def load(self, source: TensorSource, device: torch.device) -> None:
        """Read the weights. An error leaves the module unloaded."""
        self._router = None
        super().load(source, device)
        try:
            self.make_router()
        except BaseException:
            self.unload()
            raise

    def make_router(self) -> None:
        """Make the launch of the loaded router, on a GPU."""
        matrix = self.router.loaded_matrix
        self._router = None
        if isinstance(matrix, QuantMatrix) and matrix.device.type == "cuda":
            self._router = expert_router(matrix, self.chosen, self.normalize, self.jitter)

    def unload(self) -> None:
        """Drop the weights."""
        self._router = None
        super().unload()

    @property
    def capturable(self) -> bool:
        """Whether the pass of the loaded mixture shares launches on a GPU: else the host decides which experts run."""
        return isinstance(self.own_pass, SharedCalls) and self.own_pass.on_gpu

    def refusal_of_rows(self, rows: int) -> str | None:
        """Override `Module.refusal_of_rows`: the experts must share launches."""
        own = self.own_pass
        if self.capturable and isinstance(own, SharedCalls) and own.shares(rows):
            return None
        return f"{self.key} ({self.name}) decides on the host which experts take {rows} rows"

    def describe(self) -> ExpertsDescription:
        """Return the description of the half."""
        return ExpertsDescription(
            module=self,
            of=MoE,
            norm=self.norm,
            post=self.post,
            float_residual=self.float_residual,
            router=self.router,
            experts=tuple(map(tuple, self.experts)),
            chosen=self.chosen,
            normalize=self.normalize,
            jitter=self.jitter,
            activation=self.activation,
            shared=None if self.shared is None else self.shared.describe(),
            shared_gate=self.shared_gate,
            routing=self._router,
            apart=self.sharding.apart,
        )

    def submodules(self) -> Iterator[Linear]:
        """Yield the router, all experts' matrices, and those of the shared expert."""
        yield self.router
        # Matrix by matrix, so that files that hold all experts in one tensor are read once for each.
        for part in ("gate", "up", "down"):
            yield from (getattr(expert, part) for expert in self.experts)
        if self.shared is not None:
            yield from self.shared.submodules()
        if self.shared_gate is not None:
            yield self.shared_gate

    def inner(self, h: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None) -> Tensor:
        """Compute the weighted sum of the chosen experts, plus the shared expert: [T, hidden] -> [T, hidden]."""
        weights, indices = self.route(h, loras, invariant=invariant)
        parts = self._outputs(h, indices, loras, invariant)
        y = parts[:, 0] * weights[:, :1]
        for slot in range(1, self.chosen):
            y += parts[:, slot] * weights[:, slot : slot + 1]
        if self.shared is not None:
            y += self._shared(h, loras, invariant)
        return y.to(h.dtype)

    def route(
        self, h: Tensor, loras: Sequence[Adapter] = (), *, invariant: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (weights float32, expert numbers int64), both [T, chosen], likeliest first.

        On a GPU the router's kernel chooses, in the pass operator by operator, too: logits of torch would choose other
        experts where two are nearly as likely. The kernel's oracle is `exl_kernels.reference.experts`.
        """
        if self._router is not None and not self.router.adapted(loras):
            return self._router(h)
        logits = self.router.forward_precise(h, loras, invariant=invariant)
        return chosen_experts(logits, self.chosen, self.normalize, self.jitter)

    def _outputs(self, h: Tensor, indices: Tensor, loras: Sequence[Adapter], invariant: bool | None) -> Tensor:
        """Return unweighted outputs float32 [T, chosen, hidden]; every expert runs once, on the rows that chose it."""
        out = torch.empty((*indices.shape, self.experts[0].down.out_features), dtype=torch.float32, device=h.device)
        flat, order = indices.reshape(-1).sort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        groups, flat_out = torch.split(order, counts), out.view(-1, out.shape[-1])
        self.sharding.outputs(self, h, groups, flat_out, loras, invariant=invariant)
        return out

    def run_expert(
        self, expert: Expert, h: Tensor, loras: Sequence[Adapter], *, invariant: bool | None = None
    ) -> Tensor:
        """Run one expert on h [rows, hidden], on its device."""
        first = [linear.forward(h, loras, invariant=invariant) for linear in (expert.gate, expert.up)]
        return expert.down.forward(activated(first, self.activation), loras, invariant=invariant)

    def _shared(self, h: Tensor, loras: Sequence[Adapter], invariant: bool | None) -> Tensor:
        assert self.shared is not None
        y = self.shared.inner(h, loras, invariant=invariant).float()
        if self.shared_gate is None:
            return y
        return y * activate(self.shared_gate.forward_precise(h, loras, invariant=invariant), "sigmoid")
