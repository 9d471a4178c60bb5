"""Checks of the arguments of a forward pass, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contracts import Cache, first_missing
from ..embeddings import EMBEDDING_INDEX, ExLlamaV2MMEmbedding, check_embeddings
from ..errors import InputError, ModelStateError, SequenceTooLongError, TokenIdError, UnsupportedError
from ..lora import ExLlamaV2Lora
from .attn_params import AttentionParams, PagedParams

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config
    from ..language_model import LanguageModel

__all__ = [
    "check_context",
    "check_ids",
    "check_indices",
    "check_last_state",
    "check_length",
    "check_loras",
    "check_row_loras",
    "checked_key_mask",
    "chunk_size",
    "contiguous_params",
    "paged_params",
    "per_row",
    "row_lengths",
]

Embeddings = tuple[ExLlamaV2MMEmbedding, ...]
MASKED = -1e30  # finite, so that a row that sees only masked keys is free of NaN


def check_ids(
    model: LanguageModel, input_ids: Tensor, indexed_embeddings: Sequence[ExLlamaV2MMEmbedding] | None
) -> tuple[Tensor, Embeddings]:
    """Return (ids int64 [batch, q_len] on the CPU, the embeddings).

    Raises:
        ModelStateError: the model is not loaded.
        InputError: ids or embeddings are malformed.
        TokenIdError: an id is outside the vocabulary.
    """
    if not model.loaded:
        raise ModelStateError("the model is not loaded: call model.load() first")
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids is a {type(input_ids).__name__}, expected an int64 tensor [batch, tokens]")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise InputError(
            f"input_ids has shape {list(input_ids.shape)}, expected [batch, tokens] with at least one token"
        )
    if input_ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
        raise InputError(f"input_ids is {input_ids.dtype}, expected int64")
    ids = input_ids.to(device="cpu", dtype=torch.int64)
    embeddings = check_embeddings(ids, indexed_embeddings, model.config.hidden_size)
    tokens = ids[ids < EMBEDDING_INDEX] if embeddings else ids
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.numel() else (0, 0)
    vocab_size = model.config.vocab_size
    if low < -1 or high >= vocab_size:
        bad = low if low < -1 else high
        raise TokenIdError(f"token id {bad} is outside the vocabulary of {vocab_size} (-1 is padding)")
    return ids, embeddings


def check_loras(model: LanguageModel, loras: Sequence[ExLlamaV2Lora] | None) -> tuple[ExLlamaV2Lora, ...]:
    """Return the adapters as a tuple.

    Raises:
        InputError: another object than an adapter.
        ModelStateError: an adapter of another model.
    """
    if loras is None:
        return ()
    if not isinstance(loras, (list, tuple)) or not all(isinstance(lora, ExLlamaV2Lora) for lora in loras):
        raise InputError(f"loras is {str(loras)[:80]}, must be a list of ExLlamaV2Lora")
    for lora in loras:
        lora.check_usable(model)
    return tuple(loras)


def check_row_loras(
    model: LanguageModel,
    loras: Sequence[ExLlamaV2Lora] | None,
    row_loras: Sequence[Sequence[ExLlamaV2Lora]] | None,
    batch: int,
) -> tuple[tuple[ExLlamaV2Lora, ...], ...]:
    """Return the adapters of each of `batch` sequences; () where none has any.

    Raises:
        InputError: another object than an adapter.
        ModelStateError: an adapter of another model.
        UnsupportedError: rows differ, and an adapter cannot apply to only some rows of a pass.
    """
    if row_loras is None:
        adapters = check_loras(model, loras)
        return (adapters,) * batch if adapters else ()
    if loras:
        raise InputError("loras and row_loras exclude each other: give the adapters of every row in row_loras")
    if not isinstance(row_loras, (list, tuple)) or len(row_loras) != batch:
        raise InputError(f"row_loras must be a list with the adapters of each of the {batch} sequences")
    checked = {id(adapters): check_loras(model, adapters) for adapters in row_loras}
    sets = tuple(checked[id(adapters)] for adapters in row_loras)
    if len(set(sets)) > 1:
        whole = next((lora for adapters in sets for lora in adapters if not lora.mixable), None)
        if whole is not None:
            raise UnsupportedError(
                f"the adapter {whole.lora_path} brings whole matrices, or tensors for the embedding or experts: only "
                "all rows of a pass can have it"
            )
    return sets if any(sets) else ()


def check_context(cache: object, input_mask: object, position_offsets: object, abort_event: object, batch: int) -> None:
    """Raise InputError for arguments of the wrong type or shape.

    Args:
        cache: an object with the members of `Cache`, or None.
        input_mask: float [batch, total length], or None.
        position_offsets: int [batch, 1], or None.
        abort_event: a threading.Event, or None.
        batch: number of sequences.
    """
    missing = None if cache is None else first_missing(cache, Cache)
    if missing is not None:
        raise InputError(
            f"cache is a {type(cache).__name__}, which has no {missing}: expected one of the ExLlamaV2Cache classes, "
            "None, or an object with all members of exl_core.contracts.Cache"
        )
    if input_mask is not None and not (isinstance(input_mask, Tensor) and input_mask.is_floating_point()):
        raise InputError(f"input_mask is {_named(input_mask)}, expected a float tensor [batch, total length]")
    if position_offsets is not None:
        if not isinstance(position_offsets, Tensor) or position_offsets.dtype not in (torch.int32, torch.int64):
            raise InputError(f"position_offsets is {_named(position_offsets)}, expected an int32 tensor [batch, 1]")
        if tuple(position_offsets.shape) not in ((batch, 1), (batch,), (1, 1), (1,)):
            raise InputError(
                f"position_offsets has shape {list(position_offsets.shape)}, expected [batch = {batch}, 1]"
            )
    if abort_event is not None and not callable(getattr(abort_event, "is_set", None)):
        raise InputError(f"abort_event is a {type(abort_event).__name__}, expected a threading.Event or None")


def checked_key_mask(mask: Tensor, batch: int, past: int, total: int) -> Tensor:
    """Return `input_mask` as float32 [batch, total]: one value for each of the first `total` keys.

    After `past` stored tokens the mask may be that of a prompt: keys after its last column are attended to.

    Raises InputError for a wrong shape, for NaN and, with no stored tokens, for fewer than `total` keys.
    """
    if mask.dim() != 2 or mask.shape[0] not in (1, batch):
        raise InputError(f"input_mask has shape {list(mask.shape)}, expected [batch = {batch}, total length]")
    mask = mask.to(torch.float32).clamp(min=MASKED).expand(batch, -1)
    if torch.isnan(mask).any():
        raise InputError("input_mask holds NaN; use 0 to attend to a key and -inf to ignore it")
    if mask.shape[1] < total and past:
        mask = torch.nn.functional.pad(mask, (0, total - mask.shape[1]))
    if mask.shape[1] < total:
        raise InputError(
            f"input_mask covers {mask.shape[1]} keys, {total} are attended to: give one value for every stored and new "
            "token (0 to attend, -inf to ignore)"
        )
    return mask[:, :total].contiguous()


def check_last_state(return_last_state: object) -> None:
    """Raise InputError for a value that `return_last_state` does not have."""
    if return_last_state not in (True, False, "normed"):
        raise InputError(f'return_last_state is {return_last_state!r}, must be True, False or "normed"')


def check_indices(indices: Sequence[int] | None, count: int) -> frozenset[int]:
    """Return extract_state_indices as a set of module numbers; negative ones count from the end. Raises InputError."""
    found = tuple(indices or ())
    for index in found:
        if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
            raise InputError(f"extract_state_indices holds {index!r}; the model has modules 0 to {count - 1}")
    return frozenset(index % count for index in found)


def check_length(config: ExLlamaV2Config, cache: Cache | None, batch: int, past: int, q_len: int) -> None:
    """Check the number of tokens.

    Args:
        config: the model's config.
        cache: the cache, or None.
        batch: number of sequences.
        past: stored tokens of a sequence.
        q_len: new tokens of a sequence.

    Raises:
        SequenceTooLongError: the tokens exceed the chunk, the model or the cache.
        InputError: there are too many rows.
    """
    if cache is None:
        limit = _effective_max(config, batch)
        if q_len > limit:
            raise SequenceTooLongError(
                f"Maximum input length exceeded in model.forward: {q_len} tokens without a cache, at most {limit} "
                f"(max_input_len {config.max_input_len} x max_batch_size {config.max_batch_size} / batch)"
            )
        return
    if batch > cache.batch_size:
        raise InputError(f"batch of {batch} for a cache of batch_size {cache.batch_size}")
    if past + q_len > config.max_seq_len:
        raise SequenceTooLongError(
            f"{past} + {q_len} tokens exceed the model's max_seq_len of {config.max_seq_len}; shorten the "
            "context, or raise config.max_seq_len before building the model"
        )
    if past + q_len > cache.max_seq_len:
        raise SequenceTooLongError(
            f"Total sequence length exceeds cache size in model.forward: {past} + {q_len} tokens, the cache holds "
            f"{cache.max_seq_len}"
        )


def chunk_size(config: ExLlamaV2Config, batch: int, past: int, remaining: int, cached: bool) -> int:
    """Return the number of tokens of the next chunk.

    Our attention needs no score matrix, so max_attention_size limits a chunk only where the caller has switched off
    both fused back ends of exllamav2.

    Args:
        config: the model's config.
        batch: number of sequences.
        past: stored tokens of a sequence.
        remaining: tokens of a sequence that are not stored yet.
        cached: whether there is a cache.
    """
    size = min(remaining, _effective_max(config, batch))
    limit = config.max_attention_size
    fused = not (config.no_flash_attn and config.no_xformers)
    if cached and not fused and (past + remaining) * remaining > limit:
        size = min(size, int((math.sqrt(past * past + 4 * limit) - past) / 2))
    return max(size, 1)


def contiguous_params(
    params: AttentionParams | None,
    cache: Cache | None,
    batch: int,
    q_len: int,
    input_mask: Tensor | None,
    position_offsets: Tensor | None,
) -> AttentionParams:
    """Complete the caller's attn_params by the other arguments. Raises InputError."""
    past = 0 if cache is None else cache.current_seq_len
    if params is None:
        return AttentionParams(batch, q_len, past, input_mask, position_offsets)
    if not isinstance(params, AttentionParams):
        raise InputError(f"attn_params is a {type(params).__name__}, expected AttentionParams or PagedParams")
    if params.batch_size != batch or params.seq_len not in (None, q_len):
        raise InputError(
            f"ids are {batch} x {q_len}, attn_params says batch_size {params.batch_size}, seq_len {params.seq_len}"
        )
    if params.past_len is not None and (not isinstance(params.past_len, int) or params.past_len < 0):
        raise InputError(f"attn_params.past_len is {params.past_len!r}, must be a number of tokens")
    return AttentionParams(
        batch,
        q_len,
        past if params.past_len is None else params.past_len,
        params.input_mask if input_mask is None else input_mask,
        params.position_offsets if position_offsets is None else position_offsets,
        rope_offsets=params.rope_offsets,
    )


