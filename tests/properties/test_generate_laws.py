"""Laws of the dynamic generator on a scripted model: what a job says depends on nothing but the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import example, given
from hypothesis import strategies as st

from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.dynamic.detokenize import decode_incremental
from exl_generate.testing import (
    ScriptedCache,
    ScriptedConfig,
    ScriptedEmbedding,
    ScriptedLora,
    ScriptedModel,
    ScriptedTokenizer,
    check_pages,
    streamed_text,
    streamed_tokens,
)

PIECES: list[str | bytes] = ["a", "b", "c", "ab", "bc", " ", "A", "cab", "."] + [bytes([b]) for b in "é😀".encode()]
TOKENIZER = ScriptedTokenizer(PIECES)
VOCAB = TOKENIZER.get_vocab_size()
EOS = TOKENIZER.eos_token_id
CACHE = 192
Settings = ExLlamaV2Sampler.Settings
SETTINGS = {
    "greedy": Settings.greedy(),
    "default": Settings(),
    "wide": Settings(temperature=1.0, top_k=0, top_p=0, token_repetition_penalty=1.0),
    "many": Settings(min_p=0.05, token_frequency_penalty=0.2, dry_multiplier=0.5, xtc_probability=0.3, mirostat=True),
}

ADAPTERS = [ScriptedLora(1), ScriptedLora(2)]
SETS = [[], [ADAPTERS[0]], [ADAPTERS[1]], ADAPTERS]


class Alternate(ExLlamaV2Filter):
    """Even ids, then odd ids, and so on; raises at step `fault`."""

    def __init__(self, fault: int | None = None) -> None:
        super().__init__(None, TOKENIZER)
        self.fault, self.at = fault, 0

    def clone(self, c: Any = None) -> Alternate:
        return Alternate(self.fault)

    def begin(self, prefix_str: Any = "") -> None:
        self.at = 0

    def feed(self, token: Any) -> None:
        self.at += 1

    def next(self) -> tuple[set[int], set[int]]:
        if self.at == self.fault:
            raise ZeroDivisionError("broken plugin")
        return set(range(3 + self.at % 2, VOCAB, 2)), set()


def every_fifth(result: Any) -> None:
    """Replaces tokens whose id is a multiple of five, and hides them from filters."""
    if int(result.sampled_token) % 5 == 0:
        result.sampled_token = torch.tensor([[int(result.sampled_token) - 1]])
        result.feed_filters = False


@dataclass
class Ask:
    """A request as data, so that it can be made twice."""

    prompt: list[int]
    new: int
    seed: int
    style: str
    stops: list[Any] = field(default_factory=list)
    bans: list[str] = field(default_factory=list)
    filtered: bool = False
    fault: int | None = None
    arrives: int = 0
    cancelled_at: int | None = None
    healing: bool = False
    negative: list[int] | None = None
    hooked: bool = False
    loras: int = 0
    picture: int = 0
    share: int | None = None

    def job(self) -> ExLlamaV2DynamicJob:
        chosen = SETTINGS[self.style].clone()
        chosen.cfg_scale = None if self.negative is None else 1.5
        chosen.post_sampling_hooks = [every_fifth] if self.hooked else []
        rows = [self.prompt] if self.negative is None else [self.prompt, self.negative]
        pictures = [ScriptedEmbedding(range(self.picture, self.picture + 9))] if self.picture else []
        rows = [row[:2] + [i for one in pictures for i in one.get_ids()] + row[2:] for row in rows]
        return ExLlamaV2DynamicJob(
            [torch.tensor([row]) for row in rows],
            self.new,
            gen_settings=chosen,
            token_healing=self.healing,
            seed=self.seed,
            stop_conditions=self.stops,
            banned_strings=self.bans,
            filters=[Alternate(self.fault)] if self.filtered else None,
            return_probs=True,
            return_logits=True,
            return_top_tokens=2,
            return_hidden_state=True,
            loras=SETS[self.loras],
            embeddings=pictures,
            max_rq_tokens=self.share,
        )


@st.composite
def asks(draw: st.DrawFn, faulty: bool = False) -> Ask:
    base = draw(st.sampled_from([[3, 4, 5] * 9, [6, 7, 3] * 7 + [4], [5]]))
    prompt = base[: draw(st.integers(1, len(base)))] + draw(st.lists(st.integers(3, VOCAB - 1), max_size=12))
    return Ask(
        prompt=prompt,
        new=draw(st.integers(0, 24)),
        seed=draw(st.integers(0, 3)),
        style=draw(st.sampled_from(sorted(SETTINGS))),
        stops=draw(st.lists(st.sampled_from(["abc", "bca", "caba", "é", EOS]), max_size=2, unique=True)),
        bans=draw(st.lists(st.sampled_from(["ab", "Ca", "bcb", "😀", "b c"]), max_size=2, unique=True)),
        filtered=draw(st.booleans()),
        fault=draw(st.one_of(st.none(), st.integers(0, 6))) if faulty else None,
        arrives=draw(st.integers(0, 12)),
        healing=draw(st.booleans()),
        negative=draw(st.one_of(st.none(), st.just(base[:5]), st.just([5, 5]))),
        hooked=draw(st.integers(0, 4)) == 0,
        loras=draw(st.sampled_from([0, 0, 1, 2, 3])),
        picture=draw(st.sampled_from([0, 0, 0, 500, 600])),
        share=draw(st.sampled_from([None, None, 1, 4, 9])),
        cancelled_at=draw(st.one_of(st.none(), st.integers(0, 20))) if faulty else None,
    )


@dataclass
class Shape:
    """How a generator is built; none of it may show in any job's output."""

    page: int = 256
    pages: int = 1
    chunk: int | None = None
    batch: int = 8
    draft: str = "none"
    wait: float = 0.0

    def generator(self, cache_tokens: int = CACHE) -> ExLlamaV2DynamicGenerator:
        model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=128, max_input_len=64))
        cache = ScriptedCache(model, max_seq_len=cache_tokens)
        kw: dict[str, Any] = {"use_ngram_draft": True} if self.draft in ("ngram", "shared") else {}
        if self.draft == "shared":
            kw |= {"shared_ngram_tokens": 48, "max_ngram": 8}
        if self.draft == "model":
            guesser = ScriptedModel(model.config, lambda context: context[-1] if len(context) % 3 == 0 else None)
            kw = {"draft_model": guesser, "draft_cache": ScriptedCache(guesser, max_seq_len=cache_tokens)}
        return ExLlamaV2DynamicGenerator(
            model,
            cache,
            TOKENIZER,
            page_size=self.page,
            max_chunk_size=self.chunk,
            max_batch_size=self.batch,
            max_q_size=5,
            prompt_wait_seconds=self.wait,
            **kw,
        )


