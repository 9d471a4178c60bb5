"""Masks of a batch's grammars are computed in one task while results are delivered: no token changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from captured_on_cpu import captured_on_cpu
from internals import prelaunch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2SelectFilter, prefetch_together
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exl_generate.bundled import default_model_dir
from exl_generate.testing import check_pages, drain, streamed_tokens

pytest.importorskip("llguidance", reason="extra `grammar`")
from exl_filters.grammar import ExLlamaV2GrammarFilter

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
NEW = 20
KINDS = ["schema", "regex", "schema", "plain", "regex", "select", "regex"]


@cache
def loaded() -> tuple[ExLlamaV2, ExLlamaV2Tokenizer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", "cpu")
        model = ExLlamaV2(ExLlamaV2Config(default_model_dir()))
        model.load()
    return model, ExLlamaV2Tokenizer(model.config)


@cache
def template(kind: str) -> Any:
    _, tokenizer = loaded()
    if kind == "schema":
        return ExLlamaV2GrammarFilter(None, tokenizer, json_schema=SCHEMA)
    if kind == "regex":
        return ExLlamaV2GrammarFilter(None, tokenizer, regex="([a-z]{1,7} ){3,30}")
    return ExLlamaV2SelectFilter(None, tokenizer, ["yes and more of it", "no and nothing else"])


@pytest.fixture(params=[False, True], ids=["after", "prelaunched"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        captured_on_cpu(monkeypatch)
    loaded()[0].decode.clear()
    return bool(request.param)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stacks took part in each call; each mask is worth a thread."""
    counts: list[int] = []

    def counted(stacks: Any, pool: Any) -> int:
        counts.append(prefetch_together(stacks, pool))
        return counts[-1]

    monkeypatch.setattr("exl_filters.host.WORTH_A_THREAD", 0.0)
    monkeypatch.setattr("exl_generate.dynamic.engine.prefetch_together", counted)
    return counts


def generator_of(early: bool) -> ExLlamaV2DynamicGenerator:
    model, tokenizer = loaded()
    made = ExLlamaV2DynamicGenerator(
        model, ExLlamaV2Cache(model, max_seq_len=2048), tokenizer, max_batch_size=8, page_size=16
    )
    prelaunch(made, early)
    return made


def job(kind: str, seed: int) -> ExLlamaV2DynamicJob:
    _, tokenizer = loaded()
    style = ExLlamaV2Sampler.Settings(temperature=1.0, top_k=50, top_p=0.9)
    filters = None if kind == "plain" else [template(kind)]
    prompt = tokenizer.encode(f"Tell me about number {seed}:")
    return ExLlamaV2DynamicJob(
        prompt, NEW, gen_settings=style, seed=seed, filters=filters, stop_conditions=[int(tokenizer.eos_token_id or 0)]
    )


def alone(kind: str, seed: int, early: bool) -> list[int]:
    generator, one = generator_of(early), job(kind, seed)
    generator.enqueue(one)
    return streamed_tokens(drain(generator)[one])


def test_tokens_are_those_of_each_job_alone(early: bool, together: list[int]) -> None:
    expected = [alone(kind, seed, early) for seed, kind in enumerate(KINDS)]
    assert not any(together), "one job has nobody to share a task with"
    generator, jobs = generator_of(early), [job(kind, seed) for seed, kind in enumerate(KINDS)]
    generator.enqueue(jobs)
    results = drain(generator)
    assert [streamed_tokens(results[one]) for one in jobs] == expected
    assert max(together) == 5, "the grammars, not the other filter"
    assert sum(together) > NEW
    check_pages(generator)


def test_a_job_ends_while_its_mask_is_computed(early: bool, together: list[int]) -> None:
    expected = [alone("regex", seed, early) for seed in range(3)]
    generator, jobs = generator_of(early), [job("regex", seed) for seed in range(3)]
    generator.enqueue(jobs)
    results: dict[Any, list[Any]] = {one: [] for one in jobs}
    for _ in range(400):
        for result in generator.iterate():
            results[result["job"]].append(result)
        if not jobs[1].is_finished and jobs[1].new_tokens == 5:
            assert together[-1] == 3, "the masks of all are on the way"
            generator.cancel(jobs[1])
        if not generator.num_remaining_jobs():
            break
    assert not generator.num_remaining_jobs()
    assert [streamed_tokens(results[one]) for one in (jobs[0], jobs[2])] == [expected[0], expected[2]]
    assert streamed_tokens(results[jobs[1]]) == expected[1][:5]
    assert results[jobs[1]][-1]["eos_reason"] == "cancelled"
    check_pages(generator)


def test_a_failing_task_ends_no_job(early: bool, together: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks are then computed one by one."""
    expected = [alone("schema", seed, early) for seed in range(2)]

    def broken() -> None:
        raise MemoryError("no room for the masks")

    monkeypatch.setattr("exl_filters.together.executor", broken)
    generator, jobs = generator_of(early), [job("schema", seed) for seed in range(2)]
    generator.enqueue(jobs)
    results = drain(generator)
    assert sum(together) > 2
    assert [streamed_tokens(results[one]) for one in jobs] == expected
