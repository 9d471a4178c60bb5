"""The features that bench_features.py measures: the jobs of each, and the steps that its own are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from exl_core import ExLlamaV2, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2GrammarFilter
from exl_generate.sampling import Settings
from exl_kernels.safetensors_file import write_safetensors

__all__ = ["DRAFTS", "FEATURES", "Feature", "Parts", "with_references"]

DRAFTS = 4  # tokens that a drafter guesses in every step
RANK, ADAPTERS = 16, 4

SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "kind": {"enum": ["person", "robot", "cat"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}
REGEX = "([A-Za-z0-9]{1,12} ){500}"

NEUTRAL: dict[str, Any] = {"token_repetition_penalty": 1.0}
SAMPLED: dict[str, Any] = {**NEUTRAL, "temperature": 0.8, "top_k": 50, "top_p": 0.8}
CHAT: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 0.0,
    "min_p": 0.05,
    "token_repetition_penalty": 1.05,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
}
OPEN: dict[str, Any] = {**NEUTRAL, "temperature": 1.0, "top_k": 0, "top_p": 0.0}


class Parts:
    """Adapters and filters of the jobs, made when first asked for."""

    def __init__(self, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, scratch: Path) -> None:
        self.model, self.tokenizer, self._scratch = model, tokenizer, scratch

    @cached_property
    def adapters(self) -> list[ExLlamaV2Lora]:
        """Adapters of every matrix but the head."""
        return [
            ExLlamaV2Lora.from_directory(self.model, make_adapter(self._scratch / f"lora-{seed}", self.model, seed))
            for seed in range(ADAPTERS)
        ]

    @cached_property
    def schema(self) -> ExLlamaV2GrammarFilter:
        return ExLlamaV2GrammarFilter(self.model, self.tokenizer, json_schema=SCHEMA)

    @cached_property
    def regex(self) -> ExLlamaV2GrammarFilter:
        return ExLlamaV2GrammarFilter(self.model, self.tokenizer, regex=REGEX)


def make_adapter(folder: Path, model: ExLlamaV2, seed: int) -> Path:
    """Write an adapter of rank `RANK` for every linear of the layers, of small random values."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for linear in model.linears():
        if linear.key.startswith("model.layers."):
            key = f"base_model.model.{linear.key}"
            a = torch.randn(RANK, linear.in_features, generator=generator) * 0.01
            b = torch.randn(linear.out_features, RANK, generator=generator) * 0.01
            tensors |= {f"{key}.lora_A.weight": a.half(), f"{key}.lora_B.weight": b.half()}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return folder


#: Arguments of job number `index`.
JobArguments = Callable[[Parts, int], dict[str, Any]]


def settings(fields: dict[str, Any], _parts: Parts, _index: int) -> dict[str, Any]:
    return {"gen_settings": Settings(**fields)}


def greedy(more: dict[str, Any], _parts: Parts, _index: int) -> dict[str, Any]:
    return {"gen_settings": Settings.greedy(), **more}


def adapted(period: int, every: int, parts: Parts, index: int) -> dict[str, Any]:
    """Adapter index % period for every `every`th job, none for the others."""
    chosen = [] if index % every else [parts.adapters[index % period]]
    return {"gen_settings": Settings.greedy(), "loras": chosen}


