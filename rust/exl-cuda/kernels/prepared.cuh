// Activations in the order in which matrix instructions want them, for products of more rows than the ring kernel takes.
//
// A block is one unit (256 rows of K) of one column tile (8 activation rows): 4096 bytes, the 16 bytes of lane L for slice s at
// 512 s + 16 L; then the sums of each entry's activations, 8 floats an entry. Blocks stand unit after unit, column tiles innermost.
// Rows past m are zero.
#pragma once
#include "tile.cuh"

template <int ENTRY>
constexpr int PREPARED_BYTES = 4096 + UNIT_ROWS / ENTRY * 32;

template <int ENTRY>
DEVICE size_t prepared_block(int u, int n, int column_tiles) {
  return ((size_t)u * column_tiles + n) * PREPARED_BYTES<ENTRY>;
}

template <int ENTRY, int NT>
struct PreparedColumns {
  const uint8_t* block[NT];
  int lane;
  DEVICE uint4 get(int n, int k) const { return *reinterpret_cast<const uint4*>(block[n] + k * 16 + lane * 16); }
  DEVICE float2 sum(int n, int entry) const {
    return *reinterpret_cast<const float2*>(block[n] + 4096 + entry * 32 + (lane & 3) * 8);
  }
};
