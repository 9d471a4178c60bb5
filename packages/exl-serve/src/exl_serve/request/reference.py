"""Generate docs/serving/fields.md from the table of fields: `python -m exl_serve.request.reference > FILE`."""

from __future__ import annotations

from collections.abc import Iterable

from exl_serve.request.fields import COMMON, CONVERSATION, SAMPLING, UNSUPPORTED, Field

__all__ = ["render"]

_HEAD = ("| field | also called | values | meaning |", "|---|---|---|---|")


def render() -> str:
    """Return the page."""
    from exl_serve.api.chat import CHAT
    from exl_serve.api.completions import COMPLETION
    from exl_serve.request.responses import NEUTRAL, RESPONSE

    return "\n".join(
        [
            "# Fields of requests",
            "",
            "The server reads a field, or rejects it with an error that names it. A field that is not listed here is "
            "named in the answer's header",
            "`x-exl-ignored`, or rejected where the configuration says `strict_fields = true`; so is a member of "
            "`tools`, `response_format` and other objects that",
            "nothing reads. With `strict_fields`, variables that the chat template does not have, and results of calls "
            "that no message has, are rejected as well.",
            "null counts as absent.",
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
            "## Chat and responses",
            "",
            *_rows(CONVERSATION),
            "",
            "## Chat alone",
            "",
            *_HEAD,
            "| `messages` | | roles system, developer, user, assistant, tool | the conversation; content is a text, "
            "or a list of parts: text, `image_url`; developer is system where the template does not know it |",
            *_rows(CHAT, head=False),
            "| `functions`, `function_call` | | | OpenAI's older form of `tools` and `tool_choice`; the answer has at "
            "most one call, as `function_call` |",
            "",
            "## Responses alone",
            "",
            "Nothing is kept (`store` is false), so every request brings its whole conversation. `n`, "
            "`response_format` and `return_token_ids`",
            "are not read.",
            "",
            *_HEAD,
            "| `input` | | a text, or items: message, function_call, function_call_output, reasoning | "
            "the conversation |",
            *_rows(RESPONSE, head=False),
            "",
            "Tools are functions, alone or in a `namespace`: the model sees `NAMESPACE__NAME`, and a call has both "
            "names. `web_search` and",
            "`image_generation` next to functions are left out of the prompt and named in `x-exl-ignored`, as "
            "`tools[1]`.",
            "",
            "Refused unless neutral: " + ", ".join(f"`{name}`" for name in NEUTRAL) + ".",
            "",
            "## Text completions alone",
            "",
            *_HEAD,
            "| `prompt` | | a text, a list of texts, token ids, or a list of lists of token ids | each gets its own "
            "`n` completions |",
            *_rows(COMPLETION, head=False),
            "",
            "## Not offered",
            "",
            "Where a table above does not have the field, values that change nothing are taken, any other is refused "
            "as `unsupported_parameter`.",
            "",
            "| field | taken |",
            "|---|---|",
            *(f"| `{name}` | {', '.join(_json(value) for value in values)} |" for name, values in UNSUPPORTED.items()),
            "",
        ]
    )


def _rows(fields: Iterable[Field], *, head: bool = True) -> list[str]:
    rows = list(_HEAD) if head else []
    for field in fields:
        others = ", ".join(f"`{alias}`" for alias in field.aliases)
        rows.append(f"| `{field.name}` | {others} | {field.limits} | {field.meaning} |")
    return rows


def _json(value: object) -> str:
    import json

    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(render(), end="")
