"""Chat templates for models that come without one: named ones, files, and texts of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exl_generate.errors import RequestError

__all__ = ["NamedTemplate", "find_template", "known_names"]

MAX_BYTES = 1 << 20

_CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_LLAMA3 = """\
{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

_ALPACA = """\
{{ bos_token }}{% for m in messages %}\
{% if m.role == "system" %}{{ m.content }}

{% elif m.role == "user" %}### Instruction:
{{ m.content }}

{% else %}### Response:
{{ m.content }}

{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:
{% endif %}"""

_PLAIN = """\
{{ bos_token }}{% for m in messages %}\
{% if m.role == "system" %}{{ m.content }}
{% else %}{{ m.role | capitalize }}: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""


@dataclass(frozen=True)
class NamedTemplate:
    """A template's Jinja source, and texts at which an answer is over."""

    source: str
    stops: tuple[str, ...] = ()


_KNOWN = {
    "alpaca": NamedTemplate(_ALPACA, ("### Instruction:", "### Response:")),
    "chatml": NamedTemplate(_CHATML, ("<|im_end|>", "<|im_start|>")),
    "llama3": NamedTemplate(_LLAMA3, ("<|eot_id|>", "<|start_header_id|>")),
    "plain": NamedTemplate(_PLAIN, ("\nUser:", "\nAssistant:")),
}


def known_names() -> str:
    """Describe the values of --chat-template."""
    return f"which takes a file, a Jinja text, or one of {', '.join(_KNOWN)}"


def find_template(value: str) -> NamedTemplate:
    """The template that --chat-template means: a known name, the text itself, or a file. Raises RequestError."""
    if value in _KNOWN:
        return _KNOWN[value]
    if "{{" in value or "{%" in value:
        return NamedTemplate(value)
    file = Path(value)
    try:
        if not file.is_file():
            raise RequestError(f"--chat-template {value}: there is no such file; the option {known_names()[6:]}")
        if file.stat().st_size > MAX_BYTES:
            raise RequestError(f"--chat-template {value}: larger than {MAX_BYTES} bytes, which no template is")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--chat-template {value}: cannot read it ({error})") from None
    if "{{" not in text and "{%" not in text:
        raise RequestError(f"--chat-template {value}: the file holds no Jinja template: it has neither {{{{ nor {{%")
    return NamedTemplate(text)
