"""The cache codecs on a GPU against the CPU's: codes, scales and decoded values bit for bit; needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.kv import KVPages, load_kv, store_kv

pytestmark = pytest.mark.cuda

KINDS: tuple[Any, ...] = ("fp16", "fp8", "q8", "q6", "q4")
DIMS = (8, 64, 80, 96, 128, 192, 256)


def values(tokens: int, heads: int, dim: int, seed: int) -> Tensor:
    """Random rows of many magnitudes, with rows of zeros, of equal elements and of extremes among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, dim, generator=generator)
    x *= 10.0 ** torch.randint(-6, 4, (tokens, heads, 1), generator=generator)
    x[0] = 0.0
    x[1] = 1.5
    x[2] = 70000.0
    x[3, :, ::2] = 65504.0
    x[4, :, 1::3] = 6e-8
    x[5] = torch.round(x[5])
    return x


def both(kind: Any, heads: int, dim: int, page_size: int = 16) -> tuple[KVPages, KVPages]:
    return tuple(KVPages.allocate(kind, 5, page_size, heads, dim, device) for device in ("cpu", "cuda"))  # type: ignore[return-value]


def assert_same_memory(cpu: KVPages, gpu: KVPages) -> None:
    for a, b in zip(cpu.tensors(), gpu.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_pages_equal_the_cpus_bit_for_bit(kind: Any, dim: int, heads: int) -> None:
    cpu, gpu = both(kind, heads, dim)
    k, v = values(50, heads, dim, 1), values(50, heads, dim, 2)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(3))[:50]
    slots[7] = -1
    store_kv(cpu, k, v, slots)
    store_kv(gpu, k.cuda(), v.cuda(), slots.cuda())
    assert_same_memory(cpu, gpu)
    slots[11] = -1
    for want, got in zip(load_kv(cpu, slots), load_kv(gpu, slots.cuda()), strict=True):
        assert torch.equal(want, got.cpu())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_store_what_their_float32_values_would(kind: Any, dtype: torch.dtype) -> None:
    cpu, gpu = both(kind, 4, 128)
    k, v = (values(40, 4, 128, seed).clamp(-65504, 65504).to(dtype) for seed in (1, 2))
    slots = torch.arange(40)
    store_kv(cpu, k.float(), v.float(), slots)
    store_kv(gpu, k.cuda(), v.cuda(), slots.cuda())
    assert_same_memory(cpu, gpu)


@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_blocks(kind: Any) -> None:
    cpu, gpu = both(kind, 8, 128, page_size=256)
    k, v = (torch.randn(1000, 8, 128, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))
    slots = torch.arange(1000) + 100
    store_kv(cpu, k, v, slots)
    store_kv(gpu, k.cuda(), v.cuda(), slots.cuda())
    assert_same_memory(cpu, gpu)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_named_slots_is_written(kind: Any) -> None:
    _, gpu = both(kind, 2, 64)
    for t in gpu.tensors():
        t.view(torch.uint8).fill_(0xA5)
    before = [t.clone() for t in gpu.tensors()]
    x = torch.randn(4, 2, 64, device="cuda")
    # Out of range: passed over, because finding it out would take a read-back.
    store_kv(gpu, x, x, torch.tensor([-1, 80, 10**12, -7], device="cuda"))
    for a, b in zip(before, gpu.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    store_kv(gpu, x[:1], x[:1], torch.tensor([33], device="cuda"))
    for a, b in zip(before, gpu.tensors(), strict=True):
        same = (a.view(torch.uint8) == b.view(torch.uint8)).flatten(2).all(-1).flatten()
        assert same.nonzero().flatten().tolist() == [i for i in range(80) if i != 33]


def test_nan_and_infinity_are_kept_or_spoil_their_block_only() -> None:
    _, gpu = both("fp8", 1, 64)
    x = torch.ones(1, 1, 64, device="cuda")
    x[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    store_kv(gpu, x, x, torch.tensor([0], device="cuda"))
    k, _ = load_kv(gpu, torch.tensor([0], device="cuda"))
    assert k[0, 0, 0].isnan()
    assert k[0, 0, 1:3].tolist() == [torch.inf, -torch.inf]
    assert torch.equal(k[0, 0, 3:], x[0, 0, 3:])


def test_bad_operands_are_refused() -> None:
    _, gpu = both("q4", 2, 64)
    x, slots = torch.randn(3, 2, 64, device="cuda"), torch.arange(3, device="cuda")
    with pytest.raises(DTypeError, match="cpu"):
        store_kv(gpu, x.cpu(), x, slots)
    with pytest.raises(DTypeError, match="cpu"):
        store_kv(gpu, x, x, slots.cpu())
    with pytest.raises(DTypeError, match="one type"):
        store_kv(gpu, x, x.half(), slots)
    with pytest.raises(DTypeError, match="int64"):
        store_kv(gpu, x, x, slots.int())
    with pytest.raises(ShapeError, match="k"):
        store_kv(gpu, x[:2], x, slots)
    odd = KVPages.allocate("fp16", 1, 16, 2, 12, "cuda")
    with pytest.raises(ShapeError, match="multiple of 8"):
        load_kv(odd, slots)
