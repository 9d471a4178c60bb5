"""A loaded model's decode steps: captured, prepared before their ids are known, and the limits of their invariance."""

from __future__ import annotations

from collections.abc import Sequence

from exl_kernels.device import row_invariant
from exl_kernels.linear import QuantMatrix
from exl_kernels.selection import STEP_ROWS

from .config import ExLlamaV2Config
from .contracts import Cache
from .execution.attn_params import PagedParams
from .execution.capturable import without_hooks
from .execution.captured import DecodeGraphs
from .execution.captured_step import StepReplay
from .execution.forward_pass import NO_IDS, ForwardPass
from .execution.half_matmuls import packed_rows_of
from .execution.select import prelaunchable_step
from .execution.sharded.matrix import SplitMatrix
from .layers import Module
from .loading.loadable import LoadableModel
from .lora import ExLlamaV2Lora

__all__ = ["SteppingModel"]


class SteppingModel(LoadableModel):
    """A model with captured decode steps. Raises as `LoadableModel`."""

    def __init__(self, config: ExLlamaV2Config) -> None:
        super().__init__(config)
        self.decode = DecodeGraphs(self)  # captured steps on a GPU; `decode.reason` says why there are none
        # (arrangement, number of the load, whether all matrices are batch-invariant, `packed_rows`)
        self._limits: tuple[list[Module], int, int] | None = None

    def _weights_change(self) -> None:
        self.decode.clear()  # captured steps read the old weights

    @property
    def in_lockstep(self) -> bool:
        """Whether other processes must run the same passes: a `load_tp` with a process for each device."""
        return self.tp_context is not None and not self.tp_context.exchange.whole

    def update_loras(self) -> None:
        """Drop the captured steps with adapters, whose tensors they hold. Called when an adapter is unloaded."""
        self.decode.forget_adapters()

    def invariant_tokens(self) -> int | None:
        """Return up to how many tokens the results of a pass do not depend on the number of tokens; None for any.

        On a CPU, and with `exl_kernels.device.set_row_invariant`, there is no limit. On a GPU torch multiplies longer
        prompts.
        """
        if self.device is None or self.device.type != "cuda":
            return None
        return None if row_invariant() else self.packed_rows

    @property
    def packed_rows(self) -> int:
        """Most rows of a pass on a GPU that run on packed weights, batch-invariant (`packed_rows_of`)."""
        found, number = self.arrangement, self.load_count
        if self._limits is None or self._limits[0] is not found or self._limits[1] != number:
            matrices = (linear.loaded_matrix for linear in self.linears())
            blocks = (isinstance(matrix, (QuantMatrix, SplitMatrix)) and matrix.takes_blocks for matrix in matrices)
            refusals = (without_hooks(module).refusal_of_rows(STEP_ROWS) for module in found)
            self._limits = found, number, packed_rows_of(blocks, refusals)
        return self._limits[2]

    def check_peers(self) -> None:
        """Raise DeviceError if a GPU of a tensor parallel model waited in vain for another one in a captured step.

        The logits of such a step are NaN. Call it where logits are; it waits for the GPUs.
        """
        self.decode.check_peers()

    def prelaunchable_step(
        self,
        q_len: int,
        cache: Cache,
        attn_params: PagedParams,
        *,
        row_loras: Sequence[Sequence[ExLlamaV2Lora]] | None = None,
    ) -> StepReplay | None:
        """Prepare a paged step whose ids are not known yet.

        The result's `run` takes int64 ids [batch, q_len] on the CPU, or integers on the model's GPU that the current
        stream has still to compute. It queues the step and returns its logits as `forward_chunk` does, or None for
        invalid ids. Alternatively a kernel writes the ids into `inputs()`, followed by a call of `launch`. Use the
        result before any other pass of this model, or not at all.

        Args:
            q_len: tokens a row.
            cache: cache of the pages.
            attn_params: places of the tokens.
            row_loras: as for `forward_chunk`.

        Returns:
            The step; None where `forward_chunk` would not launch a captured graph.
        """
        return prelaunchable_step(self, ForwardPass(NO_IDS, cache, attn_params, row_loras=row_loras), q_len)
