"""Environment variables that decide how passes run. Each is read when its question is asked, not when a process starts.

docs/reference/environment.md lists their values.
"""

from __future__ import annotations

import os

from exl_kernels.selection import PACKED_ROWS

from ..errors import InputError

__all__ = [
    "GRAPHS_VARIABLE",
    "JOINED_ADAPTERS_VARIABLE",
    "JOINED_ROWS_VARIABLE",
    "PROMPTS_VARIABLE",
    "captures_steps",
    "eager_prompts",
    "joined_rows",
    "refusal_of_joined_adapters",
    "refusal_of_joined_rows",
]

GRAPHS_VARIABLE = "EXL_CUDA_GRAPHS"
PROMPTS_VARIABLE = "EXL_CUDA_PROMPT_GRAPHS"
JOINED_ROWS_VARIABLE = "EXL_DECODE_JOINED_ROWS"
JOINED_ADAPTERS_VARIABLE = "EXL_DECODE_JOINED_ADAPTERS"
EAGER_PROMPTS = 4
"""Default of PROMPTS_VARIABLE: a capture takes about as long as so many passes gain by it."""


def captures_steps() -> bool:
    """Return whether decode steps may be captured: EXL_CUDA_GRAPHS is not 0."""
    return _text(GRAPHS_VARIABLE) != "0"


def eager_prompts() -> int:
    """Return how many passes of short prompts of one size run eagerly before it is captured; 0: it never is.

    EXL_CUDA_PROMPT_GRAPHS, by default EAGER_PROMPTS.

    Raises:
        InputError: the variable is no number.
    """
    text = _text(PROMPTS_VARIABLE)
    if text and not text.isdecimal():
        raise InputError(f"{PROMPTS_VARIABLE} is {text!r}, must be a number of passes, or 0 to capture no prompts")
    return int(text or EAGER_PROMPTS)


def joined_rows() -> int:
    """Return the most rows of joined launches: EXL_DECODE_JOINED_ROWS (0: never join), at most PACKED_ROWS.

    Raises:
        InputError: the variable is no number.
    """
    text = _text(JOINED_ROWS_VARIABLE)
    if text and not text.isdecimal():
        raise InputError(f"{JOINED_ROWS_VARIABLE} is {text!r}, must be a number of rows from 0 to {PACKED_ROWS}")
    return min(int(text), PACKED_ROWS) if text else PACKED_ROWS


def refusal_of_joined_rows(rows: int) -> str | None:
    """Return why launches of so many rows, of which PACKED_ROWS at most count, are not joined, or None."""
    most = joined_rows()
    return (
        None
        if min(rows, PACKED_ROWS) <= most
        else f"{JOINED_ROWS_VARIABLE} allows joined matmuls of at most {most} rows"
    )


def refusal_of_joined_adapters() -> str | None:
    """Return why captured steps with adapters have no joined launches, or None: EXL_DECODE_JOINED_ADAPTERS is 0."""
    if _text(JOINED_ADAPTERS_VARIABLE) != "0":
        return None
    return f"{JOINED_ADAPTERS_VARIABLE}=0 asks for the modules' own passes"


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()
