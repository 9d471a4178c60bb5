"""Cache codecs and pages: known vectors, bitwise equality with the twins, and what a store may touch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from effort import trials
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_kernels import threads
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.kv import KVPages, load_kv, store_kv
from exl_kernels.reference import kv as twin

pytestmark = pytest.mark.sampled(3)

KINDS: tuple[Any, ...] = ("fp16", "fp8", "q8", "q6", "q4")
IRREGULAR = (
    "3400405e426a41ae3d05ba6bc0bbc165be9334cf4071426e41a13cd4baccc0c7c160be6b359d4084427241933ca3bb2bc0d3c15bbe42366c"
    "4097427541853c72bb8bc0dfc155be19373a40aa427841773c40bbe9c0eac14ebdef380440bd427a41683c0ebc23c0f5c148bdc4386b40cf"
    "427c41593bb9bc52c100c141bd9938d1"
)
# input, bits, codes, scales, first decoded halves
VECTORS = [
    (
        "ramp",
        4,
        "a866c488888088080888800088f8008fb58b885885b5f38888b85b85b3888b5b",
        "4000 4600",
        "c3a0 3880 c0e0 3fc0 be40 43a0 b700 c2a0",
    ),
    (
        "ramp",
        8,
        "80a0606040c0808080800080808080008000808000800000808080ff0000ff8055abab8080808055558055ab2bff8080808080abab555580"
        "2bab8080ab80ab55",
        "3000 3600",
        "c3be 39e8 c13a 3ffc bd8c 4292 b0a0 c2fa",
    ),
    (
        IRREGULAR,
        4,
        "fe77005a888897669988b6338888aa97aa98c5008888bb977899ffb6888879aa",
        "3d24 4539",
        "a888 4040 4247 41db",
    ),
    (
        IRREGULAR,
        8,
        "dded6d6e0005a05388887e8372935a5b92917c8661ab282c827d8585a5a4778d9a99798952bf0005837c8888b6b4729386779291fcf661ab"
        "7879827d8d6ea5a4",
        "2d24 3539",
        "3370 405b 4266 41b0",
    ),
]


def bits_of(x: Tensor) -> list[str]:
    return [f"{v & 0xFFFF:04x}" for v in x.to(torch.float16).view(torch.int16).flatten().tolist()]


def halves(text: str) -> Tensor:
    values = [int(text[i : i + 4], 16) for i in range(0, len(text), 4)]
    return torch.tensor([v - 65536 if v >= 32768 else v for v in values], dtype=torch.int16).view(torch.float16)


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def values_for(seed: int, *shape: int) -> Tensor:
    """Values of many magnitudes, with zeros, subnormals and a few beyond the range of half."""
    gen = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 6, shape[:-1], generator=gen)[..., None]
    x = torch.randn(shape, generator=gen) * 10.0**exponents
    return torch.where(torch.rand(shape, generator=gen) < 0.02, 0.0, x)


@pytest.mark.parametrize(("source", "bits", "codes", "scales", "decoded"), VECTORS)
@pytest.mark.parametrize("repeat", [1, 8])
def test_hadamard_vectors(
    each_isa: str, source: str, bits: int, codes: str, scales: str, decoded: str, repeat: int
) -> None:
    ramp = (((37 * torch.arange(64)) % 64) - 31) / 8
    x = (ramp.half() if source == "ramp" else halves(source)).float().repeat(repeat)
    pages = KVPages.allocate("q8" if bits == 8 else "q4", 1, 1, 1, 64 * repeat)
    k = x.view(1, 1, -1)
    store_kv(pages, k, k, torch.tensor([0]))
    for data, plane_scales in ((pages.key, pages.key_scales), (pages.value, pages.value_scales)):
        assert plane_scales is not None
        assert bytes(data.flatten().tolist()).hex() == codes * repeat
        assert bits_of(plane_scales) == scales.split() * repeat
    for part in load_kv(pages, torch.tensor([0])):
        first = decoded.split()
        assert bits_of(part)[: len(first)] == first
        assert bits_of(part)[-64:][: len(first)] == first


def test_fp8_vectors() -> None:
    source = halves("3c003c01bfff2e667bff0001")
    assert twin.fp8_encode(source, truncate=True).tolist() == [0x3C, 0x3C, 0xBF, 0x2E, 0x7B, 0x00]
    # Ours rounds to nearest even and saturates: only -1.999 (0xbfff) moves, to -2.
    pages = KVPages.allocate("fp8", 1, 6, 1, 1)
    x = source.float().view(6, 1, 1)
    store_kv(pages, x, x, torch.arange(6))
    assert pages.key.flatten().tolist() == [0x3C, 0x3C, 0xC0, 0x2E, 0x7B, 0x00]
    assert bits_of(load_kv(pages, torch.arange(6))[0]) == ["3c00", "3c00", "c000", "2e00", "7b00", "0000"]


def test_fp8_decodes_every_byte_as_the_upper_half_of_a_half() -> None:
    pages = KVPages.allocate("fp8", 1, 256, 1, 1)
    pages.key.copy_(torch.arange(256).view(1, 256, 1, 1))
    got = load_kv(pages, torch.arange(256))[0].flatten()
    expected = halves("".join(f"{b:02x}00" for b in range(256))).float()
    assert torch.equal(got[~expected.isnan()], expected[~expected.isnan()])
    assert torch.equal(got.isnan(), expected.isnan())


def test_fp8_is_nearest_for_every_half(each_isa: str) -> None:
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every.float().view(-1, 1, 64)
    pages = KVPages.allocate("fp8", 1, 1024, 1, 64)
    store_kv(pages, x, x, torch.arange(1024))
    codes = pages.key.flatten()
    assert torch.equal(codes, twin.fp8_encode(every))
    finite = every.isfinite()
    # The stored value is at least as near as both its neighbours in the format (which are the neighbouring bytes).
    stored = twin.fp8_decode(codes).double()
    value = every.double()
    clamped = value.clamp(-57344, 57344)
    for step in (-1, 1):
        neighbour = twin.fp8_decode((codes.int() + step).clamp(0, 255).to(torch.uint8)).double()
        worse = (neighbour - clamped).abs() < (stored - clamped).abs()
        assert not (worse & finite & neighbour.isfinite()).any()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (2, 64), (3, 80), (4, 128), (1, 33), (2, 256), (1, 100)])
def test_store_and_load_are_bitwise_equal_to_the_twin(each_isa: str, kind: Any, heads: int, dim: int) -> None:
    tokens = 12
    k, v = values_for(1, tokens, heads, dim), values_for(2, tokens, heads, dim)
    pages = KVPages.allocate(kind, 3, 5, heads, dim)
    slots = torch.randperm(15, generator=torch.Generator().manual_seed(4))[:tokens]
    store_kv(pages, k, v, slots)
    loaded = load_kv(pages, slots)
    planes = (
        (pages.key, pages.key_scales, k, pages.key_bits, loaded[0]),
        (pages.value, pages.value_scales, v, pages.value_bits, loaded[1]),
    )
    for data, scales, x, bits, got in planes:
        half = twin.round_to_half(x)
        stored = data.view(15, heads, -1)[slots]
        if kind == "fp16":
            assert bitwise_equal(stored, half)
            decoded = half
        elif kind == "fp8":
            assert bitwise_equal(stored, twin.fp8_encode(half))
            decoded = twin.fp8_decode(stored)
        else:
            assert scales is not None
            codes, expected = twin.hadamard_encode(twin.pad_to_block(half), bits)
            assert bitwise_equal(stored, codes)
            assert bitwise_equal(scales.view(15, heads, -1)[slots], expected)
            decoded = twin.hadamard_decode(codes, expected, bits)[..., :dim]
        assert bitwise_equal(got, decoded.float())


@pytest.mark.parametrize(("kind", "limit"), [("fp16", 0.0005), ("fp8", 0.08), ("q8", 0.01), ("q6", 0.12), ("q4", 0.12)])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_round_trip_error_stays_small(kind: Any, limit: float, dim: int) -> None:
    gen = torch.Generator().manual_seed(dim)
    k, v = torch.randn(200, 2, dim, generator=gen), torch.randn(200, 2, dim, generator=gen)
    pages = KVPages.allocate(kind, 1, 200, 2, dim)
    store_kv(pages, k, v, torch.arange(200))
    for x, got in zip((k, v), load_kv(pages, torch.arange(200)), strict=True):
        assert float((x - got).norm() / x.norm()) < limit


@given(
    kind=st.sampled_from(KINDS),
    page_size=st.sampled_from([1, 3, 16, 64]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 31, 64, 80, 128]),
    data=st.data(),
)
@settings(max_examples=trials(60, 15))
def test_a_store_touches_its_own_slots_only(
    kind: Any, page_size: int, heads: int, dim: int, data: st.DataObject
) -> None:
    pages = KVPages.allocate(kind, 4, page_size, heads, dim)
    total = 4 * page_size
    fill = values_for(0, total, heads, dim)
    store_kv(pages, fill, fill.neg(), torch.arange(total))
    before = [t.clone() for t in pages.tensors()]
    slots = data.draw(st.lists(st.integers(0, total - 1), unique=True, max_size=total))
    skipped = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    wanted = torch.tensor([-1 if skip else s for s, skip in zip(slots, skipped, strict=True)], dtype=torch.int64)
    x = values_for(7, len(slots), heads, dim)
    store_kv(pages, x, x, wanted)
    written = {int(s) for s in wanted if s >= 0}
    kept = torch.tensor([s for s in range(total) if s not in written], dtype=torch.int64)
    for now, then in zip(pages.tensors(), before, strict=True):
        flat_now, flat_then = now.view(total, -1), then.view(total, -1)
        assert bitwise_equal(flat_now[kept], flat_then[kept])
    # A token's code depends on the token alone: the same token stored by itself gives the same bytes.
    alone = KVPages.allocate(kind, 1, 1, heads, dim)
    for t, slot in enumerate(wanted.tolist()):
        if slot >= 0:
            store_kv(alone, x[t : t + 1], x[t : t + 1], torch.tensor([0]))
            for now, single in zip(pages.tensors(), alone.tensors(), strict=True):
                assert bitwise_equal(now.view(total, -1)[slot], single.view(-1))


def test_values_beyond_half_saturate_and_never_become_infinite() -> None:
    x = torch.full((1, 1, 64), 1e6)
    for kind in KINDS:
        pages = KVPages.allocate(kind, 1, 1, 1, 64)
        store_kv(pages, x, -x, torch.tensor([0]))
        k, v = load_kv(pages, torch.tensor([0]))
        assert k.isfinite().all()
        assert v.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_hidden(each_isa: str, kind: Any) -> None:
    x = torch.ones(1, 2, 64)
    x[0, 1, 5] = torch.nan
    pages = KVPages.allocate(kind, 1, 1, 2, 64)
    store_kv(pages, x, x, torch.tensor([0]))
    k, v = load_kv(pages, torch.tensor([0]))
    assert k[0, 1].isnan().any()
    assert v[0, 1].isnan().any()
    assert k[0, 0].isfinite().all()


def test_load_gives_zeros_for_skipped_slots() -> None:
    pages = KVPages.allocate("q4", 1, 4, 1, 64)
    x = torch.ones(4, 1, 64)
    store_kv(pages, x, x, torch.arange(4))
    k, v = load_kv(pages, torch.tensor([-1, 2]))
    assert not k[0].any()
    assert not v[0].any()
    assert k[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_make_no_difference(restore_threads: None, kind: Any) -> None:
    x = values_for(3, 500, 4, 64)
    stored = []
    for n in (1, 2, 3):
        threads.set_num_threads(n)
        pages = KVPages.allocate(kind, 2, 250, 4, 64)
        store_kv(pages, x, x.neg(), torch.arange(500))
        stored.append([*pages.tensors(), *load_kv(pages, torch.arange(500))])
    for other in stored[1:]:
        assert all(bitwise_equal(a, b) for a, b in zip(other, stored[0], strict=True))


@pytest.mark.parametrize(
    ("kind", "per_element"), [("fp16", 2.0), ("fp8", 1.0), ("q8", 1.0625), ("q6", 0.8125), ("q4", 0.5625)]
)
def test_bytes_per_element_are_those_of_the_format(kind: Any, per_element: float) -> None:
    pages = KVPages.allocate(kind, 3, 256, 4, 128)
    assert pages.nbytes == 2 * 3 * 256 * 4 * 128 * per_element
    assert (pages.num_pages, pages.page_size, pages.heads, pages.head_dim) == (3, 256, 4, 128)


def test_repaged_shares_the_memory() -> None:
    pages = KVPages.allocate("q6", 1, 512, 2, 64)
    view = pages.repaged(256)
    assert (view.num_pages, view.page_size) == (2, 256)
    x = torch.ones(1, 2, 64)
    store_kv(view, x, x, torch.tensor([300]))
    assert load_kv(pages, torch.tensor([300]))[0].any()
    with pytest.raises(ShapeError, match="512 tokens"):
        pages.repaged(100)


@pytest.mark.parametrize("slot", [-2, 8, 1 << 40])
def test_slots_out_of_range_are_refused_and_nothing_is_written(slot: int) -> None:
    pages = KVPages.allocate("fp16", 2, 4, 1, 8)
    x = torch.ones(2, 1, 8)
    with pytest.raises(ShapeError, match=str(slot)):
        store_kv(pages, x, x, torch.tensor([0, slot]))
    assert not pages.key.any()
    with pytest.raises(ShapeError, match=str(slot)):
        load_kv(pages, torch.tensor([slot]))


def test_bad_tensors_are_refused() -> None:
    pages = KVPages.allocate("fp16", 2, 4, 2, 8)
    good, slots = torch.ones(3, 2, 8), torch.arange(3)
    with pytest.raises(ShapeError, match="k: shape"):
        store_kv(pages, good[:2], good, slots)
    with pytest.raises(ShapeError, match="v: shape"):
        store_kv(pages, good, good[..., :4], slots)
    with pytest.raises(DTypeError, match="float16"):
        store_kv(pages, good.half(), good, slots)
    with pytest.raises(DTypeError, match="slots"):
        store_kv(pages, good, good, slots.int())
    with pytest.raises(ShapeError, match="slots"):
        load_kv(pages, slots[None])
    with pytest.raises(UnsupportedError, match="meta"):
        store_kv(pages, good.to("meta"), good, slots)


def test_bad_pages_are_refused() -> None:
    half = torch.zeros(2, 4, 1, 64, dtype=torch.float16)
    byte = torch.zeros(2, 4, 1, 64, dtype=torch.uint8)
    scales = torch.zeros(2, 4, 1, 2, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="q5"):
        KVPages.allocate("q5", 1, 1, 1, 64)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="at least 1"):
        KVPages.allocate("fp16", 0, 1, 1, 64)
    with pytest.raises(DTypeError, match="uint8"):
        KVPages("fp16", 64, byte, byte)
    with pytest.raises(ShapeError, match="value"):
        KVPages("fp16", 64, half, half[:1])
    with pytest.raises(ShapeError, match="key_scales must be given"):
        KVPages("q8", 64, byte, byte)
    with pytest.raises(ShapeError, match="must not be given"):
        KVPages("fp8", 64, byte, byte, scales, scales)
    with pytest.raises(ShapeError, match="contiguous"):
        KVPages("fp16", 64, torch.zeros(2, 4, 1, 128, dtype=torch.float16)[..., ::2], half)


def test_copies_have_memory_of_their_own() -> None:
    pages = KVPages.allocate("q8", 1, 4, 1, 64)
    x = torch.ones(1, 1, 64)
    store_kv(pages, x, x, torch.tensor([0]))
    other = copy.deepcopy(pages)
    store_kv(other, -x, -x, torch.tensor([0]))
    assert load_kv(pages, torch.tensor([0]))[0].mean() > 0.9
    assert load_kv(other, torch.tensor([0]))[0].mean() < -0.9


def test_tensors_that_moved_are_noticed() -> None:
    pages = KVPages.allocate("fp16", 1, 4, 1, 64)
    x = torch.ones(1, 1, 64)
    store_kv(pages, x, x, torch.tensor([0]))
    pages.key.share_memory_()
    with pytest.raises(ValueError, match="moved"):
        store_kv(pages, x, x, torch.tensor([0]))
