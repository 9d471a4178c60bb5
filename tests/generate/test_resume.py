"""`resume_from`: what it refuses, what it counts, and that it works on a real model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import trials

from exl_core import ExLlamaV2, ExLlamaV2Cache_Q4, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2GrammarFilter, ExLlamaV2SelectFilter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler, RequestError, ResumeError
from exl_generate.bundled import draft_model_dir
from exl_generate.testing import drain, streamed_text, streamed_tokens
from exl_generate.testing.small import EOS, TOKENIZER, VOCAB, ids, job, make, run, says

A, B, THE = (int(ids(text)[0, 0]) for text in ("a", "b", "the"))
Settings = ExLlamaV2Sampler.Settings


def select() -> Any:
    return ExLlamaV2SelectFilter(None, TOKENIZER, ["ab", "abba"])


@pytest.mark.parametrize(
    ("given", "asked", "message"),
    [
        ([A, B, A, B, A], {}, "holds 5 ids, more than the 4"),
        ([A, VOCAB], {}, "has ids 0 to"),
        ([A, EOS, B], {"stop_conditions": [EOS]}, "ended with id 1: stop_token"),
        ([A, B, B], {"stop_conditions": ["ab"]}, "ended with id 1: stop_string"),
        ([A, B, B], {"banned_strings": ["AB"]}, "ends the banned string 'AB'"),
        ([A, A], {"filters": [select()]}, "the filters do not allow"),
        ([A, B, B, A, A], {"filters": [select()], "new": 9}, "ended with id 3: end_filter"),
        ([B], {"token_healing": True}, "does not begin with the text of the healed token"),
    ],
)
def test_ids_that_the_job_would_not_have_produced_are_refused(
    given: list[int], asked: dict[str, Any], message: str
) -> None:
    generator = make()
    with pytest.raises(ResumeError, match=message):
        generator.enqueue(job("abcabct", **{"new": 4} | asked, resume_from=given))
    assert generator.num_remaining_jobs() == 0
    assert run(generator, job("abc", 4))[-1]["eos_reason"] == "max_new_tokens"


@pytest.mark.parametrize(
    "given", [7, "ab", [1.5], [-1], [True], torch.tensor([0.5]), torch.zeros(2, 3, dtype=torch.long)]
)
def test_values_that_are_no_ids_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="resume_from"):
        job("abc", 4, resume_from=given)


def test_a_refused_job_can_be_enqueued_elsewhere() -> None:
    one = job("abc", 4, resume_from=[VOCAB - 1], stop_conditions=["a"])
    with pytest.raises(ResumeError):
        make(model_len=64).enqueue(job("abc", 4, resume_from=[VOCAB]))
    assert run(make(), one)[-1]["new_tokens"] == 4


def test_mirostat_refuses_ids_that_it_does_not_sample_again() -> None:
    style = Settings(mirostat=True, temperature=1.0)
    made = [run(make(), job("abc", 6, gen_settings=style, seed=3, resume_from=given)) for given in ([], [A, A, A, A])]
    assert len(streamed_tokens(made[0])) == 6
    assert made[1][-1]["eos_reason"] == "error"
    assert isinstance(made[1][-1]["exception"], ResumeError)
    assert streamed_tokens(made[1]) == []


def test_a_job_that_had_ended_ends_at_once() -> None:
    generator = make(says("a", "b", EOS, after=3))
    asked: dict[str, Any] = {"stop_conditions": [EOS]}
    results = run(generator, job("abc", 9, resume_from=[A, B, EOS], **asked))
    assert [result["stage"] for result in results] == ["started", "streaming"]
    assert results[-1]["eos_reason"] == "stop_token"
    assert results[-1]["full_completion"] == "ab"
    assert generator.model.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(("new", "reason"), [(3, "max_new_tokens"), (9, "stop_token")])
def test_an_incomplete_character_at_the_end_is_handed_out_once(new: int, reason: str) -> None:
    given = [A, *ids("\U0001f600")[0, :2].tolist(), EOS][:new]
    script = says(*given, after=3)
    whole = run(make(script), job("abc", new, stop_conditions=[EOS]))
    assert (streamed_text(whole), whole[-1]["eos_reason"]) == ("a\ufffd", reason)
    for cut in range(len(given) + 1):
        resumed = run(make(script), job("abc", new, stop_conditions=[EOS], resume_from=given[:cut]))
        assert streamed_text(resumed) == ("a\ufffd" if cut == 0 else "\ufffd" if cut < len(given) else "")
        assert resumed[-1]["full_completion"] == "a\ufffd"


def test_a_stop_string_that_began_in_text_handed_out_ends_the_job_there() -> None:
    """The earlier run may have been on a machine whose tokens were others."""
    results = run(make(says("b", after=4)), job("abc", 9, resume_from=[A], stop_conditions=["ab"]))
    assert streamed_text(results) == ""
    assert results[-1]["full_completion"] == ""
    assert results[-1]["held"] == {"text": "ab"}


def test_resumed_ids_are_no_prompt_tokens() -> None:
    generator = make()
    whole = streamed_tokens(run(generator, job("abcdefgh" * 4, 20)))
    last = run(generator, job("abcdefgh" * 4, 20, resume_from=whole[:10]))[-1]
    assert last["prompt_tokens"] == 32
    assert last["cached_tokens"] == 32
    assert last["new_tokens"] == 20


@pytest.fixture(scope="module")
def generator() -> ExLlamaV2DynamicGenerator:
    model = ExLlamaV2(ExLlamaV2Config(str(draft_model_dir())))
    model.load()
    cache = ExLlamaV2Cache_Q4(model, max_seq_len=1024)
    return ExLlamaV2DynamicGenerator(model, cache, ExLlamaV2Tokenizer(model.config))


@pytest.mark.parametrize("constrained", [False, True])
def test_a_model_resumes_bitwise(generator: ExLlamaV2DynamicGenerator, constrained: bool) -> None:
    """With a quantized cache, and cuts in both halves of a page."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 4}

    def asked(**kw: Any) -> ExLlamaV2DynamicJob:
        filters = [ExLlamaV2GrammarFilter(None, generator.tokenizer, json_schema=schema)] if constrained else []
        prompt = generator.tokenizer.encode("Once upon a time there was a small dog. " * 24)
        style = Settings(temperature=1.0, top_k=0, top_p=0.0, token_frequency_penalty=0.2)
        return ExLlamaV2DynamicJob(
            prompt, 60, gen_settings=style, seed=7, filters=filters, return_logits=True, return_probs=True, **kw
        )

    def ran(one: ExLlamaV2DynamicJob) -> list[dict[str, Any]]:
        generator.reset_page_table()
        generator.enqueue(one)
        return drain(generator)[one]

    whole = ran(asked())
    for cut in (0, len(whole) - 1, 1, 7, 30)[: trials(5, 2)]:
        before, after = whole[:cut], whole[cut:]
        resumed = ran(asked(resume_from=streamed_tokens(before)))
        assert streamed_text(resumed) == streamed_text(after)
        for name in ("token_ids", "token_probs", "logits"):
            ours, theirs = ([r[name] for r in results if name in r] for results in (resumed, after))
            assert torch.equal(torch.cat(ours, 1), torch.cat(theirs, 1))


