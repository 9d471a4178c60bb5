// Packs activation rows for the kernels of batch.cuh: norm, BF16 factor and permutation in one launch.
#pragma once
#include "common/abi.cuh"
#include <type_traits>

#include "common/activate.cuh"
#include "linear/prepared.cuh"

constexpr int LAYOUT_THREADS = 128;

// The same struct as `ops::linear::batch::layout::Preparation`.
struct LayoutTask {
  const void* x;        // [m, k], aligned to 16 bytes
  const float* weight;  // of an RMS norm, aligned to 16 bytes; null when there is none
  uint8_t* out;         // in the layout of prepared.cuh for wgmma; columns past m are zero
  float* multipliers;   // [m], for BF16 rows
  const int* features;  // the feature in each row of the layout, or -1
  int rows, units, k, m, columns;
  int share, idle;  // units of K of a block; placeholder blocks, which come before all others and do nothing
  float eps, offset;
  int activation;  // of the row, in `pack_activated_rows`
};
ABI_SIZE(LayoutTask, 80); ABI_AT(LayoutTask, x, 0); ABI_AT(LayoutTask, weight, 8); ABI_AT(LayoutTask, out, 16);
ABI_AT(LayoutTask, multipliers, 24); ABI_AT(LayoutTask, features, 32); ABI_AT(LayoutTask, rows, 40); ABI_AT(LayoutTask, units, 44);
ABI_AT(LayoutTask, k, 48); ABI_AT(LayoutTask, m, 52); ABI_AT(LayoutTask, columns, 56); ABI_AT(LayoutTask, share, 60);
ABI_AT(LayoutTask, idle, 64); ABI_AT(LayoutTask, eps, 68); ABI_AT(LayoutTask, offset, 72);
ABI_AT(LayoutTask, activation, 76);

// Before sm_80 there are no asynchronous copies. This kernel is not chosen there, but it is compiled with the others of its file.
template <class V>
DEVICE void copy_ahead(V* to, const V* from) {
#if __CUDA_ARCH__ >= 800
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(V) == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(static_cast<int>(sizeof(V))) : "memory");
#else
  *to = *from;
#endif
}

DEVICE void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A block packs a share of one row, in groups of eight values of K of half a matrix instruction. It is small, so that it is resident beside
// the previous matmul and has everything but the row in shared memory when that matmul ends. A norm is applied to the whole row in its own
// order, in which weights need no look-up. It adds in the order of kernels/elementwise/norm.cu: a thread has the elements of two of its 256.
// Loops are not unrolled, because a launch meets a cold instruction cache.
//
// Blocks start in the order of their indices, first on the SMs that the previous matmul leaves free, as many as fit. Without placeholders,
// these SMs would run several packing blocks each while others run none, and the launch would wait for them. So placeholder blocks occupy
// some of that room until the matmul has ended.
template <class T>
struct RowLayout {
  static constexpr bool SCALED = !std::is_same<T, __half>::value;
  static constexpr int WARPS = LAYOUT_THREADS / 32;
  union Eight {
    uint4 word;
    T v[8];
  };
  const LayoutTask& p;
  const int token, first, count;  // groups of eight in the layout: the block's first and their number
  const int eights;               // of the row
  // Shared memory: a zero for rows of the layout without a feature, which are -1; the row; the norm's weights; for each group of eight of
  // the block its features.
  T* const row;
  float4* const weights;
  int* const features;

  DEVICE RowLayout(const LayoutTask& p, uint8_t* memory, int token)
      : p(p),
        token(token),
        first(blockIdx.y * p.share * 32),
        count(min(p.share, p.units - static_cast<int>(blockIdx.y) * p.share) * 32),
        eights(p.k / 8),
        row(reinterpret_cast<T*>(memory + 16)),
        weights(reinterpret_cast<float4*>(row + p.k)),
        features(reinterpret_cast<int*>(reinterpret_cast<float*>(row + p.k) + (p.weight ? p.k : 0))) {}

  DEVICE void fetch_constants() const {
    if (threadIdx.x == 0) row[-1] = from_float<T>(0.f);
    const int2* pairs = reinterpret_cast<const int2*>(p.features) + first * 4;
    const int known = p.rows / 2 - first * 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < count * 4; i += LAYOUT_THREADS) {
      // Of 16 pairs of neighbouring rows, those four apart belong to one group of eight.
      int2* const to = reinterpret_cast<int2*>(features) + (i & ~15 | (i & 3) << 2 | (i >> 2 & 3));
      if (i < known) copy_ahead(to, pairs + i);
      else *to = make_int2(-1, -1);
    }
    if (p.weight)
#pragma unroll 1
      for (int i = threadIdx.x; i < eights; i += LAYOUT_THREADS)
        for (int h = 0; h < 2; h++) copy_ahead(weights + 2 * i + h, reinterpret_cast<const float4*>(p.weight) + 2 * i + h);
  }
  DEVICE void fetch_row() const {
    const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + (size_t)token * p.k);
