"""The RoPE block of config.json in its old (`rope_scaling`, `rope_theta`) and new (`rope_parameters`) spelling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConfigKeyError, ConfigTypeError, UnsupportedError
from ..json_reader import JsonReader, is_number
from ..rope import RopeSettings

if TYPE_CHECKING:
    from .config import ExLlamaV2Config

__all__ = ["LENGTH_KEYS", "SUPPORTED_ROPE_TYPES", "alternative_rope", "main_rope", "read_rope"]

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "su", "longrope", "dynamic", "mrope")
LENGTH_KEYS = ("max_sequence_length", "model_max_length", "max_position_embeddings", "max_seq_len", "n_positions")
ORIGINAL = "original_max_position_embeddings"
MSCALES = ("short_mscale", "long_mscale")
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(config: ExLlamaV2Config, read: JsonReader) -> None:
    """Fill the rope fields of `config`. Raises UnsupportedError, which names the method, for unsupported methods."""
    arch = config.arch
    theta = read.number("rope_theta", "attn_config->rope_theta", default=arch.rope_theta, text=True)
    config.partial_rotary_factor = read.number("partial_rotary_factor", default=arch.partial_rotary_factor, text=True)
    config.rotary_embedding_base = theta
    config.rotary_embedding_base_alt = None
    config.scale_pos_emb_alt = None
    config.alt_rope_method = None
    config.mrope_section = None
    if config.scale_pos_emb == config.scale_pos_emb_from_file:  # not set by the caller, so reset by a second prepare()
        config.scale_pos_emb = 1.0
    config.scale_pos_emb_from_file = None
    if arch.rope_theta_alt is not None:
        config.rotary_embedding_base_alt = read.number(
            *arch.rope_theta_alt_keys, default=arch.rope_theta_alt, text=True
        )
        config.scale_pos_emb_alt = 1.0
    if arch.positions != "rope":
        return
    _check_partial(config, read)
    block = read.section("rope_parameters", text=True)
    if block is not None and block.data and all(isinstance(v, dict) for v in block.data.values()):
        block = _blocks_per_layer_type(config, block)
    elif block is not None and block.data:
        _check_flat(config, block)
    else:
        block = read.section("rope_scaling", text=True)
    config.mrope_section = None if arch.mrope_section is None else list(arch.mrope_section)
    if block is None:
        return
    config.rotary_embedding_base = block.number("rope_theta", default=theta)
    config.partial_rotary_factor = block.number("partial_rotary_factor", default=config.partial_rotary_factor)
    _check_partial(config, block)
    _read_method(config, block, read)


def _check_flat(config: ExLlamaV2Config, block: JsonReader) -> None:
    """Check one block for all layers, of a family whose layers share one rotation."""
    types = ", ".join(LAYER_TYPES)
    inner = [str(key) for key, value in block.data.items() if isinstance(value, dict)]
    if inner:
        raise ConfigError(
            f"{block.file}: {', '.join(inner)} together with other keys; expected blocks of {types} only, or none"
        )
    if config.rotary_embedding_base_alt is not None:
        raise ConfigError(f"{block.file}: {config.arch.name} has two rotations: give a block for each of {types}")


def _check_partial(config: ExLlamaV2Config, read: JsonReader) -> None:
    """Raise UnsupportedError for a `partial_rotary_factor` that transformers ignores: the file's intent is unknown."""
    factor = config.partial_rotary_factor
    if factor != 1.0 and not config.arch.partial_rotary:
        raise UnsupportedError(
            f"{read.file}: partial_rotary_factor is {factor}, which {config.arch.name} does not have; take the key out "
            "if its heads are rotated whole"
        )


def _blocks_per_layer_type(config: ExLlamaV2Config, block: JsonReader) -> JsonReader | None:
    """Return the block of the main table; the block of a second table goes into its fields."""
    unknown = [name for name in block.data if name not in LAYER_TYPES]
    if unknown:
        raise UnsupportedError(
            f"{block.file}: rope parameters for layers of type {', '.join(map(str, unknown))} are not supported; "
            f"supported: {', '.join(LAYER_TYPES)}"
        )
    full, sliding = block.section("full_attention"), block.section("sliding_attention")
    if config.rotary_embedding_base_alt is None:
        if full is not None and sliding is not None and full.data != sliding.data:
            raise UnsupportedError(
                f"{block.file}: rope parameters differ between layer types, which {config.arch.name} does not support"
            )
        return full or sliding
    if sliding is not None:
        kind = _rope_type(sliding)
        if kind not in ("default", "linear"):
            raise UnsupportedError(
                f"{sliding.file}: rope type {kind!r} is not supported for sliding layers; supported: default, linear"
            )
        config.rotary_embedding_base_alt = sliding.number("rope_theta", default=config.rotary_embedding_base_alt)
        config.scale_pos_emb_alt = sliding.number("factor") if kind == "linear" else 1.0
    return full


def _rope_type(block: JsonReader) -> str:
    old, new = block.string("type", default=None), block.string("rope_type", default=None)
    if old is not None and new is not None and old != new and {old, new} != {"mrope", "default"}:
        raise ConfigError(f"{block.file}: type is {old!r} and rope_type is {new!r}; give one of them")
    kind: str = new or old or "default"
    return kind


