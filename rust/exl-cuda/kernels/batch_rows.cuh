// Activation rows into layout order for the kernels of batch.cuh: norm, BF16's factor and the permutation in one launch.
#pragma once
#include <type_traits>

#include "prepared.cuh"

constexpr int LAYOUT_THREADS = 128;

// The same struct as `ops::batch::Preparation`.
struct LayoutTask {
  const void* x;        // [m, k]
  const float* weight;  // of an RMS norm; null when there is none
  uint8_t* out;         // as prepared.cuh has it for wgmma; columns past m are zero
  float* multipliers;   // [m], of BF16 rows
  const int* features;  // the feature in each row of the layout, or -1
  int rows, units, k, m, columns;
  float eps, offset;
};

// Before sm_80 there are no asynchronous copies (nor is this kernel chosen there: it is compiled with the others of its file).
DEVICE void copy_ahead(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

DEVICE void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A block has a row, and lays out its share of the row's eights: eight values of K of a matrix instruction's half. It is small, so that it
// stands beside the product before it, and has all but the row in shared memory when that product ends. The norm is that of
// kernels/norm.cu, sum for sum: a thread has the elements of two of its 256.
template <class T>
DEVICE void lay_out_row(const LayoutTask& p) {
  constexpr bool SCALED = !std::is_same<T, __half>::value;
  constexpr int WARPS = LAYOUT_THREADS / 32;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[2 * WARPS], largest[WARPS];
  const int token = blockIdx.x, tid = threadIdx.x, eights = p.k / 8, all = 32 * p.units;
  const int share = (all + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share, end = min(first + share, all);
  uint4* row = reinterpret_cast<uint4*>(memory);
  float* weight = reinterpret_cast<float*>(row + eights);
  // Features of the block's places, unit by unit from the first one's on.
  const int first_row = first / 32 * UNIT_ROWS, rows = min((end + 31) / 32 * UNIT_ROWS, p.rows) - first_row;
  int* features = reinterpret_cast<int*>(weight + (p.weight ? p.k : 0));
  union Eight {
    uint4 word;
    T v[8];
  };
  pdl_trigger();
  if (token < p.m) {
#pragma unroll 1
    for (int i = tid; i < rows / 4; i += LAYOUT_THREADS) copy_ahead(features + 4 * i, p.features + first_row + 4 * i);
    if (p.weight)
#pragma unroll 1
      for (int i = tid; i < p.k / 4; i += LAYOUT_THREADS) copy_ahead(weight + 4 * i, p.weight + 4 * i);
  }
  pdl_wait();
  if (token >= p.m) {
    for (int place = first + tid; place < end; place += LAYOUT_THREADS)
      *reinterpret_cast<uint4*>(p.out + prepared_eight(place, token, p.columns)) = make_uint4(0, 0, 0, 0);
    return;
  }
  const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + (size_t)token * p.k);
#pragma unroll 4
  for (int i = tid; i < eights; i += LAYOUT_THREADS) copy_ahead(row + i, x + i);
  await_copies();
  float scale = 1.f;
  if (p.weight) {
    float sum[2] = {0.f, 0.f};
#pragma unroll 1
    for (int i = tid; i < eights; i += 2 * LAYOUT_THREADS) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        Eight v;
        v.word = i + h * LAYOUT_THREADS < eights ? row[i + h * LAYOUT_THREADS] : make_uint4(0, 0, 0, 0);
        float u[8];
#pragma unroll
        for (int e = 0; e < 8; e++) u[e] = to_float(v.v[e]);
        sum[h] += eight_squares(u);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] = warp_sum(sum[h]);
      if (tid % 32 == 0) sums[h * WARPS + tid / 32] = sum[h];
    }
  }
  __syncthreads();
  if (p.weight) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < 2 * WARPS; w++) total += sums[w];
    scale = 1.f / sqrtf(total / (float)p.k + p.eps);
  }
  const T* values = reinterpret_cast<const T*>(memory);
  auto value = [&](int feature) {
    T v = values[feature];
    return p.weight ? from_float<T>(to_float(v) * scale * (weight[feature] + p.offset)) : v;
  };
  float factor = 1.f;
  if constexpr (SCALED) {
    float most = 0.f;
#pragma unroll 1
    for (int i = tid; i < p.k; i += LAYOUT_THREADS) most = fmaxf(most, fabsf(to_float(value(i))));
    factor = block_row_factor<WARPS>(tid, most, largest);
    if (tid == 0 && blockIdx.y == 0) p.multipliers[token] = 1.f / factor;
  }
#pragma unroll 1
  for (int place = first + tid; place < end; place += LAYOUT_THREADS) {
    const int at = (place >> 5) * UNIT_ROWS + (place >> 2 & 7) * 32 + (place >> 1 & 1) * 4 + (place & 1) * 2 - first_row;
    union {
      uint4 word;
      __half v[8];
    } eight;
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int2 feature = at + 8 * t < rows ? *reinterpret_cast<const int2*>(features + at + 8 * t) : make_int2(-1, -1);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int from = e ? feature.y : feature.x;
        if constexpr (SCALED) eight.v[2 * t + e] = from < 0 ? __half(0.f) : __float2half_rn(to_float(value(from)) * factor);
        else eight.v[2 * t + e] = from < 0 ? __half(0.f) : value(from);
      }
    }
    *reinterpret_cast<uint4*>(p.out + prepared_eight(place, token, p.columns)) = eight.word;
  }
}

#define LAY_OUT(T, t) \
  extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS, 16) lay_out_##t(const __grid_constant__ LayoutTask p) { lay_out_row<T>(p); }
