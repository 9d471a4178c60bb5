"""`ExLlamaV2SelectFilter`: the output is exactly one of some strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from exl_filters.byte_machine import DEAD, ByteMachine, Tokenized
from exl_filters.errors import FilterCompileError
from exl_filters.state_filter import Choice, StateFilter
from exl_filters.tokens import encoded

__all__ = ["ExLlamaV2SelectFilter"]

# (state of the machine, text still to be regenerated, bytes fed)
_State = tuple[int, bytes, bytes]


class ExLlamaV2SelectFilter(StateFilter[_State]):
    """Force the output to be exactly one of `options`. The token that finishes an option ends the job.

    It works on bytes, so it reaches emoji and other text whose characters are split across tokens.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        options: At least one string.
        case_insensitive: Match by Unicode case folding. A healing prefix is always matched exactly.
        policy: How to treat an option that begins another one. "longest" lets the longer one continue and offers the
            stop
            ids at the shorter. "first" ends at the shorter, as exllamav2 does.

    Raises:
        FilterCompileError: no sequence of the tokenizer's tokens spells an option, or an argument is not valid.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: Sequence[str],
        case_insensitive: bool = False,
        *,
        policy: Literal["longest", "first"] = "longest",
    ) -> None:
        super().__init__(model, tokenizer)
        if isinstance(options, str) or not options or not all(isinstance(o, str) for o in options):
            raise FilterCompileError(f"options must be a list of at least one string; got {options!r:.80}")
        if policy not in ("longest", "first"):
            raise FilterCompileError(f'policy is "longest" or "first"; got {policy!r}')
        self.options = list(options)
        self.case_insensitive = case_insensitive
        self.policy = policy
        build = ByteMachine.of_strings_any_case if case_insensitive else ByteMachine.of_strings
        self._check_spelling(build)
        machine = build(self.options)
        if policy == "first":
            for state, accepting in enumerate(machine.accepting):
                if accepting:
                    machine.edges[state] = {}
        self._table = Tokenized(machine, self.vocabulary)
        self.begin("")

    @property
    def sequence_str(self) -> str:
        """The text fed so far, healing prefix included."""
        return self._now().state[2].decode("utf-8", "replace") if self._steps else ""

    @sequence_str.setter
    def sequence_str(self, text: str) -> None:
        """Ignore the value: the base class resets it, and here the text follows from the state."""

    def _check_spelling(self, build: Callable[[Sequence[str]], ByteMachine]) -> None:
        """Raise for an option that tokens cannot spell: it could never be chosen."""
        trie = self.vocabulary.trie
        nodes = ((byte, trie.find(bytes([byte]))) for byte in range(256))
        single = {byte for byte, node in nodes if node >= 0 and trie.exact(node)}
        for option in self.options:
            if single.issuperset(encoded("an option", option)):
                continue
            machine = build([option])
            if not any(machine.accepting[state] for state in machine.token_states(self.vocabulary)):
                raise FilterCompileError(
                    f"no tokens of this vocabulary of {self.vocabulary.size} ids spell the option {option!r:.80}; "
                    "leave it out, or write it in characters that the tokenizer knows"
                )

    def describe(self) -> str:
        """Name the first options."""
        return f"Select({', '.join(repr(o) for o in self.options[:3])}{', ...' * (len(self.options) > 3)})"

    def spec(self) -> dict[str, Any]:
        """Return `{"type": "select", ...}` with the parameters."""
        return {
            "type": "select",
            "options": list(self.options),
            "case_insensitive": self.case_insensitive,
            "policy": self.policy,
        }

    def _start(self, prefix: bytes) -> _State:
        return 0, prefix, b""

    def _choice(self, state: _State) -> Choice:
        return self._table.choice(state[0], state[1])

    def _advance(self, state: _State, token: int) -> _State:
        reached, pending = self._table.advance(state[0], state[1], token)
        assert reached != DEAD, "advanced by a token that was not allowed"
        return reached, pending, state[2] + self.vocabulary.bytes_of(token)

    def _whole(self, state: _State) -> bool:
        return self._table.machine.accepting[state[0]] and not state[1]
