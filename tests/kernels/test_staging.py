"""The inputs of a captured step against a plain layout in numpy, and what is refused."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl_kernels.staging import StepLimits, StepStage


@given(st.data())
def test_layout(data: st.DataObject) -> None:
    batch, q_len, pages = (data.draw(st.integers(1, n)) for n in (5, 4, 4))
    size = data.draw(st.sampled_from([1, 4, 16]))
    rows, width = data.draw(st.integers(1, batch)), data.draw(st.integers(1, 6))
    room = min(pages, width) * size
    stage = StepStage((batch, q_len, pages, size))
    ids = data.draw(st.lists(st.integers(-1, 49), min_size=rows * q_len, max_size=rows * q_len))
    past = data.draw(st.lists(st.integers(-1, room), min_size=rows, max_size=rows))
    table = data.draw(st.lists(st.integers(0, 7), min_size=rows * width, max_size=rows * width))
    operands = (
        torch.tensor(ids).view(rows, q_len),
        torch.tensor(past, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32).view(rows, width),
    )
    before = stage.pinned.clone()
    right = all(p >= 0 and p + q_len <= room for p in past)
    assert stage.fill(*operands, StepLimits(vocab=50, positions=1000, pages=8)) == right
    if not right:
        assert torch.equal(stage.pinned, before)
        return
    t = batch * q_len
    raw = stage.pinned.numpy()
    longs, ints = raw[: 24 * t].view(np.int64).reshape(3, batch, q_len), raw[24 * t :].view(np.int32)
    fields = stage.fields
    assert np.array_equal(torch.stack(fields[:3]).numpy().reshape(3, batch, q_len), longs)
    assert np.array_equal(torch.cat([field.flatten() for field in fields[3:]]).numpy(), ints)
    assert fields.block_table.shape == (batch, pages)
    positions = np.full((batch, q_len), -1)
    positions[:rows] = np.array(past)[:, None] + np.arange(q_len)
    pages_of = np.array(table).reshape(rows, width)
    slots = np.full((batch, q_len), -1)
    slots[:rows] = np.take_along_axis(pages_of, positions[:rows] // size, 1) * size + positions[:rows] % size
    wanted_ids = np.zeros((batch, q_len), dtype=np.int64)
    wanted_ids[:rows] = np.array(ids).reshape(rows, q_len)
    assert np.array_equal(longs[0], wanted_ids)
    assert np.array_equal(longs[1], slots)
    assert np.array_equal(longs[2], np.maximum(positions, 0))
    assert np.array_equal(ints[:t].reshape(batch, q_len), positions)
    wanted = np.zeros((batch, pages), dtype=np.int32)
    wanted[:rows, : min(pages, width)] = pages_of[:, :pages]
    assert np.array_equal(ints[t : t + batch * pages].reshape(batch, pages), wanted)
    assert np.array_equal(ints[t + batch * pages :].reshape(batch, q_len), np.arange(batch)[:, None].repeat(q_len, 1))


def test_limits() -> None:
    stage = StepStage((2, 1, 2, 4))
    ids, past = torch.tensor([[3]]), torch.tensor([5], dtype=torch.int32)
    table, limits = torch.tensor([[1, 2]], dtype=torch.int32), StepLimits(vocab=4, positions=6, pages=3)
    assert stage.fill(ids, past, table, limits)
    for vocab, positions, pages in ((3, 6, 3), (4, 5, 3), (4, 6, 2)):
        assert not stage.fill(ids, past, table, StepLimits(vocab=vocab, positions=positions, pages=pages))
    assert not stage.fill(torch.tensor([[-2]]), past, table, limits)
    assert not stage.fill(torch.tensor([[1, 1]]), past, table, limits)
    # Page numbers after the last page in use may be anything.
    assert stage.fill(ids, torch.tensor([2], dtype=torch.int32), torch.tensor([[1, -9]], dtype=torch.int32), limits)
