"""Families that transformers does not have, against a small model written here; old spellings; refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import run
from torch import Tensor

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, errors
from exl_core.architectures import SUPPORTED, find_architecture, supported_architectures
from exl_core.loading.checkpoint import TensorReader

TOKENS = 24
HIDDEN, INNER, HEADS, KV, DIM, LAYERS, VOCAB = 64, 96, 4, 2, 16, 2, 90
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}

pytestmark = pytest.mark.covers("core: architectures")


@dataclass
class Twin:
    """A plain decoder over tensors in Llama's names, with the additions of these families."""

    tensors: dict[str, Tensor]
    layer_norm: bool = False
    norm_offset: float = 0.0
    activation: Callable[[Tensor], Tensor] = torch.nn.functional.silu
    embedding_scale: float = 1.0
    depth_scale: float = 1.0
    logit_scale: float = 1.0
    unit_head: bool = False
    experts: int = 0

    def norm(self, x: Tensor, key: str) -> Tensor:
        w = self.tensors[f"{key}.weight"] + self.norm_offset
        if self.layer_norm:
            return torch.nn.functional.layer_norm(x, (HIDDEN,), w, self.tensors[f"{key}.bias"], 1e-5)
        return x * w * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    def logits(self, ids: Tensor) -> Tensor:
        t = self.tensors
        x = t["model.embed_tokens.weight"][ids] * self.embedding_scale
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            x = x + self.depth_scale * self.attention(self.norm(x, p + "input_layernorm"), p + "self_attn.")
            x = x + self.depth_scale * self.mlp(self.norm(x, p + "post_attention_layernorm"), p)
        head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
        head = torch.nn.functional.normalize(head) if self.unit_head else head
        return self.norm(x, "model.norm") @ head.T * self.logit_scale

    def attention(self, h: Tensor, p: str) -> Tensor:
        n = h.shape[0]
        q, k, v = ((h @ self.tensors[f"{p}{m}_proj.weight"].T).view(n, -1, DIM).transpose(0, 1) for m in "qkv")
        q, k = self.rope(q), self.rope(k).repeat_interleave(HEADS // KV, 0)
        scores = (q @ k.transpose(1, 2)) / math.sqrt(DIM) + torch.full((n, n), -torch.inf).triu(1)
        mixed = scores.softmax(-1) @ v.repeat_interleave(HEADS // KV, 0)
        return mixed.transpose(0, 1).reshape(n, -1) @ self.tensors[f"{p}o_proj.weight"].T

    def rope(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * 5000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def mlp(self, h: Tensor, p: str) -> Tensor:
        def gated(gate: str, up: str, down: str) -> Tensor:
            w = self.tensors
            inner = self.activation(h @ w[f"{p}{gate}.weight"].T) * (h @ w[f"{p}{up}.weight"].T)
            return inner @ w[f"{p}{down}.weight"].T

        if not self.experts:
            return gated("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        p += "block_sparse_moe."
        weights, chosen = (h @ self.tensors[f"{p}gate.weight"].T).softmax(-1).topk(2, -1)
        outputs = torch.stack([gated(*(f"experts.{e}.{w}" for w in ("w1", "w3", "w2"))) for e in range(self.experts)])
        picked = torch.stack([outputs[chosen[:, s], torch.arange(len(h))] for s in range(2)])
        return ((weights / weights.sum(-1, keepdim=True)).T[:, :, None] * picked).sum(0)


def llama_tensors(lab: Any, **extra: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = lab.random_tensors({**BASE, "architectures": ["LlamaForCausalLM"], **extra})
    return tensors


def renamed(tensors: dict[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def with_norm_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    norms = [n for n in tensors if n.endswith("norm.weight")]
    return tensors | {n.replace(".weight", ".bias"): torch.randn(HIDDEN).half() * 0.2 for n in norms}


def packed_by_group(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v of each layer as InternLM2 stores them: [kv_head][its q heads, k, v][head_dim]."""
    result = dict(tensors)
    for i in range(LAYERS):
        p = f"model.layers.{i}.self_attn."
        q, k, v = (result.pop(f"{p}{m}_proj.weight").view(KV, -1, DIM, HIDDEN) for m in "qkv")
        result[f"{p}wqkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, HIDDEN)
    return renamed(
        result,
        ("self_attn.o_proj", "attention.wo"),
        ("self_attn", "attention"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("model.embed_tokens", "model.tok_embeddings"),
        ("lm_head", "output"),
    )


def with_experts(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    result = {n: t for n, t in tensors.items() if ".mlp." not in n}
    for i in range(LAYERS):
        p = f"model.layers.{i}.block_sparse_moe."
        result[f"{p}gate.weight"] = torch.randn(count, HIDDEN).half() / 4
        for e in range(count):
            for name, rows, columns in (("w1", INNER, HIDDEN), ("w3", INNER, HIDDEN), ("w2", HIDDEN, INNER)):
                result[f"{p}experts.{e}.{name}.weight"] = torch.randn(rows, columns).half() / columns**0.5
    return result


@dataclass
class Family:
    """config.json beyond BASE, how its files are made of Llama's, and what the twin does besides."""

    config: dict[str, Any] = field(default_factory=dict)
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors  # before the twin sees them
    store: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
    twin: dict[str, Any] = field(default_factory=dict)


def tanh_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


GEMMOE = {"norm_offset": 1.0, "activation": tanh_gelu, "embedding_scale": HIDDEN**0.5, "experts": 3}
LN_KEYS = (("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2"))
FAMILIES: dict[str, Family] = {
    "YiForCausalLM": Family(store=lambda t: renamed(t, *LN_KEYS)),
    "YiForCausalLM-new": Family(),
    "OrionForCausalLM": Family(change=with_norm_biases, twin={"layer_norm": True}),
    "InternLM2ForCausalLM": Family({"bias": False}, store=packed_by_group),
    "MiniCPMForCausalLM": Family(
        {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16},
        twin={"embedding_scale": 3.0, "depth_scale": 1.4 / math.sqrt(LAYERS), "logit_scale": 16 / HIDDEN},
    ),
    "IndexForCausalLM": Family({"norm_head": True}, twin={"unit_head": True}),
    "GemmoeForCausalLM": Family(
        {"head_dim": DIM, "num_local_experts": 3, "num_experts_per_tok": 2, "hidden_act": "gelu"},
        change=lambda t: with_experts({n: v for n, v in t.items() if n != "lm_head.weight"}, 3),
        twin=GEMMOE,
    ),
}


@pytest.mark.covers("core: architecture-details")
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families_that_transformers_does_not_have(
    name: str, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    family = FAMILIES[name]
    tensors = family.change(llama_tensors(lab, tie_word_embeddings=False))
    config = {**BASE, "architectures": [name.split("-")[0]], **family.config}
    model = lab.load(lab.write_model(tmp_path / "model", config, family.store(tensors)))
    twin = Twin({n: t.float() for n, t in tensors.items()}, **family.twin)
    ids = lab.ids(1, TOKENS, VOCAB)
    expected = twin.logits(ids[0])
    cache = ExLlamaV2Cache(model, max_seq_len=32)
    chunks = torch.cat([model.forward(ids[:, a : a + 7], cache) for a in range(0, TOKENS, 7)], 1)
    for found in (model.forward(ids), chunks):
        error = (found[0, :, :VOCAB] - expected).abs().max() / expected.abs().max()
        assert float(error) < 2e-3
    for kind in ("exl2", "gptq"):
        lab.check_written(model, ids, kind, tmp_path / kind)
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1,cpu:2")
    cut = ExLlamaV2(model.config)
    cut.load_tp([3.0, 8.0, 5.0])
    assert torch.equal(cut.forward(ids), model.forward(ids))


def test_every_architecture_has_a_comparison() -> None:
    """A family is not supported before its logits were compared with something."""
    text = (Path(__file__).parent / "test_against_transformers.py").read_text()
    compared = [a for a in supported_architectures() if f'"{a}"' in text or a in FAMILIES]
    same = [replace(SUPPORTED[a], name="") for a in compared]  # another name of a family that was
    missing = [a for a in supported_architectures() if a not in compared and replace(SUPPORTED[a], name="") not in same]
    assert not missing, "add a Case to test_against_transformers.py or a Family to FAMILIES"


# ------------------------------------------------------------------------------------------------------ spellings


def prepared(folder: Path, **config: Any) -> ExLlamaV2Config:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = ExLlamaV2Config()
    made.model_dir = str(folder)
    made.prepare(no_tensors=True)
    return made


LONG = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
GEMMA3_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
SPELLINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": (
        "LlamaForCausalLM",
        {"rope_theta": 7e5, "torch_dtype": "bfloat16"},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}, "dtype": "bfloat16"},
    ),
    "longrope": (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 32},
        {
            "rope_theta": ...,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                **LONG,
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "partial": (
        "Phi3ForCausalLM",
        {"partial_rotary_factor": 0.75},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.75}},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "rope_theta": 2e6,
            "rope_local_base_freq": 3e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": GEMMA3_TYPES,
            "rope_theta": ...,
            "rope_parameters": {
                "full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 3e4, "rope_type": "default"},
            },
        },
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3, "layer_norm_eps": 1e-5},
        {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": GEMMA3_TYPES, "layer_norm_eps": 1e-5},
    ),
    "mrope": (
        "Qwen2VLForConditionalGeneration",
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {
            "rope_theta": ...,
            "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "mrope_section": [2, 3, 3]},
        },
    ),
    "gemma-gelu": ("GemmaForCausalLM", {"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}),
}


@pytest.mark.covers("core: config-defaults", "core: config", "core: rope")
@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_old_and_new_spelling_are_one_model(name: str, tmp_path: Path) -> None:
    architecture, *spellings = SPELLINGS[name]
    found = []
    for number, changes in enumerate(spellings):
        config = {k: v for k, v in {**BASE, "architectures": [architecture], **changes}.items() if v is not ...}
        made = prepared(tmp_path / str(number), **config)
        found.append(
            (made.rope_settings(), made.rope_settings_alt(), made.layer_windows, made.layer_rope, made.activation)
        )
        assert made.mrope_section == ([2, 3, 3] if name == "mrope" else None)
    assert found[0] == found[1]


def test_defaults_of_keys_that_old_files_leave_out(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    made = prepared(
        tmp_path, architectures=["Gemma3ForConditionalGeneration"], text_config={**text, "intermediate_size": 10240}
    )
    assert (made.vocab_size, made.head_dim, made.num_attention_heads, made.num_key_value_heads) == (262208, 256, 8, 4)
    assert (made.norm_eps, made.rotary_embedding_base, made.rotary_embedding_base_alt) == (1e-6, 1e6, 1e4)
    assert made.layer_windows[:7] == [1024, 1024, 1024, 1024, 1024, 0, 1024]
    assert made.attention_scale == 256**-0.5
    assert made.tie_word_embeddings


def test_published_configurations(tmp_path: Path) -> None:
    """Configurations as they are published, with what they leave out."""
    pixtral = prepared(
        tmp_path / "pixtral",
        architectures=["LlavaForConditionalGeneration"],
        text_config={
            **{"model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40},
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None},
            **{"vocab_size": 131072, "max_position_embeddings": 1024000},
        },
    )
    assert (pixtral.num_attention_heads, pixtral.num_key_value_heads, pixtral.head_dim) == (32, 8, 128)
    assert (pixtral.intermediate_size, pixtral.layer_windows[0], pixtral.rotary_embedding_base) == (14336, 0, 1e9)
    phi4_mini = prepared(
        tmp_path / "phi",
        architectures=["Phi3ForCausalLM"],
        **{"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8},
        **{"num_hidden_layers": 32, "vocab_size": 200064, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144},
        rope_scaling={"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
    )
    rope = phi4_mini.rope_settings()
    assert (rope.rotary_dim, rope.factor, rope.divisors[0]) == (96, 32.0, 2.0)
    phi4_mini.max_seq_len = 4096
    assert phi4_mini.rope_settings().divisors[0] == 1.0
    command_r = prepared(
        tmp_path / "command-r",
        architectures=["CohereForCausalLM"],
        **{"hidden_size": 8192, "intermediate_size": 22528, "num_attention_heads": 64, "num_hidden_layers": 40},
        **{"max_position_embeddings": 8192, "model_max_length": 131072, "layer_norm_eps": 1e-5, "rope_theta": 8e6},
        **{"use_qk_norm": False, "logit_scale": 0.0625, "vocab_size": 256000},
    )
    assert (command_r.max_seq_len, command_r.logit_scale, command_r.tie_word_embeddings) == (131072, 0.0625, True)
    exaone = prepared(
        tmp_path / "exaone",
        architectures=["Exaone4ForCausalLM"],
        **{**BASE, "num_hidden_layers": 8, "sliding_window": 32, "sliding_window_pattern": "LLLG"},
    )
    assert exaone.layer_windows == [32, 32, 32, 0, 32, 32, 32, 0]
    assert exaone.layer_rope == ["main", "main", "main", "none"] * 2


# ------------------------------------------------------------------------------------------------------- refusals


def test_where_a_wrapper_says_that_its_head_is_the_embedding(tmp_path: Path) -> None:
    base = {**BASE, "model_type": "mistral"}
    for number, (name, changes, inside, tied) in enumerate(
        (
            ("Mistral3ForConditionalGeneration", {}, {}, True),
            ("Mistral3ForConditionalGeneration", {"tie_word_embeddings": False}, {}, False),
            ("LlavaForConditionalGeneration", {}, {}, False),
            ("LlavaForConditionalGeneration", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
            ("Qwen2VLForConditionalGeneration", {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        )
    ):
        made = prepared(tmp_path / str(number), architectures=[name], text_config={**base, **inside}, **changes)
        assert made.tie_word_embeddings is tied, (name, changes, inside)


def test_language_models_that_a_wrapper_is_not_built_for(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedArchitectureError, match="gpt_neox"):
        prepared(
            tmp_path,
            architectures=["LlavaForConditionalGeneration"],
            text_config={**BASE, "model_type": "gpt_neox"},
        )


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("MixtralForCausalLM", {"num_experts_per_tok": 2}, errors.ConfigKeyError, "num_local_experts"),
    ("MixtralForCausalLM", {"num_local_experts": 0, "num_experts_per_tok": 2}, errors.ConfigError, "num_local_experts"),
    ("Gemma2ForCausalLM", {"final_logit_softcapping": -3}, errors.ConfigError, "final_logit_softcapping"),
    ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, errors.ConfigError, "layer_types"),
    ("Cohere2ForCausalLM", {"layer_types": ["odd", "odd"]}, errors.ConfigError, "odd"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, errors.ConfigError, "no_rope_layers"),
    ("DbrxForCausalLM", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, errors.UnsupportedError, "2.0"),
    ("LlamaForCausalLM", {"use_qk_norm": True}, errors.UnsupportedError, "use_qk_norm"),
    ("LlamaForCausalLM", {"norm_head": True}, errors.UnsupportedError, "norm_head"),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, errors.UnsupportedError, "inverse_layer_idx"),
    (
        "Gemma3ForCausalLM",
        {"use_bidirectional_attention": True},
        errors.UnsupportedError,
        "use_bidirectional_attention",
    ),
    (
        "Phi3ForCausalLM",
        {"rope_scaling": {"type": "longrope", **LONG, "original_max_position_embeddings": 32}},
        errors.UnsupportedError,
        "original_max_position_embeddings",
    ),
    (
        "PhimoeForCausalLM",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
            "rope_scaling": {"type": "linear", "factor": 3.0, "short_mscale": 1.1, "long_mscale": 1.2},
        },
        errors.UnsupportedError,
        "short_mscale is not supported for rope type 'linear'",
    ),
    ("Phi3ForCausalLM", {"rope_scaling": {"type": "su", "long_mscale": 1.1}}, errors.UnsupportedError, "long_mscale"),
    ("Starcoder2ForCausalLM", {"hidden_act": "relu"}, errors.UnsupportedError, "relu"),
]


@pytest.mark.parametrize(("architecture", "changes", "error", "words"), REFUSED)
def test_refusals(architecture: str, changes: dict[str, Any], error: Any, words: str, tmp_path: Path) -> None:
    experts = {"n_heads": HEADS, "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}
    if architecture == "DbrxForCausalLM":
        changes = {"ffn_config": {**experts["ffn_config"], **changes["ffn_config"]}}  # type: ignore[dict-item]
    with pytest.raises(error, match=words):
        prepared(tmp_path, **{**BASE, "architectures": [architecture], **changes})


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.covers("core: rope")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast is -1"),
        ({"rope_scaling": {**YARN, "beta_slow": -0.5}}, "beta_slow is -0.5"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "above 1 for yarn"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "factor is 0"),
    ],
)
def test_rotations_that_are_none(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        prepared(tmp_path, **{**BASE, "architectures": ["LlamaForCausalLM"], **changes}).rope_settings()


def test_more_experts_chosen_than_there_are(lab: Any, tmp_path: Path) -> None:
    tensors = with_experts(llama_tensors(lab, tie_word_embeddings=False), 3)
    config = {**BASE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    folder = lab.write_model(tmp_path / "model", config, tensors)
    with pytest.raises(errors.ConfigError, match="num_experts_per_token"):
        lab.load(folder, num_experts_per_token=4)
    one = lab.load(folder, num_experts_per_token=1)
    assert one.modules[2].chosen == 1


def test_stacked_experts_are_read_once(lab: Any, tmp_path: Path) -> None:
    """All experts in one tensor: each file byte is read for the first of them only."""
    experts, tensors = 5, with_experts(llama_tensors(lab, tie_word_embeddings=False), 5)
    for i in range(LAYERS):
        p = f"model.layers.{i}.block_sparse_moe."
        parts = {w: [tensors.pop(f"{p}experts.{e}.{w}.weight") for e in range(experts)] for w in ("w1", "w2", "w3")}
        up = [torch.cat([gate, up]) for gate, up in zip(parts["w1"], parts["w3"], strict=True)]
        tensors[f"{p}experts.gate_up_proj"] = torch.stack(up)
        tensors[f"{p}experts.down_proj"] = torch.stack(parts["w2"])
    config = {**BASE, "architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "num_experts_per_tok": 2}
    folder = lab.write_model(tmp_path / "stacked", config, tensors)
    model = lab.load(folder)
    reader = TensorReader(model.config.checkpoint)
    for module in model.modules:
        module.load(reader, torch.device("cpu"))
    assert reader.bytes_read == sum(t.nbytes for t in tensors.values())
    split = {**config, "tie_word_embeddings": False}
    plain = {n: t for n, t in tensors.items() if ".experts." not in n}
    for i in range(LAYERS):
        p = f"model.layers.{i}.block_sparse_moe.experts."
        for e in range(experts):
            plain[f"{p}{e}.w1.weight"], plain[f"{p}{e}.w3.weight"] = tensors[f"{p}gate_up_proj"][e].chunk(2)
            plain[f"{p}{e}.w2.weight"] = tensors[f"{p}down_proj"][e]
    ids = lab.ids(1, TOKENS, VOCAB)
    other = lab.load(lab.write_model(tmp_path / "plain", split, {n: t.contiguous() for n, t in plain.items()}))
    assert torch.equal(model.forward(ids), other.forward(ids))


def test_learned_positions_do_not_extend(lab: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=24)
    transformers.GPT2LMHeadModel(config).half().save_pretrained(tmp_path)
    with pytest.raises(errors.FormatError, match="native size of 24"):
        lab.load(tmp_path, max_seq_len=25)
    model = lab.load(tmp_path)
    with pytest.raises(errors.SequenceTooLongError):
        model.forward(lab.ids(1, 25, VOCAB))
    assert model.modules[1].weight_bytes() == 24 * 32 * 2
    model.unload()
    assert model.modules[1].weight_bytes() == 0
    config = ExLlamaV2Config(tmp_path)
    assert config.checkpoint is not None
    tensors = {name: TensorReader(config.checkpoint).read(name) for name in config.checkpoint.tensors}
    tensors["model.wpe.weight"] = tensors["model.wpe.weight"][:, :31].contiguous()
    with pytest.raises(errors.FormatError, match=r"wpe.*expected \[positions, 32\]"):
        lab.load(lab.write_model(tmp_path / "narrow", json.loads((tmp_path / "config.json").read_text()), tensors))


def test_a_wrapper_is_not_loaded_without_its_own_name() -> None:
    arch = find_architecture("Gemma3ForConditionalGeneration")
    assert arch.map_key("language_model.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert arch.map_key("model.language_model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert arch.map_key("model.vision_tower.x") == "vision_tower.x"


def test_the_documented_table_is_the_code() -> None:
    script = Path(__file__).parents[2] / "scripts" / "architecture_table.py"
    assert run([str(script), "--check"]).returncode == 0, f"run {script}"