def _read_method(config: ExLlamaV2Config, block: JsonReader, read: JsonReader) -> None:
    kind = _rope_type(block)
    config.mrope_section = _mrope_section(block) or config.mrope_section
    if kind in ("default", "mrope"):
        return
    # The first Phi-3 files call longrope "su" or "yarn".
    longrope = kind in ("su", "longrope") or (kind == "yarn" and "long_factor" in block.data)
    for key in MSCALES if config.arch.rope_mscales and not longrope else ():
        if block.raw(key) is not None:
            raise UnsupportedError(f"{block.file}: {key} is not supported for rope type {kind!r}, only for longrope")
    if kind == "linear":
        config.scale_pos_emb = config.scale_pos_emb_from_file = block.number("factor")
        return
    _check_length(read, block, kind, longrope)
    # transformers gives priority to the top-level key, and falls back to the model's length.
    outer = read.integer(ORIGINAL, default=None, text=True)
    inner = block.integer(ORIGINAL, default=None, minimum=1)
    if outer and outer == config.arch.defaults.get(ORIGINAL) and inner not in (None, outer):
        raise UnsupportedError(
            f"{block.file}: {ORIGINAL} is {inner}, and at the top, where {config.arch.name} has it, it is {outer} or "
            "missing; give it there"
        )
    original = outer or inner or config.max_position_embeddings
    if kind == "llama3":
        config.alt_rope_method = "llama3"
        config.l3_rope_factor = block.number("factor")
        config.l3_rope_low_freq_factor = block.number("low_freq_factor")
        config.l3_rope_high_freq_factor = block.number("high_freq_factor")
        config.l3_rope_original_max_position_embeddings = original
        if config.l3_rope_high_freq_factor <= config.l3_rope_low_freq_factor:
            raise ConfigError(f"{block.file}: high_freq_factor must exceed low_freq_factor")
    elif longrope:
        _read_su(config, block, original)
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
    elif kind == "dynamic":
        config.alt_rope_method = "dynamic"
        config.dynamic_rope_factor = block.number("factor")
        if config.dynamic_rope_factor < 1:
            raise ConfigError(f"{block.file}: factor is {config.dynamic_rope_factor}, must be at least 1")
    else:
        raise UnsupportedError(
            f"{block.file}: rope type {kind!r} is not supported; supported: " + ", ".join(SUPPORTED_ROPE_TYPES)
        )


def _check_length(read: JsonReader, block: JsonReader, kind: str, longrope: bool) -> None:
    """Raise ConfigKeyError without `max_position_embeddings` for rotations that depend on the model's length.

    Families differ in the default of transformers.
    """
    if read.raw(*LENGTH_KEYS, text=True) is not None:
        return
    needed = longrope or kind == "dynamic"
    if kind in ("llama3", "yarn"):
        needed |= block.raw(ORIGINAL) is None and read.raw(ORIGINAL, text=True) is None
    if kind == "yarn":
        needed |= block.raw("factor") is None
    if needed:
        raise ConfigKeyError(f"{read.file}: max_position_embeddings is missing, which rope type {kind!r} needs")


def _mrope_section(block: JsonReader) -> list[int] | None:
    """Return the number of frequencies of each axis (time, height, width); text has the same position on all three."""
    section: list[Any] | None = block.listing("mrope_section", default=None)
    if section is not None and not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in section):
        raise ConfigTypeError(f"{block.file}: mrope_section must be a list of frequency counts, not {section!r}")
    if block.boolean("mrope_interleaved", default=False):
        raise UnsupportedError(f"{block.file}: mrope_interleaved is not supported")
    return section


def _read_su(config: ExLlamaV2Config, block: JsonReader, original: int) -> None:
    for key in MSCALES:
        if block.raw(key) is not None and not config.arch.rope_mscales:
            raise UnsupportedError(f"{block.file}: {key} is not supported for {config.arch.name}; use attention_factor")
    if config.arch.rope_mscales:
        config.su_rope_mscales = (block.number("short_mscale"), block.number("long_mscale"))
    config.alt_rope_method = "su"
    config.scale_long_factor = _divisors(block, "long_factor")
    config.scale_short_factor = _divisors(block, "short_factor")
    config.original_max_seq_len = original
    config.su_rope_attention_factor = block.number("attention_factor", default=None)
    config.su_rope_factor = block.number("factor", default=config.max_position_embeddings / original)


def _divisors(block: JsonReader, key: str) -> list[float]:
    values = block.listing(key)
    if not all(is_number(v) and v > 0 for v in values):
        raise ConfigTypeError(f"{block.file}: {key} must be a list of positive numbers")
    return [float(v) for v in values]


# ------------------------------------------------------------------------------------------ from fields to a rotation


