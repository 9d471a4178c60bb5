"""One chunk of tokens on its way through a model's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl_kernels.block import Tokens
from exl_kernels.selection import is_decode_step

if TYPE_CHECKING:
    from exl_kernels.kv import KVPages

    from ..architectures.windows import LayerRope
    from ..contracts import Adapter, EmbeddedRows

__all__ = ["Step"]


@dataclass
class Step:
    """One chunk on its way through the modules: T = batch * q_len token rows, sequence by sequence.

    `exl_core.execution.build_step` builds a step; modules read it and do not change it.
    """

    batch_size: int
    q_len: int
    rows: Tensor  # int32 [T], row of block_table
    positions: Tensor  # int32 [T], last visible place: the token's own; in images that see themselves the image's last
    slots: Tensor  # int64 [T], place in the cache
    block_table: Tensor  # int32 [B, max_pages]
    rope_positions: Tensor  # int64 [T], rows of cos and sin
    cos: Tensor  # float32 [S, rotary_dim / 2]
    sin: Tensor
    pages: Callable[[int], KVPages]  # of a layer
    key_mask: Tensor | None = None  # float32 [B, S], added to the logits of each key
    max_keys: int | None = None  # exclusive upper bound of positions
    ends: Tensor | None = None  # int64 [B], number of the last token of each row; None where rows have q_len tokens
    invariant: bool = False  # rows are batch-invariant, also more than PACKED_ROWS: each matmul is asked for that
    windows: bool = False  # rows are windows of prompts: tokens of neighbouring rows may share one of block_table
    abort_event: Event | None = None
    loras: tuple[Adapter, ...] = ()  # the adapters of every row, applied by the linears
    embeddings: tuple[EmbeddedRows, ...] = ()  # rows of ids from EMBEDDING_INDEX on
    alt: tuple[Tensor, Tensor] | None = None  # cos and sin of a second table, if the family has one
    # Of a sharded model: the same step on each device with heads, with the pages of those. `pages` is unused then.
    shards: tuple[Step, ...] = field(default=(), repr=False)
    elsewhere: dict[torch.device, Step] = field(default_factory=dict, repr=False)  # the same step on other devices
    # Of tokens in images that see themselves: their numbers int64 [n], their own places int32 [n].
    pictures: tuple[Tensor, Tensor] | None = None
    _tokens: dict[tuple[bool, LayerRope], Tokens] = field(default_factory=dict, repr=False)

    @property
    def sequences(self) -> int:
        """Number of rows of the block table, each with tokens of its own."""
        return self.batch_size if self.ends is None else self.ends.shape[0]

    def last_rows(self, x: Tensor) -> Tensor:
        """Return x [T, ...] of the last token of each row."""
        if self.ends is not None:
            return x.index_select(0, self.ends)
        return x.view(self.batch_size, self.q_len, *x.shape[1:])[:, -1].contiguous()

    @property
    def decodes(self) -> bool:
        """Whether rows have few tokens: attention then runs as in a decode step (`PagedParams.decodes`)."""
        return is_decode_step(self.q_len)

    def table(self, rope: LayerRope) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of a layer; without columns for a layer without rotation."""
        if rope == "none":
            return self.cos[:, :0].contiguous(), self.sin[:, :0].contiguous()
        if rope == "alt":
            assert self.alt is not None, "only families with a second table name it"
            return self.alt
        return self.cos, self.sin

    def tokens(self, interleaved: bool, rope: LayerRope = "main") -> Tokens:
        """Return the step in the form that fused blocks take; cached for all layers."""
        made = self._tokens.get((interleaved, rope))
        if made is None:
            cos, sin = self.table(rope)
            made = self._tokens[interleaved, rope] = Tokens(
                rows=self.rows,
                positions=self.positions,
                slots=self.slots,
                block_table=self.block_table,
                rope_positions=self.rope_positions,
                cos=cos,
                sin=sin,
                key_mask=self.key_mask,
                interleaved=interleaved,
            )
        return made
