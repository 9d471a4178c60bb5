"""Build the `Step` of a chunk: the places of its tokens, their visible keys, and their rotation."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from exl_kernels.device import row_invariant
from exl_kernels.kv import KVPages

from ..axes import gather_axes, positions_on_axes, runs_of
from ..errors import InputError, SequenceTooLongError
from ..rope import RopeTable
from .arguments import checked_key_mask, per_row, row_lengths
from .attn_params import AttentionParams, PagedParams
from .batch import Step

if TYPE_CHECKING:
    from ..config import ExLlamaV2Config
    from ..contracts import Adapter, Cache
    from ..embeddings import ExLlamaV2MMEmbedding
    from ..language_model import LanguageModel
    from .sharded.context import TensorParallel

__all__ = ["Chunk", "build_step"]


class Chunk(NamedTuple):
    """A chunk of tokens, as `build_step` takes it."""

    cache: Cache | None
    params: AttentionParams | PagedParams
    """Places of the tokens."""
    batch: int
    """Rows of the ids."""
    q_len: int
    """Tokens of a row."""
    adapters: tuple[Adapter, ...] = ()
    """The adapters of every row."""
    embeddings: tuple[ExLlamaV2MMEmbedding, ...] = ()
    """Embeddings that ids may refer to."""
    ids: Tensor | None = None
    """int64 [batch, q_len] on the CPU, needed where there are embeddings."""
    abort_event: Event | None = None
    """Setting this event ends the pass early."""


def build_step(
    model: LanguageModel,
    chunk: Chunk,
    device: torch.device,
    *,
    parallel: TensorParallel | None = None,
    invariant: bool | None = None,
) -> Step:
    """Build the step of a chunk with its tensors on `device`.

    Args:
        model: the model.
        chunk: the chunk.
        device: device of the step's tensors.
        parallel: sharding of the model, or None.
        invariant: the rows are batch-invariant; None: as `device.row_invariant` says.

    Raises:
        SequenceTooLongError: too many tokens for the cache or the model.
        InputError: the parameters do not fit.
    """
    config, cache, params = model.config, chunk.cache, chunk.params
    if cache is not None:
        cache.check_model(config)
    if isinstance(params, PagedParams):
        layout = _paged_layout(cache, params, chunk.batch, chunk.q_len)
    else:
        layout = _contiguous_layout(config, cache, params, chunk.batch, chunk.q_len, device)
    rows, positions, block_table, page_size = layout.rows, layout.positions, layout.block_table, layout.page_size
    shard_pages = () if parallel is None else parallel.pages(cache, page_size, (chunk.batch, config.head_dim))
    last = int(positions.max())
    _check_last(config, last)
    flat = positions.reshape(-1)
    page_of = block_table[rows.long(), flat // page_size].long()
    visible, pictures = _pictures(positions, chunk.ids, chunk.embeddings)
    rope_positions = _rope_positions(config, chunk, positions, rows)
    rope_positions, (cos, sin), alt = _rotations(config, model.rope, model.rope_alt, rope_positions, device)
    mask = None if isinstance(params, PagedParams) else params.input_mask
    key_mask = None if mask is None else checked_key_mask(mask, chunk.batch, int(positions.min()), last + 1)
    step = Step(
        batch_size=chunk.batch,
        q_len=chunk.q_len,
        rows=rows.to(device),
        positions=visible.reshape(-1).to(device, torch.int32),
        slots=(page_of * page_size + flat % page_size).to(device),
        block_table=block_table.to(device),
        rope_positions=rope_positions.to(device),
        cos=cos,
        sin=sin,
        pages=layout.pages,
        key_mask=None if key_mask is None else key_mask.to(device),
        max_keys=last + 1,
        ends=None if layout.ends is None else layout.ends.to(device),
        abort_event=chunk.abort_event,
        invariant=row_invariant() if invariant is None else invariant,
        loras=chunk.adapters,
        embeddings=chunk.embeddings,
        alt=alt,
        pictures=None if pictures is None else (pictures[0].to(device), pictures[1].to(device)),
    )
    if parallel is not None:
        step.shards = parallel.shards_of(step, shard_pages)
    return step


def _check_last(config: ExLlamaV2Config, last: int) -> None:
    """Raise SequenceTooLongError for a last position that the model has no room for."""
    if last >= config.max_seq_len:
        raise SequenceTooLongError(
            f"position {last} is beyond the model's max_seq_len of {config.max_seq_len}; shorten the context, or raise "
            "config.max_seq_len before building the model"
        )


def _scratch(pages: int, page_size: int, heads: int, head_dim: int, device: torch.device) -> Callable[[int], KVPages]:
    """Return one layer's pages, allocated on first use, which every layer overwrites."""
    made: list[KVPages] = []

    def of_layer(layer: int) -> KVPages:
        if not made:
            made.append(KVPages.allocate("fp16", pages, page_size, heads, head_dim, device))
        return made[0]

    return of_layer


