"""Rotary position embedding: inverse frequencies of each scaling method, and the sin/cos tables.

Formulas are those of transformers (`modeling_rope_utils`) wherever exllamav2 differs from the published models.
Frequencies and angles are float32. sin and cos are evaluated in float64 and rounded once, in fixed blocks of rows, so a
table row is bitwise identical however far the table has grown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RopeSettings", "RopeTable", "inverse_frequencies"]

TABLE_ROWS = 256


@dataclass(frozen=True)
class RopeSettings:
    """All settings that decide the rotation of a position; built by `ExLlamaV2Config.rope_settings()`."""

    theta: float
    rotary_dim: int  # rotated dimensions of each head, even
    max_positions: int
    method: str | None = None  # None, "llama3", "yarn", "su" (longrope), "dynamic"
    position_scale: float = 1.0  # positions are divided by this (linear scaling)
    alpha: float = 1.0  # NTK
    factor: float = 1.0  # llama3, yarn, dynamic; su: ratio of the extended to the original length
    original_max_positions: int = 0  # llama3, yarn, su, dynamic
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, su
    divisors: tuple[float, ...] = ()  # su: of each frequency
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


def inverse_frequencies(s: RopeSettings) -> tuple[Tensor, float]:
    """Return (inv_freq float32 [rotary_dim / 2], factor m on sin and cos).

    inv_freq[j] = base^(-2j/d), base = theta * alpha^(d/(d-2)), followed by the method's correction. Methods that depend
    on the length ("su", "dynamic") use the configured maximum, not the length of a call. Keys in the cache were rotated
    before later lengths are known, and a request's tokens must not depend on how it is cut or shared.
    """
    d = s.rotary_dim
    base = s.theta
    if s.alpha != 1.0:
        base *= s.alpha ** _ntk_exponent(d)
    if s.method == "dynamic":
        longest = max(s.max_positions, s.original_max_positions)
        base *= (s.factor * longest / s.original_max_positions - (s.factor - 1)) ** _ntk_exponent(d)
    exponents = torch.arange(0, d, 2, dtype=torch.float32) / d
    inv_freq = 1.0 / (base**exponents)
    if s.method == "llama3":
        return _llama3(inv_freq, s), 1.0
    if s.method == "yarn":
        return _yarn(base, exponents, s), _yarn_attention_factor(s)
    if s.method == "su":
        return 1.0 / (torch.tensor(s.divisors, dtype=torch.float32) * base**exponents), _su_attention_factor(s)
    return inv_freq, 1.0


def _ntk_exponent(d: int) -> float:
    return d / (d - 2) if d > 2 else 1.0  # with a single frequency the base does not matter


def _su_attention_factor(s: RopeSettings) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    return 1.0 if s.factor <= 1 else math.sqrt(1 + math.log(s.factor) / math.log(s.original_max_positions))


def _llama3(inv_freq: Tensor, s: RopeSettings) -> Tensor:
    low_wavelength = s.original_max_positions / s.low_freq_factor
    high_wavelength = s.original_max_positions / s.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    blended = (1 - smooth) * inv_freq / s.factor + smooth * inv_freq
    result = torch.where(wavelength > low_wavelength, inv_freq / s.factor, blended)
    return torch.where(wavelength < high_wavelength, inv_freq, result)


def _yarn(base: float, exponents: Tensor, s: RopeSettings) -> Tensor:
    d = s.rotary_dim
    pos_freqs = base**exponents
    extrapolated, interpolated = 1.0 / pos_freqs, 1.0 / (s.factor * pos_freqs)

    def correction_dim(rotations: float) -> float:
        return d * math.log(s.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction_dim(s.beta_fast), correction_dim(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return interpolated * ramp + extrapolated * (1 - ramp)


def _yarn_attention_factor(s: RopeSettings) -> float:
    def get_mscale(mscale: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * mscale * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return get_mscale(s.mscale) / get_mscale(s.mscale_all_dim)
    return get_mscale(1.0)


class RopeTable:
    """cos and sin, float32 [positions, rotary_dim / 2], grown on demand up to `max_positions` rows."""

    def __init__(self, settings: RopeSettings) -> None:
        self.settings = settings
        self.inv_freq, self.attention_factor = inverse_frequencies(settings)
        self._cos = torch.empty((0, settings.rotary_dim // 2), dtype=torch.float32)
        self._sin = torch.empty_like(self._cos)
        self._moved: dict[torch.device, tuple[Tensor, Tensor]] = {}  # captured steps of all devices share them

    def upto(self, positions: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) with at least `positions` rows, on the CPU or on `device`.

        The caller has checked `positions` against `max_positions`.
        """
        tables = self._on_cpu(positions)
        if device is None or device.type == "cpu":
            return tables
        moved = self._moved.get(device)
        if moved is None or moved[0].shape != tables[0].shape:
            with torch.inference_mode(False):
                moved = self._moved[device] = (tables[0].to(device), tables[1].to(device))
        return moved

    def _on_cpu(self, positions: int) -> tuple[Tensor, Tensor]:
        have = self._cos.shape[0]
        if positions > have:
            want = min(max(positions, 2 * have), max(self.settings.max_positions, positions))
            first, last = have // TABLE_ROWS, -(-want // TABLE_ROWS)
            with torch.inference_mode(False):  # the table outlives the pass that extends it
                blocks = [self._block(b) for b in range(first, last)]
                self._cos = torch.cat([self._cos[: first * TABLE_ROWS], *(c for c, _ in blocks)])
                self._sin = torch.cat([self._sin[: first * TABLE_ROWS], *(s for _, s in blocks)])
        return self._cos, self._sin

    def _block(self, index: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(index * TABLE_ROWS, (index + 1) * TABLE_ROWS, dtype=torch.float32)
        angles = ((rows / self.settings.position_scale)[:, None] * self.inv_freq[None, :]).double()
        m = self.attention_factor
        return (angles.cos() * m).float(), (angles.sin() * m).float()
