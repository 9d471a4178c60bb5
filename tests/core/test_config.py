"""ExLlamaV2Config: fields and spellings of config.json, and a typed error for everything that is wrong with it."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

from exl_core import ExLlamaV2, ExLlamaV2Config, errors
from exl_core.architectures import KNOWN_TO_DIFFER, supported_architectures
from exl_core.layers import build_modules

pytestmark = pytest.mark.covers("core: config")


def config_only(folder: Path, base: dict[str, Any], **changes: Any) -> ExLlamaV2Config:
    """Prepared without weight files; a value of ... removes the key."""
    merged = {k: v for k, v in {**base, **changes}.items() if v is not ...}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(merged))
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.prepare(no_tensors=True)
    return config


@pytest.mark.covers("core: config-defaults")
def test_every_field_has_a_default() -> None:
    config = ExLlamaV2Config()
    for name in ExLlamaV2Config.__annotations__:
        getattr(config, name)
    assert (config.max_batch_size, config.max_input_len, config.max_attention_size) == (1, 2048, 2048**2)
    assert (config.max_output_len, config.scale_pos_emb, config.scale_alpha_value) == (None, 1.0, 1.0)
    assert config.cpu_matmul == "int8"


def test_fields_of_a_plain_llama(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, eos_token_id=[2, 5, 2], head_dim=None)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 90)
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_groups) == (4, 2, 2)
    assert (config.head_dim, config.max_seq_len, config.original_max_seq_len) == (16, 512, 512)
    assert (config.eos_token_id, config.eos_token_ids, config.pad_token_id) == (2, [2, 5], None)
    assert config.padded_vocab_size == 96
    assert config.layer_windows == [0, 0]
    assert config.generation_config is None


def test_a_token_id_of_minus_one_is_none(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, bos_token_id=-1, eos_token_id=[-1, 5], pad_token_id=-1)
    assert (config.bos_token_id, config.eos_token_id, config.eos_token_ids) == (None, 5, [5])


@pytest.mark.covers("core: config-defaults")
def test_generation_config_adds_eos_ids(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    config = config_only(tmp_path, lab.config)
    assert config.generation_config == {"eos_token_id": [7, 2]}
    assert config.eos_token_ids == [2, 7]


def test_older_names_of_keys(lab: Any, tmp_path: Path) -> None:
    config = config_only(
        tmp_path,
        lab.config,
        num_hidden_layers=...,
        n_layer=3,
        hidden_size=...,
        d_model=128,
        num_attention_heads=...,
        n_head=8,
        max_position_embeddings=...,
        n_positions=1024,
        num_key_value_heads=...,
    )
    assert (config.num_hidden_layers, config.hidden_size, config.max_seq_len) == (3, 128, 1024)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 8, 16)


@pytest.mark.covers("core: config-defaults")
def test_nested_text_config(lab: Any, tmp_path: Path) -> None:
    nested = {k: v for k, v in lab.config.items() if k != "architectures"}
    config = config_only(tmp_path, {"architectures": ["LlamaForCausalLM"], "text_config": nested})
    assert (config.hidden_size, config.rotary_embedding_base) == (64, 10000.0)


@pytest.mark.covers("core: config-keys")
def test_text_config_of_a_multimodal_model_counts_alone(lab: Any, tmp_path: Path) -> None:
    """The top level is not read for the language model's fields, but for tokens and the tied head."""
    text = {**{k: v for k, v in lab.config.items() if k != "architectures"}, "sliding_window": None}
    text.update(model_type="mistral", eos_token_id=7, hidden_act=None)
    outer = {"hidden_size": 32, "num_hidden_layers": 9, "rms_norm_eps": 0.1, "sliding_window": 4, "hidden_act": "gelu"}
    outer.update(rope_theta=5.0, rope_scaling={"type": "linear", "factor": 3.0}, vocab_size=50, eos_token_id=[3])
    base = {"architectures": ["Mistral3ForConditionalGeneration"], "tie_word_embeddings": False, "text_config": text}
    plain = config_only(tmp_path / "plain", base)
    config = config_only(tmp_path / "both", base, **outer)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 90)
    assert (config.norm_eps, config.activation, config.layer_windows) == (1e-5, "silu", [0, 0])
    assert config.rope_settings() == plain.rope_settings()
    assert (config.eos_token_ids, config.tie_word_embeddings) == ([3], False)


def test_flat_file_of_a_multimodal_model(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, architectures=["Qwen2VLForConditionalGeneration"], rms_norm_eps=0.1)
    assert (config.hidden_size, config.num_hidden_layers, config.norm_eps) == (64, 2, 0.1)


