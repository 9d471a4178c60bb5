"""The order of launches and collections, which a model and a sampler note, where the next step is launched early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from internals import engine_of, prelaunch
from prelaunched import CONFIG, TOKENIZER, VOCAB, Device, Even, OneBuffer, Preparing

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import draft_model_dir
from exl_generate.dynamic import draft_model
from exl_generate.dynamic.draft_length import FixedDraftLength
from exl_generate.dynamic.prelaunched_step import PrelaunchedStep
from exl_generate.dynamic.speculation import Drafts
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    check_pages,
    streamed_tokens,
)
from exl_kernels import sampling as kernels
from exl_kernels.selection import MOST_REPORTED

Settings = ExLlamaV2Sampler.Settings


class Stage:
    """A generator over a model and a sampler that note in `events` what is launched and collected."""

    def __init__(self, patch: pytest.MonkeyPatch, leaves: bool = False, script: Any = None, **more: Any) -> None:
        self.model = Preparing(CONFIG)
        if script is not None:
            self.model.script = script
        self.device = Device(self.model.events, leaves)
        patch.setattr(kernels, "launch", self.device.launch)
        cache = ScriptedCache(self.model, max_seq_len=160)
        self.generator = ExLlamaV2DynamicGenerator(self.model, cache, TOKENIZER, page_size=8, **more)
        prelaunch(self.generator, True)
        self.results: list[dict[str, Any]] = []

    def add(self, prompt: list[int], new: int, style: Any = None, **kw: Any) -> ExLlamaV2DynamicJob:
        made = ExLlamaV2DynamicJob(torch.tensor([prompt]), new, gen_settings=style or Settings.greedy(), seed=1, **kw)
        self.generator.enqueue(made)
        return made

    def round(self) -> list[str]:
        """The events of one call of `iterate`."""
        self.model.events.clear()
        self.results += self.generator.iterate()
        check_pages(self.generator)
        return list(self.model.events)

    def finish(self) -> None:
        while self.generator.num_remaining_jobs():
            self.round()

    def tokens(self, job: ExLlamaV2DynamicJob) -> list[int]:
        return streamed_tokens([result for result in self.results if result["job"] is job])


PLAIN = Settings(temperature=1.0, top_k=0, top_p=0)


def alone(prompt: list[int], new: int, style: Any = None) -> list[int]:
    """Return the output of a job whose steps are computed when they are due."""
    model = OneBuffer(CONFIG)
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model, max_seq_len=160), TOKENIZER, page_size=8)
    job = ExLlamaV2DynamicJob(torch.tensor([prompt]), new, gen_settings=style or Settings.greedy(), seed=1)
    generator.enqueue(job)
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    return streamed_tokens(results)


def test_the_next_step_is_launched_between_sampling_and_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    one, other = stage.add([3, 4, 5], 6), stage.add([6, 7], 6, PLAIN)
    for _ in range(5):
        assert stage.round() == ["sample", "step", "collect"]
    assert stage.round() == ["sample", "collect"], "the last step must not be followed by another"
    assert not stage.generator.num_remaining_jobs()
    assert stage.tokens(one) == alone([3, 4, 5], 6)
    assert stage.tokens(other) == alone([6, 7], 6, PLAIN)


def test_a_step_whose_row_is_left_to_the_cpu_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl_generate.dynamic.decoder.MOST_REPORTED", 1)
    stage = Stage(monkeypatch, leaves=True)
    one, other = stage.add([3, 4, 5], 6), stage.add([6, 7], 6, PLAIN, return_top_tokens=2)
    for _ in range(5):
        assert stage.round() == ["sample", "step", "collect", "run"]
    stage.finish()
    assert stage.tokens(one) == alone([3, 4, 5], 6)
    assert stage.tokens(other) == alone([6, 7], 6, PLAIN)


@pytest.mark.parametrize("top", [0, MOST_REPORTED])
def test_logits_are_not_copied_where_the_gpu_reports_the_candidates(monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    copies: list[object] = []
    serve = PrelaunchedStep.serve

    def watched(step: PrelaunchedStep, windows: Any, keep: bool) -> Any:
        copies.append(keep)
        return serve(step, windows, keep)

    monkeypatch.setattr(PrelaunchedStep, "serve", watched)
    stage = Stage(monkeypatch)
    for seed in range(2):
        stage.add([3, 4, 5 + seed], 6, return_top_tokens=top)
    stage.finish()
    assert copies == [False] * 5
    many = stage.add([3, 4], 3, return_top_tokens=MOST_REPORTED + 1)
    stage.finish()
    assert copies[5:] == [True] * 2
    assert stage.tokens(many) == alone([3, 4], 3)


def test_the_host_passes_the_tokens_on_where_a_job_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that its filter ends asks for no token, so the rows are not those of the prepared step."""
    stage = Stage(monkeypatch)
    good, bad = stage.add([3, 4, 5], 8), stage.add([6, 7], 8, filters=[Even(2)])
    assert [stage.round() for _ in range(2)] == [["sample", "step", "collect"]] * 2
    assert stage.round() == ["sample", "collect", "run"]
    assert stage.round() == ["sample", "step", "collect"]
    stage.finish()
    assert stage.tokens(good) == alone([3, 4, 5], 8)
    last = [result for result in stage.results if result["job"] is bad][-1]
    assert last["eos_reason"] == "filter_error"


