"""Joined operators on the CPU equal the composition of the operators that they join."""

from __future__ import annotations

import pytest
import torch

from exl_kernels.attention.cuda import Rotation
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.fused import add_rms_norm, embed, norm_parts, rope_store
from exl_kernels.kv import KVPages, load_kv, store_kv
from exl_kernels.reference import norm as norm_twin
from exl_kernels.rope import apply_rope


def test_add_rms_norm() -> None:
    x, y, w = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    added = x + y
    got = add_rms_norm(x, y, w, 1e-6, weight_offset=1.0)
    assert torch.equal(x, added)
    assert torch.allclose(got.double(), norm_twin.rms_norm(added.double(), w, 1e-6, weight_offset=1.0), atol=1e-5)
    with pytest.raises(ShapeError):
        add_rms_norm(x, y[:1], w, 1e-6)


def test_norms_of_parts_of_rows() -> None:
    x, weights = torch.randn(3, 50), (torch.randn(24), torch.randn(10))
    want = x.double()
    for part, weight in zip(want.split([24, 10, 16], dim=1), weights, strict=False):
        part.copy_(norm_twin.rms_norm(part, weight, 1e-6))
    assert norm_parts(x, *weights, 1e-6) is x
    assert torch.allclose(x.double(), want, atol=1e-5)
    with pytest.raises(DTypeError, match="float32"):
        norm_parts(x.half(), *weights, 1e-6)
    with pytest.raises(ShapeError, match="rows of 50"):
        norm_parts(x, weights[0], torch.randn(27), 1e-6)


def test_rope_store() -> None:
    q, k, v = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
    cos, sin = torch.randn(9, 32), torch.randn(9, 32)
    positions, slots = torch.tensor([3, 8]), torch.tensor([5, 30])
    one, other = (KVPages.allocate("q4", 2, 16, 2, 64, "cpu") for _ in range(2))
    k1 = apply_rope(k.clone(), cos, sin, positions)
    store_kv(one, k1, v, slots)
    q1 = apply_rope(q.clone(), cos, sin, positions)
    turn = Rotation(cos=cos, sin=sin, positions=positions, interleaved=False)
    rope_store(other, q, k, v, rotation=turn, slots=slots)
    assert torch.equal(q, q1)
    for a, b in zip(load_kv(one, slots), load_kv(other, slots), strict=True):
        assert torch.equal(a, b)
        assert bool(a.any())


def test_embed() -> None:
    table = torch.randn(5, 8).half()
    ids = torch.tensor([0, 4, -1])
    assert torch.equal(embed(table, ids, factor=2.0), table[[0, 4, 0]].float() * 2.0)
