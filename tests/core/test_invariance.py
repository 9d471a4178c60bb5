"""Logits are bitwise identical however a sequence is cut, batched, placed and threaded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    PagedParams,
)
from exl_kernels import threads

LENGTH = 48
PAGE = 16
CACHES = [ExLlamaV2Cache, ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8]

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
some = examples(15, 3, list(HealthCheck))


@pytest.fixture(scope="module", params=["exact", "int8"])
def model(request: pytest.FixtureRequest, lab: Any) -> ExLlamaV2:
    folder = lab.write(
        kind="exl2",
        architectures=["MistralForCausalLM"],
        sliding_window=21,
        hidden_size=128,
        intermediate_size=160,
        head_dim=64,
    )
    loaded: ExLlamaV2 = lab.load(folder, cpu_matmul=request.param)
    return loaded


@pytest.fixture(scope="module")
def sequences(lab: Any) -> torch.Tensor:
    made: torch.Tensor = lab.ids(4, LENGTH)
    return made


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = threads.num_threads()
    yield
    threads.set_num_threads(before)


def alone(model: ExLlamaV2, sequence: torch.Tensor, cache_class: Any) -> torch.Tensor:
    """Logits of one sequence, in one piece."""
    logits: torch.Tensor = model.forward(sequence[None], cache_class(model, max_seq_len=LENGTH))
    return logits[0]


cuts = st.lists(st.integers(1, LENGTH - 1), max_size=6, unique=True).map(sorted)


@pytest.mark.sampled(4)
@some
@given(data=st.data())
@pytest.mark.parametrize("cache_class", CACHES)
def test_chunking(model: ExLlamaV2, sequences: torch.Tensor, cache_class: Any, data: st.DataObject) -> None:
    bounds = [0, *data.draw(cuts), LENGTH]
    threads.set_num_threads(data.draw(st.integers(1, 4)))
    cache = cache_class(model, max_seq_len=data.draw(st.integers(LENGTH, 3 * LENGTH)))
    parts = [model.forward(sequences[:1, a:b], cache) for a, b in pairwise(bounds)]
    assert torch.equal(torch.cat(parts, dim=1)[0], alone(model, sequences[0], cache_class))


@some
@given(data=st.data())
@pytest.mark.parametrize("cache_class", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
def test_batch_neighbours(model: ExLlamaV2, sequences: torch.Tensor, cache_class: Any, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    cache = cache_class(model, batch_size=len(rows), max_seq_len=LENGTH)
    cut = data.draw(st.integers(1, LENGTH - 1))
    logits = torch.cat(
        [model.forward(sequences[rows, :cut], cache), model.forward(sequences[rows, cut:], cache)], dim=1
    )
    for index, row in enumerate(rows):
        assert torch.equal(logits[index], alone(model, sequences[row], cache_class))


@pytest.mark.sampled(6)
@some
@given(data=st.data())
@pytest.mark.parametrize("cache_class", CACHES)
def test_pages_against_contiguous(
    model: ExLlamaV2, sequences: torch.Tensor, cache_class: Any, data: st.DataObject
) -> None:
    """Sequences of unequal progress step through shuffled pages in common calls, also by unequal steps."""
    per_sequence = -(-LENGTH // PAGE)
    count = data.draw(st.integers(1, 3))
    pages = data.draw(st.permutations(range(3 * per_sequence)))
    table = torch.tensor(pages[: count * per_sequence], dtype=torch.int32).view(count, per_sequence)
    cache = cache_class(model, max_seq_len=3 * per_sequence * PAGE)
    done = [0] * count
    found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(count)]
    while min(done) < LENGTH:
        ready = [i for i in range(count) if done[i] < LENGTH]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))
        past = torch.tensor([done[i] for i in chosen], dtype=torch.int32)
        params = PagedParams(len(chosen), table[chosen], past, int(past.max()), PAGE)
        if data.draw(st.booleans()):
            steps = [data.draw(st.integers(1, min(20, LENGTH - done[i]))) for i in chosen]
            params.q_lens = torch.tensor(steps, dtype=torch.int32)
        else:
            steps = [data.draw(st.integers(1, min(20, *(LENGTH - done[i] for i in chosen))))] * len(chosen)
        parts = [sequences[i, done[i] : done[i] + step] for i, step in zip(chosen, steps, strict=True)]
        ids = torch.stack(parts) if params.q_lens is None else torch.cat(parts)[None]
        last = data.draw(st.booleans())
        logits = model.forward_chunk(ids, cache=cache, attn_params=params, last_id_only=last)["logits"]
        rows = logits.flatten(0, 1).split([1] * len(steps) if last else steps)
        for row, i, step in zip(rows, chosen, steps, strict=True):
            done[i] += step
            found[i].append((done[i], row))
    for i in range(count):
        whole = alone(model, sequences[i], cache_class)
        for end, row in found[i]:
            assert torch.equal(row, whole[end - len(row) : end])


def test_no_cache_is_an_fp16_cache(model: ExLlamaV2, sequences: torch.Tensor) -> None:
    assert torch.equal(model.forward(sequences[:1])[0], alone(model, sequences[0], ExLlamaV2Cache))


def test_last_id_only_changes_nothing(model: ExLlamaV2, sequences: torch.Tensor) -> None:
    last = model.forward(sequences, last_id_only=True)
    assert torch.equal(last[:, 0], model.forward(sequences)[:, -1])


def test_repetition(model: ExLlamaV2, sequences: torch.Tensor) -> None:
    first = model.forward(sequences)
    for _ in range(5):
        assert torch.equal(model.forward(sequences), first)
