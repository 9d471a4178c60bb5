"""`ExLlamaV2PrefixFilter`: the output starts with one of some strings; after that, no opinion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from exl_filters.byte_machine import DEAD, ByteMachine, Tokenized
from exl_filters.errors import FilterCompileError
from exl_filters.state_filter import Choice, StateFilter

__all__ = ["ExLlamaV2PrefixFilter"]

# (state of the machine, text still to be regenerated, bytes so far beyond it)
_State = tuple[int, bytes, bytes]


class ExLlamaV2PrefixFilter(StateFilter[_State]):
    """Force the output to begin with one of `prefix_strings`, then allow everything. Never ends the job.

    It works on bytes, so it reaches text whose characters are split across tokens. The shorter of two nested prefixes
    decides.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        prefix_strings: One string, or a list of at least one.
        overshoot: Whether a token may go past the end of a prefix after spelling it. False allows only an exact end.

    Raises:
        FilterCompileError: `prefix_strings` holds no string.
    """

    def __init__(self, model: Any, tokenizer: Any, prefix_strings: str | list[str], *, overshoot: bool = True) -> None:
        super().__init__(model, tokenizer)
        some = prefix_strings if isinstance(prefix_strings, Iterable) else ()
        strings = [some] if isinstance(some, str) else list(some)
        if not strings or not all(isinstance(s, str) for s in strings):
            raise FilterCompileError(f"prefix_strings must be one string or some; got {prefix_strings!r:.80}")
        self.prefix_strings = strings
        self.overshoot = overshoot
        shortest = [s for s in strings if not any(s != other and s.startswith(other) for other in strings)]
        self._table = Tokenized(ByteMachine.of_strings(shortest, then_free=True), self.vocabulary, overshoot=overshoot)
        self.begin("")

    @property
    def current_prefixes(self) -> set[str]:
        """The strings that the text so far can still become, or has begun with."""
        text = self.current_str
        return {s for s in self.prefix_strings if s.startswith(text) or text.startswith(s)}

    @property
    def current_str(self) -> str:
        """The constrained text so far, up to the end of the prefix."""
        return self._now().state[2].decode("utf-8", "replace")

    def describe(self) -> str:
        """Name the first prefixes."""
        return (
            f"Prefix({', '.join(repr(s) for s in self.prefix_strings[:3])}{', ...' * (len(self.prefix_strings) > 3)})"
        )

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "prefix", "prefix_strings": [...], "overshoot": ...}`."""
        return {"type": "prefix", "prefix_strings": list(self.prefix_strings), "overshoot": self.overshoot}

    def _start(self, prefix: bytes) -> _State:
        return 0, prefix, b""

    def _choice(self, state: _State) -> Choice | None:
        at, pending, _ = state
        if self._table.machine.free[at] and not pending:
            return None
        return self._table.choice(at, pending)

    def _advance(self, state: _State, token: int) -> _State:
        at, pending, text = state
        if self._table.machine.free[at] and not pending:
            return state
        reached, left = self._table.advance(at, pending, token)
        assert reached != DEAD, "advanced by a token that was not allowed"
        return reached, left, text + self.vocabulary.bytes_of(token)[len(pending) :]

    def _whole(self, state: _State) -> bool:
        return self._table.machine.free[state[0]] and not state[1]
