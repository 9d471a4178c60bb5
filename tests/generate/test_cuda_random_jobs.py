"""Random jobs on a GPU: their tokens depend neither on what is captured nor on the jobs that run with them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import FAMILIES, SIZES
from random_models import write_random_model

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl_core.convert import quantize_model
from exl_core.execution.environment import GRAPHS_VARIABLE, PROMPTS_VARIABLE
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.sampling import Settings
from exl_generate.testing import check_pages, drain, streamed_tokens

pytestmark = pytest.mark.cuda

FOLDER = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
DEVICE = "cuda:0"
FAMILY = "Qwen2MoeForCausalLM"
CACHES: list[type[ExLlamaV2CacheBase]] = [
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_Q4,
]
WAYS = {"captured": ("1", "1"), "prompts eager": ("1", "0"), "all eager": ("0", "0")}
"""Values of the variables of captured steps and of captured prompts."""
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 255)
COMMON = 80
"""Ids with which all prompts of a case that share their beginning begin."""


CASES = {"dense": 24, "mixture": 24, "float": 8, "float head": 8, "float mixture": 8}
"""Cases of each model."""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ExLlamaV2:
    folder = FOLDER
    if request.param.endswith("mixture"):
        folder = tmp_path_factory.mktemp("mixture")
        fields = {**SIZES, **FAMILIES[FAMILY], "architectures": [FAMILY], "vocab_size": 2048, "num_hidden_layers": 2}
        source = write_random_model(folder / "float", {**fields, "max_position_embeddings": 1024}, torch.bfloat16)
        if request.param == "mixture":
            quantize_model(source, folder / "quantized", bits=4.0)
        folder = folder / ("quantized" if request.param == "mixture" else "float")
    elif request.param != "dense":
        folder = FOLDER.parent / "pylib-4m-fp16"
        if request.param == "float head":
            source, folder = folder, tmp_path_factory.mktemp("gptq")
            quantize_model(source, folder, bits=4.0, format="gptq")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", DEVICE)
        made = ExLlamaV2(ExLlamaV2Config(folder))
        made.load()
    return made


@cache
def tokenizer() -> ExLlamaV2Tokenizer:
    return ExLlamaV2Tokenizer(ExLlamaV2Config(FOLDER))


def jobs_of(rng: random.Random, most: int) -> list[dict[str, Any]]:
    """The arguments of some jobs with prompts of at most `most` tokens."""
    common = [rng.randrange(3, 2000) for _ in range(COMMON)]
    found = []
    for seed in range(rng.randint(2, 9)):
        length = min(rng.choice(LENGTHS), most)
        shared = rng.choice((0, 0, length // 2, length))
        ids = [*common[:shared], *(rng.randrange(3, 2000) for _ in range(length - min(shared, COMMON)))]
        settings = Settings(
            temperature=rng.choice((0.0, 0.8, 1.3)),
            top_k=rng.choice((0, 1, 50)),
            top_p=rng.choice((0.0, 0.9)),
            tfs=rng.choice((0.0, 0.9)),
            typical=rng.choice((0.0, 0.9)),
            token_repetition_penalty=rng.choice((1.0, 1.1)),
        )
        prompt: Any = torch.tensor([ids])
        if rng.random() < 0.2:
            settings.cfg_scale = 1.5
            prompt = [prompt, prompt[:, length // 2 :]]
        more = {"banned_strings": ["e", " the"]} if rng.random() < 0.2 else {}
        arguments = {"gen_settings": settings, "seed": seed, "stop_conditions": [], **more}
        found.append({"input_ids": prompt, "max_new_tokens": rng.randint(1, 24), **arguments})
    return found


def said(
    model: ExLlamaV2, arguments: list[dict[str, Any]], kind: type[ExLlamaV2CacheBase], page: int, **options: Any
) -> list[list[int]]:
    """The tokens of each job, of all jobs in one generator with a new cache."""
    store = kind(model, max_seq_len=4096)
    made = ExLlamaV2DynamicGenerator(model, store, tokenizer(), page_size=page, **options)
    jobs = [ExLlamaV2DynamicJob(**one) for one in arguments]
    made.enqueue(jobs)
    results = drain(made)
    check_pages(made)
    return [streamed_tokens(results[job]) for job in jobs]


@pytest.mark.parametrize(
    ("model", "case"), [(name, case) for name, count in CASES.items() for case in range(count)], indirect=["model"]
)
def test_random_jobs_give_the_same_text_captured_or_not(
    model: ExLlamaV2, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(case)
    most = model.invariant_tokens() or max(LENGTHS)
    kind, page, batch = CACHES[case % len(CACHES)], rng.choice((16, 32, 256)), rng.randint(2, 8)
    drafts: dict[str, Any] = {"use_ngram_draft": True, "num_draft_tokens": 3} if rng.random() < 0.3 else {}
    options = {"max_batch_size": batch, "max_chunk_size": 512, **drafts}
    arguments = jobs_of(rng, most)
    found = {}
    for way, (graphs, prompts) in WAYS.items():
        monkeypatch.setenv(GRAPHS_VARIABLE, graphs)
        monkeypatch.setenv(PROMPTS_VARIABLE, prompts)
        model.decode.clear()
        steps = model.decode.steps
        found[way] = said(model, arguments, kind, page, **options)
        if prompts == "1":  # once more, with all that is captured
            found["captured before"] = said(model, arguments, kind, page, **options)
        assert (model.decode.steps > steps) == (graphs == "1"), model.decode.reason
    found["each alone"] = [said(model, [one], kind, page, **options)[0] for one in arguments]
    for way, tokens in found.items():
        assert tokens == found["all eager"], way
