"""Select the way in which a forward pass runs.

| way | runs | selected for |
|---|---|---|
| captured | one CUDA graph a device (`captured.py`) | GPUs: steps of few tokens in pages, and some prompts |
| joined | the model's joined launches (`fused.py`) | other passes of a model on one GPU, without adapters |
| sharded prompt | the launches of all devices from one thread | prompts on GPUs of a model loaded by `load_tp` |
| sharded | heads and outputs of every matrix on several devices | every other pass of such a model |
| eager | each module's own forward pass, the oracle of the others | everything else |

The first way that applies runs. Embeddings, masks, states and abort events are for the last two. A captured step is
recorded when it first runs. Where that fails (`CaptureFailure`), or the step's inputs turn out to be invalid, the
executor answers `Refused` before anything is computed, and `forward.py` runs the next way.

A choice does no work of the pass, but it changes what later choices depend on:

- counts of prompts of each size, pauses of failed captures, and the order in which captured steps were used;
- slots of adapters: new combinations outdate the captured steps with others, and adapters that are gone drop theirs;
- the launches of a model, and of its devices, which are made when a choice first asks whether there are any;
- `reason` and `apart_reason` of `DecodeGraphs`, for people.

All ways give bitwise identical results, with two exceptions: the last tokens alone of a prompt may take kernels for
fewer rows; and in prompts of more rows than are batch-invariant (`packed_rows`) torch adds the residual of joined
launches with one rounding less.

`ways.py` decides among them from facts about the model and the pass; `exl info --kernels` asks it about models that are
not loaded. `captured.py` has the conditions that need the tensors of a pass (pages, positions, slots of adapters), and
those of sharded steps; `prompt_graphs.py` has those of captured prompts. That report leaves them out. No other code
chooses among these ways.
Inside of one, other code chooses launches:

- `half_matmuls.py` asks the plans of matmuls whether a half runs joined or separate launches (`fused.py`), for a
  captured step when it is recorded, and always for the whole half. A half whose description has no joined launches runs
  its module's own pass.
- `lora/adding.py` names the ways in which adapters are added after a matmul.
- Of more rows than are batch-invariant, `many_rows.py` runs halves that are not joined.
- `own_pass.py` chooses at load whether a half that runs as its module is one native call of the CPU, and whether the
  experts of a mixture share calls. `experts_pass.py` asks at each pass whether they do for its rows and adapters.
- `fused.py` runs the head joined with the last norm where it can. `sections.py` records the modules' own passes where a
  model has no joined launches.
- `sharded/launches.py` (`operators_for`) takes joined launches, separate ones, or those of many rows for a prompt; a
  matmul of a device that no launch joins runs alone.
- `sharded/cutting.py` chooses before the load whether a module runs its heads, features and experts on several devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..device import device_error, out_of_memory_as_error
from .arguments import check_row_loras
from .attn_params import PagedParams
from .captured import INVALID, LoadedFacts
from .eager import EAGER
from .executor import ExecutableModel, Executor, Refused
from .forward_pass import CheckedPass, ForwardPass, checked, needs_modules
from .gpu_executors import Captured, CapturedLast, CapturedStore, Joined
from .prompt_graphs import PromptGraphs
from .sharded.executor import SHARDED
from .sharded.prompts import takes_prompt
from .ways import PassFacts, Way, way_of

if TYPE_CHECKING:
    from ..contracts import ForwardResult
    from .captured_step import StepReplay

__all__ = ["Selected", "Way", "prelaunchable_step", "select", "select_checked"]

NOT_ON_GPU = "the model is not loaded on a GPU"
NOT_IN_PAGES = "it is neither a step in pages with all its logits nor a prompt in pages without other results"


PassT = TypeVar("PassT")


class Selected(NamedTuple, Generic[PassT]):
    """The way a pass runs."""

    way: Way
    executor: Executor[PassT]
    """Runs this pass, now or never."""
    reason: str | None
    """Why the way before it in the table does not run the pass; None for the first one."""
    asked: PassT
    """The pass as its executor takes it: checked, unless the way is "captured"."""

    def run(self, model: ExecutableModel) -> ForwardResult | Refused | None:
        """Run the pass; see `Executor.run`."""
        return self.executor.run(model, self.asked)


def select(
    model: ExecutableModel, asked: ForwardPass, *, refused: str | None = None
) -> Selected[ForwardPass] | Selected[CheckedPass]:
    """Return the way a pass runs. Checks its arguments, unless the way is "captured".

    Args:
        model: the model.
        asked: the pass.
        refused: why the captured step that was selected for this pass did not run; another way is returned.

    Raises:
        ExlError: as `forward_pass.checked`.
    """
    captured = refused or _refusal_of_ids(asked.ids) or _captured(model, asked, *asked.ids.shape)
    if not isinstance(captured, str):
        return Selected("captured", captured, None, asked)
    return select_checked(model, checked(model, asked), captured, step=asked.capturable)


def select_checked(
    model: ExecutableModel, asked: CheckedPass, captured: str = NOT_IN_PAGES, *, step: bool = False
) -> Selected[CheckedPass]:
    """Return the way a checked pass runs that is not captured.

    Args:
        model: the model.
        asked: the pass.
        captured: why it is not captured.
        step: as for `DecodeGraphs.refusal`.
    """
    facts = LoadedFacts(model.decode, model, step=step)
    own = needs_modules(asked) or (None if may_fuse(model) else NOT_ON_GPU)
    way, reason = way_of(facts, PassFacts(bool(asked.adapters), takes_prompt(asked), own), captured)
    return Selected(way, _executor(model, way), reason, asked)


def prelaunchable_step(model: ExecutableModel, asked: ForwardPass, q_len: int) -> StepReplay | None:
    """Return the captured step of a pass of `q_len` tokens a row whose ids are not known yet, recorded.

    None where `select` would not choose a captured step for the pass with valid ids, or the step cannot be recorded.
    """
    assert isinstance(asked.params, PagedParams), "the caller's type"
    found = _captured(model, asked, asked.params.batch_size, q_len)
    step = found.replay() if isinstance(found, Captured) else None
    return None if isinstance(step, str) else step


def may_fuse(model: ExecutableModel) -> bool:
    """Return whether the model is loaded on a GPU."""
    return model.loaded and model.device is not None and model.device.type == "cuda"


def _executor(model: ExecutableModel, way: Way) -> Executor[CheckedPass]:
    """Return what runs a checked pass in a way that is not captured."""
    if way == "joined":
        launches = model.decode.joined_launches(model)
        assert not isinstance(launches, str), "`way_of` has asked"
        return Joined(launches)
    if way == "sharded prompt":
        prompts = model.decode.prompts(model)
        assert not isinstance(prompts, str), "`way_of` has asked"
        return prompts
    return SHARDED if way == "sharded" else EAGER


def _refusal_of_ids(ids: Tensor) -> str | None:
    """Return why no captured step takes the ids, which are not checked yet, or None."""
    if not isinstance(ids, Tensor) or len(ids.shape) != 2 or ids.dtype != torch.int64 or 0 in ids.shape:
        return "the ids are not int64 [batch, tokens]"
    return None


def _captured(
    model: ExecutableModel, asked: ForwardPass, batch: int, q_len: int
) -> Captured | CapturedLast | CapturedStore | str:
    """Return the captured step of a pass of `batch` rows of `q_len` tokens, or the reason why there is none.

    The arguments of the pass are not checked yet: a captured step has faster checks. The ids may be unknown, unless the
    pass is a prompt.
    """
    if (modules := needs_modules(asked)) is not None:
        return modules
    if not may_fuse(model):
        return NOT_ON_GPU
    params, cache = asked.params, asked.cache
    if isinstance(params, PagedParams) and asked.capturable:
        if params.batch_size != batch:
            return INVALID
        adapted = asked.loras is not None or asked.row_loras is not None
        adapters = check_row_loras(model, asked.loras, asked.row_loras, batch) if adapted else ()
        try:  # `out_of_memory_as_error` costs host time in every step
            step = model.decode.decode_replay(q_len, cache, params, adapters)
        except RuntimeError as error:
            if (typed := device_error("run a decode step", error)) is None:
                raise
            raise typed from error
        return step if isinstance(step, str) else Captured(step)
    if isinstance(params, PagedParams) and cache is not None and asked.is_plain_prompt:
        last = not asked.preprocess_only
        with out_of_memory_as_error("run the model"):
            prompt = PromptGraphs(model.decode, model).prepare(asked.ids, cache, params, last=last)
        if isinstance(prompt, str):
            return prompt
        return CapturedLast(prompt) if last else CapturedStore(prompt)
    return NOT_IN_PAGES
