"""The sampler against a plain float64 reference, golden cases, and counted draws."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples, trials
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_generate import ExLlamaV2Sampler, NoCandidatesError, RequestError
from exl_generate.sampling import Constraint, RequestRandom, RequestSampler, Vocabulary, transforms
from exl_generate.testing import ScriptedConfig, ScriptedTokenizer

Settings = ExLlamaV2Sampler.Settings
VOCAB = 40
NEUTRAL: dict[str, Any] = {"token_repetition_penalty": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 0.0}
CONTEXT = np.array([5, 9, 7, 5, 9, 12, 5, 9], dtype=np.int64)


def make_tokenizer(size: int = VOCAB) -> ScriptedTokenizer:
    pieces = [f"w{i}" for i in range(3, size)]
    if size > 20:
        pieces[17], pieces[18] = "a.", "b\n"  # ids 20 and 21
    return ScriptedTokenizer(pieces[: size - 3], ScriptedConfig(vocab_size=size))


TOKENIZER = make_tokenizer()


def make_sampler(seed: int | None = 0, **fields: Any) -> RequestSampler:
    return RequestSampler(Settings(**{**NEUTRAL, **fields}), Vocabulary.of(TOKENIZER), seed)


def row_of(values: Any, width: int = 64) -> np.ndarray:
    row = np.full(width, -65504.0, dtype=np.float32)
    row[: len(values)] = values
    return row


def spread(seed: int = 3) -> np.ndarray:
    return row_of(np.random.default_rng(seed).normal(0, 2, VOCAB))


# ---- the oracle: one dense float64 vector over the vocabulary, loops, no shortcuts ----


def reference(logits: np.ndarray, context: np.ndarray, s: Any, mu: float | None = None) -> np.ndarray:
    x = logits[:VOCAB].astype(np.float64)
    _reference_penalties(x, context.tolist(), s)
    if s.token_bias is not None:
        x += s.token_bias.numpy()[:VOCAB]
    if s.dry_multiplier > 0:
        _reference_dry(x, context.tolist(), s)
    x = x.astype(np.float32).astype(np.float64)
    if s.temperature < 0.01 or s.top_k == 1:
        p = np.zeros(VOCAB)
        p[int(np.argmax(x))] = 1.0
        return p
    order = sorted(range(VOCAB), key=lambda i: (-x[i], i))
    order = order[: s.top_k] if 0 < s.top_k < VOCAB else order
    temperature = 1.0 if s.temperature_last else s.temperature
    top = max(x)
    d = [x[i] - top for i in order]
    logs = [-(v * v) * s.smoothing_factor / temperature if s.smoothing_factor else v / temperature for v in d]
    w = [math.exp(v) for v in logs]
    p = np.array(w) / sum(w)
    # where a weight becomes 0 in float64; said in logarithms, the border is the same on both sides
    positive = {o for o, v in zip(order, logs, strict=True) if v >= -745.0}

    def keep(count_or_flags: Any) -> None:
        nonlocal order, p
        flags = [i < count_or_flags for i in range(len(p))] if isinstance(count_or_flags, int) else count_or_flags
        order = [o for o, f in zip(order, flags, strict=True) if f]
        p = np.array([v for v, f in zip(p, flags, strict=True) if f])
        p = p / p.sum()

    if 0 < s.top_p < 1 and len(p) > 1:
        n, total = 0, 0.0
        while total < s.top_p and n < len(p):
            total += p[n]
            n += 1
        keep(n)
    if s.top_a > 0 and len(p) > 1:
        keep([v >= s.top_a * p[0] ** 2 or i == 0 for i, v in enumerate(p)])
    if 0 < s.min_p < 1 and len(p) > 1:
        keep([v >= s.min_p * p[0] or i == 0 for i, v in enumerate(p)])
    if 0 < s.tfs < 1 and len(p) > 1:
        q = [v for v in p if v >= 1e-8]
        if len(q) >= 3:
            d2 = [abs(q[i] - 2 * q[i + 1] + q[i + 2]) for i in range(len(q) - 2)]
            running, k = 0.0, 0
            for v in d2:
                running += v / (sum(d2) or math.inf)
                if running > s.tfs:
                    break
                k += 1
            keep(k + 1)
    if 0 < s.typical < 1 and len(p) > 1:
        h = -sum(v * math.log(v) for v in p if v > 0)
        ranking = sorted(range(len(p)), key=lambda i: abs(-math.log(p[i]) - h) if p[i] > 0 else math.inf)
        chosen, total = set(), 0.0
        for i in ranking:
            if total >= s.typical:
                break
            chosen.add(i)
            total += p[i]
        keep([i in chosen for i in range(len(p))])
    if s.mirostat and len(p) > 1:
        bound = 2.0 ** -(2 * s.mirostat_tau if mu is None else mu)
        keep([v >= bound or i == 0 for i, v in enumerate(p)])
    if len(p) > 1:
        if s.max_temp > s.min_temp:
            h = max(0.0, -sum(v * math.log(v) for v in p if v > 0))  # type: ignore[arg-type]  # rounding may leave it just below 0
            most = math.log(len(positive.intersection(order))) or 1
            t = s.min_temp + (s.max_temp - s.min_temp) * (h / most) ** s.temp_exponent
            p = np.power(p / max(p), 1 / max(t, 1e-4))
        elif s.temperature_last and s.temperature != 1:
            p = np.power(p / max(p), 1 / s.temperature)
        p = p / p.sum()
    if s.xtc_probability > 0:
        ignored = {0, 1, 2, 21} if s.xtc_ignore_tokens is None else s.xtc_ignore_tokens
        choice = [i for i, v in enumerate(p) if v >= s.xtc_threshold and order[i] not in ignored]
        if len(choice) >= 2:
            least = max(choice, key=lambda i: (-p[i], i))
            out = [i for i in choice if i != least]
            mass = sum(p[i] for i in out)
            p = np.array(
                [
                    v * (1 - s.xtc_probability) if i in out else v * (1 + s.xtc_probability * mass / (1 - mass))
                    for i, v in enumerate(p)
                ]
            )
    dense = np.zeros(VOCAB)
    dense[order] = p
    return dense


def _reference_penalties(x: np.ndarray, context: list[int], s: Any) -> None:
    sustain = len(context) if s.token_repetition_range < 0 else s.token_repetition_range
    decay = 0 if s.token_repetition_range < 0 else s.token_repetition_decay
    seen = set()
    for d, token in enumerate(reversed(context)):
        if d >= sustain + decay:
            break
        w = 1.0 if d <= sustain else 1.0 - (d - sustain) / decay
        if token not in seen:
            factor = 1 + (s.token_repetition_penalty - 1) * w
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
            x[token] -= s.token_presence_penalty * w
            seen.add(token)
        x[token] -= s.token_frequency_penalty * w


def _reference_dry(x: np.ndarray, context: list[int], s: Any) -> None:
    breakers = {0, 1, 2, 20} if s.dry_sequence_breakers is None else s.dry_sequence_breakers
    context = context[-s.dry_range :] if s.dry_range else context
    n = len(context)
    for token in range(VOCAB):
        best = 0
        for at in range(1, n):
            if context[at] != token:
                continue
            length = 0
            while (
                length < s.dry_max_ngram
                and at - 1 - length >= 0
                and context[at - 1 - length] == context[n - 1 - length]
            ):
                if context[n - 1 - length] in breakers:
                    break
                length += 1
            best = max(best, length)
        if best >= s.dry_allowed_length and token not in breakers:
            x[token] -= s.dry_multiplier * s.dry_base ** (best - s.dry_allowed_length)


def dense(sampler: RequestSampler, logits: np.ndarray, context: np.ndarray, **kw: Any) -> np.ndarray:
    ids, p = sampler.distribution(logits, context, **kw)
    out = np.zeros(VOCAB)
    out[ids] = p
    return out


@st.composite
def any_settings(draw: st.DrawFn) -> dict[str, Any]:
    """A few transforms on at once, each at an arbitrary strength."""
    share = st.floats(0.05, 0.98)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "token_repetition_penalty": st.floats(0.8, 2.0),
        "token_repetition_range": st.integers(-1, 10),
        "token_repetition_decay": st.integers(0, 8),
        "token_frequency_penalty": st.floats(-1, 1),
        "token_presence_penalty": st.floats(-1, 1),
        "temperature": st.floats(0.05, 3),
        # below this all weights are equal to single precision, and TFS would measure noise
        "smoothing_factor": st.one_of(st.just(0.0), st.floats(0.01, 1)),
        "max_temp": st.floats(0.5, 2),
        "temp_exponent": st.floats(0.3, 2),
        "top_k": st.integers(0, VOCAB + 5),
        "top_p": share,
        # a border below 2^-44 of the largest cuts off what weighs nothing, which the reference knows to the last digit
        "top_a": st.one_of(st.just(0.0), st.floats(1e-9, 0.5)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-12, 0.5)),
        "tfs": share,
        "typical": share,
        "temperature_last": st.booleans(),
        "mirostat": st.booleans(),
        "dry_multiplier": st.floats(0, 2),
        "dry_allowed_length": st.integers(1, 3),
        "dry_range": st.sampled_from([0, 25]),
        "xtc_probability": st.floats(0, 1),
        "xtc_threshold": st.floats(0.01, 0.4),
    }
    names = draw(st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=7))
    return {name: draw(fields[name]) for name in names}


@examples(400, 40)
@given(any_settings(), st.integers(0, 2**32 - 1), st.lists(st.integers(3, 12), max_size=40))
@pytest.mark.covers(
    "generators: transform-order",
    "generators: penalties",
    "generators: logit-bias",
    "generators: dry",
    "generators: temperature",
    "generators: dynamic-temperature",
    "generators: truncation",
    "generators: xtc",
)
def test_distribution_equals_the_reference(fields: dict[str, Any], seed: int, context: list[int]) -> None:
    logits = row_of(np.random.default_rng(seed).normal(0, 3, VOCAB))
    ids = np.array(context, dtype=np.int64)
    sampler = make_sampler(**fields)
    got, want = dense(sampler, logits, ids), reference(logits, ids, sampler.settings)
    assert got.sum() == pytest.approx(1.0)
    # a threshold met to the last bit may fall either way: only then do the kept sets differ by one token; a weight
    # below 2^-44 of the largest is 0
    differ = ((got > 0) != (want > 0)) & (np.maximum(got, want) > 1e-12)
    if differ.any() and sampler.settings.tfs > 0:  # TFS may meet its threshold on a plateau of many tokens
        near = [replace(sampler.settings, tfs=sampler.settings.tfs * (1 + d)) for d in (-1e-5, 1e-5)]
        assert any(np.array_equal(got > 1e-12, reference(logits, ids, s) > 1e-12) for s in near)
        return
    if differ.any():
        assert np.count_nonzero(differ) <= 1
        return
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "also"),
    [
        ({"token_repetition_penalty": 1.5}, {}),
        ({"token_repetition_range": 2}, {"token_repetition_penalty": 1.5}),
        ({"token_repetition_decay": 5}, {"token_repetition_penalty": 1.5, "token_repetition_range": 2}),
        ({"token_frequency_penalty": 0.7}, {}),
        ({"token_presence_penalty": 0.7}, {}),
        ({"temperature": 0.5}, {}),
        ({"smoothing_factor": 0.3}, {}),
        ({"max_temp": 2.0}, {}),
        ({"min_temp": 0.7}, {"max_temp": 2.0}),
        ({"temp_exponent": 0.5}, {"max_temp": 2.0}),
        ({"top_k": 5}, {}),
        ({"top_p": 0.5}, {}),
        ({"top_a": 0.3}, {}),
        ({"min_p": 0.2}, {}),
        ({"tfs": 0.5}, {}),
        ({"typical": 0.5}, {}),
        ({"temperature_last": True}, {"temperature": 2.0, "min_p": 0.1}),
        ({"mirostat": True}, {}),
        ({"mirostat_tau": 4.0}, {"mirostat": True}),
        ({"token_bias": torch.linspace(-2, 2, 64)}, {}),
        ({"dry_multiplier": 0.8}, {}),
        ({"dry_allowed_length": 4}, {"dry_multiplier": 0.8}),
        ({"dry_base": 3.0}, {"dry_multiplier": 0.8, "dry_allowed_length": 1}),
        ({"dry_sequence_breakers": {9}}, {"dry_multiplier": 0.8}),
        ({"dry_range": 3, "dry_max_ngram": 2}, {"dry_multiplier": 0.8}),
        ({"dry_max_ngram": 1}, {"dry_multiplier": 0.8, "dry_allowed_length": 1}),
        ({"xtc_probability": 0.5}, {"xtc_threshold": 0.05}),
        ({"xtc_threshold": 0.05}, {"xtc_probability": 0.5}),
        ({"xtc_ignore_tokens": frozenset(range(VOCAB))}, {"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
@pytest.mark.covers("generators: settings-fields")
def test_every_setting_changes_the_distribution(fields: dict[str, Any], also: dict[str, Any]) -> None:
    plain = dense(make_sampler(**also), spread(), CONTEXT)
    changed = dense(make_sampler(**also, **fields), spread(), CONTEXT)
    assert np.abs(plain - changed).max() > 1e-4


@pytest.mark.covers("generators: draw")
def test_skew_and_eta_change_the_draw() -> None:
    def tokens(**fields: Any) -> list[int]:
        sampler = make_sampler(**fields)
        return [sampler.sample(spread(), CONTEXT, i).token for i in range(60)]

    assert tokens() != tokens(skew=1.0)
    assert tokens(mirostat=True, mirostat_tau=3.0) != tokens(mirostat=True, mirostat_tau=3.0, mirostat_eta=0.9)


# ---- golden cases ----


def p(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.covers("generators: penalties", "generators: scripted-model")
def test_golden_penalties() -> None:
    def run(logit: float, **kw: Any) -> list[float]:
        row = np.full(32, logit, dtype=np.float32)
        transforms.penalties(row, np.arange(1, 7), **kw)
        return row[[6, 5, 4, 3, 2, 1]].tolist()

    assert run(1, repetition=2, sustain=2, decay=2) == pytest.approx([0.5, 0.5, 0.5, 2 / 3, 1, 1])
    assert run(0, frequency=1, sustain=2, decay=2) == pytest.approx([-1, -1, -1, -0.5, 0, 0])
    assert run(0, presence=1, sustain=3, decay=0) == pytest.approx([-1, -1, -1, 0, 0, 0])


@pytest.mark.covers("generators: truncation", "generators: mirostat", "generators: scripted-model")
def test_golden_cuts() -> None:
    assert transforms.top_p(p(0.4, 0.3, 0.2, 0.1), 0.8) == 3
    assert transforms.top_p(p(0.5, 0.3, 0.15, 0.05), 0.6) == 2
    assert transforms.min_p(p(0.5, 0.49, 0.01), 0.1) == 2
    assert transforms.top_a(p(0.5, 0.3, 0.1, 0.06, 0.04), 0.2) == 4
    for z, count in ((0.3, 1), (0.6, 2), (0.99, 2)):
        assert transforms.tail_free(p(0.4, 0.3, 0.15, 0.1, 0.05), z) == count
    assert transforms.typical(p(0.5, 0.3, 0.15, 0.05), 0.7).tolist() == [True, True, False, False]
    assert transforms.mirostat_cut(p(0.5, 0.3, 0.1, 0.06, 0.04), 3) == 2


@pytest.mark.covers("generators: dynamic-temperature", "generators: xtc", "generators: scripted-model")
def test_golden_warps() -> None:
    assert transforms.dynamic_temperature(p(0.6, 0.4), 0.5, 1.5, 1) == pytest.approx([0.5685, 0.4315], abs=5e-5)
    assert transforms.xtc(p(0.5, 0.3, 0.15, 0.05), 0.5, 0.1) == pytest.approx([0.25, 0.15, 0.45, 0.15])
    assert transforms.xtc(p(0.05, 0.3, 0.15, 0.5), 0.5, 0.1) == pytest.approx([0.15, 0.15, 0.45, 0.25])


@pytest.mark.parametrize(("repeat", "expected"), [(1, 0), (2, -1), (3, -1.75), (4, -3.0625)])
@pytest.mark.covers("generators: dry", "generators: scripted-model")
def test_golden_dry(repeat: int, expected: float) -> None:
    phrase = list(range(3, 3 + repeat))
    row = np.zeros(64, dtype=np.float32)
    transforms.dry(row, np.array([*phrase, 33, *phrase]), multiplier=1, base=1.75, allowed_length=2, max_ngram=20)
    assert row[33] == pytest.approx(expected)
    assert np.count_nonzero(row) == int(expected != 0)


@pytest.mark.covers("generators: dry")
def test_dry_does_not_let_go_of_long_loops() -> None:
    def loss(repeat: int) -> float:
        row = np.zeros(64, dtype=np.float32)
        phrase = list(range(3, 3 + repeat))
        transforms.dry(row, np.array([*phrase, 60, *phrase]), multiplier=0.8, base=1.75, allowed_length=2, max_ngram=20)
        return float(row[60])

    assert loss(20) <= loss(19) == pytest.approx(-10832.7, rel=1e-4)
    assert loss(40) == loss(20)


@given(st.integers(0, 2**32 - 1), st.integers(0, 3000), st.integers(1, 3000))
@settings(max_examples=trials(60, 15), deadline=None)
def test_top_k_orders_like_a_stable_sort(seed: int, k: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    row = rng.choice(np.array([-np.inf, -3.5, -0.0, 0.0, 1e-30, 2.0, *rng.normal(size=20)], dtype=np.float32), size)
    want = [i for i in sorted(range(size), key=lambda i: (-row[i], i)) if row[i] > -np.inf]
    assert transforms.top_k(row, k).tolist() == (want[:k] if k else want)


# ---- draws ----


@pytest.mark.parametrize("fields", [{}, {"top_k": 6, "temperature": 1.3}, {"min_p": 0.05}, {"xtc_probability": 0.7}])
@pytest.mark.covers("generators: draw")
def test_counted_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    """Chi-square over many draws with a fixed seed, tokens expected less than 8 times pooled."""
    sampler, draws = make_sampler(seed=20, **fields), trials(20_000, 4_000)
    want = dense(sampler, spread(), CONTEXT) * draws
    counts = np.zeros(VOCAB)
    for i in range(draws):
        counts[sampler.sample(spread(), CONTEXT, i).token] += 1
    assert (counts[want == 0] == 0).all()
    rare = want < 8
    got = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(want[~rare], want[rare].sum())
    chi = float((((got - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())
    freedom = int((expected > 0).sum()) - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.covers("generators: random-numbers")
def test_random_numbers_are_uniform_and_streams_unrelated() -> None:
    a = np.array([RequestRandom(1).uniform(i) for i in range(4000)])
    b = np.array([RequestRandom(2).uniform(i) for i in range(4000)])
    again = np.array([RequestRandom(1).uniform(i, attempt=1) for i in range(4000)])
    for u in (a, b, again):
        assert (u >= 0).all()
        assert (u < 1).all()
        assert np.abs(np.histogram(u, 20, (0, 1))[0] - 200).max() < 65
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.06
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert abs(np.corrcoef(a, again)[0, 1]) < 0.06
    assert RequestRandom(None).seed != RequestRandom(None).seed
    assert RequestRandom(-5).uniform(0) != RequestRandom(5).uniform(0) != RequestRandom(2**80).uniform(0)


@pytest.mark.covers("generators: draw")
def test_a_draw_reaches_the_whole_mass() -> None:
    weights = p(0.5, 0.3, 0.2, 0.0)
    assert transforms.draw(weights, 0.0) == 0
    assert transforms.draw(weights, np.nextafter(1.0, 0.0)) == 2


@given(any_settings(), st.integers(0, 1000), st.integers(0, 50))
@examples(100, 10)
@pytest.mark.covers("generators: top-tokens")
def test_reporting_does_not_change_the_token(fields: dict[str, Any], position: int, top_n: int) -> None:
    sampler = make_sampler(**fields)
    plain = sampler.sample(spread(), CONTEXT, 0)
    told = make_sampler(**fields).sample(spread(), CONTEXT, 0, top_n=top_n)
    assert (plain.token, plain.probability) == (told.token, told.probability)
    assert len(told.top_tokens) == len(set(told.top_tokens.tolist())) == min(top_n, 64)
    assert (np.diff(told.top_probabilities) <= 0).all()


@pytest.mark.parametrize("size", [1, 31, 33, 151, 40_001])
@pytest.mark.covers("generators: logit-bias")
def test_padding_is_never_sampled_at_any_vocabulary_size(size: int) -> None:
    """Vocabulary sizes that are no multiple of 32."""
    tokenizer = ScriptedTokenizer([], ScriptedConfig(vocab_size=size))
    tokenizer.pieces = [b"x"] * size
    row = np.full(-(-size // 32) * 32, 5.0, dtype=np.float32)
    sampler = RequestSampler(Settings(**NEUTRAL), Vocabulary(tokenizer), 1)
    assert max(sampler.sample(row, CONTEXT[:0], i).token for i in range(200 if size < 1000 else 20)) < size


# ---- constraints and errors ----


def words(*ids: int) -> np.ndarray:
    bits = np.zeros(64, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.covers("generators: logit-bias")
def test_mask_prefix_blocked_and_discouraged() -> None:
    sampler = make_sampler()
    support = lambda c: set(np.flatnonzero(dense(sampler, spread(), CONTEXT, constraint=c)).tolist())  # noqa: E731
    assert support(Constraint(mask=words(4, 6))) == {4, 6}
    assert support(Constraint(prefix=np.array([3, 8]))) == {3, 8}
    assert support(Constraint(mask=words(4, 6), prefix=np.array([6, 8]))) == {6}
    assert support(Constraint(mask=words(4, 6), blocked=(4,))) == {6}
    assert support(Constraint(mask=words(4), discouraged=(4,))) == {4}, "a filter has the last word over min_new_tokens"
    assert 4 not in support(Constraint(discouraged=(4,)))


@pytest.mark.covers("generators: empty-choice")
def test_nothing_left_is_reported() -> None:
    with pytest.raises(NoCandidatesError, match="2 blocked tokens"):
        make_sampler().sample(spread(), CONTEXT, 0, Constraint(mask=words(4, 6), blocked=(4, 6)))
    with pytest.raises(NoCandidatesError, match="NaN"):
        make_sampler().sample(row_of([1.0, math.nan, 2.0]), CONTEXT, 0)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "temperature_last": True}])
@pytest.mark.covers("generators: temperature")
def test_greedy_is_the_first_maximum(fields: dict[str, Any]) -> None:
    row = spread()
    row[[11, 30]] = 50.0
    chosen = make_sampler(**fields, skew=2.0, dry_multiplier=0.5).sample(row, CONTEXT, 0)
    assert (chosen.token, chosen.probability) == (11, 1.0)


@pytest.mark.covers("generators: settings-fields", "generators: settings-methods")
def test_settings_defaults_and_greedy() -> None:
    s = Settings()
    assert (s.token_repetition_penalty, s.token_repetition_range, s.temperature, s.top_k, s.top_p) == (
        1.025,
        -1,
        0.8,
        50,
        0.8,
    )
    g = Settings.greedy(top_k=3)
    assert (g.temperature, g.token_repetition_penalty, g.top_p, g.top_k) == (1.0, 1.0, 0.0, 3)
    assert s.effective() == {}
    assert Settings(min_p=0.2).effective() == {"min_p": 0.2}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"token_repetition_penalty": 0},
        {"top_p": "a lot"},
        {"xtc_probability": 1.5},
        {"min_temp": 2.0, "max_temp": 1.0},
        {"dry_multiplier": 1.0, "dry_range": 5},
        {"temperature": math.nan},
        {"token_bias": torch.zeros(2, 3)},
        {"token_bias": torch.tensor([math.nan])},
        {"cfg_scale": math.inf},
    ],
)
@pytest.mark.covers("generators: settings-fields")
def test_settings_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        make_sampler(**fields)


@pytest.mark.covers("generators: cfg-mix")
def test_cfg_mixes_log_probabilities() -> None:
    def mixed(scale: float) -> np.ndarray:
        return np.exp(transforms.cfg_mix(spread(1), spread(2), scale).astype(np.float64))

    one, two = (np.exp(row - row.max()) for row in (spread(1).astype(np.float64), spread(2).astype(np.float64)))
    one, two = one / one.sum(), two / two.sum()
    np.testing.assert_allclose(mixed(1.0), one, rtol=1e-5)
    np.testing.assert_allclose(mixed(0.0), two, rtol=1e-5)
    np.testing.assert_allclose(mixed(2.0)[:VOCAB], one[:VOCAB] ** 2 / two[:VOCAB], rtol=1e-4)
    sampler = make_sampler(cfg_scale=3.0)
    plain = [sampler.sample(spread(1), CONTEXT, i).token for i in range(50)]
    assert plain != [sampler.sample(spread(1), CONTEXT, i, negative=spread(2)).token for i in range(50)]


@pytest.mark.covers("generators: settings-methods", "generators: logit-bias")
def test_bias_helpers() -> None:
    s = Settings(**NEUTRAL)
    s.allow_tokens(TOKENIZER, [4, "w7"])
    s.disallow_tokens(TOKENIZER, [4])
    copy = s.clone()
    s.allow_tokens(TOKENIZER, [9])
    for held, want in ((copy, {7}), (s, {7, 9})):
        ids, _ = RequestSampler(held, Vocabulary.of(TOKENIZER), 0).distribution(spread(), CONTEXT)
        assert set(ids.tolist()) == want
    with pytest.raises(RequestError, match="not a piece"):
        s.allow_tokens(TOKENIZER, ["nonsense"])
    with pytest.raises(RequestError):
        s.disallow_tokens(TOKENIZER, [VOCAB])


@pytest.mark.covers("generators: mirostat")
def test_mirostat_cuts_by_what_it_has_learnt() -> None:
    """Each place's candidates against the definition with a mu of our own: mu += eta * (tau + log2 p)."""
    tau, eta = 2.5, 0.6
    settings_ = Settings(**NEUTRAL, mirostat=True, mirostat_tau=tau, mirostat_eta=eta)
    sampler, mu, seen = RequestSampler(settings_, Vocabulary.of(TOKENIZER), 3), 2 * tau, set()
    for i in range(40):
        row = spread(i)
        got, want = dense(sampler, row, CONTEXT, position=i), reference(row, CONTEXT, settings_, mu=mu)
        np.testing.assert_allclose(got, want, atol=1e-6)
        seen.add(np.count_nonzero(got))
        drawn = sampler.sample(row, CONTEXT, i)
        assert drawn.probability == pytest.approx(got[drawn.token], rel=1e-6)
        mu += eta * (tau + math.log2(drawn.probability))
    assert len(seen) > 3, "mu has to matter for this to mean something"


@pytest.mark.covers("generators: mirostat")
def test_mirostat_state_belongs_to_the_request_and_rewinds() -> None:
    shared = Settings(**NEUTRAL, mirostat=True, mirostat_tau=2.0, mirostat_eta=0.5)
    one, two = (RequestSampler(shared, Vocabulary.of(TOKENIZER), 9) for _ in range(2))
    first = [one.sample(spread(i), CONTEXT, i).token for i in range(30)]
    assert first == [two.sample(spread(i), CONTEXT, i).token for i in range(30)]
    assert first[10:] == [one.sample(spread(i), CONTEXT, i).token for i in range(10, 30)]
    assert shared.mirostat_mu is None
