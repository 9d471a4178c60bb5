// Queries and keys rotated, keys and values into pages: one launch where there were three. A warp a head of a token.
//
// Bit for bit what rope.cu on q and k and then kv.cu give: rotated values are rounded to their type before they are encoded.
#include "kv_encode.cuh"
#include "rope.cuh"

constexpr int WARPS = 4, MAX_DIM = 256;

struct Rotation {  // mirrored in ops/rope_store.rs
  const float *cos, *sin;
  const int64_t* positions;
  int rotated, table_rows, interleaved;
};

// Grid: tokens, quarters of the heads of q, then of k, then of v. Positions, slots and tables are read before the wait: they are older
// than the launch before this one.
template <class T>
DEVICE void rope_store_kernel(const Pages& p, const Rotation& r, T* q, T* k, const T* v, const int64_t* slots, int q_heads) {
  constexpr int PAIRS = MAX_DIM / 64, PARTS = MAX_DIM / 32;  // of a lane
  __shared__ float rows[WARPS][MAX_DIM];
  pdl_trigger();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x, item = blockIdx.y * WARPS + warp;
  const int kv_head = (item - q_heads) % p.heads, kind = item < q_heads ? 0 : 1 + (item - q_heads) / p.heads;
  if (kind > 2) return pdl_wait();
  T* x = kind == 0 ? q + ((int64_t)token * q_heads + item) * p.dim
                   : (kind == 1 ? k : const_cast<T*>(v)) + ((int64_t)token * p.heads + kv_head) * p.dim;
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
      const float2 turned = rotate(row[a], row[b], c[j], s[j]);
      const T u = from_float<T>(turned.x), w = from_float<T>(turned.y);
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

#define ROPE_STORE(T, t)                                                                                              \
  extern "C" __global__ void __launch_bounds__(WARPS * 32) rope_store_##t(                                            \
      const __grid_constant__ Pages p, const __grid_constant__ Rotation r, T* q, T* k, const T* v,                    \
      const int64_t* slots, int q_heads) {                                                                            \
    rope_store_kernel(p, r, q, k, v, slots, q_heads);                                                                 \
  }
ROPE_STORE(__half, f16)
ROPE_STORE(__nv_bfloat16, bf16)
ROPE_STORE(float, f32)
