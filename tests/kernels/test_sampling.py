"""The native sampler is bitwise identical to its plain twin: tokens, probabilities, reports, shaped logits."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples, trials
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import gpu_sleep
from sampling_cases import UNDER_A_TOOL, on_gpu, random_bias, random_plan, random_row, same

from exl_kernels import sampling, threads
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.reference import sampling as twin
from exl_kernels.sampling import Failure, LateTemperature, Penalties, Plan, Row, Sampled, SparseBias, Xtc, pack_ids
from exl_kernels.sampling import cuda as sampling_cuda
from exl_kernels.selection import MOST_REPORTED


@examples(500, 50)
@given(st.integers(0, 2**63 - 1), st.sampled_from([1, 5, 40, 64, 100, 333, 2000, 5000]))
def test_native_is_bitwise_equal_to_the_twin(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    row = random_row(rng, random_plan(rng, width), width)
    np.testing.assert_array_equal(sampling.shaped(row), twin.shaped(row))
    got, want = sampling.sample([row])[0], twin.sample(row)
    assert same(got, want), (got, want)


@examples(100, 10)
@given(st.integers(0, 2**63 - 1), st.sampled_from([1, 40, 333]))
def test_a_sparse_bias_is_that_of_a_value_for_each_id(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    bias = random_bias(rng, width)
    if not isinstance(bias, SparseBias):
        bias = SparseBias.of(dict(enumerate(bias.tolist())))
    if rng.random() < 0.3:  # an id that no vocabulary has
        below = torch.tensor([-int(rng.integers(1, width + 2))], dtype=torch.int32)
        bias = replace(bias, ids=torch.cat([below, bias.ids]), values=torch.cat([torch.tensor([3.0]), bias.values]))
    row = random_row(rng, replace(random_plan(rng, width), bias=bias), width)
    dense = replace(row, plan=replace(row.plan, bias=bias.dense(width)))
    np.testing.assert_array_equal(sampling.shaped(row), sampling.shaped(dense))
    assert same(sampling.sample([row])[0], sampling.sample([dense])[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 20_000},
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 0.7},
        {"min_p": 0.05},
        {"top_a": 0.2},
        {"tfs": 0.9},
        {"typical": 0.9},
        {"late": LateTemperature(1.5, 1.5, 1.0)},
        {"top_p": 0.95, "late": LateTemperature(0.5, 1.5, 1.0), "xtc": Xtc(0.5, 0.05)},
        {"descending": True},
    ],
    ids=str,
)
def test_long_rows_equal_the_twin(fields: dict[str, Any], spread: float) -> None:
    """Widths at which selection takes its long ways; flat and peaked rows."""
    rng = np.random.default_rng(7)
    for width in (30_001, 50_000):
        x = torch.from_numpy(rng.normal(0, spread, width).astype(np.float32))
        row = Row(Plan(size=width - 5, **fields), x, uniform=float(rng.random()), top_n=4)
        assert same(sampling.sample([row])[0], twin.sample(row))


@examples(200, 20)
@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from([2100, 5000, 9000]),
    st.sampled_from(["as they are", "halves", "steps", "hardly apart", "far apart", "a crowd far below"]),
    st.fixed_dictionaries({}, optional={name: st.floats(0.05, 0.999) for name in ("tfs", "typical", "top_p")}),
)
def test_wide_rows_without_top_k_equal_the_twin(seed: int, width: int, kind: str, fields: dict[str, float]) -> None:
    """Where candidates are ranked by their distance alone: ties at the ends of what stays, any spread."""
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, width)
    row = random_row(rng, replace(plan, top_k=0, greedy=False, **fields), width)  # type: ignore[arg-type]
    x = row.logits
    changed = {
        "as they are": x,
        "halves": x.half().float(),
        "steps": (2 * x).round() / 2,
        "hardly apart": x * 1e-4 + 20,
        "far apart": x * 1e6,
        "a crowd far below": x.index_fill(0, torch.from_numpy(rng.permutation(width)[: width // 2]), -1e30),
    }
    row = replace(row, logits=changed[kind], only=None)
    got, want = sampling.sample([row])[0], twin.sample(row)
    assert same(got, want), (got, want)


def test_every_instruction_set_and_thread_count_gives_the_same_tokens() -> None:
    rng = np.random.default_rng(3)
    rows = [random_row(rng, random_plan(rng, 3000), 3000) for _ in range(60)]
    rows += [replace(row, plan=replace(row.plan, top_k=0, typical=0.7)) for row in rows[:20]]
    want = sampling.sample(rows)
    before_isa, before_threads = threads.isa(), threads.num_threads()
    try:
        isas: tuple[threads.ISA, ...] = ("scalar", "avx2", "avx512")
        for isa in isas:
            for count in (1, 2):
                threads.set_isa(isa)
                threads.set_num_threads(count)
                assert all(same(a, b) for a, b in zip(sampling.sample(rows), want, strict=True))
                assert all(same(sampling.sample([row])[0], b) for row, b in zip(rows, want, strict=True))
    finally:
        threads.set_isa(before_isa)
        threads.set_num_threads(before_threads)


def test_a_row_is_left_as_it_was_and_fails_alone() -> None:
    x = torch.randn(500)
    kept, broken = x.clone(), x.clone()
    broken[77] = float("nan")
    plan = Plan(size=500, bias=torch.ones(500), penalties=Penalties(1.5, 0.0, 0.0, -1, 0))
    rows = [Row(plan, t, uniform=0.5, context=np.arange(9)) for t in (x, broken, x)]
    rows.append(Row(plan, x, mask=np.zeros(16, dtype=np.int32)))
    first, second, third, fourth = sampling.sample(rows)
    assert isinstance(first, Sampled)
    assert first == third
    assert (second, fourth) == (Failure(not_finite=True), Failure(not_finite=False))
    assert torch.equal(x, kept)
    assert sampling.sample([]) == []
    assert sampling.launch([]).collect() == []


ODD = (float("nan"), float("inf"), float("-inf"), -float("nan"), 3e38, -3e38)


def broken_row(rng: np.random.Generator, width: int) -> tuple[Row, bool | None]:
    """A row with a few odd logits anywhere, allowed or not, in either prompt; and whether it must be reported as not
    finite (None: as the settings make of it, an id that is not allowed may hold what it likes)."""
    row = random_row(rng, replace(random_plan(rng, width), cfg_scale=float(rng.choice([-0.5, 0.5, 1.0, 1.7]))), width)
    pair = rng.random() < 0.6
    parts = [row.logits, torch.from_numpy(rng.normal(0, 3, width).astype(np.float32))] if pair else [row.logits]
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(0, width)), float(rng.choice(ODD))
        parts[int(rng.integers(0, len(parts)))][at] = kind
    row = replace(row, logits=parts[0], negative=parts[1] if pair else None)
    bad = any(bool(part.isnan().any() or (part == float("inf")).any()) for part in parts)
    return row, True if bad and pair else None


@examples(400, 40)
@given(st.integers(0, 2**63 - 1), st.sampled_from([1, 40, 64, 333, 2500]))
def test_odd_logits_anywhere_are_seen_alike(seed: int, width: int) -> None:
    """In a pair of prompts every logit counts, masked or padding; in a single prompt those that may be chosen."""
    row, broken = broken_row(np.random.default_rng(seed), width)
    np.testing.assert_array_equal(sampling.shaped(row), twin.shaped(row))
    got, want = sampling.sample([row])[0], twin.sample(row)
    assert same(got, want), (got, want)
    if broken and not (row.mask is not None or row.only is not None or row.banned or row.discouraged):
        assert got == Failure(not_finite=True)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["logits", "negative"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_masked_odd_logit_of_a_pair_is_seen(odd: float, which: str, greedy: bool) -> None:
    """The sums of logsoftmax go over NaN: another token would be sampled from nothing."""
    mask = pack_ids([1, 2, 3], 64)
    row = Row(Plan(size=60, cfg_scale=1.5, greedy=greedy), torch.randn(64), negative=torch.randn(64), mask=mask)
    assert isinstance(sampling.sample([row])[0], Sampled)
    for at in (50, 63):  # not allowed; padding
        torn = replace(row, **{which: getattr(row, which).index_fill(0, torch.tensor(at), odd)})
        assert sampling.sample([torn])[0] == twin.sample(torn) == Failure(not_finite=True)
        alone = replace(torn, negative=None)
        assert isinstance(sampling.sample([alone])[0], Sampled)
        assert same(sampling.sample([alone])[0], twin.sample(alone))


def test_tokens_that_the_positive_prompt_excludes_stay_excluded() -> None:
    x, y = torch.randn(20), torch.randn(20)
    x[5] = y[5] = x[6] = float("-inf")
    for scale in (-0.5, 0.5, 1.7):
        row = Row(Plan(size=20, cfg_scale=scale), x, negative=y, uniform=0.4)
        ids, _ = sampling.distribution(row) or ([], [])
        assert set(range(20)) - set(ids) == {5, 6}
        assert same(sampling.sample([row])[0], twin.sample(row))


def test_ids_that_no_token_has_ban_nothing() -> None:
    row = Row(Plan(size=8, greedy=True), torch.arange(8.0), banned=[-1, 2**40, 7], discouraged=[-5, 2**63 - 1, 6])
    assert sampling.sample([row])[0] == Sampled(5, 1.0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"logits": torch.zeros(8, dtype=torch.float64)}, DTypeError),
        ({"logits": torch.zeros(2, 8)}, ShapeError),
        ({"logits": torch.zeros(16)[::2]}, ShapeError),
        ({"logits": torch.zeros(2**19 + 1)}, UnsupportedError),
        ({"negative": torch.zeros(9)}, ShapeError),
        ({"context": np.zeros(3, dtype=np.int32)}, DTypeError),
        ({"mask": np.zeros(3, dtype=np.int64)}, DTypeError),
        ({"uniform": 1.0}, ValueError),
        ({"uniform": float("nan")}, ValueError),
    ],
    ids=str,
)
def test_unfit_operands_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    fields = {"logits": torch.zeros(8), **change}
    with pytest.raises(error):
        sampling.sample([Row(Plan(size=8), **fields)])


def test_rows_on_the_cpu_are_sampled_when_they_are_collected() -> None:
    """Also with inputs of a next step, which only a GPU writes; errors come from one of the two calls."""
    rows = [Row(Plan(size=300, top_k=k), torch.randn(300), uniform=0.5) for k in (1, 20)]
    ids = torch.full((2,), -1)
    launched = sampling.launch(rows, sampling.TokenTarget(ids, 300))
    assert launched.collect() == launched.collect() == sampling.sample(rows)
    assert not launched.written
    assert ids.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="uniform is 2"):
        sampling.launch([replace(rows[0], uniform=2.0)]).collect()


# ---- on a GPU: the tokens of the CPU, bitwise ----


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 33, 257, 2049, 5000, 40_000])
def test_gpu_equals_cpu(width: int) -> None:
    rng = np.random.default_rng(width)
    calls = [[random_row(rng, random_plan(rng, width), width) for _ in range(40)] for _ in range(8)]
    calls = calls[1:2] if UNDER_A_TOOL else calls
    for rows in calls:
        there = [on_gpu(row) for row in rows]
        for row, got, want in zip(rows, sampling.sample(there), sampling.sample(rows), strict=True):
            assert same(got, want), (row.plan, got, want)
        answers = sampling_cuda.launch(there).collect()
        assert None not in answers


PEAKED: list[dict[str, Any]] = [
    {"greedy": True},
    {},
    {"late": LateTemperature(1.5, 1.5, 1.0)},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
    {"top_k": 2000, "top_p": 0.99, "late": LateTemperature(0.5, 1.5, 1.0)},
    {"temperature": 0.7, "top_p": 0.9},
    {"min_p": 0.05, "late": LateTemperature(2.0, 2.0, 1.0)},
    {"top_a": 0.1, "descending": True},
    {"top_k": 100, "tfs": 0.9},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "xtc": Xtc(0.5, 0.05), "descending": True},
    {"smoothing": 0.3, "top_k": 200},
]


@pytest.mark.cuda
def test_gpu_equals_cpu_on_long_rows_of_one_batch() -> None:
    """Logits like a model's; penalties, masks, a bias; every row must be answered by the GPU itself."""
    width, rng = 128_256, np.random.default_rng(5)
    mask = pack_ids(rng.integers(0, width, width // 2), width)
    context = rng.integers(0, width, 3000)
    rows = []
    for i, fields in enumerate(PEAKED * (1 if UNDER_A_TOOL else 4)):
        x = rng.normal(0, 2, width).astype(np.float32)
        x[rng.integers(0, width, 300)] += np.linspace(14, 4, 300).astype(np.float32)
        bias = torch.from_numpy(rng.normal(0, 1, width).astype(np.float32)) if i % 3 == 0 else None
        plan = Plan(size=width - 8, penalties=Penalties(1.1, 0.1, 0.2, -1, 0), bias=bias, **fields)
        row = Row(plan, torch.from_numpy(x), uniform=float(rng.random()), context=context, top_n=5 * (i % 2))
        rows.append(replace(row, mask=mask if i % 4 == 1 else None, banned=[3, 5] if i % 5 == 0 else []))
    there = [on_gpu(row) for row in rows]
    kept = there[0].logits.clone()
    assert all(isinstance(answer, Sampled) for answer in sampling_cuda.launch(there).collect())
    for row, got, want in zip(rows, sampling.sample(there), sampling.sample(rows), strict=True):
        assert same(got, want), (row.plan, got, want)
    few = slice(0, 2 if UNDER_A_TOOL else None)
    alone = [sampling.sample([row])[0] for row in there[few]]
    assert all(same(a, b) for a, b in zip(alone, sampling.sample(rows[few]), strict=True))
    assert torch.equal(kept, there[0].logits)


WIDE: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5000},
    {"top_k": 30_000, "top_p": 0.7, "top_a": 1e-9},
    {"min_p": 0.001, "xtc": Xtc(0.5, 0.00001)},
    {"min_p": 0.02, "late": LateTemperature(0.5, 1.5, 1.0), "xtc": Xtc(0.7, 0.0001), "descending": True},
    {"top_a": 1e-6, "late": LateTemperature(2.0, 2.0, 1.0)},
    {"typical": 0.9},
    {"typical": 0.2, "top_k": 50, "late": LateTemperature(0.7, 0.7, 1.0), "xtc": Xtc(0.5, 0.1)},
    {"typical": 0.6, "top_p": 0.95, "min_p": 1e-6, "descending": True},
    {"late": LateTemperature(0.5, 1.5, 0.7)},
    {"descending": True, "smoothing": 0.2},
    {"xtc": Xtc(1.0, 1e-5)},
    {"tfs": 0.9},
    {"tfs": 0.99, "top_k": 5000, "descending": True},
    {"tfs": 0.5, "min_p": 1e-4, "typical": 0.8, "xtc": Xtc(0.5, 1e-4)},
    {"tfs": 0.95, "temperature": 0.2, "late": LateTemperature(0.5, 1.5, 1.0)},
    {},
]


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["flat", "equal", "steps", "model"])
def test_gpu_equals_cpu_for_any_number_of_candidates(kind: str) -> None:
    """Flat logits, equal ones, few values of many candidates, and a model's: the GPU answers every row itself."""
    width, rng = (3000 if UNDER_A_TOOL else 60_000), np.random.default_rng(len(kind))
    rows = []
    for i, fields in enumerate(WIDE * (1 if UNDER_A_TOOL else 3)):
        x = rng.normal(0, 1, width).astype(np.float32)
        if kind == "equal":
            x[:] = 0.25
        elif kind == "steps":
            x = np.round(x)
        elif kind == "model":
            x[rng.integers(0, width, 300)] += np.linspace(14, 4, 300).astype(np.float32)
        masked = pack_ids(rng.integers(0, width, width // 2), width) if i % 4 == 1 else None
        plan = Plan(size=width - 8 * (i % 2), **fields)
        uniform = [0.0, float(rng.random()), 1 - 2**-53][i % 3]
        top_n = [0, 0, 5, 64][i % 4]
        mirostat = 2.0**-12 if i % 5 == 2 else 0.0
        rows.append(Row(plan, torch.from_numpy(x), uniform, mask=masked, top_n=top_n, mirostat=mirostat))
    there = [on_gpu(row) for row in rows]
    assert all(isinstance(answer, Sampled) for answer in sampling_cuda.launch(there).collect())
    want = sampling.sample(rows)
    for row, got, expected in zip(rows, sampling.sample(there), want, strict=True):
        assert same(got, expected), (row.plan, row.uniform, row.top_n, got, expected)
    alone = [sampling.sample([row])[0] for row in there]
    assert all(same(a, b) for a, b in zip(alone, want, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("typical", [0.0, 0.99])
def test_gpu_keeps_no_candidate_that_an_earlier_cut_took(equal: bool, typical: float) -> None:
    """Top-p after top-k ends at top-k's last candidate, which has neighbours of nearly the same logit."""
    x = torch.full((4000,), -20.0)
    x[1], x[2] = -1.0, -1.01
    if equal:
        x[1:3001] = -1.0
    x[0] = 0.0
    plan = Plan(size=4000, top_k=2, top_p=0.99, typical=typical)
    rows = [Row(plan, x, uniform=uniform, top_n=5) for uniform in (0.0, 0.3, 0.72, 0.74, 0.9, 1 - 2**-53)]
    for got, want in zip(sampling.sample([on_gpu(row) for row in rows]), sampling.sample(rows), strict=True):
        assert same(got, want), (got, want)


def test_a_late_temperature_next_to_zero_takes_the_likeliest() -> None:
    row = Row(
        Plan(size=5, late=LateTemperature(1e-39, 1e-39, 1.0)), torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0]), uniform=0.9
    )
    assert sampling.sample([row]) == [Sampled(1, 1.0)]


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 40, 2049, 33_000])
def test_gpu_mixes_pairs_of_prompts(width: int) -> None:
    """CFG, with excluded ids and broken logits in either row; with rows without a pair."""
    rng = np.random.default_rng(width)
    rows = []
    for i in range(16):
        a, b = (torch.from_numpy(rng.normal(0, 3, width).astype(np.float32)) for _ in range(2))
        if i % 4 == 1:
            a[rng.integers(0, width, 3)] = -torch.inf
            b[rng.integers(0, width, 3)] = -torch.inf
        if i == 6:
            b[width // 2] = torch.nan
        if i == 10:
            a[-1] = torch.inf
        plan = Plan(size=max(1, width - i % 3), cfg_scale=[1.5, -0.5, 0.3][i % 3], **PEAKED[i % len(PEAKED)])
        negative = b if i % 5 else None
        rows.append(Row(plan, a, uniform=float(rng.random()), negative=negative, top_n=3 * (i % 2)))
    there = [on_gpu(row) for row in rows]
    answers = sampling_cuda.launch(there).collect()
    assert None not in answers
    for row, got, want in zip(rows, sampling.sample(there), sampling.sample(rows), strict=True):
        assert same(got, want), (row.plan, got, want)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [2, 3, 4, 500])
