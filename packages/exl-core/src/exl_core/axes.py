"""Positions of image rows on three axes, and images whose rows attend to each other.

A text token has one position on all axes. The rows of an image on a grid have the position where the image begins plus
their place in time, height and width. After the image positions continue after the largest one used. So later positions
differ from places in the cache by an offset, which is a function of the preceding ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import ConfigError, InputError

__all__ = [
    "GridRows",
    "RopeOffsets",
    "Run",
    "chunk_end",
    "gather_axes",
    "grid_axes",
    "marks_of",
    "positions_on_axes",
    "runs_of",
]

Ids = NDArray[np.int64]
Mark = tuple[int, int]
"""(place in the sequence, offset of positions from there on)."""


def grid_axes(grid: tuple[int, int, int], time_step: float) -> Ids:
    """Return int64 [3, T * H * W]: (t, h, w) of each row of an image, relative to its begin.

    A step in time is `time_step` positions; fractions are rounded down.
    """
    t, h, w = np.indices(grid).reshape(3, -1)
    return np.stack([(t * time_step).astype(np.int64), h, w]).astype(np.int64)


class GridRows(Protocol):
    """The properties of an `ExLlamaV2MMEmbedding` that decide where its rows are and what they attend to."""

    @property
    def text_alias(self) -> str:
        """The text that represents the rows."""
        ...

    @property
    def length(self) -> int:
        """Number of rows."""

    @property
    def grid(self) -> tuple[int, int, int] | None:
        """Rows inside the frame in time, height and width; None where the rows are no image on a grid."""
        ...

    @property
    def axes(self) -> Ids | None:
        """int64 [3, rows inside the frame]: their places on the axes, in models with three axes."""
        ...

    @property
    def positions_taken(self) -> int:
        """Positions from the first row to the next token."""

    @property
    def sees_itself(self) -> bool:
        """Whether the rows inside the frame attend to each other in both directions."""

    def get_vision_token_range(self) -> tuple[int, int]:
        """Return (first, last + 1) of the ids without the framing rows."""
        ...


@dataclass(frozen=True)
class Run:
    """ids[start:end] are the rows from `first` on of the image inside an embedding (without framing rows)."""

    embedding: GridRows
    start: int
    end: int
    first: int

    @property
    def complete(self) -> bool:
        """Whether the run ends with the last row of the image."""
        low, high = self.embedding.get_vision_token_range()
        return self.first + self.end - self.start == high - low


def runs_of(ids: Ids, embeddings: Sequence[GridRows]) -> list[Run]:
    """Return the images on a grid among `ids` [n], in order. The first may begin, the last may end inside an image.

    Raises:
        InputError: rows of an image are missing between others.
    """
    found: list[Run] = []
    for embedding in embeddings:
        if embedding.grid is None:
            continue
        low, high = embedding.get_vision_token_range()
        places = np.flatnonzero((ids >= low) & (ids < high))
        if not len(places):
            continue
        rows = ids[places] - low
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(rows) != 1)) + 1
        for part, first in zip(np.split(places, breaks), rows[[0, *breaks]], strict=True):
            found.append(Run(embedding, int(part[0]), int(part[-1]) + 1, int(first)))
    found.sort(key=lambda run: run.start)
    for run in found:
        if (run.first and run.start) or not (run.complete or run.end == len(ids)):
            raise InputError(
                f"{run.embedding.text_alias}: rows {run.first} to {run.first + run.end - run.start - 1} of a picture "
                "stand alone in the ids; all of its rows must follow each other"
            )
    return found


def marks_of(ids: Ids, embeddings: Sequence[GridRows], first: int = 0, offset: int = 0) -> list[Mark]:
    """Return the places where offsets change: after each image with positions on three axes.

    Args:
        ids: ids [n] of a sequence.
        embeddings: embeddings that ids may refer to.
        first: the place of ids[0].
        offset: offset of the preceding tokens, or, if the ids begin inside an image, of the tokens before that image.
    """
    marks = []
    for run in runs_of(ids, embeddings):
        if run.embedding.axes is not None and run.complete:
            offset += run.embedding.positions_taken - run.embedding.length
            marks.append((first + run.end, offset))
    return marks


def positions_on_axes(
    ids: Ids, embeddings: Sequence[GridRows], first: int, offset: int
) -> tuple[NDArray[np.int64] | None, list[Mark]]:
    """Return the positions of ids on three axes, and the places where offsets change.

    Args:
        ids: ids [n] of a sequence.
        embeddings: embeddings that ids may refer to.
        first: the place of ids[0].
        offset: as for `marks_of`.

    Returns:
        int64 [3, n], or None where all axes agree and the offset holds for all ids; and the marks.
    """
    runs = [run for run in runs_of(ids, embeddings) if run.embedding.axes is not None]
    if not runs:
        return None, []
    places = np.arange(first, first + len(ids), dtype=np.int64)
    positions = np.tile(places + offset, (3, 1))
    marks: list[Mark] = []
    for run in runs:
        begin = first + run.start - run.first + offset
        axes = run.embedding.axes
        assert axes is not None
        positions[:, run.start : run.end] = begin + axes[:, run.first : run.first + run.end - run.start]
        if run.complete:
            offset += run.embedding.positions_taken - run.embedding.length
            positions[:, run.end :] = places[run.end :] + offset
            marks.append((first + run.end, offset))
    return positions, marks


def gather_axes(cos: Tensor, sin: Tensor, positions: Tensor, section: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return one row of cos and sin for each token, each frequency from the table row of its axis.

    Args:
        cos: float32 [S, R / 2].
        sin: like cos.
        positions: int64 [3, T], by time, height and width.
        section: number of frequencies of each axis: the first section[0] by time, the next by height, the last by
            width.

    Raises:
        ConfigError: the sections do not add up to the number of frequencies.
    """
    if len(section) != 3 or sum(section) != cos.shape[1]:
        raise ConfigError(
            f"mrope_section is {list(section)}: three axes must share the {cos.shape[1]} frequencies of a head"
        )
    axis = torch.tensor([one for one, count in enumerate(section) for _ in range(count)])
    rows = positions[axis].T  # [T, R / 2]
    return cos.gather(0, rows), sin.gather(0, rows)