class _Layout(NamedTuple):
    """The places of a chunk's tokens."""

    rows: Tensor
    """int32 [T], row of the block table."""
    positions: Tensor
    """int64 [B, q]"""
    block_table: Tensor
    """int32 [B, pages]"""
    page_size: int
    pages: Callable[[int], KVPages]
    """Returns the pages of a layer, or scratch memory where there is no cache."""
    ends: Tensor | None = None
    """int64 [rows], number of the last token of each row, where rows have different lengths."""


def _contiguous_layout(
    config: ExLlamaV2Config,
    cache: Cache | None,
    params: AttentionParams,
    batch: int,
    q_len: int,
    device: torch.device,
) -> _Layout:
    past = params.past_len or 0
    rows = _rows(batch, q_len)
    positions = (past + torch.arange(q_len)).expand(batch, q_len)
    block_table = torch.arange(batch, dtype=torch.int32)[:, None]
    if cache is None:
        sizes = (batch, q_len, config.num_key_value_heads, config.head_dim)
        return _Layout(rows, positions, block_table, q_len, _scratch(*sizes, device))
    if batch > cache.batch_size:
        raise InputError(f"batch of {batch} for a cache of batch_size {cache.batch_size}")
    if past + q_len > cache.max_seq_len:
        raise SequenceTooLongError(
            f"Total sequence length exceeds cache size in model.forward: {past} + {q_len} tokens, the cache holds "
            f"{cache.max_seq_len}"
        )
    return _Layout(rows, positions, block_table, cache.max_seq_len, lambda layer: cache.pages(layer, cache.max_seq_len))


def _rows(batch: int, q_len: int | Tensor) -> Tensor:
    """Return each token's row of the block table, int32 [T]."""
    rows = np.arange(batch, dtype=np.int32)
    # Not by torch, which wakes all threads of its pool to repeat a few numbers: milliseconds on a busy machine.
    return torch.from_numpy(np.repeat(rows, q_len.numpy() if isinstance(q_len, Tensor) else q_len))


