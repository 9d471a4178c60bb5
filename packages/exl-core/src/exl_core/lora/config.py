"""adapter_config.json: rank and scaling of each module, and errors for unsupported methods."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AdapterError, UnsupportedError
from ..json_reader import JsonReader, is_number, read_json_file

__all__ = ["AdapterConfig"]

# PEFT's options that change the result beyond y + B(A x) * scaling.
UNBUILT = {
    "use_dora": "DoRA scales the merged matrix by a trained magnitude",
    "use_qalora": "QA-LoRA pools its input",
    "layer_replication": "the adapter duplicates layers of the model",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "target_parameters": "the adapter changes parameters that are no linear layer",
    "trainable_token_indices": "the adapter changes single rows of the embedding",
    "arrow_config": "Arrow routes between adapters",
    "use_bdlora": "block-diagonal LoRA",
}
PLAIN_INITS = (
    None,
    True,
    False,
    "gaussian",
    "orthogonal",
    "eva",
    "true",
    "false",
)  # all others change the base weights
MAX_RANK = 1 << 16
PATTERN = re.compile(r"\^?[\w.\\]+\$?")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of adapter_config.json."""

    file: Path
    r: int
    alpha: float
    use_rslora: bool = False
    fan_in_fan_out: bool = False  # the model's own matrices are stored [in, out]; the adapter's are not
    target_modules: tuple[str, ...] | str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> AdapterConfig:
        """Read and check the file.

        Raises:
            AdapterError: a value is invalid.
            UnsupportedError: a method is not supported.
        """
        data = read_json_file(file)
        read = JsonReader(data, file)
        kind = read.string("peft_type", default="LORA")
        if kind != "LORA":
            raise UnsupportedError(f"{file}: peft_type {kind!r} is not supported; only LORA adapters can be loaded")
        for key, meaning in UNBUILT.items():
            if data.get(key):
                raise UnsupportedError(f"{file}: {key} is set ({meaning}), which is not supported")
        if data.get("init_lora_weights", True) not in PLAIN_INITS:
            raise UnsupportedError(
                f"{file}: init_lora_weights {data['init_lora_weights']!r} changes the model's own weights; convert the "
                "adapter to a plain LoRA first (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
            )
        targets = data.get("target_modules")
        if isinstance(targets, list) and all(isinstance(t, str) for t in targets):
            targets = tuple(targets)
        elif targets is not None and not isinstance(targets, str):
            raise AdapterError(f"{file}: target_modules is {str(targets)[:80]}, must be a list of names or a string")
        return cls(
            file,
            read.integer("r", minimum=1, maximum=MAX_RANK),
            read.number("lora_alpha"),
            read.boolean("use_rslora", default=False),
            read.boolean("fan_in_fan_out", default=False),
            targets,
            {k: int(v) for k, v in _pattern(data, "rank_pattern", file).items()},
            _pattern(data, "alpha_pattern", file),
        )

    def settings(self) -> str:
        """Return all settings that decide the effect of the adapter's tensors, as text."""
        patterns = [list(table.items()) for table in (self.rank_pattern, self.alpha_pattern)]  # the first match counts
        return repr((self.r, self.alpha, self.use_rslora, self.fan_in_fan_out, patterns))

    def rank(self, module: str) -> int:
        """Return the rank that a module (by its name in the original model) must have."""
        return int(_lookup(self.rank_pattern, module, self.r))

    def scaling(self, module: str) -> float:
        """Return alpha / r of one module, with rank-stabilised LoRA alpha / sqrt(r)."""
        alpha, rank = _lookup(self.alpha_pattern, module, self.alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _pattern(data: Mapping[str, object], key: str, file: Path) -> dict[str, float]:
    """Return rank_pattern or alpha_pattern: a number for each module name or end of a name."""
    table = data.get(key) or {}
    if not isinstance(table, Mapping):
        raise AdapterError(f"{file}: {key} is {str(table)[:80]}, must be an object of names and numbers")
    for name, value in table.items():
        if not PATTERN.fullmatch(name):
            raise UnsupportedError(f"{file}: {key} has the expression {name[:80]!r}; only names of modules can be used")
        if not is_number(value) or (key == "rank_pattern" and not (value == int(value) and 1 <= value <= MAX_RANK)):
            raise AdapterError(f"{file}: {key}[{name[:80]!r}] is {value!r:.60}, must be a number that fits")
    return {name.replace("\\.", ".").rstrip("$"): value for name, value in table.items()}


def _lookup(table: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first entry whose name is the module's, or its last parts (PEFT's rule).

    `^` requires the whole name, without PEFT's prefix.
    """
    names = (module, module.removeprefix("base_model.model."))
    for name, value in table.items():
        whole = name.removeprefix("^")
        if whole in names or (whole == name and module.endswith("." + name)):
            return value
    return default
