"""Joined launches: bitwise the operators that they join, and near FP64 twins; needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import matmul_of
from linear_cases import reads_plain_rows
from torch import Tensor

from exl_kernels.attention.cuda import Rotation
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.fused import add_post_norm, add_rms_norm, embed, layer_norm_packed, norm_parts, rope_store
from exl_kernels.kv import KVKind, KVPages, store_kv
from exl_kernels.linear.fused import FusedLinear, FusedNorm, Packed
from exl_kernels.linear.matmul_input import MatmulInput
from exl_kernels.norm import layer_norm, rms_norm
from exl_kernels.reference import norm as norm_twin
from exl_kernels.rope import apply_rope
from exl_kernels.selection import FEW_ROWS

pytestmark = pytest.mark.cuda

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
KINDS: list[KVKind] = ["fp16", "fp8", "q8", "q6", "q4"]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 72, 1000, 2048, 2056, 4096, 5120, 8192, 8200, 14336])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_add_rms_norm(dtype: torch.dtype, width: int, rows: int) -> None:
    x, y, w = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype, seed=1), randn(width, seed=2)
    for offset in (0.0, 1.0):
        added = x + y
        want = rms_norm(added, w, 1e-5, weight_offset=offset)
        got_x = x.clone()
        got = add_rms_norm(got_x, y, w, 1e-5, weight_offset=offset)
        assert torch.equal(got_x, added)
        assert torch.equal(got, want)
        twin = norm_twin.rms_norm(added.double().cpu(), w.cpu(), 1e-5, weight_offset=offset)
        bound = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 6e-6}[dtype]
        assert bool(((got.double().cpu() - twin).abs() <= bound * twin.abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 72, 1000, 2048, 3584, 4096, 4104, 8192, 8200, 14336])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(("with_post", "with_norm"), [(True, True), (True, False), (False, True), (False, False)])
def test_add_post_norm(dtype: torch.dtype, width: int, rows: int, with_post: bool, with_norm: bool) -> None:
    x, y = randn(rows, width, dtype=dtype), randn(rows, width, dtype=torch.float16, seed=1)
    post = FusedNorm(randn(width, seed=2), 1e-5) if with_post else None
    norm = FusedNorm(randn(width, seed=3), 1e-6, 1.0) if with_norm else None
    moved = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    added = x + (y if post is None else rms_norm(y.to(dtype), post.weight, post.eps))
    for given in (x, moved):
        found = add_post_norm(given, y, post, norm)
        assert torch.equal(given, added)
        if norm is None:
            assert found is None
        else:
            want = rms_norm(added, norm.weight, norm.eps, weight_offset=1.0).half()
            assert found is not None
            assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 32, 40])
@pytest.mark.parametrize("kind", ["exl2", "gptq"])
@pytest.mark.parametrize("width", [128, 384, 3584, 8320])
def test_add_post_norm_packs_the_input_of_a_matmul(dtype: torch.dtype, rows: int, kind: str, width: int) -> None:
    """The matmul of the packed rows is bitwise that of the plain ones; columns past them are zero."""
    made = matmul_of(width, kind)
    matmul = FusedLinear([made])
    x, y = randn(rows, width, dtype=dtype), randn(rows, width, dtype=torch.float16, seed=1)
    post, norm = FusedNorm(randn(width, seed=2), 1e-5), FusedNorm(randn(width, seed=3), 1e-6, 1.0)
    given = matmul.input_of(rows)
    if given is None:
        assert reads_plain_rows(rows)
        return
    given.scratch.fill_(0xA5)
    for one in (post, None):
        plain, other = x.clone(), x.clone()
        h = add_post_norm(plain, y, one, norm)
        assert h is not None
        assert add_post_norm(other, y, one, norm, into=given) is given.scratch
        assert torch.equal(other, plain)
        want, got = (torch.full((rows, 64), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2))
        matmul(h, want)
        if given.columns == FEW_ROWS:
            packed = given.scratch[: 16 * width].view(torch.float16).view(-1, 8, 32)
            assert bool((packed[:, rows:] == 0).all())
            ordered = torch.stack([made.in_layout(row) for row in h])[:, :width]
            assert torch.equal(packed[:, :rows].transpose(0, 1).reshape(rows, width), ordered)
        matmul.from_input(given, got)
        assert torch.equal(got, want)
        assert want.isfinite().all()


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("width", [128, 384, 4608, 8320])
@pytest.mark.parametrize("with_bias", [True, False])
def test_layer_norm_packs_the_input_of_a_matmul(rows: int, width: int, with_bias: bool) -> None:
    x, weight = 2.0 + randn(rows, width, dtype=torch.float16), randn(width, seed=2)
    bias = randn(width, seed=3) if with_bias else None
    for kind in ("exl2", "gptq"):
        matmul = FusedLinear([matmul_of(width, kind)])
        given = matmul.input_of(rows)
        if given is None:
            assert reads_plain_rows(rows)
            return
        given.scratch.fill_(0xA5)
        want, got = (torch.full((rows, 64), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2))
        matmul(layer_norm(x, weight, bias, 1e-5), want)
        assert layer_norm_packed(x, weight, bias, 1e-5, given) is given.scratch
        if given.columns == FEW_ROWS:
            packed = given.scratch[: 16 * width].view(torch.float16).view(-1, 8, 32)
            assert bool((packed[:, rows:] == 0).all())
        matmul.from_input(given, got)
        assert torch.equal(got, want)
        assert want.isfinite().all()
    assert given is not None
    with pytest.raises(ShapeError, match="layer_norm_packed: weight"):
        layer_norm_packed(x, weight[:8], None, 1e-5, given)
    with pytest.raises(DTypeError):
        layer_norm_packed(x.float(), weight, None, 1e-5, given)
    with pytest.raises(ShapeError, match=r"expected \[T, D\]"):
        layer_norm_packed(x[0], weight, None, 1e-5, given)
    with pytest.raises(ShapeError, match="weight is not contiguous"):
        layer_norm_packed(x, weight.repeat_interleave(2)[::2], None, 1e-5, given)
    for wrong in (replace(given, columns=given.columns + 1), replace(given, scratch=given.scratch[:16])):
        with pytest.raises(ShapeError, match="use the result of FusedLinear"):
            layer_norm_packed(x, weight, None, 1e-5, wrong)


@pytest.mark.parametrize("rows", [3, 17])
def test_packed_rows_are_the_input_of_joined_matmuls(rows: int) -> None:
    parts = [matmul_of(512, "gptq") for _ in range(2)]
    weight = randn(512, seed=3)
    for matmul in (
        FusedLinear(parts),
        FusedLinear(parts, activation="silu"),
        FusedLinear(parts[:1], activation="gelu"),
    ):
        given = matmul.input_of(rows)
        if given is None:
            # Small gated matrices leave their gate to a launch.
            assert reads_plain_rows(rows) or (rows > FEW_ROWS and matmul.activation == "silu")
            continue
        x = randn(rows, 512, dtype=torch.float16)
        h = layer_norm(x, weight, None, 1e-5)
        layer_norm_packed(x, weight, None, 1e-5, given)
        want, got = (torch.full((rows, matmul.out_features), torch.nan, device="cuda").half() for _ in range(2))
        matmul(h, want)
        matmul.chained(Packed(given.scratch, rows, by_matmul=False), got)
        assert torch.equal(got, want)
        assert want.isfinite().all()


@pytest.mark.parametrize("widths", [(256, 64, 400), (4096, 4096, 12288), (1000, 7, 1009)])
def test_norms_of_parts_of_rows(widths: tuple[int, int, int]) -> None:
    first, second, stride = widths
    weights = randn(first, seed=1), randn(second, seed=2)
    for rows in (1, 9):
        x = randn(rows, stride, dtype=torch.float16)
        parts = (x[:, :first], x[:, first : first + second], x[:, first + second :])
        normed = [rms_norm(part.contiguous(), w, 1e-5) for part, w in zip(parts, weights, strict=False)]
        want = torch.cat([*normed, parts[2]], dim=1)
        assert norm_parts(x, *weights, 1e-5) is x
        assert torch.equal(x, want)
    with pytest.raises(ShapeError, match="rows of"):
        norm_parts(x[:, :first].contiguous(), *weights, 1e-5)
    with pytest.raises(DTypeError, match="float16"):
        norm_parts(x.float(), *weights, 1e-5)
    with pytest.raises(ShapeError, match="second"):
        norm_parts(x, weights[0], weights[1].half(), 1e-5)


def test_packed_rows_that_do_not_fit() -> None:
    made = matmul_of(256, "exl2")
    into = MatmulInput(made, 8, torch.zeros(8192, dtype=torch.uint8, device="cuda"))
    x, y, norm = randn(3, 256), randn(3, 256, dtype=torch.float16), FusedNorm(randn(256), 1e-5)
    with pytest.raises(ShapeError, match="8 columns of 256"):
        add_post_norm(randn(9, 256), randn(9, 256, dtype=torch.float16), None, norm, into=into)
    half = FusedNorm(norm.weight[:128].clone(), 1e-5)
    with pytest.raises(ShapeError, match="expected 1 to 8 rows"):
        add_post_norm(x[:, :128].contiguous(), y[:, :128].contiguous(), None, half, into=into)
    with pytest.raises(UnsupportedError, match="into needs a norm"):
        add_post_norm(x, y, None, None, into=into)
    with pytest.raises(UnsupportedError, match="place of out"):
        add_post_norm(x, y, None, norm, into=into, out=torch.empty_like(y))
    with pytest.raises(ValueError, match="packed input"):
        add_post_norm(x, y, None, norm, into=MatmulInput(made, 8, into.scratch[:1024]))


def test_add_post_norm_operands() -> None:
    x, y, norm = randn(3, 64), randn(3, 64, dtype=torch.float16), FusedNorm(randn(64), 1e-5)
    with pytest.raises(ShapeError):
        add_post_norm(x, y[:2], None, norm)
    with pytest.raises(DTypeError):
        add_post_norm(x, y.float(), None, norm)
    with pytest.raises(ShapeError):
        add_post_norm(x, y, FusedNorm(norm.weight[:8], 1e-5), norm)
    with pytest.raises(ShapeError):
        add_post_norm(x, y, None, norm, out=torch.empty_like(x))


def test_add_rms_norm_unaligned_and_in_place() -> None:
    x, y, w = randn(3, 4096, dtype=torch.float16), randn(3, 4096, dtype=torch.float16, seed=1), randn(4096, seed=2)
    want = add_rms_norm(x.clone(), y, w, 1e-5)
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert torch.equal(add_rms_norm(moved, y, w, 1e-5), want), "an address changes no bit"
    out = torch.empty_like(x)
    assert add_rms_norm(x.clone(), y, w, 1e-5, out=out) is out
    assert torch.equal(out, want)
    with pytest.raises(ShapeError):
        add_rms_norm(x, y[:2], w, 1e-5)
    with pytest.raises(DTypeError):
        add_rms_norm(x, y.float(), w, 1e-5)
    with pytest.raises(ShapeError):
        add_rms_norm(x, y, w[:8], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "rotated", "q_heads", "heads"),
    [(128, 128, 32, 8), (64, 64, 6, 2), (64, 32, 3, 3), (80, 80, 5, 1), (96, 48, 4, 4), (256, 256, 8, 2), (8, 8, 3, 1)],
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [9, 72])
def test_rope_store(
    kind: KVKind, dim: int, rotated: int, q_heads: int, heads: int, interleaved: bool, tokens: int
) -> None:
    table_rows = 40
    cos, sin = randn(table_rows, rotated // 2, seed=3), randn(table_rows, rotated // 2, seed=4)
    positions = torch.tensor([0, 1, 39, 40, -1, 7, 7, 12, 1000], device="cuda")
    slots = torch.tensor([0, 95, 17, 18, 40, -1, 96, 3, 4], device="cuda")
    if tokens > 9:
        positions, slots = positions.repeat(8), torch.randperm(96, device="cuda")[:tokens]
        slots[5], slots[6] = -1, 96
    for dtype in DTYPES:
        q, k, v = (randn(tokens, h, dim, dtype=dtype, seed=i) for i, h in enumerate((q_heads, heads, heads)))
        if kind == "fp16":
            k[0, 0, 1] = v[0, 0, 1] = 1e5  # infinite as a half, and larger than a page's half as a float
        separate, joined = (KVPages.allocate(kind, 6, 16, heads, dim, torch.device("cuda")) for _ in range(2))
        q1, k1 = q.clone(), k.clone()
        apply_rope(q1, cos, sin, positions, interleaved=interleaved)
        apply_rope(k1, cos, sin, positions, interleaved=interleaved)
        store_kv(separate, k1, v, slots)
        turn = Rotation(cos=cos, sin=sin, positions=positions, interleaved=interleaved)
        rope_store(joined, q, k, v, rotation=turn, slots=slots)
        assert torch.equal(q, q1)
        assert torch.equal(k, k1)
        for name in ("key", "value", "key_scales", "value_scales"):
            a, b = getattr(separate, name), getattr(joined, name)
            assert (a is None and b is None) or torch.equal(a, b), name


def test_rope_store_refuses() -> None:
    pages = KVPages.allocate("fp16", 2, 16, 2, 64, torch.device("cuda"))
    q, kv = randn(3, 4, 64), randn(3, 2, 64)
    cos, at = randn(8, 32), torch.zeros(3, dtype=torch.int64, device="cuda")
    turn, other = (Rotation(cos=cos, sin=cos, positions=of, interleaved=False) for of in (at, at[:2]))
    for bad in ((q[:, :, :32].contiguous(), kv, kv), (q, kv[:2], kv), (q, kv, kv.half())):
        with pytest.raises((ShapeError, DTypeError)):
            rope_store(pages, *bad, rotation=turn, slots=at)
    with pytest.raises((ShapeError, DTypeError)):
        rope_store(pages, q, kv, kv, rotation=other, slots=at)
    with pytest.raises(DTypeError):
        rope_store(pages, q, kv.cpu(), kv, rotation=turn, slots=at)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 12, 256, 4096])
def test_embed(dtype: torch.dtype, width: int) -> None:
    table = randn(50, width, dtype=dtype)
    ids = torch.tensor([0, 49, 7, -1, 7], device="cuda")
    for factor in (1.0, 11.3137085):
        want = (table[ids.clamp(min=0)].float() * factor).half()
        assert torch.equal(embed(table, ids, factor=factor), want)
        exact = embed(table, ids, factor=factor, dtype="float32")
        assert exact.dtype == torch.float32
        assert torch.equal(exact, table[ids.clamp(min=0)].float() * factor)
    assert torch.equal(embed(table, torch.tensor([70], device="cuda")), table[49:].float().half())
    assert embed(table, ids[:0]).shape == (0, width)
