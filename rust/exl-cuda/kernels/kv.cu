// Keys and values into pages and out of them (spec formats 5): one warp a block of 64 elements, the CPU codec's arithmetic step by
// step, so that codes and scales are the same bits.
#include "hadamard.cuh"

struct Pages {  // mirrored in ops/kv.rs
  uint8_t* data[2];
  __half* scales[2];
  int codec[2];
  int heads, dim, blocks;  // blocks of 64 in a head, the last one possibly short
  int64_t slots;
};

DEVICE uint8_t e5m2(float x) {
  const uint16_t bits = __half_as_ushort(saturating_half(x)), magnitude = bits & 0x7fff;
  uint16_t rounded = (magnitude + 0x7f + ((magnitude >> 8) & 1)) >> 8;
  if (magnitude < 0x7c00) rounded = rounded < 0x7b ? rounded : 0x7b;
  else rounded = magnitude == 0x7c00 ? 0x7c : 0x7e;
  return (uint8_t)((bits & 0x8000) >> 8 | rounded);
}

// Step 3 of formats 5.4; the quotient of an all-zero run is NaN and gives code 0.
DEVICE unsigned quantize(float t, float peak, float m) {
  const float ratio = round_half(__fdiv_rn(t, peak));
  const float shifted = rintf(round_half(__fmaf_rn(ratio, m, m)));
  return (unsigned)fminf(fmaxf(shifted, 0.f), 2.f * m - 1.f);
}

// Largest magnitude of the 32 elements that lanes 0-15 or 16-31 hold; NaN if one is.
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

// Grid: tokens; a warp takes every eighth block of keys and values. A slot outside the pages is passed over.
template <class T>
DEVICE void store(const Pages& p, const T* k, const T* v, const int64_t* slots) {
  pdl_trigger();
  pdl_wait();
  const int64_t slot = slots[blockIdx.x];
  if (slot < 0 || slot >= p.slots) return;
  const int lane = threadIdx.x & 31, of_plane = p.heads * p.blocks;
  for (int item = threadIdx.x >> 5; item < 2 * of_plane; item += blockDim.x >> 5) {
    const int plane = item / of_plane, head = item % of_plane / p.blocks, block = item % p.blocks, e = block * 64 + 2 * lane;
    const T* x = (plane ? v : k) + ((int64_t)blockIdx.x * p.heads + head) * p.dim + e;
    const float even = e < p.dim ? to_float(x[0]) : 0.f, odd = e + 1 < p.dim ? to_float(x[1]) : 0.f;
    encode(p, plane, slot * p.heads + head, block, even, odd);
  }
}

#define STORE(T, t)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) kv_store_##t(Pages p, const T* k, const T* v, const int64_t* slots) { \
    store(p, k, v, slots);                                                                                            \
  }
STORE(__half, f16)
STORE(__nv_bfloat16, bf16)
STORE(float, f32)

DEVICE float stored(const Pages& p, int plane, int64_t row, int block, int i) {
  const int e = block * 64 + i, codec = p.codec[plane];
  const uint8_t* data = p.data[plane];
  if (codec <= E5M2) {
    if (e >= p.dim) return 0.f;
    const int64_t at = row * p.dim + e;
    return __half2float(codec == F16 ? reinterpret_cast<const __half*>(data)[at] : __ushort_as_half(data[at] << 8));
  }
  const int64_t at = row * p.blocks + block;
  const int code = codec == HADAMARD8 ? data[at * 64 + i] - 128 : (data[at * 32 + i / 2] >> (i & 1) * 4 & 15) - 8;
  return round_half((float)code * __half2float(p.scales[plane][at * 2 + i / 32]));
}

// Grid: tokens. With the codec's own half roundings; a slot outside the pages gives zeros.
extern "C" __global__ void __launch_bounds__(256) kv_load(Pages p, float* k, float* v, const int64_t* slots) {
  pdl_trigger();
  pdl_wait();
  const int64_t slot = slots[blockIdx.x];
  const bool here = slot >= 0 && slot < p.slots;
  const int lane = threadIdx.x & 31, of_plane = p.heads * p.blocks;
  for (int item = threadIdx.x >> 5; item < 2 * of_plane; item += blockDim.x >> 5) {
    const int plane = item / of_plane, head = item % of_plane / p.blocks, block = item % p.blocks, e = block * 64 + 2 * lane;
    float even = 0.f, odd = 0.f;
    if (here) {
      even = stored(p, plane, slot * p.heads + head, block, 2 * lane);
      odd = stored(p, plane, slot * p.heads + head, block, 2 * lane + 1);
      if (p.codec[plane] >= HADAMARD8) {
        butterflies<true>(even, odd);
        even = round_half(even / 32.f);
        odd = round_half(odd / 32.f);
      }
    }
    float* out = (plane ? v : k) + ((int64_t)blockIdx.x * p.heads + head) * p.dim + e;
    if (e < p.dim) out[0] = even;
    if (e + 1 < p.dim) out[1] = odd;
  }
}
