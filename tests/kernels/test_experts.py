"""Grouped experts on the CPU: bitwise one expert after the other, whatever else is in the call, and typed errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from effort import trials
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_linear import random_exl2, random_gptq, without_bias
from torch import Tensor

from exl_kernels import threads
from exl_kernels.activation import ActivationKind, gated_activation
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.linear import QuantMatrix
from exl_kernels.moe import CpuExperts, group_experts
from exl_kernels.reference.experts import expert_sum

pytestmark = pytest.mark.usefixtures("restore_threads")

Expert = tuple[QuantMatrix, QuantMatrix, QuantMatrix]
ACTIVATIONS: tuple[ActivationKind, ...] = ("silu", "gelu", "quickgelu", "gelu_erf", "relu2")
FORMATS = ("exl2", "gptq", "float16", "bfloat16", "float32")
HIDDEN = 96


def matrix(form: str, k: int, n: int, seed: int, compute: Any, *, order: int | None = None) -> QuantMatrix:
    """A random matrix; order: the seed of the permutation of an EXL2 matrix's inputs."""
    gen = torch.Generator().manual_seed(seed)
    if form == "exl2":
        widths = sorted(((2, 3, 4, 5, 6, 8)[(seed + i) % 6] for i in range(k // 32)), reverse=True)
        tensors = without_bias(random_exl2(n, [(width, 32) for width in widths], seed))
        if order is not None:
            tensors["q_invperm"] = torch.randperm(k, generator=torch.Generator().manual_seed(order)).int()
        return QuantMatrix.from_exl2(tensors, compute=compute, prescale=0.5)
    if form == "gptq":
        groups = torch.randint(0, k // 32, (k,), generator=gen) if seed % 2 else None
        return QuantMatrix.from_gptq(random_gptq(4, k, n, groups, k // 32, seed), compute=compute)
    weight = torch.randn(n, k, generator=gen) * k**-0.5
    return QuantMatrix.from_float(weight.to(getattr(torch, form)), torch.randn(n, generator=gen))


def expert(form: str, inner: int, seed: int, compute: Any = "int8", hidden: int = HIDDEN) -> Expert:
    """Every second EXL2 expert's gate and up agree in their permutation."""
    order = seed if seed % 2 else None
    return (
        matrix(form, hidden, inner, 3 * seed, compute, order=order),
        matrix(form, hidden, inner, 3 * seed + 1, compute, order=order),
        matrix(form, inner, hidden, 3 * seed + 2, compute),
    )


def run_one(parts: Expert, x: Tensor, activation: ActivationKind) -> Tensor:
    gate, up, down = parts
    return down.matmul(gated_activation(gate.matmul(x), up.matmul(x), activation))


def one_by_one(
    h: Tensor, weights: Tensor, ids: Tensor, experts: Sequence[Expert], activation: ActivationKind
) -> Tensor:
    """Expert after expert over the rows that chose it, then the weighted sum in the order of choice."""
    parts = torch.empty(*ids.shape, h.shape[1])
    for number, matrices in enumerate(experts):
        rows, places = (ids == number).nonzero(as_tuple=True)
        if len(rows):
            parts[rows, places] = run_one(matrices, h[rows], activation)
    y = parts[:, 0] * weights[:, :1]
    for c in range(1, ids.shape[1]):
        y += parts[:, c] * weights[:, c : c + 1]
    return y


def choices(rows: int, experts: int, chosen: int, seed: int, spread: int | None = None) -> tuple[Tensor, Tensor]:
    """(weights, ids) among the first `spread` experts."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(spread or experts, generator=gen)[:chosen] for _ in range(rows)])
    return torch.rand(rows, chosen, generator=gen), ids


def rows_of(count: int, hidden: int = HIDDEN, seed: int = 0) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=trials(60, 8), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bitwise_one_expert_after_the_other(data: st.DataObject) -> None:
    draw: Callable[[Any], Any] = data.draw
    count = draw(st.integers(1, 7))
    compute, activation = draw(st.sampled_from(["int8", "exact"])), draw(st.sampled_from(ACTIVATIONS))
    experts = [
        expert(draw(st.sampled_from(FORMATS)), 32 * draw(st.integers(1, 3)), seed, compute) for seed in range(count)
    ]
    shared = expert(draw(st.sampled_from(FORMATS)), 64, 40, compute) if draw(st.booleans()) else None
    chosen = draw(st.integers(1, count))
    rows = draw(st.sampled_from([1, 2, 3, 8, 17, 64, 65, 150]))
    weights, ids = choices(rows, count, chosen, rows, draw(st.integers(chosen, count)))
    h, residual = rows_of(rows), rows_of(rows, seed=1)
    factors = torch.rand(rows, 1) if shared is not None and draw(st.booleans()) else None
    threads.set_isa(draw(st.sampled_from(["scalar", "avx2", "avx512"])))
    threads.set_num_threads(draw(st.integers(1, 4)))

    expected = one_by_one(h, weights, ids, experts, activation)
    together = group_experts(experts, activation, chosen, shared)
    assert together is not None
    assert together.shares(rows, chosen, False)
    assert together.joins_shared == (shared is not None)
    if shared is not None:
        y = run_one(shared, h, activation)
        given_result = together(h, weights, ids, shared=y, shared_weights=factors)
        expected += y if factors is None else y * factors
        assert torch.equal(given_result, expected)
    assert torch.equal(together(h, weights, ids, shared_weights=factors), expected)
    x = residual.clone()
    assert together(h, weights, ids, shared_weights=factors, residual=x, out=x) is x
    assert torch.equal(x, residual + expected)
    assert torch.equal(together(h, weights, ids, shared_weights=factors, residual=residual), x)
    same = h.clone()
    together(same, weights, ids, shared_weights=factors, residual=same, out=same)
    assert torch.equal(same, h + expected)


@settings(max_examples=trials(30, 6), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("compute", ["int8", "exact"])
def test_a_row_depends_on_itself_alone(compute: str, data: st.DataObject) -> None:
    """In any batch, order and cut, on any number of threads."""
    experts = [expert(form, 64, seed, compute) for seed, form in enumerate(FORMATS)]
    together = CpuExperts(experts, "silu", expert("exl2", 32, 9, compute))
    h, (weights, ids) = rows_of(140), choices(140, 5, 3, 2)
    alone = torch.cat([together(h[r : r + 1], weights[r : r + 1], ids[r : r + 1]) for r in range(140)])
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 139), min_size=1, max_size=140)))
    threads.set_num_threads(data.draw(st.integers(1, 5)))
    assert torch.equal(together(h[rows], weights[rows], ids[rows]), alone[rows])


def test_formats_differ_within_an_expert_and_a_row_chooses_one_twice() -> None:
    forms = (("float32", "exl2", "gptq"), ("exl2", "bfloat16", "float16"), ("gptq", "float16", "exl2"))
    experts = [
        (
            matrix(gate, HIDDEN, 64, 3 * seed, "int8", order=seed),
            matrix(up, HIDDEN, 64, 3 * seed + 1, "exact", order=seed + 1),
            matrix(down, 64, HIDDEN, 3 * seed + 2, "int8"),
        )
        for seed, (gate, up, down) in enumerate(forms)
    ]
    h, weights = rows_of(20), torch.rand(20, 4, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(0, 3, (20, 4), generator=torch.Generator().manual_seed(2))
    assert torch.equal(CpuExperts(experts, "silu")(h, weights, ids), one_by_one(h, weights, ids, experts, "silu"))


@pytest.mark.parametrize("alias", ["h", "shared", "part of h", "part of residual"])
def test_the_result_may_share_memory_with_an_operand(alias: str) -> None:
    together = CpuExperts([expert("exl2", 64, seed) for seed in range(3)], "silu")
    weights, ids = choices(6, 3, 2, 1)

    def operands() -> dict[str, Tensor]:
        return {"h": rows_of(7), "shared": rows_of(7, seed=1), "residual": rows_of(7, seed=2)}

    plain = {name: rows[:6].clone() for name, rows in operands().items()}
    expected = together(plain["h"], weights, ids, shared=plain["shared"], residual=plain["residual"])
    rows = operands()
    out = rows[alias.split()[-1]][1:] if alias.startswith("part") else rows[alias][:6]
    found = together(rows["h"][:6], weights, ids, shared=rows["shared"][:6], residual=rows["residual"][:6], out=out)
    assert torch.equal(found, expected)


def test_rows_beyond_the_scratch_memory_are_taken_in_parts() -> None:
    wide = [expert("float16", 4096, seed, hidden=64) for seed in range(2)]
    together = CpuExperts(wide, "silu")
    h, (weights, ids) = rows_of(2100, 64), choices(2100, 2, 2, 3)
    whole = together(h, weights, ids)
    assert torch.equal(whole, one_by_one(h, weights, ids, wide, "silu"))
    assert torch.equal(whole[-3:], together(h[-3:], weights[-3:], ids[-3:]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float_experts_against_float64(activation: ActivationKind) -> None:
    """Also of sizes that are no multiple of a tile."""
    gen = torch.Generator().manual_seed(1)
    weights64 = [
        tuple(torch.randn(n, k, generator=gen).double() * k**-0.5 for k, n in ((70, 41), (70, 41), (41, 70)))
        for _ in range(4)
    ]
    experts = [tuple(QuantMatrix.from_float(w.float()) for w in parts) for parts in weights64]
    h, (weights, ids) = rows_of(9, 70), choices(9, 4, 2, 5)
    plain = [tuple(w.float().double().T for w in parts) for parts in weights64]
    expected = expert_sum(h.double(), weights.double(), ids, plain, activation)
    found = CpuExperts(experts, activation)(h, weights, ids)  # type: ignore[arg-type]
    assert float((found - expected).abs().max()) < 1e-5


def test_no_rows() -> None:
    together = CpuExperts([expert("float16", 32, 0)], "silu")
    assert together(rows_of(0), torch.empty(0, 1), torch.empty(0, 1, dtype=torch.int64)).shape == (0, HIDDEN)


def test_not_finite_values_stay_in_their_row() -> None:
    together = CpuExperts([expert("exl2", 64, seed) for seed in range(3)], "silu")
    h, (weights, ids) = rows_of(5), choices(5, 3, 2, 1)
    clean = together(h, weights, ids)
    h[2, 7] = float("nan")
    found = together(h, weights, ids)
    assert not torch.isfinite(found[2]).any()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_matrices_that_do_not_fit() -> None:
    gate, up, down = expert("float16", 64, 0)
    other = expert("float16", 32, 1)
    with pytest.raises(ShapeError, match="there are no experts"):
        CpuExperts([], "silu")
    with pytest.raises(ShapeError, match="outputs of gate of expert 1: 32, expected 64"):
        CpuExperts([(gate, up, down), (other[0], up, down)], "silu")
    with pytest.raises(ShapeError, match="inputs of down of expert 0: 32, expected 64"):
        CpuExperts([(gate, up, other[2])], "silu")
    with pytest.raises(ShapeError, match="inputs of gate of expert 1: 64, expected 96"):
        CpuExperts([(gate, up, down)], "silu", expert("float16", 32, 1, hidden=64))


def test_operands_that_do_not_fit() -> None:
    together = CpuExperts([expert("float16", 32, seed) for seed in range(3)], "silu")
    h, (weights, ids) = rows_of(4), choices(4, 3, 2, 1)
    for bad in (3, -1, 2**40):
        wrong = ids.clone()
        wrong[2, 1] = bad
        with pytest.raises(ShapeError, match=f"row 2 chooses expert {bad} of 3"):
            together(h, weights, wrong)
    with pytest.raises(ShapeError, match="ids"):
        together(h, weights, ids[:, :0])
    with pytest.raises(ShapeError, match="weights"):
        together(h, weights[:, :1], ids)
    with pytest.raises(ShapeError, match=r"ids: shape \(3, 2\)"):
        together(h, weights, ids[:3])
    with pytest.raises(ShapeError, match="h"):
        together(h[:, :64], weights, ids)
    with pytest.raises(ShapeError, match="h is not contiguous"):
        together(rows_of(HIDDEN, 4).T, weights, ids)
    with pytest.raises(ShapeError, match="shared_weights"):
        together(h, weights, ids, shared=h, shared_weights=torch.ones(3))
    with pytest.raises(ShapeError, match="residual"):
        together(h, weights, ids, residual=h[:2])
    with pytest.raises(DTypeError, match="h"):
        together(h.half(), weights, ids)
    with pytest.raises(DTypeError, match="ids"):
        together(h, weights, ids.int())
    with pytest.raises(UnsupportedError, match="meta"):
        together(h, weights, ids, out=h.to("meta"))
