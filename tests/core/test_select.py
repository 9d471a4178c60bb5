"""The way that `select` returns for a pass, and its reason, without a GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from captured_on_cpu import captured_on_cpu
from joined_on_cpu import joined_on_cpu
from test_sharded_launches import sharded, write

from exl_core import AttentionParams, ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, Intervention, PagedParams
from exl_core.errors import InputError, TokenIdError
from exl_core.execution import captured, step_recorder
from exl_core.execution import select as selecting
from exl_core.execution.capturable import NotCapturableError
from exl_core.execution.captured import INVALID, DecodeGraphs
from exl_core.execution.captured_step import StepReplay
from exl_core.execution.environment import GRAPHS_VARIABLE, PROMPTS_VARIABLE
from exl_core.execution.executor import Refused
from exl_core.execution.forward import forward_chunk
from exl_core.execution.forward_pass import ForwardPass
from exl_core.execution.fused import JoinedLaunches, joined_launches_of
from exl_core.execution.select import select

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"
PAGE = 16


@cache
def loaded() -> ExLlamaV2:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cpu")
        model = ExLlamaV2(ExLlamaV2Config(FOLDER))
        model.load()
    return model


def step(model: ExLlamaV2, batch: int = 2, q_len: int = 1, **changes: Any) -> ForwardPass:
    """A pass of tokens in pages."""
    pages = torch.arange(batch * 2, dtype=torch.int32).view(batch, 2)
    params = PagedParams(batch, pages, torch.full((batch,), 3, dtype=torch.int32), 3, PAGE, q_len)
    cache = ExLlamaV2Cache(model, max_seq_len=2 * batch * PAGE)
    return ForwardPass(torch.full((batch, q_len), 7), cache, params, **changes)


def refuse(*given: Any) -> None:
    raise NotCapturableError("a test says so")


def test_a_model_on_the_cpu_runs_module_by_module() -> None:
    for asked in (step(loaded()), ForwardPass(torch.full((1, 9), 7), None)):
        selected = select(loaded(), asked)
        assert (selected.way, selected.reason) == ("eager", "the model is not loaded on a GPU")


MODULES: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"input_mask": torch.zeros(1, 9)}, "a mask is applied"),
    "mask in the parameters": ({"params": AttentionParams(1, 9, 0, torch.zeros(1, 9))}, "a mask is applied"),
    "last state": ({"return_last_state": True}, "states between modules"),
    "states": ({"extract": [1]}, "states between modules"),
    "abort event": ({"abort_event": Event()}, "an abort event"),
}


@pytest.mark.parametrize("name", MODULES)
def test_passes_that_need_the_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured_on_cpu(monkeypatch)
    changes, reason = MODULES[name]
    selected = select(loaded(), ForwardPass(**{"ids": torch.full((1, 9), 7), "cache": None, **changes}))
    assert selected.way == "eager"
    assert reason in (selected.reason or "")


def test_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured_on_cpu(monkeypatch)
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    model = loaded()
    model.decode.clear()
    assert select(model, step(model))[::2] == ("captured", None)
    many = select(model, step(model, batch=257))
    assert (many.way, many.reason) == ("eager", "these stand-ins are for captured steps")
    ways = [select(model, step(model, batch=1, q_len=12, preprocess_only=True)).way for _ in range(2)]
    assert ways == ["eager", "captured"], "a prompt is captured when there is a second one of its kind"


def test_settings_are_read_at_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps are kept for the next pass that may use them."""
    captured_on_cpu(monkeypatch)
    monkeypatch.setattr(DecodeGraphs, "joined_launches", lambda graphs, model: pytest.fail("not asked"))
    model = loaded()
    model.decode.clear()
    asked, other = step(model), step(model)
    select(model, asked).run(model)
    monkeypatch.setenv(GRAPHS_VARIABLE, "0")
    assert select(model, asked)[::2] == ("eager", "EXL_CUDA_GRAPHS=0 asks for eager launches")
    monkeypatch.setenv(GRAPHS_VARIABLE, "1")
    monkeypatch.setattr(model.config, "no_graphs", True)
    assert select(model, asked)[::2] == ("eager", "config.no_graphs asks for eager launches")
    monkeypatch.setattr(model.config, "no_graphs", False)
    select(model, other).run(model)
    assert model.decode.count == 2, "of two caches"


