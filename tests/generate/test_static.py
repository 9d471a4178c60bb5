"""Base and streaming generator: exllamav2's calls on the dynamic generator's engine, which their results must equal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exl_core import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl_filters import ExLlamaV2SelectFilter
from exl_generate import (
    CapacityError,
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
    JobStateError,
    RequestError,
)
from exl_generate.dynamic.parameters import flag_of
from exl_generate.testing import ScriptedCache, ScriptedConfig, ScriptedModel, ScriptedTokenizer

TOKENIZER = ScriptedTokenizer(
    [chr(c) for c in range(97, 123)] + [" ", "\n", "the"] + [bytes([b]) for b in "é".encode()]
)
EOS = TOKENIZER.eos_token_id
Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()


def parts(script: Any = None, tokens: int = 256) -> tuple[ScriptedModel, ScriptedCache, ScriptedTokenizer]:
    model = ScriptedModel(ScriptedConfig(vocab_size=TOKENIZER.get_vocab_size(), max_seq_len=200), script)
    return model, ScriptedCache(model, max_seq_len=tokens), TOKENIZER


def spelling(text: str, after: int, end: int | None = None) -> Any:
    wanted = [*TOKENIZER.encode(text)[0].tolist(), *([] if end is None else [end])]
    return lambda context: wanted[len(context) - after] if 0 <= len(context) - after < len(wanted) else None


# ---- base ----


@pytest.mark.covers("generators: base-construction", "generators: base-arguments", "generators: base-unequal-prompts")
def test_simple_generation_equals_the_dynamic_generators() -> None:
    base, dynamic = ExLlamaV2BaseGenerator(*parts()), ExLlamaV2DynamicGenerator(*parts())
    assert not base.full()
    prompts = ["the cat", "a", "some other thing"]
    texts = base.generate_simple(prompts, Settings(), 20, seed=4, stop_token=None)
    assert texts == dynamic.generate(prompts, 20, gen_settings=Settings(), seed=4)
    one = base.generate_simple("a", Settings(), 20, seed=5, stop_token=None, completion_only=True)
    assert "a" + one == texts[1]
    assert base.sequence_ids is not None
    assert base.sequence_ids.shape == (1, 21)


@pytest.mark.parametrize(
    "junk",
    [5.5, "x", b"x", [object()], {"a": 1}, object(), torch.zeros(2)],
    ids=["float", "text", "bytes", "list", "dict", "object", "tensor"],  # the same in every process
)
def test_arguments_of_another_type_are_named_in_the_error(junk: Any) -> None:
    """By the static generators, as by the dynamic one: no TypeError out of the middle of something."""
    base, prompt = ExLlamaV2BaseGenerator(*parts()), TOKENIZER.encode("the cat")
    for name in ("num_tokens", "seed", "stop_token", "abort_event", "filters"):
        if (name, type(junk)) != ("filters", list):
            with pytest.raises(RequestError, match=f"{name} is"):
                base.generate_simple("a", **{"gen_settings": GREEDY, "num_tokens": 3, name: junk})
    stream = ExLlamaV2StreamingGenerator(*parts())
    for name in ("seed", "abort_event", "input_mask", "position_offsets"):
        if (name, type(junk)) != ("position_offsets", float):
            with pytest.raises(RequestError, match=f"{name} is"):
                stream.begin_stream_ex(prompt, GREEDY, **{name: junk})
    with pytest.raises(RequestError, match="ngram_preload"):
        stream.ngram_preload([0.5] if isinstance(junk, torch.Tensor) else junk)  # type: ignore[list-item]
    stream.begin_stream_ex(prompt, GREEDY)
    with pytest.raises(RequestError, match="ban_tokens"):
        stream.stream_ex(ban_tokens=[0.5] if isinstance(junk, torch.Tensor) else junk)  # type: ignore[list-item]
    for name in ("num_speculative_tokens", "speculative_ngram_min", "speculative_ngram_max_inf"):
        other = ExLlamaV2StreamingGenerator(*parts())
        setattr(other, name, junk)
        with pytest.raises(RequestError, match=f"{name} is"):
            other.begin_stream_ex(prompt, GREEDY)
    with pytest.raises(RequestError, match="cancel takes a job"):
        stream.engine().cancel(junk)


def test_a_number_of_numpy_is_a_seed() -> None:
    base, dynamic = ExLlamaV2BaseGenerator(*parts()), ExLlamaV2DynamicGenerator(*parts())
    want = dynamic.generate(["a", "b"], 8, gen_settings=Settings(), seed=7)
    assert dynamic.generate(["a", "b"], 8, gen_settings=Settings(), seed=np.int64(7)) == want  # type: ignore[arg-type]
    assert base.generate_simple(["a", "b"], Settings(), 8, seed=np.int64(7), stop_token=None) == want  # type: ignore[arg-type]


def test_other_numbers_are_numbers() -> None:
    """numpy's and torch's, and a count of drafts where there is nothing to draft with."""
    none: Any = None
    base = ExLlamaV2BaseGenerator(*parts())
    stream = ExLlamaV2StreamingGenerator(*parts(), num_speculative_tokens=none)
    for stop, same in ((-1, (np.int64(-1), torch.tensor(-1))), (7, (np.int64(7), torch.tensor(7)))):
        want = base.generate_simple("a", GREEDY, 8, stop_token=stop)
        for one in same:
            assert base.generate_simple("a", GREEDY, 8, stop_token=one) == want  # type: ignore[arg-type]
    assert [flag_of("x", one) for one in (np.int64(1), 1.0, 0.0, None)] == [True, True, False, False]
    stream.speculative_prob_threshold = np.float32(0.5)  # type: ignore[assignment]
    stream.speculative_ngram_min = np.int64(2)  # type: ignore[assignment]
    stream.begin_stream_ex(TOKENIZER.encode("the cat"), GREEDY)
    token = stream.stream_ex()["chunk_token_ids"].reshape(-1)
    stream.begin_stream_ex(TOKENIZER.encode("the cat"), GREEDY)
    for bans in (token[:1], [token[0]]):
        assert int(stream.stream_ex(ban_tokens=bans)["chunk_token_ids"][0, 0]) != int(token[0])


@pytest.mark.covers("generators: base-stop-tokens")
def test_stop_token_rules() -> None:
    for stop, text in ((-1, "hi"), (None, "hi"), (TOKENIZER.single_id("i"), "h")):
        base = ExLlamaV2BaseGenerator(*parts(spelling("hi", 1, EOS)))
        got = base.generate_simple("z", GREEDY, 5, stop_token=stop, completion_only=True)
        assert got.startswith(text)
        assert (len(got) > 2) == (stop is None)


@pytest.mark.covers("generators: base-left-cut")
def test_truncation_is_reported() -> None:
    base = ExLlamaV2BaseGenerator(*parts())
    with pytest.warns(UserWarning, match="cut on the left"):
        text = base.generate_simple("ab" * 95, GREEDY, 20)
    assert base.truncated_tokens == [10]
    assert text.startswith("ab" * 90)
    assert base.full()
    with pytest.raises(CapacityError, match="num_tokens"):
        base.generate_simple("ab", GREEDY, 200)


@pytest.mark.covers("generators: base-healing")
def test_healing_counts_as_one_token() -> None:
    """The healed one is sampled in the place of the prompt's last; of its text the prompt shows the beginning."""
    base = ExLlamaV2BaseGenerator(*parts(lambda c: TOKENIZER.single_id("the") if len(c) == 1 else None))
    text = base.generate_simple("at", GREEDY, 3, token_healing=True)
    assert base.sequence_ids is not None
    assert base.sequence_ids.shape[1] == 1 + 3
    tokens = base.sequence_ids[0].tolist()
    assert tokens[:2] == [TOKENIZER.single_id("a"), TOKENIZER.single_id("the")]
    assert text == TOKENIZER.decode(base.sequence_ids[0])
    assert text.startswith("athe")
    rest = base.generate_simple("at", GREEDY, 3, token_healing=True, completion_only=True)
    assert rest == text.removeprefix("at")
    assert base.generate_simple(["at", "at"], GREEDY, 3, token_healing=True, completion_only=True) == [rest, rest]


