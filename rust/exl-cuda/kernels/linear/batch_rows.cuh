// Packs activation rows for the kernels of batch.cuh: norm, BF16 factor and permutation in one launch.
#pragma once
#include "common/abi.cuh"
#include <type_traits>

#include "linear/prepared.cuh"

constexpr int LAYOUT_THREADS = 128;

// The same struct as `ops::linear::batch::Preparation`.
struct LayoutTask {
  const void* x;        // [m, k]
  const float* weight;  // of an RMS norm; null when there is none
  uint8_t* out;         // in the layout of prepared.cuh for wgmma; columns past m are zero
  float* multipliers;   // [m], for BF16 rows
  const int* features;  // the feature in each row of the layout, or -1
  int rows, units, k, m, columns;
  int shares, idle;  // blocks of a row; placeholder blocks, which come before all others and do nothing
  float eps, offset;
};
ABI_SIZE(LayoutTask, 80); ABI_AT(LayoutTask, x, 0); ABI_AT(LayoutTask, weight, 8); ABI_AT(LayoutTask, out, 16);
ABI_AT(LayoutTask, multipliers, 24); ABI_AT(LayoutTask, features, 32); ABI_AT(LayoutTask, rows, 40); ABI_AT(LayoutTask, units, 44);
ABI_AT(LayoutTask, k, 48); ABI_AT(LayoutTask, m, 52); ABI_AT(LayoutTask, columns, 56); ABI_AT(LayoutTask, shares, 60);
ABI_AT(LayoutTask, idle, 64); ABI_AT(LayoutTask, eps, 68); ABI_AT(LayoutTask, offset, 72);

// Before sm_80 there are no asynchronous copies. This kernel is not chosen there, but it is compiled with the others of its file.
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

// A block packs a share of one row, in groups of eight values of K of half a matrix instruction. It is small, so that it is resident beside
// the previous matmul and has everything but the row in shared memory when that matmul ends. The norm adds in the order of
// kernels/elementwise/norm.cu: a thread has the elements of two of its 256.
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
  const int token, eights, first, end;  // the groups of eight of the row, and those of the block in the layout
  const int first_row, rows;            // in the layout, unit by unit from the first group of eight on
  uint4* const row;
  float* const sums;
  // For the block's rows of the layout: the feature or, if there is a norm, its weight as {feature, weight}.
  int* const features;

  DEVICE RowLayout(const LayoutTask& p, uint8_t* memory, float* sums, int number, int share)
      : p(p),
        token(number % p.columns),
        eights(p.k / 8),
        first(number / p.columns * share),
        end(min(first + share, 32 * p.units)),
        first_row(first / 32 * UNIT_ROWS),
        rows(min((end + 31) / 32 * UNIT_ROWS, p.rows) - first_row),
        row(reinterpret_cast<uint4*>(memory)),
        sums(sums),
        features(reinterpret_cast<int*>(row + eights)) {}

  DEVICE float weight_of(int feature) const { return __ldg(p.weight + feature) + p.offset; }
  DEVICE void fetch_constants() const {
    if (p.weight) {
#pragma unroll 4
      for (int i = threadIdx.x; i < rows; i += LAYOUT_THREADS) {
        const int feature = __ldg(p.features + first_row + i);
        reinterpret_cast<int2*>(features)[i] = make_int2(feature, feature < 0 ? 0 : __float_as_int(weight_of(feature)));
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < rows / 4; i += LAYOUT_THREADS) copy_ahead(features + 4 * i, p.features + first_row + 4 * i);
    }
  }
  DEVICE void fetch_row() const {
    const uint4* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + (size_t)token * p.k);