def test_integral_floats_and_ints_are_interchangeable(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, hidden_size=64.0, rope_theta=500000)
    assert config.hidden_size == 64
    assert isinstance(config.rotary_embedding_base, float)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3"}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3"}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0}},
    ],
)
def test_llama3_rope_in_old_and_new_spelling(lab: Any, tmp_path: Path, spelling: dict[str, Any]) -> None:
    block = "rope_scaling" if "rope_scaling" in spelling else "rope_parameters"
    spelling[block].update(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=256)
    config = config_only(tmp_path, lab.config, **spelling)
    assert config.rotary_embedding_base == 500000.0
    assert (config.alt_rope_method, config.l3_rope_factor) == ("llama3", 8)
    settings = config.rope_settings()
    assert (settings.method, settings.original_max_positions, settings.high_freq_factor) == ("llama3", 256, 4)


@pytest.mark.covers("core: rope-tables")
def test_linear_scaling_and_ntk(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, rope_scaling={"type": "linear", "factor": 4.0})
    config.scale_alpha_value = 2.0
    assert config.scale_pos_emb == 4.0
    settings = config.rope_settings()
    assert (settings.position_scale, settings.alpha) == (4.0, 2.0)


@pytest.mark.covers("core: windows-per-model")
@pytest.mark.parametrize(
    ("arch", "keys", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 32}, [32, 32]),
        ("MistralForCausalLM", {"sliding_window": None}, [0, 0]),
        ("MistralForCausalLM", {}, [4096, 4096]),
        ("LlamaForCausalLM", {"sliding_window": 32}, [0, 0]),
        ("Qwen2ForCausalLM", {"sliding_window": 32}, [0, 0]),
        ("Qwen2ForCausalLM", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, [0, 32]),
        (
            "Qwen2ForCausalLM",
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [32, 0],
        ),
    ],
)
def test_windows(lab: Any, tmp_path: Path, arch: str, keys: dict[str, Any], windows: list[int]) -> None:
    config = config_only(tmp_path, lab.config, architectures=[arch], **keys)
    assert config.layer_windows == windows
    assert config.sliding_window == max(windows)


def test_biases(lab: Any, tmp_path: Path) -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        config = config_only(tmp_path, lab.config, **changes)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(architectures=["Qwen2ForCausalLM"], attention_bias=True) == (True, False, False)


def test_set_low_mem() -> None:
    config = ExLlamaV2Config()
    config.max_output_len = 4096
    config.set_low_mem()
    assert (config.max_input_len, config.max_attention_size, config.max_output_len) == (1024, 1024**2, 1024)


@pytest.mark.parametrize("name", ["scale_pos_emb", "scale_alpha_value", "rotary_embedding_base", "max_output_len"])
def test_text_in_place_of_a_number_is_rejected(lab: Any, tmp_path: Path, name: str) -> None:
    config = config_only(tmp_path, lab.config)
    setattr(config, name, "2")
    with pytest.raises(errors.ConfigTypeError, match=f"{name} is '2', must be"):
        ExLlamaV2(config)


def test_environment_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLLAMA_NO_FLASH_ATTN", "")
    monkeypatch.setenv("EXL_CPU_MATMUL", "exact")
    config = ExLlamaV2Config()
    assert config.no_flash_attn
    assert not config.no_xformers
    assert config.cpu_matmul == "exact"


def test_prepare_twice_reads_again(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, rope_scaling={"type": "linear", "factor": 4.0})
    config.max_seq_len = 100
    (tmp_path / "config.json").write_text(json.dumps({**lab.config, "vocab_size": 64}))
    config.prepare(no_tensors=True)
    assert (config.vocab_size, config.max_seq_len, config.scale_pos_emb) == (64, 512, 1.0)


@pytest.mark.covers("core: unknown-architectures")
def test_unknown_architecture_is_refused_with_the_list(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedArchitectureError) as e:
        config_only(tmp_path, lab.config, architectures=["LamaForCausalLM"])
    for name in supported_architectures():
        assert name in str(e.value)
    assert "allow_unknown_architecture" in str(e.value)


def test_unknown_architecture_on_request(lab: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**lab.config, "architectures": ["MyLlama"]}))
    config = ExLlamaV2Config()
    config.model_dir = str(tmp_path)
    config.allow_unknown_architecture = "LlamaForCausalLM"
    config.prepare(no_tensors=True)
    assert (config.architecture, config.arch.name) == ("MyLlama", "LlamaForCausalLM")
    config.allow_unknown_architecture = "Nonsense"
    with pytest.raises(errors.UnsupportedArchitectureError, match="Nonsense"):
        config.prepare(no_tensors=True)


