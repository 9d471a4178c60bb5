"""Paged attention against its FP64 twin, and its bitwise promises: batch, chunking, pages, threads, future tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import KINDS, Case, make_case, randn
from effort import trials
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exl_kernels import threads
from exl_kernels.attention import paged_attention
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.kv import KVPages, store_kv

pytestmark = pytest.mark.sampled(4)


def assert_close(got: Tensor, oracle: Tensor, tolerance: float = 3e-6) -> None:
    assert float((got.double() - oracle).abs().max()) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "groups", "dim"),
    [
        (2, 1, 64),
        (1, 8, 64),
        (2, 3, 80),
        (1, 4, 96),
        (2, 4, 128),
        (1, 2, 256),
        (3, 5, 32),
        (1, 1, 33),
        (2, 7, 7),
        (1, 70, 16),
    ],
)
def test_matches_the_oracle(each_isa: str, kind: Any, heads: int, groups: int, dim: int) -> None:
    case = make_case(kind, [150, 70], heads=heads, groups=groups, dim=dim, page_size=16)
    rows, positions = [0] * 6 + [1] * 4 + [0], [0, 1, 63, 64, 65, 149, 0, 30, 69, 64, 127]
    assert_close(case.run(rows, positions), case.oracle(rows, positions))


@pytest.mark.parametrize("kind", ["fp16", "q6"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 100, 256, 2048])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_long_contexts_match_the_oracle(restore_threads: None, kind: Any, page_size: int, n_threads: int) -> None:
    threads.set_num_threads(n_threads)
    case = make_case(kind, [1300, 600], page_size=page_size, heads=1, groups=2)
    rows, positions = [0, 0, 0, 1], [1299, 511, 512, 599]
    assert_close(case.run(rows, positions), case.oracle(rows, positions))


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 500, 513, 5000])
def test_window_keeps_the_last_w_keys(each_isa: str, window: int) -> None:
    case = make_case("fp16", [1100])
    rows, positions = [0] * 6, [0, 64, 500, 512, 1024, 1099]
    got = case.run(rows, positions, window=window)
    assert_close(got, case.oracle(rows, positions, window=window))
    for i, last in enumerate(positions):
        mask = torch.full((1, 1100), -torch.inf)
        mask[:, max(0, last - window + 1) : last + 1] = 0.0
        assert_close(got[i], case.oracle([0], [last], key_mask=mask)[0])


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kind", ["fp16", "q4"])
def test_softcap(each_isa: str, softcap: float, kind: Any) -> None:
    case = make_case(kind, [200])
    case.scale = 2.0
    rows, positions = [0] * 3, [5, 100, 199]
    # Logits reach 40, where one unit in the last place of float32 is 4e-6.
    assert_close(case.run(rows, positions, softcap=softcap), case.oracle(rows, positions, softcap=softcap), 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_key_mask_is_added_and_infinity_takes_a_key_out(each_isa: str, kind: Any) -> None:
    case = make_case(kind, [130, 90])
    mask = randn(2, 130, seed=9)
    mask[:, :40] = -torch.inf  # left padding
    rows, positions = [0, 0, 1, 1], [129, 64, 89, 20]
    expected = case.oracle(rows, positions, key_mask=mask)
    got = case.run(rows, positions, key_mask=mask)
    assert_close(got, expected)
    assert not got[3].any()  # sees padding only
    # The padding's content does not matter, even if it is NaN.
    for b in range(2):
        for t in case.pages.tensors():
            t[case.block_table[b, :2].long()] = torch.nan if t.dtype == torch.float16 else 0xFF
    assert torch.equal(case.run(rows, positions, key_mask=mask), got)


def test_a_token_without_visible_keys_gets_zeros(each_isa: str) -> None:
    case = make_case("fp16", [100])
    got = case.run([0, 0, 0], [-1, 50, -7])
    assert not got[[0, 2]].any()
    assert torch.equal(got[1], case.run([0], [50])[0])
    assert not case.run([0, 0], [-1, -1]).any()
    everything = torch.full((1, 100), -torch.inf)
    assert not case.run([0, 0], [10, 99], key_mask=everything).any()


def test_large_logits_do_not_overflow(each_isa: str) -> None:
    case = make_case("fp16", [300])
    case.scale = 300.0
    rows, positions = [0, 0], [299, 64]
    got = case.run(rows, positions)
    assert got.isfinite().all()
    assert_close(got, case.oracle(rows, positions), 2e-3)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 100])
def test_bitwise_identical_in_any_chunking_batch_placement_and_thread_count(
    each_isa: str, kind: Any, window: int
) -> None:
    """The promise of the generator: a token's result depends on its own sequence only."""
    n = 700  # beyond one split
    options: dict[str, Any] = {"window": window}
    case = make_case(kind, [n, 333], groups=4)
    threads.set_num_threads(1)
    whole = case.run([0] * n, list(range(n)), **options)

    assert torch.equal(whole, make_case(kind, [n, 333], groups=4, shuffle=5).run([0] * n, list(range(n)), **options))
    other_pages = make_case(kind, [n, 333], groups=4, page_size=100)
    assert torch.equal(whole, other_pages.run([0] * n, list(range(n)), **options))

    for n_threads in (1, 2, 3):
        threads.set_num_threads(n_threads)
        assert torch.equal(whole, case.run([0] * n, list(range(n)), **options))
        for t in (0, 63, 64, 200, 511, 512, n - 1):
            assert torch.equal(whole[t], case.run([0], [t], **options)[0])
            batched = case.run([1, 0, 1, 1], [332, t, 5, 64], **options)
            assert torch.equal(whole[t], batched[1])
        for begin, end in ((0, 17), (17, 512), (512, 515), (515, n)):
            chunk = case.run([0] * (end - begin), list(range(begin, end)), **options)
            assert torch.equal(whole[begin:end], chunk)


