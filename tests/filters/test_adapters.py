"""Filters in other engines: the real transformers, vLLM's protocol, llama.cpp's callable; all give the same texts."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exl_filters import (
    ExLlamaV2SelectFilter,
    FilterBusy,
    FilterDeadEnd,
    FilterStack,
    FilterUsageError,
    Vocabulary,
    apply_mask,
    bits,
)
from exl_filters.adapters.exllamav3 import ExLlamaV3Filter
from exl_filters.adapters.llama_cpp import LlamaCppFilterProcessor
from exl_filters.adapters.rows import RowTracker
from exl_filters.adapters.vllm import VllmFilterProcessor

OPTIONS = ["yes", "no", "no way", "ye"]
TOKENS = ["y", "e", "s", "n", "o", " way", " ", "w", "a", "yes", "no", "es", "x", "</s>"]
EOS = len(TOKENS) - 1
V = Vocabulary(TOKENS, eos_token_id=EOS, special_ids=[EOS])
WIDTH = V.size + 5


def select():
    return ExLlamaV2SelectFilter(None, V, OPTIONS)


def scores(seed, step):
    """Return the token that a scripted model generates at a step, given the ids so far."""
    return np.random.default_rng([seed, step]).standard_normal(WIDTH).astype(np.float32)


def plain_loop(seed):
    with FilterStack([select()], vocab_size=V.size, stop_ids=[EOS]) as stack:
        out: list[int] = []
        ended = False
        while not ended:
            token = int(apply_mask(scores(seed, len(out)), stack.next_mask()).argmax())
            out.append(token)
            ended = stack.feed(token)
    return out


def text(ids):
    return V.decode(ids)


def up_to_stop(ids):
    ids = list(ids)
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.mark.covers("filters: other-engines")
def test_every_adapter_gives_the_text_of_the_plain_loop():
    for seed in range(12):
        expected = up_to_stop(plain_loop(seed))
        assert text(expected) in OPTIONS
        llama, out = LlamaCppFilterProcessor([select()], V), [0, 0, 0]
        while EOS not in out:
            out.append(int(llama(np.array(out), scores(seed, len(out) - 3)).argmax()))
        assert up_to_stop(out[3:]) == expected


def exllamav3(seed):
    """A job as exllamav3 runs it: mask, sample, accept; every third step is taken back and done again."""
    out: list[int] = []
    job = ExLlamaV3Filter(V, [select()])
    assert not job.use_background_worker()
    while not job.is_completed():
        words = job.get_next_logit_mask()
        assert words.shape == (1, bits.word_count(V.size))
        token = int(apply_mask(scores(seed, len(out)), words[0].numpy()).argmax())
        job.accept_token(token)
        if len(out) % 3 == 2:
            assert job.rollback_tokens(1)
            job.accept_token(token)
        out.append(token)
    assert bits.to_ids(job.get_next_logit_mask()[0].numpy()) == [EOS]
    assert not job.rollback_tokens(len(out) + 1)
    job.reset()
    assert not job.is_completed()
    return out


@pytest.mark.covers("filters: other-engines")
def test_exllamav3_gives_the_text_of_the_plain_loop():
    pytest.importorskip("torch")
    for seed in range(12):
        assert up_to_stop(exllamav3(seed)) == up_to_stop(plain_loop(seed))
    with pytest.raises(FilterUsageError):
        ExLlamaV3Filter(Vocabulary(["a"]), [])


def test_exllamav3s_own_base_class_is_given_what_it_asks_for(monkeypatch):
    class Filter:
        def __init__(self, tokenizer, trigger_token=None, prefix_str=None, eos_after_completed=False):
            self.given = (tokenizer, trigger_token, prefix_str, eos_after_completed)

    monkeypatch.setitem(sys.modules, "exllamav3", SimpleNamespace(Filter=Filter))
    source = importlib.util.find_spec("exl_filters.adapters.exllamav3")
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    job = module.ExLlamaV3Filter(V, [select()], trigger_token=3)
    assert isinstance(job, Filter)
    assert job.given == (V, 3, None, True)


@pytest.fixture
def processor(monkeypatch):
    """vLLM's processor for a model whose tokenizer has the tests' vocabulary."""
    known = {"folder": V}
    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=known.__getitem__))
    )
    config = SimpleNamespace(model_config=SimpleNamespace(tokenizer="folder"))
    return VllmFilterProcessor(config, "cpu", False)


def params(spec=None):
    return SimpleNamespace(extra_args={"exl_filter": spec} if spec else None, stop_token_ids=None)


def update(removed=(), added=(), moved=()):
    return SimpleNamespace(removed=removed, added=added, moved=moved)


@pytest.mark.covers("filters: other-engines")
def test_vllm_protocol(processor):
    assert processor.is_argmax_invariant() is False
    spec = {"type": "select", "options": OPTIONS}
    outputs: dict[int, list[int]] = {0: [], 1: [], 2: []}
    added: list[Any] = [
        (0, params(spec), [], outputs[0]),
        (1, params(), [], outputs[1]),
        (2, params(spec), [], outputs[2]),
    ]
    processor.update_state(update(added=added))
    processor.update_state(None)
    where = {0: 0, 1: 1, 2: 2}  # request -> row
    for step in range(8):
        if step == 2:  # rows change places
            processor.update_state(update(moved=[(0, 2, SimpleNamespace(name="SWAP"))]))
            where[0], where[2] = 2, 0
        logits = np.stack([scores({row: r for r, row in where.items()}[row], step) for row in range(3)])
        before = logits.copy()
        processor.apply(logits)
        assert (logits[where[1]] == before[where[1]]).all()
        for request, row in where.items():
            outputs[request].append(int(logits[row].argmax()))
    for request in (0, 2):
        assert up_to_stop(outputs[request]) == up_to_stop(plain_loop(request))
    processor.update_state(update(removed=[0, 2]))
    logits = np.zeros((3, WIDTH), np.float32)
    assert np.isfinite(processor.apply(logits)).all()


def test_vllm_requests_are_checked_and_a_failing_filter_ends_its_row(processor):
    VllmFilterProcessor.validate_params(params())
    wrong: list[Any] = ["select", {"options": []}, {"type": 3}]
    for bad in wrong:
        with pytest.raises(FilterUsageError):
            VllmFilterProcessor.validate_params(params(bad))
    output: list[int] = []
    apart = {"type": "all-of", "filters": [{"type": "select", "options": [word]} for word in ("yes", "no")]}
    processor.update_state(update(added=[(0, params(apart), [], output)]))
    logits = processor.apply(np.zeros((1, WIDTH), np.float32))
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [EOS]
    assert isinstance(processor.failures[0], FilterDeadEnd)
    # A filter that cannot be made and one that can: the engine goes on, the row ends, and its failure moves with it.
    good = {"type": "select", "options": OPTIONS}
    broken: list[Any] = [{"type": "select", "options": 5}, {"type": "no-such"}, {"type": "grammar", "regex": "("}]
    for bad in (*broken, {"type": 3}):
        processor.update_state(update(removed=[0], added=[(0, params(bad), [], []), (1, params(good), [], [])]))
        assert list(processor.failures) == [0]
        logits = processor.apply(np.zeros((2, WIDTH), np.float32))
        assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [EOS]
        assert np.isfinite(logits[1]).sum() > 1
        processor.update_state(update(moved=[(0, 1, SimpleNamespace(name="SWAP"))]))
        assert list(processor.failures) == [1]
        processor.update_state(update(removed=[0, 1]))
        assert not processor.failures


def test_rows_that_share_a_past_and_change_places():
    tracker = RowTracker([select()], V)
    n, y, o, e = 3, 0, 4, 1

    def allowed(rows):
        return [None if m is None else sorted(TOKENS[i] for i in bits.to_ids(m)) for m in tracker.masks(rows)]

    start = ["n", "no", "y", "yes"]
    assert allowed([[], []]) == [start, start]
    assert allowed([[n], [y]]) == [["o"], ["e", "es"]]
    assert allowed([[y, e], [y, e], [n, o]]) == [["</s>", "s"], ["</s>", "s"], [" ", " way", "</s>"]]
    assert allowed([[n, o, EOS], [y, e, 2], [y, e, EOS]]) == [None, ["</s>"], None]
    assert allowed([[n, o, EOS, EOS], [y, e, 2, EOS], [y, e, EOS, EOS]]) == [None, None, None]
    assert allowed([[n, o, 6]]) == [["w"]]
    with pytest.raises(FilterUsageError):
        RowTracker([], Vocabulary(["a"]))


def test_filters_that_cannot_be_copied_serve_one_row():
    class Stranger:
        def begin(self, prefix): ...
        def feed(self, token): ...
        def next(self):
            return {0, 1}, set()

    tracker = RowTracker([Stranger()], V)
    tracker.masks([[]])
    with pytest.raises(FilterBusy):
        tracker.masks([[0], [1]])


@pytest.fixture(scope="module")
def model():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=EOS,
        pad_token_id=EOS,
        bos_token_id=None,
    )
    yield transformers.LlamaForCausalLM(config).eval()
    torch.set_num_threads(before)


@pytest.mark.covers("filters: other-engines")
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 3}, {"do_sample": True}]
)
def test_the_real_transformers(model, options):
    import torch

    from exl_filters.adapters.transformers import FilterLogitsProcessor

    processor = FilterLogitsProcessor([select()], V)
    for seed in range(3):
        torch.manual_seed(seed)
        prompt = torch.randint(0, EOS, (3, 4 + seed))
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            logits_processor=[processor],
            max_new_tokens=12,
            **options,
        )
        for row in out[:, prompt.shape[1] :].tolist():
            assert EOS in row
            assert text(up_to_stop(row)) in OPTIONS


def pieces_allowed():
    """(processor, allowed): allowed(*row) has the pieces that a transformers processor allows after a row."""
    torch = pytest.importorskip("torch")
    from exl_filters.adapters.transformers import FilterLogitsProcessor

    processor = FilterLogitsProcessor([select()], V)

    def allowed(*row):
        left = processor(torch.tensor([row]), torch.zeros(1, V.size))
        return {TOKENS[i] for i in torch.isfinite(left[0]).nonzero()[:, 0].tolist()}

    return processor, allowed


def test_the_next_turn_of_a_conversation_is_constrained_anew():
    """A prompt that holds the last prompt, its answer and more is a prompt; candidates taken back are not."""
    _, allowed = pieces_allowed()
    first, yes, no = {"y", "yes", "n", "no"}, TOKENS.index("yes"), TOKENS.index("no")
    prompt = [0, 1, 2]
    assert allowed(*prompt) == first
    assert allowed(*prompt, no) == {" ", " way", "</s>"}
    # Assisted generation: three candidates looked at, then taken back to the first.
    assert allowed(*prompt, no, TOKENS.index(" ")) == {"w"}
    assert allowed(*prompt, no, TOKENS.index(" way")) == {"</s>"}
    for more in ([yes, EOS, 5, 6], [yes, 5, 6], [no, EOS, 5, 6, 7, 8]):
        assert allowed(*prompt) == first
        assert allowed(*prompt, more[0])
        assert allowed(*prompt, *more) == first, more
        assert allowed(*prompt, *more, yes) == {"</s>"}
    assert allowed(*prompt) == first


def test_a_text_that_stopped_may_be_the_next_prompt_and_a_wrong_candidate_is_no_prompt():
    processor, allowed = pieces_allowed()
    first, yes, no = {"y", "yes", "n", "no"}, TOKENS.index("yes"), TOKENS.index("no")
    prompt = [0, 1, 2]
    assert allowed(*prompt) == first
    assert allowed(*prompt, yes) == {"</s>"}
    # The last call of that generation has not seen the stop token; the whole text comes back as a prompt.
    assert allowed(*prompt, yes, EOS) == first
    assert allowed(*prompt, yes, EOS, no) == {" ", " way", "</s>"}
    # A guess that is not allowed, two more after it, and all of them taken back.
    assert allowed(*prompt, yes, EOS, no, yes) == {"</s>"}
    assert allowed(*prompt, yes, EOS, no, yes, no) == {"</s>"}
    assert allowed(*prompt, yes, EOS, no, TOKENS.index(" ")) == {"w"}
    processor.reset()
    assert allowed(*prompt, yes, EOS, no, TOKENS.index(" "), yes) == first


def test_a_row_that_breaks_its_constraint_leaves_the_others_alone():
    torch = pytest.importorskip("torch")
    from exl_filters.adapters.transformers import FilterLogitsProcessor

    processor = FilterLogitsProcessor([select()], V)
    yes, no = TOKENS.index("yes"), TOKENS.index("no")
    processor(torch.tensor([[0, 1], [2, 3]]), torch.zeros(2, V.size))
    processor(torch.tensor([[0, 1, no], [2, 3, no]]), torch.zeros(2, V.size))
    left = processor(torch.tensor([[0, 1, no, yes], [2, 3, no, TOKENS.index(" ")]]), torch.zeros(2, V.size))
    assert [{TOKENS[i] for i in row.isfinite().nonzero()[:, 0].tolist()} for row in left] == [{"</s>"}, {"w"}]
