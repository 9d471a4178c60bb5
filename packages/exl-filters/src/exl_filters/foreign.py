"""`as_filter`: adapts any object with begin, feed and next to the native contract.

So lm-format-enforcer's own class (no subclass, no background methods), formatron's (its clone shares an engine) and
every filter written for exllamav2 run unmodified.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from exl_filters import bits
from exl_filters.background import ATTRIBUTES
from exl_filters.base import Allowed, ExLlamaV2Filter, overrides
from exl_filters.bits import Words
from exl_filters.copying import copy_state
from exl_filters.errors import FilterError, FilterFailed, FilterRejected, FilterUsageError
from exl_filters.foreign_answers import token_ids
from exl_filters.tokens import as_prefix, as_token, fed_token

__all__ = ["ForeignFilter", "as_filter"]


def as_filter(obj: Any) -> ExLlamaV2Filter:
    """Return `obj` itself if it is a native filter, else a `ForeignFilter` that wraps it.

    Raises:
        FilterUsageError: `obj` lacks `begin`, `feed` or `next` (or a mask method in place of `next`).
    """
    if isinstance(obj, ExLlamaV2Filter) and obj.native:
        return obj
    return ForeignFilter(obj)


class ForeignFilter(ExLlamaV2Filter):
    """Drive one object that implements only begin, feed and next, and supply the rest of the contract.

    The wrapper feeds tensors of shape (1, 1), as exllamav2 does (`fed_token`). It raises `FilterRejected` before the
    object receives a token that it does not allow. It calls `next` between any two feeds. It returns sorted
    unique ids inside the vocabulary. It applies the host's stop ids and token healing. It raises the object's
    exceptions as `FilterFailed`.

    Args:
        inner: The object to drive.

    Raises:
        FilterUsageError: `inner` lacks a required method.
    """

    native = True

    def __init__(self, inner: Any) -> None:
        missing = [name for name in ("begin", "feed") if not callable(getattr(inner, name, None))]
        if not callable(getattr(inner, "next", None)) and not callable(getattr(inner, "mask_logits", None)):
            missing.append("next")
        if missing:
            raise FilterUsageError(f"{type(inner).__name__} is no filter: it has no {', '.join(missing)}")
        super().__init__(getattr(inner, "model", None), getattr(inner, "tokenizer", None))
        self.inner = inner
        self._reset(b"")

    def _reset(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._begun = False
        self._answer: tuple[npt.NDArray[np.int64] | None, frozenset[int]] | None = None
        self._ended = False
        self._done = False

    # Methods of the contract.

    def begin(self, prefix_str: Any = "") -> None:
        """Reset the wrapper and the object. The wrapper matches the healing prefix; the object gets ""."""
        self._reset(as_prefix(prefix_str))
        drop = getattr(self.inner, "background_drop", None)
        if callable(drop):
            self._call(drop)
        # The object gets "": the wrapper matches the healing prefix, since most foreign filters ignore the argument.
        self._call(self.inner.begin, "")
        self._begun = True

    def next(self) -> Allowed:
        """Return the object's ids and end tokens, with stop ids and healing applied."""
        ids, ends = self._ask()
        return (None if ids is None else ids.tolist()), set(ends)

    def fill_bitmask(self, words: Words) -> bool:
        """Write the object's ids as a packed mask. Returns False where the object has no opinion."""
        ids, _ = self._ask()
        if ids is None:
            return False
        bits.copy_into(bits.from_ids(ids, len(words) * 32), words)
        return True

    def feed(self, token: Any) -> None:
        """Check a token against the current answer, then feed it to the object. Raises `FilterRejected`."""
        token = as_token(token)
        if self._done:
            return
        ids, ends = self._ask()
        if ids is not None and not _contains(ids, token):
            raise FilterRejected(f"token {token} is not allowed by {self.describe()}", token)
        if self.context is not None and token in self.context.stop_ids:
            self._done, self._ended, self._answer = True, token in ends, None
            return
        for part in self._healed(token):
            if self._answer is None:
                self._ask_inner()
            self._call(self.inner.feed, fed_token(part))
            self._answer = None
        if self._prefix:
            # A token that is a proper prefix of it leaves the rest to be written again.
            self._prefix = self._prefix[len(self._vocabulary().bytes_of(token)) :]
        self._answer = None
        self._ended = token in ends

    def ended(self) -> bool:
        """Whether the last feed finished the constraint."""
        return self._ended

    def is_complete(self) -> bool:
        """Whether the object offers a stop id or has ended."""
        ids, _ = self._ask()
        stops = set(self.context.stop_ids if self.context else ())
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if isinstance(eos, int):
            stops.add(eos)
        return self._ended or (ids is not None and any(_contains(ids, stop) for stop in stops))

    def use_background_worker(self) -> bool:
        """Return the object's own answer; False where it has none."""
        own = getattr(self.inner, "use_background_worker", None)
        return bool(own()) if callable(own) else False

    @property
    def masks_logits(self) -> bool:
        """Whether the object prefers to mask logits itself. It is asked for its ids all the same."""
        own = getattr(self.inner, "can_mask_logits", None)
        return callable(own) and bool(self._call(own))

    def clone(self, c: Any = None) -> Any:
        """Return a wrapper of a copy of the object. Raises `FilterUsageError` when its own clone cannot be trusted."""
        self._wait_pending()
        new = ForeignFilter(copy_of_foreign(self.inner))
        for name, value in vars(self).items():
            if name != "inner" and name not in ATTRIBUTES:
                new.__dict__[name] = value
        return new

    def describe(self) -> str:
        """Return the name of the object's class."""
        return type(self.inner).__name__

    # Internal methods.

    def _call(self, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except FilterError:
            raise
        except Exception as error:
            name = getattr(method, "__name__", "call")
            raise FilterFailed(f"{self.describe()}.{name} raised {type(error).__name__}: {error}") from error

    def _ask(self) -> tuple[npt.NDArray[np.int64] | None, frozenset[int]]:
        """Return the answer for the current state, computed once per state, with stop ids and healing applied."""
        if self._done:
            stops = self.context.stop_ids if self.context else frozenset()
            return np.array(sorted(stops), dtype=np.int64), stops
        if self._answer is None:
            self._answer = self._with_prefix(*self._with_stops(*self._ask_inner()))
        return self._answer

    def _ask_inner(self) -> tuple[npt.NDArray[np.int64] | None, frozenset[int]]:
        if not self._begun:
            self.begin("")
        if not callable(getattr(self.inner, "next", None)) or (
            isinstance(self.inner, ExLlamaV2Filter) and not overrides(self.inner, "next")
        ):
            return self._ask_mask(), frozenset()
        answer = self._call(self.inner.next)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise FilterFailed(f"{self.describe()}.next() returned {answer!r:.80}; it must be (allowed, end_tokens)")
        allowed, ends = answer
        if allowed is None:
            return None, frozenset()
        ids = token_ids(allowed, self.context, f"{self.describe()}.next() allowed")
        ended = token_ids(() if ends is None else ends, self.context, f"{self.describe()}.next() listed as end tokens")
        return ids, frozenset(ended[np.isin(ended, ids)].tolist())

    def _ask_mask(self) -> npt.NDArray[np.int64]:
        """Return the ids of a filter that can only mask: those that stay finite when all logits are zero."""
        if self.context is None:
            raise FilterUsageError(f"{self.describe()} only masks logits: attach a context with the logits width first")
        zeros: Any = np.zeros(self.context.logits_width, dtype=np.float32)
        if (torch := sys.modules.get("torch")) is not None:
            zeros = torch.from_numpy(zeros)
        if self._call(self.inner.prepare_logit_mask) is not True:
            raise FilterFailed(f"{self.describe()}.prepare_logit_mask() did not return True")
        row = np.asarray(self._call(self.inner.mask_logits, zeros)).reshape(-1)
        if row.dtype.kind != "f" or len(row) != self.context.logits_width:
            raise FilterFailed(
                f"{self.describe()}.mask_logits() returned {len(row)} values of {row.dtype}; it must return the "
                f"{self.context.logits_width} float logits it was given, excluded ones at -inf"
            )
        return np.flatnonzero(np.isfinite(row)[: self.context.vocab_size]).astype(np.int64)

    def _with_stops(
        self, ids: npt.NDArray[np.int64] | None, ends: frozenset[int]
    ) -> tuple[npt.NDArray[np.int64] | None, frozenset[int]]:
        """Apply the host's stop ids to the answer of a filter that knows one EOS.

        All stop ids are offered once the filter offers its EOS (or nothing else), and none before.
        """
        stops = self.context.stop_ids if self.context else frozenset()
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if ids is None or not stops or not isinstance(eos, int):
            return ids, ends
        stop_array = np.array(sorted(stops), dtype=np.int64)
        rest = ids[~np.isin(ids, stop_array)]
        if _contains(ids, eos) or (len(ids) and not len(rest)):
            return np.union1d(ids, stop_array), ends
        return rest, ends - stops

    def _with_prefix(
        self, ids: npt.NDArray[np.int64] | None, ends: frozenset[int]
    ) -> tuple[npt.NDArray[np.int64] | None, frozenset[int]]:
        """Keep the tokens that start with the healing prefix and whose surplus, as one token, is allowed.

        Where there is none, keep the tokens that are proper prefixes of that text, as native filters do.
        """
        if not self._prefix:
            return ids, ends
        allowed, ended = [], []
        for token, surplus in self._vocabulary().tokens_starting_with(self._prefix):
            parts = self._vocabulary().ids_of(surplus) if surplus else ()
            if not surplus or ids is None or any(_contains(ids, part) for part in parts):
                allowed.append(token)
            if surplus and any(part in ends for part in parts):
                ended.append(token)
        if not allowed:
            allowed = [t for n in range(1, len(self._prefix)) for t in self._vocabulary().ids_of(self._prefix[:n])]
        return np.array(sorted(allowed), dtype=np.int64), frozenset(ended)

    def _healed(self, token: int) -> tuple[int, ...]:
        """Return the tokens that the object receives for `token`: nothing of the healing prefix, and the surplus as one
        token.
        """
        if not self._prefix:
            return (token,)
        surplus = self._vocabulary().bytes_of(token)[len(self._prefix) :]
        if not surplus:
            return ()
        self._answer = None
        ids, _ = self._ask_inner()
        for part in self._vocabulary().ids_of(surplus):
            if ids is None or _contains(ids, part):
                return (part,)
        raise FilterRejected(f"token {token}: {surplus!r} is not allowed by {self.describe()}", token)

    def _vocabulary(self) -> Any:
        from exl_filters.vocabulary import vocabulary_of

        if self.tokenizer is None:
            raise FilterUsageError(
                f"{self.describe()} has no tokenizer, so a healing prefix cannot be matched to tokens"
            )
        return vocabulary_of(self.tokenizer)


def copy_of_foreign(inner: Any) -> Any:
    """Copy a foreign filter for one job: a subclass with the base class's own `clone` and plain state.

    Raises `FilterUsageError` otherwise: lm-format-enforcer's clone returns itself, and formatron's shares its engine.
    """
    if not isinstance(inner, ExLlamaV2Filter) or overrides(inner, "clone"):
        raise FilterUsageError(
            f"{type(inner).__name__} cannot be copied by its own clone(): make one filter for each job, or derive from "
            "ExLlamaV2Filter without a clone() of its own"
        )
    inner._wait_pending()
    shared = {id(x): x for x in (inner.model, inner.tokenizer) if x is not None}
    new = type(inner).__new__(type(inner))
    for name, value in vars(inner).items():
        pending = name in ATTRIBUTES
        new.__dict__[name] = None if pending else copy_state(value, shared, f"{type(inner).__name__}.{name}")
    return new


def _contains(ids: npt.NDArray[np.int64], token: int) -> bool:
    index = int(np.searchsorted(ids, token))
    return index < len(ids) and int(ids[index]) == token
