"""Answers of foreign filters: ids and masks in any container are read, anything else is rejected with its type."""

from typing import Any

import numpy as np
import pytest

from exl_filters import ExLlamaV2SelectFilter, FilterFailed, FilterRejected, FilterStack, Vocabulary, bits

EOS = 257
VOCAB = Vocabulary([*(bytes([i]) for i in range(256)), b"ab", None], eos_token_id=EOS, special_ids=[EOS])
MASK = np.zeros(258, dtype=bool)
MASK[[97, 98]] = True
WORDS = bits.from_ids([97, 98], 258)

try:  # the package needs no torch, and these tests run without it too; its tensors are read where it is
    import torch
except ModuleNotFoundError:
    READ, EMPTY, REFUSED = [], [], []
else:
    READ = [
        torch.tensor([97, 98]),
        torch.tensor([[97, 98]]),
        [np.int64(97), torch.tensor(98)],
        torch.from_numpy(MASK),
    ]
    EMPTY = [torch.tensor([])]
    REFUSED = [
        (torch.from_numpy(WORDS), "packed words"),
        (torch.zeros(258), "ensor"),
        (torch.zeros(258, dtype=torch.bfloat16), "ensor"),
    ]


class Answers:
    """No subclass: begin, feed, and a `next` that always gives the same."""

    tokenizer = VOCAB

    def __init__(self, allowed, ends=()):
        self.answer = allowed, ends
        self.fed = []

    def begin(self, prefix_str):
        self.fed.clear()

    def feed(self, token):
        self.fed.append(int(token))

    def next(self):
        return self.answer


def stack(filter_, **options):
    return FilterStack([filter_], vocab_size=258, stop_ids=[EOS], **options)


@pytest.mark.parametrize(
    "allowed",
    [
        [98, 97, 98],
        (97, 98),
        {97, 98},
        frozenset([97, 98]),
        {97: 0, 98: 0}.keys(),
        range(97, 99),
        np.array([98, 97]),
        np.array([[97, 98]], dtype=np.int32),
        np.array([97, 98], dtype=np.uint8),
        MASK,
        MASK[None],
        *READ,
    ],
    ids=repr,
)
def test_ids_and_masks_are_read(allowed):
    assert bits.to_ids(stack(Answers(allowed)).next_mask()) == [97, 98]


def test_as_many_ids_as_words_are_ids_when_in_order():
    ids = np.arange(9, dtype=np.int32) * 10
    assert bits.to_ids(stack(Answers(ids)).next_mask()) == ids.tolist()


def test_nothing_allowed_is_a_dead_end_in_any_container():
    answers: list[Any] = [[], set(), np.array([]), np.zeros(258, dtype=bool), *EMPTY]
    for empty in answers:
        s = stack(Answers(empty))
        assert s.status.value == "dead"


def test_a_mask_of_the_width_of_the_logits():
    wide = np.concatenate([MASK, np.ones(6, dtype=bool)])
    assert bits.to_ids(stack(Answers(wide), logits_width=264).next_mask()) == [97, 98]


@pytest.mark.parametrize(
    ("allowed", "named"),
    [
        (WORDS, "packed words"),
        (WORDS.view(np.uint32), "packed words"),
        (bits.full(258), "outside"),
        (np.array([97, 258]), "outside"),
        (np.array([-1, 97]), "outside"),
        (np.array([2**63 + 97], dtype=np.uint64), "outside"),
        (np.where(MASK, 0, -np.inf).astype(np.float32), "float32"),
        *REFUSED,
        ([97.0], "97.0"),
        ({97.5}, "97.5"),
        (["97"], "'97'"),
        ("97", "str"),
        (b"ab", "bytes"),
        ({97: 1.0}, "dict"),
        ([True, False], "True"),
        ([None], "None"),
        ([97, [98]], "98"),
        (97, "int"),
        (MASK[:-1], "257 entries"),
        (np.stack([MASK, MASK]), "shape"),
    ],
    ids=repr,
)
def test_anything_else_is_rejected_with_its_type(allowed, named):
    with pytest.raises(FilterFailed, match=r"Answers\.next\(\) allowed.*accepted is|258 ids") as caught:
        stack(Answers(allowed)).next_mask()
    assert named in str(caught.value)


@pytest.mark.parametrize("ends", [["97"], [97.0], [None], 97], ids=repr)
def test_end_tokens_are_ids_too(ends):
    with pytest.raises(FilterFailed, match="end tokens"):
        stack(Answers([97], ends)).next_mask()


def test_end_tokens_outside_the_allowed_ids_are_left_out():
    assert stack(Answers([97, 98], [98, 99, 900])).feed(98) is True


def test_a_row_of_logits_is_a_float_row_of_their_width():
    class Masks(Answers):
        next: Any = None

        def prepare_logit_mask(self):
            return True

        def mask_logits(self, logits):
            return self.answer[0]

    for row in (np.zeros(258, dtype=np.int64), MASK, np.zeros(9, dtype=np.float32)):
        with pytest.raises(FilterFailed, match="mask_logits"):
            stack(Masks(row)).next_mask()
    assert bits.to_ids(stack(Masks(np.where(MASK, 0, -np.inf))).next_mask()) == [97, 98]


@pytest.mark.covers("filters: healing")
def test_one_healing_rule_where_no_token_starts_with_the_prefix():
    foreign, native = Answers([97], [97]), ExLlamaV2SelectFilter(None, VOCAB, ["a"])
    inner = foreign
    a, b = stack(foreign), stack(native)
    for s in (a, b):
        s.begin("abz")
    for token in (256, ord("z"), 97):
        assert bits.to_ids(a.next_mask()) == bits.to_ids(b.next_mask())
        with pytest.raises(FilterRejected):
            a.feed(ord("q"))
        assert a.feed(token) is b.feed(token)
    assert a.ended
    assert inner.fed == [97]
    a.rewind(2)
    b.rewind(2)
    assert bits.to_ids(a.next_mask()) == bits.to_ids(b.next_mask())
    assert not a.ended