@pytest.mark.covers("generators: base-arguments", "filters: cfg-pairs")
def test_filters_for_one_and_for_many_prompts() -> None:
    base = ExLlamaV2BaseGenerator(*parts())
    choose = [ExLlamaV2SelectFilter(None, TOKENIZER, ["cat", "dog"])]
    texts = base.generate_simple(["a", "b", "c"], GREEDY, 9, filters=choose, completion_only=True)
    assert set(texts) <= {"cat", "dog"}
    texts = base.generate_simple(["a", "b"], GREEDY, 9, filters=[choose, None], completion_only=True)
    assert texts[0] in ("cat", "dog")
    assert len(texts[1]) > 3
    with pytest.raises(RequestError, match="3 prompts"):
        base.generate_simple(["a", "b", "c"], GREEDY, 9, filters=[choose, None])


@pytest.mark.covers("generators: base-abort")
def test_abort_before_and_during_generation() -> None:
    event = threading.Event()
    base = ExLlamaV2BaseGenerator(*parts(lambda c: event.set() if len(c) > 9 else None))
    got = base.generate_simple("abc", GREEDY, 100, abort_event=event)
    assert 5 < len(got) < 20
    assert base.generate_simple(["abc"], GREEDY, 100, abort_event=event) == [""], "an event set before the call counts"


