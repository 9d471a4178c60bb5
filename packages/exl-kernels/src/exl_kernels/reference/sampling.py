"""The algorithm of `exl_kernels.sampling` in plain numpy: sorts where the kernels select, loops where they use tables.

Arithmetic is that of the kernels: float32 with separate multiplications and additions for weights, uint64 sums, float64
for single numbers. The tokens are identical.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from exl_kernels.sampling import Failure, LateTemperature, Plan, Row, Sampled, SparseBias

__all__ = ["candidates", "sample", "shaped", "weight"]

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
Ids = NDArray[np.int64]
Words = NDArray[np.int32]
_f = np.float32


def weight(log_weight: F32) -> F32:
    """Return e^l by the kernels' polynomial."""
    held = np.where(log_weight > _f(-40), log_weight, _f(-40)).astype(np.float32)
    rounder = _f(12582912.0)
    n = (held * _f(math.log2(math.e)) + rounder) - rounder
    r = held - n * _f(0.6933594)
    r = r - n * _f(-2.1219444e-4)
    p = np.full_like(r, _f(1.0) / _f(5040.0))
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5):
        p = p * r + _f(c)
    p = (p * (r * r) + r) + _f(1)
    return np.where(log_weight >= _f(-31), p * np.exp2(n).astype(np.float32), _f(0)).astype(np.float32)


def fixed(w: F32) -> U64:
    """Return floor(w * 2^44)."""
    return np.floor(w.astype(np.float64) * 2.0**44).astype(np.uint64)


def shaped(row: Row) -> F32:
    """Apply the transforms of the logits (mix, penalties, bias, DRY, bans, masks), one token at a time."""
    with np.errstate(over="ignore", invalid="ignore"):  # overflows and NaN are kept and reported
        return _shaped(row)


def _shaped(row: Row) -> F32:
    plan = row.plan
    x = row.logits.numpy().copy()
    if row.negative is not None:
        x = _mix(x, row.negative.numpy(), 1.0 if plan.cfg_scale is None else plan.cfg_scale)
    x = x[: plan.size]
    context = [] if row.context is None else row.context.tolist()
    _penalize(x, context, *plan.penalties)
    x[[t for t in row.discouraged if t < len(x)]] = _f(-1e30)
    if plan.bias is not None:
        given = plan.bias.dense(len(x)) if isinstance(plan.bias, SparseBias) else plan.bias
        bias = given.detach().cpu().float().numpy()[: len(x)]
        x[: len(bias)] += bias
    if plan.dry is not None:
        _dry(x, context, *plan.dry)
    x[[t for t in row.banned if t < len(x)]] = -np.inf
    allowed = np.ones(len(x), dtype=np.bool_)
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: len(x)]
        allowed[:] = False
        allowed[: len(bits)] = bits == 1
    if row.only is not None:
        allowed &= np.isin(np.arange(len(x)), row.only)
    x[~allowed] = -np.inf
    return x


def _mix(a: F32, b: F32, scale: float) -> F32:
    shift = scale * _log_sum(a) + (1.0 - scale) * _log_sum(b)
    if math.isnan(shift):
        return np.full_like(a, np.nan)
    mixed = (scale * a.astype(np.float64) + (1.0 - scale) * b.astype(np.float64) - shift).astype(np.float32)
    return np.where(a == -np.inf, a, mixed)


def _log_sum(x: F32) -> float:
    """Return the log of the sum of exponentials; NaN where a value is NaN or +inf, or no value is above -inf."""
    if not np.isfinite(x.max()):
        return math.nan
    return float(x.max()) + _ln(float(fixed(weight(x - x.max())).sum()) / 2.0**44)


def _penalize(
    x: F32, context: list[int], repetition: float, presence: float, frequency: float, sustain: int, decay: int
) -> None:
    if (repetition, presence, frequency) == (1.0, 0.0, 0.0):
        return
    full = len(context) if sustain < 0 else sustain
    strengths: dict[int, list[float]] = {}
    for d, token in enumerate(reversed(context)):
        if d >= full + (0 if sustain < 0 else decay):
            break
        if 0 <= token < len(x):
            strengths.setdefault(token, []).append(1.0 if d <= full else 1.0 - (d - full) / decay)
    for token, found in strengths.items():
        total = 0.0
        for s in found:
            total += s
        factor, v = 1.0 + (repetition - 1.0) * found[0], float(x[token])
        x[token] = (v / factor if v > 0 else v * factor) - (presence * found[0] + frequency * total)


