"""Answers of /v1/responses: the events of a stream, and the whole response, from the same events as chat's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exl_serve.api.state import TextCodec
from exl_serve.engine.events import TokenLogprob
from exl_serve.request.carried import carried
from exl_serve.stream.chunks import Answer, Choice, sse
from exl_serve.stream.events import AnswerEvent, Content, Finish, Reasoning, ToolArgs, ToolBegin

__all__ = ["Responses", "usage_of"]

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return chat's usage in the shape of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,  # OpenAI's type requires it, for a paid cache
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


class Responses(Answer):
    """One response: items in sequence, each opened, filled and closed before the next.

    `head` is the part of the response object that is known before the first token, including `id` and `model`;
    `namespaces` has (namespace, name) by the full name of a function; with `carried`, items of reasoning have an
    `encrypted_content`.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        text: TextCodec,
        *,
        logprobs: bool = False,
        namespaces: Mapping[str, tuple[str, str]] | None = None,
        carried: bool = False,
    ) -> None:
        super().__init__(head, 1, text, logprobs=logprobs)
        self._namespaces, self._carried = namespaces or {}, carried
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def line(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as one event of a stream."""
        return f"event: {chunk['type']}\n".encode() + sse(chunk)

    def whole(self) -> dict[str, Any]:
        """Return the response. Raises ServeError where it has failed."""
        if self.error is not None:
            raise self.error
        return self._response()

    def content(self) -> list[dict[str, Any]]:
        """Return the items so far, for the content log."""
        return self._output

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the events of a failed response; none for others."""
        if self.error is None:
            return []
        choice = self.choices[0]
        begin = [] if choice.begun else self._first(0)
        closed = self._close("incomplete")
        return [*begin, *closed, self._event("response.failed", response=self._response())]

    # ---- the object ------------------------------------------------------------------------------------------------

    def _response(self) -> dict[str, Any]:
        status, finish = "in_progress", self.choices[0].finish
        if self.error is not None:
            status = "failed"
        elif finish is not None:
            status = "incomplete" if finish == "length" else "completed"
        error = None
        if self.error is not None:  # OpenAI's codes are a closed list
            code = "rate_limit_exceeded" if self.error.status == 429 else "server_error"
            error = {"code": code, "message": f"{self.error.code}: {self.error.message}"}
        return self.head | {
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [dict(item) for item in self._output],
            # That of a failed one is not known: the engine counts what it has generated when it ends by itself.
            "usage": None if status in ("in_progress", "failed") else usage_of(self.usage()),
        }

    # ---- events ----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _first(self, index: int) -> list[dict[str, Any]]:
        return [self._event(f"response.{kind}", response=self._response()) for kind in ("created", "in_progress")]

    def _piece(self, event: AnswerEvent, choice: Choice) -> list[dict[str, Any]]:
        if isinstance(event, Content):
            return self._text_piece(event)
        if isinstance(event, Reasoning):
            more = {"encrypted_content": None} if self._carried else {}
            found = [] if self._is_open("reasoning") else self._begin("reasoning", summary=[], content=[], **more)
            item = self._opened
            if not item["content"]:
                item["content"] = [{"type": "reasoning_text", "text": ""}]
            item["content"][0]["text"] += event.text
            return [*found, self._of_item("response.reasoning_text.delta", content_index=0, delta=event.text)]
        if isinstance(event, ToolBegin):
            namespace, name = self._namespaces.get(event.name, (None, event.name))
            named = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
            return self._begin("function_call", call_id=event.id, **named, arguments="")
        if isinstance(event, ToolArgs):
            self._opened["arguments"] += event.text
            return [self._of_item("response.function_call_arguments.delta", delta=event.text)]
        if isinstance(event, Finish):
            left = event.logprobs if self._logprobs and self._is_open("message") else ()
            if left:
                self._opened["content"][0]["logprobs"] += [self._logprob(one) for one in left]
            cut = event.reason == "length"
            closed = self._close("incomplete" if cut else "completed")
            self._end(event, choice)
            kind = "response.incomplete" if cut else "response.completed"
            return [*closed, self._event(kind, response=self._response())]
        return []

    def _text_piece(self, event: Content) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if not self._is_open("message"):
            found = self._begin("message", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            found.append(self._of_item("response.content_part.added", content_index=0, part=dict(part, logprobs=[])))
            self._opened["content"] = [part]
        part = self._opened["content"][0]
        logprobs = [self._logprob(one) for one in event.logprobs] if self._logprobs else []
        part["text"] += event.text
        part["logprobs"] += logprobs
        short = [_without_bytes(one) for one in logprobs]
        delta = self._of_item("response.output_text.delta", content_index=0, delta=event.text, logprobs=short)
        return [*found, delta]

    def _begin(self, kind: str, **values: Any) -> list[dict[str, Any]]:
        """Open a new item; the item before is closed."""
        closed = self._close("completed")
        number = len(self._output)
        own = f"{_PREFIXES[kind]}{str(self.head['id']).removeprefix('resp_')}{number}"
        self._open = {"type": kind, "id": own, "status": "in_progress", **values}
        self._output.append(self._open)
        added = self._event("response.output_item.added", output_index=number, item=dict(self._open))
        return [*closed, added]

    def _close(self, status: str) -> list[dict[str, Any]]:
        item, self_index = self._open, len(self._output) - 1
        if item is None:
            return []
        found: list[dict[str, Any]] = []
        if item["type"] == "message":
            part = dict(item["content"][0])
            short = [_without_bytes(one) for one in part["logprobs"]]
            text = part["text"]
            found.append(self._of_item("response.output_text.done", content_index=0, text=text, logprobs=short))
            found.append(self._of_item("response.content_part.done", content_index=0, part=part))
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            found.append(self._of_item("response.reasoning_text.done", content_index=0, text=text))
            if self._carried:
                item["encrypted_content"] = carried(text)
        else:
            values = {"name": item["name"], "arguments": item["arguments"]}
            found.append(self._of_item("response.function_call_arguments.done", **values))
        item["status"] = status
        found.append(self._event("response.output_item.done", output_index=self_index, item=dict(item)))
        self._open = None
        return found

    def _of_item(self, kind: str, **values: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._opened["id"], output_index=len(self._output) - 1, **values)

    @property
    def _opened(self) -> dict[str, Any]:
        assert self._open is not None, "a machine opens what it fills"
        return self._open

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _logprob(self, one: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(i, p) for i, p in one.top]
        return self._entry(one.id, one.logprob or 0.0) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._text.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def _without_bytes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry in the form of deltas."""
    top = [{"token": one["token"], "logprob": one["logprob"]} for one in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
