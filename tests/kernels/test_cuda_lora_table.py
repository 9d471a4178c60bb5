"""Adapters of rows by kernels on a GPU, against float64; needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import matmul_of
from linear_cases import K, exl2, norm_of, qkv, reads_plain_rows

from exl_kernels.activation import gated_activation
from exl_kernels.device import cuda_status
from exl_kernels.errors import ShapeError, UnsupportedError
from exl_kernels.linear.fused import FusedLinear, FusedNorm
from exl_kernels.linear.lora import LoraEntry, LoraGroup, LoraTable
from exl_kernels.linear.workspace import workspaces_in
from exl_kernels.norm import rms_norm

pytestmark = [pytest.mark.cuda, pytest.mark.covers("core: lora")]

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


def test_entries_that_do_not_fit_are_refused() -> None:
    assert LoraEntry.of(torch.ones(4, 12), torch.ones(8, 4), None, 1.0, DEVICE) is None
    assert LoraEntry.of(torch.ones(4, 16), torch.ones(7, 4), None, 1.0, DEVICE) is None
    assert LoraEntry.of(torch.full((4, 16), 1e6), torch.ones(8, 4), None, 1.0, DEVICE) is None
    assert LoraEntry.of(torch.ones(0, 16), torch.ones(8, 0), None, 1.0, DEVICE) is None
    with pytest.raises(ShapeError, match="rank 0"):
        LoraEntry(torch.ones(0, 16), torch.ones(0, 8), torch.ones(0))
    table = LoraTable([entry(64, 32, 4, False)[0]])
    x, y = (torch.zeros((2, width), dtype=torch.float16, device=DEVICE) for width in (64, 32))
    table.add(x, y)
    with pytest.raises(ShapeError, match="T, 64"):
        table.add(x[:, :32].contiguous(), y)
    with pytest.raises(ShapeError, match="slots"):
        table.add(x, y, torch.zeros(3, dtype=torch.int32, device=DEVICE))


WIDTHS = (96, 34, 64)


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare the bits of halves; -0 is not 0."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def group_of(levels: int, widths: tuple[int, ...], inputs: int, ranks: tuple[int, ...]) -> list[Any]:
    """Entries by level, matrix and set; the second set has none, and some matrices have no adapter."""
    found = []
    for level in range(levels):
        lines = []
        for matrix, width in enumerate(widths):
            present = (True, False, (level + matrix) % 2 == 0, level == 0)
            lines.append(
                [
                    entry(inputs, width, rank, bias=matrix == 1)[0] if there else None
                    for rank, there in zip(ranks, present, strict=True)
                ]
            )
        found.append(lines)
    return found


def separate(levels: list[Any], x: torch.Tensor, y: torch.Tensor, widths: tuple[int, ...], ids: torch.Tensor) -> Any:
    """The results of each matrix, by one table after another."""
    parts = [part.clone(memory_format=torch.contiguous_format) for part in torch.split(y, list(widths), dim=1)]
    for level in levels:
        for part, entries in zip(parts, level, strict=True):
            if any(one is not None for one in entries):
                LoraTable(entries).add(x, part, ids)
    return parts


def operands(rows: int, inputs: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y, a residual like y, and the sets of rows."""
    generator = torch.Generator().manual_seed(rows + inputs)
    x = torch.randn(rows, inputs, generator=generator).half().to(DEVICE)
    y, residual = (torch.randn(rows, width, generator=generator).half().to(DEVICE) for _ in range(2))
    ids = torch.tensor([(0, 2, -1, 3, 1)[row % 5] for row in range(rows)], dtype=torch.int32, device=DEVICE)
    return x, y, residual, ids