@pytest.mark.parametrize("kind", ["flat", "steps", "two", "one"])
def test_gpu_cuts_tails_of_few_candidates_as_the_cpu_does(kind: str, width: int) -> None:
    rng = np.random.default_rng(width)
    rows = []
    for i in range(12):
        x = rng.normal(0, 3, width).astype(np.float32)
        if kind == "steps":
            x = np.round(x)
        elif kind != "flat":
            x[:] = -1.0
            x[0] = 1.0 if kind == "two" else -50.0
        plan = Plan(size=width, tfs=[0.05, 0.5, 0.97][i % 3], temperature=[1.0, 0.1, 30.0, 1e-3][i % 4])
        rows.append(Row(plan, torch.from_numpy(x), uniform=float(rng.random()), top_n=[0, 7][i % 2]))
    there = [on_gpu(row) for row in rows]
    assert None not in sampling_cuda.launch(there).collect()
    for row, got, want in zip(rows, sampling.sample(there), sampling.sample(rows), strict=True):
        assert same(got, want), (row.plan, got, want)


@pytest.mark.cuda
def test_gpu_leaves_rows_that_report_many_candidates_to_the_cpu() -> None:
    x = torch.randn(60_000)
    rows = [Row(Plan(size=60_000), x.cuda(), uniform=0.7, top_n=MOST_REPORTED + more) for more in (0, 1)]
    assert [answer is None for answer in sampling_cuda.launch(rows).collect()] == [False, True]
    want = sampling.sample([replace(row, logits=x) for row in rows])
    assert all(same(a, b) for a, b in zip(sampling.sample(rows), want, strict=True))


