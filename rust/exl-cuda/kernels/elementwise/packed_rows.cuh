// Packs the normed rows of a block of 256 threads as the input of a matmul.
#pragma once
#include "common/block_sum.cuh"

// The layout of packed rows: that of linear/rows.cuh has eight columns, that of linear/prepared.cuh for wgmma more.
enum Packing { UNPACKED, FEW_COLUMNS, BATCH_COLUMNS };

struct PackedRows {
  uint8_t* out;         // [units][512 bytes of each column]
  const int* features;  // [rows], aligned to 16 bytes: the feature in each row of the layout, or -1
  int units, rows;
  unsigned m;           // columns past the m rows become zeros
  int columns;
};
// The features of the first chunks that a thread packs; a chunk is eight halves. A launch may read them while the previous one ends.
template <Packing LAYOUT, int CHUNKS>
struct HeldOrder {
  alignas(16) int of[CHUNKS][8];
  DEVICE void load(const PackedRows& to, int i, int chunk) {
    if constexpr (LAYOUT == FEW_COLUMNS) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int4* const from = reinterpret_cast<const int4*>(to.features) + 2 * chunk + e;
        *reinterpret_cast<int4*>(&of[i][4 * e]) = 8 * chunk < to.rows ? __ldg(from) : make_int4(-1, -1, -1, -1);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        // Of 16 pairs of neighbouring rows, those four apart belong to one chunk.
        const int pair = 4 * (chunk & ~3) + (chunk & 3) + 4 * e;
        *reinterpret_cast<int2*>(&of[i][2 * e]) =
            2 * pair < to.rows ? __ldg(reinterpret_cast<const int2*>(to.features) + pair) : make_int2(-1, -1);
      }
    }
  }
  DEVICE void load(const PackedRows& to) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) load(to, i, i * THREADS + threadIdx.x);
  }
};
template <Packing LAYOUT>
DEVICE void store_chunk(const PackedRows& to, int token, int chunk, uint4 v) {
  const size_t at = LAYOUT == FEW_COLUMNS ? chunk / 4 * 512 + (token * 4 + chunk % 4) * 16 : ((size_t)chunk * to.columns + token) * 16;
  *reinterpret_cast<uint4*>(to.out + at) = v;
}
DEVICE uint4 gather_eight(const __half* row, const int (&of)[8]) {
  union {
    uint4 word;
    __half v[8];
  } out;
#pragma unroll
  for (int e = 0; e < 8; e++) out.v[e] = of[e] < 0 ? __half(0.f) : row[of[e]];
  return out.word;
}
template <Packing LAYOUT, int CHUNKS>
DEVICE void pack_row(const PackedRows& to, int token, const __half* row, const HeldOrder<LAYOUT, CHUNKS>& held) {
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = i * THREADS + threadIdx.x;
    if (chunk < 32 * to.units) store_chunk<LAYOUT>(to, token, chunk, gather_eight(row, held.of[i]));
  }
  for (int chunk = CHUNKS * THREADS + threadIdx.x; chunk < 32 * to.units; chunk += THREADS) {
    HeldOrder<LAYOUT, 1> order;
    order.load(to, 0, chunk);
    store_chunk<LAYOUT>(to, token, chunk, gather_eight(row, order.of[0]));
  }
}
// Columns past the last row.
template <Packing LAYOUT>
DEVICE void pack_zeros(const PackedRows& to, int token) {
  for (int chunk = threadIdx.x; chunk < 32 * to.units; chunk += THREADS) store_chunk<LAYOUT>(to, token, chunk, make_uint4(0, 0, 0, 0));
}