@pytest.mark.parametrize(
    ("rows", "inputs", "levels", "ranks"),
    [
        (1, 64, 1, (16, 1, 8, 1)),
        (3, 256, 2, (6, 4, 40, 17)),
        (5, 2056, 1, (1, 1, 3, 2)),
        (8, 6152, 1, (70, 1, 3, 2)),
        (11, 4104, 2, (16, 1, 40, 16)),
        (64, 16, 2, (4, 4, 8, 3)),
    ],
)
def test_a_group_is_bitwise_one_table_after_another(
    rows: int, inputs: int, levels: int, ranks: tuple[int, ...]
) -> None:
    """With a norm and without, in place and with a residual; for one matrix and for three."""
    for widths in (WIDTHS, WIDTHS[:1]):
        entries = group_of(levels, widths, inputs, ranks)
        group = LoraGroup(entries, inputs, widths)
        x, y, residual, ids = operands(rows, inputs, sum(widths))
        norm = FusedNorm((torch.rand(inputs, generator=torch.Generator().manual_seed(1)) + 0.5).to(DEVICE), 1e-5)
        h = rms_norm(x, norm.weight, norm.eps)
        normed = torch.full_like(x, float("nan"))
        middle = group.shrink(x, ids, norm=norm, normed=normed)
        assert torch.equal(normed, h)
        want = torch.cat(separate(entries, h, y, widths, ids), 1)
        assert torch.equal(group.expand(y.clone(), middle, ids), want)
        into = residual.clone()
        assert torch.equal(group.expand(y, group.shrink(h, ids), ids, out=into, residual=into), residual + want)
        alone = y[-1:].clone()
        own = ids[-1:].clone()
        group.expand(alone, group.shrink(h[-1:].clone(), own), own)
        assert torch.equal(alone, want[-1:])


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("width", [128, 2560])
@pytest.mark.parametrize("normed", [True, False])
def test_a_group_packs_the_input_of_a_matmul(rows: int, width: int, normed: bool) -> None:
    """The matmul of packed rows is bitwise that of the plain ones, and packing changes no matmul with A."""
    for kind in ("exl2", "gptq"):
        matmul = FusedLinear([matmul_of(width, kind)])
        given = matmul.input_of(rows)
        if given is None:
            assert reads_plain_rows(rows)
            return
        given.scratch.fill_(0xA5)
        group = LoraGroup(group_of(1, WIDTHS, width, (16, 1, 8, 5)), width, WIDTHS)
        x, y, _, ids = operands(rows, width, sum(WIDTHS))
        norm = FusedNorm((torch.rand(width, generator=torch.Generator().manual_seed(1)) + 0.5).to(DEVICE), 1e-5, 1.0)
        h = rms_norm(x, norm.weight, norm.eps, weight_offset=1.0) if normed else x
        want, got = (torch.full((rows, 64), torch.nan, dtype=torch.float16, device=DEVICE) for _ in range(2))
        matmul(h, want)
        middle = group.shrink(x, ids, norm=norm if normed else None, into=given)
        matmul.from_input(given, got)
        assert torch.equal(got, want)
        assert want.isfinite().all()
        assert torch.equal(group.expand(y.clone(), middle, ids), group.expand(y, group.shrink(h, ids), ids))
    assert given is not None
    with pytest.raises(ShapeError, match="do not fit the packed input"):
        group.shrink(x, ids, into=replace(given, scratch=given.scratch[:16]))


@pytest.mark.parametrize("activation", ["silu", "gelu", "quickgelu"])
@pytest.mark.parametrize(("rows", "levels"), [(1, 1), (7, 2), (13, 2)])
def test_a_gated_group_is_bitwise_its_parts(rows: int, levels: int, activation: Any) -> None:
    widths = (66, 66)
    entries = group_of(levels, widths, 64, (16, 1, 30, 4))
    group = LoraGroup(entries, 64, widths)
    x, y, _, ids = operands(rows, 64, sum(widths))
    gate, up = separate(entries, x, y, widths, ids)
    found = group.expand(y, group.shrink(x, ids), ids, activation=activation)
    assert torch.equal(found, gated_activation(gate, up, activation))


def require_room(group: LoraGroup, matmul: FusedLinear, x: torch.Tensor, *, in_99_kib: bool = False) -> None:
    """Fail if the matmul does not add the adapters.

    Skips the test on cards whose blocks have 99 KiB of shared memory, unless these adapters have room `in_99_kib`.
    """
    small = cuda_status().devices[0].shared_bytes_per_block < 128 << 10
    if not group.fits(matmul, x):
        assert small
        assert not in_99_kib
        pytest.skip("gemv_ring has no room for these adapters in 99 KiB of shared memory")