@pytest.mark.parametrize(("batch", "invariant"), [(128, True), (257, False)])
def test_steps_without_graphs_run_module_by_module(
    batch: int, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their matmuls are batch-invariant as in captured steps: `exl info --kernels` reports them so."""
    captured_on_cpu(monkeypatch)
    model, seen = loaded(), []
    inner = model.modules[3]

    def watch(x: torch.Tensor, step: Any) -> torch.Tensor:
        seen.append(step.invariant)
        return x

    monkeypatch.setattr(DecodeGraphs, "joined_launches", lambda graphs, model: pytest.fail("not asked"))
    monkeypatch.setattr(model.config, "no_graphs", True)
    model.decode.clear()
    asked = step(model, batch=batch)
    selected = select(model, asked)
    assert selected[::2] == ("eager", "config.no_graphs asks for eager launches")
    try:
        model.modules[3] = Intervention(inner, pre_forward=watch)
        selected.run(model)
    finally:
        model.modules[3] = inner
        model.decode.clear()
    assert seen == [invariant]


def test_steps_that_cannot_be_recorded_run_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, too, although it was to be captured; nothing is joined either."""
    captured_on_cpu(monkeypatch)

    monkeypatch.setattr(step_recorder, "static_step", refuse)
    monkeypatch.setattr(DecodeGraphs, "joined_launches", lambda graphs, model: pytest.fail("not asked"))
    model = loaded()
    model.decode.clear()
    steps = model.decode.steps
    reason = "the step could not be captured: a test says so"
    first = step(model)
    assert select(model, first).way == "captured"
    assert select(model, first).run(model) == Refused(reason)
    assert model.decode.reason == reason
    assert select(model, first, refused=reason)[::2] == ("eager", reason)
    assert select(model, step(model))[::2] == ("eager", reason)
    model.decode.clear()
    ran = step(model)
    logits = model.forward_chunk(ran.ids, ran.cache, attn_params=ran.params)["logits"]
    assert bool(logits.isfinite().all())
    assert (model.decode.reason, model.decode.steps) == (reason, steps)
    model.decode.clear()


def test_a_step_with_invalid_arguments_is_left_to_the_checks_that_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    captured_on_cpu(monkeypatch)
    model = loaded()
    wrong = step(model)
    wrong.ids[0] = model.config.vocab_size
    assert select(model, wrong).run(model) == Refused(INVALID)
    with pytest.raises(TokenIdError, match="outside the vocabulary"):
        forward_chunk(model, wrong)
    wrong = step(model)
    assert isinstance(wrong.params, PagedParams)
    wrong.params.block_index[1, 0] = 99
    assert select(model, wrong, refused=INVALID).way == "eager"
    with pytest.raises(InputError, match="names page 99"):
        forward_chunk(model, step_of(wrong))


def step_of(asked: ForwardPass) -> ForwardPass:
    """The same pass as its caller gave it."""
    return ForwardPass(asked.ids, asked.cache, asked.params)


def test_a_choice_does_no_work_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded, staged or queued before the executor runs."""
    captured_on_cpu(monkeypatch)
    monkeypatch.setenv(PROMPTS_VARIABLE, "1")
    model = loaded()
    model.decode.clear()
    filled: list[object] = []
    fill = StepReplay.fill

    def counted(replay: StepReplay, *given: Any) -> bool:
        filled.append(replay)
        return fill(replay, *given)

    monkeypatch.setattr(StepReplay, "fill", counted)
    one = step(model, batch=1, q_len=12, preprocess_only=True)
    assert select(model, one).way == "eager", "the first prompt of its size"
    for asked in (step(model), one):
        model.decode.clear()
        if asked is one:
            select(model, one)
        steps = model.decode.steps
        assert asked.cache is not None
        asked.cache.current_seq_len = 1
        for _ in range(3):
            assert select(model, asked).way == "captured"
        assert (model.decode.count, model.decode.steps, filled, asked.cache.current_seq_len) == (0, steps, [], 1)
        select(model, asked).run(model)
        assert (model.decode.count, len(filled)) == (1, 1)
        filled.clear()
    model.decode.clear()


NEXT: dict[str, tuple[dict[str, Any], bool]] = {
    "a step": ({}, True),
    "draft tokens": ({"q_len": 16}, True),
    "more tokens a row": ({"q_len": 17}, False),
    "as many rows as a step has": ({"batch": 256}, True),
    "too many rows": ({"batch": 257}, False),
}


@pytest.mark.parametrize("name", NEXT)
@pytest.mark.parametrize("refused", [None, "settings", "hook", "recording"])
def test_a_next_step_is_captured_exactly_where_the_same_pass_is(
    name: str, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured_on_cpu(monkeypatch)
    model, (changes, captures) = loaded(), NEXT[name]
    inner = model.modules[3]
    if refused == "settings":
        monkeypatch.setenv(GRAPHS_VARIABLE, "0")
    elif refused == "recording":
        monkeypatch.setattr(step_recorder, "static_step", refuse)
    model.decode.clear()
    asked = step(model, **changes)
    assert isinstance(asked.params, PagedParams)
    assert asked.cache is not None
    try:
        if refused == "hook":
            model.modules[3] = Intervention(inner)
        prepared = model.prelaunchable_step(asked.ids.shape[1], asked.cache, asked.params)
        before = model.decode.steps
        model.forward_chunk(asked.ids, asked.cache, attn_params=asked.params)
        ran = model.decode.steps > before
    finally:
        model.modules[3] = inner
        model.decode.clear()
    assert (prepared is not None) == ran == (captures and refused is None)


def test_passes_of_one_gpu_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded()
    joined_on_cpu(monkeypatch)
    made = joined_launches_of(model)
    assert isinstance(made, JoinedLaunches), made
    monkeypatch.setattr(selecting, "may_fuse", lambda model: True)
    monkeypatch.setattr(captured, "refusal_of_model", lambda model: None)
    model.decode.clear()
    asked = ForwardPass(torch.full((1, 30), 7), None)
    want = loaded().forward(asked.ids)
    selected = select(model, asked)
    assert selected.way == "joined"
    assert "neither a step" in (selected.reason or "")
    with torch.inference_mode():
        found = selected.run(model)
    assert isinstance(found, dict), "the logits"
    assert torch.equal(found["logits"], want)
    monkeypatch.setattr(captured, "refusal_of_model", lambda model: "a reason")
    model.decode.clear()
    assert select(model, asked)[::2] == ("eager", "a reason")
    model.decode.clear()


def test_passes_of_a_sharded_model(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded(monkeypatch, write(lab, "exl2", "LlamaForCausalLM"), [8.0, 8.0])
    ids = lab.ids(2, 50, vocab=160)
    mask = torch.zeros(2, 50)
    mask[1, :20] = -torch.inf
    want = model.forward(ids, input_mask=mask)
    joined_on_cpu(monkeypatch)
    monkeypatch.setattr(captured, "refusal_of_access", lambda context: None)
    monkeypatch.setattr(captured, "refusal_of_model", lambda model: None)
    monkeypatch.setattr(selecting, "may_fuse", lambda model: True)
    assert select(model, ForwardPass(ids, None)).way == "sharded prompt"
    few = select(model, ForwardPass(ids[:, :16], None))
    assert few.way == "sharded"
    assert "few tokens a row" in (few.reason or "")
    masked = ForwardPass(ids, None, AttentionParams(2, 50, 0, mask))
    assert select(model, masked).way == "sharded"
    assert torch.equal(model.forward_chunk(ids, attn_params=AttentionParams(2, 50, 0, mask))["logits"], want)
