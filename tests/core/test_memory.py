"""Dropped caches, weights and adapters are freed at once, not when the garbage collector runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_models import split_over_two

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    PagedParams,
)
from exl_core.loading import loadable

pytestmark = pytest.mark.covers("core: loading-memory", "core: loading")

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loaded(lab: Any, monkeypatch: pytest.MonkeyPatch, how: str, kind: str) -> ExLlamaV2:
    monkeypatch.setenv("EXL_DEVICE", "cpu" if how == "whole" else "cpu:0,cpu:1")
    model = ExLlamaV2(ExLlamaV2Config(lab.write(kind=kind, **SIZES)))
    if how == "cut":
        model.load_tp([3.0, 5.0])
    elif how == "split":
        split_over_two(model)
    else:
        model.load()
    return model


def run(model: ExLlamaV2, cache: ExLlamaV2CacheBase, lab: Any) -> None:
    """Every kind of pass: contiguous, over pages, without a cache."""
    model.forward(lab.ids(1, 20), cache)
    params = PagedParams(1, torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), 20, 128)
    model.forward_chunk(lab.ids(1, 1), cache, attn_params=params)
    model.forward(lab.ids(1, 20), return_last_state=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["exl2", "float"])
@pytest.mark.parametrize("how", ["whole", "split", "cut"])
def test_a_dropped_cache_and_a_dropped_model_are_gone(
    lab: Any, monkeypatch: pytest.MonkeyPatch, how: str, kind: str
) -> None:
    model = loaded(lab, monkeypatch, how, kind)
    if how == "cut":
        cache: ExLlamaV2CacheBase = ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=256)
        inner = cache.shards()[0]
    else:
        inner = cache = ExLlamaV2Cache_Q4(model, max_seq_len=256)
    run(model, cache, lab)
    held: list[weakref.ref[Any]] = [weakref.ref(t) for t in (cache, inner, inner.key_states[0], inner.key_scales[0])]
    del cache, inner
    assert [ref() for ref in held] == [None] * 4
    held = [weakref.ref(m) for m in (model, *model.modules)]
    del model
    assert [ref() for ref in held] == [None] * len(held)


@pytest.mark.parametrize("how", ["whole", "split", "cut"])
def test_unload_drops_all_weights_and_the_model_loads_again(
    lab: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = loaded(lab, monkeypatch, how, "exl2")
    cache_of = ExLlamaV2Cache_TP if how == "cut" else ExLlamaV2Cache
    ids = lab.ids(1, 20)
    first = model.forward(ids, cache_of(model, max_seq_len=256))
    layers: list[Any] = model.modules
    norms = (m.norm for m in layers if getattr(m, "norm", None) is not None)
    held = [weakref.ref(linear.matrix) for linear in model.linears() if how == "cut"]
    held += [weakref.ref(norm.weight) for norm in norms]
    model.unload()
    assert [ref() for ref in held] == [None] * len(held)
    assert not model.loaded
    assert sum(m.weight_bytes() for m in model.modules) == 0
    model.load()
    assert torch.equal(model.forward(ids, ExLlamaV2Cache(model, max_seq_len=256)), first)


def test_unloading_frees_the_workspaces_of_its_gpus(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch's free memory is given back; what other GPUs use stays."""
    model = loaded(lab, monkeypatch, "whole", "exl2")
    forgotten: list[torch.device] = []
    seen: list[set[torch.device]] = []
    monkeypatch.setattr(loadable, "forget_workspaces", forgotten.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(set(forgotten)))
    model.placement.names[1:3] = ["cuda:0", "cuda:2"]
    model.unload()
    assert seen == [{torch.device("cuda", 0), torch.device("cuda", 2)}]