class Step:
    """A next step that keeps the inputs it is launched on: the tokens at the front, of `size` bytes in all."""

    def __init__(self, rows: int, limit: int, size: int = 0) -> None:
        self.source = torch.randint(0, 256, (max(size, 8 * rows),), dtype=torch.uint8).pin_memory()
        self.device = torch.full_like(self.source, 0xA5, device="cuda")
        self.ids = self.device[: 8 * rows].view(torch.int64)
        self.inputs = sampling.TokenTarget(self.ids, limit, (self.source, self.device))
        self.tokens: torch.Tensor | None = None

    def launch(self) -> None:
        self.tokens = self.ids.clone()
        self.copied = self.device[self.ids.nbytes :].clone()


def sampled_into(step: Step, rows: list[Row]) -> tuple[list[Sampled | Failure], bool]:
    """Launch the sampling, then the step if its tokens are written, then collect: the results, and whether the step
    keeps its tokens."""
    launched = sampling.launch(rows, step.inputs)
    if launched.written:
        step.launch()
    return launched.collect(), launched.written


@pytest.mark.cuda
def test_tokens_are_on_the_gpu_before_anybody_waits() -> None:
    count = 8 if UNDER_A_TOOL else 40
    logits = torch.randn(count, 3000, device="cuda") * 4
    rows = [
        Row(Plan(size=3000, top_k=20 + i, greedy=i % 5 == 0), logits[i], uniform=0.02 * i, top_n=i % 3)
        for i in range(count)
    ]
    step = Step(count, 3000)
    found, kept = sampled_into(step, rows)
    assert kept
    assert step.tokens is not None
    assert step.tokens.tolist() == [one.token for one in found if isinstance(one, Sampled)]
    # Without inputs nothing is written; ids are cut to the limit.
    silent = sampling.launch(rows)
    assert silent.collect() == silent.collect() == found
    assert not silent.written
    low = Step(count, 7)
    assert sampled_into(low, rows) == (found, True)
    assert low.tokens is not None
    assert low.tokens.tolist() == [min(one.token, 6) for one in found if isinstance(one, Sampled)]
    left = Row(Plan(size=3000), logits[0], uniform=0.3, top_n=MOST_REPORTED + 1)  # to the CPU
    mixed = Step(2, 3000)
    results, kept = sampled_into(mixed, [rows[1], left])
    assert results[0] == found[1]
    assert mixed.tokens is not None
    assert not kept
    elsewhere = Step(2, 3000)
    assert not sampled_into(elsewhere, [rows[1], replace(rows[2], logits=rows[2].logits.cpu())])[1]
    assert elsewhere.tokens is None


