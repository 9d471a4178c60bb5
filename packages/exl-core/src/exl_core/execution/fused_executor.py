"""The fused executor: joined launches, a decode step as the launch of one captured graph on each GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..device import device_error, out_of_memory_as_error
from ..inputs import check_row_loras
from .attn_params import PagedParams
from .eager import first_step, matmuls_of, run_modules
from .forward_pass import ForwardPass, checked
from .sharded.executor import SHARDED
from .sharded.prompts import takes_prompt

if TYPE_CHECKING:
    from .batch import Step
    from .executor import ExecutableModel
    from .fused import JoinedLaunches

__all__ = ["FUSED", "Fused"]


class Fused:
    """Run a pass as a captured step (`captured.py`) or by the model's joined launches (`fused.py`).

    A model without joined launches, and a pass that these do not cover, run module by module.
    """

    def run(self, model: ExecutableModel, asked: ForwardPass) -> dict[str, Any] | None:
        """Run a pass captured, by joined launches, or module by module; see `Executor.run`."""
        if asked.capturable:
            logits = _captured(model, asked)
            if logits is not None:
                return {"logits": logits}
        elif asked.stores and _stored(model, asked):
            return {}
        if model.tp_context is not None:
            return _run_sharded(model, asked)
        asked = checked(model, asked)
        with out_of_memory_as_error("run the model"), matmuls_of(asked):
            step = first_step(model, asked)
            joined = model.decode.joined_launches(step)
            if joined is None:
                return run_modules(model, asked, step)
            result = _run_joined(joined, asked, step)
        if asked.cache is not None:  # last, so that a failed pass leaves the cache's length unchanged
            asked.cache.current_seq_len = asked.end()
        return result


FUSED = Fused()


def _run_sharded(model: ExecutableModel, asked: ForwardPass) -> dict[str, Any] | None:
    """Run a pass of a sharded model that is no captured step."""
    asked = checked(model, asked)
    prompts = model.decode.prompts(model) if takes_prompt(asked) else None
    return SHARDED.run(model, asked) if prompts is None else prompts.run(model, asked)


def _captured(model: ExecutableModel, asked: ForwardPass) -> Tensor | None:
    """Return the logits of the pass as a captured step; None where none applies or an argument is invalid."""
    ids, params = asked.ids, asked.params
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
        return None
    assert isinstance(params, PagedParams), "capturable"
    adapters = check_row_loras(model, asked.loras, asked.row_loras, ids.shape[0])
    try:
        logits = model.decode.step(ids, asked.cache, params, adapters)
    except RuntimeError as error:
        if (typed := device_error("run a decode step", error)) is None:
            raise
        raise typed from error
    if logits is not None and asked.cache is not None:
        asked.cache.current_seq_len = model.decode.longest
    return logits


def _stored(model: ExecutableModel, asked: ForwardPass) -> bool:
    """Store the keys and values of a short prompt by a captured step.

    Returns False, with nothing done, where none applies or an argument is invalid.
    """
    ids, params = asked.ids, asked.params
    assert isinstance(params, PagedParams), "stores"
    with out_of_memory_as_error("run the model"):
        return asked.cache is not None and model.decode.store(ids, asked.cache, params)


def _run_joined(joined: JoinedLaunches, asked: ForwardPass, step: Step) -> dict[str, Any]:
    """Run the pass by joined launches."""
    batch = asked.ids.shape[0]
    flat = asked.ids.reshape(-1).to(step.slots.device)
    if asked.preprocess_only:
        joined.store(flat, step)
        return {}
    logits = joined.head(joined.hidden(flat, step, "last" if asked.last_id_only else "all"), step)
    return {"logits": logits.view(batch, -1, logits.shape[-1])}
