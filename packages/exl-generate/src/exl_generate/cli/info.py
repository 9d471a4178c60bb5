"""`exl info`: what is in a model folder, read from its headers alone."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from exl_core import ExLlamaV2Config
from exl_core.loading.parallel_plan import plan_tp
from exl_core.loading.plan import LoadPlan, plan
from exl_generate.cli.models import model_folder, say_device
from exl_generate.cli.tables import show_table
from exl_kernels.kv import KVKind

__all__ = ["describe", "run"]

CONTEXTS = (2048, 8192, 32768, 131072)
#: Bytes per stored K/V element; quantized ones carry a half-precision scale per 32 elements.
KV_BYTES = {"fp16": 2.0, "fp8": 1.0, "q8": 1.0625, "q6": 0.8125, "q4": 0.5625}


def run(
    folder: Path | None,
    as_json: bool,
    planned_cache: KVKind | None = None,
    tokens: int | None = None,
    tp: bool = False,
) -> int:
    """Describe a model folder, as text or JSON. Returns the exit code: 1 if a planned model does not fit.

    With `planned_cache` the output includes a plan of memory for such a cache of `tokens` tokens (default: the model's
    context), with `tp` sharded over all devices.
    """
    place = model_folder(folder)
    if planned_cache is not None:
        say_device()
    facts = describe(place)
    found = None
    if planned_cache is not None:
        found = (plan_tp if tp else plan)(ExLlamaV2Config(place), cache=planned_cache, cache_tokens=tokens)
    code = 0 if found is None or found.fits else 1
    if found is not None:
        facts["plan"] = _plan_facts(found)
    if as_json:
        print(json.dumps(facts))
        return code
    show_table("model", ["", ""], [[name, _shown(name, value)] for name, value in facts["model"].items()])
    show_table(
        "matrices",
        ["kind", "count", "format", "parameters", "MB", "bits/weight"],
        [
            [
                m["kind"],
                str(m["count"]),
                m["format"] if m["code_bits"] is None else f"{m['format']} {m['code_bits']}",
                f"{m['parameters']:,}",
                f"{m['bytes'] / 1e6:.1f}",
                f"{m['bits_per_weight']:.2f}",
            ]
            for m in facts["matrices"]
        ],
    )
    show_table(
        "K/V cache, MB",
        ["tokens", *KV_BYTES],
        [[f"{row['tokens']:,}", *(f"{row[kind] / 1e6:.1f}" for kind in KV_BYTES)] for row in facts["cache"]],
    )
    if found is not None:
        print(found.table())
    return code


def _shown(name: str, value: Any) -> str:
    """A fact for people: large numbers with separators."""
    return f"{value:,}" if name in ("parameters", "bytes") else str(value)


def _plan_facts(found: LoadPlan) -> dict[str, Any]:
    names = ("weights", "cache", "tables", "scratch", "used", "budget")
    return {
        "fits": found.fits,
        "max_cache_tokens": found.max_cache_tokens,
        "devices": [
            {"device": d.device.name, "modules": len(d.modules), **{n: getattr(d, n) for n in names}}
            for d in found.devices
        ],
    }


def describe(folder: Path) -> dict[str, Any]:
    """Shape, matrices by kind with their bits per weight, and K/V bytes at several context lengths."""
    config = ExLlamaV2Config(folder)
    matrices = _matrices(config)
    parameters = sum(m["parameters"] for m in matrices)
    nbytes = sum(m["bytes"] for m in matrices)
    inner = [m for m in matrices if m["kind"] not in ("embed_tokens", "lm_head", "other")]
    weights = sum(m["parameters"] for m in inner)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {
        "model": {
            "folder": str(folder),
            "architecture": config.architecture,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "query_heads": config.num_attention_heads,
            "key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "context": config.max_seq_len,
            "parameters": parameters,
            "bytes": nbytes,
            "bits_per_weight": round(sum(m["bytes"] for m in inner) * 8 / weights, 3) if weights else None,
        },
        "matrices": matrices,
        "cache": [
            {"tokens": n, **{kind: int(per_token * n * size) for kind, size in KV_BYTES.items()}}
            for n in CONTEXTS
            if n <= max(config.max_seq_len, CONTEXTS[0])
        ],
    }


def _matrices(config: ExLlamaV2Config) -> list[dict[str, Any]]:
    """One row per kind of matrix (q_proj, down_proj, ...), in the order of the files."""
    modules: dict[str, dict[str, Any]] = defaultdict(dict)
    tensors = {} if config.checkpoint is None else config.checkpoint.tensors
    for name, entry in tensors.items():
        key, _, part = name.rpartition(".")
        modules[key][part] = entry
    kinds: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for key, parts in modules.items():
        format_, bits, count = _parameters(parts, config.gptq_bits)
        kind = key.rpartition(".")[2] if key and "norm" not in key else "other"
        row = kinds.setdefault(
            (kind, format_, bits),
            {"kind": kind, "count": 0, "format": format_, "code_bits": bits, "parameters": 0, "bytes": 0},
        )
        row["count"] += 1
        row["parameters"] += count
        row["bytes"] += sum(entry.nbytes for entry in parts.values())
    for row in kinds.values():
        row["bits_per_weight"] = row["bytes"] * 8 / max(1, row["parameters"])
    return list(kinds.values())


def _parameters(parts: dict[str, Any], gptq_bits: int) -> tuple[str, int | None, int]:
    """Return format, bits of a code and number of weights of one module, from the shapes of its tensors.

    Bits are None for float matrices, and for EXL2, which mixes widths.
    """
    if "q_weight" in parts:
        return "exl2", None, int(parts["q_invperm"].shape[0] * parts["q_weight"].shape[1])
    if "qweight" in parts:
        rows, columns = parts["qweight"].shape
        return "gptq", gptq_bits, int(rows * 32 // gptq_bits * columns)
    total = 0
    for entry in parts.values():
        size = 1
        for dimension in entry.shape:
            size *= dimension
        total += size
    return next(iter(parts.values())).dtype.lower(), None, total
