"""Parts of a matrix, by quarters of K and by columns: bitwise the whole matrix's results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from test_linear import ISAS, bitwise_equal, group_lists, normal, random_exl2, random_gptq, row_counts, without_bias
from torch import Tensor

from exl_kernels import threads
from exl_kernels.errors import ShapeError, UnsupportedError
from exl_kernels.linear import QUARTERS, QuantMatrix


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = threads.isa()
    yield
    threads.set_isa(before)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[QuantMatrix, QuantMatrix, Tensor | None, float]:
    """A matrix, the same without bias and prescale, its bias and its prescale."""
    kind = draw(st.sampled_from(("exl2", "gptq", "float16", "bfloat16", "float32")))
    n, seed = draw(st.sampled_from((8, 40, 96))), draw(st.integers(0, 1000))
    compute: Any = draw(st.sampled_from(("exact", "int8")))
    prescale = draw(st.sampled_from((1.0, 0.37)))
    made: Any
    if kind == "exl2":
        tensors = random_exl2(n, draw(group_lists), seed)
        made = QuantMatrix.from_exl2
    elif kind == "gptq":
        k, groups, bits = draw(st.sampled_from((64, 160, 288))), draw(st.integers(1, 5)), 4
        generator = torch.Generator().manual_seed(seed)
        group_of = torch.cat([torch.arange(groups), torch.randint(0, groups, (k - groups,), generator=generator)])
        tensors = random_gptq(bits, k, n, group_of[torch.randperm(k, generator=generator)], groups, seed)
        made = partial(QuantMatrix.from_gptq, bits=bits)
    else:
        weight = normal(n, draw(st.sampled_from((32, 100, 416))), seed=seed).to(getattr(torch, kind))
        bias = normal(n, seed=seed + 1)
        plain = QuantMatrix.from_float(weight)
        return QuantMatrix.from_float(weight, bias, prescale=prescale), plain, bias, prescale
    plain = made(without_bias(tensors), compute=compute)
    return made(tensors, compute=compute, prescale=prescale), plain, tensors["bias"].float(), prescale


@examples(80, 16)
@given(
    matrix=matrices(),
    rows=row_counts,
    isa=st.sampled_from(ISAS),
    borders=st.lists(st.integers(1, QUARTERS - 1), unique=True).map(sorted),
)
def test_sums_of_quarters_are_those_of_the_matrix(
    matrix: tuple[QuantMatrix, QuantMatrix, Tensor | None, float], rows: int, isa: threads.ISA, borders: list[int]
) -> None:
    """The first quarters may be summed together, every later one is added alone; then come bias and prescale."""
    whole, plain, bias, prescale = matrix
    x = normal(rows, whole.in_features)
    expected, expected_plain = whole.matmul(x), plain.matmul(x)
    threads.set_isa(isa)
    first = borders[0] if borders else QUARTERS
    features = [whole.quarter_features(a, b) for a, b in [(0, first), *((q, q + 1) for q in range(first, QUARTERS))]]
    assert sorted(torch.cat(features).tolist()) == list(range(whole.in_features))
    total = None
    for (a, b), own in zip([(0, first), *((q, q + 1) for q in range(first, QUARTERS))], features, strict=True):
        if not len(own):
            continue
        sums = whole.quarters(a, b).matmul(x[:, own])
        total = sums if total is None else total + sums
    assert total is not None
    assert bitwise_equal(total, expected_plain)
    assert bitwise_equal((total if bias is None else total + bias) * prescale, expected)


@examples(80, 16)
@given(matrix=matrices(), rows=row_counts, isa=st.sampled_from(ISAS), data=st.data())
def test_columns_give_the_results_of_the_matrix(
    matrix: tuple[QuantMatrix, QuantMatrix, Tensor | None, float], rows: int, isa: threads.ISA, data: st.DataObject
) -> None:
    whole = matrix[0]
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, whole.out_features - 1), min_size=1, max_size=70)))
    x = normal(rows, whole.in_features)
    expected = whole.matmul(x)[:, chosen]
    threads.set_isa(isa)
    part = whole.columns(chosen)
    assert part.out_features == len(chosen)
    assert bitwise_equal(part.matmul(x), expected)
    assert bitwise_equal(part.dequantize(), whole.dequantize()[:, chosen])


def test_parts_of_parts() -> None:
    """The columns of one matrix in the order of another's quarters, as tensor parallelism cuts an MLP."""
    up = QuantMatrix.from_exl2(random_exl2(320, [(4, 64)], 1))
    down = QuantMatrix.from_exl2(random_exl2(64, [(6, 96), (3, 224)], 2))
    x = normal(5, 64)
    total = torch.zeros(5, 64)
    for quarter in range(QUARTERS):
        features = down.quarter_features(quarter, quarter + 1)
        total += down.quarters(quarter, quarter + 1).matmul(up.columns(features).matmul(x))
    bias = random_exl2(64, [(6, 96), (3, 224)], 2)["bias"].float()
    assert bitwise_equal(total + bias, down.matmul(up.matmul(x)))


def test_wrong_parts_are_rejected() -> None:
    matrix = QuantMatrix.from_float(normal(8, 64), name="m")
    for first, last in ((1, 1), (2, 1), (-1, 2), (3, 5)):
        with pytest.raises(ShapeError, match="first < last"):
            matrix.quarters(first, last)
    with pytest.raises(ShapeError, match="no rows"):
        matrix.quarters(0, 1)  # two blocks of 32 rows: only quarters 1 and 3 have one
    for columns in ([], [8], [-1, 2]):
        with pytest.raises(ShapeError, match="columns must be"):
            matrix.columns(torch.tensor(columns, dtype=torch.int64))


@pytest.mark.cuda
def test_a_matrix_on_a_gpu_has_no_parts() -> None:
    matrix = QuantMatrix.from_float(normal(8, 64).half(), device="cuda")
    with pytest.raises(UnsupportedError, match="only on the CPU"):
        matrix.quarters(0, 1)
    with pytest.raises(UnsupportedError, match="only on the CPU"):
        matrix.columns(torch.arange(4))
