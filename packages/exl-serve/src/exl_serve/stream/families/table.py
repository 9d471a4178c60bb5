"""The output formats, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True, slots=True)
class Format:
    """Where reasoning and tool calls begin and end in a family's output, and what is inside of a call's region."""

    name: str
    think: tuple[str, str] | None = ("<think>", "</think>")
    call: tuple[str, str] | None = None
    #: inside of a region is an array of calls, else an object for one
    listed: bool = False
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    #: an answer that begins with such JSON is a call, without a marker
    leading_json: bool = False
    #: letters and digits of a call's id; None: "call_" and 24
    id_length: int | None = None
    #: texts of a chat template that tell the format
    signs: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        Format("hermes", call=("<tool_call>", "</tool_call>"), signs=("<tool_call>",)),
        Format(
            "llama3",
            think=None,
            call=("<|python_tag|>", "<|eom_id|>"),
            arguments=("parameters", "arguments"),
            leading_json=True,
            signs=("<|python_tag|>", "Environment: ipython"),
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
        Format("none"),
    )
}
"""By name. "none" reads reasoning alone."""
