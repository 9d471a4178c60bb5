"""Every feature that benchmarks/bench_features.py measures has captured decode steps and is sampled on the GPU.

Without a GPU: the stand-ins of `captured_on_cpu` record and replay steps, and the sampler's rows are looked at. Steps
with adapters are not recorded there, so the test looks at what they ask of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_on_cpu import captured_on_cpu
from feature_cases import FEATURES, Feature, Parts

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
)
from exl_core.execution.forward_pass import ForwardPass, needs_modules
from exl_core.execution.select import Way, select
from exl_generate import ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exl_generate.bundled import default_model_dir, draft_model_dir
from exl_generate.testing import AsAsked
from exl_kernels import _native
from exl_kernels import sampling as kernels
from exl_kernels.selection import DECODE_TOKENS, MOST_REPORTED, PACKED_ROWS

CACHES = {"fp16": ExLlamaV2Cache, "q8": ExLlamaV2Cache_Q8, "q4": ExLlamaV2Cache_Q4}
STEPS = 4
CASES = sorted({(name, max(batch, feature.least_batch)) for name, feature in FEATURES.items() for batch in (1, 4)})
# The stand-ins know no padding, and a draft model's first pass has the jobs whose last guesses held apart from others.
WITHOUT_PADDING = [(name, 2 if (name, batch) == ("draft-model", 4) else batch) for name, batch in CASES]


@cache
def loaded(folder: Path, device: str) -> ExLlamaV2:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL_DEVICE", device)
        model = ExLlamaV2(ExLlamaV2Config(folder))
        model.load()
    return model


class Drive:
    """Jobs of a feature in a generator of the bundled models."""

    def __init__(self, feature: Feature, batch: int, scratch: Path, device: str) -> None:
        main, draft = loaded(default_model_dir(), device), loaded(draft_model_dir(), device)
        self.model = draft if feature.model == "draft" else main
        tokenizer = ExLlamaV2Tokenizer(main.config)
        sequences = batch * feature.jobs * feature.sequences
        tokens = sequences * 256
        more: dict[str, Any] = {"num_draft_tokens": feature.drafts} if feature.drafts else {}
        if feature.drafter == "model":
            more |= {"draft_model": draft, "draft_cache": ExLlamaV2Cache(draft, max_seq_len=tokens)}
        cache = CACHES[feature.cache](self.model, max_seq_len=tokens)
        if feature.drafter == "ngram":
            more["use_ngram_draft"] = True
        self.generator = ExLlamaV2DynamicGenerator(self.model, cache, tokenizer, max_batch_size=sequences, **more)
        if feature.drafts:
            self.generator.drafter.length = AsAsked(feature.drafts)
        self.models = [self.model, draft] if feature.drafter == "model" else [self.model]
        for model in self.models:
            model.decode.clear()
        parts = Parts(main, tokenizer, scratch)
        self.jobs = []
        for index in range(batch * feature.jobs):
            # Texts that repeat themselves, so that the last n-gram is found in them.
            ids: Any = torch.tensor([[5, 6, 7, 8 + index % 50] * 4])
            if feature.sequences == 2:
                ids = [ids, ids[:, ::2]]
            arguments = {"stop_conditions": [], **feature.job(parts, index)}
            self.jobs.append(ExLlamaV2DynamicJob(ids, 8 * (1 + feature.drafts) + 8, seed=index, **arguments))
        self.generator.enqueue(self.jobs)
        while min(job.new_tokens for job in self.jobs) < 1:
            self.go()

    def go(self) -> None:
        for result in self.generator.iterate():
            assert not result.get("eos"), result.get("exception", result)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[kernels.Row]:
    """The rows that are sampled."""
    seen: list[kernels.Row] = []
    launch = kernels.launch

    def watched(rows: Any, into: Any = None) -> kernels.LaunchedRows:
        seen.extend(rows)
        return launch(rows, into)

    monkeypatch.setattr(kernels, "launch", watched)
    return seen


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ForwardPass, Way]]:
    """The forward passes that models are asked for, and the ways they run."""
    seen: list[tuple[ForwardPass, Way]] = []

    def watched(model: Any, asked: ForwardPass, **given: Any) -> Any:
        selected = select(model, asked, **given)
        seen.append((asked, selected.way))
        return selected

    monkeypatch.setattr("exl_core.execution.forward.select", watched)
    return seen


@pytest.fixture(autouse=True)
def without_captured_steps() -> Iterator[None]:
    yield
    for folder in (default_model_dir(), draft_model_dir()):
        loaded(folder, "cpu").decode.clear()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "batch"), WITHOUT_PADDING)
def test_no_feature_leaves_the_captured_path(
    name: str,
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[kernels.Row],
    passes: list[tuple[ForwardPass, Way]],
) -> None:
    feature = FEATURES[name]
    if name in ("schema", "regex"):
        pytest.importorskip("llguidance", reason="extra `grammar`")
    adapted = name.startswith("lora")
    if not adapted:
        captured_on_cpu(monkeypatch)
    drive = Drive(feature, batch, tmp_path, "cpu")
    rows.clear()
    passes.clear()
    before = [model.decode.steps for model in drive.models]
    for _ in range(STEPS):
        drive.go()
    assert rows
    assert passes
    for asked, way in passes:
        assert way == ("eager" if adapted else "captured")
        count, q_len = asked.ids.shape
        assert needs_modules(asked) is None
        assert asked.capturable
        assert q_len <= 1 + feature.drafts <= DECODE_TOKENS
        assert count * q_len <= PACKED_ROWS
    assert feature.drafts == 0 or any(asked.ids.shape[1] == 1 + feature.drafts for asked, _ in passes), (
        "nothing is drafted"
    )
    if not adapted:
        taken = [model.decode.steps - was for model, was in zip(drive.models, before, strict=True)]
        assert sum(taken) == len(passes)
        assert all(count >= STEPS for count in taken)
        assert [model.decode.reason for model in drive.models] == [None] * len(drive.models)
    assert all(row.top_n <= MOST_REPORTED for row in rows), "others are sampled on the CPU"


@pytest.mark.cuda
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_no_feature_leaves_the_captured_path_on_a_gpu(
    name: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = FEATURES[name]
    if name in ("schema", "regex"):
        pytest.importorskip("llguidance", reason="extra `grammar`")
    sampled_on_cpu: list[int] = []
    drive = Drive(feature, batch, tmp_path, "cuda:0")
    sample = _native.sample_rows

    def counted(requests: Any) -> Any:
        sampled_on_cpu.append(len(requests))
        return sample(requests)

    monkeypatch.setattr(_native, "sample_rows", counted)
    before = [model.decode.steps for model in drive.models]
    for _ in range(STEPS):
        drive.go()
    for model, was in zip(drive.models, before, strict=True):
        assert model.decode.steps - was >= STEPS, model.decode.reason
        assert model.decode.reason is None
    assert sampled_on_cpu == []
    drive.generator.clear_queue()
