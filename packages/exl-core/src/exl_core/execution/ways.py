"""The way a pass runs, decided from facts: of a loaded model (`select.py`), or of a model's files (`kernels.py`).

A fact is a reason against a way, or None where nothing is against it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from exl_kernels.device import rows_are_invariant
from exl_kernels.selection import PACKED_ROWS

from .capturable import refusal_of_tokens
from .environment import refusal_of_joined_rows

__all__ = ["REFUSAL_OF_ADAPTERS", "ModelFacts", "PassFacts", "Way", "refusal_of_step", "way_of"]

Way = Literal["captured", "joined", "sharded prompt", "sharded", "eager"]

REFUSAL_OF_ADAPTERS = "adapters have joined launches in captured steps only"
"""Why no other pass with adapters is joined."""


class ModelFacts(Protocol):
    """Facts about a model, asked one by one when a decision needs them."""

    @property
    def sharded(self) -> bool:
        """Whether every matrix is on several devices."""

    def refusal(self) -> str | None:
        """Return why no pass of the model is captured or has joined launches, or None."""

    def refusal_of_launches(self) -> str | None:
        """Return why a pass that is not captured has no joined launches, of a sharded model no prompt; or None."""

    def unjoined(self, *, adapted: bool) -> str | None:
        """Return why captured steps, with adapters or without, have no joined launches, or None."""

    def rows_of(self, batch: int, q_len: int) -> int:
        """Return the rows that run for a step of `batch` rows of `q_len` tokens: captured steps are padded."""

    def refusal_of_rows(self, rows: int) -> str | None:
        """Return why joined launches of so many rows, more than PACKED_ROWS, are not batch-invariant, or None."""


class PassFacts(NamedTuple):
    """Facts about a pass that no captured step runs."""

    adapted: bool
    """Some rows have adapters."""
    is_prompt: bool
    """A row has more tokens than in a decode step, and no row has adapters."""
    refusal: str | None = None
    """Why only the modules' own passes run it, or None."""


def way_of(model: ModelFacts, asked: PassFacts, captured: str | None) -> tuple[Way, str | None]:
    """Return the way a pass runs, and why the way before it in the table of `select.py` does not run it.

    Args:
        model: the model.
        asked: the pass.
        captured: why no captured step runs the pass, or None.
    """
    if captured is None:
        return "captured", None
    found = asked.refusal or model.refusal()
    if model.sharded:
        few = None if asked.is_prompt else "it has few tokens a row, or adapters"
        found = found or few or model.refusal_of_launches()
        return ("sharded", found) if found else ("sharded prompt", captured)
    found = found or (REFUSAL_OF_ADAPTERS if asked.adapted else None) or model.refusal_of_launches()
    return ("eager", found) if found else ("joined", captured)


def refusal_of_step(model: ModelFacts, batch: int, q_len: int, *, adapted: bool) -> str | None:
    """Return why a step of `batch` rows of `q_len` tokens is not captured whatever its pages are.

    None where it may be captured. The launches of a sharded model have more conditions, which `captured.py` asks.
    """
    why = model.refusal() or refusal_of_tokens(batch, q_len)
    if why is not None or model.sharded:
        return why

    if rows_are_invariant(batch * q_len, invariant=False):  # padding crosses no limit of blocks
        return None
    why = refusal_of_joined_rows(batch * q_len) or model.unjoined(adapted=adapted)
    why = why or model.refusal_of_rows(model.rows_of(batch, q_len))
    return None if why is None else f"a step of more than {PACKED_ROWS} rows is not captured: {why}"
