"""A job's probabilities, candidates, logits and times, compared with the model's own."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.sampling import RequestSampler, Vocabulary
from exl_generate.testing import drain
from exl_generate.testing.small import TOKENIZER, VOCAB, ids, job, make, run, speculate

Settings = ExLlamaV2Sampler.Settings


def reported(results: list[dict[str, Any]], key: str) -> torch.Tensor:
    return torch.cat([r[key] for r in results if key in r], dim=1)[0]


@pytest.mark.parametrize("how", ["plain", "ngram", "model"])
@pytest.mark.parametrize("stops", [[], ["zzqy"]], ids=["plain text", "held text"])
@pytest.mark.covers("generators: job-extra-outputs", "generators: top-tokens")
def test_probabilities_candidates_and_logits_are_those_of_each_place(how: str, stops: list[str]) -> None:
    """Each token's own, also where guesses were evaluated along with it or its text was held for a while."""
    settings = Settings(temperature=1.3, top_k=9, top_p=0.0, token_repetition_penalty=1.2)
    generator = make() if how == "plain" else speculate(how)
    prompt = "abcabcabcab"
    one = job(
        prompt,
        25,
        gen_settings=settings,
        seed=4,
        stop_conditions=stops,
        return_probs=True,
        return_top_tokens=4,
        return_logits=True,
    )
    results = run(generator, one)
    tokens, probabilities = reported(results, "token_ids").tolist(), reported(results, "token_probs").tolist()
    top, top_p = reported(results, "top_k_tokens").tolist(), reported(results, "top_k_probs").tolist()
    logits = reported(results, "logits")
    assert len(tokens) == len(probabilities) == len(top) == len(logits) == 25
    assert len(set(probabilities)) > 15
    sampler, context = RequestSampler(settings, Vocabulary.of(TOKENIZER), 4), ids(prompt)[0].tolist()
    for i, token in enumerate(tokens):
        row = generator.model.logits(np.array(context))  # type: ignore[attr-defined]
        assert torch.equal(logits[i], torch.from_numpy(row)), "raw, before penalties"
        found, p = sampler.distribution(row, np.array(context), i)
        chance = dict(zip(found.tolist(), p.tolist(), strict=True))
        assert probabilities[i] == pytest.approx(chance[token], rel=1e-6)
        best = sorted(chance, key=lambda t: (-chance[t], t))[:4]
        assert top[i] == best
        assert top_p[i] == pytest.approx([chance[t] for t in best], rel=1e-6)
        context.append(token)


@pytest.mark.parametrize("asked", [VOCAB, VOCAB + 1, 2**70])
def test_more_candidates_than_there_are_tokens_are_all_of_them(asked: int) -> None:
    one = job("the fox", 2, return_top_tokens=asked)
    top = reported(run(make(), one), "top_k_tokens")
    assert sorted(top[0].tolist()) == list(range(top.shape[1]))
    assert top.shape[1] >= VOCAB


@pytest.mark.covers("generators: result-statistics")
def test_times_are_those_of_the_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that strikes once a look: every phase takes its time, and together they are the whole."""
    clock = itertools.count(100.0)
    moments: list[float] = []
    real, this = time.monotonic, threading.get_ident()

    def monotonic() -> float:
        if threading.get_ident() != this:  # left by an earlier test, say
            return real()
        moments.append(next(clock))
        return moments[-1]

    monkeypatch.setattr(time, "monotonic", monotonic)
    generator = make(max_chunk_size=32)
    one = job("abcdefghij" * 5, 6)
    generator.enqueue(one)
    enqueued = moments[-1]
    generator.iterate()
    prefilling = one.time_first_prefill
    last = drain(generator)[one][-1]
    assert prefilling is not None
    assert last["time_enqueued"] == prefilling - enqueued > 0
    assert last["time_prefill"] == (one.time_first_token or 0) - prefilling > 0
    assert last["time_generate"] == (one.time_last_token or 0) - (one.time_first_token or 0) >= 6
    assert one.time_last_token == moments[-1]


@pytest.mark.covers("generators: result-statistics")
def test_cached_tokens_and_pages_are_those_of_the_prompt() -> None:
    generator = make()
    text = "the quick fox jumps over it " * 3
    first = run(generator, job(text, 2))[-1]
    again = run(generator, job(text, 2))[-1]
    length = ids(text).shape[1]
    assert (first["cached_tokens"], first["cached_pages"]) == (0, 0)
    assert (again["cached_tokens"], again["cached_pages"]) == (length - 1, (length - 1) // 16)
    assert first["prompt_tokens"] == again["prompt_tokens"] == length


@pytest.mark.covers("generators: result-statistics")
def test_accepted_and_rejected_guesses_are_counted() -> None:
    """The draft model is right in all but every third place."""
    generator = speculate("model")
    draft: Any = generator.draft_model

    def sometimes_wrong(context: list[int]) -> int | None:
        right = int(generator.model.logits(np.array(context)).argmax())  # type: ignore[attr-defined]
        return right - 1 if len(context) % 3 == 0 else None

    draft.script = sometimes_wrong
    one: ExLlamaV2DynamicJob = job("hello there", 40)
    last = run(generator, one)[-1]
    calls = [q for batch, q, pre in draft.calls if not pre]
    assert last["accepted_draft_tokens"] > 8
    assert last["rejected_draft_tokens"] > 8
    evaluated = sum(q - 1 for _, q, pre in generator.model.calls if not pre)  # type: ignore[attr-defined]
    assert last["accepted_draft_tokens"] + last["rejected_draft_tokens"] == evaluated
    assert calls == [2] + [1] * (len(calls) - 1), "the first pass has the last id of the prompt and the first token"