def test_no_step_is_launched_for_jobs_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stop token that the host sees before the step could be launched."""
    stage = Stage(monkeypatch, leaves=True, script=lambda context: 6 if len(context) < 5 else 5)
    job = stage.add([3, 4, 5], 20, PLAIN, stop_conditions=[5])
    stage.device.writes = False
    assert stage.round() == ["sample", "collect", "run"]
    assert stage.round() == ["sample", "collect", "run"]
    assert stage.round() == ["sample", "collect"]
    assert job.is_finished
    assert not stage.generator.num_remaining_jobs()


def cycle(context: Any) -> int:
    """Four tokens in turn, which a drafter guesses once it has seen them."""
    return 3 + (int(context[-1]) - 2) % 4


def drafting(patch: pytest.MonkeyPatch, drafter: str) -> Stage:
    """Drafts of three tokens from the text or by a model. `events` also has each acceptance of a token."""
    more: dict[str, Any] = {"use_ngram_draft": True}
    if drafter == "model":
        draft = Preparing(CONFIG)
        draft.script = cycle
        patch.setattr(draft_model, "launch", Device([]).launch)
        more = {"draft_model": draft, "draft_cache": ScriptedCache(draft, max_seq_len=160)}
    stage = Stage(patch, script=cycle, num_draft_tokens=3, **more)
    stage.generator.drafter.length = FixedDraftLength(3)
    accept = ExLlamaV2DynamicJob.accept

    def noted(*args: Any) -> Any:
        stage.model.events.append("accept")
        return accept(*args)

    patch.setattr(ExLlamaV2DynamicJob, "accept", noted)
    return stage


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_step_with_drafts_is_launched_before_jobs_accept_their_tokens(
    monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    stage = drafting(monkeypatch, drafter)
    job = stage.add([3, 4, 5, 6] * 3, 30)
    stage.round()
    passes = stage.model.steps
    for _ in range(5):
        assert stage.round() == ["sample", "collect", "run", *["accept"] * 4]
    assert stage.model.steps == passes + 5, "each step is computed once"
    stage.finish()
    assert stage.tokens(job) == [3 + at % 4 for at in range(30)]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_a_stop_string_leaves_the_row_of_its_job_unused(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """The samples do not tell the host that a job ends; the row of the other job is right all the same."""
    stage = drafting(monkeypatch, drafter)
    ended = stage.add([3, 4, 5, 6] * 3, 40, stop_conditions=["cababcabab"])
    other = stage.add([4, 5, 6, 3] * 3, 40)
    while not ended.is_finished:
        events = stage.round()
    assert events[:3] == ["sample", "collect", "run"]
    passes = stage.model.steps
    assert stage.round()[:3] == ["sample", "collect", "run"]
    assert stage.model.steps == passes + 1
    stage.finish()
    assert stage.tokens(other) == [3 + (1 + at) % 4 for at in range(40)]


@pytest.mark.parametrize("faults", [1, 2])
def test_a_failing_launch_of_the_next_step_is_no_failure_of_a_job(monkeypatch: pytest.MonkeyPatch, faults: int) -> None:
    """The step is launched again with the tokens of the host; if that fails too it is computed when it is due."""
    stage = Stage(monkeypatch)
    job = stage.add([3, 4, 5], 6)
    stage.model.launch_faults = [RuntimeError("the GPU is full") for _ in range(faults)]
    assert stage.round() == ["sample", "step", "collect", "run"]
    assert stage.round() == ["sample", "step", "collect"]
    stage.finish()
    assert stage.tokens(job) == alone([3, 4, 5], 6)


def test_a_failing_launch_of_the_sampling_is_tried_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    jobs = stage.add([3, 4, 5], 6), stage.add([6, 7], 6)
    stage.device.faults = [RuntimeError("the first row"), RuntimeError("both rows")]
    events = stage.round()
    assert events[0] == "sample"
    assert "step" not in events
    stage.finish()
    failed = [result["job"] for result in stage.results if result.get("eos_reason") == "error"]
    assert failed == [jobs[0]]
    assert stage.tokens(jobs[1]) == alone([6, 7], 6)


def test_an_interrupt_between_launch_and_collection_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    job = stage.add([3, 4, 5], 6)
    assert stage.round() == ["sample", "step", "collect"]
    stage.model.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        stage.round()
    assert stage.model.events == ["sample", "step", "collect"]
    stage.model.interrupts = False
    stage.finish()
    assert stage.tokens(job) == alone([3, 4, 5], 6)


def test_rows_batched_with_guesses_stay_within_the_context() -> None:
    """A job that may fill the model's context runs with one whose guesses make every window longer."""
    said = []
    for early in (False, True):
        config = ExLlamaV2Config(str(draft_model_dir()))
        config.max_seq_len = 250  # no multiple of a page
        model = ExLlamaV2(config)
        model.load()
        generator = ExLlamaV2DynamicGenerator(
            model,
            ExLlamaV2Cache(model, max_seq_len=1024),
            ExLlamaV2Tokenizer(config),
            max_seq_len=250,
            use_ngram_draft=True,
            num_draft_tokens=4,
        )
        generator.drafter.length = FixedDraftLength(4)
        prelaunch(generator, early)
        uneven = torch.randperm(2000, generator=torch.Generator().manual_seed(1))[None, :230] + 100
        settings = [Settings.greedy(), Settings(temperature=1.5, top_k=0, top_p=0)]
        prompts = [torch.tensor([[10, 11, 12, 13] * 6]), uneven]
        jobs = [
            ExLlamaV2DynamicJob(ids, new, gen_settings=given, seed=1, stop_conditions=[])
            for ids, new, given in zip(prompts, (60, 20), settings, strict=True)
        ]
        generator.enqueue(jobs)
        ends: list[Any] = []
        while generator.num_remaining_jobs():
            ends += [result for result in generator.iterate() if result["eos"]]
        assert [end["eos_reason"] for end in ends] == ["max_new_tokens"] * 2, ends
        said.append([job.sequence.ids.tolist() for job in jobs])
    assert said[0] == said[1]


