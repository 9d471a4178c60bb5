"""Tiny random models made by transformers: our logits are its logits, in one piece, in chunks and token by token."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import split_over_two
from torch import Tensor

from exl_core import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    PagedParams,
    errors,
)
from exl_core.layers import Linear, ParallelDecoder
from exl_core.layers.sublayer import BY_OPERATOR, SubLayer
from exl_core.rope import RopeTable
from exl_kernels import formats

transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-3  # of the largest logit
TOKENS = 40

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


@dataclass(frozen=True)
class Case:
    """A transformers model by its class, and what its configuration changes of SIZES (None takes a key out)."""

    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    config: str = ""  # else the model's name with "Config" for "ForCausalLM"
    text: bool = False  # the sizes go into text_config
    max_seq_len: int | None = None  # ours, where it decides the rotation

    def configuration(self) -> Any:
        name = self.config or self.model.replace("ForCausalLM", "Config")
        sizes = {k: v for k, v in {**SIZES, **self.changes}.items() if v is not ...}
        if self.text:
            sizes = {"text_config": sizes, "vision_config": VISION[self.model], "tie_word_embeddings": False}
        return getattr(transformers, name)(**sizes, attn_implementation="eager")


def llama(**changes: Any) -> Case:
    return Case("LlamaForCausalLM", changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 12.0, 16.0],
}
GPT2: dict[str, Any] = {
    **dict.fromkeys(SIZES, ...),
    **{"vocab_size": 90, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
}
DBRX: dict[str, Any] = {
    **dict.fromkeys(SIZES, ...),
    **{"vocab_size": 90, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 5, "moe_top_k": 2, "hidden_size": 64},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 7000.0},
}
GEMMA = {"head_dim": 24, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3: dict[str, Any] = {**GEMMA, "sliding_window": 9, "query_pre_attn_scalar": 20, "num_hidden_layers": 7}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_experts": 6}
VISION: dict[str, Any] = {
    "LlavaForConditionalGeneration": {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1},
    "Mistral3ForConditionalGeneration": {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1},
    "Gemma3ForConditionalGeneration": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "Qwen2VLForConditionalGeneration": {"embed_dim": 32, "depth": 1, "num_heads": 2, "hidden_size": 64},
    "Qwen2_5_VLForConditionalGeneration": {"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
}
MROPE = {"rope_parameters": {"rope_theta": 9000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}}

CASES: dict[str, Case] = {
    "llama": llama(),
    "llama-mha-bias": llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama-mqa-tied-head-dim": llama(num_key_value_heads=1, head_dim=24, tie_word_embeddings=True),
    "llama-gelu": llama(hidden_act="gelu_pytorch_tanh"),
    "llama-linear": llama(**rope(rope_type="linear", factor=4.0)),
    "llama3": llama(**rope(**LLAMA3)),
    "llama-yarn": llama(**rope(**YARN)),
    "llama-yarn-mscale": llama(
        **rope(**YARN, mscale=0.7, mscale_all_dim=1.3, beta_fast=16.0, beta_slow=2.0, truncate=False)
    ),
    "llama-dynamic": llama(**rope(rope_type="dynamic", factor=2.0)),
    "mistral-full": Case("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": Case("MistralForCausalLM", {"sliding_window": 11}),
    "mixtral": Case("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": Case("MixtralForCausalLM", {"num_local_experts": 3, "sliding_window": 12}),
    "qwen2": Case("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": Case("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-moe": Case("Qwen2MoeForCausalLM", {**MOE, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2}),
    "qwen3": Case("Qwen3ForCausalLM", {"head_dim": 24}),
    "qwen3-moe": Case(
        "Qwen3MoeForCausalLM", {**MOE, "moe_intermediate_size": 64, "head_dim": 16, "norm_topk_prob": True}
    ),
    "qwen3-moe-raw-dense": Case(
        "Qwen3MoeForCausalLM", {**MOE, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [1]}
    ),
    "gemma": Case("GemmaForCausalLM", {**GEMMA, "num_key_value_heads": 1}),
    "gemma2": Case("Gemma2ForCausalLM", {**GEMMA, "sliding_window": 9, "query_pre_attn_scalar": 20}),
    "gemma2-no-softcap": Case(
        "Gemma2ForCausalLM",
        {**GEMMA, "sliding_window": 9, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3-text": Case("Gemma3ForCausalLM", GEMMA3, config="Gemma3TextConfig"),
    "gemma3-text-linear": Case(
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "layer_types": ["full_attention", *["sliding_attention"] * 5, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        config="Gemma3TextConfig",
    ),
    "gemma3": Case("Gemma3ForConditionalGeneration", GEMMA3, config="Gemma3Config", text=True),
    "starcoder2": Case("Starcoder2ForCausalLM", {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 10}),
    "starcoder2-no-bias": Case("Starcoder2ForCausalLM", {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": Case("CohereForCausalLM", {"logit_scale": 0.25}),
    "cohere-qk-norm": Case("CohereForCausalLM", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": Case("Cohere2ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 5}),
    "phi3": Case("Phi3ForCausalLM", {"sliding_window": 13}),
    "phi3-partial": Case("Phi3ForCausalLM", rope(rope_type="default", partial_rotary_factor=0.75)),
    # transformers looks at each call's length, we at the configured one: calls of more than 16 tokens, and up to 64.
    "phi3-longrope": Case(
        "Phi3ForCausalLM", {**rope(**LONG, original_max_position_embeddings=16), "original_max_position_embeddings": 16}
    ),
    "phi3-longrope-short": Case(
        "Phi3ForCausalLM",
        {**rope(**LONG, original_max_position_embeddings=64), "original_max_position_embeddings": 64},
        max_seq_len=64,
    ),
    "phimoe": Case(
        "PhimoeForCausalLM",
        {"num_local_experts": 5, "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True},
    ),
    "phimoe-stretched": Case(
        "PhimoeForCausalLM",
        {
            "num_local_experts": 4,
            "router_jitter_noise": 0.0,
            # transformers takes the short divisors at any length, the published model the long ones beyond the original
            # length; the same for both, so that the factor is compared.
            **rope(
                **{**LONG, "short_factor": LONG["long_factor"]},
                original_max_position_embeddings=16,
                short_mscale=1.1,
                long_mscale=1.3,
            ),
        },
    ),
    "glm": Case("GlmForCausalLM", {"head_dim": 24, "attention_bias": True}),
    "glm4": Case("Glm4ForCausalLM", {"head_dim": 16, "attention_bias": False}),
    "gpt2": Case("GPT2LMHeadModel", GPT2, config="GPT2Config"),
    "gpt2-inner": Case("GPT2LMHeadModel", {**GPT2, "n_inner": 72}, config="GPT2Config"),
    "bigcode": Case("GPTBigCodeForCausalLM", GPT2),
    "bigcode-mha": Case("GPTBigCodeForCausalLM", {**GPT2, "multi_query": False}),
    "dbrx": Case("DbrxForCausalLM", DBRX),
    "granite": Case(
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 5.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
    ),
    "granite-moe": Case(
        "GraniteMoeForCausalLM", {"num_local_experts": 5, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
    ),
    "seed-oss": Case("SeedOssForCausalLM", {"head_dim": 24, "attention_out_bias": False, "mlp_bias": True}),
    "ernie4.5": Case("Ernie4_5ForCausalLM", {"head_dim": 16, "use_bias": True}),
    "arcee": Case("ArceeForCausalLM"),
    "helium": Case("HeliumForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "stablelm": Case(
        "StableLmForCausalLM", {"use_qkv_bias": True, **rope(rope_type="default", partial_rotary_factor=0.5)}
    ),
    "stablelm-no-bias": Case("StableLmForCausalLM", {"hidden_size": 128, "num_key_value_heads": 4}),
    "phi": Case("PhiForCausalLM"),
    "llama-gelu-erf": llama(hidden_act="gelu"),
    "exaone4": Case("Exaone4ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 5}),
    "exaone4-full": Case("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "olmo3": Case("Olmo3ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 5}),
    "olmo3-yarn": Case(
        "Olmo3ForCausalLM",
        {
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {"rope_theta": 8000.0, **YARN},
                "sliding_attention": {"rope_type": "default", "rope_theta": 8000.0},
            },
        },
    ),
    "olmoe": Case("OlmoeForCausalLM", {"num_experts": 5, "num_experts_per_tok": 2}),
    "smollm3": Case("SmolLM3ForCausalLM", {"num_hidden_layers": 5}),
    "olmo2": Case("Olmo2ForCausalLM", {"attention_bias": True}),
    "llava-pixtral": Case(
        "LlavaForConditionalGeneration", {"model_type": "mistral", "sliding_window": 9}, "LlavaConfig", text=True
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": None}, "Mistral3Config", True
    ),
    "qwen2-vl": Case("Qwen2VLForConditionalGeneration", MROPE, config="Qwen2VLConfig", text=True),
    "qwen2.5-vl": Case("Qwen2_5_VLForConditionalGeneration", MROPE, config="Qwen2_5_VLConfig", text=True),
}

NORM_FROM_ONE = ("gemma",)  # families that store weight - 1


def build(case: str, folder: Path, **changes: Any) -> tuple[Any, Path]:
    """The transformers model, saved to `folder` in half precision and computing with those very weights in float32."""
    made = replace(CASES[case], changes={**CASES[case].changes, **changes})
    torch.manual_seed(sum(map(ord, case)))
    model = getattr(transformers, made.model)(made.configuration()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            norm = re.search(r"(norm|norm_[12]|ln_[12f])\.weight$", name) is not None
            offset = 1.0 if norm and not case.startswith(NORM_FROM_ONE) else 0.0
            parameter.copy_((torch.randn_like(parameter) * scale + offset).half().float())
    saved = copy.deepcopy(model).half()
    saved.save_pretrained(folder)
    return model, folder


pytestmark = [
    pytest.mark.covers("core: architectures", "core: embedding-norms", "core: mlp-moe"),
    # Six tests have no other parameters: every model is in the default run once.
    pytest.mark.sampled(6),
]


@pytest.fixture(scope="module", params=sorted(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, lab: Any) -> tuple[Any, Any]:
    """(transformers model, our model)."""
    theirs, folder = build(request.param, tmp_path_factory.mktemp(request.param))
    length = CASES[request.param].max_seq_len
    return theirs, lab.load(folder, **({} if length is None else {"max_seq_len": length}))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(5))


def assert_close(found: Tensor, expected: Tensor) -> None:
    found = found[..., : expected.shape[-1]]
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE, f"relative error {error:.2e}"


@torch.no_grad()
def expected_logits(theirs: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    logits: Tensor = theirs(input_ids=ids, **kwargs).logits
    return logits


@pytest.mark.covers(
    "core: head-norms",
    "core: architecture-details",
    "core: newer-families",
    "core: expert-routing",
    "core: head-float32",
)
def test_whole_prompt(pair: tuple[Any, Any], ids: Tensor) -> None:
    theirs, ours = pair
    assert_close(ours.forward(ids), expected_logits(theirs, ids) if ids.shape[0] == 1 else _rowwise(theirs, ids))


def _rowwise(theirs: Any, ids: Tensor) -> Tensor:
    return torch.cat([expected_logits(theirs, row[None]) for row in ids])


@pytest.mark.covers("core: padding")
def test_left_padded_batch(pair: tuple[Any, Any], ids: Tensor) -> None:
    """Row 0 is 13 tokens shorter: with mask and offsets its logits are those of the bare row."""
    theirs, ours = pair
    padding = 13
    padded = ids.clone()
    padded[0, :padding] = 0
    mask = torch.zeros(2, TOKENS, dtype=torch.half)
    mask[0, :padding] = float("-inf")
    offsets = torch.tensor([[-padding], [0]], dtype=torch.int32)
    cache = ExLlamaV2Cache(ours, batch_size=2, max_seq_len=64)
    first = ours.forward(padded[:, :30], cache, input_mask=mask, position_offsets=offsets)
    second = ours.forward(padded[:, 30:], cache, input_mask=mask, position_offsets=offsets)
    logits = torch.cat([first, second], dim=1)
    assert torch.isfinite(logits).all()
    assert_close(logits[0, padding:], expected_logits(theirs, ids[:1, padding:])[0])
    assert_close(logits[1], expected_logits(theirs, ids[1:])[0])


@pytest.mark.covers("core: expert-routing", "core: softcap-with-pages")
def test_pages_and_batches_are_bitwise_identical(pair: tuple[Any, Any], ids: Tensor) -> None:
    """Two sequences of different lengths over scattered pages, in odd chunks and then together, against one piece."""
    _, ours = pair
    size, page_numbers = 16, [[5, 0, 3], [1, 4, 2]]
    lengths = (TOKENS - 1, 22)
    expected = [
        ours.forward(ids[r : r + 1, : n + 1], ExLlamaV2Cache(ours, max_seq_len=64)) for r, n in enumerate(lengths)
    ]
    cache = ExLlamaV2Cache(ours, max_seq_len=6 * size)

    def step(rows: list[int], begins: list[int], count: int) -> Tensor:
        params = PagedParams(
            batch_size=len(rows),
            block_index=torch.tensor([page_numbers[r] for r in rows], dtype=torch.int32),
            cache_seqlens=torch.tensor(begins, dtype=torch.int32),
            max_cache_seqlen=max(begins),
            page_size=size,
            q_len=count,
        )
        chunk = torch.stack([ids[r, b : b + count] for r, b in zip(rows, begins, strict=True)])
        logits: Tensor = ours.forward_chunk(chunk, cache, attn_params=params)["logits"]
        return logits

    for row, length in enumerate(lengths):
        for begin in range(0, length, 9):
            end = min(begin + 9, length)
            assert torch.equal(step([row], [begin], end - begin)[0], expected[row][0, begin:end])
    together = step([1, 0], [lengths[1], lengths[0]], 1)
    assert torch.equal(together[0, 0], expected[1][0, lengths[1]])
    assert torch.equal(together[1, 0], expected[0][0, lengths[0]])


def test_fused_blocks_equal_the_steps(pair: tuple[Any, Any], ids: Tensor) -> None:
    """A layer that runs as one native call is bitwise equal to its operators."""
    _, ours = pair
    fused = ours.forward(ids)
    blocks = {m: m.own_pass for m in ours.modules if isinstance(m, SubLayer)}
    parallel = any(isinstance(module, ParallelDecoder) for module in blocks)  # attention and MLP of one input: no block
    assert parallel or any(block is not BY_OPERATOR for block in blocks.values())
    for module in blocks:
        module.own_pass = BY_OPERATOR
    stepwise = ours.forward(ids)
    for module, block in blocks.items():
        module.own_pass = block
    assert torch.equal(fused, stepwise)


# ------------------------------------------------------------------------------------------------------ quantized


@pytest.mark.covers("core: loading")
def test_layers_over_two_devices_are_bitwise_identical(
    pair: tuple[Any, Any], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pair[1]
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1")
    split = ExLlamaV2(whole.config)
    split_over_two(split)
    assert split.loaded
    found, expected = (m.forward(ids, ExLlamaV2Cache(m, batch_size=2)) for m in (split, whole))
    assert torch.equal(found, expected)


def cut_over_devices(whole: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> ExLlamaV2:
    """The same model over three logical CPUs, unequal shares."""
    monkeypatch.setenv("EXL_DEVICE", "cpu:0,cpu:1,cpu:2")
    model = ExLlamaV2(whole.config)
    model.load_tp([3.0, 8.0, 5.0])
    return model


@pytest.mark.covers("core: tensor-parallel-architectures", "core: tensor-parallel-weights", "core: tensor-parallel")
def test_matrices_over_three_devices_are_bitwise_identical(
    pair: tuple[Any, Any], ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pair[1]
    cut = cut_over_devices(whole, monkeypatch)
    cache, twin = ExLlamaV2Cache_TP(cut, batch_size=2, max_seq_len=64), ExLlamaV2Cache(whole, 2, 64)
    for begin, end in ((0, 17), (17, 18), (18, TOKENS)):
        assert torch.equal(cut.forward(ids[:, begin:end], cache), whole.forward(ids[:, begin:end], twin))


@pytest.mark.covers("core: windows-per-model", "core: windows-across-chunks")
@pytest.mark.sampled(16)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_in_chunks_and_token_by_token(pair: tuple[Any, Any], ids: Tensor, chunk: int) -> None:
    theirs, ours = pair
    cache = ExLlamaV2Cache(ours, batch_size=2, max_seq_len=64)
    parts = [ours.forward(ids[:, i : i + chunk], cache) for i in range(0, TOKENS, chunk)]
    assert_close(torch.cat(parts, dim=1), _rowwise(theirs, ids))


@pytest.mark.sampled(12)
@pytest.mark.covers("core: adapter-matrices", "core: lora")
def test_adapters_of_every_linear(
    pair: tuple[Any, Any], ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    theirs, ours = copy.deepcopy(pair[0]), pair[1]
    torch.manual_seed(3)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    if "Phimoe" in type(theirs).__name__:  # its router gives a tuple, which peft cannot wrap
        options["exclude_modules"] = ".*router"
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**options))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    # Towers that see images have linears too, and experts stacked in one tensor are none: neither can be adapted here.
    refused = "target_parameters" if saved.get("target_parameters") else "unsupported layer"
    if saved.get("target_parameters") or hasattr(theirs.config, "vision_config"):
        with pytest.raises((errors.AdapterError, errors.UnsupportedError), match=refused):
            ExLlamaV2Lora.from_directory(ours, tmp_path)
        return
    lora = ExLlamaV2Lora.from_directory(ours, tmp_path)
    found = ours.forward(ids, loras=[lora])
    assert_close(found, expected_logits(adapted.eval(), ids))
    cut = cut_over_devices(ours, monkeypatch)
    assert torch.equal(cut.forward(ids, loras=[ExLlamaV2Lora.from_directory(cut, tmp_path)]), found)


def quantized_tensors(linear: Linear, kind: str, lab: Any) -> dict[str, Tensor] | None:
    """The matrix in EXL2 or GPTQ, its bias included; None where the format cannot hold its size."""
    if linear.in_features % 32 or linear.out_features % 32:
        return None
    weight = linear.get_weight_tensor_dq().T.contiguous()
    perm = torch.randperm(linear.in_features, generator=torch.Generator().manual_seed(3))
    if kind == "exl2":
        tensors = formats.exl2_quantize(weight, "0.3:6b_32g/0.7:4b_32g", perm=perm, fast=True)
    else:
        tensors = formats.gptq_quantize(weight, bits=4, group_size=32, perm=perm)
    return tensors | lab.bias_of(linear)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", ["exl2", "gptq"])
def test_quantized_equals_dequantized(pair: tuple[Any, Any], ids: Tensor, kind: str, tmp_path: Path, lab: Any) -> None:
    _, ours = pair
    linears = [linear for m in ours.modules for linear in m.submodules() if not lab.is_router(m, linear)]
    parts: dict[str, dict[str, Tensor]] = {}
    for linear in linears:
        made = quantized_tensors(linear, kind, lab)
        parts[linear.key] = lab.dequantized_tensors(linear) if made is None else made
    quantized = lab.load(lab.rewrite(ours, tmp_path / "quantized", parts))
    found = [q for m in quantized.modules for q in m.submodules() if q.is_quant()]
    assert len(found) >= 4 * ours.config.num_hidden_layers
    dequantized = lab.load(lab.dequantized_twin(quantized, tmp_path / "dequantized"))
    assert not dequantized.is_quant()
    assert_close(quantized.forward(ids), dequantized.forward(ids))
    cache = ExLlamaV2Cache(quantized, batch_size=2, max_seq_len=64)
    chunks = [quantized.forward(ids[:, i : i + 11], cache) for i in range(0, TOKENS, 11)]
    assert torch.equal(torch.cat(chunks, dim=1), quantized.forward(ids))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("kind", ["exl2", "gptq"])
def test_folder_of_our_quantizer(pair: tuple[Any, Any], ids: Tensor, kind: str, tmp_path: Path, lab: Any) -> None:
    lab.check_written(pair[1], ids, kind, tmp_path)


# ----------------------------------------------------------------------------------------------------------- RoPE


ROPE_CASES = ("llama", "llama-linear", "llama3", "llama-yarn", "llama-yarn-mscale", "phi3-partial", "phi3-longrope")


@pytest.mark.covers("core: rope-tables", "core: rope-lengths", "core: rope")
@pytest.mark.parametrize("case", [*ROPE_CASES, "gemma3-text", "gemma3-text-linear", "qwen3"])
def test_rope_tables(case: str, tmp_path: Path) -> None:
    """cos and sin at far positions, against transformers' rotary module, of both tables where there are two."""
    theirs, folder = build(case, tmp_path)
    config = ExLlamaV2Config(folder)
    config.max_seq_len = 5000
    positions = torch.arange(5000)[None]
    tables = {"main": config.rope_settings(), "alt": config.rope_settings_alt()}
    for name, settings in tables.items():
        if settings is None:
            continue
        kind = {"main": "full_attention", "alt": "sliding_attention"}[name]
        layer_type = () if tables["alt"] is None else (kind,)
        cos, sin = RopeTable(settings).upto(5000)
        expected_cos, expected_sin = theirs.model.rotary_emb(torch.zeros(1, 1), positions, *layer_type)
        half = cos.shape[1]
        torch.testing.assert_close(cos[:5000], expected_cos[0, :, :half], atol=1e-5, rtol=0)
        torch.testing.assert_close(sin[:5000], expected_sin[0, :, :half], atol=1e-5, rtol=0)


@pytest.mark.covers("core: rope-lengths", "core: rope")
@pytest.mark.parametrize("length", [30, 40, 64])
def test_dynamic_ntk_of_the_configured_length(length: int, ids: Tensor, tmp_path: Path, lab: Any) -> None:
    """Beyond 32 positions the base grows with the length: ours with the configured one, theirs with the call's."""
    theirs, folder = build("llama-dynamic", tmp_path, max_position_embeddings=32)
    ours = lab.load(folder, max_seq_len=max(length, 32))
    row = ids[:1].repeat(1, 2)[:, :length]
    expected = expected_logits(theirs, row)
    assert_close(ours.forward(row), expected)
    cache = ExLlamaV2Cache(ours, max_seq_len=64)
    chunks = [ours.forward(row[:, i : i + 7], cache) for i in range(0, length, 7)]
    assert_close(torch.cat(chunks, dim=1), expected)
