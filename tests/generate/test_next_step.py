"""The next step is launched before the host has seen its tokens, as on a GPU: no result depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from internals import prelaunch
from prelaunched import CONFIG, TOKENIZER, VOCAB, Device, Even, OneBuffer, Overwriting, Preparing

from exl_core import PagedParams
from exl_core.contracts import ForwardResult
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic import draft_model
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedLora,
    ScriptedModel,
    check_pages,
    streamed_tokens,
)
from exl_kernels import sampling as kernels
from exl_kernels.errors import DeviceError

EOS = TOKENIZER.eos_token_id
Settings = ExLlamaV2Sampler.Settings
ADAPTER = ScriptedLora(3)


def one_less(result: Any) -> None:
    result.sampled_token = torch.tensor([[max(3, int(result.sampled_token) - 1)]])


@dataclass(frozen=True)
class Ask:
    """A request as data."""

    prompt: tuple[int, ...]
    new: int
    seed: int
    kind: str
    stops: tuple[str | int, ...]
    arrives: int
    cancelled_at: int

    def job(self) -> ExLlamaV2DynamicJob:
        style = Settings.greedy() if self.kind == "greedy" else Settings(temperature=1.0, top_k=0, top_p=0)
        if self.kind == "pair":
            style.cfg_scale = 1.5
        if self.kind == "penalties":
            style.token_repetition_penalty = 1.3
        if self.kind == "mirostat":
            style.mirostat, style.mirostat_tau = True, 2.0
        style.post_sampling_hooks = [one_less] if self.kind == "hook" else []
        prompt = torch.tensor([self.prompt])
        return ExLlamaV2DynamicJob(
            [prompt, prompt[:, -1:]] if self.kind == "pair" else prompt,
            self.new,
            gen_settings=style,
            seed=self.seed,
            stop_conditions=list(self.stops),
            banned_strings=["ab", "cc"] if self.kind == "bans" else [],
            filters=[Even(self.seed + 3)] if self.kind == "filter" else None,
            loras=[ADAPTER] if self.kind == "lora" else [],
            max_rq_tokens=3 if self.kind == "share" else None,
            return_logits=self.kind != "greedy",
            return_hidden_state=self.kind == "state",
        )


KINDS = [
    "plain",
    "greedy",
    "greedy",
    "pair",
    "penalties",
    "mirostat",
    "hook",
    "bans",
    "filter",
    "lora",
    "share",
    "state",
]
ASKS = st.builds(
    Ask,
    prompt=st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20).map(tuple),
    new=st.integers(0, 20),
    seed=st.integers(0, 3),
    kind=st.sampled_from(KINDS),
    stops=st.sampled_from([(), (EOS,), ("bc",), (5, "a ")]),
    arrives=st.integers(0, 10),
    cancelled_at=st.sampled_from([-1, -1, -1, 4, 9]),
)


def comparable(value: Any) -> Any:
    """A result without clocks and objects, its tensors as bytes."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items() if not k.startswith("time_") and k != "job"}
    return repr(value)


def in_all(results: list[dict[str, Any]]) -> Any:
    """The output of a job, of which drafts change only in how many results it comes."""
    ends = ("eos_reason", "full_completion", "new_tokens", "eos_triggering_string")
    logits = [result["logits"] for result in results if "logits" in result]
    return comparable(
        {key: results[-1].get(key) for key in ends}
        | {"ids": streamed_tokens(results), "logits": torch.cat(logits, 1) if logits else None}
    )


def play(
    asks: list[Ask],
    early: bool,
    kind: type[ScriptedModel] = Overwriting,
    drafts: int | None = None,
    by_model: bool = False,
) -> tuple[list[list[Any]], ScriptedModel]:
    """Return the output of every job, iteration by iteration, and the model that was called.

    `drafts`: draft tokens of every step, from the text, or `by_model` from a model that agrees now and then. All
    results of a job are then one, and none is cancelled.
    """
    model = kind(CONFIG)
    cache = ScriptedCache(model, max_seq_len=160)
    more: dict[str, Any] = {"use_ngram_draft": True, "num_draft_tokens": drafts} if drafts else {}
    if drafts and by_model:
        draft = kind(CONFIG)
        draft.script = lambda context: None if sum(context[-3:]) % 4 else int(context[-1])
        more = {"draft_model": draft, "draft_cache": ScriptedCache(draft, max_seq_len=160), "num_draft_tokens": drafts}
    generator = ExLlamaV2DynamicGenerator(
        model, cache, TOKENIZER, page_size=8, max_chunk_size=16, max_batch_size=4, **more
    )
    if drafts:
        generator.drafter.length = FixedDraftLength(drafts)
    prelaunch(generator, early)
    jobs = [ask.job() for ask in asks]
    said: list[list[Any]] = [[] for _ in jobs]
    for at in range(400):
        for job, ask in zip(jobs, asks, strict=True):
            if ask.arrives == at:
                generator.enqueue(job)
            if ask.cancelled_at == at and drafts is None:
                generator.cancel(job)
        for result in generator.iterate():
            said[jobs.index(result["job"])].append(comparable(result) if drafts is None else result)
        check_pages(generator)
        if at > 10 and not generator.num_remaining_jobs():
            return said if drafts is None else [[in_all(results)] for results in said], model
    raise AssertionError("the jobs do not end")


