"""Embeddings in prompts: found by their ids, cached by their content, refused when they are missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from exl_generate import ExLlamaV2BaseGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exl_generate.errors import RequestError
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedEmbedding, ScriptedModel, check_pages, drain
from exl_generate.testing import streamed_tokens as tokens_of
from exl_generate.testing.small import TOKENIZER, VOCAB, ids, make, run, speculate

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()


def picture(*values: int) -> ScriptedEmbedding:
    return ScriptedEmbedding(values or tuple(range(100, 130)))


def ask(text: str, new: int, *embeddings: ScriptedEmbedding, **kw: Any) -> ExLlamaV2DynamicJob:
    prompt = TOKENIZER.encode(text, embeddings=embeddings)
    return ExLlamaV2DynamicJob(prompt, new, gen_settings=GREEDY, embeddings=list(embeddings), **kw)


def meant(generator: Any, one: ExLlamaV2DynamicJob, new: int) -> list[int]:
    """Greedy continuation by the model's definition, rows of embeddings as what they stand for."""
    context = [int(i) for i in one.sequence.ids[: one.sequence.prompt_length]]
    for e in one.request.embeddings:
        for k, i in enumerate(range(e.first_index, e.first_index + e.length)):
            context = [10_000 + int(e.embeddings[k, 0]) if c == i else c for c in context]
    for _ in range(new):
        context.append(int(generator.model.logits(np.array(context)).argmax()))
    return context[len(context) - new :]


@pytest.mark.covers("generators: embeddings")
def test_rows_replace_the_alias() -> None:
    generator = make(cache_tokens=1024)
    one, other = picture(), picture(7, 8, 9)
    jobs = [
        ask(f"see {one.text_alias} and {other.text_alias}.", 10, one, other),
        ask(f"{one.text_alias}{one.text_alias}", 10, one),
        ask("no picture", 10),
        ask(f"ends in {other.text_alias}", 10, other),
    ]
    generator.enqueue(jobs)
    results = drain(generator)
    check_pages(generator)
    for job in jobs:
        assert tokens_of(results[job]) == meant(generator, job, 10)


@pytest.mark.covers("generators: embeddings", "generators: page-names")
def test_the_same_picture_under_other_ids_is_found_in_the_cache() -> None:
    generator = make()
    for values, cached in (((), 0), ((), 37), (tuple(range(101, 131)), 4), ((), 37)):
        one = picture(*values)
        job = ask(f"see {one.text_alias} now", 3, one)
        results = run(generator, job)
        assert results[-1]["cached_tokens"] == cached
        assert tokens_of(results) == meant(generator, job, 3)


@pytest.mark.parametrize("how", ["ngram", "model"])
@pytest.mark.covers("generators: embeddings")
def test_guesses_with_embeddings_change_nothing(how: str) -> None:
    generator = speculate(how)
    one = picture()
    jobs = [ask(f"see {one.text_alias}{tail}", 25, one) for tail in ("", "abc")]
    generator.enqueue(jobs)
    results = drain(generator)
    for job in jobs:
        assert tokens_of(results[job]) == meant(generator, job, 25)


def test_a_prompt_that_ends_in_an_embedding_is_not_healed() -> None:
    one = picture()
    generator = make()
    job = ask(f"see {one.text_alias}", 4, one, token_healing=True)
    assert job.request.healing == 0
    assert tokens_of(run(generator, job)) == meant(generator, job, 4)


@pytest.mark.covers("generators: generate-prompts", "generators: embeddings")
def test_generate_takes_a_list_per_prompt() -> None:
    generator = make()
    one, other = picture(1, 2), picture(3)
    prompts = [f"a{one.text_alias}b", "plain", f"{other.text_alias}"]
    texts = generator.generate(prompts, 6, gen_settings=GREEDY, embeddings=[[one], None, [other]])
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.startswith(prompt)
    single = generator.generate(prompts[0], 6, gen_settings=GREEDY, embeddings=[one])
    assert single == texts[0]


def test_missing_and_foreign_embeddings_are_refused() -> None:
    one = picture()
    prompt = TOKENIZER.encode(f"see {one.text_alias}", embeddings=[one])
    with pytest.raises(RequestError, match="not in the job's embeddings"):
        ExLlamaV2DynamicJob(prompt, 4)
    with pytest.raises(RequestError, match="pass a list"):
        ExLlamaV2DynamicJob(prompt, 4, embeddings=one)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="Tensor"):
        ExLlamaV2DynamicJob(prompt, 4, embeddings=[torch.zeros(3, 8)])  # type: ignore[list-item]
    twin = picture()
    twin.first_index = one.first_index + 1
    with pytest.raises(RequestError, match="share ids"):
        ExLlamaV2DynamicJob(prompt, 4, embeddings=[one, twin])
    with pytest.raises(RequestError, match="token id"):
        make().enqueue(ExLlamaV2DynamicJob(torch.tensor([[3, VOCAB]]), 2))


# ---- base and streaming generator ----


def parts() -> tuple[ScriptedModel, ScriptedCache, Any]:
    model = ScriptedModel(ScriptedConfig(vocab_size=VOCAB, max_seq_len=256))
    return model, ScriptedCache(model, max_seq_len=256), TOKENIZER


@pytest.mark.covers("generators: base-embeddings")
def test_base_generator_puts_rows_at_the_marker() -> None:
    model, cache, tokenizer = parts()
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    rows = torch.zeros(2, 3, 8)
    rows[0, :, 0], rows[1, :, 0] = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([8.0, 9.0, 1.0])
    prompts = ["a b \t{{EMBED_HERE}}  c", "a{{EMBED_HERE}}"]
    texts = base.generate_simple(prompts, GREEDY, 6, input_embeddings=rows, completion_only=True)
    contexts = [
        [*ids("a b")[0].tolist(), 10_005, 10_006, 10_007, *ids("c")[0].tolist()],
        [*ids("a")[0].tolist(), 10_008, 10_009, 10_001],
    ]
    for text, context in zip(texts, contexts, strict=True):
        start = len(context)
        for _ in range(6):
            context.append(int(model.logits(np.array(context)).argmax()))
        table = tokenizer.get_id_to_bytes_list()
        assert text == b"".join(table[i] for i in context[start:]).decode(errors="replace")
    assert base.sequence_ids is not None
    assert base.sequence_ids.max() < VOCAB, "rows are shown as padding"
    for prompt in ("no marker", "{{EMBED_HERE}}{{EMBED_HERE}}"):
        with pytest.raises(RequestError, match="marks one place"):
            base.generate_simple(prompt, GREEDY, 3, input_embeddings=rows[:1])


@pytest.mark.covers("generators: stream-begin")
def test_streaming_generator_takes_embeddings() -> None:
    model, cache, tokenizer = parts()
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    one = picture(4, 5)
    prompt = tokenizer.encode(f"x{one.text_alias}y", embeddings=[one])
    stream.begin_stream_ex(prompt, GREEDY, input_embeddings=[one])
    got = [int(i) for _ in range(5) for i in stream.stream_ex()["chunk_token_ids"][0]]
    context = [*ids("x")[0].tolist(), 10_004, 10_005, *ids("y")[0].tolist()]
    for _ in range(5):
        context.append(int(model.logits(np.array(context)).argmax()))
    assert got == context[-5:]
