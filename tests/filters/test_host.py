"""FilterStack: combination, ends, dead ends, rewind, foreign filters, failures."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from answers import mask_ids

from exl_filters import (
    ExLlamaV2Filter,
    FilterBusy,
    FilterDeadEnd,
    FilterFailed,
    FilterRejected,
    FilterStack,
    FilterUsageError,
    Status,
    Vocabulary,
    bits,
)

EOS = 31
VOCAB = Vocabulary([bytes([97 + i]) for i in range(26)] + [None] * 5 + [b"</s>"], eos_token_id=EOS, special_ids=[EOS])


class Words(ExLlamaV2Filter):
    """One of the given id sequences, then the last id ends it: a filter as users wrote them for exllamav2."""

    def __init__(self, *sequences, tokenizer=VOCAB):
        super().__init__(None, tokenizer)
        self.sequences = [tuple(s) for s in sequences]
        self.done = []

    def begin(self, prefix_str=""):
        self.done = []

    def feed(self, token):
        self.done.append(token.item())

    def next(self):
        n = len(self.done)
        live = [s for s in self.sequences if list(s[:n]) == self.done and len(s) > n]
        return {s[n] for s in live}, {s[n] for s in live if len(s) == n + 1}


class Silent(ExLlamaV2Filter):
    def begin(self, prefix_str=""):
        pass

    def feed(self, token):
        pass

    def next(self):
        return None, set()


class Duck:
    """lm-format-enforcer's habits: no subclass, clone returns itself, wants a tensor, breaks when fed without next."""

    def __init__(self):
        self.count, self.asked = 0, False

    def clone(self):
        return self

    def begin(self, prefix_str):
        self.count, self.asked = 0, False

    def feed(self, token):
        if not self.asked:
            raise RuntimeError("fed without next")
        assert int(token[0][0]) == self.count
        self.count, self.asked = self.count + 1, False

    def next(self):
        self.asked = True
        return [self.count] if self.count < 3 else [EOS], []


def stack(*filters, **options):
    options = {"vocab_size": 32, "stop_ids": [EOS], **options}
    return FilterStack(filters, **options)


def ids(s):
    mask = s.next_mask()
    return None if mask is None else bits.to_ids(mask)


def test_no_filter_restricts_nothing():
    s = stack()
    s.begin()
    assert s.next_mask() is None
    assert s.feed(3) is False
    assert stack(Silent()).next_mask() is None


@pytest.mark.covers("filters: packed-masks")
def test_mask_shape_and_tail():
    s = stack(Words([1], [2]), vocab_size=70)
    s.begin("")
    mask = s.next_mask()
    assert mask.dtype == np.int32
    assert mask.shape == (3,)
    assert bits.to_ids(mask) == [1, 2]


@pytest.mark.covers("filters: combination")
def test_combination_is_the_intersection_in_any_order():
    a, b = Words([1, 2], [3, 4]), Words([3, 4], [5])
    for filters in ((a, b), (b, a), (a, Silent(), b), (a, a, b)):
        s = stack(*filters)
        s.begin()
        assert ids(s) == [3]
        assert s.feed(3) is False
        assert s.feed(4) is True
        assert s.status is Status.DONE


@pytest.mark.covers("filters: end-policies")
def test_end_policies():
    short, long = Words([1, 2]), Words([1, 2, 3], [1, 2, 4])
    s = stack(short, long)
    assert [s.feed(1), s.feed(2)] == [False, True]
    s = stack(short, long, end_policy="all")
    assert [s.feed(1), s.feed(2)] == [False, False]
    assert ids(s) == [3, 4]
    assert s.feed(3) is True


@pytest.mark.covers("filters: failing-filters")
def test_a_dead_end_names_every_opinion():
    s = stack(Words([1, 2]), Words([1, 3], [1, 4]))
    s.feed(1)
    with pytest.raises(FilterDeadEnd) as caught:
        s.next_mask()
    diagnosis = caught.value.diagnosis
    assert [o.allowed for o in diagnosis.opinions] == [1, 2]
    assert diagnosis.opinions[1].samples == ("d", "e")
    assert diagnosis.text == "b"
    assert "Words" in str(caught.value)
    assert s.status is Status.DEAD


