"""`ExLlamaV2Filter`: the constraint contract every filter implements and every host drives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future
from importlib import import_module
from typing import Any, ClassVar

from exl_filters import background, bits
from exl_filters.background import Pending
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.copying import CopiesItself, copy_state
from exl_filters.errors import FilterBusy, FilterError, FilterUsageError

__all__ = ["Allowed", "ExLlamaV2Filter", "overrides"]

Allowed = tuple[Collection[int] | None, Collection[int]]


class ExLlamaV2Filter(CopiesItself):
    """Base class of filters, with exllamav2's names.

    A filter must implement `begin`, `feed` and `next`; the rest has defaults. One instance serves one generation at a
    time and is used by one thread at a time, though not always the same one. What runs in its background is no
    exception: every method, of every subclass, waits for it first (`FilterBusy` after 30 s), and `begin`, `feed`,
    `rewind` and `attach` drop it. It may ask its own filter, from the thread it runs on; not from threads of its own.
    `model` and `tokenizer` are kept and never called here; `model` may be None.

    `native = True` declares the semantics of spec section 1.7: the stop set of `attach` is honoured, `feed` raises
    `FilterRejected` for a token that is not allowed and leaves the state unchanged, healing prefixes are obeyed, clones
    are independent. Hosts wrap every other filter in an adapter that supplies what is missing.
    """

    allow_return_type_list: ClassVar[bool] = True
    native: ClassVar[bool] = False

    # On the class too: a clone built with __new__, or a subclass that never calls super().__init__(), has them all the
    # same.
    model: Any = None
    tokenizer: Any = None
    sequence_str: str = ""
    background_result: Future[Any] | None = None
    context: FilterContext | None = None
    _background: Pending | None = None

    def __init__(self, model: Any = None, tokenizer: Any = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sequence_str = ""
        self.background_result = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        background.guard(cls, ExLlamaV2Filter)

    # The three that make a filter.

    def begin(self, prefix_str: str | bytes | None = "") -> None:
        """Reset for a new generation. `prefix_str` is the text to be regenerated (token healing): the first token
        starts with it and
        only what goes beyond it is constrained. Legal in any state."""
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def feed(self, token: Any) -> None:
        """Accept one token: an int, or a tensor of one element."""
        raise NotImplementedError(f"{type(self).__name__}.feed")

    def next(self) -> Allowed:
        """`(allowed, end_tokens)` in the current state; asking twice gives the same answer.

        `allowed` None: no opinion here. A list must be strictly ascending. `end_tokens` is a subset of it: sampling one
        of these finishes the constraint.
        """
        raise NotImplementedError(f"{type(self).__name__}.next")

    # Copies.

    def clone(self, c: Any = None) -> Any:
        """An independent filter in the same state, with no computation pending.

        Without `c`, every attribute is carried over: containers copied, values and the model and tokenizer shared; an
        attribute that could be either raises `FilterUsageError`. With `c` (a bare instance that an overriding subclass
        fills itself), only the attributes of this class are set, as in exllamav2.
        """
        self._settle()
        if c is not None:
            c.model, c.tokenizer, c.sequence_str = self.model, self.tokenizer, self.sequence_str
            c.background_result, c.context = None, self.context
            return c
        shared = {id(x): x for x in (self.model, self.tokenizer, self.context) if x is not None}
        new = type(self).__new__(type(self))
        for name, value in vars(self).items():
            pending = name in background.ATTRIBUTES
            new.__dict__[name] = None if pending else copy_state(value, shared, f"{type(self).__name__}.{name}")
        return new

    # Mask mode, as exllamav2 knows it.

    def use_background_worker(self) -> bool:
        """Whether `next` or the mask is worth computing on another thread."""
        return False

    def can_mask_logits(self) -> bool:
        """Whether `prepare_logit_mask` and `mask_logits` are implemented and preferred."""
        return False

    def prepare_logit_mask(self) -> bool:
        """Compute the mask of the current state; returns True."""
        raise NotImplementedError(f"{type(self).__name__}.prepare_logit_mask")

    def mask_logits(self, logits: Any) -> Any:
        """Logits of shape (W,) with the excluded entries at -inf."""
        raise NotImplementedError(f"{type(self).__name__}.mask_logits")

    # Background evaluation. One computation at a time; a failure is delivered once; begin and feed drop what is stale.

    def background_next(self, pool: Executor) -> None:
        """Compute `next()` on `pool`; `get_next()` collects it. Raises `FilterBusy` when one is pending already."""
        self._submit(pool, "next", self.next)

    def background_prepare_logit_mask(self, pool: Executor) -> None:
        """Compute `prepare_logit_mask()` on `pool`; `get_next(mask=True)` collects it."""
        self._submit(pool, "mask", self.prepare_logit_mask)

    def background_drop(self) -> None:
        """Cancel or wait for a pending computation and forget it, failure included. Never raises."""
        if self.background_result is not None and not self._is_background():
            background.finish(self.background_result)
            self.background_result = self._background = None

    def get_next(self, mask: bool = False) -> Any:
        """The pending result if it is of the kind asked for, else `prepare_logit_mask()` when `mask`, else `next()`."""
        future, pending = self.background_result, self._background
        if future is not None:
            # What has not begun yet is computed here, at once.
            ran = background.finish(future)
            self.background_result = self._background = None
            kind = pending.kind if pending is not None and pending.future is future else ""
            if ran and kind == ("mask" if mask else "next"):
                return future.result()
        return self.prepare_logit_mask() if mask else self.next()

    def _submit(self, pool: Executor, kind: str, work: Callable[[], Any]) -> None:
        if self.background_result is not None:
            raise FilterBusy(
                f"{type(self).__name__} has a computation pending: collect it with get_next() or drop it first; "
                "one filter object serves one job"
            )
        self._background = pending = Pending(kind)
        pending.future = self.background_result = pool.submit(pending.run, work)

    def _is_background(self) -> bool:
        """Whether this call comes from the pending computation."""
        return self._background is not None and self._background.here

    def _settle(self) -> None:
        """Wait for a pending computation, but not for the one that asks; its result stays to be collected.

        One that has not begun is cancelled: whoever collects it computes it. A future that a subclass has put there by
        itself is left alone, as nobody knows which thread it runs on.
        """
        future, pending = self.background_result, self._background
        if future is None or pending is None or pending.future is not future or pending.here:
            return
        if not background.finish_soon(future, type(self).__name__) or not pending.kind:
            self.background_result = self._background = None

    def _clone_sharing(self, c: Any) -> Any:
        """For clones: `c`, or a new object of this class, with every attribute of this filter and nothing pending. What
        is mutable is shared: the caller makes its own of it."""
        self._settle()
        new = c if c is not None else type(self).__new__(type(self))
        new.__dict__.update(vars(self))
        new.background_result = None
        return new

    def _forsake(self) -> None:
        """Drop a pending computation, unless it is the one that asks. `FilterBusy` if it takes too long."""
        if self.background_result is None or self._is_background():
            return
        # A filter's own drop may be what makes its computation stop: it is not waited for first.
        if type(self).background_drop is ExLlamaV2Filter.background_drop:
            background.finish_soon(self.background_result, type(self).__name__)
        self.background_drop()

    # Optional, native (spec 1.8). Hosts look for overrides.

    def attach(self, context: FilterContext) -> None:
        """Learn the host's vocabulary size and stop set. Called before `begin`."""
        self._forsake()
        self.context = context

    def fill_bitmask(self, words: Words) -> bool:
        """Write the packed mask of the current state over `words` (int32, ceil(W/32)); False = no opinion, `words`
        undefined.
        """
        allowed, _ = self.next()
        if allowed is None:
            return False
        bits.copy_into(bits.from_ids(allowed, len(words) * 32), words)
        return True

    def is_complete(self) -> bool:
        """Whether the text so far is a whole sentence. Default: a stop id is allowed."""
        stops = self.context.stop_ids if self.context is not None else frozenset()
        eos = getattr(self.tokenizer, "eos_token_id", None)
        allowed, _ = self.next()
        return allowed is not None and any(token in stops or token == eos for token in allowed)

    def ended(self) -> bool:
        """Whether the last feed finished the constraint. Overridden where the end tokens are not listed beforehand."""
        return False

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds. Hosts replay their journal for filters that do not override this."""
        if n:
            raise FilterUsageError(f"{type(self).__name__} cannot rewind by itself; run it in a FilterStack, which can")

    def validate(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow in order; the state is unchanged. Default: on a clone."""
        trial = self.clone()
        for index, token in enumerate(tokens):
            allowed, ends = trial.next()
            if allowed is not None and int(token) not in allowed:
                return index
            if int(token) in ends:
                return index + 1
            trial.feed(int(token))
        return len(tokens)

    def forced(self) -> bytes:
        """Bytes that every continuation begins with; b"" when there are none or the filter cannot tell."""
        return b""

    def describe(self) -> str:
        """One line for logs and diagnoses."""
        return type(self).__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Filters with a `spec` are pickled by it: their kind and parameters travel, their state does not."""
        if overrides(self, "spec"):
            # The registry imports this module: it is looked up when a filter is pickled.
            return import_module("exl_filters.registry").from_spec, (self.spec(), self.tokenizer)
        return super().__reduce_ex__(protocol)

    def spec(self) -> dict[str, Any]:
        """A JSON-able description from which `exl_filters.from_spec` builds an equal filter."""
        raise FilterError(f"{type(self).__name__} has no spec()")


def overrides(obj: object, name: str) -> bool:
    """Whether the class of `obj` has its own `name`, other than the base class's."""
    own = getattr(type(obj), name, None)
    return own is not None and own is not getattr(ExLlamaV2Filter, name, None)
