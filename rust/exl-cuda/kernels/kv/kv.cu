// Stores keys and values to pages and loads them from pages: one warp a block of 64 elements.
#include "kv/kv_encode.cuh"

// Grid: tokens; a warp takes every eighth block of keys and values. A slot outside the pages is skipped.
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

// Grid: tokens. Rounds to half where the codec does; a slot outside the pages gives zeros.
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
