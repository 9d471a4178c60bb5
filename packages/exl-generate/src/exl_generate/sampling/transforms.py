"""The definitions of the sampler's transforms in float64, one small function each.

Logit transforms change a float32 row [Vp] in place. Candidate transforms take probabilities as a float64 vector in
descending order that sums to 1. A *cut* returns which entries stay, as a boolean vector or as a count of leading
entries; the others return new probabilities. None of them uses settings, tokens or requests.

Where exllamav2 departs from the definition (top-p, min-p, top-a, typical, XTC, DRY, dynamic temperature), the
definition is followed; the docstring states the difference.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "cfg_mix",
    "draw",
    "dry",
    "dynamic_temperature",
    "late_temperature",
    "min_p",
    "mirostat_cut",
    "mirostat_update",
    "penalties",
    "skew",
    "softmax",
    "tail_free",
    "top_a",
    "top_k",
    "top_p",
    "typical",
    "xtc",
]

Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
Ids = NDArray[np.int64]
Keep = NDArray[np.bool_]


def cfg_mix(positive: Logits, negative: Logits, scale: float) -> Logits:
    """Classifier-free guidance: scale * logsoftmax(positive) + (1 - scale) * logsoftmax(negative)."""
    mixed = scale * _log_softmax(positive) + (1.0 - scale) * _log_softmax(negative)
    return mixed.astype(np.float32)


def _log_softmax(logits: Logits) -> Probabilities:
    x = logits.astype(np.float64)
    x -= x.max()
    return np.asarray(x - np.log(np.exp(x).sum()))


def penalties(
    logits: Logits,
    context: Ids,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    sustain: int = -1,
    decay: int = 0,
) -> None:
    """Repetition, presence and frequency penalties over the newest `sustain` tokens, fading over `decay` more.

    The strength at distance d from the newest token is 1 up to `sustain`, then falls linearly to 0. Repetition and
    presence act once per token, at its most recent occurrence; frequency at each. Ids beyond the logits' width are
    ignored.
    """
    reach = len(context) if sustain < 0 else min(len(context), sustain + decay)
    if reach == 0:
        return
    ids = context[len(context) - reach :]
    distance = np.arange(reach - 1, -1, -1)
    strength = np.ones(reach)
    if 0 <= sustain < reach:
        fading = distance > sustain
        strength[fading] = 1.0 - (distance[fading] - sustain) / decay
    inside = (ids >= 0) & (ids < len(logits))
    ids, strength = ids[inside], strength[inside]
    place = np.arange(len(ids), dtype=np.int32)
    latest = np.empty(len(logits), dtype=np.int32)
    latest[ids] = place  # assignment runs oldest to newest, so the most recent occurrence is the one that stays
    newest = latest[ids] == place
    seen, once = ids[newest], strength[newest]
    factor = 1.0 + (repetition - 1.0) * once
    values = logits[seen].astype(np.float64)
    values = np.where(values > 0, values / factor, values * factor) - presence * once
    if frequency != 0.0:
        total = np.zeros(len(ids))
        np.add.at(total, latest[ids], strength)
        values -= frequency * total[newest]
    logits[seen] = values


def dry(
    logits: Logits,
    context: Ids,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    max_ngram: int,
    window: int = 0,
    breakers: Collection[int] = (),
) -> None:
    """DRY: a token that would extend a repeat of L >= `allowed_length` tokens loses multiplier * base^(L -
    allowed_length).

    L is the longest suffix of the context, up to `max_ngram` tokens and free of `breakers`, that occurred before with
    that token after it, within the newest `window` tokens (0 = all). exllamav2 multiplies by the number of occurrences,
    lets a long suffix without continuation hide shorter ones, and stops penalising at `max_ngram`. The definition does
    none of that.
    """
    if window > 0:
        context = context[-window:]
    n = len(context)
    if n < 2 or int(context[-1]) in breakers:
        return
    ends = np.flatnonzero(context[:-1] == context[-1])
    length = np.ones(len(ends), dtype=np.int64)
    alive = np.arange(len(ends))
    for back in range(1, min(max_ngram, n - 1)):
        token = int(context[n - 1 - back])
        if token in breakers:
            break
        where = ends[alive] - back
        alive = alive[(where >= 0) & (context[np.maximum(where, 0)] == token)]
        if len(alive) == 0:
            break
        length[alive] += 1
    following = context[ends + 1]
    longest: dict[int, int] = {}
    for token, count in zip(following.tolist(), length.tolist(), strict=True):
        if count >= allowed_length and 0 <= token < len(logits) and token not in breakers:
            longest[token] = max(count, longest.get(token, 0))
    for token, count in longest.items():
        logits[token] -= multiplier * base ** (count - allowed_length)


def softmax(logits: NDArray[np.floating], temperature: float = 1.0, smoothing: float = 0.0) -> Probabilities:
    """exp((x - max) / T), or exp(-(x - max)^2 * s / T) with smoothing s > 0, normalised. -inf gives 0."""
    x = logits.astype(np.float64)
    x -= x.max()
    if smoothing > 0:
        x = -(x * x) * smoothing
    weights = np.exp(x / temperature)
    return np.asarray(weights / weights.sum())


def top_k(logits: Logits, k: int) -> Ids:
    """Ids of the k largest finite logits, largest first, ties by lower id. k = 0 keeps all."""
    if 0 < k < len(logits):
        border = np.partition(logits, len(logits) - k)[len(logits) - k]
        ids = np.flatnonzero((logits >= border) & (logits > -np.inf))
    else:
        ids = np.flatnonzero(logits > -np.inf)
        k = len(ids)
    return ids[_descending(logits[ids])][:k]


def _descending(x: Logits) -> Ids:
    """Return the stable order of falling values. Long vectors are sorted as integers that carry their index, which is
    faster.
    """
    if len(x) < 1024:
        return np.argsort(-x, kind="stable")
    bits = (x + np.float32(0)).view(np.uint32)  # adding 0 makes -0 and 0 equal
    falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    keys = np.sort((falling << np.uint64(32)) | np.arange(len(x), dtype=np.uint64))
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def top_p(p: Probabilities, threshold: float) -> int:
    """Return the length of the smallest prefix whose sum reaches `threshold`, the crossing token included (the
    nucleus).

    exllamav2 leaves the crossing token out.
    """
    return int(np.searchsorted(np.cumsum(p), threshold, side="left")) + 1


def top_a(p: Probabilities, a: float) -> int:
    """Number of tokens with p >= a * pmax^2; at least one."""
    return max(1, int(np.count_nonzero(p >= a * p[0] * p[0])))


def min_p(p: Probabilities, threshold: float) -> int:
    """Number of tokens with p >= threshold * pmax; at least one."""
    return max(1, int(np.count_nonzero(p >= threshold * p[0])))


def tail_free(p: Probabilities, z: float) -> int:
    """Tail-free sampling: keep one more than the leading terms of |second difference| whose running share is <= z."""
    kept = p[p >= 1e-8]
    if len(kept) < 3:
        return len(p)
    curvature = np.abs(kept[:-2] - 2 * kept[1:-1] + kept[2:])
    total = curvature.sum()
    if total <= 0:
        return len(p)
    return int(np.count_nonzero(np.cumsum(curvature / total) <= z)) + 1


def typical(p: Probabilities, mass: float) -> Keep:
    """Locally typical sampling: the smallest set by |-ln p - entropy| whose sum reaches `mass`, the crossing token
    included.

    exllamav2 leaves the crossing token out.
    """
    positive = p > 0
    surprise = np.full(len(p), np.inf)
    surprise[positive] = -np.log(p[positive])
    entropy = float((p[positive] * surprise[positive]).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(p[order]), mass, side="left")) + 1
    keep = np.zeros(len(p), dtype=np.bool_)
    keep[order[:count]] = True
    return keep


def mirostat_cut(p: Probabilities, mu: float) -> int:
    """Number of tokens whose surprise -log2 p is at most mu bits; at least one."""
    return max(1, int(np.count_nonzero(p >= 2.0**-mu)))


def mirostat_update(mu: float, chosen: float, tau: float, eta: float) -> float:
    """The next mu: mu + eta * (tau - surprise of the chosen token), in bits."""
    return mu + eta * (tau + float(np.log2(chosen)))


def late_temperature(p: Probabilities, temperature: float) -> Probabilities:
    """p^(1/T), renormalised."""
    weights = np.power(p / p.max(), 1.0 / temperature)
    return np.asarray(weights / weights.sum())


def dynamic_temperature(p: Probabilities, low: float, high: float, exponent: float) -> Probabilities:
    """T = low + (high - low) * (H / Hmax)^exponent over the candidates of positive probability."""
    positive = p[p > 0]
    h_max = float(np.log(len(positive))) or 1.0
    entropy = max(0.0, -float((positive * np.log(positive)).sum()))
    temperature = low + (high - low) * min(1.0, entropy / h_max) ** exponent
    return late_temperature(p, max(temperature, 1e-4))


def xtc(p: Probabilities, probability: float, threshold: float, ignored: Keep | None = None) -> Probabilities:
    """Exclude top choices, in expectation.

    All tokens with p >= threshold but the least probable of them lose `probability` of their mass, which the others
    share in proportion. `ignored` marks tokens that are never excluded.
    """
    choice = p >= threshold
    if ignored is not None:
        choice &= ~ignored
    picked = np.flatnonzero(choice)
    if len(picked) < 2:
        return p
    excluded = np.zeros(len(p), dtype=np.bool_)
    excluded[picked] = True
    excluded[picked[p[picked] == p[picked].min()][-1]] = False
    mass = float(p[excluded].sum())
    rest = 1.0 - mass
    gain = 1.0 + probability * mass / rest if rest > 0 else 1.0
    return np.where(excluded, p * (1.0 - probability), p * gain)


def skew(r: float, amount: float) -> float:
    """Warp a uniform number: r^(exp(-amount)); positive amounts favour less likely tokens."""
    return float(r ** np.exp(-amount))


def draw(p: Probabilities, r: float) -> int:
    """Return the index of the first entry whose running share exceeds r in [0, 1). An entry of probability 0 is never
    drawn.
    """
    running = np.cumsum(p)
    index = min(int(np.searchsorted(running, r * running[-1], side="right")), len(p) - 1)
    while p[index] == 0:
        index -= 1
    return index
