"""Norms, RoPE and activations against their FP64 twins, over shapes, instruction sets and thread counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exl_kernels import threads
from exl_kernels.activation import activation, gated_activation, softcap
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.norm import layer_norm, rms_norm
from exl_kernels.reference import activation as activation_twin
from exl_kernels.reference import norm as norm_twin
from exl_kernels.reference import rope as rope_twin
from exl_kernels.rope import apply_rope

DIMS = (1, 7, 16, 31, 64, 80, 576, 2048, 5001)
KINDS: tuple[Any, ...] = ("silu", "gelu", "quickgelu", "gelu_erf", "relu2", "sigmoid", "tanh")


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_close(got: Tensor, oracle: Tensor, tolerance: float = 4e-6) -> None:
    error = (got.double() - oracle).abs() / (1 + oracle.abs())
    assert float(error.max()) < tolerance


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 3e3])
def test_norms_match_the_oracle(each_isa: str, dim: int, scale: float) -> None:
    x, w, b = randn(5, dim, scale=scale), randn(dim, seed=1), randn(dim, seed=2)
    assert_close(rms_norm(x, w, 1e-5), norm_twin.rms_norm(x.double(), w, 1e-5))
    assert_close(rms_norm(x, w, 1e-6, weight_offset=1.0), norm_twin.rms_norm(x.double(), w, 1e-6, weight_offset=1.0))
    # The mean is subtracted in float32, so the bound follows the largest element over the deviation.
    assert_close(layer_norm(x, w, b, 1e-5), norm_twin.layer_norm(x.double(), w, b, 1e-5), 2e-5)
    assert_close(layer_norm(x, w, None, 1e-5), norm_twin.layer_norm(x.double(), w, None, 1e-5), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_head_norms_use_one_weight_row_a_head(dtype: torch.dtype) -> None:
    x, w = randn(4, 3, 80), randn(3, 80, seed=1).to(dtype)
    got = rms_norm(x, w, 1e-6)
    assert_close(got, norm_twin.rms_norm(x.double(), w, 1e-6))
    for h in range(3):
        assert torch.equal(got[:, h], rms_norm(x[:, h].contiguous(), w[h], 1e-6))
    assert_close(layer_norm(x, w, w, 1e-6), norm_twin.layer_norm(x.double(), w, w, 1e-6))


def test_norm_rows_do_not_depend_on_other_rows_or_threads(restore_threads: None) -> None:
    x, w = randn(70, 1024), randn(1024, seed=1)
    whole = []
    for n in (1, 2, 3):
        threads.set_num_threads(n)
        whole.append((rms_norm(x, w, 1e-5), layer_norm(x, w, w, 1e-5)))
    for row in (0, 33, 69):
        assert torch.equal(whole[0][0][row], rms_norm(x[row : row + 1], w, 1e-5)[0])
    for other in whole[1:]:
        assert torch.equal(other[0], whole[0][0])
        assert torch.equal(other[1], whole[0][1])


def test_norms_write_to_out_and_in_place() -> None:
    x, w = randn(3, 33), randn(33, seed=1)
    expected = rms_norm(x, w, 1e-5)
    out = torch.empty_like(x)
    assert rms_norm(x, w, 1e-5, out=out) is out
    assert torch.equal(out, expected)
    assert rms_norm(x, w, 1e-5, out=x) is x
    assert torch.equal(x, expected)


def test_norms_take_strided_and_empty_input() -> None:
    x, w = randn(6, 64), randn(32, seed=1)
    assert torch.equal(rms_norm(x[:, ::2], w, 1e-5), rms_norm(x[:, ::2].contiguous(), w, 1e-5))
    assert rms_norm(torch.empty(0, 32), w, 1e-5).shape == (0, 32)


def test_nan_reaches_only_its_own_row() -> None:
    x = randn(3, 100)
    x[1, 50] = torch.nan
    got = rms_norm(x, torch.ones(100), 1e-5)
    assert got[1].isnan().all()
    assert not got[[0, 2]].isnan().any()


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (torch.zeros(2, 8), torch.zeros(7), ShapeError),
        (torch.zeros(2, 8), torch.zeros(3, 8), ShapeError),
        (torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8), DTypeError),
        (torch.zeros(2, 8), torch.zeros(8, dtype=torch.int32), DTypeError),
        (torch.zeros(2, 8, device="meta"), torch.zeros(8), UnsupportedError),
    ],
)
def test_norms_refuse_bad_input(x: Tensor, weight: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        rms_norm(x, weight, 1e-5)
    with pytest.raises(error):
        layer_norm(x, weight, None, 1e-5)


def test_norms_refuse_a_wrong_out() -> None:
    with pytest.raises(ShapeError, match="out"):
        rms_norm(torch.zeros(2, 8), torch.zeros(8), 1e-5, out=torch.zeros(2, 9))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotated"), [(2, 2), (64, 64), (80, 32), (47, 40), (128, 128), (256, 64)])
def test_rope_matches_the_oracle(each_isa: str, dim: int, rotated: int, interleaved: bool) -> None:
    angles = randn(50, rotated // 2, scale=10.0)
    cos, sin = angles.cos(), angles.sin()
    x, positions = randn(9, 3, dim), torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(3))
    oracle = rope_twin.apply_rope(x.double(), cos, sin, positions, interleaved=interleaved)
    untouched = x[..., rotated:].clone()
    assert apply_rope(x, cos, sin, positions, interleaved=interleaved) is x
    assert_close(x, oracle, 1e-6)
    assert torch.equal(x[..., rotated:], untouched)


def test_rope_is_the_same_in_any_chunking_and_at_any_thread_count(restore_threads: None) -> None:
    angles = randn(600, 32)
    x, positions = randn(600, 4, 64), torch.arange(600)
    whole = []
    for n in (1, 2, 3):
        threads.set_num_threads(n)
        whole.append(apply_rope(x.clone(), angles.cos(), angles.sin(), positions))
    single = torch.cat(
        [apply_rope(x[t : t + 1].clone(), angles.cos(), angles.sin(), positions[t : t + 1]) for t in range(600)]
    )
    assert all(torch.equal(w, single) for w in whole)


@pytest.mark.parametrize("bad", [-1, 50])
def test_rope_refuses_positions_outside_the_tables(bad: int) -> None:
    x, table = randn(2, 1, 8), torch.zeros(50, 4)
    before = x.clone()
    with pytest.raises(ShapeError, match=f"position {bad} outside"):
        apply_rope(x, table, table, torch.tensor([3, bad]))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("x", "table", "positions", "error"),
    [
        (torch.zeros(2, 8), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), ShapeError),
        (torch.zeros(2, 1, 8), torch.zeros(5, 5), torch.zeros(2, dtype=torch.int64), ShapeError),
        (torch.zeros(2, 1, 8), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64), ShapeError),
        (torch.zeros(2, 1, 8), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int32), DTypeError),
        (torch.zeros(2, 1, 8, dtype=torch.float16), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), DTypeError),
        (torch.zeros(2, 8, 1).transpose(1, 2), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), None),
        (torch.zeros(4, 2, 8).transpose(0, 1), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), ShapeError),
    ],
)
def test_rope_refuses_bad_input(x: Tensor, table: Tensor, positions: Tensor, error: type[Exception] | None) -> None:
    if error is None:  # strides that amount to contiguous are fine
        apply_rope(x, table, table, positions)
        return
    with pytest.raises(error):
        apply_rope(x, table, table, positions)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 15, 16, 100, 20_000])
def test_activations_match_the_oracle(each_isa: str, kind: Any, n: int) -> None:
    x, up = randn(n, scale=8.0), randn(n, seed=1)
    assert_close(activation(x, kind), activation_twin.activation(x.double(), kind), 1e-6)
    assert_close(gated_activation(x, up, kind), activation_twin.gated_activation(x.double(), up, kind), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_at_the_ends_of_the_range(each_isa: str, kind: Any) -> None:
    x = torch.tensor([0.0, -0.0, 30.0, -30.0, 100.0, -100.0, 1e4, -1e4, 1e30, torch.nan, torch.inf])
    got = activation(x, kind)
    assert got[9].isnan()
    finite = x[:8]
    assert_close(got[:8], activation_twin.activation(finite.double(), kind), 1e-6)
    assert torch.equal(got[[8, 10]], activation_twin.activation(x[[8, 10]].double(), kind).float())


@given(n=st.integers(0, 70), start=st.integers(0, 3), kind=st.sampled_from(KINDS))
def test_activation_of_an_element_does_not_depend_on_its_place(n: int, start: int, kind: Any) -> None:
    x = randn(80, scale=5.0)
    assert torch.equal(activation(x, kind)[start : start + n], activation(x[start : start + n], kind))


def test_activations_in_place_and_at_any_thread_count(restore_threads: None) -> None:
    x, up = randn(100_000), randn(100_000, seed=1)
    results = []
    for n in (1, 2, 3):
        threads.set_num_threads(n)
        results.append(gated_activation(x, up, "silu"))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    target = up.clone()
    assert gated_activation(x, target, "silu", out=target) is target
    assert torch.equal(target, results[0])


@given(cap=st.floats(0.125, 100.0), scale=st.floats(0.01, 1e4), n=st.integers(1, 200))
def test_softcap_matches_the_oracle(cap: float, scale: float, n: int) -> None:
    x = randn(n, seed=n, scale=scale)
    want = cap * torch.tanh(x.double() / cap)
    assert softcap(x, cap) is x
    assert_close(x / cap, want / cap)
    assert bool((x.abs() <= cap * (1 + 1e-6)).all())


def test_softcap_refuses_bad_input() -> None:
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(UnsupportedError, match="positive"):
            softcap(torch.ones(3), cap)
    with pytest.raises(DTypeError):
        softcap(torch.ones(3).half(), 1.0)
    with pytest.raises(ShapeError, match="contiguous"):
        softcap(torch.ones(4, 3).t(), 1.0)


def test_activations_refuse_bad_input() -> None:
    with pytest.raises(UnsupportedError, match="relu"):
        activation(torch.zeros(3), "relu")  # type: ignore[arg-type]
    with pytest.raises(ShapeError):
        gated_activation(torch.zeros(3), torch.zeros(4), "silu")
    with pytest.raises(DTypeError):
        activation(torch.zeros(3, dtype=torch.float16), "silu")
