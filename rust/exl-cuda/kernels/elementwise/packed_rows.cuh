// Packs the normed rows of a block of 256 threads as the input of a matmul of few rows.
#pragma once
#include "common/block_sum.cuh"

// Rows packed as the input of a matmul of few rows, in the layout of linear/rows.cuh.
struct PackedRows {
  uint8_t* out;         // [units][4096 bytes]
  const int* features;  // [rows], aligned to 16 bytes: the feature in each row of the layout, or -1
  int units, rows;
  unsigned m;           // columns past the m rows become zeros
};
// Fetches the order of K, which no launch writes, into L2.
DEVICE void prefetch_order(const PackedRows& to) {
  for (int k = threadIdx.x * 32; k < to.rows; k += THREADS * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(to.features + k));
}
// Stores the eight halves of a chunk of row `token`.
DEVICE void store_chunk(const PackedRows& to, int token, int chunk, uint4 v) {
  *reinterpret_cast<uint4*>(to.out + chunk / 4 * 512 + (token * 4 + chunk % 4) * 16) = v;
}
// The features of the first chunks that a thread packs, read while the previous launch ends.
template <int CHUNKS>
struct HeldOrder {
  int4 of[CHUNKS][2];
  DEVICE void load(const PackedRows& to, int i, int chunk) {
    const int4* const from = reinterpret_cast<const int4*>(to.features) + 2 * chunk;
    const bool known = chunk * 8 < to.rows;
    of[i][0] = known ? __ldg(from) : make_int4(-1, -1, -1, -1);
    of[i][1] = known ? __ldg(from + 1) : make_int4(-1, -1, -1, -1);
  }
  DEVICE void load(const PackedRows& to) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) load(to, i, i * THREADS + threadIdx.x);
  }
};
DEVICE uint4 gather_eight(const __half* row, const int4 (&of)[2]) {
  const int feature[8] = {of[0].x, of[0].y, of[0].z, of[0].w, of[1].x, of[1].y, of[1].z, of[1].w};
  union {
    uint4 word;
    __half v[8];
  } out;
#pragma unroll
  for (int e = 0; e < 8; e++) out.v[e] = feature[e] < 0 ? __half(0.f) : row[feature[e]];
  return out.word;
}
template <int CHUNKS>
DEVICE void pack_row(const PackedRows& to, int token, const __half* row, const HeldOrder<CHUNKS>& held) {
#pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int chunk = i * THREADS + threadIdx.x;
    if (chunk < 32 * to.units) store_chunk(to, token, chunk, gather_eight(row, held.of[i]));
  }
  for (int chunk = CHUNKS * THREADS + threadIdx.x; chunk < 32 * to.units; chunk += THREADS) {
    HeldOrder<1> order;
    order.load(to, 0, chunk);
    store_chunk(to, token, chunk, gather_eight(row, order.of[0]));
  }
}
// Columns past the last row.
DEVICE void pack_zeros(const PackedRows& to, int token) {
  for (int chunk = threadIdx.x; chunk < 32 * to.units; chunk += THREADS) store_chunk(to, token, chunk, make_uint4(0, 0, 0, 0));
}

// The same for more than eight columns, in the layout of linear/prepared.cuh for wgmma.
DEVICE void pack_row_for_batch(const PackedRows& to, int token, int columns, const __half* row) {
  const int2* const pairs = reinterpret_cast<const int2*>(to.features);
  for (int eight = threadIdx.x; eight < 32 * to.units; eight += THREADS) {
    union {
      uint4 word;
      __half v[8];
    } out;
    out.word = make_uint4(0, 0, 0, 0);
    if (row) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        // Of 16 pairs of neighbouring rows, those four apart belong to one group of eight.
        const int pair = 4 * (eight & ~3) + (eight & 3) + 4 * e;
        const int2 of = 2 * pair < to.rows ? __ldg(pairs + pair) : make_int2(-1, -1);
        if (of.x >= 0) out.v[2 * e] = row[of.x];
        if (of.y >= 0) out.v[2 * e + 1] = row[of.y];
      }
    }
    *reinterpret_cast<uint4*>(to.out + ((size_t)eight * columns + token) * 16) = out.word;
  }
}