def _dry(
    x: F32, context: list[int], multiplier: float, base: float, allowed: int, longest: int, window: int, breakers: Words
) -> None:
    context = context[-window:] if window else context
    bits = np.unpackbits(breakers.view(np.uint8), bitorder="little")
    breaks = {t for t in context if t < 0 or (t < len(bits) and bits[t])}
    found: dict[int, int] = {}
    for at in range(1, len(context)):
        n = 0
        while n < longest and n < at and context[at - 1 - n] == context[-1 - n] and context[-1 - n] not in breaks:
            n += 1
        token = context[at]
        if n >= allowed and 0 <= token < len(x) and token not in breaks:
            found[token] = max(n, found.get(token, 0))
    for token, n in found.items():
        x[token] = float(x[token]) - multiplier * base ** (n - allowed)


def _descending(q: U64, x: F32, ids: Ids) -> Ids:
    return np.lexsort((ids, -(x.astype(np.float64)), -(q.astype(np.float64)))).astype(np.int64)


def _share(part: float, total: int) -> int:
    return min(max(math.ceil(part * float(total)), 1), max(total, 1))


def _prefix(q: U64, target: int) -> int:
    return int(np.searchsorted(np.cumsum(q), np.uint64(target), side="left")) + 1


def candidates(row: Row) -> tuple[Ids, F32, U64] | Failure:
    """Apply the cuts and return ids by rising number, logits and final weights of the candidates."""
    plan, x = row.plan, shaped(row)
    if np.isnan(x).any() or (x == np.inf).any():
        return Failure(not_finite=True)
    ids = np.flatnonzero(x > -np.inf).astype(np.int64)
    if len(ids) == 0:
        return Failure(not_finite=False)
    if plan.greedy:
        best = int(x.argmax())
        return np.array([best]), x[[best]], np.array([1], dtype=np.uint64)
    peak = x.max()
    if 0 < plan.top_k < len(x):
        ids = np.sort(ids[np.lexsort((ids, -x[ids].astype(np.float64)))[: plan.top_k]])
    with np.errstate(over="ignore"):
        d = x[ids] - peak
        d = -(d * d) if plan.smoothing > 0 else d
        log = d * _f(plan.scale)
    q = fixed(weight(log))
    for cut in (_top_p, _top_a, _min_p, _tfs, _typical, _mirostat):
        if len(ids) > 1:
            keep = np.sort(cut(row, ids, x[ids], log, q))
            ids, log, q = ids[keep], log[keep], q[keep]
    if len(ids) > 1 and plan.late is not None:
        q = _late(plan.late, log, q)
    if plan.xtc.probability > 0:
        q = _xtc(plan, ids, x[ids], q)
    return ids, x[ids], q


def _all(ids: Ids) -> Ids:
    return np.arange(len(ids))


def _at_least(least: float, ids: Ids, x: F32, q: U64) -> Ids:
    keep = np.flatnonzero(q >= np.uint64(math.ceil(least)))
    return keep if len(keep) else _descending(q, x, ids)[:1]


def _top_p(row: Row, ids: Ids, x: F32, log: F32, q: U64) -> Ids:
    if row.plan.top_p <= 0:
        return _all(ids)
    order = _descending(q, x, ids)
    return order[: _prefix(q[order], _share(row.plan.top_p, int(q.sum())))]


def _top_a(row: Row, ids: Ids, x: F32, log: F32, q: U64) -> Ids:
    high = float(q.max())
    return _at_least(row.plan.top_a * high * high / float(q.sum()), ids, x, q) if row.plan.top_a > 0 else _all(ids)


def _min_p(row: Row, ids: Ids, x: F32, log: F32, q: U64) -> Ids:
    return _at_least(row.plan.min_p * float(q.max()), ids, x, q) if row.plan.min_p > 0 else _all(ids)


def _mirostat(row: Row, ids: Ids, x: F32, log: F32, q: U64) -> Ids:
    return _at_least(row.mirostat * float(q.sum()), ids, x, q) if row.mirostat > 0 else _all(ids)


