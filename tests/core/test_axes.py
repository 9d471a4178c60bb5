"""Positions of tokens and pictures by an oracle that goes token by token, and the same however a prompt is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from exl_core.axes import RopeOffsets, chunk_end, grid_axes, marks_of, positions_on_axes, runs_of
from exl_core.embeddings import EMBEDDING_INDEX
from exl_core.errors import InputError

pytestmark = pytest.mark.covers("core: multimodal-other", "generators: embeddings-mrope")


@dataclass(eq=False)
class Picture:
    """The part of an embedding that `axes` reads."""

    first_index: int
    grid: tuple[int, int, int]
    pre: int
    post: int
    time_step: float
    sees_itself: bool

    def __post_init__(self) -> None:
        self.inside = int(np.prod(self.grid))
        self.length = self.pre + self.inside + self.post
        self.axes = grid_axes(self.grid, self.time_step)
        self.positions_taken = self.pre + int(self.axes.max()) + 1 + self.post
        self.text_alias = "picture"

    def get_vision_token_range(self) -> tuple[int, int]:
        return self.first_index + self.pre, self.first_index + self.pre + self.inside

    def ids(self) -> list[int]:
        return list(range(self.first_index, self.first_index + self.length))


grids = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
shapes = st.tuples(grids, st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]))


@st.composite
def prompts(draw: Any) -> tuple[NDArray[np.int64], list[Picture]]:
    """Texts and pictures in any order; pictures may be used twice, and follow each other."""
    pictures: list[Picture] = []
    first = EMBEDDING_INDEX
    for grid, pre, post, step in draw(st.lists(shapes, max_size=3)):
        pictures.append(Picture(first, grid, pre, post, step, draw(st.booleans())))
        first += pictures[-1].length
    ids: list[int] = draw(st.lists(st.integers(0, 9), max_size=4))
    for _ in range(draw(st.integers(0, 4)) if pictures else 0):
        ids += draw(st.sampled_from(pictures)).ids()
        ids += draw(st.lists(st.integers(0, 9), max_size=5))
    return np.array(ids or [1], dtype=np.int64), pictures


def oracle(ids: NDArray[np.int64], pictures: list[Picture]) -> list[tuple[int, int, int]]:
    """Compute the three position axes token by token."""
    found: list[tuple[int, int, int]] = []
    base = 0
    for token in ids.tolist():
        mine = [p for p in pictures if p.get_vision_token_range()[0] <= token < p.get_vision_token_range()[1]]
        if not mine:
            found.append((base, base, base))
            base += 1
            continue
        low, high = mine[0].get_vision_token_range()
        k, (_, h, w) = token - low, mine[0].grid
        found.append((base + int(k // (h * w) * mine[0].time_step), base + k // w % h, base + k % w))
        if token == high - 1:
            base = max(max(one) for one in found[len(found) - mine[0].inside :]) + 1
    return found


def plain(ids: NDArray[np.int64], pictures: list[Picture], first: int, offset: int) -> NDArray[np.int64]:
    """[3, n], also where all axes agree."""
    found, _ = positions_on_axes(ids, pictures, first, offset)
    return np.tile(np.arange(first, first + len(ids)) + offset, (3, 1)) if found is None else found


@given(prompts())
def test_positions_of_a_prompt(made: tuple[NDArray[np.int64], list[Picture]]) -> None:
    ids, pictures = made
    assert plain(ids, pictures, 0, 0).T.tolist() == [list(one) for one in oracle(ids, pictures)]


@given(prompts(), st.data())
def test_positions_of_a_prompt_in_chunks(made: tuple[NDArray[np.int64], list[Picture]], data: st.DataObject) -> None:
    """Any cuts, by the offsets that a cache remembers and the marks of the whole prompt say; and gone back to."""
    ids, pictures = made
    wanted, marks = oracle(ids, pictures), marks_of(ids, pictures)
    remembered = RopeOffsets(1)
    for start in (0, data.draw(st.integers(0, len(ids) - 1))):
        while start < len(ids):
            end = data.draw(st.integers(start + 1, len(ids)))
            offset = remembered.at(0, start)
            assert offset == next((o for place, o in reversed(marks) if place <= start), 0)
            part = ids[start:end]
            assert plain(part, pictures, start, offset).T.tolist() == [list(one) for one in wanted[start:end]]
            remembered.write(0, start, positions_on_axes(part, pictures, start, offset)[1])
            start = end
        for place in range(len(ids) + 2):
            assert remembered.at(0, place) == next((o for at, o in reversed(marks) if at <= place), 0)


@given(prompts(), st.data())
def test_chunks_end_outside_of_pictures(made: tuple[NDArray[np.int64], list[Picture]], data: st.DataObject) -> None:
    """The largest end that cuts no picture of any row, else the smallest beyond. The second row is shifted."""
    ids, pictures = made
    shift = data.draw(st.integers(0, 6))
    rows = [np.concatenate([ids, np.ones(shift, np.int64)]), np.concatenate([np.ones(shift, np.int64), ids])]
    length = len(rows[0])
    runs = [run for row in rows for run in runs_of(row, pictures)]
    spans = [(run.start, run.end) for run in runs if run.embedding.sees_itself]
    begin = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(begin + 1, length))
    allowed = [e for e in range(begin + 1, length + 1) if not any(a < e < b for a, b in spans)]
    wanted = max((e for e in allowed if e <= end), default=min((e for e in allowed if e > end), default=end))
    assert chunk_end(rows, begin, end, pictures) == wanted


@given(prompts(), st.data())
def test_pictures_with_missing_rows_are_refused(
    made: tuple[NDArray[np.int64], list[Picture]], data: st.DataObject
) -> None:
    ids, pictures = made
    inside = [run for run in runs_of(ids, pictures) if run.end - run.start > 2]
    if not inside:
        return
    run = data.draw(st.sampled_from(inside))
    gone = data.draw(st.integers(run.start + 1, run.end - 2))
    with pytest.raises(InputError, match="follow each other"):
        runs_of(np.concatenate([[1], np.delete(ids, gone), [1]]), pictures)
