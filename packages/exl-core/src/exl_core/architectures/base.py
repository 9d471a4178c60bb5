"""The properties of a model family, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..json_reader import JsonReader
from .windows import LayerRope, main_rope, no_windows

__all__ = ["Activation", "Architecture", "Experts", "FusedTensor", "Vision"]

Activation = Literal["silu", "gelu", "quickgelu", "gelu_erf", "relu2"]


@dataclass(frozen=True)
class FusedTensor:
    """A matrix that some files store as one tensor and others as several."""

    fused: str  # key below the layer, e.g. "self_attn.qkv_proj"
    parts: tuple[str, ...]  # the split keys, in the order of the fused tensor's rows
    # "rows": part after part. "grouped": for each key/value head its query heads, then its key, then its value.
    packing: Literal["rows", "grouped"] = "rows"


LLAMA_QKV = FusedTensor("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
LLAMA_GATE_UP = FusedTensor("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
LLAMA_FUSED = (LLAMA_QKV, LLAMA_GATE_UP)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP. Keys are below the layer; `{}` is the expert.

    y = sum over the chosen experts of p_e * down_e(act(gate_e(x)) * up_e(x)), plus the output of a shared expert if the
    family has one, times sigmoid(shared_gate(x)) if it has that gate.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    # Tensors that hold the matrices of all experts, stacked, in files that have such tensors.
    stacked: tuple[FusedTensor, ...] = (
        FusedTensor("mlp.experts.gate_up_proj", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")),
        FusedTensor("mlp.experts.down_proj", ("mlp.experts.{}.down_proj",)),
    )
    stacked_transposed: tuple[str, ...] = ()  # those of them whose experts are stored [in, out]
    count_keys: tuple[str, ...] = ("num_local_experts", "ffn_config->moe_num_experts", "num_experts")
    chosen_keys: tuple[str, ...] = ("num_experts_per_tok", "ffn_config->moe_top_k")
    width_keys: tuple[str, ...] = ("moe_intermediate_size",)  # default: the MLP's
    # Jitter of sparse mixing: an expert counts if it is at most twice the jitter below the likeliest. Default: softmax.
    mixer_keys: tuple[str, ...] = ()
    chosen_fixed: int | None = None  # the only supported number of chosen experts
    normalize: Callable[[JsonReader], bool] = lambda read: True  # whether the chosen probabilities are scaled to sum 1
    sparse: Callable[[JsonReader, int], list[bool]] = lambda read, layers: (
        [True] * layers
    )  # False: the layer has an MLP
    shared_prefix: str | None = None  # "mlp.shared_expert": gate_proj, up_proj, down_proj below it
    shared_gate: str | None = None
    shared_width_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vision:
    """The image tower of a multimodal model."""

    name: str  # in the documentation
    model_type: str  # `config.vision_model_type`
    encoder: Literal["pixtral", "qwen", "siglip"]  # of `vision.tower.ENCODERS`
    merges: bool = False  # pixtral: the projector norms features and merges patches
    gated: bool = False  # qwen: gated MLPs, RMS norms and windows


@dataclass(frozen=True)
class Architecture:
    """One model family. The defaults are Llama's; a family states only its differences.

    Keys are relative to the layer (`model.layers.<i>.`) where the comment says "below the layer", and absolute
    otherwise.
    """

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for keys that config.json may omit
    # Required values of keys that are present, a tuple for several values. Any other value changes the model in an
    # unsupported way, or programs disagree about its meaning.
    fixed: Mapping[str, Any] = field(default_factory=dict)

    # Norms; None: the layer has no such norm. A post norm applies between a sub-layer and its residual sum.
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to the stored weight
    norm_eps_keys: tuple[str, ...] = ("rms_norm_eps",)
    norm_1: str | None = "input_layernorm"  # below the layer, before attention
    norm_1_post: str | None = None
    norm_2: str | None = "post_attention_layernorm"  # below the layer, before the MLP
    norm_2_post: str | None = None
    parallel: bool = False  # attention and MLP read the same norm and are added together
    float_residual: bool = False  # the hidden state stays float32 on a GPU

    # Attention
    attention_bias: Literal["file", "none", "qkv", "all"] = "file"  # file: `attention_bias` of config.json, on all four
    bias_keys: tuple[str, ...] = ("attention_bias",)
    bias_from_file: Literal["all", "qkv"] = "all"  # the projections that this key gives a bias
    o_bias_keys: tuple[str, ...] = ()  # a separate key for o
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    head_norm: Literal["rms", "layer"] | None = None  # of q and k, before RoPE
    head_norm_of: Literal["head", "all_heads"] = "head"  # each head separately, or the whole row of heads
    head_norm_key: str | None = None  # config key that enables the norms; None: always
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    clip_key: str | None = None  # q, k and v are clamped to +- this value
    scale_keys: tuple[str, ...] = ()  # keys of the softmax scale
    query_scalar: bool = False  # softmax scale is query_pre_attn_scalar^-0.5
    softcaps: bool = False  # attn_logit_softcapping and final_logit_softcapping apply
    windows: Callable[[JsonReader, int], list[int]] = no_windows  # sliding window of each layer, 0 = none
    kv_heads: Callable[[JsonReader], int | None] | None = None  # for families with a special rule

    # Positions
    positions: Literal["rope", "learned"] = "rope"
    position_embeddings: str = "model.wpe"
    rope_style: Literal["neox", "gptj"] = "neox"
    rope_theta: float = 10000.0
    rope_theta_alt: float | None = None  # a second table, for the layers that `layer_rope` names
    rope_theta_alt_keys: tuple[str, ...] = ("rope_local_base_freq",)
    partial_rotary: bool = False  # whether `partial_rotary_factor` of the file applies
    partial_rotary_factor: float = 1.0
    rope_mscales: bool = False  # longrope takes its factor on sin and cos from short_mscale or long_mscale
    layer_rope: Callable[[JsonReader, list[int]], list[LayerRope]] = main_rope

    # MLP
    mlp_gated: bool = True
    mlp_bias: Literal["file", "none", "all"] = "file"
    mlp_bias_keys: tuple[str, ...] = ("mlp_bias",)
    activation: Activation = "silu"
    activation_keys: tuple[str, ...] = ("hidden_act",)
    inner_multiple: int | None = None  # intermediate size in hidden sizes, where config.json has no key
    gate_proj: str = "mlp.gate_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"
    experts: Experts | None = None

    # Around the layers
    embed_tokens: str = "model.embed_tokens"
    normalize_embeddings: bool = False  # times sqrt(hidden_size)
    layer_prefix: str = "model.layers"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    tied_head: bool = False  # default of `tie_word_embeddings`
    head_bias_key: str | None = None  # config key that gives the head a bias
    scales: tuple[str, ...] = ()  # keys of factors on embeddings, residuals and logits that the family has
    logit_base_key: str | None = None  # logits are divided by hidden_size / this (MiniCPM)
    norm_head: bool = False  # `norm_head` of config.json scales the head's rows to unit vectors
    requires_bos: bool = False

    # Files
    fused: tuple[FusedTensor, ...] = LLAMA_FUSED
    transposed: bool = False  # float matrices are stored [in, out]
    keymap: tuple[tuple[str, str], ...] = ()  # applied in order to tensor names; `$` anchors at the start
    # Multimodal models: requirements for the vision part of the file.
    text_model_types: tuple[str, ...] = ()  # of text_config; empty: any
    vision: Vision | None = None  # None: text only
    grid_merge: int = 1  # patches of a side that make one row of an image; default of `vision_config`
    mrope_section: tuple[int, int, int] | None = None  # frequencies by time, height and width; default of the file
    pictures_see_themselves: bool = False  # the rows of one image attend to each other in both directions

    @property
    def lm(self) -> Architecture:
        """The part of the language model: this object. exllamav2 lists a vision tower separately.

        Scripts read `arch.lm`.
        """
        return self

    def layer_keys(self, sparse: bool, head_norms: bool) -> list[str]:
        """Return the keys below a layer of the required modules, without tensor suffix; `{}` is an expert."""
        norms = (self.norm_1, self.norm_1_post, self.norm_2, self.norm_2_post)
        keys = [n for n in norms if n is not None]
        keys += [self.q_proj, self.k_proj, self.v_proj, self.o_proj]
        if head_norms:
            keys += [self.q_norm, self.k_norm]
        if sparse and self.experts is not None:
            e = self.experts
            return [*keys, e.router, e.gate, e.up, e.down]
        return [*keys, *([self.gate_proj] if self.mlp_gated else []), self.up_proj, self.down_proj]

    def fused_key(self, part: str) -> tuple[FusedTensor, int] | None:
        """Return (fused matrix, index of the part) for a split key below the layer, such as `mlp.up_proj`."""
        stacked = self.experts.stacked if self.experts is not None else ()
        for matrix in (*self.fused, *stacked):
            if part in matrix.parts:
                return matrix, matrix.parts.index(part)
        return None

    def map_key(self, key: str) -> str:
        """Return the name under which a tensor of the file is looked up."""
        for old, new in self.keymap:
            if old.startswith("$"):
                if key.startswith(old[1:]):
                    key = new + key[len(old) - 1 :]
            else:
                key = key.replace(old, new)
        return key