def test_dead_end_policy_eos_needs_a_complete_filter():
    class Optional(Words):
        def next(self):
            allowed, ends = super().next()
            return allowed | {EOS}, ends

    s = stack(Optional([1, 2]), Words([1, 3]), dead_end="eos")
    s.feed(1)
    assert ids(s) == [EOS]
    s = stack(Words([1, 2]), Words([1, 3]), dead_end="eos")
    s.feed(1)
    with pytest.raises(FilterDeadEnd):
        s.next_mask()


def test_a_rejected_token_changes_no_filter():
    a, b = Words([1, 2], [3, 4]), Words([3, 4])
    s = stack(a, b)
    s.begin()
    with pytest.raises(FilterRejected) as caught:
        s.feed(1)
    assert caught.value.token == 1
    assert ids(s) == [3]
    s.feed(3)
    assert ids(s) == [4]


@pytest.mark.covers("filters: sessions")
def test_templates_are_not_touched_and_serve_many_jobs():
    template = Words([1, 2], [3, 4])
    first, second = stack(template), stack(template)
    first.feed(1)
    second.feed(3)
    assert (ids(first), ids(second)) == ([2], [4])
    assert template.done == []


@pytest.mark.covers("filters: rewind")
def test_rewind_undoes_feeds_also_across_the_end():
    for make in (lambda: Words([0, 1, 2], [0, 3]), Duck):
        s = stack(make())
        s.begin()
        before = [ids(s)]
        for token in (0, 1, 2):
            s.feed(token)
            before.append(ids(s))
        for n in (1, 2, 3):
            s.rewind(n)
            assert ids(s) == before[3 - n]
            for token in (0, 1, 2)[3 - n :]:
                s.feed(token)
            assert ids(s) == before[3]
        s.rewind(0)
        with pytest.raises(FilterUsageError):
            s.rewind(4)
        assert ids(s) == before[3]


def test_stop_tokens_never_reach_a_filter_and_later_feeds_are_ignored():
    s = stack(Duck())
    for token in (0, 1, 2):
        assert s.feed(token) is False
    assert ids(s) == [EOS]
    assert s.complete
    assert s.feed(EOS) is True
    assert s.status is Status.DONE
    s.feed(EOS)
    s.feed(-1)
    s.rewind(3)
    assert ids(s) == [EOS]


@pytest.mark.covers("filters: stop-ids")
def test_a_stop_token_before_the_end_is_rejected():
    s = stack(Duck())
    with pytest.raises(FilterRejected):
        s.feed(EOS)
    assert ids(s) == [0]


@pytest.mark.covers("filters: stop-ids")
def test_every_stop_id_follows_the_eos_of_a_filter_that_knows_only_one():
    class Open(Words):
        def next(self):
            return ({1, 30} if not self.done else {1, 30, EOS}), set()

    s = stack(Open(), stop_ids=[EOS, 30])
    assert ids(s) == [1]
    s.feed(1)
    assert ids(s) == [1, 30, EOS]


@pytest.mark.covers("filters: sessions")
def test_an_untrusted_filter_serves_one_live_job():
    duck = Duck()
    first = stack(duck)
    with pytest.raises(FilterBusy):
        stack(duck)
    with pytest.raises(FilterBusy):
        stack(Duck(), duck)
    first.close()
    first.close()
    second = stack(duck)
    assert ids(second) == [0]
    del second
    with stack(duck) as third:
        assert ids(third) == [0]


def test_ownership_is_given_back_when_construction_fails():
    duck = Duck()
    with pytest.raises(FilterUsageError):
        stack(duck, object())
    stack(duck).close()


