"""Cuts over many candidates take the tokens of the CPU on a GPU: tail-free and typical ones, with other settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import UNDER_A_TOOL, on_gpu, random_plan, random_row, same

from exl_kernels import sampling
from exl_kernels.sampling import LateTemperature, Plan, Row, Xtc
from exl_kernels.sampling import cuda as sampling_cuda

pytestmark = pytest.mark.cuda

Logits = np.ndarray[tuple[int], np.dtype[np.float32]]


def model_like(rng: np.random.Generator, width: int) -> Logits:
    x = rng.normal(0, 2, width)
    x[rng.integers(0, width, 300)] += np.linspace(14, 4, 300)
    return x.astype(np.float32)


def crowds(rng: np.random.Generator, width: int, *below: float, spread: float) -> Logits:
    """One logit above crowds that are so far below it."""
    x = rng.choice(-np.array(below), width) + rng.normal(0, spread, width)
    x[rng.integers(0, width)] = 0
    return x.astype(np.float32)


def excluded(rng: np.random.Generator, width: int) -> Logits:
    x = rng.normal(0, 1, width).astype(np.float32)
    x[rng.random(width) < 0.7] = -np.inf
    x[-1] = 1
    return x


KINDS: dict[str, Any] = {
    "flat": lambda rng, width: rng.normal(0, 1, width).astype(np.float32),
    "model": model_like,
    "halves": lambda rng, width: rng.normal(0, 3, width).astype(np.float16).astype(np.float32),
    "steps": lambda rng, width: np.round(rng.normal(0, 2, width)).astype(np.float32),
    "equal": lambda rng, width: np.full(width, 0.25, dtype=np.float32),
    "equal but one": lambda rng, width: crowds(rng, width, 9.0, spread=0.0),
    "hardly apart": lambda rng, width: (20 + 1e-4 * rng.normal(0, 1, width)).astype(np.float32),
    "one crowd": lambda rng, width: crowds(rng, width, 11.0, spread=1e-3),
    "two crowds": lambda rng, width: crowds(rng, width, 4.0, 12.0, spread=1e-5),
    "uniform": lambda rng, width: rng.uniform(-18, 0, width).astype(np.float32),
    "excluded": excluded,
    "far apart": lambda rng, width: (1e30 * rng.normal(0, 1, width)).astype(np.float32),
}

SETTINGS: list[dict[str, Any]] = [
    {"tfs": 0.95},
    {"tfs": 0.3},
    {"tfs": 0.999, "temperature": 0.3},
    {"tfs": 0.9, "temperature": 20.0},
    {"tfs": 0.97, "top_p": 0.9, "min_p": 1e-5},
    {"tfs": 0.97, "top_k": 2500, "descending": True},
    {"tfs": 0.9, "typical": 0.9, "late": LateTemperature(0.5, 1.5, 1.0)},
    {"tfs": 0.9, "smoothing": 0.3, "xtc": Xtc(0.5, 1e-5)},
    {"typical": 0.95},
    {"typical": 0.2, "temperature": 0.5},
    {"typical": 0.7, "top_p": 0.95, "descending": True},
    {"typical": 0.999, "late": LateTemperature(2.0, 2.0, 1.0)},
    {"top_p": 0.95, "descending": True},
    {"late": LateTemperature(0.5, 1.5, 1.0), "xtc": Xtc(0.5, 1e-6)},
]


def check(rows: list[Row]) -> None:
    """In one batch, each token is that of the CPU, and no row is left to it."""
    there = [on_gpu(row) for row in rows]
    assert None not in sampling_cuda.launch(there).collect()
    for row, got, want in zip(rows, sampling.sample(there), sampling.sample(rows), strict=True):
        assert same(got, want), (row.plan, row.uniform, row.top_n, got, want)


@pytest.mark.parametrize("width", [2_999] if UNDER_A_TOOL else [2_999, 32_000, 128_256, 262_144])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_logits(kind: str, width: int) -> None:
    rng = np.random.default_rng([width, len(kind)])
    rows = []
    for i, fields in enumerate(SETTINGS):
        x = KINDS[kind](rng, width)
        uniform = [float(rng.random()), 0.0, 1 - 2**-53][i % 3]
        row = Row(Plan(size=width - i % 2, **fields), torch.from_numpy(x), uniform, top_n=[0, 5][i % 2])
        rows.append(replace(row, mirostat=2.0**-14) if i % 5 == 4 else row)
    check(rows)
    for row in rows[:: 14 if UNDER_A_TOOL else 4]:
        check([row])


@examples(60, 12)
@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from([3, 700, 2_049, 9_001] if UNDER_A_TOOL else [3, 700, 2_049, 9_001, 32_000, 128_256]),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([{"tfs": 0.9}, {"typical": 0.9}, {"tfs": 0.99, "typical": 0.5}]),
)
def test_cuts_with_random_other_settings(seed: int, width: int, kind: str, fields: dict[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(4):
        row = random_row(rng, replace(random_plan(rng, width), greedy=False, **fields), width)
        x = KINDS[kind](rng, width)
        rows.append(replace(row, logits=torch.from_numpy(x), negative=None if kind == "far apart" else row.negative))
    check(rows)


def test_more_rows_than_blocks() -> None:
    """A block then takes whole rows, one after the other."""
    width, rng = 2_500, np.random.default_rng(1)
    count = 12 if UNDER_A_TOOL else 300
    kinds = list(KINDS)
    check(
        [
            Row(
                Plan(size=width, **SETTINGS[i % len(SETTINGS)]),
                torch.from_numpy(KINDS[kinds[i % len(kinds)]](rng, width)),
                uniform=float(rng.random()),
            )
            for i in range(count)
        ]
    )