def test_a_job_prepared_in_parts_continues_as_one_that_is_enqueued_at_once() -> None:
    given = run(make(), job("abc", 40))
    handed = [int(token) for result in given for token in streamed_tokens([result])][:25]
    whole = run(make(), job("abc", 40, resume_from=handed))
    generator, other = make(), make()
    one = job("abc", 40, resume_from=handed)
    assert not other.prepare(one, 7)  # work for another generator is dropped
    parts = 1
    while not generator.prepare(one, 7):
        parts += 1
        assert generator.num_remaining_jobs() == 0
    assert parts == 4
    assert streamed_tokens(run(generator, one)) == streamed_tokens(whole)
    assert generator.prepare(job("abc", 4))  # nothing to do


class Closing(ExLlamaV2SelectFilter):
    """Counts how often its copies are released."""

    closed: list[int] = []  # noqa: RUF012

    def background_drop(self) -> None:
        self.closed.append(1)
        super().background_drop()


def test_a_prepared_job_that_is_discarded_releases_its_filters() -> None:
    generator = make()
    one = job("abc", 9, filters=[Closing(None, TOKENIZER, ["ab", "abba"])], resume_from=[A, B, B])
    assert not generator.prepare(one, 2)
    before = len(Closing.closed)
    generator.discard(one)
    assert len(Closing.closed) == before + 1
    bad = job("abc", 9, filters=[select()], resume_from=[A, A])
    assert not generator.prepare(bad, 1)
    with pytest.raises(ResumeError, match="the filters do not allow"):
        generator.prepare(bad, 1)
    generator.discard(bad)
    assert run(generator, one)[-1]["eos_reason"] == "end_filter"
