"""The host's handling of captured steps, without a GPU: who may read what while the next step is made."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from captured_on_cpu import Stream, captured_on_cpu

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Lora, Intervention, PagedParams
from exl_core.errors import InputError, TokenIdError
from exl_core.execution import capturable, select, step_inputs, step_recorder
from exl_core.execution import captured as graphs
from exl_core.execution.capture_failure import FIRST_PAUSE
from exl_core.execution.environment import PROMPTS_VARIABLE
from exl_core.execution.step_inputs import STAGES, StagedTensors
from exl_kernels.errors import DeviceError
from exl_kernels.linear import QuantMatrix
from exl_kernels.safetensors_file import write_safetensors
from exl_kernels.selection import DECODE_TOKENS, STEP_ROWS
from exl_kernels.staging import StepStage

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"
PAGE = 16


@cache
def loaded() -> ExLlamaV2:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cpu")
        model = ExLlamaV2(ExLlamaV2Config(FOLDER))
        model.load()
    return model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    captured_on_cpu(monkeypatch)
    model = loaded()
    model.decode.clear()
    return model


def params(lengths: list[int], width: int = 4) -> PagedParams:
    pages = torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width)
    return PagedParams(len(lengths), pages, torch.tensor(lengths, dtype=torch.int32), max(lengths), PAGE, 1)


def test_a_capture_leaves_the_logits_of_the_step_before(model: ExLlamaV2) -> None:
    """A generator prepares the next step while the logits of the last wait to be sampled."""
    cache = ExLlamaV2Cache(model, max_seq_len=8 * PAGE)
    step = model.prelaunchable_step(1, cache, params([15, 3]))
    assert step is not None
    logits = step.run(torch.full((2, 1), 7))
    assert logits is not None
    expected = logits.clone()
    assert bool(expected.isfinite().all())
    assert model.prelaunchable_step(1, cache, params([16, 4])) is not None
    assert model.decode.count == 2
    assert step.is_current
    assert torch.equal(logits, expected)


PROMPTS = [
    pytest.param([40], [3], id="one-prompt"),
    pytest.param([64], [0], id="most-tokens"),
    pytest.param([1], [30], id="one-token"),
    pytest.param([20, 9, 1], [0, 17, 5], id="three-prompts"),
    pytest.param([5] * 7, [0] * 7, id="many-short-prompts"),
    pytest.param([80], [3], id="more-rows-than-are-always-packed"),
    pytest.param([20, 33, 41], [0, 17, 5], id="together-more-rows"),
]


def prompts(lengths: list[int], past: list[int], order: torch.Tensor | None = None) -> PagedParams:
    many = replace(params(past, width=6), q_len=0)
    if order is not None:
        many.block_index = order[many.block_index.long()]
    return many if len(lengths) == 1 else replace(many, q_lens=torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shift", [None, -2], ids=["", "rotated-elsewhere"])
@pytest.mark.parametrize(("lengths", "past"), PROMPTS)
def test_a_short_prompt_is_stored_by_a_captured_step(
    model: ExLlamaV2, lengths: list[int], past: list[int], shift: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass of its kind runs eagerly. Later ones store bitwise the same, and nothing else."""
    monkeypatch.setattr(ExLlamaV2, "packed_rows", STEP_ROWS)
    caches = [ExLlamaV2Cache(model, max_seq_len=64 * PAGE) for _ in range(2)]
    generator = torch.Generator().manual_seed(len(lengths))
    order = torch.randperm(64, generator=generator).to(torch.int32)
    for held in caches:
        for tensor in held.all_tensors():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)))
    ids = torch.randint(0, model.config.vocab_size, (1, sum(lengths)), generator=generator)
    places, counts = prompts(lengths, past, order), []
    if shift is not None:
        places.rope_offsets = torch.tensor([shift if stored else 0 for stored in past], dtype=torch.int32)
    for held in caches:
        model.forward_chunk(ids, held, preprocess_only=True, attn_params=places)
        counts.append(model.decode.count)
        assert held.current_seq_len == max(stored + new for stored, new in zip(past, lengths, strict=True))
    assert counts == [0, 1]
    for eager, stored in zip(caches[0].all_tensors(), caches[1].all_tensors(), strict=True):
        assert torch.equal(eager, stored)