#pragma unroll 1
    for (int i = threadIdx.x; i < eights; i += LAYOUT_THREADS) copy_ahead(reinterpret_cast<uint4*>(row) + i, x + i);
  }
  DEVICE uint4* place(int i) const { return reinterpret_cast<uint4*>(p.out + prepared_eight(first + i, token, p.columns)); }
  DEVICE void store_nothing() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += LAYOUT_THREADS) *place(i) = make_uint4(0, 0, 0, 0);
  }

  // The norm's factor of the row, from the groups that this thread has copied itself. `sums`: shared memory.
  DEVICE float factor_of_norm(float* sums) const {
    float sum[2] = {0.f, 0.f};
#pragma unroll 1
    for (int i = threadIdx.x; i < eights; i += LAYOUT_THREADS) {
      Eight v;
      v.word = reinterpret_cast<const uint4*>(row)[i];
      float u[8];
#pragma unroll
      for (int e = 0; e < 8; e++) u[e] = to_float(v.v[e]);
      const float squares = eight_squares(u);
      const bool odd = i & LAYOUT_THREADS;
      sum[0] += odd ? 0.f : squares;
      sum[1] += odd ? squares : 0.f;
    }
#pragma unroll 1
    for (int h = 0; h < 2; h++) {
      const float all = warp_sum(h ? sum[1] : sum[0]);
      if (threadIdx.x % 32 == 0) sums[h * WARPS + threadIdx.x / 32] = all;
    }
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < 2 * WARPS; w++) total += sums[w];
    return 1.f / sqrtf(total / (float)p.k + p.eps);
  }
  // Norms the groups of the row that this thread has copied, if there is a norm. Returns the largest magnitude of its elements.
  DEVICE float norm(float scale) const {
    float most = 0.f;
#pragma unroll 1
    for (int i = threadIdx.x; i < eights; i += LAYOUT_THREADS) {
      Eight v;
      v.word = reinterpret_cast<const uint4*>(row)[i];
      if (p.weight) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float4 w = weights[2 * i + h];
          const float of[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int e = 0; e < 4; e++) v.v[4 * h + e] = from_float<T>(to_float(v.v[4 * h + e]) * scale * (of[e] + p.offset));
        }
        reinterpret_cast<uint4*>(row)[i] = v.word;
      }
      if constexpr (SCALED)
#pragma unroll
        for (int e = 0; e < 8; e++) most = fmaxf(most, fabsf(to_float(v.v[e])));
    }
    return most;
  }
  DEVICE uint4 eight_of(int i, float factor) const {
    const int4 low = reinterpret_cast<const int4*>(features)[2 * i], high = reinterpret_cast<const int4*>(features)[2 * i + 1];
    const int of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    union {
      uint4 word;
      __half v[8];
    } out;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if constexpr (SCALED) out.v[e] = __float2half_rn(to_float(row[of[e]]) * factor);
      else out.v[e] = row[of[e]];
    }
    return out.word;
  }
};

// Eight halves, each activated and rounded. In a loop of two halves: a launch runs its code for the first time.
DEVICE uint4 activated_eight(uint4 eight, int activation) {
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&eight.x));
    const __half2 result = __floats2half2_rn(activate(v.x, activation), activate(v.y, activation));
    eight = make_uint4(eight.y, eight.z, eight.w, *reinterpret_cast<const uint32_t*>(&result));
  }
  return eight;
}

template <class T, bool ACTIVATES = false>
DEVICE void pack_row(const LayoutTask& p) {
  using Layout = RowLayout<T>;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[2 * Layout::WARPS], most[Layout::WARPS];
  pdl_trigger();
  const int token = static_cast<int>(blockIdx.x) - p.idle;
  if (token < 0) {
    if (blockIdx.y == 0) pdl_wait();
    return;
  }
  const Layout layout(p, memory, token);
  if (token >= p.m) {
    pdl_wait();
    return layout.store_nothing();
  }
#if __CUDA_ARCH__ >= 900
  layout.fetch_constants();
  pdl_wait();
  layout.fetch_row();
#else
  // Nothing to wait for: the row is on its way while the constants are looked up.
  layout.fetch_row();
  layout.fetch_constants();
#endif
  await_copies();
  float factor = 1.f;
  if (p.weight || Layout::SCALED) {
    const float largest = layout.norm(p.weight ? layout.factor_of_norm(sums) : 1.f);
    if constexpr (Layout::SCALED) {
      factor = block_row_factor<Layout::WARPS>(threadIdx.x, largest, most);
      if (threadIdx.x == 0 && layout.first == 0) p.multipliers[token] = 1.f / factor;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < layout.count; i += LAYOUT_THREADS) {
    const uint4 eight = layout.eight_of(i, factor);
    *layout.place(i) = ACTIVATES ? activated_eight(eight, p.activation) : eight;
  }
}

#define PACK_ROWS(T, t) \
  extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS, 16) pack_rows_##t(const __grid_constant__ LayoutTask p) { pack_row<T>(p); }
#define PACK_ACTIVATED_ROWS()                                                                                                          \
  extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS, 16) pack_activated_rows_f16(const __grid_constant__ LayoutTask p) {     \
    pack_row<__half, true>(p);                                                                                                         \
  }
