"""`ExLlamaV2.forward`: any number of tokens, chunk by chunk, each the way that `select` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..axes import chunk_end
from ..cache.writes import record_contiguous_write
from .arguments import (
    check_context,
    check_ids,
    check_last_state,
    check_length,
    check_loras,
    checked_key_mask,
    chunk_size,
)
from .attn_params import AttentionParams, PagedParams
from .executor import Refused
from .forward_pass import CheckedPass, check_results
from .select import select, select_checked

if TYPE_CHECKING:
    from ..contracts import ForwardResult
    from .executor import ExecutableModel
    from .forward_pass import ForwardPass

__all__ = ["forward_all", "forward_chunk"]


def forward_all(
    model: ExecutableModel, asked: ForwardPass, *, cpu_logits: bool
) -> Tensor | tuple[Tensor | None, Tensor | None] | None:
    """Run a pass of any length over a contiguous cache. Returns and raises as `ExLlamaV2.forward`."""
    ids, embeddings = check_ids(model, asked.ids, asked.embeddings)
    adapters = check_loras(model, asked.loras)
    cache, mask, offsets = asked.cache, asked.input_mask, asked.position_offsets
    batch, q_len = ids.shape
    check_context(cache, mask, offsets, asked.abort_event, batch)
    past = 0 if cache is None else cache.current_seq_len
    check_length(model.config, cache, batch, past, q_len)
    # Before the first chunk is stored: an error in a later chunk would leave the cache longer.
    check_last_state(asked.return_last_state)
    if mask is not None:
        checked_key_mask(mask, batch, past, past + q_len)
    if cache is not None:
        record_contiguous_write(cache)
    logits: list[Tensor] = []
    state: Tensor | None = None
    begin = 0
    while begin < q_len:
        end = begin + chunk_size(model.config, batch, past + begin, q_len - begin, cache is not None)
        if end < q_len and any(e.sees_itself for e in embeddings):
            end = chunk_end([row.numpy() for row in ids], begin, end, embeddings)
        chunk = CheckedPass(
            ids=ids[:, begin:end],
            cache=cache,
            params=AttentionParams(batch, end - begin, past + begin, mask, offsets),
            input_mask=mask,
            preprocess_only=asked.preprocess_only or (asked.last_id_only and end < q_len),
            last_id_only=asked.last_id_only,
            return_last_state=asked.return_last_state if end == q_len else False,
            abort_event=asked.abort_event,
            adapters=adapters,
            embeddings=embeddings,
        )
        check_results(model, chunk)
        result = select_checked(model, chunk).run(model)
        assert not isinstance(result, Refused), "only captured steps refuse"
        if result is None:
            return None
        if "logits" in result:
            logits.append(result["logits"].cpu() if cpu_logits else result["logits"])
        state = result.get("last_state")
        begin = end
    joined = None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
    return (joined, state) if asked.return_last_state else joined


def forward_chunk(model: ExecutableModel, asked: ForwardPass) -> ForwardResult:
    """Run one chunk. Returns and raises as `ExLlamaV2.forward_chunk`."""
    executor = select(model, asked)
    if asked.cache is not None and not isinstance(asked.params, PagedParams):
        record_contiguous_write(asked.cache)
    result = executor.run(model)
    if isinstance(result, Refused):
        result = select(model, asked, refused=result.reason).run(model)
        assert not isinstance(result, Refused), "only captured steps refuse"
    return {"aborted": True} if result is None else result
