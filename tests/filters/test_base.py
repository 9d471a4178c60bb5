"""The base class: defaults, background evaluation without the reference's defects, default clones."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from exl_filters import ExLlamaV2Filter, FilterBusy, FilterUsageError, StateFilter
from exl_filters.tokens import FedToken, as_prefix, as_token, fed_token


class Counting(ExLlamaV2Filter):
    """Allows 10 + the number of tokens fed; a filter as users wrote them for exllamav2."""

    def __init__(self, model=None, tokenizer=None):
        super().__init__(model, tokenizer)
        self.fed = []

    def begin(self, prefix_str=""):
        self.fed = []

    def feed(self, token):
        self.fed.append(int(token))

    def next(self):
        return {10 + len(self.fed)}, set()


@pytest.mark.covers("filters: base-class")
def test_defaults_of_the_base_class():
    base = ExLlamaV2Filter("model", "tokenizer")
    assert (base.model, base.tokenizer, base.sequence_str, base.background_result) == ("model", "tokenizer", "", None)
    assert ExLlamaV2Filter.allow_return_type_list is True
    assert base.use_background_worker() is False
    assert base.can_mask_logits() is False
    for call in (base.next, base.prepare_logit_mask, lambda: base.begin(""), lambda: base.feed(0)):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(NotImplementedError):
        base.mask_logits(np.zeros(4))


def test_a_filter_of_states_that_lacks_one_of_its_functions_is_refused_when_it_is_made():
    class Half(StateFilter[int]):
        def _start(self, prefix):
            return 0

    with pytest.raises(TypeError, match=r"_advance.*_choice.*_whole"):
        Half(None, ["a", "b"])  # type: ignore[abstract]


def test_background_next_is_next(pool):
    f = Counting()
    f.begin("")
    f.background_next(pool)
    with pytest.raises(FilterBusy):
        f.background_next(pool)
    assert f.get_next() == ({10}, set())
    assert f.background_result is None
    assert f.get_next() == ({10}, set())


@pytest.mark.covers("filters: background")
def test_a_failure_in_the_background_is_delivered_once_and_leaves_a_usable_filter(pool):
    class Failing(Counting):
        broken = True

        def next(self):
            if self.broken:
                raise RuntimeError("boom")
            return super().next()

    f = Failing()
    f.background_next(pool)
    with pytest.raises(RuntimeError, match="boom"):
        f.get_next()
    f.broken = False
    assert f.get_next() == ({10}, set())
    f.broken = True
    f.background_next(pool)
    f.background_drop()
    f.broken = False
    f.background_next(pool)
    assert f.get_next() == ({10}, set())


@pytest.mark.covers("filters: background")
def test_feed_and_begin_drop_what_was_computed_for_the_state_before(pool):
    f = Counting()
    f.background_next(pool)
    f.feed(3)
    assert f.get_next() == ({11}, set())
    f.background_next(pool)
    f.begin("")
    assert f.get_next() == ({10}, set())


def test_a_pending_result_of_the_other_kind_is_not_taken_for_this_one(pool):
    class Masking(Counting):
        def prepare_logit_mask(self):
            return True

    f = Masking()
    f.background_next(pool)
    assert f.get_next(mask=True) is True
    f.background_prepare_logit_mask(pool)
    assert f.get_next() == ({10}, set())


@pytest.mark.covers("filters: background")
def test_drop_waits_for_running_work():
    started, go = Event(), Event()

    class Slow(Counting):
        def next(self):
            started.set()
            assert go.wait(250)
            return super().next()

    with ThreadPoolExecutor(1) as pool:
        f = Slow()
        f.background_next(pool)
        assert started.wait(250)
        future = f.background_result
        go.set()
        f.background_drop()
        assert future is not None
        assert future.done()


def test_default_clone_is_independent_and_keeps_the_subclass():
    model, tokenizer = object(), object()
    f = Counting(model, tokenizer)
    f.feed(1)
    copy = f.clone()
    assert type(copy) is Counting
    assert copy.model is model
    assert copy.tokenizer is tokenizer
    assert copy.get_next() == f.next()
    copy.feed(2)
    assert f.fed == [1]
    f.feed(5)
    assert copy.fed == [1, 2]


def test_clone_into_a_given_object_sets_the_base_attributes(pool):
    class Own(Counting):
        def clone(self, c=None):
            c = super().clone(Own.__new__(Own))
            c.fed = list(self.fed)
            return c

    f = Own("m", "t")
    f.background_next(pool)
    copy = f.clone()
    assert (copy.model, copy.tokenizer, copy.background_result) == ("m", "t", None)
    assert copy.get_next() == ({10}, set())


def test_default_clone_refuses_what_it_cannot_judge():
    class Holding(Counting):
        def __init__(self):
            super().__init__()
            self.parser: Any = object.__new__(type("Parser", (), {}))

    with pytest.raises(FilterUsageError, match="parser"):
        Holding().clone()


def test_default_validate_counts_without_moving():
    f = Counting()
    assert f.validate([10, 11, 99]) == 2
    assert f.fed == []


@pytest.mark.covers("filters: border-types")
def test_tokens_and_prefixes_are_checked():
    class Tensor:
        def item(self):
            return 7

    assert as_token(7) == as_token(np.int64(7)) == as_token(np.array([[7]])) == as_token(Tensor()) == 7
    for bad in ("7", 1.5, None, np.array([1, 2])):
        with pytest.raises(FilterUsageError):
            as_token(bad)
    fed = FedToken(7)
    assert int(fed) == fed.item() == fed[0][0] == int(fed[0][0]) == [*range(9)][fed] == 7
    assert as_prefix(None) == as_prefix("") == as_prefix([]) == b""
    assert as_prefix("é") == as_prefix("é".encode()) == as_prefix(["é"]) == b"\xc3\xa9"
    for bad in (["a", "b"], 3):  # type: ignore[assignment]
        with pytest.raises(FilterUsageError):
            as_prefix(bad)


def test_foreign_filters_are_fed_tensors_that_are_found_among_ints():
    torch = pytest.importorskip("torch")
    tensor = fed_token(7)
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (1, 1))
    for same in (tensor, tensor.clone(), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert same in {6, 7}
        assert {7: "seven"}[same] == "seven"
        assert int(same) == as_token(same) == same.item() == [*range(9)][same] == 7
    assert torch.cat([tensor, tensor], dim=-1).tolist() == [[7, 7]]


def test_fed_tensors_are_in_memory_whatever_torchs_default_device():
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        tensor = fed_token(7)
    assert tensor.device.type == "cpu"
    assert tensor.item() == 7