@pytest.mark.covers("generators: base-arguments")
def test_base_refusals() -> None:
    base = ExLlamaV2BaseGenerator(*parts())
    with pytest.raises(RequestError, match="loras holds a object"):
        base.generate_simple("a", GREEDY, 3, loras=[object()])
    for prompt, rows in (("a", torch.zeros(1, 2, 8)), ("a{{EMBED_HERE}}", torch.zeros(2, 2, 8))):
        with pytest.raises(RequestError):
            base.generate_simple(prompt, GREEDY, 3, input_embeddings=rows)
    with pytest.raises(RequestError):
        base.generate_simple([1], GREEDY, 3)  # type: ignore[list-item]
    base.warmup()


# ---- streaming ----


def stream(generator: ExLlamaV2StreamingGenerator, text: str, limit: int = 300, **kw: Any) -> list[dict[str, Any]]:
    kw.setdefault("gen_settings", GREEDY)
    generator.begin_stream_ex(TOKENIZER.encode(text), **kw)
    found = []
    for _ in range(limit):
        found.append(generator.stream_ex())
        if found[-1]["eos"]:
            break
    return found


def naive(model: ScriptedModel, prompt: str, new: int) -> list[int]:
    context = TOKENIZER.encode(prompt)[0].tolist()
    start = len(context)
    for _ in range(new):
        context.append(int(model.logits(np.array(context)).argmax()))
    return context[start:]


def ids_of(results: list[dict[str, Any]]) -> list[int]:
    return [int(i) for r in results for i in r["chunk_token_ids"][0]]


@pytest.mark.covers("generators: stream-begin", "generators: stream-results")
def test_one_call_one_token() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts())
    results = stream(generator, "hello", 12, return_probabilities=True, return_top_tokens=2, return_logits=True)
    assert ids_of(results) == naive(generator.model, "hello", 12)  # type: ignore[arg-type]
    first = results[0]
    assert (first["probs"].shape, first["top_tokens"].shape, first["logits"].shape) == ((1, 1), (1, 1, 2), (1, 1, 64))
    assert generator.sequence_ids is not None
    assert generator.sequence_ids.shape == (1, 17)


def test_a_draft_model_that_no_cache_can_be_made_for_needs_a_draft_cache() -> None:
    model, cache, tokenizer = parts()
    with pytest.raises(RequestError, match="draft_cache is None; pass a cache of this ScriptedModel"):
        ExLlamaV2StreamingGenerator(model, cache, tokenizer, ScriptedModel(model.config))


