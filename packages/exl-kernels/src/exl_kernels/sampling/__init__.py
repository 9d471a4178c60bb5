"""From rows of logits to tokens: all transforms in one native call for a batch of rows.

A `Plan` holds the constants of a request, a `Row` the inputs of one step. `launch` queues the sampling of a token for
each row, `LaunchedRows.collect` waits for the tokens, and `sample` does both.

The token is a function of (logits, plan, row) alone: independent of the other rows, and identical on every instruction
set, on CPU and GPU. `exl_kernels.reference.sampling` is the same algorithm in plain numpy, with identical tokens.

Weights are fixed-point: floor(e^l * 2^44), so sums are exact and have no order. A candidate below 2^-44 of the most
probable one weighs nothing until a later temperature gives it weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _native
from .._native import Failure, Sampled
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..selection import MAX_LOGITS
from . import cuda as sampling_cuda
from .bias import SparseBias
from .cuda import workspace_bytes

__all__ = [
    "Dry",
    "Failure",
    "LateTemperature",
    "LaunchedRows",
    "Penalties",
    "Plan",
    "Row",
    "Sampled",
    "SparseBias",
    "TokenTarget",
    "Xtc",
    "distribution",
    "launch",
    "pack_ids",
    "sample",
    "shaped",
    "workspace_bytes",
]

_REFUSED = (AttributeError, TypeError, ValueError, BufferError)  # raised by native calls for a wrong operand

Mask = NDArray[np.int32]
Ids = NDArray[np.int64]


def pack_ids(ids: Iterable[int], size: int) -> Mask:
    """Pack ids below `size` into words: bit i & 31 of word i >> 5."""
    bits = np.zeros(-(-max(size, 1) // 32) * 32, dtype=np.uint8)
    wanted = np.fromiter(ids, dtype=np.int64)
    bits[wanted[(wanted >= 0) & (wanted < size)]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class LateTemperature(NamedTuple):
    """The temperature after the cuts, by entropy between two bounds; fixed if they are equal."""

    low: float
    high: float
    exponent: float = 1.0


class Xtc(NamedTuple):
    """Drop all candidates of at least the threshold but the least probable of them, with this probability."""

    probability: float = 0.0
    threshold: float = 0.0


class Penalties(NamedTuple):
    """Penalties of the tokens of the context."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    range: int = -1
    """Newest tokens that are looked at; -1 for all."""
    decay: int = 0
    """Tokens before these over which the penalties fade to nothing."""


class Dry(NamedTuple):
    """DRY: a penalty of tokens that would continue a repeat of the context."""

    multiplier: float
    base: float
    allowed_length: int
    max_ngram: int
    range: int
    """Newest tokens that are searched; 0 for all."""
    breakers: Mask
    """Packed ids that end a repeat."""


