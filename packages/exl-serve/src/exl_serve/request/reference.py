"""Generate docs/serving/fields.md from the table of fields: `python -m exl_serve.request.reference > FILE`."""

from __future__ import annotations

from collections.abc import Iterable

from exl_serve.request.fields import COMMON, SAMPLING, UNSUPPORTED, Field

__all__ = ["render"]


def render() -> str:
    """Return the page."""
    from exl_serve.api.chat import CHAT
    from exl_serve.api.completions import COMPLETION
    from exl_serve.request.responses import NEUTRAL, RESPONSE

    return "\n".join(
        [
            "# Fields of requests",
            "",
            "Every field is read, or refused by its name; one that is not listed here is named in the answer's header "
            "`x-exl-ignored`, or refused",
            "where the configuration says `strict_fields = true`. null is as good as absent.",
            "",
            "## Chat and text completions",
            "",
            *_rows(COMMON),
            "",
            "## Sampling",
            "",
            "Absent fields: as generation_config.json and the server's configuration say, else what changes nothing.",
            "",
            *_rows(SAMPLING),
            "",
            "## Chat alone",
            "",
            "| field | also called | values |",
            "|---|---|---|",
            "| `messages` | | roles system, developer, user, assistant, tool; content: a text, or parts of text |",
            *_rows(CHAT, head=False),
            "| `functions`, `function_call` | | OpenAI's older form of `tools` and `tool_choice` |",
            "",
            "## Responses alone",
            "",
            "Nothing is kept (`store` is false), so every request brings its whole conversation. `n`, "
            "`response_format` and `return_token_ids`",
            "are not read.",
            "",
            "| field | also called | values |",
            "|---|---|---|",
            "| `input` | | a text, or items: message, function_call, function_call_output, reasoning |",
            *_rows(RESPONSE, head=False),
            "",
            "Refused unless neutral: " + ", ".join(f"`{name}`" for name in NEUTRAL) + ".",
            "",
            "## Text completions alone",
            "",
            "| field | also called | values |",
            "|---|---|---|",
            "| `prompt` | | a text, a list of texts, token ids, or a list of lists of token ids |",
            *_rows(COMPLETION, head=False),
            "",
            "## Not offered",
            "",
            "The values that change nothing are taken, any other is refused as `unsupported_parameter`.",
            "",
            "| field | taken |",
            "|---|---|",
            *(f"| `{name}` | {', '.join(_json(value) for value in values)} |" for name, values in UNSUPPORTED.items()),
            "",
        ]
    )


def _rows(fields: Iterable[Field], *, head: bool = True) -> list[str]:
    rows = ["| field | also called | values |", "|---|---|---|"] if head else []
    for field in fields:
        others = ", ".join(f"`{alias}`" for alias in field.aliases)
        rows.append(f"| `{field.name}` | {others} | {field.limits} |")
    return rows


def _json(value: object) -> str:
    import json

    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(render(), end="")
