"""Select the way in which a forward pass runs.

| way | runs | selected for |
|---|---|---|
| captured | one CUDA graph a device (`captured.py`) | GPUs: steps of few tokens in pages, and some prompts |
| joined | the model's joined launches (`fused.py`) | other passes of a model on one GPU, without adapters |
| sharded prompt | the launches of all devices from one thread | prompts on GPUs of a model loaded by `load_tp` |
| sharded | heads and outputs of every matrix on several devices | every other pass of such a model |
| eager | each module's own forward pass, the oracle of the others | everything else |

The first way that applies runs. Embeddings, masks, states and abort events are for the last two. A captured step is
recorded when it is first selected; where that fails (`CaptureFailure`), the next way runs.

All ways give bitwise identical results, with two exceptions: the last tokens alone of a prompt may take kernels for
fewer rows; and in prompts of more rows than are batch-invariant (`packed_rows`) torch adds the residual of joined
launches with one rounding less.

No other code chooses a way. Inside of one, `half_matmuls.py` asks the plans of matmuls whether a half runs joined or
separate launches (`fused.py`; for a captured step when it is recorded), and a module's own pass takes native blocks of
the CPU where they apply (`layers/attention.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..device import device_error, out_of_memory_as_error
from .arguments import check_row_loras
from .attn_params import PagedParams
from .captured import INVALID
from .eager import EAGER
from .executor import ExecutableModel, Executor
from .forward_pass import checked
from .gpu_executors import Captured, CapturedLast, CapturedStore, Joined
from .sharded.executor import SHARDED
from .sharded.prompts import takes_prompt

if TYPE_CHECKING:
    from ..cache import ExLlamaV2CacheBase
    from ..contracts import Adapter
    from .captured_step import StepReplay
    from .forward_pass import ForwardPass

__all__ = ["REFUSAL_OF_ADAPTERS", "Selected", "Way", "captured_next_step", "select"]

REFUSAL_OF_ADAPTERS = "adapters have joined launches in captured steps only"
"""Why no other pass with adapters is joined."""

Way = Literal["captured", "joined", "sharded prompt", "sharded", "eager"]


class Selected(NamedTuple):
    """The way a pass runs."""

    way: Way
    executor: Executor
    """Runs this pass, now or never."""
    reason: str | None
    """Why the way before it in the table does not run the pass; None for the first one."""


def select(model: ExecutableModel, asked: ForwardPass) -> Selected:
    """Return the way a pass runs. Checks its arguments, and raises the errors of `forward_pass.checked`."""
    modules = asked.needs_modules
    captured = modules or _captured(model, asked)
    if not isinstance(captured, str):
        return Selected("captured", captured, None)
    asked, sharded = checked(model, asked), model.tp_context is not None
    found = modules or _refusal(model, asked) or (_prompts(model, asked) if sharded else _joined(model, asked))
    if not isinstance(found, str):
        return Selected("sharded prompt" if sharded else "joined", found, captured)
    return Selected("sharded", SHARDED, found) if sharded else Selected("eager", EAGER, found)


def captured_next_step(
    model: ExecutableModel,
    q_len: int,
    cache: ExLlamaV2CacheBase,
    params: PagedParams,
    adapters: Sequence[tuple[Adapter, ...]] = (),
) -> StepReplay | None:
    """Return a captured step of `q_len` tokens a row whose ids are not known yet.

    None where `select` would not use one.
    """
    if not may_fuse(model):
        return None
    step = model.decode.prepare_decode_step(q_len, cache, params, adapters)
    return None if isinstance(step, str) else step


def may_fuse(model: ExecutableModel) -> bool:
    """Return whether the model is loaded on a GPU."""
    return model.loaded and model.device is not None and model.device.type == "cuda"


def _refusal(model: ExecutableModel, asked: ForwardPass) -> str | None:
    """Return why no pass of the model is captured or joined, or None."""
    if not may_fuse(model):
        return "the model is not loaded on a GPU"
    return model.decode.refusal(model, step=asked.capturable)


def _captured(model: ExecutableModel, asked: ForwardPass) -> Executor | str:
    """Return the captured step of a pass with its inputs filled in, or the reason why there is none.

    The arguments of the pass are not checked yet: a captured step has faster checks.
    """
    if not may_fuse(model):
        return "the model is not loaded on a GPU"
    ids, params, cache = asked.ids, asked.params, asked.cache
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64 or not ids.numel():
        return "the ids are not int64 [batch, tokens]"
    if isinstance(params, PagedParams) and asked.capturable:
        if params.batch_size != ids.shape[0]:
            return INVALID
        adapters = check_row_loras(model, asked.loras, asked.row_loras, ids.shape[0])
        try:  # `out_of_memory_as_error` costs host time in every step
            step = model.decode.prepare_decode_step(ids.shape[1], cache, params, adapters)
            if isinstance(step, str):
                return step
            return Captured(step) if step.fill(ids) else INVALID
        except RuntimeError as error:
            if (typed := device_error("run a decode step", error)) is None:
                raise
            raise typed from error
    if isinstance(params, PagedParams) and cache is not None and asked.is_plain_prompt:
        last = not asked.preprocess_only
        with out_of_memory_as_error("run the model"):
            prompt = model.decode.prepare_prompt(ids, cache, params, last=last)
        if isinstance(prompt, str):
            return prompt
        return CapturedLast(prompt) if last else CapturedStore(prompt)
    return "it is neither a step in pages with all its logits nor a prompt in pages without other results"


def _joined(model: ExecutableModel, asked: ForwardPass) -> Executor | str:
    """Return the joined launches for a checked pass, or the reason why there are none."""
    if asked.adapters:
        return REFUSAL_OF_ADAPTERS
    launches = model.decode.joined_launches(model)
    return launches if isinstance(launches, str) else Joined(launches)


def _prompts(model: ExecutableModel, asked: ForwardPass) -> Executor | str:
    """Return what runs the prompts of a sharded model if a checked pass is one, or the reason why nothing does."""
    if not takes_prompt(asked):
        return "it has few tokens a row, or adapters"
    return model.decode.prompts(model)