@pytest.mark.covers("core: unknown-architectures")
@pytest.mark.parametrize("name", sorted(KNOWN_TO_DIFFER))
def test_known_families_without_code_are_not_loaded_as_llama(lab: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**lab.config, "architectures": [name]}))
    config = ExLlamaV2Config()
    config.model_dir = str(tmp_path)
    for override in (None, "LlamaForCausalLM"):
        config.allow_unknown_architecture = override
        with pytest.raises(errors.UnsupportedArchitectureError, match=name):
            config.prepare(no_tensors=True)


@pytest.mark.covers("core: config-defaults")
def test_first_supported_of_several_architectures(lab: Any, tmp_path: Path) -> None:
    config = config_only(tmp_path, lab.config, architectures=["FalconForCausalLM", "MistralForCausalLM"])
    assert config.architecture == "MistralForCausalLM"


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"architectures": ...}, errors.ConfigKeyError, "architectures"),
    ({"architectures": []}, errors.ConfigTypeError, "architectures"),
    ({"architectures": "LlamaForCausalLM"}, errors.ConfigTypeError, "architectures"),
    ({"architectures": [3]}, errors.ConfigTypeError, "architectures"),
    ({"hidden_size": ...}, errors.ConfigKeyError, "d_model"),
    ({"hidden_size": "64"}, errors.ConfigTypeError, "hidden_size"),
    ({"hidden_size": 64.5}, errors.ConfigTypeError, "hidden_size"),
    ({"hidden_size": True}, errors.ConfigTypeError, "hidden_size"),
    ({"hidden_size": 0}, errors.ConfigError, "hidden_size"),
    ({"hidden_size": -64}, errors.ConfigError, "hidden_size"),
    ({"num_key_value_heads": 3}, errors.ConfigError, "num_key_value_heads"),
    ({"rms_norm_eps": "tiny"}, errors.ConfigTypeError, "rms_norm_eps"),
    ({"tie_word_embeddings": 1}, errors.ConfigTypeError, "tie_word_embeddings"),
    ({"eos_token_id": "2"}, errors.ConfigTypeError, "eos_token_id"),
    ({"eos_token_id": [2, "x"]}, errors.ConfigTypeError, "eos_token_id"),
    ({"eos_token_id": 10**30}, errors.ConfigError, "eos_token_id"),
    ({"hidden_act": "relu"}, errors.UnsupportedError, "relu"),
    ({"rope_scaling": {"type": "rotten", "factor": 2}}, errors.UnsupportedError, "rotten"),
    ({"rope_scaling": {"type": "dynamic"}}, errors.ConfigKeyError, "factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, errors.ConfigError, "factor"),
    ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, errors.ConfigKeyError, "short_factor"),
    (
        {"rope_scaling": {"type": "su", "long_factor": [10**400], "short_factor": [1]}},
        errors.ConfigError,
        "long_factor",
    ),
    (
        {"rope_scaling": {"type": "su", "long_factor": ["a"], "short_factor": [1]}},
        errors.ConfigTypeError,
        "long_factor",
    ),
    ({"rope_scaling": {"type": "mrope", "mrope_section": "8"}}, errors.ConfigTypeError, "mrope_section"),
    ({"rope_scaling": {"type": "linear"}}, errors.ConfigKeyError, "factor"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, errors.ConfigError, "rope_type"),
    ({"rope_scaling": [1]}, errors.ConfigTypeError, "rope_scaling"),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 6.0}}},
        errors.UnsupportedError,
        "differ between layer types",
    ),
    ({"rope_parameters": {"chunked_attention": {"rope_theta": 5.0}}}, errors.UnsupportedError, "chunked_attention"),
    ({"quantization_config": {"quant_method": "awq"}}, errors.UnsupportedError, "awq"),
]


LONGROPE = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}


@pytest.mark.covers("core: config-keys")
@pytest.mark.parametrize(
    "block",
    [
        {"type": "yarn", "factor": 4.0},
        {"type": "yarn", "original_max_position_embeddings": 64},
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"type": "dynamic", "factor": 2.0},
        {"type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **LONGROPE},
    ],
)
def test_rotations_made_from_a_length_that_the_file_lacks(lab: Any, tmp_path: Path, block: dict[str, Any]) -> None:
    config_only(tmp_path, lab.config, rope_scaling=block)
    with pytest.raises(errors.ConfigKeyError, match="max_position_embeddings is missing"):
        config_only(tmp_path, lab.config, rope_scaling=block, max_position_embeddings=...)


