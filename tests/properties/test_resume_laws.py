"""A job that resumes from the ids of an earlier run says what that run would have said next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import example, given
from hypothesis import strategies as st

from exl_filters import (
    AllOf,
    AnyOf,
    BanFilter,
    CompileBudget,
    ExLlamaV2GrammarFilter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    ExLlamaV2TokenEnforcerFilter,
    LengthFilter,
    SequenceFilter,
    TokenSetFilter,
    TriggeredFilter,
)
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.testing import ScriptedEmbedding, ScriptedLora, check_pages, drain, streamed_text, streamed_tokens
from exl_generate.testing.small import EOS, TOKENIZER, VOCAB, make, speculate

Settings = ExLlamaV2Sampler.Settings
WIDE: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "token_repetition_penalty": 1.0}
SETTINGS = {
    "greedy": Settings.greedy(),
    "default": Settings(),
    "wide": Settings(**WIDE),
    "penalties": Settings(**WIDE | {"token_repetition_penalty": 1.5, "token_frequency_penalty": 0.3}),
    "window": Settings(**WIDE | {"token_presence_penalty": 2.0, "token_repetition_range": 3}),
    "dry": Settings(**WIDE | {"dry_multiplier": 2.0, "dry_range": 40, "dry_sequence_breakers": [5]}),
    "xtc": Settings(**WIDE | {"xtc_probability": 0.6, "xtc_threshold": 0.01}),
    "mirostat": Settings(**WIDE | {"mirostat": True, "mirostat_eta": 0.7}),
    "shaped": Settings(temperature=1.4, temperature_last=True, min_p=0.05, typical=0.9, tfs=0.9, skew=0.4, top_a=0.1),
    "smooth": Settings(smoothing_factor=0.4, min_temp=0.5, max_temp=2.0),
}


class Foreign:
    """Even ids, then odd ids, and so on: an object with begin, feed and next."""

    def begin(self, prefix_str: str = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def next(self) -> tuple[set[int], set[int]]:
        return set(range(3 + self.at % 2, VOCAB, 2)), set()


def enforcer() -> Any:
    from lmformatenforcer import RegexParser

    return ExLlamaV2TokenEnforcerFilter(None, TOKENIZER, RegexParser("[a-f]{2,6}( [a-z]{1,3}){2,9}"))


def grammar(**source: Any) -> Any:
    return ExLlamaV2GrammarFilter(None, TOKENIZER, **source)


def letters() -> Any:
    return ExLlamaV2GrammarFilter(None, TOKENIZER, regex="[a-m]{2,9}", on_complete="end")


FILTERS: dict[str, Callable[[], Any]] = {
    "regex": lambda: grammar(regex="([a-z]{1,4}[ .]){3,8}"),
    "lark": lambda: grammar(lark='start: ("{" /[a-z]+/ "}")+'),
    "schema": lambda: grammar(json_schema={"type": "array", "items": {"enum": ["a", "the"]}, "minItems": 1}),
    # Its process, which imports torch, is tested in tests/filters.
    "xgrammar": lambda: grammar(regex="[a-f]{2,30}", backend="xgrammar", budget=CompileBudget(trust=True)),
    "enforcer": enforcer,
    "select": lambda: ExLlamaV2SelectFilter(None, TOKENIZER, ["the theory", "they are", "some of the people"]),
    "prefix": lambda: ExLlamaV2PrefixFilter(None, TOKENIZER, ["begin so", "or the"]),
    "set": lambda: TokenSetFilter(None, TOKENIZER, [range(3, 12), range(8, 30)]),
    "ban": lambda: BanFilter(None, TOKENIZER, ids=[4], texts=["a", "the", "x y"]),
    "length": lambda: LengthFilter(None, TOKENIZER, min_chars=4, max_chars=13),
    "all": lambda: AllOf([grammar(regex="[a-z ]+"), BanFilter(None, TOKENIZER, texts=["q"])]),
    "any": lambda: AnyOf([ExLlamaV2SelectFilter(None, TOKENIZER, ["abc", "axe"]), grammar(regex="[a-d]{4,9}")]),
    "sequence": lambda: SequenceFilter([ExLlamaV2SelectFilter(None, TOKENIZER, ["ab", "abc"]), letters()]),
    "triggered": lambda: TriggeredFilter(letters(), "a", "rearm", tokenizer=TOKENIZER),
    "foreign": Foreign,
}


@dataclass
class Ask:
    """A request as data, so that it can be made twice."""

    prompt: list[int]
    new: int
    least: int
    seed: int
    style: str
    filters: list[str] = field(default_factory=list)
    stops: list[Any] = field(default_factory=list)
    bans: list[str] = field(default_factory=list)
    healing: bool = False
    negative: bool = False
    picture: bool = False
    prefer_eos: bool = False
    adapter: bool = False
    share: int | None = None

    def job(self, resume_from: Any = None) -> ExLlamaV2DynamicJob:
        chosen = SETTINGS[self.style].clone()
        chosen.cfg_scale = 1.5 if self.negative else None
        rows = [self.prompt, [5, 6, 7]] if self.negative else [self.prompt]
        pictures = [ScriptedEmbedding(range(20, 29))] if self.picture else []
        rows = [row[:2] + [i for one in pictures for i in one.get_ids()] + row[2:] for row in rows]
        return ExLlamaV2DynamicJob(
            [torch.tensor([row]) for row in rows],
            self.new,
            min_new_tokens=min(self.least, self.new),
            gen_settings=chosen,
            seed=self.seed,
            stop_conditions=self.stops,
            banned_strings=self.bans,
            filters=[FILTERS[name]() for name in self.filters],
            filter_prefer_eos=self.prefer_eos,
            token_healing=self.healing,
            return_probs=True,
            return_logits=True,
            return_top_tokens=2,
            embeddings=pictures,
            loras=[ScriptedLora(3)] if self.adapter else [],
            max_rq_tokens=self.share,
            resume_from=resume_from,
        )


@st.composite
def asks(draw: st.DrawFn, styles: list[str], filters: list[str]) -> Ask:
    return Ask(
        prompt=draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=40)),
        new=draw(st.integers(0, 24)),
        least=draw(st.sampled_from([0, 0, 3, 9])),
        seed=draw(st.integers(0, 1000)),
        style=draw(st.sampled_from(styles)),
        filters=draw(st.lists(st.sampled_from(filters), max_size=2, unique=True)) if filters else [],
        stops=draw(st.lists(st.sampled_from(["th", "xy", "a", "é", "b.", EOS, 7]), max_size=3, unique=True)),
        bans=draw(st.lists(st.sampled_from(["d", "the", "q ", "😀", "be", "C"]), max_size=3, unique=True)),
        healing=draw(st.booleans()),
        negative=draw(st.integers(0, 4)) == 0,
        picture=draw(st.integers(0, 4)) == 0,
        prefer_eos=draw(st.booleans()),
        adapter=draw(st.booleans()),
        share=draw(st.sampled_from([None, 1, 5])),
    )


REPLACED = "\ufffd"  # the text of bytes that are no character
Results = list[dict[str, Any]]
VALUES = ("token_probs", "top_k_tokens", "top_k_probs", "logits")
ENDS = (
    "eos_reason",
    "eos_triggering_token_id",
    "eos_triggering_token_str",
    "eos_triggering_string",
    "full_completion",
    "new_tokens",
    "prompt_tokens",
)


def said(results: Results) -> dict[str, Any]:
    """Everything that results tell of their tokens, joined."""
    found: dict[str, Any] = {"text": streamed_text(results), "ids": streamed_tokens(results)}
    for name in VALUES:
        parts = [result[name][0].numpy() for result in results if name in result]
        found[name] = np.concatenate(parts).tolist() if parts else []
    return found


def run(generator: ExLlamaV2DynamicGenerator, one: ExLlamaV2DynamicJob) -> Results:
    generator.enqueue(one)
    found = drain(generator)[one]
    check_pages(generator)
    return found


def check(ask: Ask, cut: int, generators: list[ExLlamaV2DynamicGenerator]) -> None:
    """The whole run, on the first generator, is cut after `cut` results and resumed on the last one."""
    whole = run(generators[0], ask.job())
    last = whole[-1]
    if last["eos_reason"] in ("error", "filter_error", "filter_dead_end"):
        whole = whole[:-1]  # the resumed run fails as well, with what it had before in `held`
    at = cut % (len(whole) + 1)
    before, after = whole[:at], whole[at:]
    resumed = run(generators[-1], ask.job(streamed_tokens(before)))
    found = resumed[-1]
    for name in ENDS:
        assert found.get(name) == last.get(name), name
    if "exception" not in last:
        told, rest = said(resumed), said(after)
        if not after and streamed_text(whole).endswith(REPLACED) and told["text"] == REPLACED:
            rest["text"] = (
                REPLACED  # the end replaces the bytes of an incomplete character: so does that of a resumed job
            )
        assert told == rest
    # Anywhere in the ids, also where no result has ended.
    everything = streamed_tokens(whole)
    part = everything[: cut % (len(everything) + 1)]
    resumed = run(generators[-1], ask.job(torch.tensor([part])))
    assert part + streamed_tokens(resumed) == everything or "exception" in last
    assert [resumed[-1].get(name) for name in ENDS] == [last.get(name) for name in ENDS]


ALL = sorted(SETTINGS)


@examples(100, 8)
@given(ask=asks(ALL, []), cut=st.integers(0, 200))
def test_a_job_resumes_with_any_sampler(ask: Ask, cut: int) -> None:
    check(ask, cut, [make(), make(max_chunk_size=16)])


@examples(100, 8)
@given(ask=asks(["wide", "penalties", "mirostat"], sorted(FILTERS)), cut=st.integers(0, 200))
def test_a_job_resumes_with_filters(ask: Ask, cut: int) -> None:
    check(ask, cut, [make(), make()])


@pytest.mark.parametrize("name", sorted(FILTERS))
@examples(100, 1)
@given(seed=st.integers(0, 50), style=st.sampled_from(["wide", "mirostat"]), cut=st.integers(0, 40))
def test_a_job_resumes_with_each_filter(name: str, seed: int, style: str, cut: int) -> None:
    ask = Ask([3, 4, 5], 20, 0, seed, style, [name], [EOS])
    check(ask, cut, [make(), make()])


@example(ask=Ask([38], 9, 0, 68, "window", [], ["th", EOS], adapter=True), cut=98)  # all of it: an incomplete character
@examples(100, 6)
@given(ask=asks(ALL, []), cut=st.integers(0, 200))
def test_a_job_resumes_from_pages_that_are_there(ask: Ask, cut: int) -> None:
    """On the generator that ran the job before, and on one that drafts."""
    generator = make()
    check(ask, cut, [generator, generator])
    check(ask, cut, [generator, speculate("ngram")])