def paged_params(params: PagedParams, input_mask: Tensor | None, position_offsets: Tensor | None) -> PagedParams:
    """Return `params`. Raises UnsupportedError if arguments for padded rows are given as well."""
    if input_mask is not None or position_offsets is not None:
        raise UnsupportedError("input_mask and position_offsets do not go with PagedParams: pages need no padding")
    return params


def row_lengths(params: PagedParams, batch: int, q_len: int) -> Tensor:
    """Return the tokens of each row of a paged pass over ids [batch, q_len]: int64 [params.batch_size], on the CPU.

    Raises:
        InputError: ids and parameters do not fit.
    """
    if params.q_lens is None:
        if params.batch_size != batch or params.q_len not in (0, q_len):
            raise InputError(
                f"ids are {batch} x {q_len}, PagedParams says batch_size {params.batch_size}, q_len {params.q_len}"
            )
        return torch.full((batch,), q_len)
    if not isinstance(params.q_lens, Tensor) or tuple(params.q_lens.shape) != (params.batch_size,):
        raise InputError(f"PagedParams: q_lens is {params.q_lens!r}, expected int32 [batch_size = {params.batch_size}]")
    lengths = params.q_lens.to("cpu", torch.int64)
    if batch != 1 or int(lengths.sum()) != q_len or params.q_len not in (0, q_len) or int(lengths.min()) < 1:
        raise InputError(
            f"ids are {batch} x {q_len}, PagedParams says q_lens {lengths.tolist()}, q_len {params.q_len}: with q_lens "
            "of at least 1 each, ids are 1 x their sum"
        )
    return lengths


def per_row(name: str, offsets: Tensor | None, batch: int) -> Tensor:
    """Return offsets, one for each row or one for all, as int64 [batch] on the CPU. Raises InputError."""
    if offsets is None:
        return torch.zeros(batch, dtype=torch.int64)
    found = offsets.reshape(-1).to("cpu", torch.int64)
    if found.shape[0] not in (1, batch):
        raise InputError(f"{name} has {found.shape[0]} entries for a batch of {batch}")
    return found.expand(batch)


def _effective_max(config: ExLlamaV2Config, batch: int) -> int:
    return max(config.max_input_len * config.max_batch_size // batch, 1)


def _named(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else f"a {type(value).__name__}"
