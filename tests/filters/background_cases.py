"""Filters that notice when two threads are in one of them, and every method that one can be asked by."""

import threading
from typing import Any

import numpy as np
import pytest

from exl_filters import (
    AllOf,
    AnyOf,
    CompileBudget,
    ExLlamaV2Filter,
    ExLlamaV2SelectFilter,
    FilterContext,
    LoggedFilter,
    SequenceFilter,
    TriggeredFilter,
    Vocabulary,
    bits,
)
from exl_filters.base import overrides

V = Vocabulary([*"abc", "</s>"], eos_token_id=3, special_ids=[3])
C = FilterContext.make(4, [3])


class Watch:
    """Record the callers inside, and whether two were inside at once. The first caller stays until it is let out,
    or for a while."""

    def __init__(self):
        self.lock = threading.Lock()
        self.inside = []
        self.overlaps = []
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, what, work):
        me = (threading.get_ident(), what)
        with self.lock:
            self.overlaps += [(other[1], what) for other in self.inside if other[0] != me[0]]
            self.inside.append(me)
        try:
            if not self.entered.is_set():
                self.entered.set()
                self.go_on.wait(0.05)  # clock: a chance for others to come in, which is no failure to miss
            return work()
        finally:
            with self.lock:
                self.inside.remove(me)


class Watched:
    """A matcher under a watch; its copies are their own."""

    def __init__(self, inner, watch):
        self.__dict__.update(inner=inner, watch=watch)

    def __getattr__(self, name):
        value = self.watch(name, lambda: getattr(self.inner, name))
        if not callable(value):
            return value
        return lambda *args: self.watch(name, lambda: value(*args))


class Plugin(ExLlamaV2Filter):
    """A filter as a user writes one: its state is an attribute, its methods know nothing of threads."""

    native = True
    watch = Watch()

    def __init__(self):
        super().__init__(None, V)
        self.count = 0

    def begin(self, prefix_str=""):
        self.watch("begin", lambda: setattr(self, "count", 0))

    def feed(self, token):
        self.watch("feed", lambda: setattr(self, "count", self.count + 1))

    def next(self):
        return self.watch("next", lambda: ([self.count % 3], set()))

    def rewind(self, n):
        self.watch("rewind", lambda: setattr(self, "count", self.count - n))

    def attach(self, context):
        self.watch("attach", lambda: setattr(self, "context", context))

    def is_complete(self):
        return self.watch("is_complete", lambda: False)

    def ended(self):
        return self.watch("ended", lambda: False)

    def validate(self, tokens):
        return self.watch("validate", lambda: 0)

    def forced(self):
        return self.watch("forced", lambda: b"")

    def prepare_logit_mask(self):
        return self.watch("prepare_logit_mask", lambda: True)

    def mask_logits(self, logits):
        return self.watch("mask_logits", lambda: logits)

    def use_background_worker(self):
        return True

    def clone(self, c=None):
        return self.watch("clone", Plugin)


def plugin(watch):
    f = Plugin()
    f.watch = watch
    return f


def grammar(watch, **options):
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters.grammar import ExLlamaV2GrammarFilter

    if options.get("backend") == "xgrammar":
        pytest.importorskip("xgrammar", reason="extra `xgrammar`")
    f = ExLlamaV2GrammarFilter(None, V, **{"regex": "[abc]{5}", **options})
    f.attach(C)
    f.feed(0)
    inside: Any = f
    inside._matcher = Watched(inside._matcher, watch)  # noqa: SLF001
    return f


class Slow(ExLlamaV2SelectFilter):
    """A part of a composite that computes its answers under a watch."""

    watch: Any = None

    def _choice(self, state):
        choice = super()._choice
        return self.watch("choice", lambda: choice(state))

    def _advance(self, state, token):
        advance = super()._advance
        return self.watch("advance", lambda: advance(state, token))


def composed(make):
    def watched(watch):
        part = Slow(None, V, ["abcab", "abc"])
        part.watch = Watch()
        part.watch.entered.set()  # not yet
        f = make(part)
        f.attach(C)
        if isinstance(f, TriggeredFilter):
            f.feed(2)
        f.feed(0)
        part.watch.entered.clear()
        watch.__dict__.update(part.watch.__dict__)
        part.watch.__dict__ = watch.__dict__
        return f

    return watched


FILTERS = {
    "plugin": plugin,
    "grammar": grammar,
    "json": lambda watch: grammar(watch, regex=None, choice=["aabca", "ab"]),
    "xgrammar": lambda watch: grammar(watch, backend="xgrammar", budget=CompileBudget(trust=True)),
    "all of": composed(lambda part: AllOf([part, ExLlamaV2SelectFilter(None, V, ["abcab"])])),
    "any of": composed(lambda part: AnyOf([ExLlamaV2SelectFilter(None, V, ["abcab"]), part])),
    "sequence": composed(lambda part: SequenceFilter([part, ExLlamaV2SelectFilter(None, V, ["c"])])),
    "triggered": composed(lambda part: TriggeredFilter(part, 2)),
    "logged": composed(LoggedFilter),
}

METHODS = {
    "next": lambda f: f.next(),
    "fill_bitmask": lambda f: f.fill_bitmask(bits.empty(4)),
    "prepare_logit_mask": lambda f: overrides(f, "prepare_logit_mask") and f.prepare_logit_mask(),
    "mask_logits": lambda f: overrides(f, "mask_logits") and f.mask_logits(np.zeros(4, dtype=np.float32)),
    "is_complete": lambda f: f.is_complete(),
    "ended": lambda f: f.ended(),
    "validate": lambda f: f.validate([1, 2]),
    "forced": lambda f: f.forced(),
    "captures": lambda f: f.captures() if hasattr(f, "captures") and f.spec()["backend"] == "llguidance" else None,
    "clone": lambda f: f.clone(),
    "feed": lambda f: f.feed(1),
    "rewind": lambda f: f.rewind(1),
    "begin": lambda f: f.begin(""),
    "attach": lambda f: f.attach(C),
    "get_next": lambda f: f.get_next(),
    "get_next of the other kind": lambda f: overrides(f, "prepare_logit_mask") and f.get_next(mask=True),
    "background_drop": lambda f: f.background_drop(),
}