def chunk_end(rows: Sequence[Ids], begin: int, end: int, embeddings: Sequence[GridRows]) -> int:
    """Move `end` so that no image whose rows see each other is cut.

    Args:
        rows: ids of each sequence.
        begin: first place of the chunk.
        end: exclusive end of the chunk.
        embeddings: embeddings that ids may refer to.

    Returns:
        The first row of the cut image; its exclusive end if nothing of the chunk precedes the image; else `end`.
    """
    spans = [(run.start, run.end) for ids in rows for run in runs_of(ids, embeddings) if run.embedding.sees_itself]
    cut = end
    while any(a < cut < b for a, b in spans):
        cut = min(a for a, b in spans if a < cut < b)
    if cut > begin:
        return cut
    while any(a < end < b for a, b in spans):
        end = max(b for a, b in spans if a < end < b)
    return end


class RopeOffsets:
    """The places where offsets change in each row of a contiguous cache.

    With these a caller can continue token by token, or set `current_seq_len` back over an image, without knowing of it.
    """

    def __init__(self, rows: int) -> None:
        self._marks: list[list[Mark]] = [[] for _ in range(rows)]

    def at(self, row: int, place: int) -> int:
        """Return the offset of the token at `place`, or, inside an image, the offset before it."""
        marks = self._marks[row]
        found = bisect_right(marks, place, key=lambda mark: mark[0])
        return marks[found - 1][1] if found else 0

    def write(self, row: int, place: int, marks: Sequence[Mark]) -> None:
        """Replace the marks from `place` on, after tokens there were replaced."""
        kept = self._marks[row]
        del kept[bisect_right(kept, place, key=lambda mark: mark[0]) :]
        kept.extend(marks)

    def within(self, row: int, place: int, count: int) -> list[Mark]:
        """Return the marks of `count` tokens from `place` on."""
        return [mark for mark in self._marks[row] if place < mark[0] <= place + count]

    def roll_left(self) -> None:
        """Shift places by one after the oldest token of each row was dropped."""
        self._marks = [[(max(place - 1, 0), offset) for place, offset in marks] for marks in self._marks]

    def clear(self) -> None:
        """Drop all marks."""
        for marks in self._marks:
            marks.clear()

    def copy(self) -> RopeOffsets:
        """Return an independent copy."""
        made = RopeOffsets(0)
        made._marks = [list(marks) for marks in self._marks]
        return made
