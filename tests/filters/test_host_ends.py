"""FilterStack at its ends: the "all" policy and rewinds, dead ends that offer a stop id, drafts that meet one."""

import pytest

from exl_filters import (
    ExLlamaV2Filter,
    ExLlamaV2PrefixFilter,
    ExLlamaV2SelectFilter,
    FilterDeadEnd,
    FilterRejected,
    FilterStack,
    Status,
    Vocabulary,
    bits,
)

EOS = 256
VOCAB = Vocabulary([*(bytes([i]) for i in range(256)), None], eos_token_id=EOS, special_ids=[EOS])
A, B, C = b"abc"


class APlus(ExLlamaV2Filter):
    """a+, whole from the first a on."""

    def begin(self, prefix_str=""):
        self.count = 0

    def feed(self, token):
        self.count += 1

    def next(self):
        return ([A, EOS] if self.count else [A]), set()


def stack(*filters, **options):
    return FilterStack(filters, vocab_size=257, stop_ids=[EOS], **options)


def select(*options):
    return ExLlamaV2SelectFilter(None, VOCAB, list(options))


def both_end():
    s = stack(select("a"), ExLlamaV2PrefixFilter(None, VOCAB, ["ab"]), end_policy="all")
    assert [s.feed(A), s.feed(B)] == [False, False]
    return s


@pytest.mark.covers("filters: rewind")
def test_rewind_and_validate_restore_the_end_under_the_all_policy():
    s = both_end()
    s.validate([99])
    assert not s.ended
    copied = s.copy()
    assert s.feed(C) is True
    s.rewind(1)
    assert not s.ended
    assert s.feed(C) is True
    s.rewind(3)
    assert [s.feed(A), s.feed(B), s.feed(C)] == [False, False, True]
    assert not copied.ended
    copied.feed(C)
    copied.rewind(1)
    assert not copied.ended


def test_a_rejected_token_leaves_the_end_under_the_all_policy():
    s = stack(select("a"), select("ab"), end_policy="all")
    s.feed(A)
    before = s.ended
    with pytest.raises(FilterRejected):
        s.feed(C)
    assert s.ended is before


@pytest.mark.covers("filters: failing-filters")
def test_the_stop_id_offered_in_a_dead_end_is_accepted_and_cuts():
    s = stack(APlus(None, VOCAB), select("ab"), dead_end="eos")
    s.feed(A)
    assert s.status is Status.DEAD
    assert bits.to_ids(s.next_mask()) == [EOS]
    assert s.status is Status.DEAD
    assert s.allows(EOS)
    assert not s.ended
    assert s.validate([EOS]) == 1
    assert s.status is Status.DEAD
    assert not s.cut
    with pytest.raises(FilterRejected):
        s.feed(A)
    assert s.feed(EOS) is True
    assert s.status is Status.DONE  # type: ignore[comparison-overlap]
    assert s.cut
    assert not s.complete
    assert s.feed(A) is True  # recorded and ignored, as after any end
    s.rewind(2)
    assert s.status is Status.DEAD
    assert not s.cut
    s.feed(EOS)
    s.rewind(2)
    assert bits.to_ids(s.next_mask()) == [A]
    s.feed(A)
    s.feed(EOS)
    s.begin()
    assert not s.cut
    assert bits.to_ids(s.next_mask()) == [A]


def test_a_dead_end_without_the_policy_or_a_whole_filter_takes_no_stop_id():
    for filters, options in (
        ([APlus(None, VOCAB), select("ab")], {}),
        ([select("ab"), select("ac")], {"dead_end": "eos"}),
    ):
        s = stack(*filters, **options)
        s.feed(A)
        with pytest.raises(FilterRejected):
            s.feed(EOS)
        assert s.status is Status.DEAD
        assert not s.cut


@pytest.mark.covers("filters: speculation")
def test_a_draft_that_runs_into_a_dead_end():
    s = stack(select("ab"), select("ac"))
    assert s.validate([A, B]) == 1
    assert bits.to_ids(s.next_mask()) == [A]
    s.feed(A)
    assert s.validate([B]) == 0
    with pytest.raises(FilterDeadEnd):
        s.next_mask()
