"""From the names in an adapter file to the model's matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..loading.linears import Ranges

if TYPE_CHECKING:
    from ..language_model import LanguageModel

__all__ = ["AdapterKey", "ModuleIndex", "Slice", "parse_key"]

# Prefixes that wrappers (PEFT, accelerate, torch.compile, multimodal models) put before the language model's names.
WRAPPERS = ("base_model", "model", "module", "_orig_mod", "language_model", "text_model", "transformer")

Role = Literal["A", "B", "B_bias", "embedding_A", "embedding_B", "replacement", "bias", "skip"]
PATTERNS: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"(?P<module>.+)\.original_module\.(weight|bias)"), "skip"),
    (re.compile(r"(?P<module>.+)\.modules_to_save(\.[^.]+)?\.weight"), "replacement"),
    (re.compile(r"(?P<module>.+)\.lora_A(\.[^.]+)?\.weight"), "A"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.[^.]+)?\.weight"), "B"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.[^.]+)?\.bias"), "B_bias"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_A(\.[^.]+)?"), "embedding_A"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_B(\.[^.]+)?"), "embedding_B"),
    (re.compile(r"(?P<module>.+?)(\.base_layer|\.modules_to_save(\.[^.]+)?)?\.bias"), "bias"),
    (re.compile(r"(?P<module>.+?)(\.base_layer)?\.weight"), "replacement"),
)


@dataclass(frozen=True)
class AdapterKey:
    """One parsed tensor name: the module that it belongs to, in the names of the original model, and its role."""

    name: str
    module: str
    role: Role


def parse_key(name: str) -> AdapterKey | None:
    """Parse a tensor name; None for an unknown form."""
    for pattern, role in PATTERNS:
        match = pattern.fullmatch(name)
        if match:
            return AdapterKey(name, match["module"], role)
    return None


@dataclass(frozen=True)
class Slice:
    """A matrix of the model, and its output rows in the adapter's tensors (None: all)."""

    linear: Linear
    rows: Ranges | None = None


@dataclass
class ModuleIndex:
    """The modules of a model under names without wrappers' prefixes; fused ones also under their names in the files."""

    model: LanguageModel
    linears: dict[str, list[Slice]] = field(default_factory=dict)
    embeddings: dict[str, Embedding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.model.modules:
            if isinstance(module, Embedding):
                self.embeddings[_bare(module.key)] = module
            for linear in module.submodules():
                self.linears[_bare(linear.key)] = [Slice(linear)]
        for module in self.model.modules:
            for linear in module.submodules():
                if linear.spec.fused_key is not None:
                    parts = self.linears.setdefault(_bare(linear.spec.fused_key), [])
                    parts.append(Slice(linear, linear.spec.fused_rows))

    def find_linears(self, module: str) -> list[Slice]:
        """Return the matrices of a module of the original model: one, or the parts of a fused one; [] if unknown."""
        return next((self.linears[name] for name in self._names(module) if name in self.linears), [])

    def find_embedding(self, module: str) -> Embedding | None:
        """Return the token embedding if `module` names it, else None."""
        return next((self.embeddings[name] for name in self._names(module) if name in self.embeddings), None)

    def _names(self, module: str) -> Iterator[str]:
        map_key = self.model.config.arch.map_key
        for name in _without_wrappers(module):
            yield _bare(map_key(f"{name}.weight").removesuffix(".weight"))


def _without_wrappers(name: str) -> Iterator[str]:
    """Yield `name`, then `name` without its first part as long as that part is a wrapper's."""
    yield name
    while "." in name and name.split(".", 1)[0] in WRAPPERS:
        name = name.split(".", 1)[1]
        yield name


def _bare(key: str) -> str:
    *_, last = _without_wrappers(key)
    return last


def unknown_names(names: Iterable[str], limit: int = 5) -> str:
    """Return a few of `names` for a message."""
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(name[:120] for name in listed[:limit]) + more
