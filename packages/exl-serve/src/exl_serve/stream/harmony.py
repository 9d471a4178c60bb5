"""The harmony format (gpt-oss): messages with a header that names a channel and, for a call, the function.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>

The prompt ends in `<|start|>assistant`, so an answer begins inside a header.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from exl_serve.engine.events import EngineEvent, Failed, Finished, Started, Tokens
from exl_serve.request.internal import Constraint
from exl_serve.stream.calls import SPACE, Value, call_id, is_json
from exl_serve.stream.events import AnswerEvent, Begun, Error, Finish, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.family import ChannelSettings, ToolSpec
from exl_serve.stream.grammars import json_rule, marker_rule, text_until
from exl_serve.stream.waiting_tokens import WaitingTokens

__all__ = ["HarmonyMachine", "harmony_answer", "harmony_grammar"]

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_HEADER_LIMIT = 4096


def harmony_grammar(
    tools: Sequence[ToolSpec], special: Mapping[str, int], *, forced: bool, parallel: bool
) -> Constraint:
    """Return the constraint of a call from the function's name on, where the schema of its arguments is known; of an
    answer that must be a call, from its beginning on.
    """
    if forced:
        rules = harmony_answer(tools, special, forced=True)
        return Constraint(kind="lark", source=f"start: answer\n{rules}", param="tools")
    source = "\n".join([f"start: {_any(tools)}", *_calls(tools, special)])
    then: Literal["rearm", "stop"] = "rearm" if parallel else "stop"
    return Constraint(kind="lark", source=source, after="to=functions.", then=then, param="tools")


def harmony_answer(tools: Sequence[ToolSpec], special: Mapping[str, int], *, forced: bool = False) -> str:
    """Return the rules of an answer: any reasoning, then `content`, a rule defined elsewhere, or a call of a tool.

    `forced`: a call it must be.
    """
    channel, message, start = (marker_rule(f"<|{one}|>", special) for one in ("channel", "message", "start"))
    last = "called" if forced else "final | called" if tools else "final"
    lines = [
        f"answer: (thought {start} {json.dumps('assistant')})* ({last})",
        f'thought: {channel} "analysis" {message} thinking',
        *text_until("thinking", "<|end|>", special),
        *([] if forced else [f'final: {channel} "final" tail content']),
        *_calls(tools, special),
    ]
    if tools:
        lines.append(f'called: {channel} "commentary to=functions." ({_any(tools)})')
    return "\n".join(lines)


def _any(tools: Sequence[ToolSpec]) -> str:
    return " | ".join(f"call_{i}" for i in range(len(tools)))


def _calls(tools: Sequence[ToolSpec], special: Mapping[str, int]) -> list[str]:
    """Return the rules call_0, call_1, ... of each tool's name, the rest of the header, and the arguments."""
    lines = [f"call_{i}: {json.dumps(tool.name)} tail json_{i}" for i, tool in enumerate(tools)]
    lines += [
        f"json_{i}: {json_rule(tool.parameters or {'type': 'object'}, tool.parameters, strict=tool.strict)}"
        for i, tool in enumerate(tools)
    ]
    tail = f'" "? ({marker_rule("<|constrain|>", special)} "json")? {marker_rule("<|message|>", special)}'
    return [f"tail: {tail}", *lines]