@pytest.mark.parametrize(("passes", "eager"), [(None, 4), ("3", 3), ("0", 99)])
def test_first_prompts_of_a_size_are_not_captured(
    model: ExLlamaV2, passes: str | None, eager: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE)
    if passes is not None:
        monkeypatch.setenv(PROMPTS_VARIABLE, passes)
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)
    counts = []
    for length in (20, 17, 30, 18, 25, 31, 32, 20, 19, 18):
        model.forward_chunk(torch.full((1, length), 7), cache, preprocess_only=True, attn_params=prompts([length], [0]))
        counts.append(model.decode.count)
    assert counts == [int(number >= eager) for number in range(10)]


def test_longer_prompts_share_few_captured_steps(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 64 tokens a step serves prompts of up to 64 tokens less than it has rows."""
    monkeypatch.setattr(ExLlamaV2, "packed_rows", STEP_ROWS)
    cache = ExLlamaV2Cache(model, max_seq_len=96 * PAGE)
    counts = []
    for length in (65, 65, 100, 128, 129, 130, 192, 193, 200, 256):
        places = replace(prompts([length], [0]), block_index=torch.arange(16, dtype=torch.int32)[None])
        model.forward_chunk(torch.full((1, length), 7), cache, preprocess_only=True, attn_params=places)
        counts.append(model.decode.count)
    assert counts == [0, 1, 1, 1, 1, 2, 2, 2, 3, 3]


def test_a_bad_number_of_eager_prompts_is_refused(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROMPTS_VARIABLE, "yes")
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)
    with pytest.raises(InputError, match="EXL_CUDA_PROMPT_GRAPHS is 'yes'"):
        model.forward_chunk(torch.full((1, 9), 7), cache, preprocess_only=True, attn_params=prompts([9], [0]))


def test_a_stored_prompt_leaves_the_logits_of_the_step_before(model: ExLlamaV2) -> None:
    """A generator computes new prompts while the logits of a prelaunched step wait to be used."""
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)
    step = model.prelaunchable_step(1, cache, params([15, 3]))
    assert step is not None
    logits = step.run(torch.full((2, 1), 7))
    assert logits is not None
    expected = logits.clone()
    ids, places = torch.full((1, 20), 7), prompts([20], [0], torch.arange(64, dtype=torch.int32) + 16)
    for _ in range(2):
        assert model.forward_chunk(ids, cache, preprocess_only=True, attn_params=places) == {}
    assert model.decode.count == 2
    assert step.is_current
    assert torch.equal(logits, expected)


def test_a_prompt_is_not_the_reason_why_a_step_was_not_captured(model: ExLlamaV2) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)

    def prompt() -> None:
        """Its padding does not fit its pages."""
        places = prompts([10], [86])
        model.forward_chunk(torch.full((1, 10), 7), cache, preprocess_only=True, attn_params=places)

    model.forward_chunk(torch.full((2, 1), 7), cache, attn_params=params([15, 3]))
    prompt()
    assert model.decode.reason is None
    assert model.prelaunchable_step(1, cache, params([1] * 257, width=1)) is None
    prompt()
    assert model.decode.reason == "the step has 257 x 1 tokens; captured steps have at most 256"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"ids": 65}, id="more-rows-than-packed-weights-take"),
        pytest.param({"q_lens": [1] * 20}, id="too-many-windows"),
        pytest.param({"past": 90}, id="padding-past-the-last-page"),
    ],
)
def test_prompts_that_fit_no_windows_run_eagerly(model: ExLlamaV2, change: dict[str, Any]) -> None:
    lengths = change.get("q_lens", [change.get("ids", 4)])
    past = [change.get("past", 0)] * len(lengths)
    cache = ExLlamaV2Cache(model, max_seq_len=6 * len(lengths) * PAGE)
    for _ in range(2):
        ids = torch.full((1, sum(lengths)), 7)
        assert model.forward_chunk(ids, cache, preprocess_only=True, attn_params=prompts(lengths, past)) == {}
    assert model.decode.count == 0
    assert cache.current_seq_len == past[0] + lengths[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_lens", [4, 4]),
        ("q_lens", torch.tensor([8])),
        ("q_lens", torch.tensor([[4, 4]])),
        ("q_lens", torch.tensor([2, 2, 4])),
        ("q_lens", torch.tensor([9, -1])),
        ("rope_offsets", torch.tensor([0, 0, 0])),
    ],
)
def test_parameters_of_a_stored_prompt_are_checked(model: ExLlamaV2, name: str, value: Any) -> None:
    """Also those that were assigned after the parameters were made."""
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)
    places = prompts([4, 4], [0, 0])
    setattr(places, name, value)
    for _ in range(2):
        with pytest.raises(InputError, match=name):
            model.forward_chunk(torch.full((1, 8), 7), cache, preprocess_only=True, attn_params=places)


@pytest.mark.parametrize("token", [-2, 10**6])
def test_ids_of_a_stored_prompt_are_checked(model: ExLlamaV2, token: int) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=8 * PAGE)
    ids = torch.full((1, 20), 7)
    for _ in range(2):
        model.forward_chunk(ids, cache, preprocess_only=True, attn_params=prompts([20], [0]))
    assert model.decode.count == 1
    ids[0, 11] = token
    with pytest.raises(TokenIdError):
        model.forward_chunk(ids, cache, preprocess_only=True, attn_params=prompts([20], [0]))


def test_the_step_unused_for_longest_is_dropped(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)

    def captured(batch: int) -> Any:
        step = model.prelaunchable_step(1, cache, params([1] * batch, width=1))
        assert step is not None
        return step.captured

    one, two = captured(1), captured(2)
    assert captured(1) is one
    captured(4)
    assert captured(1) is one
    assert captured(2) is not two


def test_a_prompt_whose_step_was_dropped_runs_eagerly_first(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rare size is not recorded again for a single prompt."""
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    cache = ExLlamaV2Cache(model, max_seq_len=64 * PAGE)
    recorded: list[Any] = []

    def record(*given: Any) -> StagedTensors:
        recorded.append(given)
        return StagedTensors(*given)

    monkeypatch.setattr(step_recorder, "StagedTensors", record)
    found = []
    for length in (10, 10, 20, 20, 40, 40, 10, 10):
        places = prompts([length], [0])
        model.forward_chunk(torch.full((1, length), 7), cache, preprocess_only=True, attn_params=places)
        found.append(len(recorded))
    assert found == [0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(("batch", "q_len"), [(16, 5), (80, 1), (32, 8)])
def test_steps_of_more_rows_than_a_kernel_takes_are_captured(model: ExLlamaV2, batch: int, q_len: int) -> None:
    """Sequences with drafts, and many sequences: each row has the logits that it has alone."""
    cache = ExLlamaV2Cache(model, max_seq_len=batch * PAGE)
    ids = torch.randint(0, model.config.vocab_size, (batch, q_len), generator=torch.Generator().manual_seed(q_len))
    many = replace(params([1] * batch, width=1), q_len=q_len)
    before = model.decode.steps
    step = model.prelaunchable_step(q_len, cache, many)
    assert step is not None, model.decode.reason
    found = step.run(ids)
    assert found is not None
    found = found.clone()
    assert model.decode.steps == before + 1
    for row in (0, batch - 1):
        pages = many.block_index[row : row + 1]
        alone = replace(params([1], width=1), q_len=q_len, block_index=pages)
        logits = model.forward_chunk(ids[row : row + 1], cache, attn_params=alone)["logits"]
        assert torch.equal(logits[0], found[row])


def test_the_largest_step(model: ExLlamaV2) -> None:
    """Buckets hold their batch, with few more rows where these cost a block."""
    cache = ExLlamaV2Cache(model, max_seq_len=512 * PAGE)
    assert model.prelaunchable_step(1, cache, params([1] * 257, width=1)) is None
    assert model.decode.reason == "the step has 257 x 1 tokens; captured steps have at most 256"
    assert model.prelaunchable_step(1, cache, params([1], width=1)) is not None
    assert model.decode.reason is None
    assert model.prelaunchable_step(17, cache, params([1], width=2)) is None
    for q_len in range(1, DECODE_TOKENS + 1):
        for batch in range(1, capturable.STEP_ROWS // q_len + 1):
            padded = capturable.padded_rows(batch, q_len)
            tokens = padded * q_len
            assert batch <= padded
            assert tokens <= capturable.STEP_ROWS
            assert tokens <= 64 or batch * q_len > 64
            assert tokens <= 48 or batch * q_len > 48
            assert batch * q_len <= 64 or padded <= 1.25 * batch


@pytest.mark.parametrize(
    ("batch", "q_len", "expected"), [(64, 1, False), (65, 1, True), (16, 16, True), (257, 1, False), (4, 17, False)]
)
def test_matmuls_of_a_step_that_is_not_captured_are_batch_invariant(
    monkeypatch: pytest.MonkeyPatch, batch: int, q_len: int, expected: bool
) -> None:
    """Tokens do not depend on whether there was memory for the graph; prompts keep the fast matmuls."""
    seen = set()
    multiply = QuantMatrix.matmul

    def watched(matrix: QuantMatrix, *given: Any, invariant: bool | None = None, **more: Any) -> torch.Tensor:
        seen.add(invariant)
        return multiply(matrix, *given, invariant=invariant, **more)

    monkeypatch.setattr(QuantMatrix, "matmul", watched)
    model = loaded()
    cache = ExLlamaV2Cache(model, max_seq_len=2 * batch * PAGE)
    many = replace(params([1] * batch, width=2), q_len=q_len)
    model.forward_chunk(torch.full((batch, q_len), 7), cache, attn_params=many)
    assert seen == {expected}


def test_inputs_still_to_be_copied_to_the_gpu_outlive_their_step(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps are forgotten while one is queued: its inputs are not given to others before the GPU has them."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Recorded(StepStage):
        def __init__(self, sizes: Any) -> None:
            super().__init__(sizes)
            made.append(weakref.ref(self.pinned))

    monkeypatch.setattr(step_inputs, "StepStage", Recorded)
    cache = ExLlamaV2Cache(model, max_seq_len=8 * PAGE)
    prepared = model.prelaunchable_step(1, cache, params([15, 3]))
    assert prepared is not None
    stages = tuple(made)
    assert stages
    monkeypatch.setattr(Stream, "held", True)
    prepared.run(torch.full((2, 1), 7))
    model.decode.clear()
    del prepared
    Stream.queue.clear()  # of the stand-ins; the driver holds no tensor either
    assert all(stage() is not None for stage in stages)
    assert model.prelaunchable_step(1, cache, params([1])) is not None  # a capture, which waits for what is queued
    assert all(stage() is None for stage in stages)


def test_steps_queued_ahead_of_the_gpu_find_their_inputs(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue more steps than there are copies of the inputs: the host waits for one to be read, not for all."""
    cache, found = ExLlamaV2Cache(model, max_seq_len=8 * PAGE), []

    def keep(seen: list[torch.Tensor], logits: torch.Tensor) -> None:
        seen.append(logits.clone())

    for held in (False, True):
        monkeypatch.setattr(Stream, "held", held)
        seen: list[torch.Tensor] = []
        most = 0
        for token in range(3 * STAGES):
            step = model.prelaunchable_step(1, cache, params([token, 20 + token]))
            assert step is not None
            logits = step.run(torch.full((2, 1), 7 + token))
            assert logits is not None
            Stream.add(partial(keep, seen, logits))
            most = max(most, len(Stream.queue))
        assert (most > 3 * STAGES) == held, "nothing was ahead of the GPU"
        Stream.run()
        found.append(seen)
    assert len(found[0]) == 3 * STAGES
    for step_, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other), step_


def small_adapter(model: ExLlamaV2, folder: Path) -> ExLlamaV2Lora:
    """An adapter of the first o_proj."""
    folder.mkdir()
    key, size = "base_model.model.model.layers.0.self_attn.o_proj", model.config.hidden_size
    generator = torch.Generator().manual_seed(len(folder.name))
    tensors = {
        f"{key}.lora_A.weight": torch.randn(2, size, generator=generator),
        f"{key}.lora_B.weight": torch.randn(size, 2, generator=generator),
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    return ExLlamaV2Lora.from_directory(model, folder)


def test_a_step_does_not_keep_an_adapter_that_nothing_else_refers_to(
    model: ExLlamaV2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are freed with it; steps with other adapters are captured again, with the right ones."""
    monkeypatch.setattr(
        graphs, "refusal_of_capture", lambda model, sets: None
    )  # on a CPU there are no kernels of adapters
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    cache = ExLlamaV2Cache(model, max_seq_len=8 * PAGE)
    dropped, kept = (small_adapter(model, tmp_path / name) for name in ("one", "second"))
    ids = torch.full((2, 1), 7)

    def logits(rows: list[tuple[ExLlamaV2Lora, ...]]) -> torch.Tensor:
        step = model.prelaunchable_step(1, cache, params([0, 0]), row_loras=rows or None)
        assert step is not None, model.decode.reason
        found = step.run(ids)
        assert found is not None
        return found.clone()

    def eager(rows: list[tuple[ExLlamaV2Lora, ...]]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(select, "may_fuse", lambda model: False)
            step = model.forward_chunk(ids, cache, attn_params=params([0, 0]), row_loras=[list(row) for row in rows])
        found: torch.Tensor = step["logits"]
        return found.clone()

    plain = logits([])
    mixed = logits([(dropped,), (kept,)])
    assert torch.equal(mixed, eager([(dropped,), (kept,)]))
    assert not torch.equal(mixed, plain)
    assert model.decode.count == 2
    tensor = weakref.ref(dropped.tensors["model.layers.0.self_attn.o_proj"])
    del dropped
    gc.collect()
    assert tensor() is None
    assert model.decode.count == 1
    third = small_adapter(model, tmp_path / "three")
    rows: list[tuple[ExLlamaV2Lora, ...]] = [(third,), (kept,)]
    assert torch.equal(logits(rows), eager(rows))
    assert torch.equal(logits([*rows[:1], ()])[1], plain[1])
    kept.unload()
    assert model.decode.count == 1
    assert torch.equal(logits([(third,), ()]), eager([(third,), ()]))


def test_a_module_that_is_read_again_is_in_no_captured_step(model: ExLlamaV2) -> None:
    """Its weights are elsewhere then, and those that the step read are given back."""
    cache = ExLlamaV2Cache(model, max_seq_len=8 * PAGE)
    step = model.prelaunchable_step(1, cache, params([15]))
    assert step is not None
    assert model.decode.count == 1
    model.load_module(3)
    assert model.decode.count == 0
    assert model.loaded
    assert model.prelaunchable_step(1, cache, params([15])) is not None


def test_a_next_step_of_dropped_graphs_does_not_run(model: ExLlamaV2) -> None:
    """Devices that lost one another leave old graphs out of step: these and their logits are of no use."""
    cache = ExLlamaV2Cache(model, max_seq_len=8 * PAGE)
    ids = torch.full((1, 1), 7)
    done, waiting = (model.prelaunchable_step(1, cache, params([1])) for _ in range(2))
    assert done is not None
    assert waiting is not None
    assert done.run(ids) is not None
    assert done.is_current
    model.decode.clear()
    steps = model.decode.steps
    assert not done.is_current
    assert waiting.run(ids) is None
    assert waiting.inputs() is None
    with pytest.raises(DeviceError, match="dropped before its launch"):
        waiting.launch()
    assert model.decode.steps == steps
    again = model.prelaunchable_step(1, cache, params([1]))
    assert again is not None
    assert again.run(ids) is not None
    assert again.is_current


def test_lack_of_memory_for_launches_of_sharded_models_is_no_error(
    model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run eagerly, and the launches are made again after a pause that grows."""
    cache, tries = ExLlamaV2Cache(model, max_seq_len=8 * PAGE), []

    def shard_launches_of(of: ExLlamaV2) -> str:
        tries.append(of)
        if len(tries) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "a reason"

    monkeypatch.setattr(model, "tp_context", SimpleNamespace())
    monkeypatch.setattr(graphs, "refusal_of_access", lambda context: None)
    monkeypatch.setattr(graphs, "shard_launches_of", shard_launches_of)
    for failures in (1, 2):
        assert model.prelaunchable_step(1, cache, params([1])) is None
        assert "out of memory" in (model.decode.reason or "")
        (failure,) = model.decode.failures
        assert (failure.kind, failure.tries) == (torch.OutOfMemoryError, failures)
        assert failure.pause == FIRST_PAUSE * failures
        for _ in range(failure.pause):
            assert model.prelaunchable_step(1, cache, params([1])) is None
        assert len(tries) == failures
    assert model.prelaunchable_step(1, cache, params([1])) is None
    assert model.decode.reason == "the matrices are sharded, and a reason"
    assert not model.decode.failures
    model.decode.clear()


def test_a_step_is_of_the_modules_that_are_there(model: ExLlamaV2) -> None:
    """Also where one has been replaced by another that is no hook."""
    cache, inner = ExLlamaV2Cache(model, max_seq_len=8 * PAGE), model.modules[2]

    def logits() -> torch.Tensor:
        step = model.prelaunchable_step(1, cache, params([1]))
        assert step is not None
        out = step.run(torch.full((1, 1), 7))
        assert out is not None
        return out.clone()

    before = logits()
    try:
        model.modules[2] = model.modules[4]
        replaced = logits()
        model.decode.clear()
        assert torch.equal(replaced, logits())
        assert not torch.equal(replaced, before)
    finally:
        model.modules[2] = inner
    assert torch.equal(logits(), before)


def scaled(by: float, state: torch.Tensor, step: object) -> torch.Tensor:
    return state * by


def test_captured_steps_serve_again_when_a_hook_is_taken_out(model: ExLlamaV2) -> None:
    """A hook for single requests records no step anew. The modules must be the same, one by one."""
    cache, inner = ExLlamaV2Cache(model, max_seq_len=8 * PAGE), model.modules[3]
    before = model.prelaunchable_step(1, cache, params([1]))
    assert before is not None
    recorded = before.captured
    try:
        for factor in (1.1, 1.2):
            model.modules[3] = Intervention(inner, post_forward=partial(scaled, factor))
            assert model.prelaunchable_step(1, cache, params([1])) is None
            assert model.decode.count == 1
            model.modules[3] = inner
            again = model.prelaunchable_step(1, cache, params([1]))
            assert again is not None
            assert again.captured is recorded
        model.modules[3] = model.modules[5]
        other = model.prelaunchable_step(1, cache, params([1]))
        assert other is not None
        assert model.decode.count == 1
        model.modules[3] = Intervention(inner)
        assert model.prelaunchable_step(1, cache, params([1])) is None
    finally:
        model.modules[3] = inner
    last = model.prelaunchable_step(1, cache, params([1]))
    assert last is not None
    assert last.captured is not recorded
    assert last.captured is not other.captured


def test_captured_steps_of_a_deleted_module_are_dropped(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the module, whose weights would stay on the GPU: also while a hook is in, or for one that cannot be
    captured."""
    cache, inner = ExLlamaV2Cache(model, max_seq_len=8 * PAGE), model.modules[3]
    hooked, refused = vars(graphs)["refusal_of_model"], [False]
    monkeypatch.setattr(graphs, "refusal_of_model", lambda of: "decides on the host" if refused[0] else hooked(of))
    try:
        for around in (False, True):
            model.modules[3] = copy.copy(inner)
            deleted = weakref.ref(model.modules[3])
            assert model.prelaunchable_step(1, cache, params([1])) is not None
            assert model.decode.count == 1
            refused[0] = not around
            model.modules[3] = Intervention(Intervention(model.modules[5])) if around else model.modules[5]
            assert model.prelaunchable_step(1, cache, params([1])) is None
            assert model.decode.count == 0
            assert model.hooked is around  # the model remembers the modules of its last answer
            gc.collect()
            assert deleted() is None
            refused[0] = False
    finally:
        model.modules[3] = inner


def test_no_step_is_captured_around_a_hook(model: ExLlamaV2) -> None:
    """Whenever it was made, and whatever has been captured before it was put in, or back."""
    cache, inner = ExLlamaV2Cache(model, max_seq_len=8 * PAGE), model.modules[3]
    hook = Intervention(inner, post_forward=lambda state, step: state * 1.1)
    before = model.prelaunchable_step(1, cache, params([1]))
    assert before is not None
    try:
        for _ in range(2):
            model.modules[3] = hook
            assert model.prelaunchable_step(1, cache, params([1])) is None
            assert "wrapped" in (model.decode.reason or "")
            model.modules[3] = inner
            assert model.prelaunchable_step(1, cache, params([1])) is not None
            assert model.decode.reason is None
    finally:
        model.modules[3] = inner
