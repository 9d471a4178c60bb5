"""The forward pass: checks, chunks, and the way of one chunk through the modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..axes import chunk_end
from ..device import out_of_memory_as_error
from ..embeddings import ExLlamaV2MMEmbedding
from ..errors import InputError, SequenceTooLongError, UnsupportedError
from ..inputs import (
    check_context,
    check_ids,
    check_indices,
    check_length,
    check_loras,
    chunk_size,
    contiguous_params,
    paged_params,
)
from ..lora import ExLlamaV2Lora
from .attn_params import AttentionParams, PagedParams
from .batch import Step
from .fused import DecodePlan
from .step import build_step

if TYPE_CHECKING:
    from ..cache import ExLlamaV2CacheBase
    from ..language_model import LanguageModel

__all__ = ["forward_all", "forward_chunk"]

PlanFor = Callable[[Step], DecodePlan | None]
"""The joined launches for a pass; None where the modules' own passes are the way."""


def forward_all(
    model: LanguageModel,
    plan_for: PlanFor,
    input_ids: Tensor,
    cache: ExLlamaV2CacheBase | None,
    *,
    input_mask: Tensor | None,
    preprocess_only: bool,
    last_id_only: bool,
    loras: Sequence[ExLlamaV2Lora] | None,
    return_last_state: bool | Literal["normed"],
    position_offsets: Tensor | None,
    abort_event: Event | None,
    cpu_logits: bool,
    indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None,
) -> Any:
    """`ExLlamaV2.forward`: any number of tokens, chunk by chunk."""
    ids, embeddings = check_ids(model, input_ids, indexed_embeddings)
    adapters = check_loras(model, loras)
    batch, q_len = ids.shape
    check_context(cache, input_mask, position_offsets, abort_event, batch)
    past = 0 if cache is None else cache.current_seq_len
    check_length(model.config, cache, batch, past, q_len)
    logits: list[Tensor] = []
    state: Tensor | None = None
    begin = 0
    while begin < q_len:
        end = begin + chunk_size(model.config, batch, past + begin, q_len - begin, cache is not None)
        if end < q_len and any(e.sees_itself for e in embeddings):
            end = chunk_end([row.numpy() for row in ids], begin, end, embeddings)
        result = _run_chunk(
            model,
            ids[:, begin:end],
            cache,
            AttentionParams(batch, end - begin, past + begin, input_mask, position_offsets),
            plan_for,
            preprocess_only=preprocess_only or (last_id_only and end < q_len),
            last_id_only=last_id_only,
            return_last_state=return_last_state if end == q_len else False,
            abort_event=abort_event,
            loras=adapters,
            embeddings=embeddings,
        )
        if result is None:
            return None
        if "logits" in result:
            logits.append(result["logits"].cpu() if cpu_logits else result["logits"])
        state = result.get("last_state")
        begin = end
    joined = None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
    return (joined, state) if return_last_state else joined


def forward_chunk(
    model: LanguageModel,
    plan_for: PlanFor,
    input_ids: Tensor,
    cache: ExLlamaV2CacheBase | None,
    *,
    input_mask: Tensor | None,
    preprocess_only: bool,
    last_id_only: bool,
    loras: Sequence[ExLlamaV2Lora] | None,
    return_last_state: bool | Literal["normed"],
    position_offsets: Tensor | None,
    abort_event: Event | None,
    attn_params: AttentionParams | PagedParams | None,
    extract_state_indices: Sequence[int] | None,
    indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None,
) -> dict[str, Any]:
    """`ExLlamaV2.forward_chunk` operator by operator."""
    ids, embeddings = check_ids(model, input_ids, indexed_embeddings)
    adapters = check_loras(model, loras)
    batch, q_len = ids.shape
    check_context(cache, input_mask, position_offsets, abort_event, batch)
    if isinstance(attn_params, PagedParams):
        params: AttentionParams | PagedParams = paged_params(attn_params, input_mask, position_offsets)
        if attn_params.q_lens is not None and last_id_only:
            raise UnsupportedError("last_id_only and PagedParams.q_lens exclude each other: take the rows you need")
    else:
        params = contiguous_params(attn_params, cache, batch, q_len, input_mask, position_offsets)
        check_context(cache, params.input_mask, params.position_offsets, abort_event, batch)
    result = _run_chunk(
        model,
        ids,
        cache,
        params,
        plan_for,
        preprocess_only=preprocess_only,
        last_id_only=last_id_only,
        return_last_state=return_last_state,
        abort_event=abort_event,
        loras=adapters,
        embeddings=embeddings,
        extract=check_indices(extract_state_indices, len(model.modules)),
    )
    return {"aborted": True} if result is None else result


@out_of_memory_as_error("run the model")
def _run_chunk(
    model: LanguageModel,
    ids: Tensor,
    cache: ExLlamaV2CacheBase | None,
    params: AttentionParams | PagedParams,
    plan_for: PlanFor,
    *,
    preprocess_only: bool,
    last_id_only: bool,
    return_last_state: bool | Literal["normed"],
    abort_event: Event | None,
    loras: tuple[ExLlamaV2Lora, ...] = (),
    embeddings: tuple[ExLlamaV2MMEmbedding, ...] = (),
    extract: frozenset[int] = frozenset(),
) -> dict[str, Any] | None:
    """One pass: by the plan where there is one, else every module in turn. None when aborted."""
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
    plan = None if return_last_state or extract else plan_for(step)
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
