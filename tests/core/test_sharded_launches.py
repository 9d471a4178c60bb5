"""The launches of each device of a sharded model, on the CPU: devices are threads that meet at every exchange."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from joined_on_cpu import joined_on_cpu
from random_models import write_random_model
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Cache_TP, ExLlamaV2Config, PagedParams
from exl_core.convert import quantize_model
from exl_core.execution.build_step import Chunk, build_step
from exl_core.execution.sharded.coverage import RowBytes, StoredWeights, refusal_of_exchange, row_bytes
from exl_core.execution.sharded.cutting import output_bounds
from exl_core.execution.sharded.launches import Gather, ShardLaunches, shard_launches_of
from exl_core.execution.sharded.shares import Shares
from exl_core.loading.checkpoint import TensorReader

pytestmark = pytest.mark.covers("core: tensor-parallel")

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 160,
}
CONFIG: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
}
PAGE = 16


class ThreadExchange:
    """The exchanges of a step: every device brings its columns, then takes all."""

    def __init__(self, devices: int) -> None:
        self._barrier = threading.Barrier(devices)
        self._brought: list[Tensor | None] = [None] * devices
        self.counts = [0] * devices
        self.end = self._barrier.abort

    def of(self, shard: int) -> Gather:
        def gather(own: Tensor, begins: Sequence[int], full: Tensor | None, receivers: Sequence[int] | None) -> Tensor:
            assert own.shape[1] == begins[shard + 1] - begins[shard]
            self.counts[shard] += 1
            self._brought[shard] = own.clone()
            self._barrier.wait()
            whole = torch.cat([part for part in self._brought if part is not None], 1)
            self._barrier.wait()
            if receivers is not None and shard not in receivers:
                return own.new_full((own.shape[0], begins[-1]), float("nan"))
            return whole if full is None else full.copy_(whole)

        return gather


def write(lab: Any, kind: str, family: str, **sizes: int) -> Any:
    """A model folder of SIZES and others; a Qwen3 has norms of each head of q and k."""
    config = {**lab.config, **SIZES, **sizes, "architectures": [family]}
    tensors, generator = lab.random_tensors(config), torch.Generator().manual_seed(5)
    if family == "Qwen3ForCausalLM":
        for layer in range(config["num_hidden_layers"]):
            for norm in ("q_norm", "k_norm"):
                weight = 1 + torch.randn(SIZES["head_dim"], generator=generator) / 4
                tensors[f"model.layers.{layer}.self_attn.{norm}.weight"] = weight.half()
    return lab.write_model(lab.folder / f"sharded-{kind}-{family}", config, lab.quantize(tensors, kind))


def build(folder: Any) -> ExLlamaV2:
    config = ExLlamaV2Config(folder)
    config.cpu_matmul = "exact"
    return ExLlamaV2(config)


def sharded(monkeypatch: pytest.MonkeyPatch, folder: Any, shares: list[float]) -> ExLlamaV2:
    """The model over logical CPUs, its MLPs cut by outputs as on GPUs."""
    monkeypatch.setenv("EXL_DEVICE", ",".join(f"cpu:{i}" for i in range(len(shares))))
    monkeypatch.setattr(Shares, "all_have_quarters", lambda shares: False)
    model = build(folder)
    model.load_tp(shares)
    return model


def predicted(model: ExLlamaV2) -> str | None:
    """The reason against launches that a load plan finds, from headers alone."""
    context, checkpoint = model.tp_context, model.config.checkpoint
    assert context is not None
    assert checkpoint is not None
    fresh, shards = ExLlamaV2(model.config).modules, len(context.names)
    bounds = output_bounds(fresh, context.shares, context.heads)
    return refusal_of_exchange(fresh, shards, StoredWeights(TensorReader(checkpoint), bounds, shards))


def run(model: ExLlamaV2, made: list[ShardLaunches], ids: Tensor, params: PagedParams, cache: Any) -> Tensor:
    """The logits of a step of all devices at once."""
    context = model.tp_context
    assert context is not None
    batch, q_len = ids.shape
    barrier, results = ThreadExchange(len(made)), [torch.empty(0)] * len(made)
    logits = torch.empty(batch * q_len, model.config.padded_vocab_size)
    pages = context.pages(cache, params.page_size, (batch, model.config.head_dim))

    def device(shard: int) -> None:
        step = build_step(model, Chunk(cache, params, batch, q_len), torch.device("cpu"))
        step.pages = pages[shard]
        try:
            with torch.inference_mode():
                results[shard] = made[shard].run(ids.reshape(-1), step, barrier.of(shard), None if shard else logits)
        except BaseException:
            barrier.end()  # the others would wait for this device
            raise

    threads = [threading.Thread(target=device, args=(shard,)) for shard in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] is logits
    assert set(barrier.counts) == {2 * (len(model.modules) - 3) + 2}, "an even number, the same of every device"
    return logits


OTHER_NORMS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "Gemma3ForCausalLM": {"sliding_window": 16, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
    "Exaone4ForCausalLM": {"sliding_window": 16},
    "Starcoder2ForCausalLM": {"use_bias": True},
}
"""Norms of results, a hidden state of float32, LayerNorms, MLPs without gate, and what their families need."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shares", [[8.0, 8.0], [4.0, 14.0], [8.0] * 4], ids=["two", "uneven", "four"])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("kind", ["exl2", "gptq"])
def test_all_devices_together_are_one_device(
    lab: Any, monkeypatch: pytest.MonkeyPatch, kind: str, family: str, shares: list[float]
) -> None:
    """Logits and stored keys are bitwise identical, for one token a row and for several."""
    folder = write(lab, kind, family)
    whole, model, made = both(monkeypatch, folder, shares)
    shared = 2 * max(SIZES["hidden_size"] + 2 * len(made) - 2, SIZES["intermediate_size"], 8 * SIZES["head_dim"])
    assert row_bytes(model.modules, len(made)) == RowBytes(shared, 4 * SIZES["vocab_size"])
    compare(lab, whole, model, made)


