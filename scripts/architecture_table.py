"""Writes docs/architectures.md from the families' own data; with `--check`, compares only."""

from __future__ import annotations

import sys
from pathlib import Path

from exl_core.architectures import SUPPORTED, Architecture
from exl_core.architectures.base import LLAMA_FUSED
from exl_core.architectures.windows import main_rope, no_windows
from exl_core.config.rope_config import SUPPORTED_ROPE_TYPES

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"

HEAD = """# Architectures

The strings of `architectures` in config.json that load; anything else is refused with this list, unless
`config.allow_unknown_architecture` names one of them. Each was compared with transformers, or, where transformers does
not have it, with a small model written from the specification: `tests/core/test_against_transformers.py`,
`tests/core/test_architectures.py`. Written by `python scripts/architecture_table.py`.

| architecture | norms | attention | positions | feed-forward | embedding and head |
|---|---|---|---|---|---|
"""

TAIL = f"""
"RoPE" covers the types {", ".join(SUPPORTED_ROPE_TYPES)} of `rope_parameters` (or
`rope_scaling`), partial rotation and positions divided or stretched by the caller (`scale_pos_emb`,
`scale_alpha_value`). longrope and dynamic NTK depend on the length: the configured `max_seq_len` decides, once, so that
a request's tokens do not depend on how it is cut or shared. transformers decides by the length of each call; set
`max_seq_len` to the longest context you mean to use.

Image towers (`ExLlamaV2VisionTower`): rows and prepared pixels are compared with transformers' in
`tests/core/test_vision.py` and `tests/core/test_vision_towers.py`, logits after images in
`tests/core/test_vision_logits.py`. Videos: Qwen's towers.

Where a cell says "by file", config.json decides (`attention_bias`, `use_qk_norm`, `sliding_window`, `layer_types` and
so on).

`python tests/core/config_mutations.py` changes, takes out and adds the keys of config.json one at a time, in every
family that transformers has, and compares the logits; a sample of it is a test. Of 3,891 files (transformers 5.23,
2026-11-21) it runs 3,432: 3,112 have its logits here, 306 are rejected by an error that names
the key. Of 2,244 files with one key of another family, 2,038 have its logits and 206 are rejected. The 14 others
differ intentionally, and no published file is like them. Where layer types have rotations of their own (Gemma 3,
OLMo 3), `type` in `rope_scaling` means what `rope_type` does, and the outer `rope_theta` of OLMo 3 is for all layers.
DBRX takes `attn_config.rope_theta`.
"""


def norms(a: Architecture) -> str:
    kind = {"rms": "RMS", "layer": "LayerNorm"}[a.norm] + (" with bias" if a.norm_bias else "")
    kind += f", weight + {a.norm_offset:g}" if a.norm_offset else ""
    before, after = a.norm_1 is not None, a.norm_1_post is not None
    place = "before and after" if before and after else "after" if after else "before"
    return f"{kind}; {'one, before both halves' if a.parallel else place}"


def attention(a: Architecture) -> str:
    bias = {"file": f"bias by file{' (q, k, v)' if a.bias_from_file == 'qkv' else ''}", "qkv": "bias on q, k, v"}
    words = [{"none": "no bias", "all": "bias"}.get(a.attention_bias) or bias[a.attention_bias]]
    if a.head_norm:
        words.append(
            f"{'RMS' if a.head_norm == 'rms' else 'LayerNorm'} of q and k" + (" by file" if a.head_norm_key else "")
        )
    if a.windows is not no_windows:
        words.append("window by file")
    words += [word for word, on in (("softcap", a.softcaps), ("clamped q, k, v", a.clip_key)) if on]
    return "; ".join(words)


def positions(a: Architecture) -> str:
    if a.positions == "learned":
        return "learned"
    words = ["RoPE" + (" in neighbouring pairs" if a.rope_style == "gptj" else "")]
    if a.rope_theta_alt is not None:
        words.append("a second base for sliding layers")
    elif a.mrope_section is not None:
        words.append("three axes for images")
    elif a.layer_rope is not main_rope:
        words.append("none on some layers")
    return "; ".join(words)


def feed_forward(a: Architecture) -> str:
    words = [("gated " if a.mlp_gated else "plain ") + a.activation]
    if a.experts is not None:
        words.append("experts" + (" and a shared one" if a.experts.shared_prefix else ""))
    if a.mlp_bias == "all":
        words.append("bias")
    return "; ".join(words) + ("; in parallel with attention" if a.parallel else "")


def around(a: Architecture) -> str:
    words = [
        ("embeddings times sqrt(hidden)", a.normalize_embeddings),
        ("head tied unless the file says otherwise", a.tied_head),
        ("unit rows by file", a.norm_head),
        ("fused matrices of its own", a.fused != LLAMA_FUSED),
        (f"{a.vision.name} tower" if a.vision else "", a.vision is not None),
        ("images see themselves", a.pictures_see_themselves),
    ]
    return "; ".join(word for word, on in words if on)


def page() -> str:
    rows = [
        f"| {name} | {norms(a)} | {attention(a)} | {positions(a)} | {feed_forward(a)} | {around(a)} |"
        for name, a in sorted(SUPPORTED.items())
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
