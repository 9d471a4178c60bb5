"""Matrices cut over logical CPUs: bitwise the results of one device, for every format, share and cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Cache_TP,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    PagedParams,
    errors,
)
from exl_core.device import Device, devices
from exl_core.execution.batch import Step
from exl_core.execution.sharded.matrix import SplitMatrix
from exl_core.execution.sharded.shares import Shares
from exl_core.execution.sharded.sums import SumMatrix
from exl_core.layers import Attention, Intervention, Linear, Module
from exl_core.layers.attention import WHOLE_HEADS
from exl_core.layers.matrix import ShardedMatrix
from exl_core.layers.mlp import WHOLE_FEATURES
from exl_core.layers.sublayer import BY_OPERATOR
from exl_core.loading.checkpoint import TensorSource
from exl_core.loading.parallel_plan import plan_parallel
from exl_core.loading.sizes import CacheSize

pytestmark = pytest.mark.covers("core: tensor-parallel")

SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 224,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "vocab_size": 130,
}


def build(folder: Any, **fields: Any) -> ExLlamaV2:
    config = ExLlamaV2Config(folder)
    for name, value in {"cpu_matmul": "int8", "max_input_len": 48, **fields}.items():
        setattr(config, name, value)
    return ExLlamaV2(config)


def spread(monkeypatch: pytest.MonkeyPatch, folder: Any, shares: list[float], **fields: Any) -> ExLlamaV2:
    """The model of `folder` over as many logical CPUs as there are `shares`, in these proportions."""
    monkeypatch.setenv("EXL_DEVICE", ",".join(f"cpu:{i}" for i in range(len(shares))))
    model = build(folder, **fields)
    model.load_tp(shares)
    assert model.tp_context is not None
    return model


@pytest.fixture
def ids(lab: Any) -> Tensor:
    return lab.ids(2, 24)


EVEN2, EVEN3, UNEVEN, FIVE = [8.0, 8.0], [8.0, 8.0, 8.0], [4.0, 14.0, 2.0], [8.0] * 5


@pytest.mark.sampled(8)
@pytest.mark.covers("core: tensor-parallel-weights")
@pytest.mark.parametrize(
    "shares", [EVEN2, EVEN3, [8.0] * 4, UNEVEN, FIVE], ids=["two", "three", "four", "uneven", "five"]
)
@pytest.mark.parametrize("kind", ["float", "exl2", "gptq-act-order"])
@pytest.mark.parametrize("mode", ["int8", "exact"])
def test_cut_matrices_are_bitwise_identical_to_one_device(
    lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, kind: str, shares: list[float], mode: str
) -> None:
    """Heads of 24 columns lie across the blocks of quantized formats, four of them over three devices."""
    folder = lab.write(kind=kind, **SIZES)
    whole = build(folder, cpu_matmul=mode)
    whole.load()
    model = spread(monkeypatch, folder, shares, cpu_matmul=mode)
    context = model.tp_context
    assert context is not None
    linears = [linear for m in model.modules for linear in m.submodules()]
    assert context.shares.sums == (len(shares) < 5)  # K has four quarters
    for linear in linears:
        matrix = linear.matrix
        if linear.key.endswith("down_proj") and context.shares.sums:
            assert isinstance(matrix, SumMatrix)
            held = torch.cat([piece.features for piece in matrix.pieces])
        else:
            assert isinstance(matrix, SplitMatrix)
            held = torch.cat([torch.arange(linear.out_features)[part.columns] for part in matrix.parts])
        assert sorted(held.tolist()) == list(range(len(held)))
        assert len(held) == (linear.in_features if isinstance(matrix, SumMatrix) else linear.out_features)
        twin = whole.modules_dict[linear.key]
        assert isinstance(twin, Linear)
        assert torch.equal(linear.get_weight_tensor_dq(), twin.get_weight_tensor_dq())
        assert linear.is_quant() == twin.is_quant()
    query = model.modules_dict["model.layers.0.self_attn.q_proj"]
    assert isinstance(query, Linear)
    assert isinstance(query.matrix, SplitMatrix)
    assert len(query.matrix.parts) == min(len(shares), len(context.heads))
    cache, plain = ExLlamaV2Cache_TP(model, batch_size=2), ExLlamaV2Cache(whole, batch_size=2)
    for begin, end in ((0, 9), (9, 10), (10, 24)):
        found = model.forward(ids[:, begin:end], cache)
        assert torch.equal(found, whole.forward(ids[:, begin:end], plain))
    assert torch.equal(model.forward(ids[:, :12]), whole.forward(ids[:, :12]))  # without a cache
    assert [c.num_key_value_heads for c in cache.caches] == [end - begin for _, begin, end in context.heads]
    for layer in range(2):
        keys = torch.cat([part[:, :24] for part in cache.key_states[layer] if part is not None], dim=2)
        expected = plain.key_states[layer]
        assert expected is not None
        assert torch.equal(keys, expected[:, :24])
    assert model.get_cache_devices() == [f"cpu:{shard}" for shard, _, _ in context.heads]
    model.unload()
    assert model.tp_context is None
    assert model.weight_bytes() == 0
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    model.load()
    assert torch.equal(model.forward(ids), whole.forward(ids))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("shares", "per_layer"), [(EVEN2, 3), (UNEVEN, 3), ([8.0] * 4, 3), (FIVE, 4)])
@pytest.mark.parametrize("kind", ["exl2", "gptq-act-order"])
def test_exchanges_of_a_layer(
    lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, kind: str, shares: list[float], per_layer: int
) -> None:
    """Attention's outputs, o's outputs and down's sums; hidden features where K has too few quarters; logits once."""
    model = spread(monkeypatch, lab.write(kind=kind, **SIZES), shares)
    assert model.tp_context is not None
    exchange, cache = model.tp_context.exchange, ExLlamaV2Cache_TP(model, batch_size=2)
    for begin, end in ((0, 9), (9, 10)):
        before = exchange.count
        model.forward(ids[:, begin:end], cache)
        assert exchange.count - before == per_layer * model.config.num_hidden_layers + 1


