"""The chat templates of a model folder; `sandbox` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ChatTemplateError
from ..json_reader import read_json_file

__all__ = ["ChatTemplates"]

MAX_TEMPLATE_BYTES = 1 << 20


class ChatTemplates:
    """The templates of a model folder: chat_template.jinja and additional_chat_templates/NAME.jinja first, else
    tokenizer_config.json's `chat_template`, else chat_template.json."""

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
        from .sandbox import render

        return render(source, messages, variables)


def _read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {file.stem: _read(file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    file = folder / "chat_template.jinja"
    if file.exists():
        found["default"] = _read(file)
    if found:
        return found
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        named = [e for e in entry if isinstance(e, dict)]
        return {
            e["name"]: e["template"]
            for e in named
            if isinstance(e.get("template"), str) and isinstance(e.get("name"), str)
        }
    file = folder / "chat_template.json"  # where processors of multimodal models kept it once
    entry = read_json_file(file).get("chat_template") if file.exists() else None
    return {"default": entry} if isinstance(entry, str) else {}


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{file}: larger than {MAX_TEMPLATE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ChatTemplateError(f"{file}: cannot be read ({e})") from e
