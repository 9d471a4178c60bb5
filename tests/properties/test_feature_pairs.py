"""Every pair of generation features together on the bundled draft model: the output is the job's own, whatever else
runs, in what chunks, and with what guesses."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import exl_core
from exl_core import ExLlamaV2, ExLlamaV2Config, ExLlamaV2Lora, ExLlamaV2MMEmbedding, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2Filter
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import draft_model_dir
from exl_generate.testing import check_pages, streamed_text, streamed_tokens
from exl_kernels.device import set_row_invariant

pytestmark = pytest.mark.sampled(3)

CACHES = {"Q4": "Cache_Q4", "Q6": "Cache_Q6", "Q8": "Cache_Q8", "FP8": "Cache_8bit"}
OTHERS = ["lora", "draft", "ngram", "filter", "bans", "cfg", "healing", "embeddings", "cancel", "probs"]
PAIRS = [pair for pair in itertools.combinations([*CACHES, *OTHERS], 2) if not set(pair) <= set(CACHES)]
PAIRS.remove(("draft", "ngram"))  # one or the other, by the constructor's rule
BANS = ["the", "and", "was"]
Settings = ExLlamaV2Sampler.Settings


#: the pairs whose parts meet on the device; what a pair does to the scheduling, the CPU's matrix shows
ON_GPU = [pair for pair in PAIRS if {"draft", "ngram", "Q4"} & set(pair)]


@cache
def model_of(which: int, device: str) -> ExLlamaV2:
    """Two loads of the same folder: the second guesses for the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", device)
        model = ExLlamaV2(ExLlamaV2Config(str(draft_model_dir())))
        model.load()
    return model


@cache
def tokenizer() -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(ExLlamaV2Config(str(draft_model_dir())))


@cache
def adapter(device: str) -> ExLlamaV2Lora:
    """A random adapter of rank 4 on three kinds of matrices."""
    model, generator = model_of(0, device), torch.Generator().manual_seed(1)
    config = model.config
    tensors = {}
    for layer, (name, wide) in itertools.product(
        range(config.num_hidden_layers), (("self_attn.q_proj", 0), ("self_attn.o_proj", 0), ("mlp.up_proj", 1))
    ):
        key = f"base_model.model.model.layers.{layer}.{name}"
        out = config.intermediate_size if wide else config.hidden_size
        tensors[f"{key}.lora_A.weight"] = torch.randn(4, config.hidden_size, generator=generator) * 0.3
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = ["q_proj", "o_proj", "up_proj"]
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets})
        )
        return ExLlamaV2Lora.from_directory(model, str(folder))