@pytest.mark.parametrize("base", [ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8])
def test_every_cache_and_its_methods(
    lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, base: type[ExLlamaV2CacheBase]
) -> None:
    folder = lab.write(**{**SIZES, "head_dim": 32})
    whole = build(folder)
    whole.load()
    model = spread(monkeypatch, folder, EVEN2)
    cache, twin = ExLlamaV2Cache_TP(model, base, batch_size=2, max_seq_len=64), base(whole, 2, 64)
    assert torch.equal(model.forward(ids, cache), whole.forward(ids, twin))
    assert (cache.kind, cache.wbits, cache.has_scales, cache.current_seq_len) == (
        twin.kind,
        twin.wbits,
        twin.has_scales,
        24,
    )
    assert cache.max_seq_len == 64
    assert sum(cache.footprint()) == sum(twin.footprint()) == sum(t.nbytes for t in cache.all_tensors())
    assert len([part for part in cache.footprint() if part]) == 2
    found, expected = cache.get_kv_state(0, 2, 0, 24), twin.get_kv_state(0, 2, 0, 24)
    for parts, tensor in zip(found, expected, strict=True):
        assert torch.equal(torch.cat(parts, dim=2), tensor)
    before = [t.clone() for t in cache.all_tensors()]
    cache.store_kv_state(0, 2, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.all_tensors(), strict=True))
    assert len(cache.temp_tensors) >= 1
    copied = cache.clone()
    assert type(copied) is ExLlamaV2Cache_TP
    assert copied.base is base
    assert copied.current_seq_len == 24
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(copied.all_tensors(), cache.all_tensors(), strict=True))
    again = ExLlamaV2Cache_TP(model, base, batch_size=2, max_seq_len=64)
    cache.copy_states(again, 0, 24, 0, 24, 0, 1, 0, 2)
    twin_again = base(whole, 2, 64)
    twin.copy_states(twin_again, 0, 24, 0, 24, 0, 1, 0, 2)
    cache.roll_left()
    twin.roll_left()
    for ours, theirs in ((again, twin_again), (cache, twin)):
        ours.current_seq_len = theirs.current_seq_len = 23
        assert torch.equal(model.forward(ids[:, :3], ours), whole.forward(ids[:, :3], theirs))
    copied.reset()
    assert copied.current_seq_len == 0


