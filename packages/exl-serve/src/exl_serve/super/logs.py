"""Log lines as JSON, one object a line. They hold no prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from exl_serve.config.model import Log

__all__ = ["printable", "request_logger", "set_up"]


def printable(text: str) -> str:
    """Return a text on one line, whatever a client has put into it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    """One line for each record, except tracebacks: text of a client cannot begin another line."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = printable(record.getMessage())
        text = self.formatMessage(record)
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def set_up(config: Log, text: str) -> None:
    """Set up the log of this process, on standard error; `text` is the format where it is not JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if config.format == "json" else _Text(text))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())


def request_logger(config: Log) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that logs one line for each finished or rejected request, on standard error: JSON, or text on
    a terminal.
    """
    as_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    if config.level in ("warning", "error"):
        return lambda fields: None

    def write(fields: Mapping[str, Any]) -> None:
        if as_json:
            line = json.dumps({"time": round(time.time(), 3), **fields})
        else:
            line = f"{time.strftime('%H:%M:%S')} {printable(_text(fields))}"
        # One call, so that no line of another process comes in between.
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return write


def _text(fields: Mapping[str, Any]) -> str:
    """Return what a terminal shows of a request."""
    if fields["finish"] == "rejected":
        about = "" if fields["param"] is None else f" ({fields['param']})"
        return f"{fields['status']} {fields['route']}: {fields['code']}{about}"
    code = "" if fields["code"] is None else f" {fields['code']}"
    return (
        f"{fields['status']} {fields['model']} {fields['finish']}{code}: {fields['prompt_tokens']} "
        f"({fields['cached_tokens']} cached) + {fields['completion_tokens']} tokens in {fields['seconds']:.2f} s"
    )
