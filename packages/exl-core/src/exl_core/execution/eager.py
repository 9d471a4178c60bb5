"""The eager executor: each module's own forward pass, one after the other, on one device or on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.device import row_invariant, rows_are_invariant
from exl_kernels.selection import runs_packed

from ..device import out_of_memory_as_error
from ..layers import Head, Norm
from ..lora.rows import RowAdapters
from .attn_params import PagedParams
from .build_step import Chunk, build_step
from .half import description_of

if TYPE_CHECKING:
    from ..contracts import ForwardResult
    from ..language_model import LanguageModel
    from .batch import Step
    from .forward_pass import CheckedPass, ForwardPass
    from .sharded.context import TensorParallel

__all__ = ["EAGER", "Eager", "asks_invariant_rows", "first_step", "logits_of"]


class Eager:
    """Run module by module. Each module decides how it computes its part; no launches span modules."""

    @torch.no_grad()
    def run(self, model: LanguageModel, asked: CheckedPass) -> ForwardResult | None:
        """Run a checked pass module by module; see `Executor.run`."""
        with out_of_memory_as_error("run the model"):
            return run_modules(model, asked, self.step(model, asked))

    def step(self, model: LanguageModel, asked: CheckedPass) -> Step:
        """Build the step that the modules read."""
        return first_step(model, asked)


EAGER = Eager()


def asks_invariant_rows(model: LanguageModel, asked: ForwardPass | CheckedPass) -> bool:
    """Return whether a pass that is not captured asks matmuls for batch-invariant rows; few rows always are.

    `device.set_row_invariant` makes every pass ask. Otherwise decode steps and passes of up to `packed_rows` rows do,
    as captured steps: tokens do not depend on whether there was memory for the graph.
    """
    if row_invariant():
        return True
    params = asked.params
    decodes = isinstance(params, PagedParams) and params.decodes(asked.ids.shape[1])
    rows = asked.ids.numel()
    return not rows_are_invariant(rows, invariant=False) and runs_packed(
        rows, decodes=decodes, packed=model.packed_rows
    )


def first_step(model: LanguageModel, asked: CheckedPass, parallel: TensorParallel | None = None) -> Step:
    """Build the step of a checked pass on the device of the first layer; the embedding may be on another device."""
    batch, q_len = asked.ids.shape
    chunk = Chunk(
        cache=asked.cache,
        params=asked.params,
        batch=batch,
        q_len=q_len,
        adapters=asked.adapters,
        embeddings=asked.embeddings,
        ids=asked.ids,
        abort_event=asked.abort_event,
    )
    device = model.placement.device(min(1, model.head_layer_idx))
    return build_step(model, chunk, device, parallel=parallel, invariant=asks_invariant_rows(model, asked))


def logits_of(model: LanguageModel, hidden: Tensor, *, invariant: bool) -> Tensor:
    """Return the logits [T, padded vocabulary] of hidden states [T, hidden] on the last device, without adapters.

    invariant: the pass asks for batch-invariant rows.
    """
    norm, head = model.modules[-2], model.modules[-1]
    assert isinstance(norm, Norm)
    assert isinstance(head, Head)
    return head.forward(norm.forward(hidden), invariant=invariant)


def _is_narrow_from(model: LanguageModel, asked: CheckedPass, begin: int) -> bool:
    """Return whether the modules from `begin` on can run for some of the tokens alone.

    A hook or changed code may ask for all of them, and each row of `RowAdapters` has its adapters.
    """
    halves = model.modules[begin : model.head_layer_idx - 1]
    plain = all((about := description_of(module)) is not None and about.holds for module in halves)
    return plain and not any(isinstance(adapter, RowAdapters) for adapter in asked.adapters)


def run_modules(model: LanguageModel, asked: CheckedPass, first: Step) -> ForwardResult | None:
    """Run every module in order and move the hidden state from device to device. None when aborted."""
    (batch, q_len), place, step = asked.ids.shape, model.placement, first
    result: ForwardResult = {}
    extract = asked.extract
    wants_state = bool(asked.return_last_state or extract)
    # A pass without logits ends before this module.
    state_at = model.head_layer_idx - (asked.return_last_state != "normed")
    x = asked.ids.reshape(-1).to(place.device(0))
    narrows_at = max((state_at, *extract))  # states are those of all tokens
    if asked.last_id_only and not wants_state and _is_narrow_from(model, asked, model.last_kv_layer_idx + 1):
        narrows_at = model.last_kv_layer_idx + 1
    for index, module in enumerate(model.modules):
        if asked.abort_event is not None and asked.abort_event.is_set():
            return None
        if index in extract:
            result.setdefault("states", {})[index] = x.view(batch, q_len, -1).clone()
        if index == model.last_kv_layer_idx + 1 and asked.preprocess_only and not wants_state:
            break
        if index == state_at:
            if asked.return_last_state:
                result["last_state"] = x.view(batch, q_len, -1).clone()
            if asked.preprocess_only:
                break
        if index == narrows_at and asked.last_id_only:
            x = step.last_rows(x)
        if place.crosses(index):
            x, step = place.carry(x, index), place.step_on(first, place.device(index))
        x = module.forward(x, step)
    else:
        result["logits"] = x.view(batch, -1, x.shape[-1])
    if asked.cache is not None:
        asked.cache.current_seq_len = asked.end()
    return result
