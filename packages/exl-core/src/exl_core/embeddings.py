"""Rows of hidden states that token ids refer to: images, or other embeddings of the caller."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .axes import grid_axes
from .errors import InputError, TokenIdError

__all__ = ["EMBEDDING_INDEX", "EmbeddingConfig", "EmbeddingModel", "ExLlamaV2MMEmbedding", "check_embeddings"]

EMBEDDING_INDEX = 1_000_000_000
"""Ids from here on are not tokens but rows of `ExLlamaV2MMEmbedding` objects."""

_lock = threading.Lock()
_next_index = EMBEDDING_INDEX


def _take_ids(count: int) -> int:
    """Reserve `count` ids that no other embedding of this process has, and return the first."""
    global _next_index
    with _lock:
        first = _next_index
        _next_index += count
    return first


class PictureTraits(Protocol):
    """The part of an architecture that decides about images."""

    @property
    def pictures_see_themselves(self) -> bool:
        """Whether the rows of an image attend to each other in both directions."""


class EmbeddingConfig(Protocol):
    """The fields of a model's config that embeddings depend on."""

    @property
    def hidden_size(self) -> int:
        """Columns of a row."""

    @property
    def mrope_section(self) -> list[int] | None:
        """Frequencies of each position axis; None for models with positions on one axis."""

    @property
    def vision_spatial_merge_size(self) -> int:
        """Patches a side that are merged into one row."""

    @property
    def arch(self) -> PictureTraits:
        """The architecture."""


class EmbeddingModel(Protocol):
    """A model that embeddings are made for."""

    @property
    def config(self) -> EmbeddingConfig:
        """The model's configuration."""