def test_making_a_generator_does_not_compute_the_content_digest() -> None:
    """The digest of a model may take long: parts are checked by their classes."""

    class Digested(ScriptedModel):
        @property
        def content_digest(self) -> bytes:
            raise AssertionError

    model = Digested()
    assert ExLlamaV2DynamicGenerator(model, ScriptedCache(model), TOKENIZER) is not None


@pytest.mark.parametrize("how", ["model", "ngram"])
@pytest.mark.covers(
    "generators: stream-construction",
    "generators: stream-draft-model",
    "generators: stream-ngrams",
    "generators: stream-draft-statistics",
)
def test_speculation_saves_passes_not_calls(how: str) -> None:
    script = lambda c: TOKENIZER.single_id("abcd"[len(c) % 4])  # noqa: E731
    model, cache, tokenizer = parts(script)
    draft = ScriptedModel(model.config, script)
    kw = {"draft_model": draft, "draft_cache": ScriptedCache(draft, max_seq_len=256)} if how == "model" else {}
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer, **kw)  # type: ignore[arg-type]
    generator.speculative_ngram = how == "ngram"
    results = stream(generator, "hello", 40)
    assert [len(r["chunk_token_ids"][0]) for r in results] == [1] * 40
    assert ids_of(results) == naive(model, "hello", 40)
    assert sum(not pre for _, _, pre in model.calls) < 30
    efficiency, accuracy, total, drafted, accepted = generator.get_sd_stats()
    assert 0 < accuracy <= 1
    assert efficiency > 0.3
    assert accepted <= drafted
    assert total >= 40
    generator.reset_sd_stats()
    assert generator.get_sd_stats() == (0.0, 0.0, 0, 0, 0)


@pytest.mark.covers("generators: stream-draft-model")
def test_a_draft_threshold_stops_unlikely_guesses() -> None:
    model, cache, tokenizer = parts()
    draft = ScriptedModel(model.config)
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer, draft, ScriptedCache(draft, max_seq_len=256))
    generator.speculative_prob_threshold = 1.1
    stream(generator, "hello", 10)
    assert generator.total_draft_tokens == 0


@pytest.mark.covers("generators: stream-ngrams")
def test_preloaded_ngrams_are_consulted() -> None:
    model, cache, tokenizer = parts(lambda c: TOKENIZER.single_id("abcdefgh"[len(c) % 8]))
    generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    generator.speculative_ngram = True
    generator.ngram_preload(TOKENIZER.encode("abcdefgh" * 3))
    stream(generator, "z", 7)
    assert generator.accepted_draft_tokens > 2


@pytest.mark.parametrize("bad", [-1, TOKENIZER.get_vocab_size()])
def test_preloaded_ngrams_are_tokens_of_the_model(bad: int) -> None:
    """Else a guess would end the stream that made it."""
    generator = ExLlamaV2StreamingGenerator(*parts())
    with pytest.raises(RequestError, match=rf"token id {bad}; the vocabulary has ids 0 to"):
        generator.ngram_preload([3, 4, bad])
    assert generator.ngram_preloaded is None


@pytest.mark.covers("generators: stream-stop-conditions", "generators: stream-stop-strings")
def test_stop_conditions_replace_eos() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts(spelling("hi yo", 1, EOS)))
    results = stream(generator, "z")
    assert "".join(r["chunk"] for r in results) == "hi yo"
    assert ids_of(results) == TOKENIZER.encode("hi yo")[0].tolist()
    generator.set_stop_conditions([" y"])
    assert "".join(r["chunk"] for r in stream(generator, "z")) == "hi"
    with pytest.raises(JobStateError, match="has ended"):
        generator.stream_ex()
    mistakes: list[Any] = ["text", [None], [""]]
    for wrong in mistakes:
        with pytest.raises(RequestError):
            generator.set_stop_conditions(wrong)


