"""Captured decode steps are bitwise identical to eager ones: buckets, padding, growth, a moved cache; needs a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from internals import gpu_sleep
from make_random_model import SHAPES, make_model
from torch import Tensor

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    Intervention,
    PagedParams,
)
from exl_core.errors import InputError, SequenceTooLongError, TokenIdError
from exl_core.execution.environment import PROMPTS_VARIABLE
from exl_kernels.device import set_programmatic_launch, set_row_invariant
from exl_kernels.selection import STEP_ROWS

pytestmark = pytest.mark.cuda

DATA = Path(__file__).parent.parent / "golden" / "data"
PAGE = 16
PAGES = 96


@pytest.fixture(scope="module", params=["exl2-3.5", "exl2-4.5"])
def model(request: pytest.FixtureRequest) -> Iterator[ExLlamaV2]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cuda:0")
        loaded = ExLlamaV2(ExLlamaV2Config(DATA / f"pylib-4m-{request.param}"))
        loaded.load()
    yield loaded
    loaded.unload()


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExLlamaV2]:
    """A model whose q, k, v and gate, up have one permutation, so that launches of any number of rows are joined."""
    folder = tmp_path_factory.mktemp("joined")
    make_model(folder, SHAPES["tiny"], 4.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cuda:0")
        loaded = ExLlamaV2(ExLlamaV2Config(folder))
        loaded.load()
    yield loaded
    loaded.unload()


def table(batch: int, width: int, seed: int = 0) -> Tensor:
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))[: batch * width]
    return order.to(torch.int32).view(batch, width)


def params(pages: Tensor, lengths: list[int], q_len: int) -> PagedParams:
    past = torch.tensor(lengths, dtype=torch.int32)
    return PagedParams(pages.shape[0], pages, past, int(past.max()), PAGE, q_len)


def eager(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    model.decode.clear()
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")


def captured(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    model.decode.clear()
    monkeypatch.delenv("EXL_CUDA_GRAPHS", raising=False)


def with_and_without_plan(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExLlamaV2CacheBase]:
    """A cache for captured steps of the plan, then one for steps of the modules' own passes, as where the plan does not
    cover a model."""
    for plan in (True, False):
        captured(model, monkeypatch)
        if not plan:
            monkeypatch.setattr("exl_core.execution.captured.joined_launches_of", lambda _: "not covered")
        cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
        yield cache
        assert model.decode.count > 0
        assert (model.decode.apart_reason is None) == plan


def run(model: ExLlamaV2, cache: ExLlamaV2CacheBase, batch: int, q_len: int) -> list[Tensor]:
    """A prompt and four steps of uneven sequences; the logits of the steps."""
    generator = torch.Generator().manual_seed(batch)
    vocab = model.config.vocab_size
    pages = table(batch, PAGES // batch if batch < 24 else 4)
    room = pages.shape[1] * PAGE - 4 * q_len
    lengths = [1 + int(torch.randint(0, min(room - 1, 60), (1,), generator=generator)) for _ in range(batch)]
    for row, length in enumerate(lengths):
        ids = torch.randint(0, vocab, (1, length), generator=generator)
        model.forward_chunk(ids, cache, attn_params=params(pages[row : row + 1], [0], length), preprocess_only=True)
    out = []
    for step in range(4):
        ids = torch.randint(0, vocab, (batch, q_len), generator=generator)
        past = [length + step * q_len for length in lengths]
        out.append(model.forward_chunk(ids, cache, attn_params=params(pages, past, q_len))["logits"].clone())
    return out


@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (1, 8), (2, 3), (3, 1), (5, 2), (9, 1), (13, 4), (24, 1)])
def test_captured_steps_are_the_eager_ones(
    model: ExLlamaV2, kind: type[ExLlamaV2CacheBase], batch: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for way in (eager, captured):
        way(model, monkeypatch)
        cache = kind(model, max_seq_len=PAGES * PAGE)
        results.append((run(model, cache, batch, q_len), [t.clone() for t in cache.all_tensors()]))
        assert (model.decode.count > 0) == (way is captured), model.decode.reason
    (eager_logits, eager_cache), (graph_logits, graph_cache) = results
    for step, (a, b) in enumerate(zip(eager_logits, graph_logits, strict=True)):
        assert torch.equal(a, b), f"step {step}"
    for a, b in zip(eager_cache, graph_cache, strict=True):
        assert torch.equal(a, b), "padding rows or the step wrote elsewhere"


@pytest.mark.parametrize(("batch", "q_len"), [(13, 5), (16, 8), (90, 1), (5, 16)])
@pytest.mark.needs("wgmma|mma_pipeline")
def test_more_rows_than_a_kernel_takes_are_captured_in_blocks(
    joined: ExLlamaV2, batch: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise the results of eager steps, and of every sequence alone."""
    model, results = joined, []
    for way in (eager, captured):
        way(model, monkeypatch)
        before = model.decode.steps
        cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
        pages = table(batch, 1 if batch > 24 else 4)
        past = [0] * batch if q_len == PAGE else [1 + row % (PAGE - q_len) for row in range(batch)]
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(0, model.config.vocab_size, (batch, q_len), generator=generator)
        results.append(model.forward_chunk(ids, cache, attn_params=params(pages, past, q_len))["logits"].clone())
        assert (model.decode.steps > before) == (way is captured), model.decode.reason
    assert torch.equal(*results)
    for row in (0, batch - 1):
        alone = params(pages[row : row + 1], past[row : row + 1], q_len)
        logits = model.forward_chunk(ids[row : row + 1], cache, attn_params=alone)["logits"]
        assert torch.equal(logits[0], results[1][row])