@given(data=st.data())
@settings(max_examples=trials(40, 8))
def test_random_ragged_batches_are_right_and_independent(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    lengths = data.draw(st.lists(st.integers(1, 180), min_size=1, max_size=4))
    case = make_case(
        kind,
        lengths,
        heads=data.draw(st.integers(1, 3)),
        groups=data.draw(st.integers(1, 5)),
        dim=data.draw(st.sampled_from([16, 33, 64, 80])),
        page_size=data.draw(st.sampled_from([1, 5, 16, 64, 256])),
        shuffle=data.draw(st.integers(0, 3)),
    )
    tokens = data.draw(
        st.lists(
            st.integers(0, len(lengths) - 1).flatmap(lambda b: st.tuples(st.just(b), st.integers(-1, lengths[b] - 1))),
            max_size=24,
        )
    )
    rows, positions = [b for b, _ in tokens], [p for _, p in tokens]
    options: dict[str, Any] = {
        "window": data.draw(st.sampled_from([0, 0, 1, 30, 64])),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 4.0])),
    }
    if data.draw(st.booleans()):
        mask = randn(len(lengths), max(lengths), seed=5)
        options["key_mask"] = torch.where(randn(len(lengths), max(lengths), seed=6) > 1, -torch.inf, mask)
    got = case.run(rows, positions, **options)
    if not tokens:
        assert got.shape[0] == 0
        return
    assert_close(got, case.oracle(rows, positions, **options))
    pick = data.draw(st.integers(0, len(tokens) - 1))
    assert torch.equal(got[pick], case.run([rows[pick]], [positions[pick]], **options)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_future_token_changes_nothing(each_isa: str, kind: Any) -> None:
    case = make_case(kind, [200], groups=4)
    rows, positions = [0] * 150, list(range(150))
    before = case.run(rows, positions)
    later = torch.arange(150, 200)
    slots = case.block_table[0].long()[later // 16] * 16 + later % 16
    k = torch.full((50, 2, 64), torch.nan)
    store_kv(case.pages, k, k, slots)
    assert torch.equal(before, case.run(rows, positions))
    # The same within one call: token 149 turns to NaN, those before it do not notice.
    slot = case.block_table[0, 149 // 16].long() * 16 + 149 % 16
    store_kv(case.pages, k[:1], k[:1], slot[None])
    after = case.run(rows, positions)
    assert torch.equal(before[:149], after[:149])
    assert after[149].isnan().all()


def test_nan_in_a_query_reaches_only_its_own_head(each_isa: str) -> None:
    case = make_case("fp16", [100], groups=4)
    case.q[0, 70, 3, 5] = torch.nan
    got = case.run([0] * 100, list(range(100)))
    assert got[70, 3].isnan().all()
    got[70, 3] = 0.0
    assert not got.isnan().any()


def test_dropped_pages_before_the_window_are_not_read() -> None:
    case = make_case("fp16", [400])
    expected = case.run([0], [399], window=50)
    case.block_table[0, : (399 - 49) // 16] = -1
    assert torch.equal(case.run([0], [399], window=50), expected)
    assert torch.equal(case.run([0, 0], [-1, 399], window=50)[1:], expected)


def test_contiguous_cache_is_pages_of_the_whole_length() -> None:
    case = make_case("q8", [256, 100], page_size=256, spare=0)
    small = KVPages("q8", 64, *(t.view(-1, 16, *t.shape[2:]) for t in case.pages.tensors()))
    table = case.block_table.repeat_interleave(16, dim=1) * 16 + torch.arange(16, dtype=torch.int32)
    fine = Case(small, table.int(), case.q, case.scale, case.dtype)
    rows, positions = [0, 1, 0], [255, 99, 64]
    assert torch.equal(case.run(rows, positions), fine.run(rows, positions))


def test_writes_to_out() -> None:
    case = make_case("fp16", [40])
    out = torch.empty(1, 4, 64)
    expected = case.run([0], [39])
    assert case.run([0], [39], out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rows": torch.tensor([2], dtype=torch.int32)}, ShapeError, "row 2"),
        ({"rows": torch.tensor([-1], dtype=torch.int32)}, ShapeError, "row -1"),
        ({"positions": torch.tensor([48], dtype=torch.int32)}, ShapeError, "position 48"),
        ({"block_table": torch.tensor([[0, 99, 0]] * 2, dtype=torch.int32)}, ShapeError, "is 99"),
        ({"block_table": torch.tensor([[0, -1, 0]] * 2, dtype=torch.int32)}, ShapeError, "is -1"),
        ({"rows": torch.tensor([0, 0], dtype=torch.int32)}, ShapeError, "rows"),
        ({"positions": torch.tensor([[1]], dtype=torch.int32)}, ShapeError, "positions"),
        ({"positions": torch.tensor([1])}, DTypeError, "positions"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, DTypeError, "block_table"),
        ({"block_table": torch.zeros(3, dtype=torch.int32)}, ShapeError, "block_table"),
        ({"q": torch.zeros(1, 3, 64)}, ShapeError, "multiple of 2"),
        ({"q": torch.zeros(1, 4, 32)}, ShapeError, "expected contiguous"),
        ({"q": torch.zeros(1, 4, 64, dtype=torch.float16)}, DTypeError, "float32"),
        ({"q": torch.zeros(1, 4, 64, device="meta")}, UnsupportedError, "meta"),
        ({"key_mask": torch.zeros(2, 30)}, ShapeError, "key_mask"),
        ({"key_mask": torch.zeros(1, 48)}, ShapeError, "key_mask"),
        ({"key_mask": torch.zeros(2, 48, dtype=torch.float16)}, DTypeError, "key_mask"),
        ({"window": -1}, ShapeError, "window"),
        ({"softcap": -1.0}, ShapeError, "softcap"),
        ({"out": torch.zeros(1, 4, 63)}, ShapeError, "out"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(1, 4, 64),
        "pages": KVPages.allocate("fp16", 4, 16, 2, 64),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "rows": torch.zeros(1, dtype=torch.int32),
        "positions": torch.full((1,), 47, dtype=torch.int32),
        "scale": 1.0,
    }
    paged_attention(**arguments)
    with pytest.raises(error, match=text):
        paged_attention(**(arguments | change))
