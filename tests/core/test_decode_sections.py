"""Captured steps of models that are split by layers, without a GPU: sections and what they hand over."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from captured_on_cpu import Stream, captured_on_cpu
from random_models import loaded_over
from test_decode_plan import FAMILIES, planned_on_cpu

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_Q4, ExLlamaV2Config, PagedParams
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.sections import sections_of
from exl_core.execution.step_inputs import STAGES
from exl_core.placement import Placement

FOLDER = Path(__file__).parent.parent / "golden" / "data" / "pylib-4m-exl2-4.5"
PAGE = 16
CPU = torch.device("cpu")


def table(batch: int, width: int = 4) -> torch.Tensor:
    return torch.arange(batch * width, dtype=torch.int32).view(batch, width)


def params(lengths: list[int]) -> PagedParams:
    return PagedParams(len(lengths), table(len(lengths)), torch.tensor(lengths, dtype=torch.int32), max(lengths), PAGE)


def bundled() -> ExLlamaV2:
    return ExLlamaV2(ExLlamaV2Config(FOLDER))


def split(*others: tuple[int, str]) -> ExLlamaV2:
    return loaded_over(bundled(), "cpu:0", *others)


def test_sections_are_runs_of_one_device() -> None:
    names = ["cpu:1", "cpu:1", "cpu:0", "cpu:1", "cpu:1"]
    found = [(section.begin, section.end, section.name) for section in sections_of(Placement(names))]
    assert found == [(0, 2, "cpu:1"), (2, 3, "cpu:0"), (3, 5, "cpu:1")]
    assert [(s.begin, s.end) for s in sections_of(Placement(["cpu"] * 4))] == [(0, 4)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("joined", ["0", "64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sections_in_a_chain_are_the_whole_model(
    family: str, joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut before any module, and in three: logits and stored keys are bitwise those of the launches of the whole."""
    model, plan = planned_on_cpu(family, joined, tmp_path, monkeypatch)
    count = len(model.modules)
    for batch, q_len in ((1, 1), (5, 1), (2, 4)):
        ids = torch.randint(0, 96, (batch, 20 + q_len), generator=torch.Generator().manual_seed(batch))
        begin = PagedParams(batch, table(batch, 2), torch.zeros(batch, dtype=torch.int32), 0, PAGE, 20)
        after = PagedParams(batch, table(batch, 2), torch.full((batch,), 20, dtype=torch.int32), 20, PAGE, q_len)
        prompt = ExLlamaV2Cache(model, max_seq_len=PAGE * 2 * batch)
        model.forward_chunk(ids[:, :20], prompt, attn_params=begin, preprocess_only=True)
        found = []
        for borders in ([], *([at] for at in range(1, count)), [2, count - 2]):
            cache = ExLlamaV2Cache(model, max_seq_len=PAGE * 2 * batch, copy_from=prompt)
            step = build_step(model, Chunk(cache, after, batch, q_len), CPU)
            logits = torch.empty(batch * q_len, model.config.padded_vocab_size)
            x = ids[:, 20:].reshape(-1)
            places = [0, *borders, count]
            for start, end in pairwise(places):
                x = plan.section(start, end).run(x, step, logits if end == count else None)
            assert x is logits
            found.append((logits, *cache.all_tensors()))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("held", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize(
    "others",
    [[(3, "cpu:1")], [(4, "cpu:1")], [(-1, "cpu:1")], [(2, "cpu:1"), (5, "cpu:2")], [(3, "cpu:1"), (6, "cpu:0")]],
    ids=["middle", "inside a layer", "head alone", "three devices", "there and back"],
)
def test_a_split_step_is_that_of_one_device(
    others: list[tuple[int, str]], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps are queued than there are copies of the inputs, and run when somebody waits."""
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    whole = bundled()
    whole.load()
    others = [(at % len(whole.modules), name) for at, name in others]
    model = split(*others)
    assert len(sections_of(model.placement)) == len(others) + 1
    caches = [ExLlamaV2Cache_Q4(m, max_seq_len=8 * PAGE) for m in (whole, model)]
    steps = 3 * STAGES
    rows = torch.randint(0, whole.config.vocab_size, (2, steps), generator=torch.Generator().manual_seed(2))
    want = [
        whole.forward_chunk(rows[:, at : at + 1], caches[0], attn_params=params([at, 20 + at]))["logits"].clone()
        for at in range(steps)
    ]
    captured_on_cpu(monkeypatch)
    monkeypatch.setattr(Stream, "held", held)
    seen: list[torch.Tensor] = []
    for at in range(steps):
        step = model.prelaunchable_step(1, caches[1], params([at, 20 + at]))
        assert step is not None, model.decode.reason
        logits = step.run(rows[:, at : at + 1])
        assert logits is not None
        Stream.add(partial(lambda logits: seen.append(logits.clone()), logits))
    assert held == (len(seen) < steps)
    Stream.run()
    assert model.decode.steps == steps
    for at in range(steps):
        assert torch.equal(seen[at], want[at]), at
    for a, b in zip(*(cache.all_tensors() for cache in caches), strict=True):
        assert torch.equal(a, b)
