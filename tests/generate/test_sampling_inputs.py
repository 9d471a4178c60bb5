"""Arguments of the sampler: meaningless settings, token sets as text, sampling without a request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from exl_filters import ExLlamaV2SelectFilter
from exl_generate import ExLlamaV2DynamicJob, ExLlamaV2Sampler, NoCandidatesError, RequestError
from exl_generate.sampling import RequestRandom, RequestSampler, SparseBias, Vocabulary
from exl_generate.testing import ScriptedConfig, ScriptedTokenizer

Settings = ExLlamaV2Sampler.Settings
NEUTRAL: dict[str, Any] = {"token_repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 0.0}
PIECES = ["a", "b", "c", "d\n", "\n", "e.", "User", ":", "ab"]
TOKENIZER = ScriptedTokenizer(PIECES, ScriptedConfig(vocab_size=3 + len(PIECES)))
ID = {piece: 3 + i for i, piece in enumerate(PIECES)}
WIDTH = 32


def sampler(**fields: Any) -> RequestSampler:
    return RequestSampler(Settings(**{**NEUTRAL, **fields}), Vocabulary.of(TOKENIZER), 0)


def row(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (1, 1, WIDTH)).astype(np.float32))


# ---- settings ----

NUMBERS = [
    "token_repetition_penalty",
    "token_frequency_penalty",
    "token_presence_penalty",
    "temperature",
    "smoothing_factor",
    "min_temp",
    "max_temp",
    "temp_exponent",
    "top_p",
    "top_a",
    "min_p",
    "tfs",
    "typical",
    "skew",
    "mirostat_tau",
    "mirostat_eta",
    "dry_base",
    "dry_multiplier",
    "xtc_probability",
    "xtc_threshold",
    "cfg_scale",
]
COUNTS = [
    "token_repetition_range",
    "token_repetition_decay",
    "top_k",
    "dry_allowed_length",
    "dry_range",
    "dry_max_ngram",
]


@pytest.mark.covers("generators: settings-fields")
@pytest.mark.parametrize("name", NUMBERS + COUNTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, 1j, [1.0]], ids=str)
def test_the_error_names_a_setting_that_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"Settings.{name} is .*; it must be"):
        sampler(**{name: value})


def sparse(ids: Any, *, values: Any = None, dtype: torch.dtype = torch.int32, rest: Any = 0.0) -> SparseBias:
    """A bias as it is not meant to be made."""
    return SparseBias(torch.tensor(ids, dtype=dtype), torch.zeros(len(ids)) if values is None else values, rest)


@pytest.mark.covers("generators: settings-fields")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"top_k": 2.5}, "whole number"),
        ({"dry_sequence_breakers": "\n"}, "set of token ids or texts"),
        ({"dry_sequence_breakers": [1.5]}, "set of token ids or texts"),
        ({"dry_sequence_breakers": {-1}}, "set of token ids or texts"),
        ({"xtc_ignore_tokens": [4]}, "set of token ids"),
        ({"xtc_ignore_tokens": frozenset({"a"})}, "set of token ids"),
        ({"token_bias": [0.0] * 64}, "1-D tensor"),
        ({"token_bias": torch.full((64,), math.inf)}, r"\+inf"),
        ({"token_bias": {3: math.nan}}, "NaN"),
        ({"token_bias": SparseBias.of({3: 0.0}, rest=math.inf)}, r"\+inf"),
        ({"token_bias": sparse([-1, 3])}, "names id -1; ids begin at 0"),
        ({"token_bias": sparse([12, 3])}, "names id 12; the vocabulary has 12 ids"),
        ({"token_bias": sparse([5, 3, 5])}, "names id 5 twice"),
        ({"token_bias": sparse([5, 3], values=torch.zeros(3))}, "2 ids and 3 values"),
        ({"token_bias": sparse([5, 3], values=torch.zeros(2).double())}, "values is torch.float64"),
        ({"token_bias": sparse([5, 3], values=torch.zeros(1, 2))}, r"values is torch.float32 \[1, 2\]"),
        ({"token_bias": sparse([5, 3], values=[0.0, 0.0])}, "values is list"),
        ({"token_bias": sparse([5, 3], values=torch.zeros(2, device="meta"))}, "on meta"),
        ({"token_bias": sparse([[5, 3]])}, r"ids is torch.int32 \[1, 2\]"),
        ({"token_bias": sparse([5, 3], dtype=torch.int64)}, "ids is torch.int64"),
        ({"token_bias": sparse([5, 3], rest="0")}, "rest is '0'"),
        ({"token_bias": sparse([5, 3], rest=math.nan)}, "NaN"),
        ({"token_bias": {-1: 0.0}}, "maps -1 to 0.0"),
        ({"token_bias": {"a": 0.0}}, "maps 'a' to 0.0"),
        ({"token_bias": {3: "1"}}, "maps 3 to '1'"),
        ({"token_bias": {12: 0.0}}, "names id 12; the vocabulary has 12 ids"),
        ({"token_bias": torch.zeros(11)}, "has 11 values, the vocabulary 12 ids"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": {12}}, "outside the vocabulary of 12"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": [""]}, "empty string"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["\u00e9"]}, "cannot be spelled"),
        ({"temperature_last": 1}, "True or False"),
        ({"post_sampling_hooks": print}, "list of functions"),
    ],
    ids=str,
)
def test_settings_of_the_wrong_form_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        sampler(**fields)
    with pytest.raises(RequestError):  # and the same after a copy
        RequestSampler(Settings(**{**NEUTRAL, **fields}).clone(), Vocabulary.of(TOKENIZER))


def test_the_error_names_an_attribute_that_is_no_setting() -> None:
    class Own(Settings):  # type: ignore[misc, valid-type]
        pass

    for name, text in (("temprature", "did you mean temperature"), ("filters", "the job"), ("foo", "would do nothing")):
        settings = Settings()
        setattr(settings, name, [1])
        with pytest.raises(RequestError, match=rf"Settings\.{name}.*{text}"):
            ExLlamaV2DynamicJob(torch.tensor([[1]]), 1, gen_settings=settings)
        setattr(settings, name, torch.zeros(()))
        with pytest.raises(RequestError, match=rf"Settings\.{name}"):
            ExLlamaV2DynamicJob(torch.tensor([[1]]), 1, gen_settings=settings)
        setattr(settings, name, [])  # as scripts do that begin with none
        vars(settings)["_note"] = "mine"
        ExLlamaV2DynamicJob(torch.tensor([[1]]), 1, gen_settings=settings)
    own = Own()
    own.note = "mine"
    ExLlamaV2DynamicJob(torch.tensor([[1]]), 1, gen_settings=own)


def test_numbers_of_numpy_are_numbers() -> None:
    sampler(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.5))
    sampler(top_k=10**30, token_repetition_range=10**30, dry_range=10**30, dry_multiplier=1.0)


@pytest.mark.covers("generators: logit-bias")
def test_a_bias_must_reach_every_id_and_may_reach_further() -> None:
    bias = torch.zeros(12, dtype=torch.float64)
    bias[5:] = -math.inf
    for given in (bias, torch.cat([bias, torch.full((90,), 9.0)])):
        ids, _ = sampler(token_bias=given).distribution(row()[0, 0], np.zeros(0, dtype=np.int64))
        assert set(ids.tolist()) == {0, 1, 2, 3, 4}


def test_a_bias_may_name_its_ids() -> None:
    dense = torch.zeros(12)
    dense[3], dense[7] = 2.5, -math.inf
    context = np.zeros(0, dtype=np.int64)
    want = sampler(token_bias=dense).distribution(row()[0, 0], context)
    for given in ({3: 2.5, 7: -math.inf}, SparseBias.of({7: -math.inf, 3: 2.5})):
        got = sampler(token_bias=given).distribution(row()[0, 0], context)
        assert got[0].tolist() == want[0].tolist()
        assert got[1].tolist() == want[1].tolist()
    allowed, _ = sampler(token_bias=SparseBias.of({2: 0.0, 5: 0.0}, rest=-math.inf)).distribution(row()[0, 0], context)
    assert allowed.tolist() == [2, 5]


def test_a_job_s_bias_is_its_own() -> None:
    given = {3: 2.5}
    settings = Settings(token_bias=given)
    copied = settings.clone()
    given[4] = 1.0
    assert copied.token_bias == {3: 2.5}
    sparse_bias = SparseBias.of({3: 2.5})
    copied = Settings(token_bias=sparse_bias).clone()
    sparse_bias.values[0] = 1.0
    assert isinstance(copied.token_bias, SparseBias)
    assert copied.token_bias.values.tolist() == [2.5]
    with torch.inference_mode():
        assert isinstance(Settings(token_bias=SparseBias.of({3: 2.5})).clone().token_bias, SparseBias)


@pytest.mark.covers("generators: random-numbers")
def test_seeds_of_any_size_are_taken_and_others_refused() -> None:
    numbers = {RequestRandom(seed).uniform(0) for seed in (0, 2**70, 2**70 + 1, -(2**70), 10**5000, 10**5000 + 1)}
    assert len(numbers) == 6
    assert RequestRandom(np.int64(7)).uniform(3) == RequestRandom(7).uniform(3)
    for seed in (1.5, "1", True):
        with pytest.raises(RequestError, match="must be an int"):
            RequestRandom(seed)  # type: ignore[arg-type]


@pytest.mark.covers("generators: dry")
def test_dry_breakers_given_as_text_stop_a_repeat() -> None:
    def penalised(breakers: Any, *text: str) -> bool:
        context = np.array([ID[piece] for piece in text], dtype=np.int64)
        fields = {"dry_multiplier": 5.0, "dry_allowed_length": 2, "dry_sequence_breakers": breakers}
        ids, p = sampler(**fields).distribution(torch.zeros(WIDTH), context)
        by_id = dict(zip(ids.tolist(), p.tolist(), strict=True))
        return by_id[ID["c"]] < by_id[ID["b"]] / 2

    plain = ("a", "b", "c", "a", "b")
    assert penalised([], *plain)
    assert penalised(["\n"], *plain)
    for newline in ("\n", "d\n"):
        broken = ("a", newline, "c", "a", newline)
        assert penalised([], *broken)
        assert not penalised(["\n"], *broken), "every piece with the text in it breaks"
    colon = ("a", ":", "c", "a", ":")
    assert penalised(["\n"], *colon)
    assert not penalised(["User:"], *colon), "of a text that spans pieces the last one breaks"
    assert not penalised({ID[":"], "\n"}, *colon)


# ---- sampling without a request ----


def draw(settings: Any, logits: torch.Tensor | None = None, random: float = 0.3, **more: Any) -> Any:
    ids = torch.zeros((1 if logits is None else len(logits), 1), dtype=torch.int64)
    return ExLlamaV2Sampler.sample(row() if logits is None else logits, settings, ids, random, TOKENIZER, **more)


@pytest.mark.covers("generators: settings-fields", "generators: top-tokens")
def test_static_sample_returns_the_five_values() -> None:
    logits = row()
    kept = logits.clone()
    tokens, top, top_p, p, end = draw(Settings(**NEUTRAL), logits, return_top_tokens=4)
    assert (tokens.shape, tokens.dtype, p.shape, end) == ((1, 1), torch.int64, (1, 1), False)
    assert (top.shape, top_p.shape) == ((1, 1, 4), (1, 1, 4))
    want = torch.softmax(logits[0, 0, :12].double(), 0)
    assert float(p) == pytest.approx(float(want[tokens[0, 0]]), rel=1e-5)
    assert top[0, 0].tolist() == want.topk(4).indices.tolist()
    assert torch.equal(logits, kept)
    plain = draw(Settings(**NEUTRAL), logits)
    assert torch.equal(plain[0], tokens)
    assert plain[1].device.type == plain[2].device.type == "meta"


@pytest.mark.covers("generators: logit-bias")
def test_static_sample_counts_every_constraint() -> None:
    every = {
        int(draw(Settings(**NEUTRAL), random=r / 50, prefix_token=torch.tensor([[ID["a"]]]))[0]) for r in range(50)
    }
    assert every == {ID["a"], ID["ab"]}
    greedy = Settings.greedy()
    best = int(draw(greedy)[0])
    assert int(draw(greedy, blocked_tokens=[best])[0]) != best
    with pytest.raises(NoCandidatesError):
        draw(Settings(token_bias=torch.full((12,), -math.inf)))
    with pytest.raises(RequestError, match="pass a positive and a negative one"):
        draw(Settings(cfg_scale=2.0))
    with pytest.raises(RequestError, match=r"\[0, 1\)"):
        draw(greedy, random=1.0)


@pytest.mark.covers("generators: logit-bias")
def test_static_sample_obeys_filters() -> None:
    filter_ = ExLlamaV2SelectFilter(None, TOKENIZER, ["ab", "c"])
    filter_.begin("")
    seen = {int(draw(Settings(**NEUTRAL), random=r / 50, filters=[filter_])[0]) for r in range(50)}
    assert seen == {ID["a"], ID["ab"], ID["c"]}


@pytest.mark.covers("generators: mirostat", "generators: cfg-mix")
def test_static_sample_of_a_batch_and_of_a_pair() -> None:
    two = torch.cat([row(1), row(2)])
    settings = Settings(**NEUTRAL, mirostat=True, mirostat_tau=3.0)
    tokens = draw(settings, two)[0]
    assert tokens.shape == (2, 1)
    assert settings.mirostat_mu is not None
    assert len(settings.mirostat_mu) == 2
    assert int(tokens[0, 0]) == int(draw(Settings(**NEUTRAL, mirostat=True, mirostat_tau=3.0), two[:1])[0])
    mixed = draw(Settings(**NEUTRAL, cfg_scale=1.0), two)
    assert mixed[0].shape == (1, 1)
    assert torch.equal(mixed[0], draw(Settings(**NEUTRAL), two[:1])[0])


@pytest.mark.covers("generators: dry", "generators: xtc")
def test_default_sets_and_dry_by_hand() -> None:
    assert ExLlamaV2Sampler.get_dry_default_sequence_breaker_tokens(TOKENIZER) == {
        0,
        1,
        2,
        *(ID[p] for p in ("d\n", "\n", "e.")),
    }
    ignored = ExLlamaV2Sampler.get_default_xtc_mask_tokens(TOKENIZER)
    assert ignored == {0, 1, 2, ID["d\n"], ID["\n"]}
    assert ExLlamaV2Sampler.get_xtc_mask_tensor(TOKENIZER, 12, ignored).nonzero().flatten().tolist() == sorted(ignored)
    logits = torch.zeros(1, 1, WIDTH)
    context = torch.tensor([[ID[p] for p in ("a", "b", "c", "a", "b")]])
    ExLlamaV2Sampler.apply_dry(Settings(dry_multiplier=0.8), TOKENIZER, context, logits)
    assert logits.nonzero().tolist() == [[0, 0, ID["c"]]]
    assert float(logits.min()) == pytest.approx(-0.8)


@pytest.mark.parametrize("fields", [{}, {"top_k": 1}, {"dry_multiplier": 1.0, "dry_sequence_breakers": {4}}])
def test_sampling_without_a_tokenizer_chooses_of_the_whole_row(fields: dict[str, Any]) -> None:
    settings = Settings(**{**NEUTRAL, **fields})
    logits, context = row()[..., :12].contiguous(), torch.tensor([[3, 4, 3]])
    for draw in (0.1, 0.5, 0.9):
        found = ExLlamaV2Sampler.sample(logits, settings, context, draw, None)
        assert [int(t) for t in found[:1]] == [
            int(ExLlamaV2Sampler.sample(logits, settings, context, draw, TOKENIZER)[0])
        ]
    bias = torch.full((12,), -math.inf)
    bias[7] = 0
    settings.token_bias = bias
    assert int(ExLlamaV2Sampler.sample(logits, settings, context, 0.5, tokenizer=None)[0]) == 7


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"xtc_probability": 0.5}, {}),
        ({"dry_multiplier": 0.5}, {}),
        ({"dry_multiplier": 0.5, "dry_sequence_breakers": {"a"}}, {}),
        ({}, {"prefix_token": torch.tensor([[3]])}),
    ],
)
def test_settings_that_need_token_texts_ask_for_the_tokenizer(fields: dict[str, Any], options: dict[str, Any]) -> None:
    settings = Settings(**{**NEUTRAL, **fields})
    with pytest.raises(RequestError, match="tokenizer is None"):
        ExLlamaV2Sampler.sample(row(), settings, torch.tensor([[3, 4]]), 0.5, None, **options)
