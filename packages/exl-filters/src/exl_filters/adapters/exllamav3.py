"""exllamav3: filters that implement its published `Filter` protocol.

```python
job = Job(input_ids=ids, filters=[ExLlamaV3Filter(tokenizer, [ExLlamaV2SelectFilter(None, tokenizer, ["yes", "no"])])])
```
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any

from exl_filters import bits
from exl_filters.errors import FilterUsageError
from exl_filters.host import FilterStack, Status
from exl_filters.vocabulary import vocabulary_of

__all__ = ["ExLlamaV3Filter"]


def _base() -> Any:
    """Return exllamav3's class where it is installed, else `object`; the protocol is the same."""
    try:
        return importlib.import_module("exllamav3").Filter
    except (ImportError, AttributeError):
        return object


_Base: Any = _base()


class ExLlamaV3Filter(_Base):  # type: ignore[misc]
    """One job's filters, as one exllamav3 filter.

    Args:
        tokenizer: exllamav3's tokenizer, or any that `vocabulary_of` takes.
        filters: Templates, as for `FilterStack`.
        stop_ids: Every id on which the engine stops; default: the tokenizer's.
        trigger_token: Passed on to exllamav3's class, where it is installed.
        prefix_str: As `trigger_token`.
        eos_after_completed: As `trigger_token`.

    Raises:
        FilterUsageError: no stop id is known.
    """

    def __init__(
        self,
        tokenizer: Any,
        filters: Sequence[object],
        *,
        stop_ids: Collection[int] | None = None,
        trigger_token: int | None = None,
        prefix_str: str | None = None,
        eos_after_completed: bool = True,
    ) -> None:
        if _Base is not object:
            super().__init__(tokenizer, trigger_token, prefix_str, eos_after_completed)
        vocabulary = vocabulary_of(tokenizer)
        stops = vocabulary.stop_ids if stop_ids is None else frozenset(stop_ids)
        if not stops:
            raise FilterUsageError("no stop ids are known, so no text could end: pass stop_ids")
        self._stack = FilterStack(filters, vocab_size=vocabulary.size, stop_ids=stops)
        self._stop_words = bits.from_ids(stops, vocabulary.size)
        self._all = bits.full(vocabulary.size)
        self.reset()

    def reset(self) -> None:
        """Begin a new generation."""
        self._stack.begin("")

    def accept_token(self, token: int) -> None:
        """Accept one sampled token. Raises `FilterRejected` for a token that was not allowed."""
        self._stack.feed(int(token))

    def get_next_logit_mask(self) -> Any:
        """Return a new packed mask, a torch int32 tensor [1, ceil(vocabulary / 32)], 1 = allowed."""
        torch = importlib.import_module("torch")
        words = self._stop_words if self.is_completed() else self._stack.next_mask()
        return torch.from_numpy((self._all if words is None else words).copy()).reshape(1, -1)

    def is_completed(self) -> bool:
        """Whether the constraint has ended."""
        return self._stack.ended or self._stack.status is Status.DONE

    def use_background_worker(self) -> bool:
        """Whether a filter should be computed on another thread."""
        return any(f.use_background_worker() for f in self._stack.filters)

    def rollback_tokens(self, n: int) -> bool:
        """Undo the last `n` tokens. Returns False, and undoes nothing, where that is impossible."""
        try:
            self._stack.rewind(n)
        except FilterUsageError:
            return False
        return True
