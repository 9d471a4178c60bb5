"""Which prompts are captured steps of `DecodeGraphs`.

Short prompts are, once there are many of their size: windows of a sequence's tokens are the rows (`prompt_windows.py`).
Prompts of sharded models are captured whole, too, once there are many of their length
(`sharded/captured_prompts.py`). Other prompts run eagerly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from exl_kernels.device import row_invariant
from exl_kernels.selection import is_decode_step, runs_packed

from .attn_params import PagedParams
from .captured import DecodeGraphs, StepCall
from .captured_step import StepReplay, UnrecordedStep
from .environment import PROMPTS_VARIABLE, eager_prompts
from .half import OutputTokens
from .prompt_windows import PromptWindows, windows_of

if TYPE_CHECKING:
    from ..contracts import Cache
    from ..language_model import LanguageModel

__all__ = ["PreparedPrompt", "PromptGraphs"]


class PreparedPrompt(NamedTuple):
    """A captured step that stores a prompt, without its ids."""

    step: StepReplay | UnrecordedStep
    windows: PromptWindows | None
    """Its rows where these are windows of the prompt; None where they are the rows of the prompt's ids."""


class PromptGraphs:
    """The captured steps of a model that store prompts."""

    __slots__ = ("_graphs", "_model")

    def __init__(self, graphs: DecodeGraphs, model: LanguageModel) -> None:
        self._graphs, self._model = graphs, model

    def prepare(self, ids: Tensor, cache: Cache, params: PagedParams, *, last: bool = False) -> PreparedPrompt | str:
        """Prepare a captured step that stores the keys and values of a prompt. Records nothing, but counts the prompt.

        Args:
            ids: int64 [B, q], or [1, T] with `params.q_lens`.
            cache: the cache of the pages.
            params: paged parameters.
            last: the step ends with hidden states for the head.

        Returns:
            The step, or the reason why no captured step covers the arguments.
        """
        if not eager_prompts():
            return f"{PROMPTS_VARIABLE} is 0"
        model = self._model
        refused = self._graphs.refusal(model) or self._refusal()
        if refused is not None:
            return refused
        packed = model.packed_rows
        if model.tp_context is not None and (last or not runs_packed(ids.numel(), decodes=False, packed=packed)):
            return self._whole(ids, cache, params, "last" if last else "none")
        windows = windows_of(ids, params, packed)
        if windows is None:
            return f"the windows of the prompts have more than {packed} tokens"
        output_tokens: OutputTokens = "last" if last else "none"
        call = StepCall(windows.ids.shape[1], cache, windows.params, output_tokens=output_tokens)
        return self._prepared(call, windows)

    def _whole(
        self, ids: Tensor, cache: Cache, params: PagedParams, output_tokens: OutputTokens
    ) -> PreparedPrompt | str:
        """Prepare a prompt of a sharded model whose rows are sequences, without padding.

        cuBLAS may sum in another order for another number of rows.
        """
        if params.q_lens is not None or params.batch_size != ids.shape[0] or is_decode_step(ids.shape[1]):
            return "the rows are no prompts of one length"
        if row_invariant():  # read at each pass: a step that was captured before multiplies by cuBLAS
            return "batch-invariant prompts of several GPUs are not captured"
        return self._prepared(StepCall(ids.shape[1], cache, params, output_tokens=output_tokens, whole=True), None)

    def _prepared(self, call: StepCall, windows: PromptWindows | None) -> PreparedPrompt | str:
        step = self._graphs.replay_of(call)
        return step if isinstance(step, str) else PreparedPrompt(step, windows)

    def _refusal(self) -> str | None:
        """Return why no prompts of the model are captured, or None."""
        model = self._model
        if model.placement.several:
            return "the model is on several devices"
        sharded = model.tp_context is not None
        made = self._graphs.shard_launches(model) if sharded else self._graphs.joined_for_step(model, adapted=False)
        return made if isinstance(made, str) else None