#pragma unroll 4
    for (int i = threadIdx.x; i < eights; i += LAYOUT_THREADS) copy_ahead(row + i, x + i);
  }
  DEVICE void store(int place, uint4 eight) const { *reinterpret_cast<uint4*>(p.out + prepared_eight(place, token, p.columns)) = eight; }
  DEVICE void store_nothing() const {
    for (int place = first + threadIdx.x; place < end; place += LAYOUT_THREADS) store(place, make_uint4(0, 0, 0, 0));
  }

  // Computes the norm's factor of the row.
  DEVICE void add_squares() const {
    float sum[2] = {0.f, 0.f};
#pragma unroll 1
    for (int i = threadIdx.x; i < eights; i += 2 * LAYOUT_THREADS) {
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
      if (threadIdx.x % 32 == 0) sums[h * WARPS + threadIdx.x / 32] = sum[h];
    }
  }
  DEVICE float scale() const {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < 2 * WARPS; w++) total += sums[w];
    return 1.f / sqrtf(total / (float)p.k + p.eps);
  }
  DEVICE T value(int feature, float scale, float weight) const {
    const T v = reinterpret_cast<const T*>(row)[feature];
    return p.weight ? from_float<T>(to_float(v) * scale * weight) : v;
  }
  DEVICE float largest(float scale) const {
    float most = 0.f;
#pragma unroll 1
    for (int i = threadIdx.x; i < p.k; i += LAYOUT_THREADS) most = fmaxf(most, fabsf(to_float(value(i, scale, p.weight ? weight_of(i) : 1.f))));
    return most;
  }
  DEVICE __half half_of(int feature, float scale, float weight, float factor) const {
    const T v = value(max(feature, 0), scale, weight);
    if constexpr (SCALED) return feature < 0 ? __half(0.f) : __float2half_rn(to_float(v) * factor);
    else return feature < 0 ? __half(0.f) : v;
  }
  // A group of eight is four words, each of two neighbouring rows, eight rows apart. Lanes whose groups are 32 rows apart begin with
  // different words to avoid bank conflicts.
  DEVICE uint4 eight_of(int place, float scale, float factor) const {
    const int at = (place >> 5) * UNIT_ROWS + (place >> 2 & 7) * 32 + (place >> 1 & 1) * 4 + (place & 1) * 2 - first_row, turn = place >> 2 & 3;
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int i = at + 8 * (t + turn & 3);
      int4 two = make_int4(-1, 0, -1, 0);
      if (i < rows) {
        if (p.weight) {
          two = *reinterpret_cast<const int4*>(features + 2 * i);
        } else {
          const int2 plain = *reinterpret_cast<const int2*>(features + i);
          two.x = plain.x, two.z = plain.y;
        }
      }
      const __half2 word = __halves2half2(half_of(two.x, scale, __int_as_float(two.y), factor), half_of(two.z, scale, __int_as_float(two.w), factor));
      words[t] = *reinterpret_cast<const uint32_t*>(&word);
    }
    const bool once = turn & 1, twice = turn & 2;
    const uint4 v = once ? make_uint4(words[3], words[0], words[1], words[2]) : make_uint4(words[0], words[1], words[2], words[3]);
    return twice ? make_uint4(v.z, v.w, v.x, v.y) : v;
  }
};

template <class T>
DEVICE void pack_row(const LayoutTask& p) {
  using Layout = RowLayout<T>;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float sums[2 * Layout::WARPS], most[Layout::WARPS];
  const int number = static_cast<int>(blockIdx.x) - p.idle;
  pdl_trigger();
  if (number < 0) return pdl_wait();
  const Layout layout(p, memory, sums, number, (32 * p.units + p.shares - 1) / p.shares);
  const bool some = layout.token < p.m;
#if __CUDA_ARCH__ >= 900
  if (some) layout.fetch_constants();
  pdl_wait();
  if (some) layout.fetch_row();
#else
  // Nothing to wait for: the row is on its way while the constants are looked up.
  if (some) layout.fetch_row(), layout.fetch_constants();
#endif
  if (!some) return layout.store_nothing();
  await_copies();
  if (p.weight) layout.add_squares();
  __syncthreads();
  const float scale = p.weight ? layout.scale() : 1.f;
  float factor = 1.f;
  if constexpr (Layout::SCALED) {
    factor = block_row_factor<Layout::WARPS>(threadIdx.x, layout.largest(scale), most);
    if (threadIdx.x == 0 && layout.first == 0) p.multipliers[layout.token] = 1.f / factor;
  }
#pragma unroll 1
  for (int place = layout.first + threadIdx.x; place < layout.end; place += LAYOUT_THREADS)
    layout.store(place, layout.eight_of(place, scale, factor));
}

#define PACK_ROWS(T, t) \
  extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS, 16) pack_rows_##t(const __grid_constant__ LayoutTask p) { pack_row<T>(p); }