def main_rope(config: ExLlamaV2Config) -> RopeSettings:
    """Return the rotation of the main table, the caller's overrides included. Raises ConfigError, UnsupportedError."""
    for name in ("scale_pos_emb", "scale_alpha_value", "rotary_embedding_base"):
        _positive(name, getattr(config, name))
    common: dict[str, Any] = {
        "theta": config.rotary_embedding_base,
        "rotary_dim": _rotary_dim(config),
        "max_positions": config.max_seq_len,
        "position_scale": config.scale_pos_emb,
        "alpha": config.scale_alpha_value,
        "method": config.alt_rope_method,
    }
    if config.alt_rope_method is None:
        return RopeSettings(**common)
    fields = {"llama3": _llama3_fields, "yarn": _yarn_fields, "su": _su_fields, "dynamic": _dynamic_fields}
    if config.alt_rope_method not in fields:
        names = ", ".join(f'"{name}"' for name in fields)
        raise UnsupportedError(f"alt_rope_method {config.alt_rope_method!r} is not supported; use None, {names}")
    return RopeSettings(**common, **fields[config.alt_rope_method](config, common["rotary_dim"]))


def alternative_rope(config: ExLlamaV2Config) -> RopeSettings | None:
    """Return the rotation of the second table, with its own theta and scale, or None if the family has none."""
    if config.rotary_embedding_base_alt is None:
        return None
    scale = 1.0 if config.scale_pos_emb_alt is None else config.scale_pos_emb_alt
    return RopeSettings(
        theta=_positive("rotary_embedding_base_alt", config.rotary_embedding_base_alt),
        rotary_dim=_rotary_dim(config),
        max_positions=config.max_seq_len,
        position_scale=_positive("scale_pos_emb_alt", scale),
    )


def _rotary_dim(config: ExLlamaV2Config) -> int:
    if config.arch.positions != "rope":
        return 2  # a table that no layer uses
    rotary_dim = int(config.head_dim * config.partial_rotary_factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= config.head_dim:
        raise ConfigError(
            f"partial_rotary_factor {config.partial_rotary_factor} of head_dim {config.head_dim} rotates {rotary_dim} "
            "dimensions; that must be an even number between 2 and head_dim"
        )
    return rotary_dim


def _llama3_fields(c: ExLlamaV2Config, rotary_dim: int) -> dict[str, Any]:
    return {
        "factor": _positive("l3_rope_factor", c.l3_rope_factor),
        "low_freq_factor": _positive("l3_rope_low_freq_factor", c.l3_rope_low_freq_factor),
        "high_freq_factor": _positive("l3_rope_high_freq_factor", c.l3_rope_high_freq_factor),
        "original_max_positions": _positive(
            "l3_rope_original_max_position_embeddings", c.l3_rope_original_max_position_embeddings
        ),
    }


def _yarn_fields(c: ExLlamaV2Config, rotary_dim: int) -> dict[str, Any]:
    if c.rotary_embedding_base <= 1:
        raise ConfigError(f"rotary_embedding_base is {c.rotary_embedding_base}, must be above 1 for yarn")
    return {
        "factor": _positive("yarn_rope_factor", c.yarn_rope_factor),
        "original_max_positions": _positive(
            "yarn_rope_original_max_position_embeddings", c.yarn_rope_original_max_position_embeddings
        ),
        "attention_factor": c.yarn_rope_attention_factor,
        "beta_fast": _positive("yarn_rope_beta_fast", c.yarn_rope_beta_fast),
        "beta_slow": _positive("yarn_rope_beta_slow", c.yarn_rope_beta_slow),
        "mscale": c.yarn_rope_mscale,
        "mscale_all_dim": c.yarn_rope_mscale_all_dim,
        "truncate": c.yarn_rope_truncate,
    }


def _su_fields(c: ExLlamaV2Config, rotary_dim: int) -> dict[str, Any]:
    """Return longrope's fields: the long divisors if the length exceeds the original one, else the short ones."""
    if c.original_max_seq_len < 2:
        raise ConfigError(f"original_max_seq_len is {c.original_max_seq_len}, must be at least 2 for longrope")
    long = c.max_seq_len > c.original_max_seq_len
    name = "scale_long_factor" if long else "scale_short_factor"
    divisors = getattr(c, name)
    if divisors is None or len(divisors) != rotary_dim // 2:
        count = "none" if divisors is None else len(divisors)
        raise ConfigError(f"{name} has {count} entries, must have {rotary_dim // 2}, one for each rotated pair")
    return {
        "factor": _positive("su_rope_factor", c.su_rope_factor),
        "original_max_positions": c.original_max_seq_len,
        "attention_factor": c.su_rope_attention_factor if c.su_rope_mscales is None else c.su_rope_mscales[long],
        "divisors": tuple(divisors),
    }


def _dynamic_fields(c: ExLlamaV2Config, rotary_dim: int) -> dict[str, Any]:
    return {
        "factor": _positive("dynamic_rope_factor", c.dynamic_rope_factor),
        "original_max_positions": c.max_position_embeddings,
    }


def _positive(name: str, value: float | None) -> float:
    try:
        if value is not None and math.isfinite(value) and value > 0:
            return value
    except TypeError:
        raise ConfigTypeError(f"{name} is {value!r:.80}, must be a positive number") from None
    raise ConfigError(f"{name} is {value}, must be a positive number")
