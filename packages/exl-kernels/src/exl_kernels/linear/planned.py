"""The answers of a matmul's plans, for loaded matrices (`fused.FusedLinear`) and for shapes alone (`ShapedMatmul`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch

from .. import _native
from ..device import rows_are_invariant
from ..selection import Card, MatrixShape, Selection

__all__ = ["KEPT_PLANS", "PlannedMatmul", "ShapedMatmul", "blocks_of"]

KEPT_PLANS = 256
"""Most plans that a matmul keeps; prompts have any number of rows."""


class PlannedMatmul(ABC):
    """A batch-invariant matmul of one to three matrices, whose plans decide how callers launch it.

    Attributes:
        in_features: columns of x.
        out_features: columns of the result.
        device: the GPU; "meta" for shapes.
        is_quantized: all matrices are quantized, so that calls have plans.
        is_gated: the activation of the first of two matrices gates the second. Where launches of adapters surround the
            matmul, the one after it applies that gate; an activation of one matrix is a launch of its own.
    """

    in_features: int
    out_features: int
    device: torch.device
    is_quantized: bool
    is_gated: bool

    @abstractmethod
    def _planned(
        self,
        rows: int,
        residual: bool = False,
        aligned_input: bool = True,
        aligned_output: bool = True,
        adapters: _native.AdapterSizes | None = None,
    ) -> _native.MatmulPlan | None:
        """Return the plan of a call; None where a matrix is not quantized."""

    def _plan(
        self,
        rows: int,
        residual: bool = False,
        aligned_input: bool = True,
        aligned_output: bool = True,
        adapters: _native.AdapterSizes | None = None,
    ) -> _native.MatmulPlan | None:
        """Return the plan of one launch of all rows and matrices; None where there are several launches."""
        plan = self._planned(rows, residual, aligned_input, aligned_output, adapters)
        return plan if plan is not None and plan.joined and plan.rows == rows else None

    def kernel(self, rows: int) -> str | None:
        """Return the kernel of a launch of all matrices for `rows` aligned rows, as `selection.Selection` names it.

        None means that the call runs separate operators.
        """
        plan = self._planned(rows)
        return plan.kernel if plan is not None and plan.joined else None

    def joins(self, rows: int) -> bool:
        """Return whether all launches of a call of `rows` aligned rows take all matrices, with norm and residual."""
        return self.kernel(rows) is not None

    def pays_apart(self, rows: int, *, invariant: bool) -> bool:
        """Return whether a call beats a matmul of each matrix, where norm and residual are launches of their own.

        Never for rows that need not be batch-invariant (`device.rows_are_invariant`).

        Args:
            rows: number of rows.
            invariant: the pass asks for batch-invariant rows.
        """
        plan = self._planned(rows) if rows_are_invariant(rows, invariant=invariant) else None
        return plan is not None and plan.pays_apart

    def blocks(self, rows: int) -> list[slice]:
        """Return the rows of a call in blocks as its plan cuts it."""
        plan = self._planned(rows)
        return blocks_of(rows, rows if plan is None else plan.rows)

    def takes_adapters(
        self, rows: int, adapters: _native.AdapterSizes, *, residual: bool = False, aligned: bool = True
    ) -> bool:
        """Return whether the launch of `rows` rows adds such adapters itself, before gate and residual.

        Args:
            rows: number of rows.
            adapters: sizes of the adapters.
            residual: a residual is added.
            aligned: the input is aligned to 16 bytes.
        """
        return self._plan(rows, residual, aligned, adapters=adapters) is not None

    def takes_packed(self, rows: int) -> bool:
        """Return whether the preceding matmul can pack the input of a call of `rows` rows (`FusedLinear.chained`)."""
        plan = self._plan(rows)
        return plan is not None and plan.takes_packed

    def input_columns(self, rows: int) -> int | None:
        """Return the columns of the input that another launch may pack for a call of `rows` rows; None if none may."""
        plan = self._plan(rows)
        return None if plan is None or plan.separate_gate else plan.input_columns

    def columns_for_adapters(self, rows: int) -> int | None:
        """Return the columns of the input that the launch of adapters before the matmul packs; None if it does not."""
        plan = self._plan(rows)
        return None if plan is None else plan.columns_for_adapters

    def chains_to(self, following: PlannedMatmul, rows: int) -> bool:
        """Return whether chained calls of `rows` rows can write their results as the packed input of `following`."""
        return self._chains_to(self._plan(rows), following, following._plan(rows))

    def _chains_to(
        self, plan: _native.MatmulPlan | None, following: PlannedMatmul, next_plan: _native.MatmulPlan | None
    ) -> bool:
        if plan is None or next_plan is None:
            return False
        fits = self.out_features == following.in_features and self.device == following.device
        return fits and plan.chains_to(next_plan)


class ShapedMatmul(PlannedMatmul):
    """The plans of a `FusedLinear` on a card, without its weights.

    Args:
        card: the GPU.
        matrices: the shape of each matrix; None for a float matrix.
        norm: the norm that a call applies to its input.
        activation: a call applies an activation, of the first of two matrices or of one matrix's results.
    """

    def __init__(
        self,
        card: Card,
        matrices: Sequence[MatrixShape | None],
        *,
        norm: Literal["rms", "layer"] | None = None,
        activation: bool = False,
    ) -> None:
        self._card, self._norm, self._activation = card, norm, activation
        shapes = [shape for shape in matrices if shape is not None]
        self._shapes = shapes if len(shapes) == len(matrices) else []
        widths = [shape.out_features for shape in self._shapes]
        self.in_features = self._shapes[0].in_features if self._shapes else 0
        self.out_features = widths[0] if widths and activation else sum(widths)
        self.device = torch.device("meta")
        self.is_quantized = bool(self._shapes)
        self.is_gated = activation and len(matrices) > 1

    def _planned(
        self,
        rows: int,
        residual: bool = False,
        aligned_input: bool = True,
        aligned_output: bool = True,
        adapters: _native.AdapterSizes | None = None,
    ) -> _native.MatmulPlan | None:
        if not self._shapes or not (aligned_input and aligned_output):
            return None
        return self._card.plan(
            self._shapes,
            rows,
            activation=self._activation,
            norm=self._norm,
            residual=residual,
            adapters=adapters,
        )

    def selection(
        self, rows: int, *, residual: bool = False, adapters: _native.AdapterSizes | None = None
    ) -> Selection | None:
        """Return the kernel of a call of `rows` rows; None for a float matrix.

        Args:
            rows: number of rows.
            residual: a residual is added.
            adapters: sizes of the adapters that the launch is to add; the result is not `joined` where it does not.
        """
        plan = self._planned(rows, residual, adapters=adapters)
        return None if plan is None else Selection.of(plan.kernel, plan.refused, joined=plan.joined)


def blocks_of(rows: int, most: int) -> list[slice]:
    """Return rows in blocks of at most `most`."""
    return [slice(begin, min(begin + most, rows)) for begin in range(0, rows, max(most, 1))]