shapes = st.sampled_from([2, 4, 8, 16, 32]).flatmap(
    lambda page: st.builds(
        Shape,
        page=st.just(page),
        chunk=st.sampled_from([page, page * 2, 64, None]),
        batch=st.integers(2, 8),
        draft=st.sampled_from(["none", "ngram", "shared", "model"]),
        wait=st.sampled_from([0.0, 3600.0]),
    )
)


class Complaints(logging.Handler):
    """Guesses that the drafter gave up; wrong keys and values in a draft model's cache show nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@pytest.fixture(autouse=True)
def complaints() -> Iterator[Complaints]:
    handler = Complaints()
    logger = logging.getLogger("exl_generate.dynamic.speculation")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    assert handler.heard == []


def play(generator: ExLlamaV2DynamicGenerator, requests: list[Ask]) -> list[list[dict[str, Any]]]:
    """Run requests as they arrive, cancelling some; results of each, pages checked after every step."""
    jobs = [ask.job() for ask in requests]
    results: dict[ExLlamaV2DynamicJob, list[dict[str, Any]]] = {job: [] for job in jobs}
    for round_ in range(2000):
        for ask, job in zip(requests, jobs, strict=True):
            if ask.arrives == round_:
                generator.enqueue(job)
            if ask.cancelled_at is not None and ask.cancelled_at + ask.arrives == round_:
                generator.cancel(job)
        for result in generator.iterate():
            results[result["job"]].append(result)
        check_pages(generator)
        if round_ > 40 and generator.num_remaining_jobs() == 0:
            break
    assert generator.num_remaining_jobs() == 0
    return [results[job] for job in jobs]


def said(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all that a job's results say about its output, for bitwise comparison."""
    last = results[-1]
    said: dict[str, Any] = {
        "tokens": streamed_tokens(results),
        "text": streamed_text(results),
        "suppressed": [r["suppressed_text"] for r in results if "suppressed_text" in r],
        **{k: last.get(k) for k in ("eos_reason", "eos_triggering_string", "new_tokens", "full_completion")},
    }
    for key in ("token_probs", "logits", "top_k_tokens", "top_k_probs", "hidden_states"):
        parts = [r[key] for r in results if key in r]
        said[key] = torch.cat(parts, dim=1).numpy().tobytes() if parts else b""
    return said


def alone(ask: Ask) -> dict[str, Any]:
    ask = Ask(**{**ask.__dict__, "arrives": 0, "cancelled_at": None, "share": None})
    return said(play(Shape(page=64, pages=3).generator(), [ask])[0])


