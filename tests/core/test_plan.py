"""The load planner: planned bytes are measured bytes, the largest context fits and no more, fast refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from counting import lines
from mixtures import SIZES
from random_models import write_random_model

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2CacheBase,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    errors,
)
from exl_core.device import GIB, Device
from exl_core.layers import Attention, MoE, build_modules
from exl_core.loading.memory import free_bytes
from exl_core.loading.plan import plan
from exl_core.loading.sizes import module_sizes
from exl_kernels.moe.dequantized import dequantized_bytes, experts_at_once, plan_padded
from exl_kernels.safetensors_file import write_safetensors
from exl_kernels.sampling import workspace_bytes

pytestmark = pytest.mark.covers("core: loading-memory", "core: loading")

MIDDLE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 2048}
WEIGHTS = 0.02  # tolerance for small matrices; models beyond 100 MB: 1 % on the CPU, 3.5 % on a GPU
CACHES = (ExLlamaV2Cache, ExLlamaV2Cache_8bit, ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8)


def capped(*gib: float) -> list[Device]:
    return [Device(f"cpu:{i}", int(size * GIB)) for i, size in enumerate(gib)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("float", {}),
        ("float", {"tie_word_embeddings": True}),
        ("exl2", {}),
        ("gptq", {}),
        ("gptq-act-order", {"architectures": ["Qwen2ForCausalLM"]}),
    ],
)
def test_weights_are_as_planned(lab: Any, kind: str, changes: dict[str, Any]) -> None:
    folder = lab.write(kind=kind, **{**MIDDLE, **changes})
    found = plan(ExLlamaV2Config(folder), on=capped(4.0))
    measured = lab.load(folder).weight_bytes()
    assert measured <= found.devices[0].weights * (1 + WEIGHTS)
    assert found.devices[0].weights <= measured * (1 + WEIGHTS)


@pytest.mark.parametrize("cls", CACHES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_caches_are_exactly_as_planned(lab: Any, cls: type[ExLlamaV2CacheBase], head_dim: int) -> None:
    folder = lab.write(head_dim=head_dim)
    model = lab.load(folder)
    cache = cls(model, batch_size=2, max_seq_len=256)
    found = plan(model.config, cache=cls.kind, cache_tokens=512, on=capped(4.0))
    assert found.devices[0].cache == sum(t.nbytes for t in cache.all_tensors())


def test_default_reserve_of_each_device(lab: Any) -> None:
    """192 MiB of the first device, 64 MiB of each other one."""
    config = ExLlamaV2Config(lab.write(**MIDDLE))
    found = plan(config, on=capped(1.0, 1.0, 1.0))
    assert [d.reserve for d in found.devices] == [192 << 20, 64 << 20, 64 << 20]
    assert [d.budget for d in found.devices] == [(1 << 30) - (192 << 20), *[(1 << 30) - (64 << 20)] * 2]
    assert Device("cpu:0", 100 << 20) not in [d.device for d in found.devices]
    tight = plan(config, on=[Device("cpu:0", 100 << 20), Device("cpu:1", 1 << 30)])
    assert tight.devices[0].budget == 0  # less than what is left free
    assert tight.devices[0].modules == []


def test_fused_matrices_count_once(lab: Any, tmp_path: Path) -> None:
    tensors = lab.random_tensors({**lab.config, **MIDDLE})
    split = lab.write_model(tmp_path / "split", {**lab.config, **MIDDLE}, tensors)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{prefix}{p}_proj.weight") for p in "qkv"]
        tensors[f"{prefix}qkv_proj.weight"] = torch.cat(parts)
    fused = lab.write_model(tmp_path / "fused", {**lab.config, **MIDDLE}, tensors)
    a, b = (plan(ExLlamaV2Config(f), on=capped(4.0)).devices[0].weights for f in (split, fused))
    assert a == b


@pytest.mark.parametrize("kind", ["exl2", "gptq"])
def test_parts_of_a_fused_quantized_matrix_share_its_bytes(lab: Any, tmp_path: Path, kind: str) -> None:
    config = {**lab.config, **MIDDLE}
    tensors = lab.random_tensors(config)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for whole, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            names = [f"{prefix}{whole.split('.')[0]}.{part}_proj.weight" for part in parts]
            tensors[f"{prefix}{whole}.weight"] = torch.cat([tensors.pop(name) for name in names])
    folder = lab.write_model(tmp_path, config, lab.quantize(tensors, kind))
    found = plan(ExLlamaV2Config(folder), on=capped(4.0))
    assert found.devices[0].weights == pytest.approx(lab.load(folder).weight_bytes(), rel=WEIGHTS)


def test_the_largest_context_fits_and_one_page_more_does_not(lab: Any) -> None:
    config = ExLlamaV2Config(lab.write(**MIDDLE))
    for places in (capped(0.06), capped(0.02, 0.03)):
        for kind in ("fp16", "q4"):
            first = plan(config, cache=kind, cache_tokens=256, reserve=0, on=places)
            most = first.max_cache_tokens
            assert first.fits
            assert most is not None
            assert most % 256 == 0
            assert most > 256
            assert plan(config, cache=kind, cache_tokens=most, reserve=0, on=places).fits
            beyond = plan(config, cache=kind, cache_tokens=most + 256, reserve=0, on=places)
            assert not beyond.fits
            assert beyond.max_cache_tokens == most
            with pytest.raises(errors.DeviceError, match=f"largest cache that fits: {most} tokens"):
                beyond.check()
    assert plan(config, on=capped(0.001), reserve=0).max_cache_tokens == 0


def test_a_large_model_is_refused_without_its_file(lab: Any, tmp_path: Path) -> None:
    """Nothing is read of 400 layers, let alone allocated, and each costs what it costs in a small model."""

    def refused(layers: int) -> int:
        config = {**lab.config, "num_hidden_layers": layers, "vocab_size": 64}
        folder = lab.write_model(tmp_path / str(layers), config, lab.random_tensors(config))
        prepared = ExLlamaV2Config(folder)
        (folder / "model.safetensors").unlink()
        found: list[Any] = []
        places = capped(0.01, 0.01) if layers == 400 else capped(0.001, 0.001)
        work = lines(lambda: found.append(plan(prepared, cache_tokens=32768, on=places, reserve=0)))
        assert not found[0].fits
        assert len(found[0].assignment) == 2 * layers + 3
        assert "" in found[0].assignment
        return work

    assert refused(400) < 12 * refused(50)


def test_table_names_every_device_and_sum(lab: Any) -> None:
    config = ExLlamaV2Config(lab.write(**MIDDLE))
    found = plan(config, on=capped(0.02, 0.5), reserve=0)
    lines = found.table().splitlines()
    assert lines[0].split() == [
        *("device", "modules", "weights", "cache", "LoRA", "draft", "tables", "scratch", "sum", "budget"),
    ]
    assert [line.split()[0] for line in lines[1:3]] == ["cpu:0", "cpu:1"]
    assert lines[3].startswith("fits")
    assert sum(int(line.split()[1]) for line in lines[1:3]) == len(found.assignment)
    for device in found.devices:
        parts = (device.weights, device.cache, device.loras, device.draft, device.tables, device.scratch)
        assert device.budget is not None
        assert device.used == sum(parts) <= device.budget


def test_adapters_and_a_draft_model_count(lab: Any, tmp_path: Path) -> None:
    folder = lab.write(**MIDDLE)
    config = ExLlamaV2Config(folder)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.ones(16, 512), f"{name}.lora_B.weight": torch.ones(512, 16)}
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text('{"r": 16, "lora_alpha": 16}')
    model = ExLlamaV2(config)
    model.load()
    measured = ExLlamaV2Lora.from_directory(model, tmp_path).nbytes
    draft = ExLlamaV2Config(lab.write())
    base = plan(config, on=capped(4.0)).devices[0]
    full = plan(config, loras=[tmp_path], draft=draft, on=capped(4.0)).devices[0]
    assert full.loras == pytest.approx(measured, rel=0.05)
    alone = plan(draft, cache_tokens=config.max_seq_len, on=capped(4.0)).devices[0]
    assert full.draft == alone.used
    assert full.used == base.used + full.loras + full.draft
    with pytest.raises(errors.InputError, match="no LoRA adapter"):
        plan(config, loras=[tmp_path / "nowhere"])


def test_logits_of_a_whole_chunk_count_unless_one_is_asked_for(lab: Any) -> None:
    config = ExLlamaV2Config(lab.write(**{**MIDDLE, "vocab_size": 32000}))
    one = plan(config, on=capped(4.0)).devices[0].scratch
    every = plan(config, last_id_only=False, on=capped(4.0)).devices[0].scratch
    assert every >= 2048 * 32000 * 4 > 4 * one
    config.max_output_len = 16
    assert plan(config, last_id_only=False, on=capped(4.0)).devices[0].scratch < every / 50


def test_memory_of_the_sampler_is_planned_for_draft_tokens(lab: Any) -> None:
    """A step has up to 16 rows of a sequence, and at most 256."""
    config = ExLlamaV2Config(lab.write(**{**MIDDLE, "vocab_size": 32000}))
    found = {}
    for batch in (1, 16, 32):
        config.max_batch_size = batch
        found[batch] = _head_scratch(config)
    logits = 2 * 4 * 32000
    assert found[1] == logits + workspace_bytes(16, 32000)
    assert found[16] == 16 * logits + workspace_bytes(256, 32000)
    assert found[32] - found[16] == 16 * logits, "no more rows are drawn at once"
    assert workspace_bytes(256, 32000) > 256 * 32000 * 4


def test_memory_of_decode_steps_is_planned_apart_from_that_of_chunks(lab: Any) -> None:
    """A server decodes many sequences, and computes prompts in chunks of one."""
    config = ExLlamaV2Config(lab.write(**{**MIDDLE, "vocab_size": 16000}))
    one = plan(config, on=capped(4.0)).devices[0].scratch
    config.max_decode_batch = 256
    assert plan(config, on=capped(4.0)).devices[0].scratch >= 256 * 2 * 4 * 16000 > one
    config.max_decode_batch = 0
    with pytest.raises(errors.ConfigError, match="max_decode_batch is 0"):
        config.check_for_load()
    config.max_decode_batch = "8"  # type: ignore[assignment]
    with pytest.raises(errors.ConfigTypeError, match="max_decode_batch is '8'"):
        _ = config.decode_rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize("skew", [0.0, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("rows", [512, 700, 2048])
def test_dequantized_experts_of_a_prompt_are_planned(tmp_path: Path, rows: int, skew: float) -> None:
    """Experts hold at most what is planned, whether rows choose them evenly or nearly all the same ones."""
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 16, "num_experts_per_tok": 2}
    config = ExLlamaV2Config(write_random_model(tmp_path, {**SIZES, **mixture}))
    modules = build_modules(config)
    at, mixed = next((at, module) for at, module in enumerate(modules) if isinstance(module, MoE))
    planned = module_sizes(config, modules, "cuda", rows, 1)[at].scratch
    hidden, width = config.hidden_size, mixed.experts[0].up.out_features
    likely = torch.linspace(0, skew, 16).exp()
    ids = torch.multinomial(likely.expand(rows, 16), 2, generator=torch.Generator().manual_seed(rows))
    begins = torch.nn.functional.pad(torch.bincount(ids.flatten(), minlength=16).cumsum(0), (1, 0))
    groups = plan_padded(begins, experts_at_once(hidden, width)).groups
    held = [group.experts * group.rows for group in groups]
    matrices = dequantized_bytes(hidden, width)
    assert max(group.experts for group in groups) * 2 * hidden * width <= matrices
    assert 2 * (sum(held) * hidden + max(held) * (hidden + 2 * width)) <= planned - matrices
    # Passes keep q, k, v, the result of attention and a dequantized matrix of attention meanwhile.
    attention = next(module for module in modules if isinstance(module, Attention))
    features = [(linear.in_features, linear.out_features) for linear in attention.submodules()]
    kept = rows * (sum(n for _, n in features[:3]) + features[3][0]) + max(k * n for k, n in features)
    assert planned - module_sizes(config, [mixed], "cuda", rows, 1)[0].scratch >= 2 * kept


def test_memory_of_a_dense_layer_is_planned_with_experts(tmp_path: Path) -> None:
    """A prompt pass keeps the memory of its widest dense half while experts have their own."""
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
    found = []
    for width in (512, 4096):
        config = ExLlamaV2Config(
            write_random_model(tmp_path / str(width), {**SIZES, **mixture, "intermediate_size": width})
        )
        modules = build_modules(config)
        at = next(at for at, module in enumerate(modules) if isinstance(module, MoE))
        found.append(module_sizes(config, modules, "cuda", 2048, 1)[at].scratch)
    assert found[1] - found[0] >= 2048 * 2 * (4096 - 512) * 2


def _head_scratch(config: ExLlamaV2Config) -> int:
    """Return the working memory that is planned for the head on a GPU, for logits of one token a sequence."""
    modules = build_modules(config)
    rows = config.max_batch_size
    return module_sizes(config, modules, "cuda", rows, rows)[-1].scratch


def test_a_config_without_tensors_cannot_be_planned(lab: Any) -> None:
    config = ExLlamaV2Config()
    config.model_dir = str(lab.write())
    config.prepare(no_tensors=True)
    with pytest.raises(errors.ModelStateError, match="no_tensors"):
        plan(config)


def test_free_memory_of_logical_processors() -> None:
    for _ in range(100):  # until nobody else takes or gives back much between the two looks
        whole = free_bytes([Device("cpu")])[0]
        shared = free_bytes([Device("cpu:0"), Device("cpu:1"), Device("cpu:2", 123)])
        assert whole is None or whole > 1 << 20
        assert shared[2] == 123
        if whole is None or shared[0] == pytest.approx(whole / 2, rel=0.01):
            break
    assert shared[0] == shared[1]
    assert whole is None or shared[0] == pytest.approx(whole / 2, rel=0.01)
