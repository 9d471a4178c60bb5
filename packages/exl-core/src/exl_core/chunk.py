"""One chunk of token ids through a model's modules: the pass itself, behind the checks of `exl_core.inputs`."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .attn_params import AttentionParams, PagedParams
from .decode import DecodePlan
from .device import out_of_memory_as_error
from .embeddings import ExLlamaV2MMEmbedding
from .errors import InputError, SequenceTooLongError
from .lora import ExLlamaV2Lora
from .modules import Step
from .step import build_step

if TYPE_CHECKING:
    from .cache import ExLlamaV2CacheBase
    from .model import ExLlamaV2

__all__ = ["run_chunk"]


@out_of_memory_as_error("run the model")
def run_chunk(
    model: ExLlamaV2,
    ids: Tensor,
    cache: ExLlamaV2CacheBase | None,
    params: AttentionParams | PagedParams,
    *,
    preprocess_only: bool,
    last_id_only: bool,
    return_last_state: bool | Literal["normed"],
    abort_event: Event | None,
    loras: tuple[ExLlamaV2Lora, ...] = (),
    embeddings: tuple[ExLlamaV2MMEmbedding, ...] = (),
    extract: frozenset[int] = frozenset(),
) -> dict[str, Any] | None:
    """The pass itself: every module in turn, None when aborted."""
    batch, q_len = ids.shape
    limit = model.config.max_output_len
    if limit is not None and q_len > limit and not (preprocess_only or last_id_only):
        raise SequenceTooLongError(
            f"seq_len exceeds max_output_len: {q_len} positions of logits, config.max_output_len is {limit}; use "
            "last_id_only=True or preprocess_only=True, or raise it"
        )
    place = model.placement
    device = place.device(min(1, model.head_layer_idx))  # the first layer's: the embedding may be elsewhere
    first = build_step(
        *(model.config, model.rope, cache, params, batch, q_len, abort_event, device, loras, embeddings),
        model.rope_alt,
        model.tp_context,
        ids,
    )
    step = first
    result: dict[str, Any] = {}
    if return_last_state not in (True, False, "normed"):
        raise InputError(f'return_last_state is {return_last_state!r}, must be True, False or "normed"')
    plan = None if return_last_state or extract else model.decode.prompt_plan(step)
    if plan is not None:
        result = _run_planned(plan, ids, step, preprocess_only=preprocess_only, last_id_only=last_id_only)
        if cache is not None:  # only now: a pass that fails has stored nothing
            cache.current_seq_len = _end_of_chunk(params, q_len)
        return result
    normed = return_last_state == "normed"
    state_at = model.head_layer_idx - (not normed)  # what has no logits ends in front of this
    x = ids.reshape(-1).to(place.device(0))
    for index, module in enumerate(model.modules):
        if abort_event is not None and abort_event.is_set():
            return None
        if index in extract:
            result.setdefault("states", {})[index] = x.view(batch, q_len, -1).clone()
        if index == model.last_kv_layer_idx + 1 and preprocess_only and not (return_last_state or extract):
            break
        if index == state_at:
            if return_last_state:
                result["last_state"] = x.view(batch, q_len, -1).clone()
            if preprocess_only:
                break
            if last_id_only:
                x = x.view(batch, q_len, -1)[:, -1].contiguous()
        if place.crosses(index):
            x, step = place.carry(x, index), place.step_on(first, place.device(index))
        x = module.forward(x, step)
    else:
        result["logits"] = x.view(batch, -1, x.shape[-1])
    if cache is not None:
        cache.current_seq_len = _end_of_chunk(params, q_len)
    return result


def _run_planned(
    plan: DecodePlan, ids: Tensor, step: Step, *, preprocess_only: bool, last_id_only: bool
) -> dict[str, Any]:
    """The pass of a dense model on a GPU, its launches joined."""
    batch = ids.shape[0]
    flat = ids.reshape(-1).to(step.slots.device)
    if preprocess_only:
        plan.store(flat, step)
        return {}
    logits = plan.head(plan.hidden(flat, step, batch if last_id_only else 0), step)
    return {"logits": logits.view(batch, -1, logits.shape[-1])}


def _end_of_chunk(params: AttentionParams | PagedParams, q_len: int) -> int:
    if isinstance(params, PagedParams):
        return int((params.cache_seqlens + (q_len if params.q_lens is None else params.q_lens)).max())
    return (params.past_len or 0) + q_len