def _paged_layout(cache: Cache | None, params: PagedParams, batch: int, q_len: int) -> _Layout:
    if cache is None:
        raise InputError("paged attention needs a cache")
    if cache.batch_size != 1:
        raise InputError(f"paged attention needs a cache of batch_size 1, this one has {cache.batch_size}")
    page_size = params.page_size
    if cache.max_seq_len % page_size:
        raise InputError(f"the cache's max_seq_len {cache.max_seq_len} is not a multiple of the page size {page_size}")
    past = params.cache_seqlens.to("cpu", torch.int64)
    table = params.block_index.to("cpu", torch.int32).contiguous()
    lengths = row_lengths(params, batch, q_len)
    filled = past + lengths
    needed = int(filled.max())
    if int(past.min()) < 0 or needed > table.shape[1] * page_size:
        raise SequenceTooLongError(
            f"{needed} tokens of a sequence do not fit its {table.shape[1]} pages of {page_size} in block_index"
        )
    _check_page_numbers(table, filled, page_size, cache.max_seq_len // page_size)
    ends: Tensor | None = None
    if params.q_lens is None:
        rows, positions = _rows(batch, q_len), past[:, None] + torch.arange(q_len)
    else:
        rows, ends = _rows(params.batch_size, lengths), lengths.cumsum(0) - 1
        first = past - (ends + 1 - lengths)  # of each row, minus its place among the ids
        positions = (first[rows.long()] + torch.arange(q_len))[None]
    return _Layout(rows, positions, table, page_size, lambda layer: cache.pages(layer, page_size), ends)


def _check_page_numbers(table: Tensor, lengths: Tensor, page_size: int, num_pages: int) -> None:
    """Raise InputError for page numbers in use that do not exist.

    Entries after a sequence's last page may hold anything.
    """
    used = torch.arange(table.shape[1])[None, :] * page_size < lengths[:, None]
    bad = used & ((table < 0) | (table >= num_pages))
    if bad.any():
        raise InputError(f"block_index names page {int(table[bad][0])}; the cache has pages 0 to {num_pages - 1}")


def _joined_rope_positions(params: PagedParams, positions: Tensor, rows: Tensor) -> Tensor:
    """Return the row of the RoPE table for each token of rows of different lengths: int64 [T]."""
    flat = positions.reshape(-1)
    if params.rope_offsets is None:
        return flat
    offsets = per_row("rope_offsets", params.rope_offsets, params.batch_size)
    return (flat + offsets[rows.long()]).clamp(min=0)


def _rotations(
    config: ExLlamaV2Config, rope: RopeTable, rope_alt: RopeTable | None, positions: Tensor, device: torch.device
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return each token's row of the tables on `device` that follow: (cos, sin), and the second table's or None.

    Raises:
        SequenceTooLongError: a position is beyond the model's length.
    """
    highest = int(positions.max())
    if highest >= config.max_seq_len:
        raise SequenceTooLongError(
            f"position_offsets or rope_offsets lead to position {highest}, max_seq_len is {config.max_seq_len}"
        )
    alt = None if rope_alt is None else rope_alt.upto(highest + 1, device)
    if positions.dim() == 1:
        return positions, rope.upto(highest + 1, device), alt
    # On three axes: a separate table with one row a token.
    assert config.mrope_section is not None
    cos, sin = gather_axes(*rope.upto(highest + 1), positions, config.mrope_section)
    return torch.arange(positions.shape[1]), (cos.to(device), sin.to(device)), alt


def _rope_positions(config: ExLlamaV2Config, chunk: Chunk, positions: Tensor, rows: Tensor) -> Tensor:
    """Return the row of the RoPE table for each token.

    The result is int64 [T], max(0, past + offset + j); or [3, T], one row for each axis, where the chunk holds images
    on three axes.
    """
    cache, params, ids, embeddings = chunk.cache, chunk.params, chunk.ids, chunk.embeddings
    if isinstance(params, PagedParams) and params.q_lens is not None:
        if embeddings:
            raise InputError("indexed_embeddings and PagedParams.q_lens exclude each other: run such a row by itself")
        return _joined_rope_positions(params, positions, rows)
    batch = positions.shape[0]
    shifted = params.rope_offsets is not None or params.position_offsets is not None
    if config.mrope_section is None and not shifted:
        return positions.reshape(-1).contiguous()
    shifts = per_row("position_offsets", params.position_offsets, batch)
    offsets = per_row("rope_offsets", params.rope_offsets, batch)
    remembered = None
    if cache is not None and not isinstance(params, PagedParams) and config.mrope_section is not None:
        remembered = cache.rope_offsets
    first = positions[:, 0].tolist()
    if remembered is not None and params.rope_offsets is None:
        offsets = torch.tensor([remembered.at(row, place) for row, place in enumerate(first)])
    own: dict[int, Tensor] = {}
    for row in range(batch):
        marks: list[tuple[int, int]] = []
        if embeddings and ids is not None:
            axes, marks = positions_on_axes(ids[row].numpy(), embeddings, first[row], int(offsets[row]))
            if axes is not None:
                own[row] = torch.from_numpy(axes) + shifts[row]
        if remembered is not None:
            # Also right after an abort: the next pass overwrites the marks after current_seq_len.
            remembered.write(row, first[row], marks)
    plain = positions + (offsets + shifts)[:, None]
    if not own:
        return plain.clamp(min=0).reshape(-1).contiguous()
    found = plain.expand(3, -1, -1).clone()
    for row, placed in own.items():
        found[:, row] = placed
    return found.clamp(min=0).reshape(3, -1)


def _pictures(
    positions: Tensor, ids: Tensor | None, embeddings: tuple[ExLlamaV2MMEmbedding, ...]
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return (last visible place of each token [B, q], `Step.pictures`).

    Raises:
        InputError: a chunk ends inside an image that sees itself: its first rows would need the last ones.
    """
    tokens: list[Tensor] = []
    if ids is None or not any(e.sees_itself for e in embeddings):
        return positions, None
    visible = positions.clone()
    q_len = positions.shape[1]
    for row, place in enumerate(positions):
        for run in runs_of(ids[row].numpy(), embeddings):
            if not run.embedding.sees_itself:
                continue
            if not run.complete:
                raise InputError(
                    f"{run.embedding.text_alias}: the chunk ends at row {run.first + run.end - run.start} of the "
                    "picture, whose rows see each other: let chunks end outside of pictures"
                )
            visible[row, run.start : run.end] = place[run.end - 1]
            tokens.append(torch.arange(run.start, run.end) + row * q_len)
    if not tokens:
        return positions, None
    numbers = torch.cat(tokens)
    return visible, (numbers, positions.reshape(-1)[numbers].to(torch.int32))
