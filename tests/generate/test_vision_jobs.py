"""Jobs with images on vision-language models: each token is the model's own, however the work was cut or shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl_core import ExLlamaV2Cache, ExLlamaV2Cache_Q6, ExLlamaV2MMEmbedding
from exl_generate import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl_generate.errors import RequestError
from exl_generate.testing import ScriptedTokenizer, check_pages, drain, streamed_tokens

pytest.importorskip("transformers")
from vision_models import END, FAMILIES, QWEN, START, VOCAB, Pair, make_pair, picture

pytestmark = [pytest.mark.covers("generators: embeddings-mrope", "generators: embeddings"), pytest.mark.sampled(5)]

PAGE = 16
GREEDY = ExLlamaV2Sampler.Settings.greedy()


def tokenizer_of(family: str) -> ScriptedTokenizer:
    """One character a token; the two framing tokens where the models have them."""
    pieces: list[str | bytes] = [chr(0x21 + i) for i in range(VOCAB - 3)]
    frame = ("<|vision_start|>", "<|vision_end|>") if family in QWEN else ("<start_of_image>", "<end_of_image>")
    pieces[START - 3], pieces[END - 3] = frame
    return ScriptedTokenizer(pieces)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = make_pair(request.param, tmp_path_factory.mktemp(request.param))
    return Pair(made.family, made.theirs, made.tower, made.ours, tokenizer_of(made.family))


def see(pair: Pair, width: int, height: int, seed: int = 3) -> ExLlamaV2MMEmbedding:
    return pair.tower.get_image_embeddings(pair.ours, pair.tokenizer, picture(width, height, seed=seed))


def generator_of(pair: Pair, chunk: int = 512, tokens: int = 1024, cache: Any = ExLlamaV2Cache, **kw: Any) -> Any:
    pages = cache(pair.ours, max_seq_len=tokens)
    return ExLlamaV2DynamicGenerator(pair.ours, pages, pair.tokenizer, page_size=PAGE, max_chunk_size=chunk, **kw)


def ask(pair: Pair, text: str, new: int, *embeddings: ExLlamaV2MMEmbedding, **kw: Any) -> ExLlamaV2DynamicJob:
    ids = pair.tokenizer.encode(text, embeddings=embeddings)
    return ExLlamaV2DynamicJob(ids, new, gen_settings=GREEDY, embeddings=list(embeddings), **kw)


def meant(pair: Pair, job: ExLlamaV2DynamicJob, new: int) -> list[int]:
    """Greedy continuation by whole forward passes over all there is, without a cache."""
    sequence = job.sequences[0]
    ids = torch.from_numpy(sequence.ids[: sequence.prompt_length].copy())[None]
    embeddings = [one for one in job.request.embeddings if isinstance(one, ExLlamaV2MMEmbedding)]
    for _ in range(new):
        logits = pair.ours.forward(ids, indexed_embeddings=embeddings, last_id_only=True)
        ids = torch.cat([ids, logits[:, -1, :VOCAB].argmax(-1, keepdim=True)], dim=1)
    found: list[int] = ids[0, sequence.prompt_length :].tolist()
    return found


def asks(pair: Pair) -> list[ExLlamaV2DynamicJob]:
    one, other = see(pair, 60, 24), see(pair, 37, 41, seed=4)
    return [
        ask(pair, f"abc{one.text_alias}and{other.text_alias}what?", 12, one, other),
        ask(pair, "no picture at all, only text that is a little longer".replace(" ", ""), 12),
        ask(pair, f"abc{one.text_alias}", 12, one),
        ask(pair, f"{other.text_alias}{other.text_alias}!", 12, other),
    ]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("chunk", [16, 48, 512])
@pytest.mark.parametrize("how", ["plain", "ngram", "draft"])
def test_in_any_company(pair: Pair, chunk: int, how: str) -> None:
    """Together, in chunks that end inside images where they may, cold and then warm, guessed ahead or not."""
    kw: dict[str, Any] = {"use_ngram_draft": True} if how == "ngram" else {}
    if how == "draft":
        kw = {"draft_model": pair.ours, "draft_cache": ExLlamaV2Cache(pair.ours, max_seq_len=1024)}
    generator = generator_of(pair, chunk, **kw)
    for _ in range(2):
        jobs = asks(pair)
        generator.enqueue(jobs)
        results = drain(generator)
        check_pages(generator)
        for job in jobs:
            assert streamed_tokens(results[job]) == meant(pair, job, 12)


@pytest.mark.covers("generators: embeddings")
def test_guesses_are_never_rows_of_pictures(pair: Pair) -> None:
    """The text before a picture is repeated, by the prompt or the model: the n-gram guess must not be the picture."""
    one = see(pair, 60, 24, seed=1)
    alias = one.text_alias
    texts = [f"qrs{alias}{letter * 3}{'qrs'[: 1 + i % 3]}" for i, letter in enumerate("abcdefgh")]
    texts += [f"{alias}ab{alias}ab", *(f"abc{chr(0x21 + i)}{alias}abc{chr(0x21 + i)}" for i in range(4))]
    generator = generator_of(pair, use_ngram_draft=True)
    jobs = [ask(pair, text, 12, one) for text in texts]
    generator.enqueue(jobs)
    results = drain(generator)
    check_pages(generator)
    for job in jobs:
        assert results[job][-1]["eos_reason"] == "max_new_tokens"
        assert streamed_tokens(results[job]) == meant(pair, job, 12)


def test_one_after_the_other_with_little_room(pair: Pair) -> None:
    """Jobs that give way to each other and resume after their images."""
    generator = generator_of(pair, tokens=PAGE * 8)
    jobs = [ask(pair, f"{'ab' * i}{(one := see(pair, 60, 24)).text_alias}", 40, one, max_rq_tokens=8) for i in (1, 2)]
    generator.enqueue(jobs)
    results = drain(generator)
    check_pages(generator)
    for job in jobs:
        assert streamed_tokens(results[job]) == meant(pair, job, 40)


def test_pages_are_shared_by_content(pair: Pair) -> None:
    generator = generator_of(pair)
    text = "qrstu"
    found = []
    for seed in (3, 3, 4, 3):
        one = see(pair, 60, 24, seed)
        job = ask(pair, f"{text}{one.text_alias}nowthen", 3, one)
        generator.enqueue(job)
        results = drain(generator)[job]
        assert streamed_tokens(results) == meant(pair, job, 3)
        found.append(results[-1]["cached_tokens"])
    length = len(text) + one.length + len("nowthen")
    assert found[0] == 0
    assert found[2] == len(text)  # no row of another image
    assert found[1] == found[3] == length - 1


@pytest.mark.parametrize("pair", QWEN, indirect=True)
def test_the_same_rows_in_another_shape_are_another_picture(pair: Pair) -> None:
    rows = torch.randn(16, pair.ours.config.hidden_size, generator=torch.Generator().manual_seed(5))
    generator = generator_of(pair)
    cached = []
    for grid in ((1, 8, 8), (1, 4, 16), (1, 16, 4), (4, 4, 4), (1, 8, 8)):
        one = ExLlamaV2MMEmbedding(pair.ours, rows, thw_grid=grid)
        job = ask(pair, f"abcdefgh{one.text_alias}ijkl", 6, one)
        generator.enqueue(job)
        results = drain(generator)[job]
        assert streamed_tokens(results) == meant(pair, job, 6)
        cached.append(results[-1]["cached_tokens"])
    assert cached == [0, 8, 8, 8, 27]


def test_rewinding_to_after_an_image(pair: Pair) -> None:
    """Rewound tokens are generated again at their own positions: logits are those of the current context."""
    one = see(pair, 37, 41)
    prompt = f"abc{one.text_alias}d"
    ids = pair.tokenizer.encode(prompt, embeddings=[one])
    settings = ExLlamaV2Sampler.Settings(temperature=2.0)

    def answer(chunk: int, **kw: Any) -> tuple[list[int], torch.Tensor]:
        generator = generator_of(pair, chunk)
        job = ExLlamaV2DynamicJob(ids, 16, gen_settings=settings, seed=5, embeddings=[one], return_logits=True, **kw)
        generator.enqueue(job)
        results = drain(generator)[job]
        check_pages(generator)
        return streamed_tokens(results), torch.cat([r["logits"] for r in results if "logits" in r], 1)[0, :, :VOCAB]

    free, _ = answer(512)
    banned = [pair.tokenizer.decode(torch.tensor([free[k : k + 2]]))[0] for k in (3, 8)]
    for chunk in (16, 512):
        tokens, logits = answer(chunk, banned_strings=banned)
        text = pair.tokenizer.decode(torch.tensor([tokens]))[0]
        assert tokens[:3] == free[:3]
        assert not any(one in text for one in banned)
        whole = pair.ours.forward(torch.cat([ids, torch.tensor([tokens])], 1), indexed_embeddings=[one])
        assert torch.equal(logits, whole[0, ids.shape[1] - 1 : -1, :VOCAB].to(logits.dtype))


def test_quantized_pages(pair: Pair) -> None:
    """The same law on a cache of six bits: together as alone."""
    alone = []
    for job in asks(pair):
        generator = generator_of(pair, cache=ExLlamaV2Cache_Q6)
        generator.enqueue(job)
        alone.append(streamed_tokens(drain(generator)[job]))
    generator = generator_of(pair, 16, cache=ExLlamaV2Cache_Q6)
    jobs = asks(pair)
    generator.enqueue(jobs)
    results = drain(generator)
    assert [streamed_tokens(results[job]) for job in jobs] == alone


def test_streaming_generator(pair: Pair) -> None:
    one = see(pair, 60, 24)
    job = ask(pair, f"abc{one.text_alias}def", 10, one)
    streaming = ExLlamaV2StreamingGenerator(pair.ours, ExLlamaV2Cache(pair.ours, max_seq_len=256), pair.tokenizer)
    for _ in range(2):
        ids = pair.tokenizer.encode(f"abc{one.text_alias}def", embeddings=[one])
        streaming.begin_stream_ex(ids, GREEDY, input_embeddings=[one])
        found: list[int] = []
        eos = False
        while len(found) < 10 and not eos:
            result = streaming.stream_ex()
            found += result["chunk_token_ids"].flatten().tolist()
            eos = result["eos"]
        assert found
        assert found[:10] == meant(pair, job, 10)[: len(found)]


def test_generate_with_images(pair: Pair) -> None:
    one = see(pair, 60, 24)
    generator = generator_of(pair)
    job = ask(pair, f"abc{one.text_alias}def", 10, one)
    wanted = pair.tokenizer.decode(torch.tensor([meant(pair, job, 10)]))[0]
    done = generator.generate(f"abc{one.text_alias}def", 10, gen_settings=GREEDY, embeddings=[one])
    assert done.endswith(wanted)


def test_base_generator_takes_rows_as_they_are(pair: Pair) -> None:
    """Bare rows lie on no grid: one position each."""
    base = ExLlamaV2BaseGenerator(pair.ours, ExLlamaV2Cache(pair.ours, max_seq_len=256), pair.tokenizer)
    rows = torch.randn(1, 5, pair.ours.config.hidden_size, generator=torch.Generator().manual_seed(5))
    text = base.generate_simple("ab{{EMBED_HERE}}cd", GREEDY, 8, input_embeddings=rows)
    assert text


def test_parts_of_an_image_are_refused(pair: Pair) -> None:
    one = see(pair, 60, 24)
    whole = pair.tokenizer.encode(f"abc{one.text_alias}def", embeddings=[one])
    for ids in (whole[:, 8:], whole[:, :-8], torch.cat([whole[:, :9], whole[:, 12:]], 1)):
        with pytest.raises(RequestError, match=r"part of the image|follow each other"):
            ExLlamaV2DynamicJob(ids, 4, embeddings=[one])
    if pair.family == "Gemma3":
        with pytest.raises(RequestError, match="let a token follow"):
            ExLlamaV2DynamicJob(whole[:, :-4], 4, embeddings=[one])
