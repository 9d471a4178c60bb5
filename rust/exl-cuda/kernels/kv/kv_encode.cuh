// Encodes one block of 64 elements into pages, one warp a block. It repeats the CPU codec's arithmetic step by step, so that codes and
// scales are bitwise identical.
#pragma once
#include "common/abi.cuh"
#include "common/hadamard.cuh"

struct Pages {
  uint8_t* data[2];
  __half* scales[2];
  int codec[2];
  int heads, dim, blocks;  // blocks of 64 in a head; the last one may be short
  int64_t slots;
};
ABI_SIZE(Pages, 64); ABI_AT(Pages, data, 0); ABI_AT(Pages, scales, 16); ABI_AT(Pages, codec, 32); ABI_AT(Pages, heads, 40);
ABI_AT(Pages, dim, 44); ABI_AT(Pages, blocks, 48); ABI_AT(Pages, slots, 56);

DEVICE uint8_t e5m2(float x) {
  const uint16_t bits = __half_as_ushort(saturating_half(x)), magnitude = bits & 0x7fff;
  uint16_t rounded = (magnitude + 0x7f + ((magnitude >> 8) & 1)) >> 8;
  if (magnitude < 0x7c00) rounded = rounded < 0x7b ? rounded : 0x7b;
  else rounded = magnitude == 0x7c00 ? 0x7c : 0x7e;
  return (uint8_t)((bits & 0x8000) >> 8 | rounded);
}

// Code of a transformed element. The quotient of an all-zero run is NaN and gives code 0.
DEVICE unsigned quantize(float t, float peak, float m) {
  const float ratio = round_half(__fdiv_rn(t, peak));
  const float shifted = rintf(round_half(__fmaf_rn(ratio, m, m)));
  return (unsigned)fminf(fmaxf(shifted, 0.f), 2.f * m - 1.f);
}

// Largest magnitude of the 32 elements that lanes 0-15 or 16-31 hold; NaN if one of them is.
DEVICE float run_peak(float even, float odd) {
  float peak = fmaxf(fabsf(even), fabsf(odd));
  bool nan = isnan(even) || isnan(odd);
#pragma unroll
  for (int o = 8; o; o >>= 1) {
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
    nan |= __shfl_xor_sync(~0u, (int)nan, o) != 0;
  }
  return nan ? __int_as_float(0x7fffffff) : peak;
}

DEVICE void encode(const Pages& p, int plane, int64_t row, int block, float even, float odd) {
  const int lane = threadIdx.x & 31, e = block * 64 + 2 * lane, codec = p.codec[plane];
  uint8_t* data = p.data[plane];
  if (codec <= E5M2) {
    const int64_t at = row * p.dim + e;
    for (int i = 0; i < 2 && e + i < p.dim; i++) {
      if (codec == F16) reinterpret_cast<__half*>(data)[at + i] = saturating_half(i ? odd : even);
      else data[at + i] = e5m2(i ? odd : even);
    }
    return;
  }
  even = round_half(even);
  odd = round_half(odd);
  butterflies<true>(even, odd);
  const float m = codec == HADAMARD8 ? 128.f : 8.f, peak = run_peak(even, odd);
  const unsigned a = quantize(even, peak, m), b = quantize(odd, peak, m);
  const int64_t at = row * p.blocks + block;
  if (codec == HADAMARD8) reinterpret_cast<uint16_t*>(data)[at * 32 + lane] = (uint16_t)(a | b << 8);
  else data[at * 32 + lane] = (uint8_t)(a | b << 4);
  if (lane % 16 == 0) p.scales[plane][at * 2 + lane / 16] = __float2half_rn(peak / m);
}
