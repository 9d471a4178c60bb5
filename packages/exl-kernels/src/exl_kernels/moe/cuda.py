"""A mixture of experts on a GPU: routing rows to experts, and the weighted sum of the experts' results.

In shared launches nothing is read back: the chosen experts stay on the device, where every launch reads its work, so
calls can be captured in a CUDA graph. A row's result is bitwise identical to that of one expert after the other
(`QuantMatrix.matmul` and `gated_activation`), and does not depend on the other rows. Prompts with many rows for each
expert run on dequantized experts, or on one float expert after the other, unless the call asks for batch-invariant
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .. import _native
from ..activation import ActivationKind, gated_activation
from ..cuda_ops import check_operand, launch_on
from ..device import row_invariant
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..linear.cuda import CudaFloatMatrix, CudaQuantMatrix
from ..linear.fused import FusedNorm
from ..linear.matrix import QuantMatrix
from ..linear.planned import KEPT_PLANS, blocks_of
from ..selection import LIMITS, RouterPlan, refusal_of_experts
from .dequantized import experts_at_once, plan_padded

__all__ = ["ExpertRouter", "GroupedExperts", "expert_router", "most_scratch_bytes", "why_apart"]

Expert = tuple[QuantMatrix, QuantMatrix, QuantMatrix]
"""gate, up and down."""

most_scratch_bytes = _native.CudaExperts.most_scratch_bytes
"""(*, rows, chosen, experts, hidden, width) -> the most scratch memory, in bytes, of the shared launches of a call of
`rows` rows with `chosen` of `experts` experts each; `width` features are between gate, up and down."""

KEPT_ARRIVALS = 64
"""Rows of a call whose counters a router keeps, zero between calls. A call of more rows makes its own."""


def why_apart(experts: Sequence[Expert], activation: ActivationKind, chosen: int = 1) -> str | None:
    """Return why `GroupedExperts` does not support these experts; None where it does.

    Args:
        experts: gate, up and down of each expert.
        activation: kind of activation.
        chosen: experts a row.
    """
    kinds = (CudaQuantMatrix, CudaFloatMatrix)
    for number, parts in enumerate(experts):
        for matrix in parts:
            name = matrix.name or f"a matrix of expert {number}"
            if not isinstance(matrix, kinds):
                return f"{name} is not on a GPU"
            if isinstance(matrix, CudaFloatMatrix) != isinstance(experts[0][0], CudaFloatMatrix):
                return f"{name} is stored in another format than {experts[0][0].name or 'gate of expert 0'}"
    if len({matrix.device for parts in experts for matrix in parts}) > 1:
        return "the experts are on several GPUs"
    refusal = refusal_of_experts(activation, chosen)
    if refusal is not None:
        return refusal
    try:
        _native_experts(experts, activation)
    except ValueError as error:
        return str(error)
    return None


def _native_experts(experts: Sequence[Expert], activation: str) -> _native.CudaExperts:
    if experts and isinstance(experts[0][0], CudaFloatMatrix):
        floats = [[cast(CudaFloatMatrix, matrix)._native_float for matrix in parts] for parts in experts]
        return _native.CudaExperts(floats, activation)
    return _native.CudaExperts([[cast(CudaQuantMatrix, m)._cuda for m in parts] for parts in experts], activation)


class ExpertRouter:
    """The experts of each row by a float matrix on a GPU.

    Logits (h @ W + bias) * prescale are summed in float64 and rounded to float32. A softmax over all experts gives the
    weights of the `chosen` likeliest; ties go to the lower number. With `normalize` the weights are divided by their
    sum. With `jitter` each next expert is weighted by a softmax over those within a relative distance of 2 * jitter
    from it, without the experts before it.

    Args:
        matrix: the router's matrix.
        chosen: experts a row.
        normalize: scale the weights to sum 1.
        jitter: sparse mixing as in Phi-3.5-MoE, or None.

    Raises:
        ShapeError: no kernel takes so many features or experts; `expert_router` returns None instead.
    """

    most_features: int = _native.ExpertRouter.most_hidden

    def __init__(self, matrix: CudaFloatMatrix, chosen: int, normalize: bool, jitter: float | None = None) -> None:
        refusal = _refusal_of_router(matrix, chosen)
        if refusal is not None:
            raise ShapeError(refusal)
        self.chosen, self.experts, self.hidden = chosen, matrix.out_features, matrix.in_features
        weight, bias = matrix.stored()
        self._native = _native.ExpertRouter(
            weight, bias, prescale=matrix.prescale, chosen=chosen, normalize=normalize, jitter=jitter
        )
        self._arrivals = torch.zeros(KEPT_ARRIVALS, dtype=torch.int32, device=matrix.device)
        self._plans: dict[tuple[object, ...], tuple[RouterPlan, FusedNorm | None]] = {}  # with the norms that keys name

    def plan(self, rows: int, norm: FusedNorm | None = None) -> RouterPlan:
        """Return the plan of `rows` rows, as `selection.Card.plan_router`; its launch applies `norm` where `norms`."""
        key = (rows, None) if norm is None else (rows, id(norm.weight), norm.eps, norm.offset, norm.layer)
        kept = self._plans.get(key)
        if kept is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            prologue = None
            if norm is not None:
                prologue = _native.NormPrologue(norm.weight, norm.eps, norm.offset, layer=norm.layer)
            kept = self._plans[key] = self._native.plan(rows, prologue), norm
        return kept[0]

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Route h [T, hidden] float16, contiguous, to weights float32 and expert numbers int64, both [T, chosen].

        Raises:
            ShapeError, DTypeError: h does not fit.
        """
        return self._route(h, self.plan(h.shape[0]))

    def norm_and_route(self, x: Tensor, norm: FusedNorm) -> tuple[Tensor, Tensor, Tensor]:
        """Return the RMS norm of x [T, hidden], bitwise that of `norm.rms_norm`, and its route, by one launch.

        Raises:
            ShapeError, DTypeError: x does not fit, or the `plan` of the norm does not apply it.
        """
        plan = self.plan(x.shape[0], norm)
        if not plan.norms:
            raise ShapeError(f"the router takes RMS norms of {self.hidden} features in float32, aligned to 16 bytes")
        h = torch.empty_like(x)
        weights, ids = self._route(x, plan, h)
        return h, weights, ids

    def _route(self, h: Tensor, plan: RouterPlan, normed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_operand("h", h)
        if h.dtype != torch.float16 or h.device != self._arrivals.device:
            raise DTypeError(f"h is {h.dtype} on {h.device}: expected float16 on {self._arrivals.device}")
        if h.dim() != 2 or h.shape[1] != self.hidden:
            raise ShapeError(f"h is {tuple(h.shape)}: expected [rows, {self.hidden}]")
        rows, scratch = h.shape[0], plan.scratch_rows
        ids = torch.empty((rows, self.chosen), dtype=torch.int64, device=h.device)
        weights = torch.empty((rows, self.chosen), dtype=torch.float32, device=h.device)
        if not rows:
            return weights, ids
        logits = torch.empty((scratch, self.experts), dtype=torch.float32, device=h.device)
        arrivals = self._arrivals
        if scratch > arrivals.shape[0]:
            arrivals = torch.zeros(scratch, dtype=torch.int32, device=h.device)
        h = h if h.data_ptr() % 16 == 0 else h.clone()
        self._native.route(
            plan,
            h,
            logits=logits,
            arrivals=arrivals,
            ids=ids,
            weights=weights,
            launch=launch_on(h),
            normed=normed,
        )
        return weights, ids


def _refusal_of_router(matrix: QuantMatrix, chosen: int) -> str | None:
    return _native.ExpertRouter.refusal(
        hidden=matrix.in_features,
        experts=matrix.out_features,
        chosen=chosen,
        quantized=not isinstance(matrix, CudaFloatMatrix),
    )


def expert_router(
    matrix: QuantMatrix, chosen: int, normalize: bool, jitter: float | None = None
) -> ExpertRouter | None:
    """Return the kernel of a router's matrix; None where no kernel routes (`RouterPlan.refused`).

    Args:
        matrix: the router's matrix.
        chosen: experts a row.
        normalize: scale the weights to sum 1.
        jitter: sparse mixing as in Phi-3.5-MoE, or None.
    """
    if _refusal_of_router(matrix, chosen) is not None:
        return None
    return ExpertRouter(cast(CudaFloatMatrix, matrix), chosen, normalize, jitter)


class GroupedExperts:
    """The gated MLPs of a layer: expert(h) = down(act(gate(h)) * up(h)), all EXL2, all GPTQ or all of float matrices.

    Args:
        experts: gate, up and down of each expert, on one GPU.
        activation: kind of activation.

    Raises:
        UnsupportedError: `why_apart` names a reason.
    """

    dtype = torch.float16
    joins_shared = False

    def __init__(self, experts: Sequence[Expert], activation: ActivationKind) -> None:
        why = why_apart(experts, activation)
        if why is not None:
            raise UnsupportedError(f"the experts cannot share launches: {why}")
        self.device = experts[0][0].device
        self.hidden = experts[0][0].in_features
        self._activation = activation
        self._experts = tuple(experts)
        self._native = _native_experts(experts, activation)
        self._table = torch.frombuffer(bytearray(self._native.table()), dtype=torch.uint8).to(self.device)
        self._most_chosen = self._native.most_chosen
        self._plans: dict[tuple[int, int, bool], _native.ExpertsPlan] = {}
        self._numbers = torch.arange(self._native.count + 1, dtype=torch.int16, device=self.device)
        # The table must be in place before a kernel that starts early reads it (programmatic dependent launch).
        torch.cuda.current_stream(self.device).synchronize()

    def shares(self, rows: int, chosen: int, invariant: bool | None) -> bool:
        """Return whether a call of `rows` rows with `chosen` experts each is faster than one expert after the other.

        invariant: rows do not depend on one another, and the call can be captured.
        """
        return self.plan(rows, chosen, invariant).shares

    def plan(self, rows: int, chosen: int, invariant: bool | None) -> _native.ExpertsPlan:
        """Return the plan of a call of `rows` rows with `chosen` experts each, as `selection.Card.plan_experts`.

        invariant: as for the call.
        """
        key = rows, chosen, row_invariant() if invariant is None else invariant
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._native.plan(*key)
        return plan

    def __call__(
        self,
        h: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        shared: Tensor | None = None,
        shared_weights: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        invariant: bool | None = None,
    ) -> Tensor:
        """Compute sum over c of weights[:, c] * expert ids[:, c] of h, + shared * shared_weights, + residual.

        The sum is in float32 and in that order, and is rounded to a half before the residual is added. A call of many
        rows waits for the GPU, and rows may depend on one another, unless `invariant`.

        Args:
            h: [T, hidden] float16, contiguous.
            weights: float32 [T, chosen], chosen at most 1,024.
            ids: int64 [T, chosen], valid expert numbers, distinct for each row; otherwise the result is undefined.
            shared: like h, the shared expert's result, or None.
            shared_weights: float32 [T] or [T, 1]; None for ones.
            residual: like h, or None.
            out: like h, may be residual.
            invariant: rows are batch-invariant; None: as `device.row_invariant` says.

        Raises:
            ShapeError, DTypeError: an operand does not fit.
        """
        if h.dim() != 2 or h.shape[1] != self.hidden or weights.shape != ids.shape or ids.shape[:1] != h.shape[:1]:
            raise ShapeError(
                f"h is {tuple(h.shape)}, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}: expected "
                f"[rows, {self.hidden}] and twice [rows, chosen]"
            )
        rows, chosen = ids.shape
        if not 1 <= chosen <= self._most_chosen:
            raise ShapeError(f"{chosen} experts a row: expected 1 to {self._most_chosen}")
        out = torch.empty_like(h) if out is None else out
        given = (("h", h), ("shared", shared), ("residual", residual), ("out", out))
        for name, operand in ((name, operand) for name, operand in given if operand is not None):
            if operand.dtype != torch.float16 or operand.device != self.device or not operand.is_contiguous():
                raise DTypeError(
                    f"{name} is {operand.dtype} on {operand.device}: expected contiguous float16 on {self.device}"
                )
            if operand.shape != h.shape:
                raise ShapeError(f"{name} is {tuple(operand.shape)}: expected {tuple(h.shape)}, as h")
        plan = self.plan(rows, chosen, invariant)
        if plan.dequantizes or plan.sorts:
            parts_of = self._sorted_parts if plan.sorts else self._dequantized_parts
            for begin in range(0, rows, LIMITS.grid_rows):  # the weighted sum has a block a row
                some = slice(begin, begin + LIMITS.grid_rows)
                parts, places = parts_of(h[some], ids[some])
                self._native.combine(
                    parts,
                    places=places,
                    weights=weights[some],
                    out=out[some],
                    launch=launch_on(h),
                    shared=None if shared is None else shared[some],
                    shared_weights=None if shared_weights is None else shared_weights[some],
                    residual=None if residual is None else residual[some],
                )
            return out
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=self.device)
        for some in blocks_of(rows, plan.rows):
            self._native.run(
                self._table,
                h[some],
                ids=ids[some],
                weights=weights[some],
                scratch=scratch,
                out=out[some],
                launch=launch_on(h),
                shared=None if shared is None else shared[some],
                shared_weights=None if shared_weights is None else shared_weights[some],
                residual=None if residual is None else residual[some],
            )
        return out

    def _sorted_parts(self, h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the experts of each row, sorted by expert, with a matmul of each matrix.

        Waits for the GPU: the host needs the number of rows of each expert.

        Returns:
            results [T * chosen, hidden], and int32 [T, chosen], the row of each choice's result there.
        """
        by_expert, order = ids.flatten().to(torch.int16).sort(stable=True)
        begins = torch.searchsorted(by_expert, self._numbers)
        pairs = order.shape[0]
        places = torch.empty(ids.shape, dtype=torch.int32, device=h.device)
        places.view(-1)[order] = torch.arange(pairs, dtype=torch.int32, device=h.device)
        x = h.index_select(0, order // ids.shape[1])
        bounds = begins.tolist()
        runs = [
            (expert, slice(begin, end))
            for expert, begin, end in zip(self._experts, bounds, bounds[1:], strict=False)
            if begin < end
        ]
        inner, up, parts = (h.new_empty(pairs, size) for size in (self._native.width, self._native.width, self.hidden))
        for (first, second, _), some in runs:
            first.matmul(x[some], inner[some], invariant=False)
            second.matmul(x[some], up[some], invariant=False)
        gated_activation(inner, up, self._activation, out=inner)
        for (_, _, down), some in runs:
            down.matmul(inner[some], parts[some], invariant=False)
        return parts, places

    def _dequantized_parts(self, h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the experts of each row with dequantized matrices.

        Waits for the GPU: the host needs the number of rows of each expert.

        Returns:
            results [padded rows, hidden], and int32 [T, chosen], the row of each choice's result there.
        """
        hidden, width, chosen = self.hidden, self._native.width, ids.shape[1]
        # Keys of two bytes are sorted in two passes.
        by_expert, order = ids.flatten().to(torch.int16).sort(stable=True)
        begins = torch.searchsorted(by_expert, self._numbers)
        capacity = experts_at_once(hidden, width)
        memory = h.new_empty(min(capacity, self._native.count) * hidden * width)
        places = torch.empty(ids.shape, dtype=torch.int32, device=h.device)
        launch = launch_on(h)
        # The GPU waits from this copy to the next launch: what that launch does not need comes after it.
        plan = plan_padded(begins.cpu(), capacity, pinned=True)
        table = plan.memory.to(h.device, non_blocking=True)
        numbers = plan.numbers(table)

        def dequantized(first: int, count: int, part: int) -> Tensor:
            """Return gate (0), up (1) or down (2) of some experts, in the same memory."""
            shape = (width, hidden) if part == 2 else (hidden, width)
            into = memory[: count * hidden * width].view(count, *shape)
            some = numbers[first : first + count]
            self._native.dequantize(self._table, numbers=some, part=part, out=into, launch=launch)
            return into

        into = dequantized(0, plan.groups[0].experts, 0)
        total = sum(group.experts * group.rows for group in plan.groups)
        rows_of = torch.empty(total, dtype=torch.int32, device=h.device)
        self._native.pad(plan.rows(table), order, begins, chosen=chosen, rows=rows_of, places=places, launch=launch)
        parts = h.new_empty(total, hidden)
        expert = begin = 0
        for group in plan.groups:
            count, rows = group.experts, group.rows
            some = slice(begin, begin + count * rows)
            x = h.index_select(0, rows_of[some]).view(count, rows, hidden)
            if expert:
                into = dequantized(expert, count, 0)
            gate = torch.bmm(x, into)
            into = dequantized(expert, count, 1)
            gated_activation(gate, torch.bmm(x, into), self._activation, out=gate)
            torch.bmm(gate, dequantized(expert, count, 2), out=parts[some].view(count, rows, hidden))
            del x, gate  # before the next group allocates its own
            expert, begin = expert + count, some.stop
        return parts, places

    def dequantize(self, experts: Tensor, part: int, out: Tensor) -> Tensor:
        """Write gate (0), up (1) or down (2) of some experts into `out`, bitwise as the format defines it.

        Args:
            experts: int64 [n], expert numbers, on the GPU.
            part: the matrix.
            out: float16 [n, in_features, out_features].

        Returns:
            out.
        """
        self._native.dequantize(self._table, numbers=experts, part=part, out=out, launch=launch_on(out))
        return out