@examples(150, 5)
@given(st.lists(ASKS, min_size=1, max_size=6))
def test_prelaunched_steps_do_not_change_results(asks: list[Ask]) -> None:
    assert play(asks, early=True)[0] == play(asks, early=False)[0]


@examples(100, 5)
@given(st.lists(ASKS, min_size=1, max_size=6), st.booleans())
def test_tokens_that_stay_on_the_device_change_no_results(asks: list[Ask], leaves: bool) -> None:
    """Also where logits are read after the next step has overwritten its buffer."""
    expected = play(asks, early=False)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "launch", Device([], leaves).launch)
        assert play(asks, early=True, kind=Preparing)[0] == expected


@examples(150, 5)
@given(st.lists(ASKS, min_size=1, max_size=6), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_drafts_that_are_launched_early_change_no_results(
    asks: list[Ask], drafts: int, by_model: bool, on_device: bool, leaves: bool
) -> None:
    """Nor that all positions of a step are drawn at once. Tokens are those without drafts, too."""
    expected = play(asks, early=False, drafts=0)[0]
    assert play(asks, early=False, drafts=drafts, by_model=by_model)[0] == expected
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            device = Device([], leaves)
            patch.setattr(kernels, "launch", device.launch)
            patch.setattr(draft_model, "launch", device.launch)
        assert play(asks, early=True, kind=Preparing, drafts=drafts, by_model=by_model)[0] == expected


class Repeating(Preparing):
    """A model whose tokens repeat themselves, so that guesses hold."""

    def __init__(self, config: ScriptedConfig) -> None:
        super().__init__(config)
        self.script = lambda context: 3 + (int(context[-1]) - 2) % 4


@pytest.mark.parametrize("drafts", [None, 2])
@pytest.mark.parametrize("alike", [0, 3, 4, None])
def test_prelaunched_steps_mix_adapters_only_where_rows_do_not_depend_on_each_other(
    monkeypatch: pytest.MonkeyPatch, alike: int | None, drafts: int | None
) -> None:
    """Up to so many tokens rows do not depend on each other."""
    passes: list[tuple[int, int]] = []  # tokens and adapters of each

    class Watched(Repeating):
        def invariant_tokens(self) -> int | None:
            return alike

        def forward_chunk(self, input_ids: torch.Tensor, *args: Any, **kw: Any) -> ForwardResult:
            if not kw.get("preprocess_only"):
                passes.append((input_ids.numel(), len({tuple(found) for found in kw.get("row_loras", [()])})))
            return super().forward_chunk(input_ids, *args, **kw)

    asks = [Ask((3, 4, 5, 6, 3, 4), 16, seed, kind, (), 0, -1) for seed, kind in enumerate(["greedy", "lora", "plain"])]
    expected = play(asks, early=False, kind=Repeating, drafts=drafts)[0]
    monkeypatch.setattr(kernels, "launch", Device([]).launch)
    assert play(asks, early=True, kind=Watched, drafts=drafts)[0] == expected
    mixed = {tokens for tokens, adapters in passes if adapters > 1}
    assert bool(mixed) == (alike is None or alike >= 3)
    assert all(alike is None or tokens <= alike for tokens in mixed)


def test_a_step_with_drafts_is_one_pass_and_one_launch_of_the_sampler() -> None:
    """Text that repeats itself: all guesses hold, and each step is launched before the results of the last come out."""
    model = Preparing(CONFIG)
    model.script = lambda context: 3 + (int(context[-1]) - 2) % 4
    cache = ScriptedCache(model, max_seq_len=160)
    generator = ExLlamaV2DynamicGenerator(
        model, cache, TOKENIZER, page_size=8, use_ngram_draft=True, num_draft_tokens=3
    )
    generator.drafter.length = FixedDraftLength(3)
    prelaunch(generator, True)
    job = ExLlamaV2DynamicJob(torch.tensor([[3, 4, 5, 6] * 6]), 41, gen_settings=Settings.greedy())
    generator.enqueue(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "launch", Device(model.events).launch)
        while generator.num_remaining_jobs():
            generator.iterate()
            if model.calls[-1][1] == 4 and job.new_tokens < 36:
                assert model.events[-3:] == ["sample", "collect", "run"]
                assert len(model.events) == 3 or model.events[-4] == "run"
    assert job.accepted_draft_tokens == 30
    check_pages(generator)


def test_lost_devices_explain_nan_after_an_accepted_draft_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of all positions of a step are made at once, and each may be the first that meets NaN."""
    model = Preparing(CONFIG)
    model.script = lambda context: 3 + (int(context[-1]) - 2) % 4
    whole = model.forward_chunk

    def forward_chunk(*args: Any, **kw: Any) -> Any:
        found = whole(*args, **kw)
        if "logits" in found:
            found["logits"][:, 2:] = float("nan")
        return found

    def check_peers() -> None:
        raise DeviceError("cuda:0 waited in vain")

    monkeypatch.setattr(model, "forward_chunk", forward_chunk)
    monkeypatch.setattr(model, "check_peers", check_peers)
    generator = ExLlamaV2DynamicGenerator(
        model, ScriptedCache(model, max_seq_len=160), TOKENIZER, page_size=8, use_ngram_draft=True, num_draft_tokens=3
    )
    generator.drafter.length = FixedDraftLength(3)
    prelaunch(generator, True)
    job = ExLlamaV2DynamicJob(torch.tensor([[3, 4, 5, 6] * 6]), 40, gen_settings=Settings.greedy())
    generator.enqueue(job)
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert isinstance(results[-1]["exception"], DeviceError)
    assert job.accepted_draft_tokens == 2
    check_pages(generator)


@pytest.mark.parametrize(("most", "largest"), [(12, 12), (11, 11)])
def test_the_sampler_has_few_rows_for_draft_tokens(monkeypatch: pytest.MonkeyPatch, most: int, largest: int) -> None:
    """Its memory is planned for so many; beyond them, positions are drawn one after the other."""
    asks = [Ask((3, 4, 5, 6) * 3, 20, seed, "greedy", (), 0, -1) for seed in range(3)]
    expected = play(asks, early=False, kind=Repeating, drafts=0)[0]
    rows, device = [], Device([])

    def counted(asked: list[kernels.Row], into: kernels.TokenTarget | None = None) -> Any:
        rows.append(len(asked))
        return device.launch(asked, into)

    monkeypatch.setattr("exl_generate.dynamic.engine.STEP_ROWS", most)
    monkeypatch.setattr(kernels, "launch", counted)
    assert play(asks, early=True, kind=Repeating, drafts=3)[0] == expected
    assert max(rows) == largest


def test_jobs_with_and_without_guesses_share_a_pass() -> None:
    """Few rows: windows of unequal length would each take a pass of their own."""
    model = Preparing(CONFIG)
    model.script = lambda context: 3 + (int(context[-1]) - 2) % 4 if context[0] == 3 else None
    generator = ExLlamaV2DynamicGenerator(
        model, ScriptedCache(model, max_seq_len=160), TOKENIZER, page_size=8, use_ngram_draft=True, num_draft_tokens=3
    )
    generator.drafter.length = FixedDraftLength(3)
    prelaunch(generator, True)
    prompts = [[3, 4, 5, 6] * 4, [9, 8, 7]]
    jobs = [ExLlamaV2DynamicJob(torch.tensor([ids]), 41, gen_settings=Settings.greedy()) for ids in prompts]
    generator.enqueue(jobs)
    generator.iterate()
    while generator.num_remaining_jobs() == 2:
        before = len(model.calls)
        generator.iterate()
        if generator.num_remaining_jobs() == 2:
            assert [batch for batch, _, _ in model.calls[before:]] == [2]
    assert jobs[0].accepted_draft_tokens > 20
    assert jobs[1].drafted_tokens < jobs[0].drafted_tokens, "what fills a window up is no guess"
    check_pages(generator)


def test_passes_of_a_draft_model_are_queued_before_their_ids_are_read() -> None:
    """Each but the first, which follows the model's own tokens."""

    def onward(context: Any) -> int:
        return 3 + (int(context[-1]) - 2) % 4

    model, draft = Preparing(CONFIG), Preparing(CONFIG)
    model.script = draft.script = onward
    draft.events = model.events
    caches = [ScriptedCache(each, max_seq_len=160) for each in (model, draft)]
    more: dict[str, Any] = {"draft_model": draft, "draft_cache": caches[1], "num_draft_tokens": 3}
    generator = ExLlamaV2DynamicGenerator(model, caches[0], TOKENIZER, page_size=8, **more)
    generator.drafter.length = FixedDraftLength(3)
    prelaunch(generator, True)
    job = ExLlamaV2DynamicJob(torch.tensor([[3, 4, 5, 6]]), 41, gen_settings=Settings.greedy())
    generator.enqueue(job)
    found: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        device = Device(model.events)
        patch.setattr(kernels, "launch", device.launch)
        patch.setattr(draft_model, "launch", device.launch)
        while generator.num_remaining_jobs():
            model.events.clear()
            generator.iterate()
            found.append(list(model.events))
    drawn = ["sample", "step", "collect"]
    assert found[2:8] == [["sample", "collect", *drawn, *drawn, "sample", "collect", "run"]] * 6
    assert job.rejected_draft_tokens == 0
    check_pages(generator)


def test_a_pair_of_prompts_is_prelaunched() -> None:
    """The sampler's token goes to both rows, also together with a job without a negative prompt."""
    for kinds in (["pair"], ["pair", "pair"], ["plain", "pair"]):
        asks = [Ask((3, 4, 5 + at), 9, at, kind, (), 0, -1) for at, kind in enumerate(kinds)]
        expected = play(asks, early=False)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "launch", Device([]).launch)
            said, model = play(asks, early=True, kind=Preparing)
        assert said == expected
        assert isinstance(model, Preparing)
        assert model.events == ["step"] * 8, "of nine steps the first one has nobody to launch it"


