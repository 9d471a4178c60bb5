"""Adapters of rows by kernels on a GPU, against float64; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from exl_kernels.errors import ShapeError
from exl_kernels.linear.lora import LoraEntry, LoraTable

pytestmark = [pytest.mark.cuda, pytest.mark.covers("core.md: lora")]

DEVICE = torch.device("cuda", 0)


def entry(inputs: int, outputs: int, rank: int, bias: bool) -> tuple[LoraEntry, torch.Tensor, torch.Tensor]:
    """The entry, its matrix [in, out] and bias [out] in float64."""
    generator = torch.Generator().manual_seed(rank)
    a = (torch.randn(rank, inputs, generator=generator) * inputs**-0.5).half()
    b = torch.randn(outputs, rank, generator=generator).half()
    own = torch.randn(outputs, generator=generator) if bias else None
    made = LoraEntry.of(a, b, own, 0.75, DEVICE)
    assert made is not None
    added = torch.zeros(outputs, dtype=torch.float64) if own is None else own.double() * 0.75
    return made, (a.double().t() @ b.double().t()) * 0.75, added


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 2), (64, 96), (2056, 514), (4096, 1024)])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_every_row_gets_its_own(inputs: int, outputs: int, rows: int) -> None:
    made = [entry(inputs, outputs, rank, bias) for rank, bias in ((1, False), (16, True), (70, False))]
    table = LoraTable([made[0][0], None, made[1][0], made[2][0]])
    by_slot = {0: made[0], 2: made[1], 3: made[2]}
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).half()
    y = torch.randn(rows, outputs, generator=generator).half()
    slots = [(0, 2, -1, 3, 1)[row % 5] for row in range(rows)]
    expected = y.double()
    for row, slot in enumerate(slots):
        if slot in by_slot:
            expected[row] += x[row].double() @ by_slot[slot][1] + by_slot[slot][2]
    found = y.to(DEVICE)
    table.add(x.to(DEVICE), found, torch.tensor(slots, dtype=torch.int32, device=DEVICE))
    assert float((found.cpu().double() - expected).abs().max()) < 2e-3 * float(expected.abs().max())
    for row in {0, rows - 1}:  # a row alone
        single = y[row : row + 1].to(DEVICE)
        own = torch.tensor(slots[row : row + 1], dtype=torch.int32, device=DEVICE)
        table.add(x[row : row + 1].to(DEVICE), single, own)
        assert torch.equal(single, found[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    assert LoraEntry.of(torch.ones(4, 12), torch.ones(8, 4), None, 1.0, DEVICE) is None
    assert LoraEntry.of(torch.ones(4, 16), torch.ones(7, 4), None, 1.0, DEVICE) is None
    assert LoraEntry.of(torch.full((4, 16), 1e6), torch.ones(8, 4), None, 1.0, DEVICE) is None
    table = LoraTable([entry(64, 32, 4, False)[0]])
    x, y = (torch.zeros((2, width), dtype=torch.float16, device=DEVICE) for width in (64, 32))
    table.add(x, y)
    with pytest.raises(ShapeError, match="T, 64"):
        table.add(x[:, :32].contiguous(), y)
    with pytest.raises(ShapeError, match="entry_ids"):
        table.add(x, y, torch.zeros(3, dtype=torch.int32, device=DEVICE))
