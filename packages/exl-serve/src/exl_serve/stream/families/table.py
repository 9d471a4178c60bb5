"""The output formats, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMATS", "Format", "Harmony", "Named", "Python", "Tags"]


@dataclass(frozen=True, slots=True)
class Named:
    """Calls of a name, a separator, and the arguments as JSON."""

    separator: str
    #: begin and end of each call, where a region holds several
    begin: str = ""
    end: str = ""
    #: before the name come this word and this marker
    word: str = ""
    word_end: str = ""
    #: between the JSON and `end`
    after: str = ""
    #: this marker and an id may follow the name
    ident: str = ""


@dataclass(frozen=True, slots=True)
class Tags:
    """Calls whose parameters are between tags. `lines`: a line break on each side of a value belongs to the format."""

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    end: str
    lines: bool = False


@dataclass(frozen=True, slots=True)
class Python:
    """Calls in Python's syntax."""


@dataclass(frozen=True, slots=True)
class Harmony:
    """Messages, each with a header that names its channel and, for a call, its recipient."""


@dataclass(frozen=True, slots=True)
class Format:
    """The markers of reasoning and tool calls in a family's output, and the syntax inside a call's region."""

    name: str
    think: tuple[str, str] | None = ("<think>", "</think>")
    call: tuple[str, str] | None = None
    #: a region holds an array of calls, else one object
    listed: bool = False
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    #: an answer that begins with this sign may be a call, without a marker
    leading: str = ""
    #: between the objects of a region that is no array
    separator: str = ""
    #: what a region holds; None: JSON
    inside: Named | Tags | Python | Harmony | None = None
    #: letters and digits of a call's id; None: "call_" and 24
    id_length: int | None = None
    #: texts of a chat template that identify the format; of a tuple, all must be present
    signs: tuple[str | tuple[str, ...], ...] = ()


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("harmony", think=None, inside=Harmony(), signs=("<|channel|>",)),
        Format(
            "qwen3_coder",
            call=("<tool_call>", "</tool_call>"),
            inside=Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", lines=True),
            signs=("<function=",),
        ),
        Format(
            "glm",
            call=("<tool_call>", "</tool_call>"),
            inside=Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ""),
            signs=("<arg_key>",),
        ),
        Format("hermes", call=("<tool_call>", "</tool_call>"), signs=("<tool_call>",)),
        Format(
            "llama3",
            think=None,
            call=("<|python_tag|>", "<|eom_id|>"),
            arguments=("parameters", "arguments"),
            leading="{",
            separator=";",
            signs=("<|python_tag|>", "Environment: ipython"),
        ),
        Format(
            "llama4",
            think=None,
            call=("<|python_start|>", "<|python_end|>"),
            listed=True,
            leading="[",
            inside=Python(),
            signs=("<|python_start|>",),
        ),
        Format("gemma3", think=None, call=("```tool_code", "```"), inside=Python(), signs=("tool_code",)),
        Format(
            "deepseek_v3",
            call=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inside=Named(
                "\n```json\n",
                begin="<｜tool▁call▁begin｜>",
                end="<｜tool▁call▁end｜>",
                word="function",
                word_end="<｜tool▁sep｜>",
                after="\n```",
            ),
            signs=(("<｜tool▁calls▁begin｜>", "```json"),),
        ),
        Format(
            "deepseek_v31",
            call=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inside=Named("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            signs=("<｜tool▁calls▁begin｜>",),
        ),
        Format(
            "mistral_args",
            think=("[THINK]", "[/THINK]"),
            call=("[TOOL_CALLS]", ""),
            inside=Named("[ARGS]", ident="[CALL_ID]"),
            id_length=9,
            signs=("[ARGS]",),
        ),
        Format(
            "mistral",
            think=("[THINK]", "[/THINK]"),
            call=("[TOOL_CALLS]", ""),
            listed=True,
            id_length=9,
            signs=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
        ),
        Format(
            "command",
            think=("<|START_THINKING|>", "<|END_THINKING|>"),
            call=("<|START_ACTION|>", "<|END_ACTION|>"),
            listed=True,
            names=("tool_name", "name"),
            arguments=("parameters", "arguments"),
            signs=("<|START_ACTION|>",),
        ),
        Format("phi4", call=("<|tool_call|>", "<|/tool_call|>"), listed=True, signs=("<|tool_call|>", "<|tool|>")),
        Format("granite", call=("<|tool_call|>", ""), listed=True, signs=("<|start_of_role|>",)),
        Format("generic", call=("<tool_calls>", "</tool_calls>"), listed=True, signs=("<tool_calls>",)),
        Format("none"),
    )
}
"""Formats by name. "none" reads only reasoning."""
