"""The chat templates of a model folder; `sandbox` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ChatTemplateError, InputError
from ..json_reader import read_json_file, regular_size

__all__ = [
    "ChatTemplates",
    "cut_after_mark",
    "mark_final_message",
    "prepare_messages",
    "refuse_keywords",
    "token_texts",
]

MAX_TEMPLATE_BYTES = 1 << 20
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the usual one first
# Appended to the message to continue. Its last character is a space: a template that trims messages removes the space,
# and the prompt then ends without white space, too.
MARK = "EXL_THE_MESSAGE_GOES_ON_HERE "
# Further keywords of transformers' method of the same name. transformers does not pass them to templates.
NOT_BUILT = (
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)


class ChatTemplates:
    """The templates of a model folder.

    The sources in order of priority: chat_template.jinja and additional_chat_templates/NAME.jinja,
    tokenizer_config.json's `chat_template`, chat_template.json.
    """

    def __init__(self, folder: Path, tokenizer_config: Mapping[str, Any]) -> None:
        self.templates = _read_templates(folder, tokenizer_config)

    def select(self, name: str | None, has_tools: bool) -> str:
        """Return the source of the template called `name`.

        Without a name `tool_use` if there are tools, else the default.

        Raises:
            ChatTemplateError: there is no such template.
        """
        if not self.templates:
            raise ChatTemplateError("this model has no chat template: pass one as chat_template=...")
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ChatTemplateError(f"no chat template called {name!r}; the model has: {', '.join(self.templates)}")
        return self.templates[name]

    @staticmethod
    def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render a template. Raises ChatTemplateError when it is malformed or rejects the conversation."""
        from .sandbox import render

        return render(source, messages, variables)


def refuse_keywords(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return `variables` without transformers' keywords that are off. Raises InputError for one that is on."""
    for name in NOT_BUILT:
        if variables.get(name):
            raise InputError(
                f"apply_chat_template knows no {name}={variables[name]!r}: it returns the prompt of one conversation "
                "as text, for encode(..., encode_special_tokens=True)"
            )
    return {k: v for k, v in variables.items() if k not in NOT_BUILT}


def token_texts(tokenizer_config: Mapping[str, Any], fallback: Mapping[str, str]) -> dict[str, str]:
    """Return the special tokens that a template may name.

    These are the tokens of tokenizer_config.json (`..._token`, and the named ones of `extra_special_tokens`), and those
    of `fallback` that the file does not mention. A token set to null is undefined.
    """
    said = {k: v for k, v in tokenizer_config.items() if k.endswith("_token") and not isinstance(v, bool)}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        named = tokenizer_config.get(key)
        said |= named if isinstance(named, dict) else {}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in said.items()}
    return {k: v for k, v in {**fallback, **texts}.items() if isinstance(v, str)}


def prepare_messages(messages: Sequence[Any]) -> list[Any]:
    """Return the messages as a template sees them.

    Null values are removed. Reasoning is present under every name that templates read.
    """
    return [_prepare_message(m) if isinstance(m, Mapping) else m for m in messages]


def _prepare_message(message: Mapping[str, Any]) -> dict[str, Any]:
    said = {k: v for k, v in message.items() if v is not None}
    reasoning = next((said[name] for name in REASONING if name in said), None)
    if reasoning is None:
        return said
    return {"thinking": reasoning, **said, "reasoning_content": reasoning}  # the names that transformers fills


def mark_final_message(messages: list[Any], field: str) -> tuple[list[Any], str]:
    """Return the messages with MARK after the text of the last one's `field`, and that text.

    Raises ChatTemplateError.
    """
    last = messages[-1] if messages else None
    value = last.get(field) if isinstance(last, Mapping) else None
    text, marked = _mark(value)
    if last is None or text is None:
        raise ChatTemplateError(f"continue_final_message: the last message has no text as its {field!r} to continue")
    same = [name for name in REASONING if last.get(name) == value] if field in REASONING else [field]
    return [*messages[:-1], {**last, **dict.fromkeys(same, marked)}], text


def _mark(value: Any) -> tuple[str | None, Any]:
    """Return the text (of a list of parts: that of the last part with text), and `value` with MARK after it."""
    if isinstance(value, str):
        return value, value + MARK
    if isinstance(value, (list, tuple)):
        for i in reversed(range(len(value))):
            part = value[i]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                return part["text"], [*value[:i], {**part, "text": part["text"] + MARK}, *value[i + 1 :]]
    return None, value


def cut_after_mark(prompt: str, text: str) -> str:
    """Return `prompt` up to the end of the message to continue. Raises ChatTemplateError if the message is missing."""
    end = prompt.rfind(MARK.rstrip())
    if end < 0 or text.strip() not in prompt:
        raise ChatTemplateError("continue_final_message: the chat template does not put the last message in the prompt")
    return prompt[:end] if prompt.startswith(MARK, end) else prompt[:end].rstrip()


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
    file = folder / "chat_template.json"  # the former place of multimodal processors' templates
    entry = read_json_file(file).get("chat_template") if file.exists() else None
    return {"default": entry} if isinstance(entry, str) else {}


def _read(file: Path) -> str:
    try:
        if regular_size(file) > MAX_TEMPLATE_BYTES:
            raise ChatTemplateError(f"{file}: larger than {MAX_TEMPLATE_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ChatTemplateError(f"{file}: cannot be read ({e})") from e
