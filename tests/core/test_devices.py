"""Several devices: a model split over logical CPUs is bitwise identical to a whole one; maps, splits, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    PagedParams,
    errors,
)
from exl_core.contracts import ForwardResult
from exl_core.device import GIB, devices, torch_device
from exl_core.loading import plan as planning

pytestmark = pytest.mark.covers("core: loading")

SIZES: dict[str, Any] = {"num_hidden_layers": 5}


def build(lab: Any, **changes: Any) -> ExLlamaV2:
    config = ExLlamaV2Config(lab.write(**{**SIZES, **changes}))
    config.cpu_matmul = "exact"
    config.max_input_len = 48
    return ExLlamaV2(config)


def split_of(model: ExLlamaV2, parts: int) -> list[float]:
    """GiB a device that put about as many modules on each."""
    found = planning.plan_modules(model.config, model.modules, devices(), None, [64.0], None, True).devices[0]
    fixed = found.tables + found.scratch
    return [(found.weights / parts * 1.2 + fixed) / GIB] * parts


@pytest.fixture
def ids(lab: Any) -> Tensor:
    return lab.ids(2, 24)


# --------------------------------------------------------------------------------------------------------- same results


@pytest.mark.parametrize("names", ["cpu:0,cpu:1", "cpu:2,cpu,cpu:1"])
def test_split_models_are_bitwise_identical(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, names: str) -> None:
    whole = build(lab)
    whole.load()
    expected = whole.forward(ids, ExLlamaV2Cache(whole, batch_size=2))
    monkeypatch.setenv("EXL_DEVICE", names)
    parts = names.split(",")
    model = build(lab)
    model.load(split_of(model, len(parts)))
    assert set(model.cache_map.values()) == set(parts)
    assert sorted(model.cache_map) == list(range(5))
    assert model.placement.names == sorted(model.placement.names, key=parts.index)
    assert model.get_cache_devices() == sorted(parts)
    cache = ExLlamaV2Cache(model, batch_size=2)
    assert torch.equal(model.forward(ids, cache), expected)
    assert torch.equal(model.forward(ids[:, :12]), whole.forward(ids[:, :12]))  # without a cache
    steps = ExLlamaV2Cache_Q4(model, batch_size=2)
    twin = ExLlamaV2Cache_Q4(whole, batch_size=2)
    for begin, end in ((0, 7), (7, 8), (8, 24)):
        ours = model.forward(ids[:, begin:end], steps)
        assert torch.equal(ours, whole.forward(ids[:, begin:end], twin))
    footprint = cache.footprint()
    assert sum(footprint) == sum(t.nbytes for t in cache.all_tensors())
    assert sum(1 for part in footprint if part) >= 2


def test_pages_states_and_adapters_cross_the_border(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    whole = build(lab)
    whole.load()
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab)
    model.load(split_of(model, 2))

    def paged(m: ExLlamaV2) -> ForwardResult:
        params = PagedParams(2, torch.tensor([[1], [0]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 0, 32)
        cache = ExLlamaV2Cache_Q8(m, max_seq_len=64)
        return m.forward_chunk(
            ids, cache, attn_params=params, return_last_state=True, extract_state_indices=range(len(m.modules))
        )

    ours, expected = paged(model), paged(whole)
    assert torch.equal(ours["logits"], expected["logits"])
    assert torch.equal(ours["last_state"], expected["last_state"])
    assert all(torch.equal(ours["states"][i], s) for i, s in expected["states"].items())


def test_a_state_is_never_shared_over_a_border(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    """Modules work in place: a border hands over a copy, as it must between real devices."""
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab)
    model.load(split_of(model, 2))
    border = next(i for i in range(len(model.modules)) if model.placement.crosses(i))
    x = torch.zeros(3, 64)
    assert model.placement.carry(x, border).data_ptr() != x.data_ptr()


# ------------------------------------------------------------------------------------------------------------ autosplit


@pytest.mark.parametrize("cls", [ExLlamaV2Cache, ExLlamaV2Cache_Q6])
def test_autosplit_fills_the_devices_in_order(
    lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, cls: type[ExLlamaV2CacheBase]
) -> None:
    whole = build(lab)
    whole.load()
    expected = whole.forward(ids, cls(whole, batch_size=2, max_seq_len=64))
    model = build(lab)
    cache = cls(model, batch_size=2, max_seq_len=64, lazy=True)
    need = planning.plan(model.config, cache=cache.kind, cache_tokens=128, reserve=0)
    cap = (need.used * 0.7) / GIB
    monkeypatch.setenv("EXL_DEVICE", f"cpu:0={cap:.6f},cpu:1={cap:.6f}")
    seen: list[tuple[int, int]] = []
    model.load_autosplit(cache, reserve_vram=0, last_id_only=True, callback=lambda i, n: seen.append((i, n)))
    assert len(seen) == len(model.modules) + 1
    assert set(model.placement.names) == {"cpu:0", "cpu:1"}
    assert [len(cache.footprint()), all(cache.footprint())] == [2, True]
    assert torch.equal(model.forward(ids, cache), expected)
    model.unload()
    assert model.cache_map == {}
    with pytest.raises(errors.CacheError, match="lazy=True"):
        model.load_autosplit(cache)
    with pytest.raises(errors.InputError, match="lazy=True"):
        model.load_autosplit(None)  # type: ignore[arg-type]


def test_refused_in_no_time_with_the_numbers(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0=0.0001,cpu:1=0.0001")
    model = build(lab)
    cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    with pytest.raises(errors.DeviceError, match=r"Insufficient space.*\n.*cpu:0.*\n.*cpu:1.*\n.*no room from module"):
        model.load_autosplit(cache, reserve_vram=0)
    assert not model.loaded
    assert model.weight_bytes() == 0
    assert all(t is None for t in cache.key_states)
    with pytest.raises(errors.DeviceError, match="Insufficient space"):
        model.load([0.00001, 0.00001])
    with pytest.raises(errors.DeviceError, match="Insufficient space"):
        model.load()
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    model.load()
    assert model.loaded


# ----------------------------------------------------------------------------------------------------------------- maps


def test_device_map_and_single_modules(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab)
    with pytest.raises(errors.ModelStateError, match="no device is decided"):
        model.load_module(0)
    split = split_of(model, 2)
    unused = model.set_device_map(split)
    assert len(unused) == 2
    assert all(0 <= left < gb for left, gb in zip(unused, split, strict=True))
    assert model.placement.names[0] == "cpu"
    assert set(model.cache_map.values()) == {"cpu:0", "cpu:1"}
    without = build(lab).set_device_map(split, embed_cpu=False)
    assert without[0] < unused[0]
    for index in reversed(range(len(model.modules))):
        assert not model.loaded
        model.load_module(index)
    assert model.loaded
    expected = model.forward(ids)
    with pytest.raises(errors.ModelStateError, match="unload it"):
        model.set_device_map(split)
    model.unload_module(3)
    with pytest.raises(errors.ModelStateError, match="not loaded"):
        model.forward(ids)
    model.load_module(3)
    assert torch.equal(model.forward(ids), expected)
    assert model.config.checkpoint is not None
    file = model.config.checkpoint.files[0]
    hidden = file.rename(file.with_suffix(".hidden"))
    with pytest.raises(errors.FormatError):
        model.load_module(3)
    hidden.rename(file)
    assert not model.loaded, "a module that could not be read again is not there"
    model.load_module(3)
    assert torch.equal(model.forward(ids), expected)


@pytest.mark.parametrize("bad", [[], [1.0] * 3, [-1.0], [float("nan")], ["1"], "auto", 4, [True], [None]])
def test_splits_that_are_none(lab: Any, monkeypatch: pytest.MonkeyPatch, bad: Any) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab)
    for call in (model.load, model.load_tp, model.set_device_map):
        with pytest.raises(errors.InputError, match="gpu_split"):
            call(bad)


@pytest.mark.parametrize("bad", [-1, 1.5, [None], [True], [1, 2, -3], [1, 2, 1.5]])
def test_reserves_that_are_none(lab: Any, monkeypatch: pytest.MonkeyPatch, bad: Any) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab)
    with pytest.raises(errors.InputError, match="reserve_vram"):
        model.load_autosplit(ExLlamaV2Cache(model, lazy=True), reserve_vram=bad)


def test_reserves_beyond_the_devices_have_no_effect(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    """Settings written for a machine with more devices: each entry counts for its device, the rest for none."""
    model = build(lab)
    need = planning.plan(model.config, cache="fp16", cache_tokens=128, reserve=0).used
    monkeypatch.setenv("EXL_DEVICE", f"cpu:0={1.05 * need / GIB:.6f}")
    cache = ExLlamaV2Cache(model, batch_size=2, max_seq_len=64, lazy=True)
    with pytest.raises(errors.DeviceError, match="Insufficient space"):
        model.load_autosplit(cache, reserve_vram=[need // 2, 0, 0])
    model.load_autosplit(cache, reserve_vram=[0, need, need], last_id_only=True)
    assert model.forward(ids, cache).shape[0] == 2


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        ("cpu", [("cpu", None)]),
        (" CPU:1 , cpu:0=1.5 ", [("cpu:1", None), ("cpu:0", int(1.5 * GIB))]),
        ("cpu:3=2gb", [("cpu:3", 2 * GIB)]),
    ):
        monkeypatch.setenv("EXL_DEVICE", text)
        assert [(d.name, d.cap) for d in devices()] == expected
    for text in (
        "gpu",
        "auto,cpu",
        "auto=4",
        "cpu,,cpu",
        "cpu,cpu",
        "cpu:0,cpu:00",
        "cuda:99",
        "cuda:0=x",
        "cpu=-1",
        "cpu:" + "9" * 30,
    ):
        monkeypatch.setenv("EXL_DEVICE", text)
        with pytest.raises(errors.DeviceError, match="EXL_DEVICE"):
            devices()
    assert torch_device("cpu:7") == torch.device("cpu")
    assert torch_device(3) == torch.device("cuda:3")