def _tfs(row: Row, ids: Ids, x: F32, log: F32, q: U64) -> Ids:
    order = _descending(q, x, ids)
    kept = q[order][q[order] >= np.uint64(math.ceil(1e-8 * float(q.sum())))].astype(np.int64)
    if row.plan.tfs <= 0 or len(kept) < 3:
        return _all(ids)
    curve = np.abs(kept[:-2] - 2 * kept[1:-1] + kept[2:])
    if curve.sum() == 0:
        return _all(ids)
    leading = int(np.count_nonzero(np.cumsum(curve) <= int(row.plan.tfs * float(curve.sum()))))
    return order[: leading + 1]


def _surprise(log: F32, q: U64) -> float:
    w = weight(log)
    with np.errstate(invalid="ignore"):
        return float(fixed(np.where(w > 0, w * -log, _f(0)).astype(np.float32)).sum()) / float(q.sum())


def _typical(row: Row, ids: Ids, x: F32, log: F32, q: U64) -> Ids:
    if row.plan.typical <= 0:
        return _all(ids)
    away = np.abs(-log.astype(np.float64) - _surprise(log, q))
    order = np.lexsort((ids, -x.astype(np.float64), away)).astype(np.int64)
    return order[: _prefix(q[order], _share(row.plan.typical, int(q.sum())))]


def _late(late: LateTemperature, log: F32, q: U64) -> U64:
    low, high, exponent = late
    temperature = low
    if low != high:
        most = _ln(float(np.count_nonzero(log >= -745))) or 1.0
        entropy = _ln(float(q.sum()) / 2.0**44) + _surprise(log, q)
        temperature = max(low + (high - low) * _pow(min(max(entropy / most, 0.0), 1.0), exponent), 1e-4)
    with np.errstate(over="ignore"):
        return fixed(weight((log - log.max()) * _f(1.0 / temperature)))


def _xtc(plan: Plan, ids: Ids, x: F32, q: U64) -> U64:
    probability, threshold = plan.xtc
    words = np.zeros(0, dtype=np.int32) if plan.xtc_ignored is None else plan.xtc_ignored
    ignored = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    order = _descending(q, x, ids)
    least = np.uint64(math.ceil(threshold * float(q.sum())))
    choice = [i for i in order if q[i] >= least and ids[i] not in ignored]
    out = choice[:-1]
    excluded = int(q[out].sum())
    rest = float(int(q.sum()) - excluded)
    if len(choice) < 2 or rest == 0:
        return q
    factor = np.full(len(q), 1.0 + probability * excluded / rest)
    factor[out] = 1.0 - probability
    return np.asarray(np.floor(q.astype(np.float64) * factor).astype(np.uint64))


def sample(row: Row) -> Sampled | Failure:
    """Draw a token and report the first candidates."""
    found = candidates(row)
    if isinstance(found, Failure):
        return found
    ids, x, q = found
    order = _descending(q, x, ids)
    walk = order if row.plan.descending else _all(ids)
    total = int(q.sum())
    target = min(int(row.uniform * float(total)), total - 1)
    chosen = walk[int(np.searchsorted(np.cumsum(q[walk]), np.uint64(target), side="right"))]
    top = order[: row.top_n]
    whole = float(total)  # sums beyond 2^53 are rounded before the division, as in the kernels
    return Sampled(int(ids[chosen]), float(q[chosen]) / whole, ids[top].tolist(), [float(v) / whole for v in q[top]])


# The kernels' own logarithm and exponential: additions and multiplications only, so that every machine agrees.


def _ln(x: float) -> float:
    m, e = math.frexp(x)
    m, e = m * 2, e - 1
    if m > math.sqrt(2):
        m, e = m * 0.5, e + 1
    s = (m - 1.0) / (m + 1.0)
    z, total = s * s, 0.0
    for k in range(11, -1, -1):
        total = total * z + 1.0 / (2 * k + 1)
    return e * 0.6931471803691238 + (2.0 * s * total + e * 1.9082149292705877e-10)


def _exp(x: float) -> float:
    if x < -700:
        return 0.0
    n = math.floor(x * math.log2(math.e) + 0.5)
    r, total = (x - n * 0.6931471803691238) - n * 1.9082149292705877e-10, 1.0
    for k in range(14, 0, -1):
        total = total * r / k + 1.0
    return math.ldexp(total, n)


def _pow(x: float, y: float) -> float:
    if y == 0:
        return 1.0
    return 0.0 if x < 2.3e-308 else _exp(min(y * _ln(x), 700.0))
