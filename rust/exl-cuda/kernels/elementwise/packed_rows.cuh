// Norms rows and packs them as the input of a matmul: a block a row, with as many threads as the row has chunks of eight elements, if these are
// not more than MOST_THREADS. Such a launch follows one that leaves no room beside it, so its blocks begin late: a thread has one chunk, because
// a launch meets a cold instruction cache and long code takes longer than more threads, and reads constants before it waits.
#pragma once
#include "common/block_sum.cuh"
#include "elementwise/eight.cuh"

constexpr int MOST_THREADS = 1024;

// The layout of packed rows: that of linear/rows.cuh has eight columns, that of linear/prepared.cuh for wgmma more.
enum Packing { FEW_COLUMNS, BATCH_COLUMNS };

struct PackedRows {
  uint8_t* out;         // [units][512 bytes of each column]
  const int* features;  // [rows], aligned to 16 bytes: the feature in each row of the layout, or -1
  int units, rows;
  unsigned m;           // columns past the m rows become zeros
  int columns;
  DEVICE int chunks() const { return 32 * units; }
};

// Shared memory of a block: the sums of chunks, then the normed row.
union RowMemory {
  float* parts;
  __half* row;
  explicit DEVICE RowMemory(uint8_t* memory) : row(reinterpret_cast<__half*>(memory)) {}

  // The sum of f(k) over the chunks of a row. Adds as a block of THREADS threads does: chunk c by thread c % THREADS, then `block_sum`.
  template <class F>
  DEVICE float sum(int width, const F& f) const {
    __shared__ float warps[THREADS / 32];
#pragma unroll 1
    for (int chunk = threadIdx.x; 8 * chunk < width; chunk += blockDim.x) parts[chunk] = f(8 * chunk);
    __syncthreads();
    if (threadIdx.x < THREADS) {
      float v = 0.f;
#pragma unroll 1
      for (int chunk = threadIdx.x; 8 * chunk < width; chunk += THREADS) v += parts[chunk];
      v = warp_sum(v);
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    }
    __syncthreads();
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) all += warps[i];
    return all;
  }
};

// The features of a chunk of the layout.
template <Packing LAYOUT>
struct ChunkOrder {
  alignas(16) int of[8];
  DEVICE void load(const PackedRows& to, int chunk) {
    if constexpr (LAYOUT == FEW_COLUMNS) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int4* const from = reinterpret_cast<const int4*>(to.features) + 2 * chunk + e;
        *reinterpret_cast<int4*>(&of[4 * e]) = 8 * chunk < to.rows ? __ldg(from) : make_int4(-1, -1, -1, -1);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        // Of 16 pairs of neighbouring rows, those four apart belong to one chunk.
        const int pair = 4 * (chunk & ~3) + (chunk & 3) + 4 * e;
        *reinterpret_cast<int2*>(&of[2 * e]) =
            2 * pair < to.rows ? __ldg(reinterpret_cast<const int2*>(to.features) + pair) : make_int2(-1, -1);
      }
    }
  }
  DEVICE uint4 gather(const __half* row) const {
    union {
      uint4 word;
      __half v[8];
    } out;
#pragma unroll
    for (int e = 0; e < 8; e++) out.v[e] = of[e] < 0 ? __half(0.f) : row[of[e]];
    return out.word;
  }
};
template <Packing LAYOUT>
DEVICE void store_chunk(const PackedRows& to, int token, int chunk, uint4 v) {
  const size_t at = LAYOUT == FEW_COLUMNS ? chunk / 4 * 512 + (token * 4 + chunk % 4) * 16 : ((size_t)chunk * to.columns + token) * 16;
  *reinterpret_cast<uint4*>(to.out + at) = v;
}
// Packs a row in shared memory; `order` of the thread's first chunk.
template <Packing LAYOUT>
DEVICE void pack_row(const PackedRows& to, int token, const __half* row, ChunkOrder<LAYOUT> order) {
  __syncthreads();
#pragma unroll 1
  for (int chunk = threadIdx.x; chunk < to.chunks(); chunk += blockDim.x) {
    if (chunk != threadIdx.x) order.load(to, chunk);
    store_chunk<LAYOUT>(to, token, chunk, order.gather(row));
  }
}
// Columns past the last row.
template <Packing LAYOUT>
DEVICE void pack_zeros(const PackedRows& to, int token) {
  for (int chunk = threadIdx.x; chunk < to.chunks(); chunk += blockDim.x) store_chunk<LAYOUT>(to, token, chunk, make_uint4(0, 0, 0, 0));
}