@pytest.mark.covers("generators: stream-banned-strings")
def test_banned_strings_report_what_was_suppressed() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts(spelling("bad", 1)))
    results = stream(generator, "z", 9, banned_strings=["BAD"])
    assert [r["suppressed"] for r in results if "suppressed" in r] == ["bad"]
    assert "bad" not in "".join(r["chunk"] for r in results)


@pytest.mark.covers("generators: stream-begin", "generators: stream-banned-strings")
@pytest.mark.parametrize("healing", [False, True])
def test_requested_results_are_there_without_a_token(healing: bool) -> None:
    """Held text and text taken back: a call without a token has tensors of none, and the older form all its values."""
    generator = ExLlamaV2StreamingGenerator(*parts(spelling("bad hi yo", 2, EOS)))
    generator.set_stop_conditions(["yo"])
    wanted: dict[str, Any] = {
        "return_probabilities": True,
        "return_top_tokens": 3,
        "return_logits": True,
        "token_healing": healing,
    }
    results = stream(generator, "zz", 30, banned_strings=["BAD"], **wanted)
    counts = [r["chunk_token_ids"].shape[1] for r in results]
    assert 0 in counts
    assert max(counts) > 0
    for result, k in zip(results, counts, strict=True):
        assert result["probs"].shape == (1, k)
        assert result["top_tokens"].shape == result["top_probs"].shape == (1, k, 3)
        assert result["top_tokens"].dtype == torch.int64
        assert result["logits"].shape == (1, k, 64)  # 34 ids, padded
    generator.begin_stream_ex(TOKENIZER.encode("zz"), GREEDY, banned_strings=["BAD"], **wanted)
    for _ in results:
        _, ended, ids, probs, logits = generator.stream()
        assert probs.shape == ids.shape == logits.shape[:2]
        if ended:
            break


@pytest.mark.covers("generators: stream-ban-tokens")
def test_tokens_banned_for_one_call() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts(spelling("aaaa", 1)))
    generator.begin_stream_ex(TOKENIZER.encode("z"), GREEDY)
    bans: Any = [TOKENIZER.single_id("a")]
    chunks = [generator.stream_ex(ban_tokens=b)["chunk"] for b in (None, bans, None)]
    assert chunks[0] == chunks[2] == "a" != chunks[1]
    assert bans == [TOKENIZER.single_id("a")]


@pytest.mark.covers("generators: stream-healing")
def test_healing_gives_two_tokens_at_once_and_hides_the_healed_one() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts(lambda c: TOKENIZER.single_id("the") if len(c) == 1 else None))
    generator.begin_stream_ex(TOKENIZER.encode("at"), GREEDY, token_healing=True)
    first = generator.stream_ex()
    assert first["chunk"].startswith("he")
    assert first["chunk_token_ids"].shape == (1, 1)


@pytest.mark.covers("generators: stream-begin")
def test_position_offsets_agree_with_the_mask_or_are_rejected() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts())
    ids, settings = torch.tensor([[3, 4, 5], [0, 3, 4]]), Settings(cfg_scale=1.5)
    mask = torch.tensor([[0.0, 0, 0], [-torch.inf, 0, 0]])
    generator.begin_stream_ex(ids, settings, input_mask=mask, position_offsets=torch.tensor([[0], [-1]]))
    assert generator.stream_ex()["chunk_token_ids"].shape[1] <= 1
    with pytest.raises(RequestError, match=r"\[0, -2\]; with this input_mask it must be \[0, -1\]"):
        generator.begin_stream_ex(ids, settings, input_mask=mask, position_offsets=torch.tensor([0, -2]))
    with pytest.raises(RequestError, match="position_offsets"):
        generator.begin_stream_ex(ids[:1], Settings(), position_offsets=torch.tensor([-1]))