_NO_XTC, _NO_PENALTIES = Xtc(), Penalties()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The transforms of a request, as numbers. 0 switches a cut off. Callers validate; values are taken as they are.

    The native plan reads the fields by their names.

    Attributes:
        size: ids of the vocabulary; higher ones are padding and never chosen.
        temperature: divisor of the logits; below 0.01 the sampling is greedy.
        smoothing: factor of quadratic smoothing; 0 is off.
        top_k: keep the most probable candidates; 1 is greedy.
        top_p: keep the most probable candidates up to this sum.
        top_a: drop candidates below top_a * p_max^2.
        min_p: drop candidates below min_p * p_max.
        tfs: tail-free cut.
        typical: locally typical cut.
        late: temperature after the cuts.
        xtc: exclusion of the most probable candidates.
        xtc_ignored: packed ids that XTC keeps.
        descending: draw over falling probabilities instead of rising ids, as a skew needs.
        greedy: choose the largest logit.
        penalties: penalties of the tokens of the context.
        dry: penalty of repeats.
        bias: float32, added to the logits of the first ids; or a `SparseBias`.
        cfg_scale: weight of the logits against the row's `negative` in classifier-free guidance.
        native: the plan of the native module.
        on_devices: constants on each GPU that has sampled with this plan.
    """

    size: int
    temperature: float = 1.0
    smoothing: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    top_a: float = 0.0
    min_p: float = 0.0
    tfs: float = 0.0
    typical: float = 0.0
    late: LateTemperature | None = None
    xtc: Xtc = _NO_XTC
    xtc_ignored: Mask | None = None
    descending: bool = False
    greedy: bool = False
    penalties: Penalties = _NO_PENALTIES
    dry: Dry | None = None
    bias: Tensor | SparseBias | None = None
    cfg_scale: float | None = None
    native: _native.SamplingPlan = field(init=False, repr=False)
    on_devices: dict[torch.device, _native.SamplingConstants] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        bias_ids: Tensor | None = None
        bias_rest = 0.0
        if isinstance(self.bias, SparseBias):
            bias: Tensor | None = self.bias.values.detach().contiguous()
            bias_ids, bias_rest = self.bias.ids.contiguous(), self.bias.rest
        else:
            bias = None if self.bias is None else self.bias.detach().to("cpu", torch.float32).contiguous()
        native = _native.SamplingPlan(self, bias, bias_ids=bias_ids, bias_rest=bias_rest)
        object.__setattr__(self, "native", native)

    @property
    def scale(self) -> float:
        """Factor of the distance from the largest logit, or of its square with smoothing."""
        scale = (self.smoothing if self.smoothing > 0 else 1.0) / max(self.temperature, 1e-30)
        return min(scale, 3e38)


@dataclass(slots=True)
class Row:
    """One row of a call. The native functions read its fields by their names.

    Attributes:
        plan: transforms of the request.
        logits: float32 [V], contiguous.
        uniform: a number in [0, 1), already skewed.
        negative: logits of the negative prompt, like `logits`.
        context: int64 ids so far, contiguous; only penalties and DRY read it.
        mirostat: 2^-mu; 0 is off.
        mask: packed int32 words of allowed ids; ids beyond them are not allowed.
        banned: ids that are never chosen.
        discouraged: ids that are chosen only if no others are left.
        only: int64 ids; no others are chosen.
        top_n: candidates to report.
    """

    plan: Plan
    logits: Tensor
    uniform: float = 0.0
    negative: Tensor | None = None
    context: Ids | None = None
    mirostat: float = 0.0
    mask: Mask | None = None
    banned: Sequence[int] = ()
    discouraged: Sequence[int] = ()
    only: Ids | None = None
    top_n: int = 0


class TokenTarget(NamedTuple):
    """Where the sampling launches write the tokens: the ids of the next step."""

    ids: Tensor
    """int64 [rows] on the rows' GPU, contiguous: receives the tokens."""
    limit: int
    """Tokens are clamped to ids below it."""
    copied: tuple[Tensor, Tensor] | None = None
    """Before the tokens are written, the first tensor is copied to the second: uint8 of one size, a multiple of 4. The
    first is pinned memory and must not change until the stream has passed the call's launches. The second is on the
    GPU."""


class LaunchedRows:
    """The launched sampling of the rows of one call, whose tokens go `into` the target; `collect` waits for it."""

    __slots__ = ("_on_gpus", "_results", "_rows", "written")

    def __init__(self, rows: Sequence[Row], into: TokenTarget | None) -> None:
        self._rows = rows
        self._results: list[Sampled | Failure] | None = None
        self._on_gpus: list[tuple[list[int], sampling_cuda.LaunchedGpuRows]] = []
        #: Whether `into` gets the rows' tokens. `collect` resets it where a row was left to the CPU.
        self.written = False
        devices: dict[torch.device, list[int]] = {}
        for i, row in enumerate(rows):
            if row.logits.is_cuda and (row.negative is None or row.negative.device == row.logits.device):
                devices.setdefault(row.logits.device, []).append(i)
        for indices in devices.values():
            writes = into is not None and len(indices) == len(rows)
            queued = sampling_cuda.launch([rows[i] for i in indices], into if writes else None)
            self._on_gpus.append((indices, queued))
            self.written = writes

    def collect(self) -> list[Sampled | Failure]:
        """Wait for the GPUs, sample the remaining rows on the CPU, and return the result of each row.

        A second call returns the same results. Raises the same errors as `launch`.
        """
        if self._results is None:
            try:
                self._results = self._answers()
            except _REFUSED:
                _check_all(self._rows)
                raise
        return self._results

    def _answers(self) -> list[Sampled | Failure]:
        if not self._on_gpus:
            return _native.sample_rows([_on_cpu(row) for row in self._rows])
        answers: list[Sampled | Failure | None] = [None] * len(self._rows)
        for indices, queued in self._on_gpus:
            for i, answer in zip(indices, queued.collect(), strict=True):
                answers[i] = answer
        left = [i for i, answer in enumerate(answers) if answer is None]
        if left:
            self.written = False
            found = _native.sample_rows([_on_cpu(self._rows[i]) for i in left])
            for i, answer in zip(left, found, strict=True):
                answers[i] = answer
        return cast("list[Sampled | Failure]", answers)  # none is left