@pytest.mark.needs("bulk_copy")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["one order", "own orders", "gptq act-order", "groups of 32", "gptq groups of 32"])
@pytest.mark.parametrize("ranks", [(16, 1, 8, 5), (32, 16, 31, 17)])
def test_a_matmul_adds_adapters_bitwise_as_a_launch_after_it(kind: str, rows: int, ranks: tuple[int, ...]) -> None:
    """Three matrices, and one with a residual, for every pair of sets; some sets and matrices have no adapter."""
    matrices, norm = qkv(kind), norm_of(torch.float32)
    for some in (matrices, matrices[2:]):
        matmul, normed = FusedLinear(some), FusedLinear(some, norm=norm)
        widths = tuple(matrix.out_features for matrix in some)
        group = LoraGroup(group_of(1, widths, K, ranks), K, widths)
        x, _, residual, _ = operands(rows, K, sum(widths))
        require_room(group, matmul, x, in_99_kib=rows == 1 or max(ranks) <= 16)
        assert not group.fits(matmul, x.repeat(3, 1))
        for sets in ((0, 0), (0, 2), (2, 0), (1, 3), (-1, 0), (3, -1), (1, 1)):
            ids = torch.tensor(sets[:rows], dtype=torch.int32, device=DEVICE)
            bare, out = torch.empty_like(residual), torch.full_like(residual, torch.nan)
            want = group.expand(matmul(x, bare), group.shrink(x, ids), ids)
            assert bitwise_equal(group.multiply(matmul, x, ids, out=out), want), sets
            into = residual.clone()  # also the result
            assert bitwise_equal(group.multiply(matmul, x, ids, out=into, residual=into), residual + want)
            if set(sets[:rows]) == {0}:
                assert bitwise_equal(group.multiply(matmul, x, out=out), want), "all rows have the first set"
            h = rms_norm(x, norm.weight, norm.eps)
            want = group.expand(matmul(h, bare), group.shrink(h, ids), ids)
            for looks in (None, 0, 1):  # of blocks for the work of other blocks, which they then do themselves
                found = torch.full_like(residual, torch.nan)
                assert bitwise_equal(group.multiply(normed, x, ids, out=found, looks=looks), want), (sets, looks)


@pytest.mark.needs("bulk_copy")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("activation", ["silu", "gelu", "quickgelu"])
@pytest.mark.parametrize(("width", "inputs"), [(160, K), (136, K), (16384, 2304), (4128, 2304)])
def test_a_gated_matmul_adds_adapters_bitwise(rows: int, activation: Any, width: int, inputs: int) -> None:
    """Blocks of few tiles, and of many, whose warps keep their class and whose gates come first."""
    pair = [exl2(width, 4, 3, seed=seed, k=inputs, bias=seed == 1) for seed in range(2)]
    widths = (width, width)
    gated, bare = FusedLinear(pair, activation=activation), FusedLinear(pair)
    group = LoraGroup(group_of(1, widths, inputs, (16, 1, 30, 32)), inputs, widths)
    x, _, _, _ = operands(rows, inputs, width)
    require_room(group, gated, x)
    for sets in ((0, 2), (3, 0), (-1, 1)):
        ids = torch.tensor(sets[:rows], dtype=torch.int32, device=DEVICE)
        y = bare(x, x.new_empty(rows, 2 * width))
        want = group.expand(y, group.shrink(x, ids), ids, activation=activation)
        found = group.multiply(gated, x, ids, out=torch.full_like(want, torch.nan))
        assert bitwise_equal(found, want), sets


@pytest.mark.needs("bulk_copy")
@pytest.mark.parametrize("rows", [1, 2])
def test_outputs_that_fill_no_tile_get_adapters(rows: int) -> None:
    """Three matrices side by side have half a tile more each; the workspace is all ones after the launches."""
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(7))
    widths = (520, 136, 24)
    matmul = FusedLinear([exl2(n, 4, 5, seed=i, perm=perm, bias=True) for i, n in enumerate(widths)])
    group = LoraGroup(group_of(1, widths, K, (32, 16, 31, 1)), K, widths)
    x, _, residual, _ = operands(rows, K, sum(widths))
    held: list[torch.Tensor] = []
    with workspaces_in(held):
        for sets in ((0, 2), (3, 0), (2, 2)):
            ids = torch.tensor(sets[:rows], dtype=torch.int32, device=DEVICE)
            want = group.expand(matmul(x, torch.empty_like(residual)), group.shrink(x, ids), ids)
            found = torch.full_like(residual, torch.nan)
            assert bitwise_equal(group.multiply(matmul, x, ids, out=found, residual=residual), residual + want), sets
    torch.cuda.synchronize()
    assert held
    assert all(bool((memory == 255).all()) for memory in held)


