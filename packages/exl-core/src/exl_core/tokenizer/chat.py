"""Chat templates: the model's own Jinja, in a sandbox that neither reaches Python nor changes what it is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ChatTemplateError

__all__ = ["ChatTemplates"]

MAX_TEMPLATE_BYTES = 1 << 20


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training spans in some templates; its body is plain output."""

    tags = {"generation"}  # noqa: RUF012, declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplates:
    """The templates of a model folder: chat_template.jinja first, else tokenizer_config.json's `chat_template`."""

    def __init__(self, folder: Path, tokenizer_config: Mapping[str, Any]) -> None:
        self.templates = _read_templates(folder, tokenizer_config)

    def select(self, name: str | None, has_tools: bool) -> str:
        """Source of the template called `name`; without a name the default one, or `tool_use` when there are tools."""
        if not self.templates:
            raise ChatTemplateError("this model has no chat template: pass one as chat_template=...")
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ChatTemplateError(f"no chat template called {name!r}; the model has: {', '.join(self.templates)}")
        return self.templates[name]

    @staticmethod
    def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Raises ChatTemplateError when the template is malformed or refuses the conversation."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(source).render(messages=messages, **variables)
        except TemplateError as e:
            raise ChatTemplateError(f"the chat template failed: {e}") from e
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as e:
            raise ChatTemplateError(f"the chat template failed on these messages: {type(e).__name__}: {e}") from e


def _read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.exists():
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{file}: larger than {MAX_TEMPLATE_BYTES} bytes")
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as e:
            raise ChatTemplateError(f"{file}: cannot be read ({e})") from e
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        named = [e for e in entry if isinstance(e, dict)]
        return {e["name"]: e["template"] for e in named if isinstance(e.get("template"), str) and e.get("name")}
    return {}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' tojson: no HTML escaping, and non-ASCII text stays readable."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
