"""Paged caches and attention on a GPU against the codecs' twins and the float64 oracle, through the public doors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exl_kernels.attention import paged_attention
from exl_kernels.errors import DTypeError, ShapeError
from exl_kernels.kv import KVPages, load_kv, store_kv
from exl_kernels.reference import attention as twin

pytestmark = pytest.mark.cuda

KINDS = ["fp16", "fp8", "q8", "q6", "q4"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_cpu(pages: KVPages) -> KVPages:
    parts = [None if t is None else t.cpu() for t in (pages.key, pages.value, pages.key_scales, pages.value_scales)]
    return KVPages(pages.kind, pages.head_dim, *parts)  # type: ignore[arg-type]


def filled(
    kind: str, pages: int, page_size: int, heads: int, head_dim: int, dtype: torch.dtype = torch.float16
) -> KVPages:
    made = KVPages.allocate(kind, pages, page_size, heads, head_dim, device="cuda")  # type: ignore[arg-type]
    tokens = pages * page_size
    k, v = (
        randn(tokens, heads, head_dim, seed=1).to(dtype).cuda(),
        randn(tokens, heads, head_dim, seed=2).to(dtype).cuda(),
    )
    store_kv(made, k, v, torch.randperm(tokens, generator=torch.Generator().manual_seed(3)).cuda())
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 64), (3, 80), (8, 128), (2, 96), (1, 256), (5, 40)])
def test_stored_bytes_equal_the_cpu_codec(kind: str, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    pages = KVPages.allocate(kind, 3, 16, heads, head_dim, device="cuda")  # type: ignore[arg-type]
    host = KVPages.allocate(kind, 3, 16, heads, head_dim)  # type: ignore[arg-type]
    slots = torch.tensor([5, -1, 47, 0, 16, 31, 20])
    k, v = (randn(7, heads, head_dim, seed=s) * 10.0 ** randn(7, 1, 1, seed=s + 9) for s in (1, 2))
    k[2], v[3, 0, 0], v[4] = 0.0, 1e6, v[4] * 1e-6
    k, v = k.to(dtype), v.to(dtype)
    store_kv(pages, k.cuda(), v.cuda(), slots.cuda())
    store_kv(host, k.float(), v.float(), slots)
    for got, want in zip(pages.tensors(), host.tensors(), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    for got, want in zip(load_kv(pages, slots.cuda()), load_kv(host, slots), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_a_store_touches_its_own_token_only() -> None:
    for kind in KINDS:
        pages = filled(kind, 2, 8, 2, 72)
        before = [t.clone() for t in pages.tensors()]
        x = randn(1, 2, 72, seed=8).half().cuda()
        store_kv(pages, x, x, torch.tensor([9], device="cuda"))
        for old, new in zip(before, pages.tensors(), strict=True):
            changed = (old != new).flatten(2).any(-1)
            assert changed.nonzero().tolist() in ([[1, 1]], [])


def ragged(batch: int, page_size: int, pages: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A block table over shuffled pages, and the last token of every sequence."""
    width = max(-(-length // page_size) for length in lengths)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(7))
    table = torch.full((batch, width), -1, dtype=torch.int32)
    used = 0
    for b, length in enumerate(lengths):
        count = -(-length // page_size)
        table[b, :count] = order[used : used + count].int()
        used += count
    return table, torch.arange(batch, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32) - 1


def check(q: Tensor, pages: KVPages, index: tuple[Tensor, Tensor, Tensor], **options: float | Tensor | None) -> Tensor:
    table, rows, positions = index
    mask = options.pop("key_mask", None)
    device_mask = mask.cuda() if isinstance(mask, Tensor) else None
    got = paged_attention(q, pages, *(t.cuda() for t in index), key_mask=device_mask, **options)  # type: ignore[arg-type]
    want = twin.paged_attention(q.double().cpu(), on_cpu(pages), table, rows, positions, key_mask=mask, **options)  # type: ignore[arg-type]
    assert got.isfinite().all()
    error = (got.double().cpu() - want).abs().max() / want.abs().max().clamp(min=1e-6)
    assert error < BOUND[q.dtype], float(error)
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "group", "head_dim"),
    [(2, 1, 64), (2, 4, 128), (1, 7, 128), (2, 2, 80), (1, 8, 96), (1, 5, 256), (3, 12, 64), (2, 3, 8)],
)
def test_decode(kind: str, dtype: torch.dtype, heads: int, group: int, head_dim: int) -> None:
    pages = filled(kind, 40, 32, heads, head_dim)
    index = ragged(5, 32, 40, [1, 33, 128, 257, 300])
    q = randn(5, heads * group, head_dim, seed=4).to(dtype).cuda()
    check(q, pages, index, scale=head_dim**-0.5)


@pytest.mark.parametrize("kind", ["fp16", "q4"])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (40, 0.0), (128, 0.0), (0, 5.0), (200, 30.0)])
def test_window_and_softcap(kind: str, window: int, softcap: float) -> None:
    pages = filled(kind, 40, 32, 2, 128)
    index = ragged(4, 32, 40, [1, 130, 256, 300])
    q = randn(4, 8, 128, seed=5).cuda()
    check(q, pages, index, scale=0.3, window=window, softcap=softcap)


