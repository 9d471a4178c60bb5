"""Caches: construction, fields, copying, decoding and encoding regions, and use in a forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    errors,
)
from exl_kernels.selection import Card

CLASSES = [ExLlamaV2Cache, ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8]
# Bytes of one key and of one value element with their share of the scales
ELEMENT_BYTES = {"fp16": (2, 2), "fp8": (1, 1), "q4": (0.5625, 0.5625), "q6": (1.0625, 0.5625), "q8": (1.0625, 1.0625)}


@pytest.fixture(scope="module")
def model(lab: Any) -> ExLlamaV2:
    loaded: ExLlamaV2 = lab.load(lab.write(head_dim=64))
    return loaded


def filled(cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, lab: Any, batch: int = 2) -> ExLlamaV2CacheBase:
    cache = cache_class(model, batch_size=batch, max_seq_len=40)
    model.forward(lab.ids(batch, 20), cache)
    return cache


@pytest.mark.covers("core: cache-checks", "core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_fields_and_footprint(cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2) -> None:
    cache = cache_class(model, batch_size=3, max_seq_len=40)
    assert (cache.batch_size, cache.max_seq_len, cache.current_seq_len) == (3, 40, 0)
    assert (cache.num_key_value_heads, cache.num_hidden_layers, cache.head_dim) == (2, 2, 64)
    key, value = cache.key_states[0], cache.value_states[1]
    assert key is not None
    assert value is not None
    assert key.shape == (3, 40, 2, 64 // cache.weights_per_element_k)
    assert value.shape == (3, 40, 2, 64 // cache.weights_per_element_v)
    assert key.dtype == cache.dtype
    scales = cache.key_scales[0]
    assert (scales is not None) == cache.has_scales
    if scales is not None:
        assert scales.shape == (3, 40, 2, 2)
    tensors = cache.all_tensors()
    assert len(tensors) == (8 if cache.has_scales else 4)
    elements = 3 * 40 * 2 * 64 * 2
    assert cache.footprint() == [int(elements * sum(ELEMENT_BYTES[cache.kind]))]
    assert not any(t.any() for t in tensors)
    assert (cache.wbits is None) == (cache.kind in ("fp16", "fp8"))


@pytest.mark.covers("core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_default_length_is_the_models(cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2) -> None:
    assert cache_class(model).max_seq_len == 512


@pytest.mark.covers("core: cache-checks", "core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_clone_keeps_class_content_and_length(
    cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, lab: Any
) -> None:
    cache = filled(cache_class, model, lab)
    copy = cache.clone()
    assert type(copy) is cache_class
    assert copy.current_seq_len == 20
    for a, b in zip(cache.all_tensors(), copy.all_tensors(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    more = lab.ids(2, 5, seed=3)
    assert torch.equal(model.forward(more, cache), model.forward(more, copy))


@pytest.mark.covers("core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_continuing_needs_the_same_content(cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, lab: Any) -> None:
    """Reset forgets: what follows is the run of a fresh cache."""
    cache = filled(cache_class, model, lab)
    more = lab.ids(2, 5, seed=3)
    continued = model.forward(more, cache)
    cache.reset()
    assert cache.current_seq_len == 0
    fresh = model.forward(more, cache)
    assert torch.equal(fresh, model.forward(more, cache_class(model, batch_size=2, max_seq_len=40)))
    assert not torch.equal(fresh, continued)


@pytest.mark.covers("core: cache-checks", "core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_copy_states_broadcasts_to_rows(cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, lab: Any) -> None:
    source = filled(cache_class, model, lab, batch=1)
    target = cache_class(model, batch_size=3, max_seq_len=30)
    source.copy_states(target, 2, 15, 4, 15, 0, 1, 1, 2)
    for a, b in zip(source.all_tensors(), target.all_tensors(), strict=True):
        for row in (1, 2):
            assert torch.equal(b[row, 4:19], a[0, 2:17])
        assert not b[0].any()
        assert not b[1, :4].any()
        assert not b[1, 19:].any()


@pytest.mark.covers("core: caches")
def test_copy_states_within_one_cache_overlapping(model: ExLlamaV2, lab: Any) -> None:
    cache = filled(ExLlamaV2Cache_Q4, model, lab, batch=1)
    before = [t.clone() for t in cache.all_tensors()]
    cache.copy_states(cache, 0, 10, 3, 10, 0, 1, 0, 1)
    for a, b in zip(before, cache.all_tensors(), strict=True):
        assert torch.equal(b[0, 3:13], a[0, 0:10])


@pytest.mark.covers("core: caches")
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("cache_class", [ExLlamaV2Cache, ExLlamaV2Cache_Q4])
def test_copy_states_within_one_cache(
    cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, data: st.DataObject
) -> None:
    """Any ranges, overlapping or not, of any rows: the target gets what the source held before."""
    cache = cache_class(model, batch_size=3, max_seq_len=24)
    for tensor in cache.all_tensors():
        tensor.copy_(torch.randint(0, 100, tensor.shape))
    tokens = data.draw(st.integers(0, 24))
    begin, end = (data.draw(st.integers(0, 24 - tokens)) for _ in range(2))
    row, first = (data.draw(st.integers(0, 2)) for _ in range(2))
    rows = data.draw(st.integers(0, 3 - first))
    expected = [tensor.clone() for tensor in cache.all_tensors()]
    for tensor in expected:
        tensor[first : first + rows, end : end + tokens] = tensor[row, begin : begin + tokens].clone()
    cache.copy_states(cache, begin, tokens, end, tokens, row, 1, first, rows)
    assert all(torch.equal(a, b) for a, b in zip(cache.all_tensors(), expected, strict=True))


@pytest.mark.covers("core: caches")
@pytest.mark.parametrize(
    "arguments",
    [
        (0, 10, 0, 9, 0, 1, 0, 1),
        (0, 10, 0, 10, 0, 2, 0, 1),
        (35, 10, 0, 10, 0, 1, 0, 1),
        (0, 10, 35, 10, 0, 1, 0, 1),
        (0, 10, 0, 10, 0, 1, 1, 2),
        (-1, 10, 0, 10, 0, 1, 0, 1),
    ],
)
def test_copy_states_refuses(model: ExLlamaV2, lab: Any, arguments: tuple[int, ...]) -> None:
    cache = filled(ExLlamaV2Cache, model, lab)
    with pytest.raises(errors.CacheError, match="copy_states"):
        cache.copy_states(cache.clone(), *arguments)
    with pytest.raises(errors.CacheError, match="cannot be copied into"):
        cache.copy_states(ExLlamaV2Cache_Q4(model, batch_size=2, max_seq_len=40), 0, 1, 0, 1, 0, 1, 0, 1)


@pytest.mark.covers("core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_get_and_store_kv_state(cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, lab: Any) -> None:
    cache = filled(cache_class, model, lab)
    k, v = cache.get_kv_state(1, 2, 0, 20)
    assert k.shape == v.shape == (2, 40, 2, 64)
    assert k.dtype == torch.half
    exact = filled(ExLlamaV2Cache, model, lab).get_kv_state(1, 2, 0, 20)
    tolerance = {"fp16": 0, "fp8": 0.15, "q4": 0.4, "q6": 0.4, "q8": 0.03}[cache.kind]
    for found, expected in zip((k, v), exact, strict=True):
        error = (found[:, :20] - expected[:, :20]).abs().max() / expected.abs().max()
        assert float(error) <= tolerance
    if cache.kind == "fp16":
        states = cache.key_states[1]
        assert states is not None
        assert k.data_ptr() == states.data_ptr()
        return
    k[:, 20:22] = 1.5
    v[:, 20:22] = -0.75
    before = [t.clone() for t in cache.all_tensors()]
    cache.store_kv_state(1, 2, 20, 2)
    for a, b in zip(before, cache.all_tensors(), strict=True):
        assert torch.equal(a[:, :20], b[:, :20])
    k.zero_()
    k2, v2 = cache.get_kv_state(1, 2, 20, 2)
    torch.testing.assert_close(k2[:, 20:22], torch.full_like(k2[:, 20:22], 1.5), atol=0.4, rtol=0)
    torch.testing.assert_close(v2[:, 20:22], torch.full_like(v2[:, 20:22], -0.75), atol=0.2, rtol=0)


@pytest.mark.covers("core: caches")
def test_get_kv_state_of_pages(model: ExLlamaV2, lab: Any) -> None:
    cache = ExLlamaV2Cache_Q8(model, max_seq_len=64)
    model.forward(lab.ids(1, 20), cache)
    contiguous = [t.clone() for t in cache.get_kv_state(0, 1, 0, 20)]
    cache.temp_tensors["cpu"][0].zero_()
    cache.temp_tensors["cpu"][1].zero_()
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    paged = cache.get_kv_state(0, 1, 0, 0, 16, lengths, table)
    for a, b in zip(contiguous, paged, strict=True):
        assert torch.equal(a, b)


@pytest.mark.covers("core: cache-checks", "core: caches")
def test_lazy_and_order_of_construction(lab: Any) -> None:
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))
    with pytest.raises(errors.ModelStateError, match="lazy=True"):
        ExLlamaV2Cache(model)
    cache = ExLlamaV2Cache_Q6(model, lazy=True, max_seq_len=32)
    assert cache.key_states == [None, None]
    assert cache.footprint() == []
    model.load()
    with pytest.raises(errors.ModelStateError, match="lazy cache"):
        model.forward(lab.ids(1, 4), cache)
    cache.update_cache_tensors()
    tensors = [t.data_ptr() for t in cache.all_tensors()]
    assert len(tensors) == 8
    cache.update_cache_tensors()
    assert [t.data_ptr() for t in cache.all_tensors()] == tensors
    assert model.forward(lab.ids(1, 4), cache) is not None


@pytest.mark.covers("core: caches")
def test_load_autosplit_fills_a_lazy_cache(lab: Any) -> None:
    model = ExLlamaV2(ExLlamaV2Config(lab.write()))
    cache = ExLlamaV2Cache_Q4(model, lazy=True)
    steps: list[tuple[int, int]] = []
    model.load_autosplit(cache, reserve_vram=[1 << 20], callback=lambda i, n: steps.append((i, n)))
    assert steps[0] == (0, 7)
    assert steps[-1] == (7, 7)
    assert len(cache.all_tensors()) == 8
    with pytest.raises(errors.CacheError, match="lazy=True"):
        model.load_autosplit(cache)


@pytest.mark.covers("core: caches")
@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"max_seq_len": 0}, {"max_seq_len": -2}, {"batch_size": 1.5}])
def test_bad_sizes(model: ExLlamaV2, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.CacheError, match=next(iter(arguments))):
        ExLlamaV2Cache(model, **arguments)


@pytest.mark.covers("core: caches")
def test_cache_of_another_model(model: ExLlamaV2, lab: Any) -> None:
    other = lab.load(lab.write(num_hidden_layers=1))
    with pytest.raises(errors.CacheError, match="another model"):
        model.forward(lab.ids(1, 3), ExLlamaV2Cache(other, max_seq_len=8))


def test_more_than_the_machine_has(model: ExLlamaV2) -> None:
    with pytest.raises(errors.DeviceError, match="max_seq_len"):
        ExLlamaV2Cache(model, max_seq_len=1 << 52)
    cache = ExLlamaV2Cache(model, max_seq_len=1 << 52, lazy=True)
    with pytest.raises(errors.DeviceError):
        cache.update_cache_tensors()
    assert cache.all_tensors() == []


@pytest.mark.covers("core: caches")
def test_copy_from(model: ExLlamaV2, lab: Any) -> None:
    cache = filled(ExLlamaV2Cache, model, lab)
    with pytest.raises(errors.CacheError, match="lazy"):
        ExLlamaV2Cache(model, 2, 40, copy_from=cache, lazy=True)
    with pytest.raises(errors.CacheError, match="differ"):
        ExLlamaV2Cache(model, 2, 41, copy_from=cache)
    with pytest.raises(errors.CacheError, match="differ"):
        ExLlamaV2Cache_Q4(model, 2, 40, copy_from=cache)


@pytest.mark.sampled(4)
@pytest.mark.covers("core: softcap-with-pages", "core: caches")
@pytest.mark.parametrize("head_dim", [8, 24, 80, 96])
@pytest.mark.parametrize("cache_class", CLASSES)
def test_any_head_dim(cache_class: type[ExLlamaV2CacheBase], head_dim: int, lab: Any) -> None:
    model = lab.load(lab.write(head_dim=head_dim))
    ids = lab.ids(1, 24)
    expected = model.forward(ids)
    logits = model.forward(ids, cache_class(model, max_seq_len=32))
    tolerance = {"fp16": 1e-6, "fp8": 0.4, "q4": 0.6, "q6": 0.4, "q8": 0.05}[cache_class.kind]
    assert float((logits - expected)[..., :90].abs().max() / expected[..., :90].abs().max()) < tolerance


def test_a_card_without_a_kernel_for_the_format_is_refused(lab: Any) -> None:
    """Blocks of Turing have no room for 64 keys and values of more than 128 halves (Gemma); a quantized cache fits."""
    model = lab.load(lab.write(head_dim=256))
    turing = Card.named("2080 Ti")
    with pytest.raises(errors.CacheError, match=r"2080 Ti.* 256 elements.* 65536; take a quantized cache"):
        ExLlamaV2Cache(model, lazy=True).check_card(turing)
    ExLlamaV2Cache(model, lazy=True).check_card(Card.named("3090"))
    for other in CLASSES:
        if other is not ExLlamaV2Cache:
            other(model, lazy=True).check_card(turing)


def test_a_card_is_asked_before_memory_is_taken(model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def turing(index: int) -> Card:
        asked.append(index)
        return Card.named("2080 Ti")

    monkeypatch.setattr(Card, "device", turing)
    cache = ExLlamaV2Cache(model, max_seq_len=1 << 52, lazy=True, fixed_device="cuda:1")
    cache.head_dim = 136
    with pytest.raises(errors.CacheError, match="2080 Ti"):
        cache.update_cache_tensors()
    cache.check_device("cpu")
    assert asked == [1]


@pytest.mark.covers("core: cache-checks", "core: caches")
@pytest.mark.parametrize("cache_class", CLASSES)
def test_roll_left_drops_the_oldest_token_of_every_tensor(
    cache_class: type[ExLlamaV2CacheBase], model: ExLlamaV2, lab: Any
) -> None:
    cache = filled(cache_class, model, lab)
    before = [t.clone() for t in cache.all_tensors()]
    cache.roll_left()
    assert cache.current_seq_len == 19
    for old, new in zip(before, cache.all_tensors(), strict=True):
        assert torch.equal(new[:, :19], old[:, 1:20])
    cache.reset()
    cache.roll_left()
    assert cache.current_seq_len == 0