@examples(300, 4)
@given(shapes, st.lists(asks(), min_size=1, max_size=7), st.booleans())
# The two prompts of a pair end in other tokens; pages of both are shared later (draft cache).
@example(
    Shape(page=2, chunk=None, batch=6, draft="model"),
    [Ask([3, 4, 5, 6, 3, 4, 5], 3, 0, "greedy", negative=[3, 4, 5, 6, 3], picture=600)],
    False,
)
# Gives way with held ids (a banned string's beginning) over several pages of a size that makes them nameless.
@example(
    Shape(page=2, chunk=2, batch=2),
    [
        Ask([3], 11, 0, "greedy", bans=["ab"], share=9),
        Ask([3], 15, 1, "default", hooked=True),
        Ask([3], 0, 0, "default", hooked=True),
    ],
    False,
)
@pytest.mark.covers(
    "generators: job-extra-outputs",
    "generators: page-names",
    "generators: page-sharing",
    "generators: page-head-copy",
    "generators: page-duplicates",
    "generators: page-publication",
    "generators: cfg-pairs",
    "generators: draft-model",
    "generators: ngram-drafts",
    "generators: random-numbers",
    "generators: scripted-model",
)
def test_a_jobs_output_is_the_same_alone_and_in_company(shape: Shape, requests: list[Ask], warm: bool) -> None:
    """Tokens, text, probabilities and logits, bitwise, whatever the page size, chunk size, batch, company and cache
    state."""
    generator = shape.generator()
    if warm:
        play(generator, requests[::-1])
    for ask, results in zip(requests, play(generator, requests), strict=True):
        assert said(results) == alone(ask)


@examples(150, 4)
@given(shapes, st.lists(asks(), min_size=1, max_size=4), st.lists(asks(faulty=True), min_size=1, max_size=4))
@pytest.mark.covers("generators: failing-jobs")
def test_failing_and_cancelled_jobs_disturb_no_other_job(shape: Shape, good: list[Ask], bad: list[Ask]) -> None:
    results = play(shape.generator(), [*good, *bad])
    for ask, mine in zip(good, results, strict=False):
        assert said(mine) == alone(ask)
    for mine in results[len(good) :]:
        assert not mine or mine[-1]["eos"]
        assert sum(r["eos"] for r in mine) <= 1


@examples(150, 6)
@given(shapes, asks())
@pytest.mark.covers("generators: stop-strings", "generators: banned-strings")
def test_stop_strings_and_bans_never_show(shape: Shape, ask: Ask) -> None:
    results = play(shape.generator(), [ask])[0]
    text, last = streamed_text(results), results[-1]
    assert text == last["full_completion"]
    assert not any(stop in text for stop in ask.stops if isinstance(stop, str))
    assert not any(ban.lower() in text.lower() for ban in ask.bans)
    if last["eos_reason"] == "stop_string":
        assert last["held"]["text"].startswith(last["eos_triggering_string"])
    if last["eos_reason"] == "max_new_tokens":
        healed = results[-1]["job"].request.healing
        assert last["new_tokens"] == ask.new
        assert len(streamed_tokens(results)) == (ask.new + healed if ask.new else 0)
    table = TOKENIZER.get_id_to_bytes_list()
    if last["eos_reason"] in ("max_new_tokens", "stop_token") and not ask.healing:
        assert b"".join(table[t] for t in streamed_tokens(results)).decode(errors="replace") == text


def reach(table: list[bytes], tokens: list[int]) -> int:
    """Characters that these tokens have a part in."""
    text, pending = decode_incremental(b"", b"".join(table[t] for t in tokens))
    return len(text) + bool(pending)


@examples(60, 5)
@given(asks())
@pytest.mark.covers("generators: banned-strings")
def test_banned_strings_against_a_naive_search(ask: Ask) -> None:
    """Depth-first search over the model's greedy choices: at each position the best token that does not lead into a
    ban."""
    ask.filtered, ask.style, ask.stops = False, "greedy", []
    ask.healing, ask.negative, ask.hooked = False, None, False
    ask.loras = ask.picture = 0
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=128, max_input_len=64))
    table = TOKENIZER.get_id_to_bytes_list()
    output: list[int] = []
    barred: dict[int, set[int]] = {}
    while len(output) < ask.new:
        row = model.logits(np.array(ask.prompt + output))[:VOCAB].copy()
        row[list(barred.get(len(output), set()))] = -np.inf
        output.append(int(row.argmax()))
        whole = decode_incremental(b"", b"".join(table[t] for t in output))[0].lower()
        hits = [whole.find(ban.lower()) for ban in ask.bans if ban.lower() in whole]
        if hits:
            start = next(i for i in range(len(output)) if reach(table, output[: i + 1]) > min(hits))
            barred = {p: s for p, s in barred.items() if p <= start}
            barred.setdefault(start, set()).add(output[start])
            del output[start:]
    got = play(Shape(page=4).generator(), [ask])[0]
    assert streamed_tokens(got) == output
