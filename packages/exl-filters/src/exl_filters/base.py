"""`ExLlamaV2Filter`: the constraint contract that every filter implements and every host drives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, ClassVar

from exl_filters import background, bits
from exl_filters.background import Pending
from exl_filters.bits import Words
from exl_filters.context import FilterContext
from exl_filters.copying import CopiesItself, copy_state
from exl_filters.errors import FilterBusy, FilterError, FilterUsageError

__all__ = ["Allowed", "ExLlamaV2Filter", "FromSpec", "overrides", "unpickle_by"]

Allowed = tuple[Collection[int] | None, Collection[int]]


class ExLlamaV2Filter(CopiesItself):
    """Base class of filters, with exllamav2's names.

    A filter must implement `begin`, `feed` and `next`; the rest has defaults. One instance serves one generation at a
    time. One thread at a time uses it, not always the same one. Every method, of every subclass, first waits for a
    pending background computation (`FilterBusy` after 30 s). `begin`, `feed`, `rewind` and `attach` drop it instead. A
    background computation may call its own filter from the thread that it runs on, but not from other threads.

    `native = True` declares the full contract: the filter honours the stop ids of `attach`; `feed` raises
    `FilterRejected` for a token that is not allowed and leaves the state unchanged; the first token obeys the healing
    prefix; clones are independent. Hosts wrap every other filter in an adapter that supplies the missing parts.

    Args:
        model: Kept for exllamav2's API and never called here. May be None.
        tokenizer: Kept, and never called here. Subclasses read the vocabulary from it.
    """

    allow_return_type_list: ClassVar[bool] = True
    native: ClassVar[bool] = False

    # Set on the class too, so that a clone built with __new__, or a subclass that never calls super().__init__(), has
    # them all.
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

    # The three methods that a filter must implement.

    def begin(self, prefix_str: str | bytes | None = "") -> None:
        """Reset for a new generation. Legal in any state.

        Args:
            prefix_str: Text that the first token writes again (token healing). The first token starts with this text,
                and only the bytes after it are constrained.
        """
        raise NotImplementedError(f"{type(self).__name__}.begin")

    def feed(self, token: Any) -> None:
        """Accept one token: an int, or a tensor of one element. Raises `FilterRejected` if it is not allowed."""
        raise NotImplementedError(f"{type(self).__name__}.feed")

    def next(self) -> Allowed:
        """Return `(allowed, end_tokens)` in the current state. Calling twice gives the same answer.

        `allowed` is a collection of token ids, or None for no opinion: every token may follow. A list must be strictly
        ascending. `end_tokens` is a subset of `allowed`: sampling one of them finishes the constraint.
        """
        raise NotImplementedError(f"{type(self).__name__}.next")

    # Copies.

    def clone(self, c: Any = None) -> Any:
        """Return an independent filter in the same state, with no computation pending.

        Args:
            c: None, or a bare instance that an overriding subclass fills itself. With None, every attribute is carried
                over:
                containers are copied; values, the model and the tokenizer are shared. With `c`, only the attributes of
                    this
                class are set, as in exllamav2.

        Raises:
            FilterUsageError: an attribute could be either state or a shared table, so it cannot be copied safely.
        """
        self._wait_pending()
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

    # Mask mode, as in exllamav2.

    def use_background_worker(self) -> bool:
        """Whether a host should compute `next` or the mask on another thread."""
        return False

    def can_mask_logits(self) -> bool:
        """Whether `prepare_logit_mask` and `mask_logits` are implemented and preferred over `next`."""
        return False

    def prepare_logit_mask(self) -> bool:
        """Compute the mask of the current state. Returns True."""
        raise NotImplementedError(f"{type(self).__name__}.prepare_logit_mask")

    def mask_logits(self, logits: Any) -> Any:
        """Return `logits`, of shape (W,), with the excluded entries at -inf."""
        raise NotImplementedError(f"{type(self).__name__}.mask_logits")

    # Background evaluation. One computation runs at a time; a failure is delivered once; begin and feed drop a stale
    # result.

    def background_next(self, pool: Executor) -> None:
        """Compute `next()` on `pool`; `get_next()` returns its result. Raises `FilterBusy` when one is pending."""
        self._submit(pool, "next", self.next)

    def background_prepare_logit_mask(self, pool: Executor) -> None:
        """Compute `prepare_logit_mask()` on `pool`; `get_next(mask=True)` returns its result. Raises `FilterBusy` when
        one is pending.
        """
        self._submit(pool, "mask", self.prepare_logit_mask)

    def background_drop(self) -> None:
        """Cancel a pending computation or wait for it, and forget it and its failure. Never raises."""
        if self.background_result is not None and not self._is_background():
            background.finish(self.background_result)
            self.background_result = self._background = None

    def get_next(self, mask: bool = False) -> Any:
        """Return the result of the pending computation, or compute it on this thread.

        Args:
            mask: Ask for `prepare_logit_mask()` instead of `next()`. A pending result of the other kind is not used.
        """
        future, pending = self.background_result, self._background
        if future is not None:
            # A computation that has not begun is cancelled, and the result is computed here at once.
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

    def _wait_pending(self) -> None:
        """Wait for a pending computation, unless the computation itself calls; its result stays available.

        A computation that has not begun is cancelled, and `get_next` computes its result. A future that a subclass has
        set itself is left alone, because its thread is unknown.
        """
        future, pending = self.background_result, self._background
        if future is None or pending is None or pending.future is not future or pending.here:
            return
        if not background.finish_soon(future, type(self).__name__) or not pending.kind:
            self.background_result = self._background = None

    def _clone_sharing(self, c: Any) -> Any:
        """Fill `c`, or a new object of this class, with every attribute of this filter and nothing pending.

        Mutable attributes are shared: the caller replaces them with copies.
        """
        self._wait_pending()
        new = c if c is not None else type(self).__new__(type(self))
        new.__dict__.update(vars(self))
        new.background_result = None
        return new

    def _discard_pending(self) -> None:
        """Drop a pending computation, unless the computation itself calls. Raises `FilterBusy` after 30 s."""
        if self.background_result is None or self._is_background():
            return
        # A subclass may override background_drop to stop its computation, so it is called before the wait.
        if type(self).background_drop is ExLlamaV2Filter.background_drop:
            background.finish_soon(self.background_result, type(self).__name__)
        self.background_drop()

    # Optional methods of the native contract. Hosts check whether a class overrides them.

    def attach(self, context: FilterContext) -> None:
        """Receive the host's vocabulary size and stop ids in `context`. Called before `begin`."""
        self._discard_pending()
        self.context = context

    def fill_bitmask(self, words: Words) -> bool:
        """Write the packed mask of the current state over `words` (int32, ceil(W/32) words).

        Returns False for no opinion; the content of `words` is then undefined.
        """
        allowed, _ = self.next()
        if allowed is None:
            return False
        bits.copy_into(bits.from_ids(allowed, len(words) * 32), words)
        return True

    def is_complete(self) -> bool:
        """Whether the text so far is a complete sentence. Default: a stop id is allowed."""
        stops = self.context.stop_ids if self.context is not None else frozenset()
        eos = getattr(self.tokenizer, "eos_token_id", None)
        allowed, _ = self.next()
        return allowed is not None and any(token in stops or token == eos for token in allowed)

    def ended(self) -> bool:
        """Whether the last feed finished the constraint. Override it where `next` does not list the end tokens."""
        return False

    def rewind(self, n: int) -> None:
        """Undo the last `n` feeds. Hosts replay their journal for filters that do not override this method.

        Raises FilterUsageError if this filter cannot rewind.
        """
        if n:
            raise FilterUsageError(f"{type(self).__name__} cannot rewind by itself; run it in a FilterStack, which can")

    def validate(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may follow in order; the state is unchanged. Default: feeds a clone."""
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
        """Return bytes that every continuation begins with; b"" when there are none or the filter cannot tell."""
        return b""

    def describe(self) -> str:
        """Return one line for logs and diagnoses."""
        return type(self).__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a filter that has a `spec` by that spec: its type and parameters are kept, its state is not."""
        if overrides(self, "spec"):
            return _unpickle_by[-1], (self.spec(), self.tokenizer)
        return super().__reduce_ex__(protocol)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-compatible description from which `exl_filters.from_spec` builds an equal filter.

        Raises FilterError if the filter has none.
        """
        raise FilterError(f"{type(self).__name__} has no spec()")


FromSpec = Callable[[Mapping[str, Any], Any], ExLlamaV2Filter]
"""Builds a filter of its `spec` and its tokenizer."""
_unpickle_by: list[FromSpec] = []


def unpickle_by(from_spec: FromSpec) -> None:
    """Let pickled filters be built by `from_spec`, a function of a module.

    The registry, which imports this module, gives its own. `exl_filters` imports the registry before a caller can make
    a filter.
    """
    _unpickle_by[:] = [from_spec]


def overrides(obj: object, name: str) -> bool:
    """Whether the class of `obj` overrides the base class's method `name`."""
    own = getattr(type(obj), name, None)
    return own is not None and own is not getattr(ExLlamaV2Filter, name, None)
