"""Select how a forward pass runs. No other code decides it.

| executor | runs | selected for |
|---|---|---|
| `fused` | joined launches, if possible in a CUDA graph a device | GPUs, no masks, no states; adapters if captured |
| `sharded` | heads and output features of every matrix on several devices | a model loaded by `load_tp` |
| `eager` | each layer's own forward pass, the oracle of the others | everything else |

All give bitwise identical results, but for the last tokens alone of a prompt, which may take kernels for fewer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .eager import EAGER
from .executor import ExecutableModel, Executor
from .fused_executor import FUSED
from .sharded.executor import SHARDED

if TYPE_CHECKING:
    from ..cache import ExLlamaV2CacheBase
    from ..contracts import Adapter
    from .attn_params import PagedParams
    from .forward_pass import ForwardPass
    from .next_step import NextStep

__all__ = ["prepare_next_step", "select"]


def select(model: ExecutableModel, asked: ForwardPass) -> Executor:
    """Return the executor of a pass, whose arguments need not be checked yet."""
    if asked.fusable and may_fuse(model) and model.decode.takes(model, step=asked.capturable):
        return FUSED
    return SHARDED if model.tp_context is not None else EAGER


def prepare_next_step(
    model: ExecutableModel,
    q_len: int,
    cache: ExLlamaV2CacheBase,
    params: PagedParams,
    adapters: Sequence[tuple[Adapter, ...]] = (),
) -> NextStep | None:
    """Return a captured step of `q_len` tokens a row whose ids are not known yet.

    None where `select` would not use one.
    """
    return model.decode.prepare_next_step(q_len, cache, params, adapters) if may_fuse(model) else None


def may_fuse(model: ExecutableModel) -> bool:
    """Return whether the model is loaded on a GPU."""
    return model.loaded and model.device is not None and model.device.type == "cuda"
