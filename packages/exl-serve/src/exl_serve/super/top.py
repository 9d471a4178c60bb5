"""`exl serve top`: the load of a running server as a table."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from exl_serve.config.load import ConfigError

__all__ = ["fetch", "table"]

COLUMNS = {
    "state": "state",
    "running": "running",
    "waiting": "waiting",
    "queued_prompt_tokens": "queued tokens",
    "pages_pinned": "pinned",
    "pages_cached": "cached",
    "pages_free": "free",
    "prefill_tokens_per_second": "prefill/s",
    "decode_tokens_per_second": "decode/s",
}


def fetch(url: str, key: str | None) -> dict[str, Any]:
    """Return the answer of /load. Raises ConfigError where there is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is not an address: give http://HOST:PORT")
    request = urllib.request.Request(url.rstrip("/") + "/load")
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answers {error.code}; /load needs a key of the scope metrics") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} does not answer: {error}") from None
    return found


def table(load: Mapping[str, Any]) -> str:
    """Return one line for each model."""
    rows = [["model", *COLUMNS.values()]]
    for id, entry in load.get("models", {}).items():
        rows.append([id, *(str(entry.get(name, "-")) for name in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i > 1 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