def filtered(name: Literal["schema", "regex"], parts: Parts, _index: int) -> dict[str, Any]:
    return {"gen_settings": Settings(**SAMPLED), "filters": [getattr(parts, name)]}


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        name: its name, for `--feature`.
        job: arguments of its jobs.
        about: what it is, for the table.
        target: least ratio to `references` at batch 1 and at batch 32; None where the speed shall merely stay.
        references: other features and how often their step's time counts; the ratio compares with the sum.
        least_batch: smallest batch in which the feature differs from another one.
        cache: kind of the cache.
        drafter: what drafts.
        model: the model that generates.
        sequences: sequences of a job; 2 with a negative prompt.
        jobs: jobs for each sequence of the batch.
        peaked: whether logits are shaped like a language model's: few ids are likely.
        as_greedy: whether all jobs have the tokens of greedy ones.
    """

    name: str
    job: JobArguments
    about: str
    target: tuple[float, float] | None = None
    references: dict[str, int] = field(default_factory=lambda: {"greedy": 1})
    least_batch: int = 1
    cache: str = "fp16"
    drafter: Literal["none", "ngram", "model"] = "none"
    model: Literal["main", "draft"] = "main"
    sequences: int = 1
    jobs: int = 1
    peaked: bool = False
    as_greedy: bool = False

    @property
    def drafts(self) -> int:
        """Draft tokens of a step."""
        return 0 if self.drafter == "none" else DRAFTS


SAMPLERS, LORA, MIXED = (0.95, 0.9), (0.75, 0.75), (0.7, 0.7)
STRINGS = {
    "stop_conditions": ["<|end of turn|>", "\n\nUser: ", "###\n###"],
    "banned_strings": ["as a large language model", "i cannot help with", "\u2014 and yet,"],
}
NO_DRAFTS_COST = (1 / 1.25, 1 / 1.6)  # a step of five rows a sequence takes at most so much longer
SUM_OF_PARTS = (1 / 1.1, 1 / 1.1)

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in [
        Feature("greedy", partial(greedy, {}), "greedy", as_greedy=True),
        Feature("greedy-twice", partial(greedy, {}), "greedy, twice the sequences", jobs=2),
        Feature("greedy-peaked", partial(greedy, {}), "greedy, logits like a real model's", references={}, peaked=True),
        Feature("sampled", partial(settings, SAMPLED), "temperature, top-k, top-p", SAMPLERS),
        Feature("chat", partial(settings, CHAT), "min-p, DRY, XTC, repetition penalty; flat logits", SAMPLERS),
        Feature(
            "chat-peaked",
            partial(settings, CHAT),
            "min-p, DRY, XTC, repetition penalty; logits like a real model's",
            SAMPLERS,
            {"greedy-peaked": 1},
            peaked=True,
        ),
        Feature("typical", partial(settings, {**OPEN, "typical": 0.95}), "typical", SAMPLERS),
        Feature("tfs", partial(settings, {**OPEN, "tfs": 0.95}), "tail-free", SAMPLERS),
        Feature(
            "cfg",
            partial(settings, {**SAMPLED, "cfg_scale": 1.5}),
            "CFG",
            (0.85, 0.85),
            {"greedy-twice": 1},
            sequences=2,
        ),
        Feature("lora", partial(adapted, 1, 1), "one LoRA of rank 16", LORA),
        Feature("lora-four", partial(adapted, ADAPTERS, 1), "four LoRAs in the batch", MIXED, least_batch=ADAPTERS),
        Feature("lora-half", partial(adapted, 1, 2), "every second sequence with a LoRA", MIXED, least_batch=2),
        Feature("ngram", partial(greedy, {}), "4 draft tokens from text", NO_DRAFTS_COST, drafter="ngram"),
        Feature("draft-alone", partial(greedy, {}), "the draft model by itself", model="draft"),
        Feature(
            "draft-model",
            partial(greedy, {}),
            "4 draft tokens of a 1.1B model",
            SUM_OF_PARTS,
            {"draft-alone": DRAFTS, "ngram": 1},
            drafter="model",
        ),
        Feature("q8", partial(greedy, {}), "Q8 cache", cache="q8"),
        Feature("q4", partial(greedy, {}), "Q4 cache", cache="q4"),
        Feature("strings", partial(greedy, STRINGS), "stop and banned strings", as_greedy=True),
        Feature("top-20", partial(greedy, {"return_top_tokens": 20}), "top-20 probabilities", as_greedy=True),
        Feature("schema", partial(filtered, "schema"), "JSON schema, sampled", (0.95, 0.85), {"sampled": 1}),
        Feature("regex", partial(filtered, "regex"), "regular expression, sampled", (0.95, 0.85), {"sampled": 1}),
    ]
}


def with_references(names: list[str], batch: int) -> list[Feature]:
    """Return the features of that batch, after all that they are compared with, greedy steps first."""
    found: dict[str, Feature] = {"greedy": FEATURES["greedy"]}
    for name in names:
        feature = FEATURES[name]
        if batch >= feature.least_batch:
            found |= {other: FEATURES[other] for other in feature.references}
            found[name] = feature
    return list(found.values())
