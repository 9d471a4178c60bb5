// Packs activation rows for the kernels of few.cuh: norm, BF16 factor and the permutations of all matrices in one launch.
#pragma once
#include "common/abi.cuh"
#include <type_traits>

#include "linear/tile_layout.cuh"

constexpr int COPIES = 3, ROWS_THREADS = 128;

// The same struct as `ops::linear::few::Preparation`.
struct RowsTask {
  const void* x;        // [m, k]
  const float* weight;  // of an RMS norm; null when there is none
  uint8_t* out;         // copies, each [units][4096 bytes] as in prepared.cuh; columns past m are zero
  float* multipliers;   // [m]
  size_t copy_bytes;
  const int* features[COPIES];  // the feature in each row of the layout, or -1
  int rows[COPIES];
  int copies, units, k, m;
  float eps, offset;
};
ABI_SIZE(RowsTask, 104); ABI_AT(RowsTask, x, 0); ABI_AT(RowsTask, weight, 8); ABI_AT(RowsTask, out, 16);
ABI_AT(RowsTask, multipliers, 24); ABI_AT(RowsTask, copy_bytes, 32); ABI_AT(RowsTask, features, 40); ABI_AT(RowsTask, rows, 64);
ABI_AT(RowsTask, copies, 76); ABI_AT(RowsTask, units, 80); ABI_AT(RowsTask, k, 84); ABI_AT(RowsTask, m, 88); ABI_AT(RowsTask, eps, 92);
ABI_AT(RowsTask, offset, 96);

// Stores eight values of K of a row at their place.
DEVICE void store_eight(const RowsTask& p, int copy, int chunk, int token, uint4 v) {
  if (chunk >= 32 * p.units) return;
  uint8_t* to = p.out + copy * p.copy_bytes + chunk / 4 * 512 + (token * 4 + chunk % 4) * 16;
  *reinterpret_cast<uint4*>(to) = v;
}

// A block has a row and 128 groups of eight of its layout. It is small, so that it is resident before its predecessor ends. The norm adds
// in the order of kernels/elementwise/norm.cu: a thread has the elements of two of its 256.
template <class T>
DEVICE void prepare_rows(const RowsTask& p) {
  constexpr bool SCALED = !std::is_same<T, __half>::value;
  constexpr int WARPS = ROWS_THREADS / 32;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[2 * WARPS], largest[WARPS];
  const int token = blockIdx.x, tid = threadIdx.x, eights = p.k / 8, chunk = blockIdx.y * ROWS_THREADS + tid;
  uint4* row = reinterpret_cast<uint4*>(memory);
  union Eight {
    uint4 word;
    T v[8];
  };
  pdl_trigger();
  // Work that does not depend on the predecessor.
  int4 low, high;
  auto find = [&](int copy) {
    const bool known = chunk * 8 < p.rows[copy];
    const int4* from = reinterpret_cast<const int4*>(p.features[copy]) + 2 * chunk;
    low = known ? __ldg(from) : make_int4(-1, -1, -1, -1);
    high = known ? __ldg(from + 1) : make_int4(-1, -1, -1, -1);
  };
  find(0);
  if (p.weight)
    for (int i = tid * 32; i < p.k; i += ROWS_THREADS * 32) asm volatile("prefetch.global.L1 [%0];" ::"l"(p.weight + i));
  pdl_wait();
  if (token >= p.m) {
    for (int copy = 0; copy < p.copies; copy++) store_eight(p, copy, chunk, token, make_uint4(0, 0, 0, 0));
    return;
  }
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + (size_t)token * p.k);
  float sum[2] = {0.f, 0.f}, most = 0.f;
#pragma unroll 1
  for (int first = tid; first < eights; first += 4 * ROWS_THREADS) {
    Eight v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j].word = first + j * ROWS_THREADS < eights ? __ldcg(x + first + j * ROWS_THREADS) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (first + j * ROWS_THREADS >= eights) break;
      row[first + j * ROWS_THREADS] = v[j].word;
      if (p.weight) {
        float u[8];
#pragma unroll
        for (int e = 0; e < 8; e++) u[e] = to_float(v[j].v[e]);
        sum[j % 2] += eight_squares(u);
      }
    }
  }
  float scale = 1.f;
  if (p.weight) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] = warp_sum(sum[h]);
      if (tid % 32 == 0) sums[h * WARPS + tid / 32] = sum[h];
    }
    __syncthreads();
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < 2 * WARPS; w++) all += sums[w];
    scale = 1.f / sqrtf(all / (float)p.k + p.eps);
  }
  if (SCALED || p.weight) {
#pragma unroll 1
    for (int i = tid; i < eights; i += ROWS_THREADS) {
      Eight v;
      v.word = row[i];
      if (p.weight) {
        float w[8];
        load8(w, p.weight + 8 * i);
#pragma unroll
        for (int e = 0; e < 8; e++) v.v[e] = from_float<T>(to_float(v.v[e]) * scale * (w[e] + p.offset));
      }
#pragma unroll
      for (int e = 0; e < 8; e++) most = fmaxf(most, fabsf(to_float(v.v[e])));
      row[i] = v.word;
    }
  }
  float factor = 1.f;
  if constexpr (SCALED) {
    factor = block_row_factor<WARPS>(tid, most, largest);
    if (tid == 0 && blockIdx.y == 0) p.multipliers[token] = 1.f / factor;
  }
  __syncthreads();
  const T* values = reinterpret_cast<const T*>(memory);
#pragma unroll 1
  for (int copy = 0; copy < p.copies; copy++) {
    if (copy) find(copy);
    const int feature[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    union {
      uint4 word;
      __half v[8];
    } out;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if constexpr (SCALED) out.v[e] = feature[e] < 0 ? __half(0.f) : __float2half_rn(to_float(values[feature[e]]) * factor);
      else out.v[e] = feature[e] < 0 ? __half(0.f) : values[feature[e]];
    }
    store_eight(p, copy, chunk, token, out.word);
  }
}