@pytest.mark.cuda
def test_launches_are_collected_in_any_order() -> None:
    """A second launch on a GPU keeps the answers of the first, which may be collected later, or never."""
    logits = torch.randn(4, 3000, device="cuda") * 4
    first, second = ([Row(Plan(size=3000, top_k=k), row, uniform=0.5) for row in logits] for k in (3, 300))
    want = sampling.sample(first), sampling.sample(second)
    one, _, other = sampling.launch(first), sampling.launch(first), sampling.launch(second)
    assert (other.collect(), one.collect()) == (want[1], want[0])


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 50, 28), (1, 3000, 60), (3, 3000, 1028), (64, 9000, 300_000)])
def test_inputs_of_the_next_step_are_there_with_the_tokens(rows: int, width: int, size: int) -> None:
    """Inputs have any size, and the sampling before may have queued anything."""
    logits = torch.randn(rows, width, device="cuda") * 4
    plans: list[dict[str, Any]] = [{"greedy": True}, {"top_p": 0.9}, {"typical": 0.9}, {"tfs": 0.9}]
    for plan in (Plan(size=width, **fields) for fields in plans):
        asked = [Row(plan, logits[i], uniform=0.01 * i) for i in range(rows)]
        for _ in range(3):
            step = Step(rows, width, size)
            gpu_sleep(1_000_000)
            found, kept = sampled_into(step, asked)
            assert step.tokens is not None
            assert torch.equal(step.copied.cpu(), step.source[8 * rows :])
            assert kept
            assert step.tokens.tolist() == [one.token for one in found if isinstance(one, Sampled)]
    with pytest.raises(ValueError, match="the same length as their source"):
        sampling.launch(asked, sampling.TokenTarget(step.ids, width, (step.source[:-4], step.device)))


