"""Small random models on disk, made without any other library: float, EXL2 or GPTQ, in one or several files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Config
from exl_core.convert import quantize_model
from exl_core.layers import Head, Linear, MoE
from exl_core.loading.checkpoint import TensorReader
from exl_kernels import formats
from exl_kernels.safetensors_file import write_safetensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 90,
}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Float16 weights of a Llama-shaped model, in Hugging Face names and orientation."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_width, kv_width = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = config["architectures"] == ["Qwen2ForCausalLM"] or config.get("attention_bias", False)
    o_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)

    def normal(*shape: int, std: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * (std or shape[-1] ** -0.5)).half()

    tensors = {"model.embed_tokens.weight": normal(vocab, hidden, std=1.0)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(vocab, hidden, std=0.3)
    tensors["model.norm.weight"] = 1 + normal(hidden, std=0.1)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + normal(hidden, std=0.1)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_width, hidden, qkv_bias),
            ("self_attn.k_proj", kv_width, hidden, qkv_bias),
            ("self_attn.v_proj", kv_width, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, q_width, o_bias),
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns)
            if bias:
                tensors[f"{prefix}{name}.bias"] = normal(rows, std=0.2)
    return tensors


def quantize(
    tensors: dict[str, Tensor], kind: str, keep: Callable[[str], bool] = lambda key: False
) -> dict[str, Tensor]:
    """The same model with its linears in `kind`: "exl2" (mixed widths, permuted), "gptq" or "gptq-act-order"."""
    result: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        key = name.removesuffix(".weight")
        linear = name.endswith("_proj.weight") or name == "lm_head.weight"
        if not linear or keep(key) or (kind.startswith("gptq") and tensor.shape[0] % 32):
            result[name] = tensor
            continue
        perm = torch.randperm(tensor.shape[1], generator=generator)
        if kind == "exl2":
            parts = formats.exl2_quantize(tensor, "0.3:6b_32g/0.7:4b_32g", perm=perm, fast=True)
        else:
            parts = formats.gptq_quantize(
                tensor, bits=4, group_size=32, perm=perm if kind == "gptq-act-order" else None
            )
        result.update({f"{key}.{part}": t for part, t in parts.items()})
    for name in [n for n in result if n.endswith(".bias")]:
        key = name.removesuffix(".bias")
        if f"{key}.q_weight" in result:  # the format stores biases padded like the columns
            missing = result[f"{key}.q_weight"].shape[1] - result[name].shape[0]
            result[name] = torch.nn.functional.pad(result[name], (0, missing))
    return result


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """config.json and the weights, tensor i in shard i mod `shards`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / name, {n: tensors[n] for n in names[shard::shards]})
    return folder


def load(folder: Path, **fields: Any) -> ExLlamaV2:
    """Prepare, set `fields` on the config, build and load. The exact path unless `cpu_matmul` says otherwise."""
    config = ExLlamaV2Config(folder)
    for name, value in {"cpu_matmul": "exact", **fields}.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    model = ExLlamaV2(config)
    model.load()
    return model


def dequantized_tensors(linear: Linear) -> dict[str, Tensor]:
    """The matrix as its codes stand for, in the orientation of the family's files."""
    weight = linear.get_weight_tensor_dq()
    return {"weight": (weight if linear.spec.transposed else weight.T).contiguous()} | bias_of(linear)


def bias_of(linear: Linear) -> dict[str, Tensor]:
    if not linear.spec.bias:
        return {}
    return {"bias": (linear.forward(torch.zeros(1, linear.in_features))[0] / linear.spec.prescale).half()}


