"""Random plans and rows to sample, and the comparison of results, shared by the tests of sampling."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from exl_kernels.sampling import Dry, Failure, LateTemperature, Penalties, Plan, Row, Sampled, SparseBias, Xtc, pack_ids

UNDER_A_TOOL = "EXL_SANITIZER" in os.environ  # as in attention_cases.py
SHARES = {"top_p": 0.99, "top_a": 0.5, "min_p": 0.5, "tfs": 0.99, "typical": 0.99}


def random_plan(rng: np.random.Generator, width: int) -> Plan:
    """Every transform, each in about a third of the plans."""

    def maybe(value: Any, off: Any, chance: float = 0.35) -> Any:
        return value if rng.random() < chance else off

    u = rng.uniform
    temperature, some = u(0.3, 3), pack_ids(rng.integers(0, width, 5), width)
    late = [None, None, LateTemperature(temperature, temperature), LateTemperature(u(0, 0.5), u(0.6, 2), u(0.3, 2))][
        rng.integers(4)
    ]
    return Plan(
        size=max(1, width - int(rng.integers(0, 40))),
        temperature=u(0.05, 3),
        smoothing=maybe(u(0, 1), 0.0),
        top_k=maybe(int(rng.integers(2, width + 5)), 0),
        late=late,
        xtc=maybe(Xtc(u(0, 1), u(0, 0.4)), Xtc()),
        xtc_ignored=some,
        descending=bool(rng.random() < 0.4),
        greedy=bool(rng.random() < 0.05),
        penalties=maybe(
            Penalties(u(0.8, 2), u(-1, 1), u(-1, 1), int(rng.integers(-1, 10)), int(rng.integers(0, 8))), Penalties()
        ),
        dry=maybe(
            Dry(u(0, 2), 1.75, int(rng.integers(1, 3)), int(rng.integers(1, 8)), int(rng.choice([0, 25])), some), None
        ),
        bias=maybe(random_bias(rng, width), None),
        cfg_scale=1.7,
        **{name: maybe(u(0.01, most), 0.0) for name, most in SHARES.items()},
    )


def random_bias(rng: np.random.Generator, width: int) -> torch.Tensor | SparseBias:
    """One value for each of the first ids, or for some ids up to beyond the vocabulary."""
    if rng.random() < 0.5:
        return torch.from_numpy(rng.normal(size=int(rng.integers(1, width + 5))))
    ids = rng.permutation(width + 5)[: rng.integers(0, width + 5)].tolist()
    values = np.where(rng.random(len(ids)) < 0.1, -np.inf, rng.normal(0, 5, len(ids)))
    return SparseBias.of(dict(zip(ids, values.tolist(), strict=True)), float(rng.choice([0.0, -1.5, -np.inf])))


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


def on_gpu(row: Row) -> Row:
    return replace(row, logits=row.logits.cuda(), negative=None if row.negative is None else row.negative.cuda())