def test_pages(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    folder = lab.write(kind="exl2", **SIZES)
    whole = build(folder)
    whole.load()
    model = spread(monkeypatch, folder, UNEVEN)
    cache, twin = (
        ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q6, max_seq_len=128),
        ExLlamaV2Cache_Q6(whole, max_seq_len=128),
    )
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    for begin, end in ((0, 15), (15, 16), (16, 24)):
        past = torch.full((2,), begin, dtype=torch.int32)
        found, expected = (
            m.forward_chunk(
                ids[:, begin:end],
                c,
                attn_params=PagedParams(2, table, past, begin, page_size=32),
                return_last_state=True,
                extract_state_indices=range(len(m.modules)),
            )
            for m, c in ((model, cache), (whole, twin))
        )
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["last_state"], expected["last_state"])
        assert all(torch.equal(found["states"][i], state) for i, state in expected["states"].items())


def test_more_devices_than_heads(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    """One key/value head: attention is on one device, the others take more of the rest."""
    folder = lab.write(**{**SIZES, "num_key_value_heads": 1})
    whole = build(folder)
    whole.load()
    model = spread(monkeypatch, folder, EVEN3)
    assert model.tp_context is not None
    ((shard, _, _),) = model.tp_context.heads
    up = model.modules_dict["model.layers.0.mlp.up_proj"]
    assert isinstance(up, Linear)
    assert isinstance(up.matrix, SplitMatrix)
    widths = {part.shard: part.width for part in up.matrix.parts}
    assert widths.get(shard, 0) < max(widths.values())
    for cls in (ExLlamaV2Cache, ExLlamaV2Cache_Q4):
        expected = whole.forward(ids, cls(whole, batch_size=2))
        assert torch.equal(model.forward(ids, ExLlamaV2Cache_TP(model, cls, batch_size=2)), expected)
        assert torch.equal(model.forward(ids, cls(model, batch_size=2)), expected)  # nothing of it is cut


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_gptq_of_other_widths(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, bits: int) -> None:
    from exl_kernels import formats

    config = {**lab.config, **SIZES, "quantization_config": {"bits": bits, "group_size": 32, "quant_method": "gptq"}}
    tensors: dict[str, Any] = {}
    for name, tensor in lab.random_tensors(config).items():
        if name.endswith("_proj.weight") and tensor.shape[0] % 32 == 0:
            made = formats.gptq_quantize(tensor, bits=bits, group_size=32)
            tensors |= {name.replace("weight", part): t for part, t in made.items()}
        else:
            tensors[name] = tensor
    folder = lab.write_model(lab.folder / f"gptq-{bits}", config, tensors)
    whole = build(folder)
    whole.load()
    assert whole.is_quant()
    assert torch.equal(spread(monkeypatch, folder, UNEVEN).forward(ids), whole.forward(ids))


def test_wrong_caches_are_refused(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    folder = lab.write(**SIZES)
    whole = build(folder)
    whole.load()
    model = spread(monkeypatch, folder, EVEN2)
    with pytest.raises(errors.CacheError, match=r"ExLlamaV2Cache_TP\(model, base=ExLlamaV2Cache_Q4\)"):
        ExLlamaV2Cache_Q4(model)
    with pytest.raises(errors.CacheError, match="sharded over cpu:0, cpu:1"):
        model.forward(ids, ExLlamaV2Cache(whole, batch_size=2))
    cache = ExLlamaV2Cache_TP(model, batch_size=2)
    with pytest.raises(errors.CacheError, match="sharded over devices"):
        whole.forward(ids, cache)
    with pytest.raises(errors.CacheError, match="copy_from"):
        ExLlamaV2Cache_TP(whole, batch_size=2, copy_from=cache)
    with pytest.raises(errors.CacheError, match="differ"):
        cache.copy_states(ExLlamaV2Cache(whole, batch_size=2), 0, 1, 0, 1, 0, 1, 0, 1)
    with pytest.raises(errors.ModelStateError, match="load the model"):
        ExLlamaV2Cache_TP(build(folder))
    for bad in (ExLlamaV2Cache_TP, "fp16", None):
        with pytest.raises(errors.CacheError, match="base"):
            ExLlamaV2Cache_TP(model, bad)  # type: ignore[arg-type]
    model.unload()
    model.load_tp([2.0, 20.0])
    with pytest.raises(errors.CacheError, match="made after load_tp"):
        model.forward(ids, cache)


def test_a_device_may_get_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    folder = lab.write(**SIZES)
    whole = build(folder)
    whole.load()
    model = spread(monkeypatch, folder, [5.0, 0.0, 5.0])
    matrices = [linear.matrix for m in model.modules for linear in m.submodules()]
    assert {part.shard for q in matrices if isinstance(q, SplitMatrix) for part in q.parts} == {0, 2}
    assert all(isinstance(q, ShardedMatrix) for q in matrices)
    cache = ExLlamaV2Cache_TP(model, batch_size=2)
    assert torch.equal(model.forward(ids, cache), whole.forward(ids, ExLlamaV2Cache(whole, batch_size=2)))


def test_mixed_kinds_and_modules_one_by_one(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    model = spread(monkeypatch, lab.write(**SIZES), EVEN2)
    expected = model.forward(ids)
    model.unload_module(2)
    with pytest.raises(errors.ModelStateError, match="not loaded"):
        model.forward(ids)
    model.load_module(2)
    assert torch.equal(model.forward(ids), expected)
    mixed = [Device("cuda:0"), Device("cpu")]
    with pytest.raises(errors.DeviceError, match=r"cuda:0, cpu are of two kinds"):
        plan_parallel(model.config, model.modules, mixed, CacheSize("fp16", 512), None)


def test_norms_of_heads_are_those_of_the_current_module(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, ids: Tensor
) -> None:
    """Each device has copies of their weights, which a pass may have made of a module that was replaced since."""
    config = {**lab.config, **SIZES, "architectures": ["Qwen3ForCausalLM"]}
    tensors, folders = lab.random_tensors(config), []
    for at in (1, 2):
        norms = {f"model.layers.{layer}.self_attn.{norm}_norm.weight" for layer in range(2) for norm in "qk"}
        weights = {name: torch.linspace(0.5, at, SIZES["head_dim"]).half() for name in norms}
        folders.append(lab.write_model(tmp_path / str(at), config, tensors | weights))
    found = []
    for places in ("cpu", "cpu:0,cpu:1"):
        monkeypatch.setenv("EXL_DEVICE", places)
        model, other = (build(folder) for folder in folders)
        model.load_tp()
        other.load_tp()
        before = model.forward(ids)
        model.modules[1] = other.modules[1]
        found.append(model.forward(ids))
        assert not torch.equal(found[-1], before)
    assert torch.equal(found[0], found[1])


class Doubled(Attention):
    """A plugin's attention, whose code is its own."""

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return super().forward(2 * x, step)


class Wrapped(Module):
    """A plugin's module that holds one of the model's."""

    def __init__(self, held: Module) -> None:
        self.key, self.name, self.layer_idx, self.held = held.key, held.name, held.layer_idx, held

    def load(self, source: TensorSource, device: torch.device) -> None:
        self.held.load(source, device)

    def unload(self) -> None:
        self.held.unload()

    def submodules(self) -> Iterator[Linear]:
        return self.held.submodules()

    @property
    def loaded(self) -> bool:
        return self.held.loaded

    def weight_bytes(self) -> int:
        return self.held.weight_bytes()

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.held.forward(x, step).neg_()


def test_other_code_around_a_layer_runs_its_shares(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    """Hooks, subclasses, and modules around a layer call it: the layer itself has what runs its shares."""
    folder, found = lab.write(**SIZES), []
    for places in ("cpu", "cpu:0,cpu:1"):
        monkeypatch.setenv("EXL_DEVICE", places)
        model = build(folder)
        first, second = model.modules[1], model.modules[2]
        third = Doubled.__new__(Doubled)
        third.__dict__.update(model.modules[3].__dict__)
        halves: list[Any] = [first, second, third]
        model.modules[1:4] = [Intervention(first, None, lambda x, step: x + 1), Wrapped(second), third]
        model.load_tp()
        found.append(model.forward(ids))
        blocks = [half.own_pass is not BY_OPERATOR for half in halves]
        assert blocks == ([True, True, False] if places == "cpu" else [False] * 3), "the third one has other code"
        model.unload()
        assert all(half.own_pass is BY_OPERATOR for half in halves)
        assert [half.sharding for half in halves] == [WHOLE_HEADS, WHOLE_FEATURES, WHOLE_HEADS]
    assert torch.equal(found[0], found[1])


def test_the_error_of_gpus_without_room_names_the_cpu(lab: Any) -> None:
    model = build(lab.write(kind="exl2", **SIZES))
    places = [Device("cuda:0"), Device("cuda:1")]
    with pytest.raises(errors.DeviceError, match=r"(?s)Insufficient space.*cuda:1.*EXL_DEVICE=cpu"):
        plan_parallel(model.config, model.modules, places, CacheSize("fp16", 512), [0.0001, 0.0001])


def test_one_device_is_an_ordinary_load(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab.write(**SIZES))
    model.load_tp([8.0])
    assert model.tp_context is None
    cache = ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q8, batch_size=2)
    assert len(cache.caches) == 1
    expected = model.forward(ids, ExLlamaV2Cache_Q8(model, batch_size=2))
    assert torch.equal(model.forward(ids, cache), expected)


def test_planned_bytes_and_refusal(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan states what each device holds; a model that does not fit is rejected before any weight is read."""
    sizes = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 2000}
    folder = lab.write(kind="exl2", **sizes)
    monkeypatch.setenv("EXL_DEVICE", "cpu:0=0.5,cpu:1=0.3")
    model = build(folder, max_input_len=256)
    size = CacheSize("q4", 2048)
    found, shares = plan_parallel(model.config, model.modules, devices(), size, None)
    model.load_tp(expect_cache_tokens=2048, expect_cache_base=ExLlamaV2Cache_Q4)
    assert model.tp_context is not None
    assert model.tp_context.shares == shares
    assert sum(d.weights for d in found.devices) == pytest.approx(model.weight_bytes(), rel=0.02)
    held = [0, 0]
    for linear in (linear for m in model.modules for linear in m.submodules()):
        assert isinstance(linear.matrix, SplitMatrix | SumMatrix)
        for part in linear.matrix.parts if isinstance(linear.matrix, SplitMatrix) else linear.matrix.pieces:
            assert part.matrix is not None
            held[part.shard] += part.matrix.nbytes
    assert found.devices[1].weights == pytest.approx(held[1], rel=0.05)
    cache = ExLlamaV2Cache_TP(model, ExLlamaV2Cache_Q4, max_seq_len=2048)
    assert [d.cache for d in found.devices] == cache.footprint()
    assert found.max_cache_tokens is not None
    model.unload()
    tight = plan_parallel(model.config, model.modules, devices(), CacheSize("q4", found.max_cache_tokens), None)[0]
    assert tight.fits
    with pytest.raises(errors.DeviceError, match=r"(?s)Insufficient space.*cpu:0.*cpu:1.*largest cache that fits"):
        model.load_tp(expect_cache_tokens=found.max_cache_tokens + 256, expect_cache_base=ExLlamaV2Cache_Q4)
    with pytest.raises(errors.DeviceError, match="Insufficient space"):
        model.load_tp([0.0001, 0.0001])
    assert model.tp_context is None
    assert all(linear.cut is None for m in model.modules for linear in m.submodules())
    listed = list(model.load_tp_gen([1.0, 1.0], callback_gen=lambda i, n: iter([i])))
    assert listed == list(range(len(model.modules) + 1))


def exchanged_bytes(model: ExLlamaV2, count: int = 2) -> list[int]:
    """Bytes of exchange buffers in the plan of each of `count` GPUs: none where each has a process."""
    config, places = model.config, [Device(f"cuda:{at}", 8 << 30) for at in range(count)]
    arguments = (config, model.modules, places, CacheSize("fp16", 512), [4.0] * count)
    found, alone = (plan_parallel(*arguments, separate=separate)[0] for separate in (False, True))
    return [a.tables - b.tables for a, b in zip(found.devices, alone.devices, strict=True)]


EXCHANGED: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 160}


@pytest.mark.parametrize(("sequences", "rows"), [(1, 16), (3, 48), (100, 64)])
def test_plans_of_gpus_count_the_exchange_buffers(lab: Any, sequences: int, rows: int) -> None:
    """One set for steps of up to 1, 2, 4, .. rows: two halves, of 64 bits for 32. Logits are only for the first GPU."""
    model = build(lab.write(kind="exl2", **EXCHANGED), max_decode_batch=sequences)
    config = model.config
    widest = max(config.intermediate_size, config.hidden_size, config.num_attention_heads * config.head_dim)
    sets = 2 * (1 << (rows - 1).bit_length()) - 1
    shared, logits = 2 * widest, 4 * config.vocab_size
    assert logits > shared
    assert exchanged_bytes(model) == [sets * 2 * (shared + logits), sets * 4 * shared]


def test_plans_count_no_exchange_buffers_where_no_step_is_captured(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float matrices, parts with padding, more GPUs than heads or than an exchange has, and settings."""
    model = build(lab.write(kind="exl2", **EXCHANGED))
    assert min(exchanged_bytes(model)) > 0
    assert min(exchanged_bytes(model, 4)) > 0
    assert exchanged_bytes(model, 5) == [0] * 5
    assert exchanged_bytes(build(lab.write(kind="float", **EXCHANGED))) == [0, 0]
    assert exchanged_bytes(build(lab.write(kind="exl2", **{**EXCHANGED, "vocab_size": 130}))) == [0, 0]
    for count, exchanged in ((8, True), (9, False)):
        heads = {"num_attention_heads": count, "num_key_value_heads": count, "head_dim": 32}
        wide = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32 * count)
        found = exchanged_bytes(build(lab.write(kind="exl2", **heads, **wide)), count)
        assert [held > 0 for held in found] == [exchanged] * count
    assert exchanged_bytes(build(lab.write(kind="exl2", **EXCHANGED), no_graphs=True)) == [0, 0]
    monkeypatch.setenv("EXL_CUDA_GRAPHS", "0")
    assert exchanged_bytes(model) == [0, 0]


def test_a_failing_load_leaves_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    model = build(lab.write(**SIZES))
    steps = model.load_tp_gen([1.0, 1.0], callback_gen=lambda i, n: iter([i]))
    for _ in range(4):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert model.tp_context is None
    assert not model.loaded
    assert model.weight_bytes() == 0
    model.load_tp([1.0, 1.0])
    assert torch.isfinite(model.forward(ids)).all()


def test_shares_are_whole_and_complete() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(300):
        count = int(torch.randint(1, 6, (1,), generator=generator))
        weights = torch.rand(count, generator=generator) ** 3
        weights /= weights.sum()
        shares = Shares(tuple(weights.tolist()), tuple(weights.flip(0).tolist()))
        total = int(torch.randint(1, 300, (1,), generator=generator))
        for bounds in (shares.kv_heads(total), shares.features(total)):
            assert bounds[0][1] == 0
            assert bounds[-1][2] == total
            assert all(a[2] == b[1] and a[0] < b[0] for a, b in pairwise(bounds))
            assert all(begin < end for _, begin, end in bounds)
        assert all(begin % 32 == 0 for _, begin, _ in shares.features(total))
        assert len(shares.experts(total)) == total
        assert sorted(shares.experts(total)) == shares.experts(total)