def test_steps_are_prelaunched_and_computed_once() -> None:
    """Two plain jobs: not one pass more than without, and the last step is not followed by another."""
    asks = [Ask((3, 4, 5), 12, 0, "plain", (), 0, -1), Ask((6, 7), 12, 1, "plain", (), 0, -1)]
    (said, early), (expected, plain) = play(asks, early=True), play(asks, early=False)
    assert said == expected
    assert early.calls == plain.calls


@pytest.mark.parametrize("kind", [OneBuffer, Preparing])
def test_generators_that_share_a_model_keep_their_logits(kind: type[OneBuffer]) -> None:
    """In turns, each with a cache of its own; and a caller's own passes in between."""

    def play_all(company: bool) -> list[list[int]]:
        model = kind(ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=32))
        generators = []
        for prompt in ([3, 4, 5], [6, 7]):
            cache = ScriptedCache(model, max_seq_len=160)
            generator = ExLlamaV2DynamicGenerator(model, cache, TOKENIZER, page_size=8)
            prelaunch(generator, True)
            generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([prompt]), 16, gen_settings=Settings.greedy()))
            generators.append(generator)
        own = ScriptedCache(model, max_seq_len=64)
        said: list[list[Any]] = [[], []]
        table = torch.arange(8, dtype=torch.int32)[None]
        for round_ in range(400):
            for generator, results in zip(generators, said, strict=True):
                if generator.num_remaining_jobs() and (company or generator is generators[0] or round_ >= 200):
                    results += generator.iterate()
                if company and round_ < 8:
                    params = PagedParams(1, table, torch.tensor([round_], dtype=torch.int32), round_, 8, 1)
                    with torch.inference_mode():
                        model.forward_chunk(torch.tensor([[7]]), cache=own, attn_params=params)
        assert not any(generator.num_remaining_jobs() for generator in generators)
        return [streamed_tokens(results) for results in said]

    assert play_all(company=True) == play_all(company=False)


def test_a_step_that_cannot_be_queued_is_computed_later() -> None:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=32), lambda context: 6)
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model, max_seq_len=64), TOKENIZER, page_size=8)
    prelaunch(generator, True)
    job = ExLlamaV2DynamicJob(torch.tensor([[3, 4, 5]]), 8, gen_settings=Settings.greedy())
    generator.enqueue(job)
    generator.iterate()
    model.faults[6] = RuntimeError("the GPU is full")  # met by the early pass, then by the job's own
    results = [result for _ in range(3) for result in generator.iterate()]
    assert results[-1]["eos_reason"] == "error"
    with pytest.raises(RuntimeError, match="the GPU is full"):
        raise results[-1]["exception"]
    check_pages(generator)