def test_masks_take_keys_out() -> None:
    pages = filled("fp16", 40, 32, 2, 64)
    index = ragged(3, 32, 40, [60, 200, 256])
    mask = randn(3, 256, seed=6)
    mask[0, :10] = -torch.inf
    mask[2, 128:] = -torch.inf
    q = randn(3, 4, 64, seed=5).cuda()
    check(q, pages, index, scale=0.2, key_mask=mask)
    mask[1] = -torch.inf
    got = paged_attention(q, pages, *(t.cuda() for t in index), scale=0.2, key_mask=mask.cuda())
    assert not got[1].any()


def test_prompts_and_tokens_without_keys() -> None:
    pages = filled("q8", 8, 64, 2, 64)
    table = torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
    rows = torch.tensor([0] * 100 + [1] * 50 + [0, 9], dtype=torch.int32)
    positions = torch.tensor([*range(60, 160), *range(50), -1, 3], dtype=torch.int32)
    q = randn(152, 6, 64, seed=6).half().cuda()
    got = check(q[:151], pages, (table, rows[:151], positions[:151]), scale=0.125)
    assert not got[150].any()
    whole = paged_attention(q, pages, table.cuda(), rows.cuda(), positions.cuda(), scale=0.125)
    assert torch.equal(whole[:151], got)
    assert not whole[151].any(), "a row that does not exist sees nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_the_call(kind: str) -> None:
    pages = filled(kind, 40, 256, 2, 128)
    index = ragged(6, 256, 40, [1, 700, 256, 1500, 2048, 129])
    q = randn(6, 8, 128, seed=9).half().cuda()
    whole = paged_attention(q, pages, *(t.cuda() for t in index), scale=0.1)
    for t in range(6):
        table = torch.cat([index[0][t : t + 1], torch.full((1, 3), -1, dtype=torch.int32)], dim=1).cuda()
        alone = paged_attention(
            q[t : t + 1],
            pages,
            table,
            torch.zeros(1, dtype=torch.int32, device="cuda"),
            index[2][t : t + 1].cuda(),
            scale=0.1,
        )
        assert torch.equal(alone[0], whole[t])
    flat = pages.repaged(64)
    table = (index[0][:, :, None] * 4 + torch.arange(4, dtype=torch.int32)).flatten(1).contiguous()
    again = paged_attention(q, flat, table.cuda(), index[1].cuda(), index[2].cuda(), scale=0.1)
    assert torch.equal(again, whole), "where page boundaries lie changes no bit"


def test_captured_step() -> None:
    pages = filled("q6", 16, 256, 2, 128)
    table = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
    rows, positions = (
        torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        torch.tensor([0, 0], dtype=torch.int32, device="cuda"),
    )
    slots = torch.zeros(2, dtype=torch.int64, device="cuda")
    q, k = torch.zeros(2, 8, 128, device="cuda").half(), torch.zeros(2, 2, 128, device="cuda").half()

    def step() -> Tensor:
        store_kv(pages, k, k, slots)
        return paged_attention(q, pages, table, rows, positions, scale=0.1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for position in (0, 127, 128, 1000, 2047):
        positions.copy_(torch.tensor([position, position // 2], dtype=torch.int32))
        slots.copy_(torch.tensor([position, 2048 + position // 2]))
        q.copy_(randn(2, 8, 128, seed=position))
        k.copy_(randn(2, 2, 128, seed=position + 1))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())


def test_bad_operands() -> None:
    pages = filled("fp16", 2, 32, 2, 64)
    q, one = torch.zeros(1, 4, 64, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    table = torch.zeros(1, 2, dtype=torch.int32, device="cuda")
    with pytest.raises(DTypeError, match="int64"):
        paged_attention(q, pages, table, one.long(), one, scale=1.0)
    with pytest.raises(ShapeError, match="heads"):
        paged_attention(torch.zeros(1, 3, 64, device="cuda"), pages, table, one, one, scale=1.0)
    with pytest.raises(DTypeError, match="cpu"):
        store_kv(pages, torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), torch.zeros(1, dtype=torch.int64, device="cuda"))