@cache
def picture(device: str) -> ExLlamaV2MMEmbedding:
    model = model_of(0, device)
    rows = torch.randn(11, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    return ExLlamaV2MMEmbedding(model, rows * 0.1)


class Even(ExLlamaV2Filter):
    """Even ids only."""

    def __init__(self) -> None:
        super().__init__(None, tokenizer())

    def clone(self, c: Any = None) -> Even:
        return Even()

    def begin(self, prefix_str: Any = "") -> None: ...

    def feed(self, token: Any) -> None: ...

    def next(self) -> tuple[set[int], set[int]]:
        return set(range(4, tokenizer().get_vocab_size(), 2)), set()


@dataclass
class Case:
    """A request with some features, as data."""

    features: frozenset[str]
    seed: int
    new: int
    text: str
    style: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"

    def job(self, **kw: Any) -> ExLlamaV2DynamicJob:
        has = self.features.__contains__
        pictures = [picture(self.device)] if has("embeddings") else []
        text = self.text.replace(" ", f" {pictures[0].text_alias} ", 1) if pictures else self.text
        rows = [tokenizer().encode(text, add_bos=True, embeddings=pictures)]
        if has("cfg"):
            rows.append(tokenizer().encode("No, not", add_bos=True))
        return ExLlamaV2DynamicJob(
            rows,
            self.new,
            gen_settings=Settings(cfg_scale=1.4 if has("cfg") else None, **self.style),
            seed=self.seed,
            return_probs=has("probs"),
            return_logits=has("probs"),
            return_top_tokens=3 * has("probs"),
            filters=[Even()] if has("filter") else None,
            token_healing=has("healing"),
            banned_strings=BANS if has("bans") else None,
            loras=[adapter(self.device)] if has("lora") else [],
            embeddings=pictures,
            **kw,
        )

    def generator(self, plain: bool) -> ExLlamaV2DynamicGenerator:
        """`plain`: whole prompts at once, no guesses."""
        kind = next((CACHES[f] for f in self.features if f in CACHES), "Cache")
        make = getattr(exl_core, f"ExLlamaV2{kind}")
        kw: dict[str, Any] = {}
        if not plain and "draft" in self.features:
            other = model_of(1, self.device)
            kw = {"draft_model": other, "draft_cache": make(other, max_seq_len=768)}
        if not plain and "ngram" in self.features:
            kw = {"use_ngram_draft": True}
        main = model_of(0, self.device)
        chunk = 512 if plain else 32
        store = make(main, max_seq_len=768)
        return ExLlamaV2DynamicGenerator(main, store, tokenizer(), page_size=16, max_chunk_size=chunk, **kw)


def said(results: list[dict[str, Any]]) -> dict[str, Any]:
    last = results[-1]
    found: dict[str, Any] = {k: last.get(k) for k in ("eos_reason", "full_completion", "new_tokens")}
    found["tokens"], found["text"] = streamed_tokens(results), streamed_text(results)
    for key in ("token_probs", "logits", "top_k_tokens", "top_k_probs"):
        found[key] = b"".join(r[key].contiguous().numpy().tobytes() for r in results if key in r)
    return found


def play(
    generator: ExLlamaV2DynamicGenerator, jobs: list[ExLlamaV2DynamicJob], cancel: list[ExLlamaV2DynamicJob], at: int
) -> dict[ExLlamaV2DynamicJob, list[dict[str, Any]]]:
    results: dict[ExLlamaV2DynamicJob, list[dict[str, Any]]] = {job: [] for job in jobs}
    generator.enqueue(jobs)
    for round_ in range(500):
        if round_ == at:
            for job in cancel:
                generator.cancel(job)
        for result in generator.iterate():
            results[result["job"]].append(result)
        check_pages(generator)
        if not generator.num_remaining_jobs():
            break
    for result in generator.iterate():
        results[result["job"]].append(result)
    assert generator.page_table.unreferenced == generator.max_pages
    return results


cases = st.builds(
    Case,
    features=st.just(frozenset[str]()),
    seed=st.integers(0, 5),
    new=st.integers(1, 20),
    text=st.sampled_from(["Once upon a ti", "One day, a small fox who lived in the woods was very hun", "A b"]),
    style=st.sampled_from(
        [{"temperature": 0.0}, {}, {"temperature": 1.2, "top_k": 0, "top_p": 0.95, "dry_multiplier": 0.8}]
    ),
)


@pytest.mark.covers(
    "generators: page-names",
    "generators: cfg-pairs",
    "generators: draft-model",
    "generators: ngram-drafts",
    "generators: embeddings",
    "generators: adapters-per-job",
    "generators: random-numbers",
    "filters: rewind",
    "filters: speculation",
    "filters: cfg-pairs",
)
@pytest.mark.parametrize("pair", PAIRS, ids=["+".join(pair) for pair in PAIRS])
@examples(4, 1)
@given(case=cases, cancel_at=st.integers(0, 8), share=st.sampled_from([None, 3]))
def test_pair(pair: tuple[str, str], case: Case, cancel_at: int, share: int | None) -> None:
    check_pair(pair, case, cancel_at, share)


@pytest.fixture(scope="module")
def strict() -> Iterator[None]:
    """Matmuls of many rows on the GPU bitwise identical to those of one, so that chunks and cache hits do not show."""
    set_row_invariant(True)
    yield
    set_row_invariant(False)


@pytest.mark.cuda
@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("pair", ON_GPU, ids=["+".join(pair) for pair in ON_GPU])
@settings(max_examples=2, deadline=None)
@given(case=cases, cancel_at=st.integers(0, 8), share=st.sampled_from([None, 3]))
def test_pair_on_a_gpu(pair: tuple[str, str], case: Case, cancel_at: int, share: int | None) -> None:
    case.device = "cuda:0"
    check_pair(pair, case, cancel_at, share)


def check_pair(pair: tuple[str, str], case: Case, cancel_at: int, share: int | None) -> None:
    """Alone without guesses, then in company, cut into small chunks, resumed, and again from a warm cache."""
    case.features = frozenset(pair)
    mine = case.job()
    alone = said(play(case.generator(plain=True), [mine], [], 0)[mine])
    assert alone["eos_reason"] not in ("error", "filter_error"), "a pair that fails alike everywhere shows nothing"

    generator = case.generator(plain=False)
    plain = ExLlamaV2DynamicJob(tokenizer().encode(case.text, add_bos=True), 12, seed=1)
    twin, again = case.job(max_rq_tokens=share), case.job()
    adapted = ExLlamaV2DynamicJob(tokenizer().encode(case.text), 9, seed=2, loras=[adapter(case.device)])
    company = [plain, twin, adapted, again]
    results = play(generator, company, [again] if "cancel" in pair else [], cancel_at)
    assert said(results[twin]) == alone
    if "cancel" in pair:
        assert results[again][-1]["eos_reason"] in ("cancelled", alone["eos_reason"])
    else:
        assert said(results[again]) == alone
    warm = case.job()
    assert said(play(generator, [warm], [], 0)[warm]) == alone

    text = alone["text"].lower()
    if "bans" in pair:
        assert not any(ban in text for ban in BANS)
    if "filter" in pair:
        assert all(token % 2 == 0 for token in alone["tokens"][int("healing" in pair) :])


@pytest.mark.parametrize("feature", ["lora", "filter", "bans", "cfg", "embeddings", "Q4"])
def test_each_feature_shows(feature: str) -> None:
    """So that the pairs above cannot agree by doing nothing."""
    logits = feature == "Q4"
    texts = []
    for features in (frozenset({"probs"} if logits else ()), frozenset({feature, "probs"} if logits else {feature})):
        case = Case(features, seed=3, new=20, text="Once upon a time, there", style={"temperature": 0.0})
        job = case.job()
        found = said(play(case.generator(plain=True), [job], [], 0)[job])
        texts.append(found["logits"] if logits else found["tokens"])
    assert texts[0] != texts[1]