@pytest.mark.parametrize("shares", [[8.0, 8.0], [4.0, 14.0]], ids=["two", "uneven"])
@pytest.mark.parametrize("family", OTHER_NORMS)
def test_other_norms_are_those_of_one_device_too(
    lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, shares: list[float]
) -> None:
    compare(lab, *both(monkeypatch, write_other(tmp_path, family), shares))


def write_other(folder: Path, family: str, **sizes: int) -> Path:
    """A quantized model of two layers of a family of OTHER_NORMS, of CONFIG's sizes and others."""
    config = {**CONFIG, "num_hidden_layers": 2, "architectures": [family], **OTHER_NORMS[family], **sizes}
    source = write_random_model(folder / "float", config)
    quantize_model(source, folder / "quantized", bits=4.0, fast=True)
    return folder / "quantized"


def both(
    monkeypatch: pytest.MonkeyPatch, folder: Any, shares: list[float]
) -> tuple[ExLlamaV2, ExLlamaV2, list[ShardLaunches]]:
    """The model on one device, and over several with its launches."""
    monkeypatch.setenv("EXL_DEVICE", "cpu")
    whole = build(folder)
    whole.load()
    model = sharded(monkeypatch, folder, shares)
    joined_on_cpu(monkeypatch)
    made = shard_launches_of(model)
    assert isinstance(made, list), made
    return whole, model, made


def compare(lab: Any, whole: ExLlamaV2, model: ExLlamaV2, made: list[ShardLaunches]) -> None:
    """Compare logits and stored keys of steps, of one token a row and of several."""
    assert predicted(model) is None
    for batch, q_len in ((1, 1), (5, 1), (2, 3)):
        ids = lab.ids(batch, 20 + q_len, vocab=160)
        table = torch.arange(2 * batch, dtype=torch.int32).flip(0).view(batch, 2)
        begin = PagedParams(batch, table, torch.zeros(batch, dtype=torch.int32), 0, PAGE, 20)
        after = PagedParams(batch, table, torch.full((batch,), 20, dtype=torch.int32), 20, PAGE, q_len)
        cache = ExLlamaV2Cache(whole, max_seq_len=2 * PAGE * batch)
        parts = ExLlamaV2Cache_TP(model, max_seq_len=2 * PAGE * batch)
        for one, held in ((whole, cache), (model, parts)):
            one.forward_chunk(ids[:, :20], held, attn_params=begin, preprocess_only=True)
        want = whole.forward_chunk(ids[:, 20:], cache, attn_params=after)["logits"].flatten(0, 1)
        assert torch.equal(run(model, made, ids[:, 20:], after, parts), want)
        held_keys = [part.key_states[0] for part in parts.shards()]
        keys = torch.cat([own for own in held_keys if own is not None], 2)
        assert torch.equal(keys, cache.key_states[0])  # type: ignore[arg-type]


def test_models_without_such_launches(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names what is in the way."""
    joined_on_cpu(monkeypatch)
    for changes, reason in (
        ({"kind": "float"}, "not quantized"),
        ({"kind": "exl2", "vocab_size": 130}, "in one piece"),
        ({"kind": "exl2", "num_key_value_heads": 1}, "in one piece"),
    ):
        model = sharded(monkeypatch, lab.write(**{**SIZES, **changes}), [8.0, 8.0])
        found = shard_launches_of(model)
        assert isinstance(found, str)
        assert reason in found
        assert predicted(model) == found


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, "chooses among 4 experts"),
        ("CohereForCausalLM", {"logit_scale": 0.5}, "side by side"),
        ("Olmo2ForCausalLM", {}, "norms them over all heads"),
        ("GPT2LMHeadModel", {"n_embd": 128, "n_head": 8, "n_layer": 1, "n_positions": 128}, "wpe"),
    ],
)
def test_families_without_such_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, family: str, more: dict[str, Any], reason: str
) -> None:
    """The description of the layers decides."""
    joined_on_cpu(monkeypatch)
    folder = write_random_model(tmp_path / family, {**CONFIG, "architectures": [family], **more})
    model = sharded(monkeypatch, folder, [8.0, 8.0])
    found = shard_launches_of(model)
    assert isinstance(found, str)
    assert reason in found
    assert predicted(model) == found
