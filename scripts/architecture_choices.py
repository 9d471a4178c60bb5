"""Finds Python that chooses by the name or the type of an architecture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

from python_names import given_names, identifier, nodes, sides

FOLDER = Path(__file__).resolve().parent.parent / "packages/exl-core/src/exl_core/architectures"
ARCHITECTURE = re.compile(r"^\w+For(?:CausalLM|ConditionalGeneration)$")
NAMES_ARCHITECTURES = re.compile(r"/architectures/|/exl_generate/cli/random_model\.py$")
# Differences between architectures are fields of `Architecture`, each with a name, so no other code compares an
# architecture, or the name or type of one, with anything but its like, or looks something up by it.
ARCHITECTURE_NAMES = {"architecture", "architectures", "model_type", "text_model_types", "vision_model_type"}
TEXT_TESTS = {"startswith", "endswith", "find", "index", "count", "get", "match", "fullmatch", "search", "fnmatch"}
ASKS_ARCHITECTURE = {
    "packages/exl-core/src/exl_core/vision/settings.py": "types of vision towers in files, all but one rejected",
    "packages/exl-core/src/exl_core/vision/siglip.py": "types of vision towers in files, all but one rejected",
}


def names_architecture(node: ast.AST, known: Set[str]) -> bool:
    """Whether the code is the name or the type of an architecture: `arch.name`, `config.get("model_type")`."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        return identifier(node.value) in {"arch", "architecture"}
    if isinstance(node, ast.Subscript):
        return names_key(node.slice) or names_architecture(node.value, known)
    if isinstance(node, ast.Call):
        return any(map(names_key, node.args[:1])) or (
            isinstance(node.func, ast.Attribute) and names_architecture(node.func.value, known)
        )
    return identifier(node) in known


def names_key(node: ast.AST) -> bool:
    """Whether the code is a key of config.json that names an architecture."""
    return isinstance(node, ast.Constant) and str(node.value).rpartition("->")[2] in ARCHITECTURE_NAMES


def names_family(node: ast.AST, families: re.Pattern[str]) -> bool:
    """Whether the code is a text, or a collection of texts, that starts with the name of a family."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(names_family(part, families) for part in node.elts)
    return isinstance(node, ast.Constant) and bool(families.match(str(node.value)))


def asked(node: ast.AST) -> tuple[list[ast.expr], list[ast.expr]]:
    """The operands that the code compares, tests or looks something up by, and the values that it tests them for."""
    if isinstance(node, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return sides(node), sides(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_TESTS:
        return ([], []) if any(map(names_key, node.args[:1])) else ([node.func.value, *node.args], node.args)
    if isinstance(node, ast.Match):
        return [node.subject], [part.value for part in ast.walk(node) if isinstance(part, ast.MatchValue)]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [node.slice], []
    return [], []


def architecture_choices(source: str, families: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """(line, code) where a Python file chooses by architecture.

    Args:
        source: the file's.
        families: the start of names of architectures.
    """
    known: Set[str] = ARCHITECTURE_NAMES
    while found := {name for name, value in given_names(source) if name and names_architecture(value, known)} - known:
        known = known | found
    for node in nodes(source):
        if not isinstance(node, ast.expr | ast.Match):
            continue
        compared, values = asked(node)
        named = [names_architecture(part, known) for part in compared]
        alike = isinstance(node, ast.Compare) and all(named)
        if (any(named) and not alike) or any(names_family(value, families) for value in values):
            yield node.lineno, ast.unparse(node).partition("\n")[0]


@cache
def families_of_architectures() -> re.Pattern[str]:
    """The start of names of architectures, of those that architectures/ names: `Qwen` of `Qwen3MoeForCausalLM`."""
    texts = (
        node.value
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ARCHITECTURE.match(node.value)
    )
    names = sorted({re.split(r"\d|For|Moe|MoE", text)[0] for text in texts} - {"Index"})
    return re.compile(f"(?:{'|'.join(names)})(?![a-z])")


def architecture_errors(name: str, source: str) -> list[str]:
    """Choices by architecture in a file that neither is of architectures/ nor has a reason in ASKS_ARCHITECTURE."""
    if NAMES_ARCHITECTURES.search(name):
        return []
    found = list(architecture_choices(source, families_of_architectures()))
    if name in ASKS_ARCHITECTURE:
        return [] if found else [f"{name}: asks for no architecture any more; take it out of ASKS_ARCHITECTURE"]
    return [
        f"{name}:{line}: {code}: chooses by architecture: make it a field of `Architecture`, or name the file and the "
        "reason in ASKS_ARCHITECTURE"
        for line, code in found
    ]