def test_rotations_that_need_no_length(lab: Any, tmp_path: Path) -> None:
    for block in (
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ):
        config_only(tmp_path, lab.config, rope_scaling=block, max_position_embeddings=...).rope_settings()
    phi3 = {**lab.config, "architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", **LONGROPE}}
    config = config_only(tmp_path, phi3, max_position_embeddings=131072)
    assert (config.original_max_seq_len, config.su_rope_factor) == (4096, 32.0)
    assert config_only(tmp_path, phi3, max_position_embeddings=...).max_seq_len == 4096


@pytest.mark.parametrize(("changes", "error", "named"), BAD, ids=[str(sorted(b[0].items()))[:60] for b in BAD])
def test_bad_values(lab: Any, tmp_path: Path, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named) as e:
        config_only(tmp_path, lab.config, **changes)
    assert isinstance(e.value, errors.ExlError)
    assert "config.json" in str(e.value) or error is errors.UnsupportedArchitectureError


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_broken_config_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        ExLlamaV2Config(tmp_path)


def test_missing_folder_file_and_model_dir(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Can't find model directory"):
        ExLlamaV2Config(tmp_path / "nowhere")
    with pytest.raises(errors.ConfigFileError, match=r"Can't find .*config\.json"):
        ExLlamaV2Config(tmp_path)
    with pytest.raises(errors.ConfigError, match="No model_dir"):
        ExLlamaV2Config().prepare()


@pytest.mark.covers("core: config-defaults")
def test_errors_are_the_builtin_kinds_that_users_catch() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ConfigFileError, FileNotFoundError)
    assert issubclass(errors.ConfigKeyError, KeyError)
    assert issubclass(errors.ConfigTypeError, TypeError)
    assert str(errors.ConfigKeyError("a message")) == "a message"
    assert str(errors.ConfigFileError("a message")) == "a message"
    codes = [getattr(errors, n).code for n in errors.__all__]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("cpu_matmul", "fast", errors.ConfigError),
        ("max_seq_len", 0, errors.ConfigError),
        ("max_input_len", "2048", errors.ConfigTypeError),
        ("load_in_q4", True, errors.UnsupportedError),
        ("scale_alpha_value", -1.0, errors.ConfigError),
        ("alt_rope_method", "nonsense", errors.UnsupportedError),
        ("partial_rotary_factor", 0.2, errors.ConfigError),
    ],
)
def test_settings_that_cannot_be_honoured(
    lab: Any, tmp_path: Path, field: str, value: Any, error: type[Exception]
) -> None:
    config = config_only(tmp_path, lab.config)
    setattr(config, field, value)
    with pytest.raises(error, match=field):
        ExLlamaV2(config)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 1, 2, 3, 64, 10**6, 2**31, 2**63, 10**18]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 3) | st.text(max_size=3), max_size=3),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "rope_theta", "quant_method", "bits"]),
        st.none() | st.floats() | st.sampled_from(["linear", "yarn", "llama3", "default", "gptq"]),
        max_size=4,
    ),
)
KEYS = [
    *("architectures", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "intermediate_size", "head_dim"),
    *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings", "vocab_size", "sliding_window"),
    *("layer_types", "use_sliding_window", "quantization_config", "partial_rotary_factor", "logit_scale"),
    *("attn_logit_softcapping", "query_pre_attn_scalar", "scale_depth", "text_config", "attention_bias"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size", "no_rope_layers", "multi_query"),
    *("sliding_window_pattern", "no_rope_layer_interval", "use_qk_norm", "attn_config", "ffn_config", "clip_qkv"),
    *("rope_local_base_freq", "original_max_position_embeddings", "activation_function", "use_bias", "bias", "n_inner"),
    *("logits_scaling", "residual_multiplier", "attention_multiplier", "dim_model_base", "norm_head", "vision_config"),
]
# Everything that some family insists on, so that the search goes beyond the first missing key.
COMPLETE = {
    **{"layer_norm_eps": 1e-5, "norm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5, "head_dim": 16},
    **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32},
    **{"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}, "attn_config": {"kv_n_heads": 2}},
}


@examples(600, 40)
@given(
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    nested=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2),
    family=st.sampled_from(supported_architectures()),
)
def test_any_values_give_a_config_or_a_typed_error(
    lab: Any, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], nested: dict[str, Any], family: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-config"
    with contextlib.suppress(errors.ConfigError, errors.UnsupportedError):  # anything else fails the test
        base = {**lab.config, **COMPLETE, "text_config": {"model_type": "mistral", **nested}, "architectures": [family]}
        config = config_only(folder, base, **changes)
        config.rope_settings()
        config.rope_settings_alt()
        build_modules(config)
        assert math.isfinite(config.attention_scale)
        assert len(config.layer_windows) == len(config.layer_rope) == config.num_hidden_layers
