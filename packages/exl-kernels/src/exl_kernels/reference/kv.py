"""Twins of the cache codecs, written step by step in torch's half arithmetic.

A head has `head_dim` elements, padded with zeros to a multiple of 64 for the Hadamard codecs. So no block of 64 holds
two heads or two tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "RUN",
    "fp8_decode",
    "fp8_encode",
    "hadamard_decode",
    "hadamard_decode_exact",
    "hadamard_encode",
    "pad_to_block",
    "round_to_half",
]

BLOCK = 64
"""Elements of one Hadamard block."""
RUN = 32
"""Elements that share one scale."""


def round_to_half(x: Tensor) -> Tensor:
    """Round x to float16, to nearest even. Finite values beyond the range saturate; infinities and NaN are kept."""
    clamped = x.clamp(-65504.0, 65504.0)
    return torch.where(x.isfinite(), clamped, x).to(torch.float16)


def pad_to_block(x: Tensor) -> Tensor:
    """Pad x [..., D] with zeros to a multiple of 64 in the last dimension."""
    missing = -x.shape[-1] % BLOCK
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def fp8_encode(x: Tensor, *, truncate: bool = False) -> Tensor:
    """Convert float16 to E5M2 bytes (uint8), to nearest even, saturating at +-57344.

    `truncate`: drop the low byte instead, as exllamav2's cache does.
    """
    bits = x.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    if truncate:
        return (bits >> 8).to(torch.uint8)
    sign, magnitude = bits & 0x8000, bits & 0x7FFF
    rounded = (magnitude + 0x7F + ((magnitude >> 8) & 1)) >> 8
    rounded = torch.where(magnitude < 0x7C00, rounded.clamp(max=0x7B), rounded)
    rounded = torch.where(magnitude == 0x7C00, torch.full_like(rounded, 0x7C), rounded)
    rounded = torch.where(magnitude > 0x7C00, torch.full_like(rounded, 0x7E), rounded)
    return (rounded | (sign >> 8)).to(torch.uint8)


def fp8_decode(codes: Tensor) -> Tensor:
    """Convert E5M2 bytes to float16: the byte is the upper half of the float16."""
    bits = codes.to(torch.int32) << 8
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.float16)


def _butterflies(x: Tensor) -> Tensor:
    """Return the unnormalised Sylvester transform of the even and of the odd elements of each block of 64."""
    shape = x.shape
    v = x.reshape(-1, BLOCK // 2, 2)
    for stride in (1, 2, 4, 8, 16):
        pairs = v.reshape(-1, 16 // stride, 2, stride, 2)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        total, difference = low + high, low - high
        if v.dtype == torch.float16:
            total, difference = _saturate(total, low, high), _saturate(difference, low, high)
        v = torch.stack((total, difference), dim=2).reshape(-1, BLOCK // 2, 2)
    return v.reshape(shape)


def _saturate(result: Tensor, *operands: Tensor) -> Tensor:
    """Replace infinite half sums of finite numbers by the largest half."""
    finite = operands[0].isfinite() & operands[1].isfinite()
    return torch.where(finite, result.clamp(-65504.0, 65504.0), result)


def hadamard_encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode float16 [..., n], 64 | n, to codes uint8 [..., n * bits / 8] and scales float16 [..., n / 32]."""
    m = 1 << (bits - 1)
    transformed = _butterflies(x)
    runs = transformed.reshape(*x.shape[:-1], -1, RUN)
    peak = runs.abs().amax(-1, keepdim=True)
    ratio = (runs.float() / peak.float()).to(torch.float16)
    shifted = (ratio.double() * m + m).to(torch.float16)
    codes = shifted.float().nan_to_num(0.0).round().clamp(0, 2 * m - 1).to(torch.uint8).flatten(-2)
    scales = (peak.float() / m).to(torch.float16).squeeze(-1)
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes, scales


def _centred_codes(codes: Tensor, bits: int) -> Tensor:
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return codes.to(torch.int32) - (1 << (bits - 1))


def hadamard_decode(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Decode to float16 [..., n] with the codec's half roundings."""
    runs = _centred_codes(codes, bits).reshape(*scales.shape, RUN)
    v = (runs.float() * scales.float()[..., None]).to(torch.float16).flatten(-2)
    return _butterflies(v) * torch.tensor(1.0 / 32.0, dtype=torch.float16)


def hadamard_decode_exact(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Decode to the exact values of the codes, float64 [..., n]; attention uses them in float32."""
    runs = _centred_codes(codes, bits).reshape(*scales.shape, RUN)
    return _butterflies((runs.double() * scales.double()[..., None]).flatten(-2)) / 32.0