def test_unsorted_repeated_and_foreign_ids_are_put_in_order():
    class Messy(Words):
        def next(self):
            return [5, 3, 3, 900, -1], frozenset([3, 900])

    s = stack(Messy())
    assert ids(s) == [3, 5]
    assert s.feed(3) is True


@pytest.mark.covers("filters: failing-filters")
def test_a_failure_belongs_to_this_stack_and_stays_until_begin():
    class Failing(Words):
        def feed(self, token):
            if token == 2:
                raise KeyError("boom")
            super().feed(token)

    template = Failing([1, 2], [1, 3])
    s, other = stack(template), stack(template)
    s.feed(1)
    other.feed(1)
    with pytest.raises(FilterFailed, match="boom") as caught:
        s.feed(2)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(FilterFailed):
        s.next_mask()
    assert s.status is Status.FAILED
    assert other.feed(3) is True
    s.begin()
    assert ids(s) == [1]


@pytest.mark.covers("filters: combination", "filters: end-policies")
def test_prefer_eos_takes_the_end_where_it_is_offered():
    class Open(Words):
        def next(self):
            return ({1} if not self.done else {1, 2, EOS}), ({2} if self.done else set())

    s = stack(Open(), prefer_eos=True)
    assert ids(s) == [1]
    s.feed(1)
    assert ids(s) == [EOS]
    s = stack(Open(), prefer_eos="end")
    s.feed(1)
    assert ids(s) == [2, EOS]


@pytest.mark.covers("filters: end-policies")
@pytest.mark.parametrize("prefer", [True, "end"])
def test_prefer_eos_leaves_filters_alone_that_mask_logits_themselves(prefer):
    """Such a filter may allow EOS as text; only together with one that lists ids is EOS preferred."""

    class Open(Words):
        def next(self):
            return {1, 2, EOS}, set()

    class Masking(Open):
        def can_mask_logits(self):
            return True

    class MaskingByTypeAlone:
        begin, feed, can_mask_logits = (lambda self, *_: None,) * 2 + (lambda self: True,)

        def next(self):
            return {1, 2, EOS}, set()

    for both in ([Masking()], [Masking(), Masking()], [MaskingByTypeAlone(), Masking()]):
        assert ids(stack(*both, prefer_eos=prefer)) == [1, 2, EOS]
    assert ids(stack(Masking(), Open(), prefer_eos=prefer)) == [EOS]


@pytest.mark.covers("filters: speculation")
def test_validate_a_draft():
    s = stack(Words([1, 2, 3]), Words([1, 2, 3], [4]))
    assert s.validate([1, 2, 9]) == 2
    assert s.validate([1, 2, 3, 3]) == 3
    assert ids(s) == [1]


@pytest.mark.covers("filters: healing")
def test_healing_a_filter_that_ignores_its_prefix():
    vocab = Vocabulary([b"a", b"ab", b"b", b"abc", b"c", b"abx"], eos_token_id=None)
    s = FilterStack([Words([2], [4], tokenizer=vocab)], vocab_size=6, stop_ids=[])
    s.begin("a")
    assert mask_ids(s) == [0, 1]  # nothing beyond the prefix, or "b" beyond it
    s.feed(0)
    assert mask_ids(s) == [2, 4]
    s.begin("a")
    assert s.feed(1) is True


def test_bad_arguments():
    for options in ({"vocab_size": 0}, {"end_policy": "some"}, {"dead_end": "ignore"}, {"logits_width": 4}):
        with pytest.raises(FilterUsageError):
            stack(**options)


@pytest.mark.covers("filters: numpy-alone")
def test_importing_the_package_imports_no_torch_and_costs_little_more_than_numpy():
    code = (
        "import sys; from counting import lines; numpy, ours = (lines(lambda: __import__(name)) for name in "
        "('numpy', 'exl_filters')); "
        "heavy = {'torch', 'transformers', 'hypothesis', 'llguidance', 'lmformatenforcer'} & set(sys.modules); "
        "print(sorted(heavy), ours / numpy)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    heavy, share = run.stdout.split()
    assert heavy == "[]"
    assert float(share) < 1