class ExLlamaV2MMEmbedding:
    """Hidden states [n, hidden] with token ids.

    Put `get_ids()` into the input, or `text_alias` into a text that `tokenizer.encode(..., embeddings=[...])` converts
    to ids, and pass the object as `indexed_embeddings`. The rows enter the first layer without scaling or
    normalisation.

    In models with positions on three axes the grid gives the positions. In models with non-causal images it says that
    the rows attend to each other. Other models ignore it.

    Args:
        model: the language model.
        embeddings: float [n, hidden].
        text_alias: text that represents the rows; default a generated one.
        thw_grid: patches in time, height and width. The rows inside the frame are these patches, merged by
            `config.vision_spatial_merge_size` a side.
        pre_tokens: number of framing rows before the others.
        post_tokens: number of framing rows after the others.
        time_step: positions from one patch of time to the next.

    Attributes:
        metadata: free for callers ("original_size", "preprocessed_size", "patches_size").

    Raises:
        InputError: the rows do not fit the model.
    """

    def __init__(
        self,
        model: EmbeddingModel,
        embeddings: Tensor,
        text_alias: str | None = None,
        thw_grid: tuple[int, int, int] | None = None,
        pre_tokens: int = 0,
        post_tokens: int = 0,
        *,
        time_step: float = 1.0,
    ) -> None:
        hidden = model.config.hidden_size
        if not isinstance(embeddings, Tensor) or embeddings.dim() != 2 or embeddings.shape[1] != hidden:
            shape = list(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
            raise InputError(f"embeddings: {shape}, this model needs a float tensor [rows, {hidden}]")
        if not embeddings.is_floating_point() or not embeddings.shape[0]:
            raise InputError(
                f"embeddings: {list(embeddings.shape)} of {embeddings.dtype}, must be floats, one row at least"
            )
        if not torch.isfinite(embeddings).all():
            raise InputError("embeddings hold NaN or infinity")
        if min(pre_tokens, post_tokens) < 0 or pre_tokens + post_tokens > embeddings.shape[0]:
            raise InputError(f"{pre_tokens} + {post_tokens} framing tokens of {embeddings.shape[0]} rows")
        self.model = model
        self.embeddings = embeddings
        self.length = embeddings.shape[0]
        self.first_index = _take_ids(self.length)
        self.text_alias = f"<$EMB_{self.first_index}$>" if text_alias is None else text_alias
        if not self.text_alias:
            raise InputError("text_alias is empty: it could not be found in a text")
        self.thw_grid = thw_grid
        self.pre_tokens = pre_tokens
        self.post_tokens = post_tokens
        self.time_step = time_step
        self.metadata: dict[str, Any] = {}
        self.grid = self._merged_grid()
        config = model.config
        on_axes = self.grid is not None and config.mrope_section is not None
        self.axes = grid_axes(self.grid, time_step) if on_axes and self.grid is not None else None
        """int64 [3, rows inside the frame]: their places on the axes, in models with three axes."""
        self.sees_itself = self.grid is not None and config.arch.pictures_see_themselves
        """Whether the rows inside the frame attend to each other in both directions."""
        self.positions_taken = self.length
        """Positions from the first row to the next token: fewer than rows where the rows are on axes."""
        if self.axes is not None:
            self.positions_taken = pre_tokens + int(self.axes.max()) + 1 + post_tokens

    def get_ids(self) -> list[int]:
        """Return the ids of all rows, in order."""
        return list(range(self.first_index, self.first_index + self.length))

    def get_ids_tensor(self) -> Tensor:
        """Return the ids of all rows as int64 [1, length]."""
        return torch.tensor([self.get_ids()], dtype=torch.int64)

    def get_vision_token_range(self) -> tuple[int, int]:
        """Return (first, last + 1) of the ids without the framing rows."""
        return self.first_index + self.pre_tokens, self.first_index + self.length - self.post_tokens

    def get_size_in_bytes(self) -> int:
        """Return the size of the rows in bytes."""
        return self.embeddings.nbytes

    def _merged_grid(self) -> tuple[int, int, int] | None:
        """Return the rows inside the frame in time, height and width, for models that need the grid.

        Raises:
            InputError: the number of rows differs.
        """
        config = self.model.config
        if self.thw_grid is None or (config.mrope_section is None and not config.arch.pictures_see_themselves):
            return None
        merge = config.vision_spatial_merge_size
        grid = tuple(self.thw_grid)
        if len(grid) != 3 or not all(isinstance(n, int) and n > 0 for n in grid) or grid[1] % merge or grid[2] % merge:
            raise InputError(f"thw_grid is {grid}, must be patches in time, height and width, multiples of {merge}")
        t, h, w = grid[0], grid[1] // merge, grid[2] // merge
        inside = self.length - self.pre_tokens - self.post_tokens
        if t * h * w != inside:
            raise InputError(f"thw_grid {grid} makes {t} x {h} x {w} rows, {inside} are inside the frame")
        if not 0 <= self.time_step < 1 << 20:
            raise InputError(f"time_step is {self.time_step}, must be from 0 to {1 << 20}")
        return t, h, w

    def select(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Find the rows of this object among ids.

        Args:
            ids: int64 [T].

        Returns:
            bool [T], True where the id is a row of this object; and these rows, float32 [n, hidden], on their device.
        """
        mine = (ids >= self.first_index) & (ids < self.first_index + self.length)
        rows = ids[mine] - self.first_index
        return mine, self.embeddings[rows.to(self.embeddings.device)].to(ids.device, torch.float32)


def check_embeddings(
    ids: Tensor, embeddings: Sequence[ExLlamaV2MMEmbedding] | None, hidden_size: int
) -> tuple[ExLlamaV2MMEmbedding, ...]:
    """Return the embeddings as a tuple, checked for a model of `hidden_size` and for every id from EMBEDDING_INDEX on.

    Raises:
        InputError: an object is no embedding or does not fit.
        TokenIdError: no embedding has an id.
    """
    if embeddings is not None and not isinstance(embeddings, (list, tuple)):
        raise InputError(f"indexed_embeddings is a {type(embeddings).__name__}, must be a list of ExLlamaV2MMEmbedding")
    found = tuple(embeddings or ())
    for e in found:
        if not isinstance(e, ExLlamaV2MMEmbedding):
            raise InputError(f"indexed_embeddings holds a {type(e).__name__}, expected ExLlamaV2MMEmbedding")
        if e.embeddings.shape[1] != hidden_size:
            raise InputError(f"{e.text_alias}: rows of {e.embeddings.shape[1]} for a model of {hidden_size}")
    wanted = ids >= EMBEDDING_INDEX
    for e in found:
        wanted &= (ids < e.first_index) | (ids >= e.first_index + e.length)
    if wanted.any():
        raise TokenIdError(f"id {int(ids[wanted][0])} is a row of an embedding that indexed_embeddings does not hold")
    return found