@pytest.mark.covers("generators: stream-healing")
def test_the_healed_token_stays_hidden_when_its_text_was_held() -> None:
    the, x, y = (TOKENIZER.single_id(piece) for piece in ("the", "x", "y"))
    generator = ExLlamaV2StreamingGenerator(*parts(lambda c: {1: the, 2: x, 3: y}.get(len(c))))
    generator.set_stop_conditions(["hexq"])
    generator.begin_stream_ex(TOKENIZER.encode("at"), GREEDY, token_healing=True, return_probabilities=True)
    first, second = generator.stream_ex(), generator.stream_ex()
    assert (first["chunk"], second["chunk"]) == ("", "hexy")
    assert [first["chunk_token_ids"].tolist(), second["chunk_token_ids"].tolist()] == [[[]], [[x, y]]]
    assert second["probs"].shape == (1, 2)
    generator.set_stop_conditions(["he"])
    generator.begin_stream_ex(TOKENIZER.encode("at"), GREEDY, token_healing=True)
    last = generator.stream_ex()
    assert (last["chunk"], last["eos"], last["chunk_token_ids"].tolist()) == ("", True, [[]])


@pytest.mark.covers("generators: base-construction")
def test_the_stream_ends_where_the_model_is_full() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts())
    generator.set_stop_conditions([])
    results = stream(generator, "a" * 190)
    assert len(results) == 10
    assert generator.full()
    with pytest.raises(CapacityError):
        generator.begin_stream_ex(TOKENIZER.encode("a" * 200), GREEDY)


@pytest.mark.covers("generators: stream-prefix-reuse")
def test_a_common_beginning_is_not_computed_again() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts(tokens=200))
    stream(generator, "abcdefgh" * 10, 5)
    generator.model.calls.clear()  # type: ignore[attr-defined]
    stream(generator, "abcdefgh" * 10 + "xyz", 1)
    assert sum(q for _, q, pre in generator.model.calls if pre) <= 4  # type: ignore[attr-defined]


@pytest.mark.covers("generators: stream-abort")
def test_abort_in_prefill_leaves_a_usable_generator() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts())
    event = threading.Event()
    event.set()
    generator.begin_stream_ex(TOKENIZER.encode("abc" * 50), GREEDY, abort_event=event)
    assert generator.stream_ex()["eos"]
    assert ids_of(stream(generator, "hello", 5)) == naive(generator.model, "hello", 5)  # type: ignore[arg-type]


@pytest.mark.covers("generators: stream-begin", "generators: stream-results", "generators: stream-cfg")
def test_cfg_rows_and_legacy_calls() -> None:
    generator = ExLlamaV2StreamingGenerator(*parts())
    pair = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]])
    mask = torch.zeros(2, 4)
    mask[1, :2] = -torch.inf
    generator.begin_stream(pair, Settings.greedy(cfg_scale=1.5), input_mask=mask)
    chunk, eos, ids = generator.stream()
    dynamic = ExLlamaV2DynamicGenerator(*parts(tokens=512))
    want = dynamic.generate(("abcd", "ef"), 1, gen_settings=Settings.greedy(cfg_scale=1.5), completion_only=True)
    assert (chunk, eos, ids.shape) == (want, False, (1, 1))
    with pytest.raises(RequestError, match="go together"):
        generator.begin_stream_ex(pair, GREEDY)
    with pytest.raises(JobStateError, match="begin_stream_ex"):
        ExLlamaV2StreamingGenerator(*parts()).stream_ex()


# ---- a real model, and a cache of several rows ----


def test_base_generator_on_a_cache_of_several_rows() -> None:
    folder = Path(__file__).parents[1] / "golden" / "data" / "pylib-4m-exl2-4.5"
    config = ExLlamaV2Config(folder)
    model = ExLlamaV2(config)
    model.load()
    tokenizer = ExLlamaV2Tokenizer(config)
    base = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, batch_size=3, max_seq_len=300), tokenizer)
    prompts = ["import os\n" * 20, "def f(x):", "class A"]
    dynamic = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer)
    assert base.generate_simple(prompts, GREEDY, 24) == dynamic.generate(prompts, 24, gen_settings=GREEDY)
    again = base.generate_simple(prompts[0] + "x", GREEDY, 24)
    assert again == dynamic.generate(prompts[0] + "x", 24, gen_settings=GREEDY)