def launch(rows: Sequence[Row], into: TokenTarget | None = None) -> LaunchedRows:
    """Queue the sampling of one token a row. Rows may differ in width, settings and device.

    Rows on a GPU are sampled there, in one set of launches on torch's current stream, and only the answers are read
    back. `collect` samples the other rows on the CPU, with the same token as the GPU would give. These are rows on the
    CPU, and rows that report more than `selection.MOST_REPORTED` candidates.

    Logits of rows that are left to the CPU must not change until `collect`, others until the stream has passed the
    launches.

    Args:
        rows: the rows.
        into: gets the tokens if all rows are on one GPU (`LaunchedRows.written`). A step that is queued after this call
            on the same stream reads them before the host has seen them. A row without a token (`Failure`) writes any
            id.

    Raises:
        ShapeError: logits are not contiguous [V]. `launch` or `collect` raises these errors.
        DTypeError: logits are not float32.
        UnsupportedError: V exceeds `selection.MAX_LOGITS`.
        ValueError: a `uniform` is outside [0, 1).
        DeviceError: a launch fails.
    """
    try:
        return LaunchedRows(rows, into)
    except _REFUSED:
        _check_all(rows)
        raise


def sample(rows: Sequence[Row]) -> list[Sampled | Failure]:
    """Sample one token for each of `rows`: `launch` and `collect` in one call, with the same errors."""
    return launch(rows).collect()


def _on_cpu(row: Row) -> Row:
    if not row.logits.is_cuda and (row.negative is None or not row.negative.is_cuda):
        return row
    negative = None if row.negative is None else row.negative.cpu()
    return replace(row, logits=row.logits.cpu(), negative=negative)


def distribution(row: Row) -> tuple[Ids, NDArray[np.uint64]] | None:
    """Return the ids of the final candidates of `row`, ascending, and their weights; None if there is no candidate.

    A weight is the probability times a common factor.
    """
    try:
        found = _native.sampling_distribution(_on_cpu(row))
    except LookupError:
        return None
    return np.array(found.ids, dtype=np.int64), np.array(found.weights, dtype=np.uint64)


def shaped(row: Row) -> NDArray[np.float32]:
    """Return the logits of `row` after penalties, bans, bias, DRY and masks, cut to the vocabulary."""
    out = torch.empty(min(row.plan.size, row.logits.numel()))
    _native.sampling_shaped(_on_cpu(row), out)
    return out.numpy()


def _check_all(rows: Sequence[Row]) -> None:
    """Raise an error that names the wrong operand, after a native call has rejected its arguments."""
    for row in rows:
        _check(row)


def _check(row: Row) -> None:
    for name, t in (("logits", row.logits), ("negative", row.negative)):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.dtype != torch.float32:
            raise DTypeError(f"{name} is {getattr(t, 'dtype', type(t).__name__)}; expected a float32 tensor")
        if t.dim() != 1 or not t.is_contiguous():
            raise ShapeError(f"{name} is {tuple(t.shape)}, strides {t.stride()}; expected contiguous [V]")
        if t.numel() > MAX_LOGITS:
            raise UnsupportedError(f"{name} is {t.numel()} wide; at most {MAX_LOGITS} ids can be sampled from")
        if t.shape != row.logits.shape:
            raise ShapeError(f"{name} is {tuple(t.shape)}; expected {tuple(row.logits.shape)}, as logits")
    for name, array, dtype in (
        ("context", row.context, np.int64),
        ("mask", row.mask, np.int32),
        ("only", row.only, np.int64),
    ):
        if array is not None and (array.dtype != dtype or not array.flags.c_contiguous):
            raise DTypeError(f"{name} is {array.dtype}; expected a contiguous {np.dtype(dtype).name} array")
    if not (math.isfinite(row.uniform) and 0 <= row.uniform < 1):
        raise ValueError(f"uniform is {row.uniform}; it must be in [0, 1)")