@pytest.mark.cuda
def test_a_launch_that_is_never_collected_leaves_the_next_call_alone() -> None:
    """An interrupt, for example, came in between."""
    count = 4 if UNDER_A_TOOL else 64
    logits = torch.randn(count, 9000, device="cuda") * 4
    first, second = ([Row(Plan(size=9000, top_k=k), row, uniform=0.5) for row in logits] for k in (3, 2000))
    want = sampling.sample(second)
    for _ in range(1 if UNDER_A_TOOL else 5):
        step = Step(count, 9000)
        gpu_sleep(10_000_000)
        sampling.launch(first, step.inputs)
        step.launch()
        assert sampling.sample(second) == want
        assert step.tokens is not None
        assert step.tokens.tolist() == [one.token for one in sampling.sample(first) if isinstance(one, Sampled)]


@pytest.mark.cuda
@settings(max_examples=20 if UNDER_A_TOOL else trials(200, 20), deadline=None)
@given(st.data())
def test_rows_that_report_nothing_are_never_left_to_the_cpu(data: st.DataObject) -> None:
    """Their logits may be overwritten as soon as the launches have read them."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    row, _ = broken_row(rng, 300)
    row = replace(on_gpu(row), top_n=0)
    assert sampling_cuda.launch([row]).collect()[0] is not None


@pytest.mark.cuda
def test_gpu_reports_empty_and_broken_rows() -> None:
    plan, x = Plan(size=500), torch.randn(500)
    broken = x.clone()
    broken[77] = float("nan")
    rows = [Row(plan, t.cuda(), mask=m) for t, m in ((broken, None), (x, np.zeros(16, dtype=np.int32)), (x, None))]
    first, second, third = sampling.sample(rows)
    assert (first, second) == (Failure(not_finite=True), Failure(not_finite=False))
    assert isinstance(third, Sampled)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [1, 40, 2500])
def test_gpu_sees_odd_logits_as_the_cpu_does(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = [broken_row(rng, width)[0] for _ in range(60 if UNDER_A_TOOL else 300)]
    for row, got, want in zip(rows, sampling.sample([on_gpu(r) for r in rows]), sampling.sample(rows), strict=True):
        assert same(got, want), (row.plan, got, want)


@pytest.mark.cuda
def test_gpu_launches_can_be_captured_after_a_step() -> None:
    """A replay reads the logits that are there then."""
    logits = torch.randn(2, 5000, device="cuda")
    rows = [Row(Plan(size=5000, top_k=40), row, uniform=0.3) for row in logits]
    sampling.sample(rows)  # buffers are made outside the capture
    place = sampling_cuda._place(logits.device)  # noqa: SLF001
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits.mul_(1.5)
        place.launch(rows)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        want = sampling.sample([replace(row, logits=row.logits.cpu()) for row in rows])
        assert [found.token for found in place.answers(2) if isinstance(found, Sampled)] == [
            w.token for w in want if isinstance(w, Sampled)
        ]


@pytest.mark.parametrize("answer", [Sampled(3, 0.5), Sampled(3, 0.25, [3, 9], [0.25, 0.125]), Failure(True)])
def test_answers_are_copied_pickled_and_shown_as_data(answer: Sampled | Failure) -> None:
    assert copy.copy(answer) == pickle.loads(pickle.dumps(answer)) == answer
    assert repr(answer).startswith(f"{type(answer).__name__}({answer.__match_args__[0]}=")
    match answer:
        case Sampled(token, probability):
            assert (token, probability) == (answer.token, answer.probability)
        case Failure(not_finite):
            assert not_finite
