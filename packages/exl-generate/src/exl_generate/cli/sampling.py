"""Sampler settings from command-line options."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from exl_generate.errors import RequestError
from exl_generate.sampling import Settings

__all__ = ["NOT_SETTABLE", "make_settings"]

#: Fields that are objects or state, not something to type; cfg_scale comes with a second prompt.
NOT_SETTABLE = frozenset(
    {"token_bias", "post_sampling_hooks", "ngram_trie", "ngram_index", "ngram_history", "mirostat_mu", "cfg_scale"}
)
_SETS = ("dry_sequence_breakers", "xtc_ignore_tokens")


def make_settings(assignments: list[str] | None, greedy: bool, **options: Any) -> Settings:
    """Defaults, then the options that were given, then NAME=VALUE assignments."""
    values = {name: value for name, value in options.items() if value is not None and value != []}
    for name in _SETS:
        if name in values:
            values[name] = frozenset(values[name])
    names = {f.name for f in dataclasses.fields(Settings)} - NOT_SETTABLE
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals or name not in names:
            raise RequestError(f"--set {assignment!r}: use NAME=VALUE with one of {', '.join(sorted(names))}")
        values[name] = _value(assignment, text)
    settings = Settings.greedy(**values) if greedy else Settings(**values)
    settings.validate()
    return settings


def _value(assignment: str, text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        raise RequestError(f"--set {assignment!r}: {text!r} is not a number, True, False or a set of ids") from None
