"""`StateFilter`: filters whose state is an immutable value.

It implements rewind, clone, healing and stop handling once for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from exl_filters import bits
from exl_filters.base import Allowed, ExLlamaV2Filter
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.errors import FilterRejected, FilterUsageError
from exl_filters.masking import masked
from exl_filters.tokens import as_prefix, as_token
from exl_filters.vocabulary import Vocabulary, vocabulary_of

__all__ = ["Choice", "StateFilter"]

S = TypeVar("S")


@dataclass(frozen=True)
class Choice:
    """The ids that a state allows, stop ids aside.

    `words` is a packed mask over the vocabulary. `ends` are the ids in it that end the constraint.
    """

    words: Words
    ends: frozenset[int] = frozenset()

    @cached_property
    def ids(self) -> list[int]:
        """The allowed ids, ascending. Do not change the list."""
        return bits.to_ids(self.words)


@dataclass(frozen=True)
class _Step(Generic[S]):
    state: S
    done: bool = False
    ended: bool = False


class StateFilter(ExLlamaV2Filter, ABC, Generic[S]):
    """A native filter defined by four pure functions of an immutable state.

    Subclasses implement `_start(prefix)`; `_choice(state)`, None for no opinion; `_advance(state, token)` for an
    allowed token; and `_whole(state)`: whether the text so far is a complete sentence. The stop ids are offered with
    the choice where the text is complete, and nowhere else. After an end token or a stop token the filter is done: it
    offers the stop ids and ignores further tokens.

    Args:
        model: Kept for exllamav2's API; may be None.
        tokenizer: A `Vocabulary` or any tokenizer that `vocabulary_of` takes.
        vocabulary: The vocabulary; default: that of `tokenizer`.
    """

    native: ClassVar[bool] = True

    def __init__(self, model: Any, tokenizer: Any, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(model, tokenizer)
        self.vocabulary = vocabulary or vocabulary_of(tokenizer)
        self._stops = self.vocabulary.stop_ids
        self._steps: list[_Step[S]] = []

    @abstractmethod
    def _start(self, prefix: bytes) -> S: ...

    @abstractmethod
    def _choice(self, state: S) -> Choice | None: ...

    @abstractmethod
    def _advance(self, state: S, token: int) -> S: ...

    @abstractmethod
    def _whole(self, state: S) -> bool: ...

    # Methods of the contract.

    def attach(self, context: FilterContext) -> None:
        """Receive the host's stop ids."""
        super().attach(context)
        self._stops = context.stop_ids

    def begin(self, prefix_str: Any = "") -> None:
        """Reset to the start state for a healing prefix."""
        self._steps = [_Step(self._start(as_prefix(prefix_str)))]

    def feed(self, token: Any) -> None:
        """Advance the state by a token. Raises `FilterRejected` for a token that is not allowed; the state is
        unchanged.
        """
        token = as_token(token)
        now = self._now()
        if now.done:
            self._steps.append(now)
            return
        choice = self._choice(now.state)
        if token in self._stops:
            if choice is not None and not self._whole(now.state):
                raise FilterRejected(f"stop token {token}: {self.describe()} is not complete", token)
            self._steps.append(_Step(now.state, done=True, ended=choice is not None))
            return
        if choice is not None and not bits.test(choice.words, token):
            raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
        ended = choice is not None and token in choice.ends
        self._steps.append(_Step(self._advance(now.state, token), done=ended, ended=ended))

    def next(self) -> Allowed:
        """Return the allowed ids with the stop ids where the text is complete, and the ids that end the constraint."""
        now = self._now()
        if now.done:
            return sorted(self._stops), set(self._stops)
        choice = self._choice(now.state)
        if choice is None:
            return None, set()
        whole = self._whole(now.state)
        ids, ends = list(choice.ids), set(choice.ends - self._stops)
        named = [stop for stop in self._stops if bits.test(choice.words, stop)]
        if whole:
            ids = sorted({*ids, *self._stops}) if len(named) < len(self._stops) else ids
            ends |= self._stops
        elif named:
            ids = [i for i in ids if i not in self._stops]
        return ids, ends

    def fill_bitmask(self, words: Words) -> bool:
        """Write the mask of the state, with the stop ids. Returns False for no opinion."""
        now = self._now()
        if now.done:
            bits.copy_into(bits.from_ids(self._stops, len(words) * 32), words)
            return True
        choice = self._choice(now.state)
        if choice is None:
            return False
        bits.copy_into(choice.words, words)
        self._with_stops(words, self._whole(now.state))
        return True

    def is_complete(self) -> bool:
        """Whether the text so far is a complete sentence."""
        now = self._now()
        return now.done or self._whole(now.state)

    def ended(self) -> bool:
        """Whether the last feed finished the constraint."""
        return self._now().ended

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds. Raises `FilterUsageError` for more than were fed."""
        if not 0 <= n < max(1, len(self._steps)):
            raise FilterUsageError(f"rewind({n}) after {max(0, len(self._steps) - 1)} tokens")
        if n:
            del self._steps[-n:]

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow in order; the state is unchanged."""
        accepted = 0
        try:
            for token in tokens:
                self.feed(token)
                accepted += 1
                if self._now().done:
                    break
        except FilterRejected:
            pass
        self.rewind(accepted)
        return accepted

    def clone(self, c: Any = None) -> Any:
        """Return an independent filter: states are immutable, so copying their list suffices."""
        new = self._clone_sharing(c)
        new._steps = list(self._steps)
        return new

    # Mask mode, for hosts that use only exllamav2's methods.

    def prepare_logit_mask(self) -> bool:
        """Return True. The mask of a state is cached with the state."""
        return True

    def mask_logits(self, logits: Any) -> Any:
        """Return a copy of `logits` (W,), numpy or torch, with the excluded entries at -inf."""
        words = bits.empty(logits.shape[-1])
        if not self.fill_bitmask(words):
            return logits
        bits.clear_from(words, self.vocabulary.size)
        return masked(logits, words)

    # Internal methods.

    def _now(self) -> _Step[S]:
        if not self._steps:
            self.begin("")
        return self._steps[-1]

    def _with_stops(self, words: Words, whole: bool) -> Words:
        """Set the stop bits where the text is complete, and clear them where it is not."""
        for stop in self._stops:
            bits.put(words, stop, whole)
        return words
