"""One machine reads all output formats: token by token, marker by marker, in time linear in the text.

A marker that is a special token is recognized by its id, so text cannot forge it. Other markers are found as text. The
end of the text that may begin a marker is held back, at most a marker's length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from exl_serve.engine.events import EngineEvent, Failed, Finished, Progress, Started, Tokens
from exl_serve.errors import ServeError
from exl_serve.request.internal import Constraint
from exl_serve.stream.calls import SPACE, CallReader, call_id
from exl_serve.stream.events import AnswerEvent, Begun, Error, Finish, ToolArgs, ToolBegin, ToolEnd
from exl_serve.stream.families.table import FORMATS, Format, Harmony, Named, Python, Tags
from exl_serve.stream.family import ChannelMachine, ChannelSettings, ToolSpec
from exl_serve.stream.grammars import answer_rules, call_grammar, forced_grammar
from exl_serve.stream.harmony import HarmonyMachine, harmony_answer, harmony_grammar
from exl_serve.stream.readers import NamedReader, PythonReader, TaggedReader
from exl_serve.stream.waiting_tokens import WaitingTokens

__all__ = ["OutputFamily", "detect_family"]

JOINABLE = ("json_schema", "json_object", "regex", "choice")
"""Kinds of formats that can be a part of a larger grammar."""


class OutputFamily:
    """One format for one tokenizer. `piece(id)` returns the bytes of a token; of a special one its spelling."""

    def __init__(self, form: Format, special: Mapping[str, int], piece: Callable[[int], bytes]) -> None:
        self.form = form
        self.name = form.name
        harmony = isinstance(form.inside, Harmony)
        self.has_reasoning = harmony or form.think is not None
        self.has_tools = harmony or form.call is not None
        #: ids of the special tokens, by spelling
        self.special = dict(special)
        self._piece = piece
        self._specials_by_id = {token: text for text, token in special.items()}

    @property
    def special_text(self) -> bool:
        """True: the text has the spellings of special tokens, which locate markers; the machine removes the others."""
        return True

    def machine(
        self, choice: int, settings: ChannelSettings, request_id: str = "", *, show_special: bool = False
    ) -> ChannelMachine:
        """Return the machine of one completion. `show_special`: special tokens that are not markers are part of the
        text.
        """
        if isinstance(self.form.inside, Harmony):
            return HarmonyMachine(choice, settings, request_id, self.special)
        return ChannelReader(self, choice, settings, request_id, show_special)

    def starts_in_reasoning(self, prompt_text: str) -> bool:
        """Whether the rendered prompt ends in an open region of reasoning."""
        if self.form.think is None:
            return False
        begin, end = self.form.think
        return prompt_text.rfind(begin) > prompt_text.rfind(end)

    def reasoning_over(self, prompt_text: str) -> bool:
        """Whether the rendered prompt ends with the end of reasoning."""
        return self.form.think is not None and prompt_text.rstrip().endswith(self.form.think[1])

    def forced_prefix(self, settings: ChannelSettings) -> str:
        """Return the text after the prompt of an answer that must be a call: the machine starts inside the region."""
        if not self.forces_call(settings) or self.form.call is None or self._thinking(settings) != "over":
            return ""
        return "" if self.form.leading else self.form.call[0]

    def _thinking(self, settings: ChannelSettings) -> Literal["over", "open", "possible"]:
        """Return whether an answer that must be a call begins with reasoning."""
        if self.form.think is None:
            return "over"
        if settings.starts_in_reasoning:
            return "open"
        # A vocabulary with the marker is that of a model which may open its reasoning itself.
        return "possible" if self.form.think[0] in self.special and not settings.reasoning_over else "over"

    def forces_call(self, settings: ChannelSettings) -> bool:
        """Whether the answer must be a call."""
        return bool(settings.tools) and settings.tool_choice not in ("none", "auto")

    def constraints(self, settings: ChannelSettings, response_format: Constraint | None) -> tuple[Constraint, ...]:
        """Return the constraints of tools and response format. Raises ServeError 400 or 501."""
        if settings.tools and settings.tool_choice != "none":
            own = response_format if response_format is not None and response_format.after is not None else None
            found = self._tool_constraints(settings, None if own is not None else response_format)
            parts = tuple(one.param for one in self._called(settings))
            found = tuple(msgspec.structs.replace(one, parts=parts) for one in found)
            return found if own is None or self.forces_call(settings) else (*found, own)
        if response_format is None:
            return ()
        if response_format.after is not None:  # it waits for its trigger, wherever that comes
            return (response_format,)
        if isinstance(self.form.inside, Harmony) and response_format.kind in JOINABLE:
            return (self._around(response_format, harmony_answer((), self.special)),)
        if settings.starts_in_reasoning and self.form.think is not None:
            return (self._awaited(response_format, self.form.think[1]),)
        return (response_format,)

    def budget(self, tokens: int, settings: ChannelSettings) -> tuple[Constraint, ...]:
        """Return the limit on the tokens of reasoning, if any may come. Raises ServeError 400 for a format without
        reasoning.
        """
        form = self.form
        if form.think is None or isinstance(form.inside, Harmony):
            raise ServeError.unsupported(
                "reasoning_budget", "reasoning_budget: this model's output format has no region of reasoning to close"
            )
        opens, closes = (self.special.get(one, one) for one in form.think)
        forced = self.forces_call(settings)
        if forced and self._thinking(settings) == "over":
            return ()
        # Inside of reasoning the marker of a call is text.
        free = forced or settings.starts_in_reasoning
        calls = None if form.call is None or free else self.special.get(form.call[0], form.call[0])
        options = {
            "limit": tokens,
            "opens": opens,
            "closes": closes,
            "calls": calls or None,
            "inside": settings.starts_in_reasoning,
        }
        return (Constraint(kind="budget", source="", param="reasoning_budget", options=options),)

    def _tool_constraints(
        self, settings: ChannelSettings, response_format: Constraint | None
    ) -> tuple[Constraint, ...]:
        form = self.form
        if not self.has_tools:
            raise ServeError(
                501,
                "not_implemented",
                "unsupported",
                "the output format of this model's tool calls is not known here: name it as `family` in the server's "
                "configuration, or send no tools",
                param="tools",
            )
        forced = self.forces_call(settings)
        tools = self._called(settings)
        if isinstance(form.inside, Harmony):
            if response_format is not None and not forced:
                return (self._around(response_format, harmony_answer(tools, self.special)),)
            return (harmony_grammar(tools, self.special, forced=forced, parallel=settings.parallel),)
        assert form.call is not None
        many = settings.parallel and settings.tool_choice in ("auto", "required")
        if response_format is not None and not forced:  # an answer that must be a call has no content
            pattern = response_format.kind == "regex"
            rules = answer_rules(form, tools, self.special, many=many, pattern=pattern)
            either = self._around(response_format, rules)
            return (self._awaited(either, form.think[1]) if settings.starts_in_reasoning and form.think else either,)
        if forced:
            grammar = forced_grammar(form, tools, self.special, many=many, thinking=self._thinking(settings))
            return (Constraint(kind="lark", source=grammar, param="tools"),)
        grammar = call_grammar(form, tools, self.special, many=many)
        then: Literal["rearm", "stop"] = "rearm" if settings.parallel else "stop"
        begin = form.call[0]
        after = self.special.get(begin, begin)
        found = Constraint(kind="lark", source=grammar, after=after, then=then, param="tools", leading=form.leading)
        return (msgspec.structs.replace(found, reasoning=self._reasoning(settings)),)

    def _reasoning(self, settings: ChannelSettings) -> tuple[int | None, int | str, bool] | None:
        """Return the markers of reasoning, where the marker of a call is text, and whether the answer begins in it."""
        if self.form.think is None or self._thinking(settings) == "over":
            return None
        begin, end = self.form.think
        return self.special.get(begin), self.special.get(end, end), settings.starts_in_reasoning

    def _called(self, settings: ChannelSettings) -> Sequence[ToolSpec]:
        """Return the tools that may be called. Raises ServeError 400."""
        if settings.tool_choice in ("auto", "required"):
            return settings.tools
        found = [tool for tool in settings.tools if tool.name == settings.tool_choice]
        if not found:
            raise ServeError.invalid(
                f"tool_choice names {settings.tool_choice!r}, which is not in tools", "tool_choice"
            )
        return found

    def _awaited(self, constraint: Constraint, marker: str) -> Constraint:
        return msgspec.structs.replace(constraint, after=self.special.get(marker, marker), awaited=True)

    def _around(self, content: Constraint, rules: str) -> Constraint:
        """Return the format of a content with the rules of the answer around it. Raises ServeError 400."""
        if content.kind not in JOINABLE:
            raise ServeError.unsupported(
                content.param,
                f"{content.param} is a grammar, which cannot be joined with tools that may be left alone: give a JSON "
                "schema, a pattern or a choice, ask for a call by tool_choice, or leave out one of both",
            )
        return msgspec.structs.replace(content, around=rules)


class ChannelReader:
    """A `ChannelMachine`."""

    def __init__(
        self, family: OutputFamily, choice: int, settings: ChannelSettings, request_id: str, show_special: bool
    ) -> None:
        self._family, self._choice, self._id = family, choice, request_id
        self._show_special = show_special
        self._shows_stop = settings.shows_stop
        form = self._form = family.form
        tools = bool(settings.tools) and settings.tool_choice != "none" and form.call is not None
        self._tools = tools
        self._specs = settings.tools
        self._think = form.think if settings.reasoning else None
        self._mode = "reasoning" if settings.starts_in_reasoning and self._think else "content"
        self._begun = False
        self._held = ""
        self._waiting = WaitingTokens()
        self._calls: CallReader | NamedReader | TaggedReader | PythonReader | None = None
        #: the marker of the region, where that is text: it stays text if no call follows
        self._opening = ""
        self._next_index = self._closed = 0
        #: an answer holds one call; further ones are left out
        self._single = not settings.parallel
        #: the answer must be a call, so that text of none is the beginning of one
        self._forced = tools and family.forces_call(settings)
        self._reasoning_tokens = 0
        self._at_start = True
        #: the content has begun and follows a format, so that it holds no call
        self._sealed, self._formatted = False, settings.formatted
        self._strip = settings.formatted or self._forced
        begin = "" if form.call is None else form.call[0]
        #: contents that begin as a call does, without line breaks before them: an answer begins without them (`_say`)
        contents = [text.lstrip("\n") for text in settings.contents]
        self._alike = [text for text in contents if begin and text.startswith(begin)]
        if self._forced and (form.leading or family.forced_prefix(settings)):
            self._open_region()

    def feed(self, event: EngineEvent) -> list[AnswerEvent]:
        """Return the answer's events that this engine event completes."""
        if isinstance(event, Tokens):
            return self._tokens(event)
        if isinstance(event, Finished):
            read = self._end_of_alike()
            ended = [] if self._calls is None or event.reason == "length" else self._of_call(self._calls.finish())
            left = self._release(keep=True)
            shows = self._mode == "reasoning" or (self._mode == "content" and not self._forced)
            if self._shows_stop and event.reason == "stop_string" and shows:
                left += self._say(str(event.stop))
            return [*read, *ended, *left, self._finish(event)]
        if isinstance(event, Failed):
            # Text that is held back may be the begin of a call: shown as text, it would be none of the whole answer.
            return [Error(self._choice, event.status, event.type, event.code, event.message, event.usage)]
        if isinstance(event, Started):
            self._begun = True
            return [Begun(self._choice, event.prompt_tokens, event.cached_tokens, event.prompt_logprobs)]
        assert isinstance(event, Progress)
        return []

    def _finish(self, event: Finished) -> AnswerEvent:
        reason: Literal["stop", "length", "tool_calls"]
        reason = "length" if event.reason == "length" else "tool_calls" if self._closed else "stop"
        stop = event.stop if event.reason == "stop_string" else None
        left = self._mode == "content"
        return Finish(
            self._choice,
            reason,
            stop,
            event.usage,
            self._reasoning_tokens,
            tuple(self._waiting.ids) if left else (),
            tuple(self._waiting.logprobs) if left else (),
            tuple(self._waiting.hidden if left else self._waiting.hidden + self._waiting.ids),
        )

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def _tokens(self, event: Tokens) -> list[AnswerEvent]:
        if self._mode == "reasoning":
            self._reasoning_tokens += len(event.ids)
        specials = self._family._specials_by_id
        if specials.keys().isdisjoint(event.ids):
            self._waiting.ids += event.ids
            self._waiting.logprobs += event.logprobs
            return self._text(event.text)
        events: list[AnswerEvent] = []
        rest = event.text
        for at, token in enumerate(event.ids):
            spelled = specials.get(token)
            if spelled is not None:
                # The text before it is the pieces of the earlier tokens.
                before, found, after = rest.partition(spelled)
                if found:
                    events += self._text(before)
                    rest = after
            self._waiting.ids.append(token)
            self._waiting.logprobs += event.logprobs[at : at + 1]
            if spelled is not None:
                events += self._marker(spelled)
        return [*events, *self._text(rest)]

    def _marker(self, spelled: str) -> list[AnswerEvent]:
        """Handle a special token: a marker of the format, or a token that is not shown."""
        form = self._form
        if self._think is not None and spelled == self._think[0] and self._mode == "content":
            return self._switch("reasoning")
        if self._think is not None and spelled == self._think[1] and self._mode == "reasoning":
            return self._switch("content")
        if self._tools and form.call is not None:
            if spelled == form.call[0] and self._mode == "content":
                events = self._release()
                self._open_region()
                return events
            if self._mode == "call" and self._calls is not None:
                inside = self._calls.marker(spelled)
                if inside is not None:
                    return [*self._of_call(inside), *self._left_if_over()]
            if spelled == form.call[1] and self._mode == "call":
                return self._close_region()
            if spelled == form.call[0] and self._mode == "call":
                # The next region, where the format gives no sign of an end.
                events = self._close_region()
                self._open_region()
                return events
        return self._say(spelled) if self._show_special and self._mode != "call" else []

    def _text(self, text: str) -> list[AnswerEvent]:
        """Read ordinary text, with markers that are not special tokens."""
        if not self._held and self._plain(text):
            return self._say(text)
        events: list[AnswerEvent] = []
        while text or self._held:
            if self._mode == "call":
                text, self._held = self._held + text, ""
                more, text = self._in_region(text)
                events += more
                if not text:
                    break
                continue
            text, self._held = self._held + text, ""
            marker, mode = self._next_marker(text)
            if marker is not None and mode == "call" and any(one.startswith(text.lstrip("\n")) for one in self._alike):
                self._held = text  # until it is known which one it is
                break
            if marker is not None:
                before, _, text = text.partition(marker)
                events += self._say(before)
                events += self._marker_as_text(marker, mode)
                continue
            if self._mode == "content" and self._tools and self._leads_to_call(text):
                if text.strip(SPACE):
                    events += self._release()
                    self._open_region()
                    continue
                self._held = text
                break
            keep = self._holds(text)
            events += self._say(text[: len(text) - keep])
            self._held = text[len(text) - keep :]
            break
        return events

    def _end_of_alike(self) -> list[AnswerEvent]:
        """Read text that was held back as it may have been a content that begins as a call does."""
        alike, self._alike = self._alike, []
        held = self._held.lstrip("\n")
        if not held or not any(one.startswith(held) for one in alike):
            return []
        return self._release(keep=True) if held in alike else self._text("")

    def _plain(self, text: str) -> bool:
        """Whether no marker may begin in the text: a quick test, as most texts have none."""
        if self._mode == "content":
            call = self._form.call
            return not self._at_start and (not self._tools or call is None or call[0][:1] not in text)
        return self._mode == "reasoning" and self._think is not None and self._think[1][:1] not in text

    def _leads_to_call(self, text: str) -> bool:
        """Whether the answer begins with the sign of a call without marker, or may still."""
        leading = self._form.leading
        return (
            bool(leading)
            and not self._formatted
            and self._at_start
            and (not text.strip(SPACE) or text.lstrip(SPACE)[0] == leading)
        )

    def _watched(self) -> list[tuple[str, str]]:
        """Return the markers that text may hold now, each with the mode that it begins."""
        special = self._family.special
        found: list[tuple[str, str]] = []
        if self._think is not None:
            if self._mode == "reasoning":
                found.append((self._think[1], "content"))
            elif self._at_start:
                found.append((self._think[0], "reasoning"))
        if self._tools and self._mode == "content" and self._form.call is not None and not self._sealed:
            found.append((self._form.call[0], "call"))
        return [(marker, mode) for marker, mode in found if marker and marker not in special]

    def _next_marker(self, text: str) -> tuple[str | None, str]:
        best: tuple[int, str, str] | None = None
        for marker, mode in self._watched():
            at = text.find(marker)
            # Nothing but space is before reasoning, and only line breaks before calls that a grammar tells from a
            # content.
            leads = mode == "reasoning" or (mode == "call" and self._formatted)
            before = text[:at].strip(None if mode == "reasoning" else "\n")
            if at >= 0 and not (leads and before) and (best is None or at < best[0]):
                best = (at, marker, mode)
        return (None, "") if best is None else best[1:]

    def _marker_as_text(self, marker: str, mode: str) -> list[AnswerEvent]:
        if mode == "call":
            events = self._release()
            self._open_region()
            self._opening = marker
            return events
        return self._switch(mode)

    def _holds(self, text: str) -> int:
        """Return the number of characters at the end that may begin a marker."""
        most = 0
        for marker, _ in self._watched():
            for size in range(min(len(marker) - 1, len(text)), most, -1):
                if text.endswith(marker[:size]):
                    most = size
                    break
        return most

    def _switch(self, mode: str) -> list[AnswerEvent]:
        events = self._release()
        self._mode = mode
        self._strip = True
        return events

    def _say(self, text: str) -> list[AnswerEvent]:
        if self._strip:
            # Line breaks after a marker belong to the format.
            text = text.lstrip("\n")
            self._strip = not text
        if not text:
            return []
        self._sealed = self._formatted and self._mode == "content"
        if text.strip(SPACE):
            self._at_start = False
        return [self._waiting.event(self._choice, text, reasoning=self._mode == "reasoning")]

    def _of_call(self, events: list[AnswerEvent]) -> list[AnswerEvent]:
        """Return a reader's events, with the tokens so far."""
        if self._single:
            events = [one for one in events if isinstance(one, ToolBegin | ToolArgs | ToolEnd) and not one.index]
        self._closed += sum(isinstance(one, ToolEnd) for one in events)
        return self._waiting.give(events)

    def _release(self, *, keep: bool = False) -> list[AnswerEvent]:
        """Release the held-back text as text. Tokens without text are hidden, unless `keep`."""
        text, self._held = self._held, ""
        if self._forced and self._mode != "reasoning":
            self._waiting.hide()
            return []
        events = self._say(text) if self._mode != "call" else []
        if self._mode == "call" and self._calls is not None and not self._told() and not self._calls.ended:
            # No call was found, and no empty list of calls: the text stays text.
            self._mode = "content"
            events = self._say(self._opening + self._calls.unread + text)
        if not keep:
            self._waiting.hide()
        return events

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _open_region(self) -> None:
        self._mode, self._at_start, self._opening = "call", False, ""
        form = self._form
        special = self._family.special
        if isinstance(form.inside, Tags | Named | Python):
            kinds: Mapping[type, type[TaggedReader | NamedReader | PythonReader]]
            kinds = {Tags: TaggedReader, Named: NamedReader, Python: PythonReader}
            kind = kinds[type(form.inside)]
            self._calls = kind(self._choice, self._next_index, self._call_id, self._specs, form, special)
        else:
            self._calls = CallReader(
                self._choice,
                self._next_index,
                self._call_id,
                {tool.name for tool in self._specs},
                listed=form.listed,
                names=form.names,
                arguments=form.arguments,
            )

    def _told(self) -> bool:
        assert self._calls is not None
        return self._calls.index > self._next_index or self._calls.open

    def _in_region(self, text: str) -> tuple[list[AnswerEvent], str]:
        assert self._calls is not None
        reader = self._calls
        if reader.took_closing:
            self._leave_region()
            return [], text
        complete = reader.ended
        if complete:
            return self._after_region(text)
        events, rest = reader.feed(text)
        events = self._of_call(events)
        if reader.broken:
            # A call that was reported stays open; text that is part of no call is text.
            unread = "" if reader.open else reader.unread
            if not self._told():
                unread = self._opening + unread
            self._leave_region()
            if self._forced:  # only a cut breaks it, and what is cut short is not shown: `_release`
                self._waiting.hide()
                return events, ""
            return events + self._say(unread), rest
        if reader.ended:
            return events, rest
        return events, ""

    def _after_region(self, text: str) -> tuple[list[AnswerEvent], str]:
        """Read the text between the end of the JSON and the closing marker, which must be space."""
        closing = self._form.call[1] if self._form.call is not None else ""
        stripped = text.lstrip()
        if closing and closing not in self._family.special:
            if stripped.startswith(closing):
                self._leave_region()
                return [], stripped[len(closing) :]
            if closing.startswith(stripped):
                self._held = text
                return [], ""
        elif not stripped:
            return [], ""
        if self._form.separator and stripped.startswith(self._form.separator):
            self._leave_region()
            self._open_region()
            return [], stripped[len(self._form.separator) :]
        self._leave_region()
        return [], stripped

    def _left_if_over(self) -> list[AnswerEvent]:
        """Leave the region if it has ended, after a special token of the call's syntax."""
        assert self._calls is not None
        if self._calls.took_closing:
            self._leave_region()
        elif self._calls.broken:
            return self._close_region()
        return []

    def _close_region(self) -> list[AnswerEvent]:
        events = self._release()
        self._leave_region()
        return events

    def _leave_region(self) -> None:
        if self._calls is not None:
            self._next_index = self._calls.index + (1 if self._calls.open else 0)
        self._calls, self._mode, self._strip = None, "content", True

    def _call_id(self, index: int) -> str:
        return call_id(self._id, self._choice, index, self._form.id_length)


def detect_family(
    configured: str, template: str | None, special: Mapping[str, int], piece: Callable[[int], bytes]
) -> OutputFamily:
    """Return the configured format, else the one whose signs the chat template has.

    Raises ServeError 400 for an unknown name.
    """
    if configured != "auto":
        if configured not in FORMATS:
            raise ServeError.invalid(f"family is {configured!r}; known are auto, {', '.join(FORMATS)}", "family")
        return OutputFamily(FORMATS[configured], special, piece)
    for form in FORMATS.values():
        if template is not None and any(_has(template, sign) for sign in form.signs):
            return OutputFamily(form, special, piece)
    return OutputFamily(FORMATS["none"], special, piece)


def _has(template: str, sign: str | tuple[str, ...]) -> bool:
    return all(one in template for one in ((sign,) if isinstance(sign, str) else sign))