class HarmonyMachine:
    """A `ChannelMachine`."""

    def __init__(self, choice: int, settings: ChannelSettings, request_id: str, special: Mapping[str, int]) -> None:
        self._choice, self._id = choice, request_id
        self._tools = {tool.name for tool in settings.tools} if settings.tool_choice != "none" else set()
        self._reasoning = settings.reasoning
        #: an answer holds one call; further ones are left out
        self._single = not settings.parallel
        self._forced = bool(settings.tools) and settings.tool_choice not in ("none", "auto")
        self._shows_stop = settings.shows_stop
        self._special = special
        self._by_id = {special[one]: one for one in MARKERS if one in special}
        self._as_text = tuple(one for one in MARKERS if one not in special)
        self._mode = "header"
        self._header = ""
        self._held = ""
        self._waiting = WaitingTokens()
        self._index = self._closed = self._reasoning_tokens = 0
        self._scan = Value()

    def feed(self, event: EngineEvent) -> list[AnswerEvent]:
        """Return the answer's events that this engine event completes."""
        if isinstance(event, Tokens):
            return self._tokens(event)
        if isinstance(event, Started):
            return [Begun(self._choice, event.prompt_tokens, event.cached_tokens, event.prompt_logprobs)]
        if isinstance(event, Finished):
            reason: Literal["stop", "length", "tool_calls"]
            reason = "length" if event.reason == "length" else "tool_calls" if self._closed else "stop"
            stop = event.stop if event.reason == "stop_string" else None
            last = self._last()
            if self._shows_stop and event.reason == "stop_string" and self._mode in ("content", "reasoning"):
                last += self._say(str(event.stop))
            left = self._mode == "content"
            if not left:
                self._waiting.hide()
            ids, logprobs, hidden = tuple(self._waiting.ids), tuple(self._waiting.logprobs), tuple(self._waiting.hidden)
            return [
                *last,
                Finish(self._choice, reason, stop, event.usage, self._reasoning_tokens, ids, logprobs, hidden),
            ]
        if isinstance(event, Failed):  # text that is held back may be the begin of a marker
            return [Error(self._choice, event.status, event.type, event.code, event.message, event.usage)]
        return []

    def _last(self) -> list[AnswerEvent]:
        held, self._held = self._held, ""
        events = self._say(held)
        untold = not self._forced and not self._header.startswith("<|") and "<|" not in self._header
        if self._mode == "header" and untold:
            # There was no header: the model was not trained on the format.
            self._mode = "content"
            events += self._say(self._header)
        return events

    def _tokens(self, event: Tokens) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        rest = event.text
        for at, token in enumerate(event.ids):
            if self._mode == "reasoning" and token not in self._by_id:
                self._reasoning_tokens += 1
            spelled = self._by_id.get(token)
            if spelled is None:
                self._waiting.ids.append(token)
                self._waiting.logprobs += event.logprobs[at : at + 1]
                continue
            before, found, after = rest.partition(spelled)
            if found:
                events += self._text(before)
                rest = after
            events += self._marker(spelled)
            self._waiting.hidden.append(token)
        return [*events, *self._text(rest)]

    def _text(self, text: str) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        text, self._held = self._held + text, ""
        while text:
            found = [(text.find(one), one) for one in self._as_text]
            found = [(at, one) for at, one in found if at >= 0]
            if not found:
                keep = max((n for one in self._as_text for n in _ends_like(text, one)), default=0)
                self._held = text[len(text) - keep :] if keep else ""
                return events + self._say(text[: len(text) - keep])
            at, one = min(found)
            events += self._say(text[:at])
            text = text[at + len(one) :]
            events += self._marker(one)
        return events

    def _marker(self, spelled: str) -> list[AnswerEvent]:
        held, self._held = self._held, ""
        events = self._say(held)
        if spelled == "<|message|>" and self._mode == "header":
            return events + self._begin()
        if spelled in ("<|channel|>", "<|constrain|>") and self._mode == "header":
            self._header += spelled
        elif spelled != "<|message|>":
            self._mode, self._header = "header", ("" if spelled == "<|start|>" else "<|end|>")
            if spelled == "<|channel|>":
                self._header = spelled
        self._waiting.hide()
        return events

    def _begin(self) -> list[AnswerEvent]:
        """Begin a message: its header is complete."""
        header, self._header = self._header, ""
        self._waiting.hide()
        call = _RECIPIENT.search(header)
        if call is not None and call.group(1) in self._tools and self._single and self._index:
            self._mode = "over"
            return []
        if call is not None and call.group(1) in self._tools:
            self._mode, self._scan = "call", Value()
            begun = ToolBegin(self._choice, self._index, call_id(self._id, self._choice, self._index), call.group(1))
            return self._of_call([begun])
        channel = header.partition("<|channel|>")[2].split()
        self._mode = "reasoning" if channel[:1] == ["analysis"] and self._reasoning else "content"
        return []

    def _say(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        if self._mode == "header":
            if len(self._header) < _HEADER_LIMIT:
                self._header += text
                return []
            self._mode, text, self._header = "content", self._header + text, ""
        if self._mode == "call":
            return self._of_call(self._arguments(text))
        if self._mode not in ("reasoning", "content"):
            self._waiting.hide()
            return []
        return [self._waiting.event(self._choice, text, reasoning=self._mode == "reasoning")]

    def _of_call(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Return the events of a call, with the tokens so far."""
        return self._waiting.give(events)

    def _arguments(self, text: str) -> list[AnswerEvent]:
        said: list[str] = []
        done = False
        for c in text:
            if self._scan.empty and c in SPACE:
                continue
            if self._scan.empty and c != "{":
                self._mode = "broken"
                break
            said.append(json.dumps(c)[1:-1] if c < " " and self._scan.inside else c)
            if self._scan.feed(c):
                done = True
                break
        events: list[AnswerEvent] = [ToolArgs(self._choice, self._index, "".join(said))] if said else []
        if done:
            self._mode = "over"
            events += self._end()
        return events

    def _end(self) -> list[AnswerEvent]:
        number = self._index
        self._index += 1
        if not is_json(self._scan.text):
            return []
        self._closed += 1
        return [ToolEnd(self._choice, number)]


def _ends_like(text: str, marker: str) -> list[int]:
    return [n for n in range(1, min(len(marker) - 1, len(text)) + 1) if text.endswith(marker[:n])]