def rewrite(model: Any, folder: Path, parts: dict[str, dict[str, Tensor]]) -> Path:
    """The model's files with its linears replaced by `parts`, key -> suffix -> tensor, and all names mapped."""
    checkpoint = model.config.checkpoint
    reader = TensorReader(checkpoint)
    linears = {linear.key: linear for m in model.modules for linear in m.submodules()}
    gone = set(parts) | {linears[key].spec.fused_key for key in parts}
    tensors = {
        name: reader.read(name)
        for name in checkpoint.tensors
        if name not in gone and name.rpartition(".")[0] not in gone
    }
    tensors |= {f"{key}.{suffix}": t for key, part in parts.items() for suffix, t in part.items()}
    folder.mkdir()
    shutil.copy(Path(model.config.model_dir) / "config.json", folder)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def is_router(module: Any, linear: Linear) -> bool:
    return isinstance(module, MoE) and linear in (module.router, module.shared_gate)


def dequantized_twin(model: ExLlamaV2, folder: Path) -> Path:
    """The model's files with every quantized matrix dequantized to float."""
    linears = [q for m in model.modules for q in m.submodules() if q.is_quant() and not q.spec.unit_rows]
    return rewrite(model, folder, {q.key: dequantized_tensors(q) for q in linears})


def check_written(model: ExLlamaV2, ids: Tensor, kind: str, folder: Path) -> None:
    """Our quantizer's folder of `model`'s: what is quantized, close to what it was, and run as its dequantized twin."""
    columns = 1 if kind == "exl2" else 32
    bits = 5.5 if kind == "exl2" else 4
    report = quantize_model(
        str(model.config.model_dir), folder / "written", bits=bits, format=kind, group_size=32, fast=True
    )
    written = load(folder / "written")
    found = {linear.key: linear for m in written.modules for linear in m.submodules()}
    assert {key for key, linear in found.items() if linear.is_quant()} == set(report.plans)
    last = model.modules[-1]
    assert isinstance(last, Head)
    head = last.linear.key
    assert (head in report.plans) == (kind == "exl2")
    for module in model.modules[:-1]:
        slot = [linear for linear in module.submodules() if not is_router(module, linear)]
        held = [linear.in_features % 32 == 0 and linear.out_features % columns == 0 for linear in slot]
        assert [linear.key in report.plans for linear in slot] == held or not all(held)
    assert len(report.plans) >= 2 * model.config.num_hidden_layers
    for key in report.plans:
        weight, before = (q.get_weight_tensor_dq().float() for q in (found[key], linear_of(model, key)))
        assert float((weight - before).norm() / before.norm()) < 0.15, key
    ours = written.forward(ids)
    twin = load(dequantized_twin(written, folder / "twin"))
    expected = twin.forward(ids)
    columns = model.config.vocab_size
    error = float((ours - expected)[..., :columns].abs().max() / expected[..., :columns].abs().max())
    assert error < 2e-3


def linear_of(model: ExLlamaV2, key: str) -> Linear:
    """A matrix by its key."""
    return next(linear for m in model.modules for linear in m.submodules() if linear.key == key)


class Lab:
    """The helpers of this file, as one object for tests."""

    config = CONFIG
    random_tensors = staticmethod(random_tensors)
    quantize = staticmethod(quantize)
    write_model = staticmethod(write_model)
    load = staticmethod(load)
    bias_of = staticmethod(bias_of)
    check_written = staticmethod(check_written)
    dequantized_tensors = staticmethod(dequantized_tensors)
    dequantized_twin = staticmethod(dequantized_twin)
    is_router = staticmethod(is_router)
    rewrite = staticmethod(rewrite)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def write(self, shards: int = 1, kind: str = "float", seed: int = 0, **changes: Any) -> Path:
        """A fresh model folder; `changes` go into config.json."""
        config = {**CONFIG, **changes}
        tensors = random_tensors(config, seed)
        if kind != "float":
            tensors = quantize(tensors, kind)
        self._count += 1
        return write_model(self.folder / f"model-{self._count}", config, tensors, shards)

    def ids(self, batch: int, tokens: int, vocab: int = 90, seed: int = 1) -> Tensor:
        return torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """torch's own pool would fight ours for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
