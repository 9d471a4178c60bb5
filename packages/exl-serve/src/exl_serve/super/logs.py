"""Log lines as JSON, one object a line. They hold no prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from exl_serve.config.model import Log

__all__ = ["printable", "set_up"]


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
