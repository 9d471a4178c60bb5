"""The RoPE block of config.json in its old (`rope_scaling`, `rope_theta`) and new (`rope_parameters`) spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ConfigError, UnsupportedError
from .json_reader import JsonReader

if TYPE_CHECKING:
    from .config import ExLlamaV2Config

__all__ = ["SUPPORTED_ROPE_TYPES", "read_rope"]

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(config: ExLlamaV2Config, read: JsonReader, default_theta: float) -> None:
    """Fill the rope fields of `config` (spec core.md 2.4, 5.4). Methods without code here are refused by name."""
    block = read.section("rope_parameters", text=True) or read.section("rope_scaling", text=True)
    theta = read.number("rope_theta", "attn_config->rope_theta", default=default_theta, text=True)
    config.partial_rotary_factor = read.number("partial_rotary_factor", default=1.0, text=True)
    config.rotary_embedding_base = theta
    config.alt_rope_method = None
    if config.scale_pos_emb == config.scale_pos_emb_from_file:  # not the caller's, so forgotten on a second prepare()
        config.scale_pos_emb = 1.0
    config.scale_pos_emb_from_file = None
    if block is None:
        return
    if block.data and all(isinstance(v, dict) for v in block.data.values()):
        raise UnsupportedError(
            f"{block.file}: rope parameters per layer type ({', '.join(block.data)}) are not built in this version"
        )
    config.rotary_embedding_base = block.number("rope_theta", default=theta)
    config.partial_rotary_factor = block.number("partial_rotary_factor", default=config.partial_rotary_factor)
    _read_method(config, block, read)


def _rope_type(block: JsonReader) -> str:
    old, new = block.string("type", default=None), block.string("rope_type", default=None)
    if old is not None and new is not None and old != new:
        raise ConfigError(f"{block.file}: type is {old!r} and rope_type is {new!r}; give one of them")
    kind: str = new or old or "default"
    return kind


def _read_method(config: ExLlamaV2Config, block: JsonReader, read: JsonReader) -> None:
    kind = _rope_type(block)
    if kind == "default":
        return
    if kind == "linear":
        config.scale_pos_emb = config.scale_pos_emb_from_file = block.number("factor")
        return
    # transformers gives the top-level key priority, and falls back to the model's own length
    original = read.integer("original_max_position_embeddings", default=None, text=True) or block.integer(
        "original_max_position_embeddings", default=config.max_position_embeddings, minimum=1
    )
    if kind == "llama3":
        config.alt_rope_method = "llama3"
        config.l3_rope_factor = block.number("factor")
        config.l3_rope_low_freq_factor = block.number("low_freq_factor")
        config.l3_rope_high_freq_factor = block.number("high_freq_factor")
        config.l3_rope_original_max_position_embeddings = original
        if config.l3_rope_high_freq_factor <= config.l3_rope_low_freq_factor:
            raise ConfigError(f"{block.file}: high_freq_factor must exceed low_freq_factor")
    elif kind == "yarn":
        config.alt_rope_method = "yarn"
        config.yarn_rope_factor = block.number("factor", default=config.max_position_embeddings / original)
        config.yarn_rope_original_max_position_embeddings = original
        config.yarn_rope_attention_factor = block.number("attention_factor", default=None)
        config.yarn_rope_beta_fast = block.number("beta_fast", default=32.0) or 32.0
        config.yarn_rope_beta_slow = block.number("beta_slow", default=1.0) or 1.0
        config.yarn_rope_mscale = block.number("mscale", default=None)
        config.yarn_rope_mscale_all_dim = block.number("mscale_all_dim", default=None)
        config.yarn_rope_truncate = block.boolean("truncate", default=True)
    else:
        raise UnsupportedError(
            f"{block.file}: rope type {kind!r} is not built in this version; supported: "
            + ", ".join(SUPPORTED_ROPE_TYPES)
        )
