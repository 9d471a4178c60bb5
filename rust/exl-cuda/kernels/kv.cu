// Writing keys and values into pages: one warp a head of a token, bit-exact to the codecs of spec/formats.md 5.
#include "pages.cuh"

DEVICE bool finite(__half v) { return (__half_as_ushort(v) & 0x7fff) < 0x7c00; }
DEVICE bool is_nan(__half v) { return (__half_as_ushort(v) & 0x7fff) > 0x7c00; }

// To half, to nearest even; finite values beyond the range saturate.
template <class T>
DEVICE __half round_to_half(T x) {
  const float v = to_float(x);
  const __half h = __float2half_rn(v);
  if (!finite(h) && isfinite(v)) return __ushort_as_half(v < 0.f ? 0xfbff : 0x7bff);
  return h;
}
// Half sum in which finite numbers that overflow become the largest half.
DEVICE __half add_saturated(__half a, __half b) {
  const __half s = __hadd(a, b);
  if (!finite(s) && finite(a) && finite(b)) return __ushort_as_half(__half_as_ushort(s) & 0x8000 ? 0xfbff : 0x7bff);
  return s;
}
DEVICE __half from_lane(__half v, int mask) { return __ushort_as_half(__shfl_xor_sync(~0u, __half_as_ushort(v), mask)); }

DEVICE void half_butterflies(__half& a, __half& b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const __half x = from_lane(a, o), y = from_lane(b, o);
    a = lane & o ? add_saturated(x, __hneg(a)) : add_saturated(a, x);
    b = lane & o ? add_saturated(y, __hneg(b)) : add_saturated(b, y);
  }
}

DEVICE uint8_t to_fp8(__half v) {
  const uint32_t bits = __half_as_ushort(v), magnitude = bits & 0x7fff, sign = bits >> 8 & 0x80;
  uint32_t rounded = (magnitude + 0x7f + (magnitude >> 8 & 1)) >> 8;
  if (magnitude < 0x7c00) rounded = min(rounded, 0x7bu);
  else rounded = magnitude == 0x7c00 ? 0x7c : 0x7e;
  return static_cast<uint8_t>(rounded | sign);
}

// Code in 0 .. 2 m - 1 of a transformed value, relative to its run's peak.
DEVICE uint32_t to_code(__half v, float peak, int m) {
  const __half ratio = __float2half_rn(__half2float(v) / peak);
  const float shifted = __half2float(__hfma(ratio, __float2half_rn(m), __float2half_rn(m)));
  if (shifted != shifted) return 0;
  return static_cast<uint32_t>(fminf(fmaxf(rintf(shifted), 0.f), 2.f * m - 1.f));
}

template <class T, Storage KIND>
DEVICE void encode(const Store& s, int64_t head, const T* x, int head_dim) {
  const int lane = threadIdx.x % 32;
  uint8_t* to = s.data + head * stored_bytes(head_dim, KIND);
  if constexpr (KIND == FP16 || KIND == FP8) {
    for (int i = lane; i < head_dim; i += 32) {
      const __half v = round_to_half(x[i]);
      if constexpr (KIND == FP16) reinterpret_cast<__half*>(to)[i] = v;
      else to[i] = to_fp8(v);
    }
    return;
  }
  constexpr int M = KIND == Q8 ? 128 : 8;
  for (int block = 0; block < padded(head_dim, KIND) / 64; block++) {
    const int i = 64 * block + 2 * lane;
    __half a = i < head_dim ? round_to_half(x[i]) : __half(0.f), b = i + 1 < head_dim ? round_to_half(x[i + 1]) : __half(0.f);
    half_butterflies(a, b);
    // A run is 32 elements: sixteen lanes. NaN anywhere in it makes its peak NaN.
    float peak = fmaxf(fabsf(__half2float(a)), fabsf(__half2float(b)));
    if (is_nan(a) || is_nan(b)) peak = __int_as_float(0x7fc00000);
#pragma unroll
    for (int o = 8; o; o >>= 1) {
      const float other = __shfl_xor_sync(~0u, peak, o);
      peak = peak != peak ? peak : other != other ? other : fmaxf(peak, other);
    }
    const uint32_t low = to_code(a, peak, M), high = to_code(b, peak, M);
    if constexpr (KIND == Q8) reinterpret_cast<uint16_t*>(to)[i / 2] = static_cast<uint16_t>(low | high << 8);
    else to[i / 2] = static_cast<uint8_t>(low | high << 4);
    if (lane % 16 == 0) s.scales[head * (padded(head_dim, KIND) / 32) + 2 * block + lane / 16] = __float2half_rn(peak / M);
  }
}

template <class T>
DEVICE void encode_kind(const Store& s, int kind, int64_t head, const T* x, int head_dim) {
  switch (kind) {
    case FP16: return encode<T, FP16>(s, head, x, head_dim);
    case FP8: return encode<T, FP8>(s, head, x, head_dim);
    case Q8: return encode<T, Q8>(s, head, x, head_dim);
    case Q4: return encode<T, Q4>(s, head, x, head_dim);
  }
}

// k, v [tokens, heads, head_dim]; a slot outside the pages is skipped. Blocks of eight warps over tokens * heads; y: 0 keys, 1 values.
template <class T>
DEVICE void store(const Pages& p, const T* k, const T* v, const int64_t* slots, int tokens, int key_kind, int value_kind) {
  pdl_trigger();
  pdl_wait();
  const int64_t i = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= (int64_t)tokens * p.heads) return;
  const int64_t slot = slots[i / p.heads];
  if (slot < 0 || slot >= (int64_t)p.pages * p.page_size) return;
  const int64_t head = slot * p.heads + i % p.heads;
  if (blockIdx.y == 0) encode_kind(p.key, key_kind, head, k + i * p.head_dim, p.head_dim);
  else encode_kind(p.value, value_kind, head, v + i * p.head_dim, p.head_dim);
}

#define STORE(T, t)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) kv_store_##t(const __grid_constant__ Pages p, const T* k, const T* v,  \
                                                                 const int64_t* slots, int tokens, int key_kind,           \
                                                                 int value_kind) {                                         \
    store(p, k, v, slots, tokens, key_kind, value_kind);                                                                   \
  }
STORE(__half, f16)
STORE(__nv_bfloat16, bf16)
STORE(float, f32)
