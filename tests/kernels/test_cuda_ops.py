"""Elementary CUDA operators against FP64 twins, through the public API; needs a GPU."""

from __future__ import annotations

import pytest
import torch

from exl_kernels.activation import activation, gated_activation, softcap
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.norm import layer_norm, rms_norm
from exl_kernels.reference import activation as activation_twin
from exl_kernels.reference import norm as norm_twin
from exl_kernels.reference import rope as rope_twin
from exl_kernels.rope import apply_rope

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Half a unit in the last place of the result, plus FP32 arithmetic.
BOUND = {torch.float16: 2**-11 * 1.05, torch.bfloat16: 2**-8 * 1.05, torch.float32: 3e-6}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def assert_close(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    """Elementwise: relative to the result, absolute below 1 (a cancelling result has no relative bound)."""
    assert got.isfinite().all()
    error = (got.double().cpu() - want.cpu()).abs()
    bound = BOUND[got.dtype] * scale * want.cpu().abs().clamp(min=1.0)
    assert bool((error <= bound).all()), f"worst {float((error / bound).max()):.2f} times the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 8, 64, 72, 1000, 2048, 4096, 4608, 5120, 14336])
def test_norms(dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    x, w = randn(5, width, dtype=dtype), randn(width, dtype=weight_dtype, seed=1)
    b = randn(width, dtype=weight_dtype, seed=2)
    for offset in (0.0, 1.0):
        want = norm_twin.rms_norm(x.double(), w, 1e-5, weight_offset=offset)
        assert_close(rms_norm(x, w, 1e-5, weight_offset=offset), want, scale=2.0)
    if width > 1:
        assert_close(layer_norm(x, w, b, 1e-5), norm_twin.layer_norm(x.double(), w, b, 1e-5), scale=4.0)
        assert_close(layer_norm(x, w, None, 1e-5), norm_twin.layer_norm(x.double(), w, None, 1e-5), scale=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_place_and_unaligned(dtype: torch.dtype) -> None:
    x, w = randn(3, 6, 64, dtype=dtype), randn(6, 64)
    want = norm_twin.rms_norm(x.double(), w, 1e-6)
    assert_close(rms_norm(x, w, 1e-6), want, scale=2.0)
    moved = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    aligned = rms_norm(x, w, 1e-6)
    assert torch.equal(rms_norm(moved, w, 1e-6), aligned), "an address changes no bit"
    assert rms_norm(x, w, 1e-6, out=x) is x
    assert torch.equal(x, aligned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1000, 4608, 12288])
def test_a_layer_norm_depends_on_no_address_and_no_other_row(dtype: torch.dtype, width: int) -> None:
    x, w, b = 3.0 + randn(9, width, dtype=dtype), randn(width, seed=1), randn(width, seed=2)
    whole = layer_norm(x, w, b, 1e-5)
    moved = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert torch.equal(layer_norm(moved, w, b, 1e-5), whole)
    assert torch.equal(layer_norm(x[4:5].contiguous(), w, b, 1e-5), whole[4:5])
    assert layer_norm(x, w, b, 1e-5, out=x) is x
    assert torch.equal(x, whole)


def test_rows_do_not_depend_on_each_other() -> None:
    x, w = randn(64, 4096, dtype=torch.float16), randn(4096)
    whole = rms_norm(x, w, 1e-6)
    for rows in (1, 3, 17):
        assert torch.equal(rms_norm(x[:rows].contiguous(), w, 1e-6), whole[:rows])
    assert torch.equal(rms_norm(x[40:41].contiguous(), w, 1e-6), whole[40:41])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotated"), [(1, 2, 2), (4, 64, 64), (32, 128, 128), (3, 80, 40), (2, 96, 96), (8, 256, 64)]
)
def test_rope(dtype: torch.dtype, interleaved: bool, heads: int, head_dim: int, rotated: int) -> None:
    positions = torch.tensor([0, 5, 5, 99, 17], device="cuda")
    angles = torch.outer(torch.arange(100.0), 10000.0 ** (-torch.arange(0, rotated, 2) / rotated))
    cos, sin = angles.cos().cuda(), angles.sin().cuda()
    x = randn(5, heads, head_dim, dtype=dtype)
    want = rope_twin.apply_rope(
        x.double().cpu(), cos.double().cpu(), sin.double().cpu(), positions.cpu(), interleaved=interleaved
    )
    got = apply_rope(x, cos, sin, positions, interleaved=interleaved)
    assert got is x
    assert_close(got, want, scale=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "quickgelu"])
@pytest.mark.parametrize("count", [1, 8, 1000, 14336 * 3, 300_000])
def test_activations(dtype: torch.dtype, kind: str, count: int) -> None:
    gate, up = randn(count, dtype=dtype) * 4, randn(count, dtype=dtype, seed=1)
    alone = activation_twin.activation(gate.double(), kind)
    assert_close(activation(gate, kind), alone, scale=2.0)  # type: ignore[arg-type]
    assert_close(gated_activation(gate, up, kind), alone * up.double(), scale=2.0)  # type: ignore[arg-type]
    assert gated_activation(gate, up, kind, out=up) is up  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3, 4, 1000, 70001])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(count: int, cap: float) -> None:
    x = randn(count + 1) * 40.0
    for first in (0, 1):
        part = x[first : first + count].clone() if first == 0 else x.clone()[1:]
        want = cap * torch.tanh(part.double().cpu() / cap)
        assert softcap(part, cap) is part
        assert_close(part, want, scale=max(cap, 1.0))
    limits = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e30], device="cuda")
    assert softcap(limits, cap).tolist() == [0.0, 0.0, cap, -cap, cap]
    with pytest.raises(DTypeError, match="float16"):
        softcap(x.half(), cap)


def test_activation_of_extremes() -> None:
    x = torch.tensor([-60000.0, -100.0, -0.0, 0.0, 100.0, 60000.0], device="cuda")
    assert torch.equal(activation(x, "silu")[2:], x[2:].clamp(min=0))
    assert activation(x, "silu").isfinite().all()
    assert activation(x, "gelu").isfinite().all()


def test_bad_operands_are_refused_before_a_launch() -> None:
    x = randn(4, 64)
    with pytest.raises(ShapeError, match="weight"):
        rms_norm(x, randn(32), 1e-6)
    with pytest.raises(DTypeError, match="cpu"):
        rms_norm(x, torch.ones(64), 1e-6)
    with pytest.raises(DTypeError, match="int32"):
        rms_norm(x.int(), randn(64), 1e-6)
    with pytest.raises(ShapeError, match="contiguous"):
        rms_norm(x.t(), randn(4), 1e-6)
    with pytest.raises(ShapeError, match="up"):
        gated_activation(x, x[:2], "silu")
    with pytest.raises(ShapeError, match="positions"):
        apply_rope(randn(4, 2, 64), randn(9, 32), randn(9, 32), torch.zeros(3, dtype=torch.int64, device="cuda"))
