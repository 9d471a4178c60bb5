"""`ExLlamaV2Sampler.Settings` of exl-compat: values that exllamav2 takes, and changes that running jobs follow."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from internals import prelaunch

from exl_core.contracts import ForwardResult
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate import ExLlamaV2Sampler as NativeSampler
from exl_generate.errors import RequestError
from exl_generate.sampling import SparseBias
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel, check_pages, drain, streamed_tokens
from exl_generate.testing.small import PAGE, TOKENIZER, VOCAB, ids, make, speculate
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

Settings = ExLlamaV2Sampler.Settings
Native = NativeSampler.Settings

#: Switches everything off that the table below does not name.
NEUTRAL: dict[str, Any] = {"token_repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 0.0}
PENALTIES = {"token_repetition_penalty": 1.5, "token_frequency_penalty": 0.3}
DRY = {"dry_multiplier": 0.8, "dry_sequence_breakers": frozenset[int]()}
XTC = {"xtc_probability": 0.5, "xtc_ignore_tokens": frozenset[int]()}
MIROSTAT: dict[str, Any] = {"mirostat": True}
DYNAMIC = {"min_temp": 0.5, "max_temp": 1.5}
BIAS = torch.linspace(-2, 2, -(-VOCAB // 32) * 32)

#: (settings as a host gives them, the settings in range that mean the same)
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**PENALTIES, "token_repetition_penalty": 0}, {**PENALTIES, "token_repetition_penalty": 1e-6}),
    ({**PENALTIES, "token_repetition_penalty": -2.0}, {**PENALTIES, "token_repetition_penalty": 1e-6}),
    ({**PENALTIES, "token_repetition_penalty": 1e9}, {**PENALTIES, "token_repetition_penalty": 1e6}),
    ({**PENALTIES, "token_repetition_range": 4.0}, {**PENALTIES, "token_repetition_range": 4}),
    ({**PENALTIES, "token_repetition_range": -2}, {**PENALTIES, "token_repetition_range": 0}),
    (
        {**PENALTIES, "token_repetition_range": -3, "token_repetition_decay": 9},
        {**PENALTIES, "token_repetition_range": 0, "token_repetition_decay": 6},
    ),
    ({**PENALTIES, "token_repetition_decay": -1}, PENALTIES),
    (
        {**PENALTIES, "token_repetition_range": 6, "token_repetition_decay": -2},
        {**PENALTIES, "token_repetition_range": 4},
    ),
    (
        {**PENALTIES, "token_repetition_range": 1, "token_repetition_decay": -2},
        {**PENALTIES, "token_repetition_range": 0},
    ),
    ({"token_frequency_penalty": np.float32(-0.5)}, {"token_frequency_penalty": -0.5}),
    ({"token_presence_penalty": True}, {"token_presence_penalty": 1.0}),
    ({"temperature": -1}, {"temperature": 0.0}),
    ({"temperature": -1, "temperature_last": True}, {"temperature": 0.0}),
    ({"temperature": torch.tensor(1.5)}, {"temperature": 1.5}),
    ({"smoothing_factor": -0.2}, {}),
    ({"min_temp": 2, "max_temp": 1}, {}),
    ({"min_temp": -2, "max_temp": -1}, {}),
    ({"min_temp": -1, "max_temp": 1.5}, {"min_temp": 0, "max_temp": 1.5}),
    ({**DYNAMIC, "temp_exponent": -1}, {**DYNAMIC, "temp_exponent": 0}),
    ({"top_k": -1}, {}),
    ({"top_k": 3.0}, {"top_k": 3}),
    ({"top_p": -0.5}, {}),
    ({"top_p": float("inf")}, {}),
    ({"top_p": float("nan")}, {}),
    ({"top_p": 2}, {}),
    ({"top_a": -1}, {}),
    ({"min_p": -0.1}, {}),
    ({"min_p": 2}, {}),
    ({"tfs": -1}, {}),
    ({"tfs": 7}, {}),
    ({"typical": -0.2}, {}),
    ({"typical": 1}, {}),
    ({"skew": np.float64(0.5)}, {"skew": 0.5}),
    (
        {"temperature_last": 1, "temperature": 2.0, "min_p": 0.2},
        {"temperature_last": True, "temperature": 2.0, "min_p": 0.2},
    ),
    ({"mirostat": 1, "mirostat_tau": 1.0}, {"mirostat": True, "mirostat_tau": 1.0}),
    ({"mirostat": None}, {}),
    ({**MIROSTAT, "mirostat_tau": -3}, {**MIROSTAT, "mirostat_tau": 0}),
    ({**MIROSTAT, "mirostat_eta": -1}, {**MIROSTAT, "mirostat_eta": 0}),
    ({"token_bias": BIAS[None]}, {"token_bias": BIAS}),
    ({"post_sampling_hooks": None}, {}),
    ({"post_sampling_hooks": ()}, {}),
    ({**DRY, "dry_allowed_length": 0}, {**DRY, "dry_multiplier": 0.8 * 1.75, "dry_allowed_length": 1}),
    ({**DRY, "dry_allowed_length": -1}, {**DRY, "dry_multiplier": 0.8 * 1.75**2, "dry_allowed_length": 1}),
    ({**DRY, "dry_allowed_length": -(10**6)}, {**DRY, "dry_multiplier": 1e30, "dry_allowed_length": 1}),
    ({"dry_multiplier": 0, "dry_allowed_length": 0}, {}),
    ({**DRY, "dry_base": -1}, {**DRY, "dry_base": 0}),
    ({**DRY, "dry_multiplier": -1}, {}),
    ({**DRY, "dry_sequence_breakers": {-1, np.int64(5), 10**6}}, {**DRY, "dry_sequence_breakers": {5}}),
    ({**DRY, "dry_sequence_breakers": ["a", torch.tensor(7)]}, {**DRY, "dry_sequence_breakers": {"a", 7}}),
    ({**DRY, "dry_range": -1}, DRY),
    ({**DRY, "dry_max_ngram": 0}, {}),
    ({**DRY, "dry_max_ngram": 1}, {}),
    ({**XTC, "xtc_probability": 1.5}, {**XTC, "xtc_probability": 1.0}),
    ({**XTC, "xtc_probability": -0.5}, {}),
    ({**XTC, "xtc_threshold": -1}, {**XTC, "xtc_threshold": 0.0}),
    ({**XTC, "xtc_threshold": 1.5}, {}),
    ({**XTC, "xtc_ignore_tokens": [3, 4]}, {**XTC, "xtc_ignore_tokens": frozenset({3, 4})}),
]
#: State of other places, and what takes every value that it can take at all.
WITHOUT_RANGE = {"mirostat_mu", "ngram_trie", "ngram_index", "ngram_history", "cfg_scale"}


def distribution(sampler: Any, settings: Any) -> list[tuple[int, float]]:
    """Tokens and probabilities over many draws, after a text that repeats itself."""
    logits = torch.randn(1, 1, -(-VOCAB // 32) * 32, generator=torch.Generator().manual_seed(3)) * 2
    context = ids("abcabdabcab")
    found = []
    for i in range(64):
        token, _, _, probability, _ = sampler.sample(logits, settings, context, i / 64, TOKENIZER)
        found.append((int(token), float(probability)))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("given", "meant"), MEANINGS, ids=[repr(given)[:70] for given, _ in MEANINGS])
def test_a_value_out_of_range_means_what_it_means_in_exllamav2(given: dict[str, Any], meant: dict[str, Any]) -> None:
    expected = distribution(NativeSampler, Native(**{**NEUTRAL, **meant}))
    assert distribution(ExLlamaV2Sampler, Settings(**{**NEUTRAL, **given})) == expected
    job = ExLlamaV2DynamicJob(ids("abcab"), 4, gen_settings=Settings(**{**NEUTRAL, **given}), seed=1)
    reference = ExLlamaV2DynamicJob(ids("abcab"), 4, gen_settings=Native(**{**NEUTRAL, **meant}), seed=1)
    generator = make()
    generator.enqueue([job, reference])
    results = drain(generator)
    assert streamed_tokens(results[job]) == streamed_tokens(results[reference]) != []


def test_the_table_has_every_field() -> None:
    assert {name for given, _ in MEANINGS for name in given} | WITHOUT_RANGE == {f.name for f in fields(Settings)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", bad) for bad in ("hot", None, float("nan"), float("inf"), [1.0])),
        *(("top_k", bad) for bad in ("3", 2.5, None)),
        ("token_repetition_penalty", float("inf")),
        ("token_frequency_penalty", float("nan")),
        ("token_repetition_range", 2.5),
        ("token_bias", [0.0] * VOCAB),
        ("token_bias", torch.full((VOCAB,), float("nan"))),
        ("cfg_scale", "1"),
        ("post_sampling_hooks", [3]),
        ("dry_sequence_breakers", "abc"),
        ("dry_sequence_breakers", [1.5]),
        ("xtc_ignore_tokens", 7),
    ],
)
def test_meaningless_settings_are_refused(field: str, value: Any) -> None:
    settings = Settings()
    setattr(settings, field, value)
    with pytest.raises(RequestError, match=field):
        ExLlamaV2DynamicJob(ids("a"), 4, gen_settings=settings)


def test_an_attribute_that_is_no_setting_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings()
    settings.filters = ["a JSON schema"]  # a field of older versions of exllamav2
    settings.temperatur = 0.5  # a typing error
    settings.filter_prefer_eos = False  # changes nothing
    with caplog.at_level(logging.WARNING, logger="exllamav2"):
        for _ in range(2):
            ExLlamaV2DynamicJob(ids("a"), 4, gen_settings=settings)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "Settings.filters is no setting" in messages[0]
    assert "belong to the job" in messages[0]
    assert "did you mean temperature?" in messages[1]


def test_native_settings_stay_strict() -> None:
    wrong: dict[str, Any] = {"min_p": -0.1, "dry_range": -1, "xtc_probability": 1.5, "dry_allowed_length": 0}
    for field, value in wrong.items():
        with pytest.raises(RequestError, match=field):
            ExLlamaV2DynamicJob(ids("a"), 4, gen_settings=Native(**{field: value}))


def test_the_class_is_kept_and_taken_everywhere() -> None:
    hook: Callable[..., None] = lambda result: None  # noqa: E731
    settings = Settings(1.1, 64, 8, post_sampling_hooks=[hook])
    assert [getattr(settings, f.name) for f in fields(settings)[:3]] == [1.1, 64, 8]
    assert isinstance(settings, Native)
    made = [settings.clone(), copy.copy(settings), copy.deepcopy(settings), Settings.greedy(top_p=0.5)]
    for other in [*made, settings.greedy_clone(), pickle.loads(pickle.dumps(Settings(top_k=-3)))]:
        assert type(other) is Settings
        other.min_p = -1.0
        assert ExLlamaV2DynamicJob(ids("a"), 1, gen_settings=other).gen_settings is other
    assert Settings.greedy().top_k == 1
    assert copy.copy(settings) == settings.clone() == settings
    assert set(vars(settings)) == {f.name for f in fields(settings)}  # hosts log and copy them
    given = Settings.greedy(top_a=-1.0)
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=64))
    base = ExLlamaV2BaseGenerator(model, ScriptedCache(model, max_seq_len=64), TOKENIZER)
    streaming = ExLlamaV2StreamingGenerator(model, ScriptedCache(model, max_seq_len=64), TOKENIZER)
    streaming.set_stop_conditions([])
    streaming.begin_stream_ex(ids("abc"), given)
    streamed = [int(token) for _ in range(8) for token in streaming.stream_ex()["chunk_token_ids"][0]][:4]
    base.generate_simple("abc", given, 4, stop_token=None)
    assert base.sequence_ids is not None
    assert base.sequence_ids[0, -4:].tolist() == streamed


def test_mirostat_of_a_loop_keeps_its_state_in_the_settings() -> None:
    given, native = Settings(**NEUTRAL, **MIROSTAT), Native(**NEUTRAL, **MIROSTAT)
    assert distribution(ExLlamaV2Sampler, given) == distribution(NativeSampler, native)
    assert given.mirostat_mu == native.mirostat_mu
    assert given.mirostat_mu is not None


# ---- changes while a job runs ----------------------------------------------------------------------------------------


def start(settings: Any, generator: ExLlamaV2DynamicGenerator | None = None, **kw: Any) -> tuple[Any, Any, list[int]]:
    """A job that has given `count` tokens (3), its generator, and those tokens."""
    generator, count = generator or make(), kw.pop("count", 3)
    job = ExLlamaV2DynamicJob(ids("the abc"), kw.pop("new", 24), gen_settings=settings, seed=5, **kw)
    generator.enqueue(job)
    tokens: list[int] = []
    for _ in range(20):
        tokens += streamed_tokens([r for r in generator.iterate() if r["job"] is job])
        if len(tokens) >= count:
            return generator, job, tokens
    raise AssertionError("no tokens")


def rest(generator: Any, job: Any, tokens: list[int]) -> list[int]:
    results = drain(generator)[job]
    assert results[-1]["eos_reason"] == "max_new_tokens"
    check_pages(generator)
    return tokens + streamed_tokens(results)


def alone(**settings: Any) -> list[int]:
    generator, job, tokens = start(Native(**{**NEUTRAL, **settings}))
    return rest(generator, job, tokens)


def assign(name: str, value: Any) -> Callable[[Any], None]:
    return lambda settings: setattr(settings, name, value)


def ban_in_place(settings: Any) -> None:
    settings.token_bias[10:] = -float("inf")


def ban_in_dict(settings: Any) -> None:
    settings.token_bias.update(dict.fromkeys(range(10, VOCAB), -float("inf")))


def ban_in_sparse_bias(settings: Any) -> None:
    settings.token_bias.values[10:] = -float("inf")


def move_in_sparse_bias(settings: Any) -> None:
    settings.token_bias.ids.copy_(settings.token_bias.ids.flip(0))


CHANGES: list[tuple[dict[str, Any], Callable[[Any], None]]] = [
    ({}, assign("temperature", 0.0)),
    ({}, assign("top_k", 1)),
    ({}, assign("min_p", 0.3)),
    ({**PENALTIES, "token_frequency_penalty": 3.0, "token_repetition_range": 0}, assign("token_repetition_range", -1)),
    ({}, assign("token_bias", BIAS * 50)),
    ({"token_bias": torch.zeros(len(BIAS))}, ban_in_place),
    ({"token_bias": {3: 0.0}}, ban_in_dict),
    ({"token_bias": SparseBias.of(dict.fromkeys(range(VOCAB), 0.0))}, ban_in_sparse_bias),
    ({"token_bias": SparseBias.of({i: float(-i) for i in range(VOCAB)})}, move_in_sparse_bias),
    ({"xtc_threshold": 0.0, "xtc_ignore_tokens": frozenset[int]()}, assign("xtc_probability", 1.0)),
    ({"temperature": 3.0}, assign("mirostat", True)),
    ({}, lambda settings: settings.disallow_tokens(TOKENIZER, list(range(3, VOCAB - 4)))),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("at", range(len(CHANGES)))
def test_a_change_applies_from_the_next_token_on(at: int, drafter: str) -> None:
    """Tokens before the change are those of the old settings; the others do not depend on the drafter."""
    before, change = CHANGES[at]
    before = {**NEUTRAL, **before}
    plain = alone(**copy.deepcopy(before))
    settings = Settings(**copy.deepcopy(before))
    generator = speculate(drafter) if drafter != "none" else make()
    generator, job, tokens = start(settings, generator)
    change(settings)
    found = rest(generator, job, list(tokens))
    assert found[: len(tokens)] == plain[: len(tokens)]
    assert found != plain
    twin = Settings(**copy.deepcopy(before))
    plainly, other, again = start(twin, count=len(tokens))
    change(twin)
    assert rest(plainly, other, again) == found


def test_an_inference_tensor_changed_in_place_counts() -> None:
    with torch.inference_mode():
        bias = torch.zeros(len(BIAS))
    settings = Settings(**NEUTRAL, token_bias=bias)
    generator, job, tokens = start(settings)
    with torch.inference_mode():
        bias[10:] = -float("inf")
    assert max(rest(generator, job, tokens)[3:]) < 10


def test_hooks_that_are_added_and_breakers_that_are_removed_count() -> None:
    seen: list[int] = []
    settings = Settings.greedy()
    generator, job, tokens = start(settings)
    settings.post_sampling_hooks.append(lambda result: seen.append(int(result.sampled_token)))
    assert seen == rest(generator, job, tokens)[3:] != []
    letters = set(range(3, VOCAB))
    settings = Settings.greedy(dry_multiplier=50.0, dry_allowed_length=1, dry_sequence_breakers=letters)
    always_a = lambda context: 3  # noqa: E731
    generator, job, tokens = start(settings, make(always_a))
    assert tokens == [3, 3, 3]
    letters.clear()
    assert rest(generator, job, tokens)[3] != 3


def test_jobs_that_share_settings_all_follow_and_native_jobs_do_not() -> None:
    generator = make(max_batch_size=4)
    shared, fixed = Settings(**NEUTRAL), Native(**NEUTRAL)
    jobs = [ExLlamaV2DynamicJob(ids("the abc"), 12, gen_settings=s, seed=5) for s in (shared, shared, fixed)]
    generator.enqueue(jobs)
    for _ in range(4):
        generator.iterate()
    shared.allow_tokens(TOKENIZER, [7])
    fixed.allow_tokens(TOKENIZER, [7])
    drain(generator)
    ends = [job.sequence.ids[-4:].tolist() for job in jobs]
    assert ends[0] == ends[1] == [7] * 4
    assert jobs[2].sequence.ids[-12:].tolist() == alone()[:12]


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "hot"), ("cfg_scale", 1.5), ("token_bias", torch.zeros(3)), ("top_k", None)]
)
def test_an_invalid_change_ends_the_job_of_these_settings_and_no_other(field: str, value: Any) -> None:
    settings = Settings(**NEUTRAL)
    generator, job, _ = start(settings, make(max_batch_size=2))
    other = ExLlamaV2DynamicJob(ids("the abc"), 24, gen_settings=Native(**NEUTRAL), seed=5)
    generator.enqueue(other)
    generator.iterate()
    setattr(settings, field, value)
    results = drain(generator)
    last = results[job][-1]
    assert (last["eos"], last["eos_reason"], type(last["exception"])) == (True, "error", RequestError)
    assert field in str(last["exception"])
    assert other.sequence.ids[-24:].tolist() == alone()
    check_pages(generator)


def test_a_pair_of_prompts_follows_its_scale() -> None:
    settings = Settings.greedy(cfg_scale=1.0)
    job = ExLlamaV2DynamicJob([ids("the abc"), ids("xy")], 12, gen_settings=settings)
    generator = make()
    generator.enqueue(job)
    tokens: list[int] = []
    for _ in range(4):
        tokens += streamed_tokens(generator.iterate())
    settings.cfg_scale = -2.0
    changed = rest(generator, job, tokens)
    assert changed[: len(tokens)] == alone(top_k=1)[: len(tokens)]
    assert changed != alone(top_k=1)[:12]
    assert tokens


def test_a_hook_that_changes_settings_meets_the_next_token_with_any_drafter() -> None:
    found = []
    for drafter in ("none", "ngram", "model"):
        settings = Settings(**NEUTRAL)
        calls: list[int] = []

        def hook(result: Any, settings: Any = settings, calls: list[int] = calls) -> None:
            calls.append(int(result.sampled_token))
            settings.temperature = 0.5 + len(calls) % 3

        settings.post_sampling_hooks = [hook]
        script = lambda context: 3 + len(context) % 4 if len(context) % 5 else None  # noqa: E731
        generator = make(script) if drafter == "none" else speculate(drafter, script)
        job = ExLlamaV2DynamicJob(ids("the abc"), 24, gen_settings=settings, seed=9)
        generator.enqueue(job)
        found.append(rest(generator, job, []))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("early", [False, True])
def test_a_step_launched_early_is_sampled_with_the_settings_of_its_round(early: bool) -> None:
    """The logits of every pass lie in memory that the next pass overwrites, as on a GPU."""

    class Overwriting(ScriptedModel):
        given: torch.Tensor | None = None

        def forward_chunk(self, *args: Any, **kw: Any) -> ForwardResult:
            found = super().forward_chunk(*args, **kw)
            if "logits" in found:
                if self.given is not None:
                    self.given.fill_(float("nan"))
                self.given = found["logits"]
            return found

    model = Overwriting(ScriptedConfig(vocab_size=VOCAB, max_seq_len=128))
    generator = ExLlamaV2DynamicGenerator(model, ScriptedCache(model, max_seq_len=128), TOKENIZER, page_size=PAGE)
    prelaunch(generator, early)
    settings = Settings.greedy()
    job = ExLlamaV2DynamicJob(ids("the abc"), 60, gen_settings=settings, seed=4)
    generator.enqueue(job)
    changes = [("temperature", 1.0), ("typical", 0.5), ("min_p", -1), ("top_k", 0), ("typical", 0), ("top_k", 1)]
    for step in range(80):
        if not step % 3 and changes:
            setattr(settings, *changes.pop())
        generator.iterate()
    expected = make(model_len=128)
    settings = Settings.greedy()
    changes = [("temperature", 1.0), ("typical", 0.5), ("min_p", -1), ("top_k", 0), ("typical", 0), ("top_k", 1)]
    twin = ExLlamaV2DynamicJob(ids("the abc"), 60, gen_settings=settings, seed=4)
    expected.enqueue(twin)
    for step in range(80):
        if not step % 3 and changes:
            setattr(settings, *changes.pop())
        expected.iterate()
    assert job.is_finished
    assert not job.has_failed
    assert job.sequence.ids.tolist() == twin.sequence.ids.tolist()


def test_a_host_that_moves_the_range_of_penalties_with_the_output() -> None:
    """A server applies penalties to the tokens of the answer alone."""
    settings = Settings(**{**NEUTRAL, "temperature": 0.0, "token_presence_penalty": 50.0, "token_repetition_range": 0})
    generator = make(lambda context: 3)  # always the same token, but for the penalty
    job = ExLlamaV2DynamicJob(ids("aaaa"), 12, gen_settings=settings)
    generator.enqueue(job)
    tokens: list[int] = []
    for _ in range(40):
        tokens += streamed_tokens(generator.iterate())
        settings.token_repetition_range = max(0, job.new_tokens)
    assert tokens[0] == 3  # the prompt's own is not in the range
    assert len(set(tokens)) == len(tokens) == 12


def test_nothing_is_compiled_again_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from exl_generate.sampling import sampler

    compiled: list[Any] = []
    plan_of = sampler.plan_of

    def noted(*args: Any) -> Any:
        compiled.append(args)
        return plan_of(*args)

    monkeypatch.setattr(sampler, "plan_of", noted)
    bias = torch.zeros(len(BIAS))
    generator, job, tokens = start(Settings(**NEUTRAL, token_bias=bias, dry_sequence_breakers={3, 4}))
    rest(generator, job, tokens)
    assert len(compiled) == 1
