// Rotates queries and keys and stores keys and values to pages in one launch. A warp takes one head of a token.
//
// Bitwise identical to rope.cu on q and k followed by kv.cu: rotated values are rounded to their type before they are encoded.
#include "common/abi.cuh"
#include "kv/kv_encode.cuh"
#include "elementwise/rope.cuh"

constexpr int WARPS = 4, MAX_DIM = 256;

struct Rotation {
  const float *cos, *sin;
  const int64_t* positions;
  int rotated, table_rows, interleaved;
  int q_stride, kv_stride;  // elements between tokens of q, and of k and v
};
ABI_SIZE(Rotation, 48); ABI_AT(Rotation, cos, 0); ABI_AT(Rotation, sin, 8); ABI_AT(Rotation, positions, 16);
ABI_AT(Rotation, rotated, 24); ABI_AT(Rotation, table_rows, 28); ABI_AT(Rotation, interleaved, 32);
ABI_AT(Rotation, q_stride, 36); ABI_AT(Rotation, kv_stride, 40);

// Grid: tokens, quarters of the heads of q, then of k, then of v. Positions, slots and tables are read before the wait: they were written
// before the previous launch.
template <class T>
DEVICE void rope_store_kernel(const Pages& p, const Rotation& r, T* q, T* k, const T* v, const int64_t* slots, int q_heads) {
  constexpr int PAIRS = MAX_DIM / 64, PARTS = MAX_DIM / 32;  // of a lane
  __shared__ float rows[WARPS][MAX_DIM];
  pdl_trigger();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x, item = blockIdx.y * WARPS + warp;
  const int kv_head = (item - q_heads) % p.heads, kind = item < q_heads ? 0 : 1 + (item - q_heads) / p.heads;
  if (kind > 2) return pdl_wait();
  T* x = kind == 0 ? q + (int64_t)token * r.q_stride + item * p.dim
                   : (kind == 1 ? k : const_cast<T*>(v)) + (int64_t)token * r.kv_stride + kv_head * p.dim;
  float* row = rows[warp];
  const int half_dim = r.rotated / 2;
  const int64_t position = r.positions[token], slot = kind ? slots[token] : 0;
  const bool turns = kind < 2 && position >= 0 && position < r.table_rows;
  float c[PAIRS], s[PAIRS], in[PARTS];
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    const int i = j * 32 + lane;
    const bool has = turns && i < half_dim;
    c[j] = has ? r.cos[position * half_dim + i] : 1.f;
    s[j] = has ? r.sin[position * half_dim + i] : 0.f;
  }
  pdl_wait();
#pragma unroll
  for (int j = 0; j < PARTS; j++) in[j] = j * 32 + lane < p.dim ? to_float(x[j * 32 + lane]) : 0.f;
#pragma unroll
  for (int j = 0; j < PARTS; j++) row[j * 32 + lane] = in[j];
  __syncwarp();
  if (turns) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = j * 32 + lane;
      if (i >= half_dim) break;
      const int a = r.interleaved ? 2 * i : i, b = r.interleaved ? a + 1 : i + half_dim;
      const float2 rotated_pair = rotate(row[a], row[b], c[j], s[j]);
      const T u = from_float<T>(rotated_pair.x), w = from_float<T>(rotated_pair.y);
      row[a] = to_float(u);
      row[b] = to_float(w);
      x[a] = u;
      x[b] = w;
    }
    __syncwarp();
  }
  if (kind == 0 || slot < 0 || slot >= p.slots) return;
  for (int block = 0; block < p.blocks; block++)
    encode(p, kind - 1, slot * p.heads + kv_head, block, row[block * 64 + 2 * lane], row[block * 64 + 2 * lane + 1]);
}

DEVICE void store8_saturated(__half* to, const float (&v)[8]) {
  __align__(16) __half items[8];
#pragma unroll
  for (int i = 0; i < 8; i++) items[i] = saturating_half(v[i]);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(items);
}

// The same for halves into pages of halves, for many tokens: a block a token, eight elements a load. Heads are rotated whole, in two
// halves; their size is a multiple of 16, and addresses are aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(WARPS * 32) rope_store_many(
    const __grid_constant__ Pages p, const __grid_constant__ Rotation r, __half* q, __half* k, const __half* v, const int64_t* slots,
    int q_heads) {
  pdl_trigger();
  const int64_t token = blockIdx.x, position = r.positions[token], slot = slots[token];
  const int half_dim = p.dim / 2, eights = half_dim / 8;
  const bool turns = position >= 0 && position < r.table_rows, stored = slot >= 0 && slot < p.slots;
  __half* const rows[2] = {reinterpret_cast<__half*>(p.data[0]) + slot * p.heads * p.dim,
                           reinterpret_cast<__half*>(p.data[1]) + slot * p.heads * p.dim};
  pdl_wait();
  for (int i = threadIdx.x; i < (q_heads + p.heads) * eights; i += WARPS * 32) {
    const int head = i / eights, kv_head = head - q_heads, at = i % eights * 8;
    __half* x = kv_head < 0 ? q + token * r.q_stride + head * p.dim : k + token * r.kv_stride + kv_head * p.dim;
    float low[8], high[8];
    load8(low, x + at);
    load8(high, x + half_dim + at);
    if (turns) {
      float c[8], s[8];
      load8(c, r.cos + position * half_dim + at);
      load8(s, r.sin + position * half_dim + at);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float2 rotated_pair = rotate(low[j], high[j], c[j], s[j]);
        low[j] = to_float(from_float<__half>(rotated_pair.x));
        high[j] = to_float(from_float<__half>(rotated_pair.y));
      }
      store8(x + at, low);
      store8(x + half_dim + at, high);
    }
    if (kv_head >= 0 && stored) {
      store8_saturated(rows[0] + kv_head * p.dim + at, low);
      store8_saturated(rows[0] + kv_head * p.dim + half_dim + at, high);
    }
  }
  if (!stored) return;
  for (int i = threadIdx.x * 8; i < p.heads * p.dim; i += WARPS * 32 * 8) {
    float value[8];
    load8(value, v + token * r.kv_stride + i);
    store8_saturated(rows[1] + i, value);
  }
}

#define ROPE_STORE(T, t)                                                                                              \
  extern "C" __global__ void __launch_bounds__(WARPS * 32) rope_store_##t(                                            \
      const __grid_constant__ Pages p, const __grid_constant__ Rotation r, T* q, T* k, const T* v,                    \
      const int64_t* slots, int q_heads) {                                                                            \
    rope_store_kernel(p, r, q, k, v, slots, q_heads);                                                                 \
  }
ROPE_STORE(__half, f16)
ROPE_STORE(__nv_bfloat16, bf16)
ROPE_STORE(float, f32)
