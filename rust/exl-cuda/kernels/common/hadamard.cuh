// Blocks of 64 elements of one head held by a warp: lane l has elements 2l (even half) and 2l + 1 (odd half). The cache codecs and the
// attention kernels share this code, so that both round alike.
#pragma once
#include "common/common.cuh"

// Storage format of keys or values.
enum Codec { F16 = 0, E5M2 = 1, HADAMARD8 = 2, HADAMARD4 = 3 };

// Rounds as the cache does: to nearest even; finite values beyond the range saturate; infinities and NaN stay.
DEVICE __half saturating_half(float x) {
  if (isfinite(x)) x = fminf(fmaxf(x, -65504.f), 65504.f);
  return __float2half_rn(x);
}
DEVICE float round_half(float x) { return __half2float(saturating_half(x)); }

// Unnormalised Sylvester transforms of the 32 even and of the 32 odd elements. HALF: every sum is rounded to half.
template <bool HALF>
DEVICE void butterflies(float& even, float& odd) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
    const float a = __shfl_xor_sync(~0u, even, stride), b = __shfl_xor_sync(~0u, odd, stride);
    even = lane & stride ? __fsub_rn(a, even) : __fadd_rn(even, a);
    odd = lane & stride ? __fsub_rn(b, odd) : __fadd_rn(odd, b);
    if (HALF) {
      even = round_half(even);
      odd = round_half(odd);
    }
  }
}