@pytest.mark.needs("bulk_copy")
def test_matmuls_of_every_size_share_the_workspace() -> None:
    """Adapters of few rows together with matmuls of many rows, whose blocks exchange sums in the same memory."""
    matrix = exl2(4096, 4, k=14336)
    matmul = FusedLinear([matrix])
    group = LoraGroup(group_of(1, (4096,), 14336, (16, 1, 8, 5)), 14336, (4096,))
    many = torch.randn(20, 14336, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    first = matmul(many, many.new_empty(20, 4096)).clone()
    for rows in (2, 1, 2):
        x, _, _, ids = operands(rows, 14336, 4096)
        require_room(group, matmul, x)
        want = group.expand(matmul(x, x.new_empty(rows, 4096)), group.shrink(x, ids), ids)
        for _ in range(3):
            assert bitwise_equal(group.multiply(matmul, x, ids, out=torch.full_like(want, torch.nan)), want)
        assert bitwise_equal(matmul(many, many.new_empty(20, 4096)), first)


@pytest.mark.needs("bulk_copy")
def test_a_matmul_that_cannot_add_adapters_says_so() -> None:
    matrices = qkv("one order")
    matmul, widths = FusedLinear(matrices), tuple(matrix.out_features for matrix in matrices)
    x, y, _, _ = operands(1, K, sum(widths))
    deep, wide = (
        LoraGroup(group_of(levels, widths, K, ranks), K, widths)
        for levels, ranks in ((2, (16, 1, 8, 5)), (1, (33, 1, 8, 5)))
    )
    for group in (deep, wide):
        assert not group.fits(matmul, x)
        with pytest.raises(UnsupportedError, match=r"launch `LoraGroup\.shrink` .* `LoraGroup\.expand`"):
            group.multiply(matmul, x, out=y)
    group = LoraGroup(group_of(1, widths, K, (16, 1, 8, 5)), K, widths)
    with pytest.raises(UnsupportedError, match=r"launch `LoraGroup\.shrink` .* `LoraGroup\.expand`"):
        group.multiply(matmul, x.repeat(3, 1), out=y.repeat(3, 1))
    other = FusedLinear(matrices[:2])
    with pytest.raises(ShapeError, match="adapters of 1024"):
        group.multiply(other, x, out=y[:, : other.out_features].contiguous())
    with pytest.raises(ShapeError, match="adapters of 1024"):
        group.multiply(FusedLinear([*matrices[:2], matrices[1]]), x, out=y)
    first = entry(K, 512, 4, False)[0]
    with pytest.raises(ShapeError, match="multiple of 16"):
        replace(first, b=torch.zeros(4 * 512 + 1, dtype=torch.float16, device=DEVICE)[1:].view(4, 512))


def test_all_rows_have_the_first_set_without_numbers() -> None:
    entries = group_of(1, (32,), 64, (8, 1, 4, 2))
    group = LoraGroup(entries, 64, (32,))
    x, y, _, _ = operands(3, 64, 32)
    zeros = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert torch.equal(group.expand(y.clone(), group.shrink(x)), separate(entries, x, y, (32,), zeros)[0])


def test_a_group_rejects_what_does_not_fit() -> None:
    one = entry(64, 32, 4, False)[0]
    wrong: tuple[tuple[list[Any], tuple[int, ...], str], ...] = (
        ([[[one]]], (34,), "32 outputs"),
        ([[[None]]], (32,), "needs an entry"),
        ([[[one]], [[one, None]]], (32,), "every level"),
        ([[[one], [one]]], (32,), "every level"),
        ([[[one]]], (31,), "even number of outputs"),
    )
    for entries, widths, match in wrong:
        with pytest.raises(ShapeError, match=match):
            LoraGroup(entries, 64, widths)
    group = LoraGroup([[[one]]], 64, (32,))
    x, y, _, _ = operands(2, 64, 32)
    ids = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    middle = group.shrink(x, ids)
    with pytest.raises(ShapeError, match="T, 64"):
        group.shrink(x[:, :32].contiguous())
    with pytest.raises(ShapeError, match="slots"):
        group.shrink(x, ids[:1].clone())
    with pytest.raises(ShapeError, match="come together"):
        group.shrink(x, ids, normed=torch.empty_like(x))
    with pytest.raises(ShapeError, match="sum of widths"):
        group.expand(y[:, :16].contiguous(), middle, ids)
    with pytest.raises(ShapeError, match="middle"):
        group.expand(y, middle[:1].clone(), ids)
    with pytest.raises(ShapeError, match="residual"):
        group.expand(y, middle, ids, residual=y[:1].clone())
