"""The native sampler against its plain twin, to the bit: tokens, probabilities, reports, shaped logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl_kernels import sampling, threads
from exl_kernels.errors import DTypeError, ShapeError, UnsupportedError
from exl_kernels.reference import sampling as twin
from exl_kernels.sampling import Failure, Plan, Row, Sampled, pack_ids

SHARES = {"top_p": 0.99, "top_a": 0.5, "min_p": 0.5, "tfs": 0.99, "typical": 0.99}


def random_plan(rng: np.random.Generator, width: int) -> Plan:
    """Every transform, each in about a third of the plans."""

    def maybe(value: Any, off: Any, chance: float = 0.35) -> Any:
        return value if rng.random() < chance else off

    u = rng.uniform
    temperature, some = u(0.3, 3), pack_ids(rng.integers(0, width, 5), width)
    late = [None, None, (temperature, temperature, 1.0), (u(0, 0.5), u(0.6, 2), u(0.3, 2))][rng.integers(4)]
    return Plan(
        size=max(1, width - int(rng.integers(0, 40))),
        temperature=u(0.05, 3),
        smoothing=maybe(u(0, 1), 0.0),
        top_k=maybe(int(rng.integers(2, width + 5)), 0),
        late=late,
        xtc=maybe((u(0, 1), u(0, 0.4)), (0.0, 0.0)),
        xtc_ignored=some,
        descending=bool(rng.random() < 0.4),
        greedy=bool(rng.random() < 0.05),
        penalties=maybe(
            (u(0.8, 2), u(-1, 1), u(-1, 1), int(rng.integers(-1, 10)), int(rng.integers(0, 8))), (1.0, 0.0, 0.0, -1, 0)
        ),
        dry=maybe(
            (u(0, 2), 1.75, int(rng.integers(1, 3)), int(rng.integers(1, 8)), int(rng.choice([0, 25])), some), None
        ),
        bias=maybe(torch.from_numpy(rng.normal(size=int(rng.integers(1, width + 5)))), None),
        cfg_scale=1.7,
        **{name: maybe(u(0.01, most), 0.0) for name, most in SHARES.items()},
    )


def random_row(rng: np.random.Generator, plan: Plan, width: int) -> Row:
    x = rng.normal(0, rng.uniform(0.1, 8), width)
    if rng.random() < 0.3:
        x = np.round(2 * x) / 2  # ties
    some = rng.integers(0, width, 3).tolist()
    return Row(
        plan,
        torch.from_numpy(x.astype(np.float32)),
        uniform=float(rng.random()),
        negative=torch.randn(width) if rng.random() < 0.1 else None,
        context=rng.integers(0, min(width, 30), int(rng.integers(0, 60))),
        mirostat=2.0 ** -rng.uniform(1, 6) if rng.random() < 0.3 else 0.0,
        mask=pack_ids(rng.integers(0, width, 1 + width // 2), int(width * rng.uniform(0.5, 1)) + 1)
        if rng.random() < 0.3
        else None,
        banned=some[:2] if rng.random() < 0.2 else [],
        discouraged=some[1:] if rng.random() < 0.2 else [],
        only=rng.integers(0, width, 8) if rng.random() < 0.1 else None,
        top_n=int(rng.choice([0, 0, 3, 20])),
    )


def same(a: Sampled | Failure, b: Sampled | Failure) -> bool:
    if isinstance(a, Failure) or isinstance(b, Failure):
        return a == b
    tops = [(list(s.top_tokens), list(s.top_probabilities)) for s in (a, b)]
    return (a.token, a.probability) == (b.token, b.probability) and tops[0] == tops[1]


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**63 - 1), st.sampled_from([1, 5, 40, 64, 100, 333, 2000, 5000]))
def test_native_equals_twin_to_the_bit(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    row = random_row(rng, random_plan(rng, width), width)
    np.testing.assert_array_equal(sampling.shaped(row), twin.shaped(row))
    got, want = sampling.sample([row])[0], twin.sample(row)
    assert same(got, want), (got, want)


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
        {"late": (1.5, 1.5, 1.0)},
        {"top_p": 0.95, "late": (0.5, 1.5, 1.0), "xtc": (0.5, 0.05)},
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


def test_every_instruction_set_and_thread_count_gives_the_same_tokens() -> None:
    rng = np.random.default_rng(3)
    rows = [random_row(rng, random_plan(rng, 3000), 3000) for _ in range(60)]
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
    plan = Plan(size=500, bias=torch.ones(500), penalties=(1.5, 0.0, 0.0, -1, 0))
    rows = [Row(plan, t, uniform=0.5, context=np.arange(9)) for t in (x, broken, x)]
    rows.append(Row(plan, x, mask=np.zeros(16, dtype=np.int32)))
    first, second, third, fourth = sampling.sample(rows)
    assert isinstance(first, Sampled)
    assert first == third
    assert (second, fourth) == (Failure(not_finite=True), Failure(not_finite=False))
    assert torch.equal(x, kept)
    assert sampling.sample([]) == []


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