@pytest.mark.parametrize("kind", ["exl2-4.5", "fp16"])
def test_more_rows_of_matmuls_that_are_apart_are_captured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized ones run 64 rows at a time, captured or not; float ones at once."""
    monkeypatch.setenv("EXL_DEVICE", "cuda:0")
    model = ExLlamaV2(ExLlamaV2Config(DATA / f"pylib-4m-{kind}"))
    model.load()
    captured(model, monkeypatch)
    cache, pages = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE), table(1, 1)
    before = model.decode.steps
    ids = torch.tensor([[5]])

    def step(rows: int) -> torch.Tensor:
        where = params(pages.repeat(rows, 1), [3] * rows, 1)
        return model.forward_chunk(ids.repeat(rows, 1), cache, attn_params=where)["logits"].clone()

    few = step(1)
    assert model.decode.steps == before + 1, model.decode.reason
    for number, rows in enumerate((65, 70, 150, 256), 2):
        many = step(rows)
        assert model.decode.steps == before + number, model.decode.reason
        assert all(torch.equal(row, few[0]) for row in many)
        eager(model, monkeypatch)
        assert torch.equal(step(rows), many)
        captured(model, monkeypatch)


@pytest.mark.needs("wgmma|mma_pipeline")
def test_a_row_is_the_same_in_every_bucket(joined: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_are_the_same(joined, (2, 4, 7, 8, 16, 31, 32, 64, 65, 100, 128, 160, 256), monkeypatch)


def test_a_row_of_matmuls_that_are_apart_is_the_same_in_every_bucket(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_are_the_same(model, (2, 4, 7, 8, 16, 31, 32, 64, 65, 160), monkeypatch)


def rows_are_the_same(model: ExLlamaV2, batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    captured(model, monkeypatch)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
    pages = table(1, 4)
    ids = torch.randint(0, model.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(1))
    model.forward_chunk(ids[:, :19], cache, attn_params=params(pages, [0], 19), preprocess_only=True)
    alone = model.forward_chunk(ids[:, 19:], cache, attn_params=params(pages, [19], 1))["logits"].clone()
    for batch in batches:
        # Every row the same request: all of them write the same token to the same place.
        many = model.forward_chunk(
            ids[:, 19:].repeat(batch, 1), cache, attn_params=params(pages.repeat(batch, 1), [19] * batch, 1)
        )["logits"]
        assert many.shape[0] == batch
        for row in (0, batch // 2, batch - 1):
            assert torch.equal(many[row], alone[0]), f"row {row} of {batch}"


@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
@pytest.mark.parametrize(
    ("lengths", "past"),
    [([40], [3]), ([64], [0]), ([1], [30]), ([20, 9, 1], [0, 17, 5]), ([5] * 7, [0] * 7), ([45], [950])],
)
def test_captured_prompts_store_what_eager_ones_do(
    model: ExLlamaV2,
    kind: type[ExLlamaV2CacheBase],
    lengths: list[int],
    past: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short prompts alone and together, after tokens that are stored already."""
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    vocab, generator = model.config.vocab_size, torch.Generator().manual_seed(3)
    pages = table(len(lengths), 64 if past[0] > 6 * PAGE else 6)
    before = [torch.randint(0, vocab, (1, 1 + stored), generator=generator) for stored in past]
    ids = torch.randint(0, vocab, (1, sum(lengths)), generator=generator)
    together = replace(params(pages, past, 0), q_lens=torch.tensor(lengths, dtype=torch.int32))
    stored = []
    for way in (eager, captured):
        way(model, monkeypatch)
        cache = kind(model, max_seq_len=PAGES * PAGE)
        for row, first in enumerate(before):
            model.forward_chunk(first, cache, attn_params=params(pages[row : row + 1], [0], first.shape[1]))
        count = model.decode.count
        for _ in range(2):  # the first pass of its kind is not captured
            assert model.forward_chunk(ids, cache, attn_params=together, preprocess_only=True) == {}
        assert (model.decode.count > count) == (way is captured), model.decode.reason
        stored.append([tensor.clone() for tensor in cache.all_tensors()])
    for one, other in zip(*stored, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", [eager, captured])
@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
@pytest.mark.parametrize(
    ("lengths", "past"),
    [([40], [3]), ([1], [30]), ([20, 9, 1], [0, 17, 5]), ([5] * 7, [0] * 7), ([63], [950]), ([70, 9, 50], [0, 17, 5])],
)
def test_logits_of_last_tokens_are_those_of_a_decode_step(
    joined: ExLlamaV2,
    way: Callable[[ExLlamaV2, pytest.MonkeyPatch], None],
    kind: type[ExLlamaV2CacheBase],
    lengths: list[int],
    past: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt gives its first token without a step of its own: its pass has the logits of each last token."""
    if sum(lengths) > joined.packed_rows:
        pytest.skip("longer passes are not batch-invariant on this card")
    assert_last_tokens(joined, way, kind, lengths, past, monkeypatch)


@pytest.mark.parametrize("lengths", [[300], [257, 3, 90], [65] * 5])
def test_logits_of_last_tokens_in_strict_mode(
    joined: ExLlamaV2, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_row_invariant(True)
    try:
        assert_last_tokens(joined, captured, ExLlamaV2Cache, lengths, [0] * len(lengths), monkeypatch)
    finally:
        set_row_invariant(False)


def assert_last_tokens(
    model: ExLlamaV2,
    way: Callable[[ExLlamaV2, pytest.MonkeyPatch], None],
    kind: type[ExLlamaV2CacheBase],
    lengths: list[int],
    past: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass with the logits of each last token, and those of a decode step after all the others, on equal caches."""
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    way(model, monkeypatch)
    vocab, generator = model.config.vocab_size, torch.Generator().manual_seed(3)
    pages = table(len(lengths), PAGES // len(lengths))
    before = [torch.randint(0, vocab, (1, 1 + stored), generator=generator) for stored in past]
    prompts = [torch.randint(0, vocab, (1, length), generator=generator) for length in lengths]
    caches = [kind(model, max_seq_len=PAGES * PAGE) for _ in range(2)]
    for cache in caches:
        for row, first in enumerate(before):
            model.forward_chunk(first, cache, attn_params=params(pages[row : row + 1], [0], first.shape[1]))
    for row, prompt in enumerate(prompts):
        if prompt.shape[1] > 1:
            places = params(pages[row : row + 1], [past[row]], prompt.shape[1] - 1)
            model.forward_chunk(prompt[:, :-1], caches[0], attn_params=places, preprocess_only=True)
    ends = [stored + length - 1 for stored, length in zip(past, lengths, strict=True)]
    last = torch.cat([prompt[:, -1:] for prompt in prompts])
    expected = model.forward_chunk(last, caches[0], attn_params=params(pages, ends, 1))["logits"][:, 0].clone()
    together = replace(params(pages, past, 0), q_lens=torch.tensor(lengths, dtype=torch.int32))
    for _ in range(3):  # the first pass of its kind is not captured
        found = model.forward_chunk(torch.cat(prompts, dim=1), caches[1], attn_params=together, last_id_only=True)
        assert torch.equal(found["logits"], expected[None])
    for one, other in zip(*(cache.all_tensors() for cache in caches), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
@pytest.mark.parametrize(("lengths", "past"), [([65], [3]), ([128], [0]), ([70, 9, 90], [0, 17, 5]), ([240], [40])])
def test_prompts_in_blocks_of_packed_matmuls(
    joined: ExLlamaV2,
    kind: type[ExLlamaV2CacheBase],
    lengths: list[int],
    past: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one launch takes a block of 128 rows, up to 256 tokens are stored by batch-invariant matmuls, captured or
    not; elsewhere they are dequantized, where joined launches add residuals with one rounding less.
    """
    vocab, generator = joined.config.vocab_size, torch.Generator().manual_seed(3)
    pages = table(len(lengths), 20)
    ids = torch.randint(0, vocab, (1, sum(lengths)), generator=generator)
    together = replace(params(pages, past, 0), q_lens=torch.tensor(lengths, dtype=torch.int32))
    stored, counts = [], []
    for way in (eager, captured):
        way(joined, monkeypatch)
        monkeypatch.setenv(PROMPTS_VARIABLE, "1")
        cache = kind(joined, max_seq_len=PAGES * PAGE)
        for tensor in cache.all_tensors():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)))
        for _ in range(2):
            assert joined.forward_chunk(ids, cache, attn_params=together, preprocess_only=True) == {}
            stored.append([tensor.clone() for tensor in cache.all_tensors()])
            counts.append(joined.decode.count)
    assert counts == [0, 0, 0, int(joined.packed_rows == STEP_ROWS)]
    if counts[-1]:
        for found in stored[1:]:
            for one, other in zip(stored[0], found, strict=True):
                assert torch.equal(one, other)


def test_a_token_s_logits_do_not_depend_on_how_its_prompt_is_cut(
    joined: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to `packed_rows` tokens in a pass, with all logits, in pages and in a row of a batch."""
    captured(joined, monkeypatch)
    most = joined.packed_rows
    ids = torch.randint(0, joined.config.vocab_size, (2, most // 2), generator=torch.Generator().manual_seed(4))
    pages = table(2, 20)
    both = ExLlamaV2Cache(joined, max_seq_len=PAGES * PAGE)
    expected = joined.forward_chunk(ids, both, attn_params=params(pages, [0, 0], most // 2))["logits"]
    for step in (1, 17, 40):
        cache = ExLlamaV2Cache(joined, max_seq_len=PAGES * PAGE)
        for begin in range(0, most // 2, step):
            part = ids[1:, begin : begin + step]
            places = params(pages[1:], [begin], part.shape[1])
            logits = joined.forward_chunk(part, cache, attn_params=places)["logits"]
            assert torch.equal(logits, expected[1:, begin : begin + step]), (step, begin)


@pytest.mark.parametrize("tokens", [257, 300, 384, 511])
def test_prompts_of_strict_mode(joined: ExLlamaV2, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By joined launches in blocks, bitwise as module by module, with logits of all tokens and of the last."""
    ids = torch.randint(0, joined.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    found = []
    for way in (eager, captured):
        way(joined, monkeypatch)
        cache = ExLlamaV2Cache(joined, max_seq_len=PAGES * PAGE)
        places = params(table(1, 40), [0], tokens)
        set_row_invariant(True)
        try:
            last = joined.forward_chunk(ids, cache, attn_params=places, last_id_only=True)["logits"]
            every = joined.forward_chunk(ids, cache, attn_params=places)["logits"]
        finally:
            set_row_invariant(False)
        found.append([last, every, *cache.all_tensors()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_one_capture_serves_every_length_of_its_bucket(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(model, monkeypatch)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
    pages = table(1, 8)
    ids = torch.randint(0, model.config.vocab_size, (1, 128), generator=torch.Generator().manual_seed(2))
    stepwise = [
        model.forward_chunk(ids[:, i : i + 1], cache, attn_params=params(pages, [i], 1))["logits"].clone()
        for i in range(128)
    ]
    assert model.decode.count == 8  # 1 to 8 pages; beyond, four buckets an octave
    at_once = model.forward_chunk(ids, cache, attn_params=params(pages, [0], 128))["logits"]
    assert float((torch.cat(stepwise, 1) - at_once).abs().max()) < 0.05 * float(at_once.std())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > 0
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for i in range(64, 128):
        model.forward_chunk(ids[:, i : i + 1], cache, attn_params=params(pages, [i], 1))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a captured step allocated"


def test_a_capture_leaves_the_logits_of_the_step_before(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator prepares the next step while the logits of the last wait to be sampled: with plan and without."""
    ids = torch.full((2, 1), 7)
    for cache in with_and_without_plan(model, monkeypatch):
        step = model.prelaunchable_step(1, cache, params(table(2, 4), [15, 3], 1))
        assert step is not None
        logits = step.run(ids)
        assert logits is not None
        expected = logits.clone()
        assert model.prelaunchable_step(1, cache, params(table(2, 4), [16, 4], 1)) is not None
        assert model.decode.count == 2
        assert step.is_current
        assert torch.equal(logits, expected)


def test_a_queued_step_outlives_its_graph(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps are forgotten while the GPU has one still before it: its inputs are read as they were."""
    captured(model, monkeypatch)
    cache, ids = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE), torch.full((4, 1), 7)
    at = params(table(4, 4), [15, 3, 30, 40], 1)
    expected = model.forward_chunk(ids, cache, attn_params=at)["logits"].clone()
    for others in (at, params(table(4, 4, seed=1), [1, 2, 3, 50], 1)):
        step = model.prelaunchable_step(1, cache, at)
        assert step is not None
        torch.cuda.synchronize()
        gpu_sleep(200_000_000)  # about 0.1 s
        logits = step.run(ids)
        del step
        model.decode.clear()
        for _ in range(3):  # whoever gets the pinned memory writes to it at once
            torch.full((1 << 12,), 99, dtype=torch.uint8, pin_memory=True)
            torch.full((4 * 28 + 16 * 4,), 99, dtype=torch.uint8, pin_memory=True)
        assert logits is not None
        kept = logits.clone()
        assert model.prelaunchable_step(1, cache, others) is not None
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("batch", [4, 16])
def test_captured_steps_serve_again_when_a_hook_is_taken_out(
    model: ExLlamaV2, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooked model's eager passes use separate memory."""
    captured(model, monkeypatch)
    cache, ids = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE), torch.full((batch, 1), 7)
    at = params(table(batch, 4), [15 + row for row in range(batch)], 1)
    inner = model.modules[3]
    expected = model.forward_chunk(ids, cache, attn_params=at)["logits"].clone()
    for _ in range(3):
        model.modules[3] = Intervention(inner, post_forward=lambda state, step: state * 1.5)
        try:
            hooked = [model.forward_chunk(ids, cache, attn_params=at)["logits"].clone() for _ in range(2)]
        finally:
            model.modules[3] = inner
        assert torch.equal(*hooked)
        assert not torch.equal(hooked[0], expected)
        assert torch.equal(model.forward_chunk(ids, cache, attn_params=at)["logits"], expected)
        assert model.decode.count == 1


def test_captures_die_with_their_cache_and_others_live_on(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(model, monkeypatch)
    ids = torch.zeros((1, 1), dtype=torch.int64)
    logits = []
    for _ in range(3):
        cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
        logits.append(model.forward_chunk(ids, cache, attn_params=params(table(1, 2), [0], 1))["logits"].clone())
        assert model.decode.count == 1
        del cache
        gc.collect()
        assert model.decode.count == 0
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    two = [ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE) for _ in range(2)]
    for cache in two:
        model.forward_chunk(ids, cache, attn_params=params(table(1, 2), [0], 1))
    assert model.decode.count == 2
    two.pop()
    del cache
    gc.collect()
    assert model.decode.count == 1
    again = model.forward_chunk(ids, two[0], attn_params=params(table(1, 2), [0], 1))["logits"]
    assert torch.equal(again, logits[0])


def test_dependent_launch_changes_nothing(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for programmatic in (True, False):
        set_programmatic_launch(programmatic)
        try:
            captured(model, monkeypatch)
            results.append(run(model, ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE), 3, 1))
        finally:
            set_programmatic_launch(True)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_thousand_replays_are_bitwise_identical(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(model, monkeypatch)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
    ids, at = torch.full((4, 1), 7), params(table(4, 4), [5, 9, 33, 60], 1)
    first = model.forward_chunk(ids, cache, attn_params=at)["logits"].clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (model.forward_chunk(ids, cache, attn_params=at)["logits"] != first).sum()
    assert int(wrong) == 0


def test_bad_input_is_refused_as_ever(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(model, monkeypatch)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
    with pytest.raises(TokenIdError):
        model.forward_chunk(torch.full((1, 1), model.config.vocab_size), cache, attn_params=params(table(1, 2), [0], 1))
    with pytest.raises(SequenceTooLongError):
        model.forward_chunk(torch.zeros((1, 1), dtype=torch.int64), cache, attn_params=params(table(1, 2), [32], 1))
    pages = torch.tensor([[0, PAGES]], dtype=torch.int32)
    with pytest.raises(InputError):
        model.forward_chunk(torch.zeros((1, 1), dtype=torch.int64), cache, attn_params=params(pages, [20], 1))


def test_the_switch_and_its_reason(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    eager(model, monkeypatch)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)
    model.forward_chunk(torch.zeros((1, 1), dtype=torch.int64), cache, attn_params=params(table(1, 2), [0], 1))
    assert model.decode.count == 0
    assert "EXL_CUDA_GRAPHS" in (model.decode.reason or "")


def test_steps_that_cannot_be_captured_run_eagerly(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, at = torch.tensor([[5]]), params(table(1, 2), [0], 1)
    eager(model, monkeypatch)
    want = model.forward_chunk(ids, ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE), attn_params=at)["logits"].clone()
    captured(model, monkeypatch)
    cache = ExLlamaV2Cache(model, max_seq_len=PAGES * PAGE)

    def reads_back(*_: object) -> str:
        int(torch.ones(1, device="cuda"))
        return "not covered"

    with monkeypatch.context() as patch:
        forward = type(model.modules[0]).forward
        patch.setattr("exl_core.execution.captured.joined_launches_of", reads_back)
        patch.setattr(type(model.modules[0]), "forward", lambda *a: (reads_back(), forward(*a))[1])
        got = model.forward_chunk(ids, cache, attn_params=at)["logits"]
    assert torch.equal(got, want)
    assert model.decode.count == 0
    assert "could not be captured" in (model.decode.reason or "")
    # The GPU and torch's allocator are as usable as before.
    captured(model, monkeypatch)
    assert torch.equal(model.forward_chunk(ids, cache, attn_params=at)["logits"], want)
    assert model.decode.count == 1
    assert model.decode.apart_reason is None


def test_captured_without_the_plan(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that the plan does not cover are captured as their modules' own passes."""
    results = [run(model, cache, 3, 2) for cache in with_and_without_plan(model, monkeypatch)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
