"""What distinguishes one model family from another, as data (spec core.md 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..json_reader import JsonReader

__all__ = ["Architecture", "FusedLinear", "no_windows"]


def no_windows(read: JsonReader, num_layers: int) -> list[int]:
    """Full causal attention on every layer."""
    return [0] * num_layers


@dataclass(frozen=True)
class FusedLinear:
    """A matrix that some files store as one tensor and others as several (spec core.md 3.3)."""

    fused: str  # key below the layer, e.g. "self_attn.qkv_proj"
    parts: tuple[str, ...]  # the split keys, in the order of the fused tensor's rows


LLAMA_FUSED = (
    FusedLinear("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    FusedLinear("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)


@dataclass(frozen=True)
class Architecture:
    """One model family. The defaults are Llama's; a family states only what differs.

    Keys are relative to the layer (`model.layers.<i>.`) where the field says so, and absolute otherwise. Fields that
    only later families need (post norms, parallel blocks, experts, head norms) join this class together with the
    modules that read them.
    """

    name: str

    # Norms
    norm: Literal["rms"] = "rms"
    norm_eps_keys: tuple[str, ...] = ("rms_norm_eps",)
    norm_1: str = "input_layernorm"  # below the layer, before attention
    norm_2: str = "post_attention_layernorm"  # below the layer, before the MLP

    # Attention
    qkv_bias: bool = False
    o_bias: bool = False
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    windows: Callable[[JsonReader, int], list[int]] = no_windows  # sliding window of each layer, 0 = none

    # Positions
    rope_style: Literal["neox", "gptj"] = "neox"
    rope_theta: float = 10000.0

    # MLP
    mlp_bias: bool = False
    activation: Literal["silu", "gelu"] = "silu"
    gate_proj: str = "mlp.gate_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"

    # Around the layers
    embed_tokens: str = "model.embed_tokens"
    layer_prefix: str = "model.layers"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    tied_head: bool = False  # by default; `tie_word_embeddings` in the file decides
    requires_bos: bool = False

    # Files
    fused: tuple[FusedLinear, ...] = LLAMA_FUSED
    keymap: tuple[tuple[str, str], ...] = field(
        default=()
    )  # applied in order to tensor names; `$` anchors at the start

    def expected_layer_keys(self, layer: int) -> list[str]:
        """Keys of every module a layer must find in the files, without the tensor suffix."""
        parts = (
            self.norm_1,
            self.norm_2,
            *(self.q_proj, self.k_proj, self.v_proj, self.o_proj),
            *(self.gate_proj, self.up_proj, self.down_proj),
        )
        return [f"{self.layer_prefix}.{layer}.{p}" for p in parts]

    def fused_key(self, layer_key: str) -> tuple[str, int, FusedLinear] | None:
        """(fused key, index of the part, the fused matrix) for a split key such as `model.layers.3.mlp.up_proj`."""
        for matrix in self.fused:
            for index, part in enumerate(matrix.parts):
                if layer_key.endswith("." + part):
                    return layer_key[: -len(part)] + matrix.fused, index, matrix
        return None

    def map_key(self, key: str) -> str:
        """The name under which a tensor of the file is looked up."""
        for old, new in self.keymap:
            if old.startswith("$"):
                if key.startswith(old[1:]):
                    key = new + key[len(old) - 1 :]
            else:
                key = key.replace(old, new)
        return key