def test_a_hook_installed_between_steps_sees_no_prepared_drafts() -> None:
    model = Preparing(CONFIG)
    model.script = lambda context: 3 + (int(context[-1]) - 2) % 4 if context[0] == 3 else None
    cache = ScriptedCache(model, max_seq_len=240)
    generator = ExLlamaV2DynamicGenerator(
        model, cache, TOKENIZER, page_size=8, max_chunk_size=16, use_ngram_draft=True, num_draft_tokens=3
    )
    generator.drafter.length = FixedDraftLength(3)
    prelaunch(generator, True)
    style = ExLlamaV2Sampler.Settings.greedy()
    for prompt in ([3, 4, 5, 6, 3, 4], [9, 12, 7]):
        generator.enqueue(ExLlamaV2DynamicJob(torch.tensor([prompt]), 40, gen_settings=style))
    engine = engine_of(generator)
    while (engine._drafts or (None, 0))[1] != 4:  # noqa: SLF001
        generator.iterate()
    before = len(model.calls)
    model.hooked, model.arrangement = True, []
    generator.iterate()
    assert (1, 1, False) in model.calls[before:], "windows were filled up"


@pytest.mark.parametrize(
    ("lengths", "passes"),
    [
        ([3, 0, 0, 0, 0, 0, 0, 0], 1),
        ([3, *[0] * 15], 2),
        ([3, 2, 1, 0] * 5, 1),
        ([3, 2, 1, 0] * 20, 4),
        ([20, 0], 2),
    ],
    ids=[
        "a few rows filled",
        "many filled for one pass less",
        "many for three less",
        "more rows than a step has",
        "more tokens than a decode step has",
    ],
)
def test_windows_of_several_lengths_share_a_pass_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], passes: int
) -> None:
    model = Preparing(ScriptedConfig(vocab_size=VOCAB, max_seq_len=96, max_input_len=128))
    generator = ExLlamaV2DynamicGenerator(
        model,
        ScriptedCache(model, max_seq_len=32 * len(lengths)),
        TOKENIZER,
        page_size=8,
        max_batch_size=len(lengths),
        use_ngram_draft=True,
        num_draft_tokens=max(lengths),
        max_q_size=max(8, max(lengths) + 1),
    )
    prelaunch(generator, True)
    jobs = [ExLlamaV2DynamicJob(torch.tensor([[3, 4, 5]]), 28, seed=at) for at in range(len(lengths))]
    generator.enqueue(jobs)
    wanted = dict(zip(jobs, lengths, strict=True))

    def propose(active: list[ExLlamaV2DynamicJob], *_: Any) -> Drafts:
        return {job: [3] * wanted[job] for job in active if wanted[job]}

    monkeypatch.setattr(generator.drafter, "propose", propose)
    while not all(job.new_tokens >= 1 for job in jobs):
        generator.iterate()
    before = model.steps
    generator.iterate()
    assert model.steps - before == passes
    check_pages(generator)
