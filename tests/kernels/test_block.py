"""Fused sub-layers: bitwise identical to the kernels called one by one; wrong shapes are rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_kernels.activation import activation, gated_activation
from exl_kernels.attention import paged_attention
from exl_kernels.block import AttentionBlock, BlockNorm, MlpBlock, Tokens
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.kv import KVPages, store_kv
from exl_kernels.linear import QuantMatrix
from exl_kernels.norm import layer_norm, rms_norm
from exl_kernels.rope import apply_rope

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 96, 4, 2, 32, 160


def matrix(out_features: int, in_features: int, seed: int) -> QuantMatrix:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    return QuantMatrix.from_float(weight.half(), torch.randn(out_features, generator=generator).half())


def projections() -> tuple[QuantMatrix, QuantMatrix, QuantMatrix, QuantMatrix]:
    return (
        matrix(HEADS * DIM, HIDDEN, 1),
        matrix(KV_HEADS * DIM, HIDDEN, 2),
        matrix(KV_HEADS * DIM, HIDDEN, 3),
        matrix(HIDDEN, HEADS * DIM, 4),
    )


def step(tokens: int) -> dict[str, Any]:
    """`tokens` of two sequences, on pages of 8."""
    generator = torch.Generator().manual_seed(tokens)
    rows = (torch.arange(tokens) % 2).int()
    positions = (torch.arange(tokens) // 2).int()
    table = torch.tensor([[3, 0, 5, 7], [1, 6, 2, 4]], dtype=torch.int32)
    slots = table[rows.long(), positions.long() // 8].long() * 8 + positions.long() % 8
    return {
        "rows": rows,
        "positions": positions,
        "slots": slots,
        "block_table": table,
        "rope_positions": positions.long() + 3,
        "cos": torch.randn(40, DIM // 2, generator=generator),
        "sin": torch.randn(40, DIM // 2, generator=generator),
    }


@pytest.mark.parametrize("kind", ["fp16", "q4"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 33, 61])
def test_attention_block(tokens: int, interleaved: bool, kind: str) -> None:
    s, x = step(tokens), torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(9))
    q, k, v, o = projections()
    norm, options = 1 + 0.1 * torch.arange(HIDDEN).float().cos(), {"scale": 0.3, "window": 11, "softcap": 20.0}
    mask = torch.zeros(2, 40)
    mask[0, 2] = float("-inf")

    expected, pages = x.clone(), KVPages.allocate(kind, 8, 8, KV_HEADS, DIM)  # type: ignore[arg-type]
    h = rms_norm(expected, norm, 1e-5)
    qh, kh, vh = (m.matmul(h).view(tokens, -1, DIM) for m in (q, k, v))
    for t in (qh, kh):
        apply_rope(t, s["cos"], s["sin"], s["rope_positions"], interleaved=interleaved)
    store_kv(pages, kh, vh, s["slots"])
    mixed = paged_attention(
        qh,
        pages,
        s["block_table"],
        s["rows"],
        s["positions"],
        key_mask=mask,
        **options,  # type: ignore[arg-type]
    )
    expected += o.matmul(mixed.view(tokens, -1))

    block = AttentionBlock(BlockNorm(norm, 1e-5), (q, k, v, o), head_dim=DIM, **options)  # type: ignore[arg-type]
    found, other = x.clone(), KVPages.allocate(kind, 8, 8, KV_HEADS, DIM)  # type: ignore[arg-type]
    returned = block.forward(found, Tokens(**s, key_mask=mask, interleaved=interleaved), other)
    assert returned is found
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(pages.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_mlp_block(rows: int, kind: str) -> None:
    gate, up, down = matrix(INNER, HIDDEN, 1), matrix(INNER, HIDDEN, 2), matrix(HIDDEN, INNER, 3)
    x, norm = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(2)), torch.ones(HIDDEN)
    h = rms_norm(x, norm, 1e-6)
    inner = gated_activation(gate.matmul(h), up.matmul(h), kind)  # type: ignore[arg-type]
    expected = x + down.matmul(inner)
    found = MlpBlock(BlockNorm(norm, 1e-6), gate, (up, down), kind).forward(x.clone())  # type: ignore[arg-type]
    assert torch.equal(found, expected)


def test_attention_block_with_norms_and_clip() -> None:
    """Layer norm before, RMS norms of each head of q and over all of k, clamped values, RMS norm after."""
    tokens, generator = 5, torch.Generator().manual_seed(4)
    s, x = step(tokens), torch.randn(tokens, HIDDEN, generator=generator)
    q, k, v, o = projections()
    weight, bias, post = torch.randn(3, HIDDEN, generator=generator)
    of_q, of_k = torch.randn(HEADS, DIM, generator=generator), torch.randn(KV_HEADS * DIM, generator=generator)
    h = layer_norm(x, weight, bias, 1e-5)
    qh, kh, vh = (m.matmul(h).clamp(-0.7, 0.7) for m in (q, k, v))
    qh = rms_norm(qh.view(tokens, HEADS, DIM), of_q, 1e-6)
    kh = rms_norm(kh, of_k, 1e-6).view(tokens, KV_HEADS, DIM)
    for t in (qh, kh):
        apply_rope(t, s["cos"], s["sin"], s["rope_positions"])
    pages, other = (KVPages.allocate("fp16", 8, 8, KV_HEADS, DIM) for _ in range(2))
    store_kv(pages, kh, vh.view(tokens, KV_HEADS, DIM), s["slots"])
    mixed = paged_attention(qh, pages, s["block_table"], s["rows"], s["positions"], scale=0.3)
    expected = x + rms_norm(o.matmul(mixed.view(tokens, -1)), post, 1e-5)
    block = AttentionBlock(
        BlockNorm(weight, 1e-5, bias, layer=True),
        (q, k, v, o),
        head_dim=DIM,
        scale=0.3,
        clip=0.7,
        q_norm=BlockNorm(of_q, 1e-6),
        k_norm=BlockNorm(of_k, 1e-6),
        post=BlockNorm(post, 1e-5),
    )
    assert torch.equal(block.forward(x.clone(), Tokens(**s), other), expected)


def test_plain_mlp_block_without_norm() -> None:
    up, down = matrix(INNER, HIDDEN, 2), matrix(HIDDEN, INNER, 3)
    x, post = torch.randn(7, HIDDEN), torch.rand(HIDDEN)
    expected = x + rms_norm(down.matmul(activation(up.matmul(x), "gelu")), post, 1e-5)
    found = MlpBlock(None, None, (up, down), "gelu", post=BlockNorm(post, 1e-5)).forward(x.clone())
    assert torch.equal(found, expected)


def test_norms_that_do_not_fit() -> None:
    for wrong in ({"q_norm": torch.ones(DIM + 1)}, {"k_norm": torch.ones(HEADS, DIM)}, {"post": torch.ones(2, HIDDEN)}):
        norms: dict[str, Any] = {name: BlockNorm(weight, 1e-5) for name, weight in wrong.items()}
        with pytest.raises(ShapeError, match="weights of the"):
            AttentionBlock(None, projections(), head_dim=DIM, scale=1.0, **norms)
    with pytest.raises(ShapeError, match="layer norm only"):
        BlockNorm(torch.ones(4), 1e-5, torch.ones(4))
    with pytest.raises(ShapeError, match="BlockNorm"):
        BlockNorm(torch.ones(4), 1e-5, torch.ones(5), layer=True)


def test_empty_call() -> None:
    gate, up, down = matrix(INNER, HIDDEN, 1), matrix(INNER, HIDDEN, 2), matrix(HIDDEN, INNER, 3)
    block = MlpBlock(BlockNorm(torch.ones(HIDDEN), 1e-6), gate, (up, down), "silu")
    assert block.forward(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_matrices_that_do_not_fit() -> None:
    q, k, v, o = projections()
    gate, up, down = matrix(INNER, HIDDEN, 1), matrix(INNER, HIDDEN, 2), matrix(HIDDEN, INNER, 3)
    ones = torch.ones(HIDDEN)
    for wrong in ((q, k, v, q), (q, k, q, o), (o, k, v, o), (k, k, v, o)):
        with pytest.raises(ShapeError, match="AttentionBlock"):
            AttentionBlock(BlockNorm(ones, 1e-5), wrong, head_dim=DIM, scale=1.0)
    with pytest.raises(ShapeError, match="whole heads"):
        AttentionBlock(BlockNorm(ones, 1e-5), (q, k, v, o), head_dim=48, scale=1.0)
    for wrong_mlp in ((gate, up, gate), (gate, q, down), (down, up, down)):
        with pytest.raises(ShapeError, match="MLP block"):
            MlpBlock(BlockNorm(ones, 1e-5), wrong_mlp[0], wrong_mlp[1:], "silu")
    with pytest.raises(ShapeError):
        MlpBlock(BlockNorm(torch.ones(HIDDEN + 1), 1e-5), gate, (up, down), "silu")
    with pytest.raises(DTypeError):
        MlpBlock(BlockNorm(ones.half(), 1e-5), gate, (up, down), "silu")


def test_tokens_that_do_not_fit() -> None:
    block = AttentionBlock(BlockNorm(torch.ones(HIDDEN), 1e-5), projections(), head_dim=DIM, scale=1.0)
    pages = KVPages.allocate("fp16", 8, 8, KV_HEADS, DIM)
    good = step(4)
    x = torch.zeros(4, HIDDEN)
    for change in (
        {"slots": torch.full((4,), 64)},
        {"slots": good["slots"][:3]},
        {"rows": torch.full((4,), 2, dtype=torch.int32)},
        {"positions": torch.full((4,), 32, dtype=torch.int32)},
        {"positions": good["positions"][:3]},
        {"rope_positions": torch.full((4,), 40)},
        {"rope_positions": good["rope_positions"][:3]},
        {"block_table": torch.full((2, 4), 8, dtype=torch.int32)},
        {"block_table": good["block_table"].view(-1)},
        {"sin": good["sin"][:-1]},
    ):
        with pytest.raises(ShapeError):
            block.forward(x.clone(), Tokens(**{**good, **change}), pages)
    for dtype_change in ({"rows": good["rows"].long()}, {"slots": good["slots"].int()}, {"cos": good["cos"].double()}):
        with pytest.raises(DTypeError):
            Tokens(**{**good, **dtype_change})
    tokens = Tokens(**good)
    for bad in (torch.zeros(3, HIDDEN), torch.zeros(4, HIDDEN + 1), torch.zeros(4 * HIDDEN)):
        with pytest.raises(ShapeError):
            block.forward(bad, tokens, pages)
    with pytest.raises(DTypeError):
        block.forward(x.double(), tokens, pages)
    with pytest.raises(ShapeError, match="head_dim"):
        block.forward(x, tokens, KVPages.allocate("fp16", 8, 8, KV_HEADS, DIM // 2))
    with pytest.raises(ShapeError):
        block.forward(x, tokens, KVPages.allocate("fp16", 8, 8, KV_HEADS + 1, DIM))


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_more_tokens_than_go_through_at_once(order: str) -> None:
    """600 tokens of two sequences, also in an order in which a query comes long before keys that it sees."""
    count, page = 600, 64
    generator = torch.Generator().manual_seed(3)
    rows, positions = (torch.arange(count) % 2).int(), (torch.arange(count) // 2).int()
    if order == "falling":
        positions = positions.flip(0).contiguous()
    table = torch.randperm(10, generator=generator).int().view(2, 5)
    slots = table[rows.long(), positions.long() // page].long() * page + positions.long() % page
    angles = torch.randn(300, DIM // 2, generator=generator)
    tokens = Tokens(
        rows=rows,
        positions=positions,
        slots=slots,
        block_table=table,
        rope_positions=positions.long(),
        cos=angles.cos(),
        sin=angles.sin(),
    )
    block = AttentionBlock(BlockNorm(torch.ones(HIDDEN), 1e-5), projections(), head_dim=DIM, scale=0.3, window=40)
    x = torch.randn(count, HIDDEN, generator=generator)
    found = block.forward(x.clone(), tokens, KVPages.allocate("fp16", 10, page, KV_HEADS, DIM))

    q, k, v, o = projections()
    h, pages = rms_norm(x, torch.ones(HIDDEN), 1e-5), KVPages.allocate("fp16", 10, page, KV_HEADS, DIM)
    qh, kh, vh = (m.matmul(h).view(count, -1, DIM) for m in (q, k, v))
    for t in (qh, kh):
        apply_rope(t, angles.cos(), angles.sin(), positions.long())
    store_kv(pages, kh, vh, slots)
    mixed = paged_attention(qh, pages, table, rows, positions, scale=0.3, window=40)
    assert torch.equal(found, x + o.matmul(mixed.view(count, -1)))
