// Activations in the order that matrix instructions read, for matmuls of more rows than the ring kernel takes.
//
// For mma.sync, a block is one unit (256 rows of K) of one column tile (8 activation rows). It has 4096 bytes, with the 16 bytes of lane L
// for slice s at 512 s + 16 L. Blocks are stored unit after unit, column tiles innermost. For wgmma, a block is one unit of all N columns:
// matrix instruction i (of 16) has 32 N bytes from 32 N i on, core matrices as in wgmma.cuh. Columns past m are zero. A matmul of
// `prepared_transposes` columns writes the input of the next one transposed. Results of one feature, a row of the layout, are then
// contiguous, while the order of features is arbitrary.
#pragma once
#include "linear/tile_layout.cuh"

constexpr int PREPARED_BYTES = 4096;

// Offset of a group of eight of a column in the layout for wgmma: eight values of K, half `eight % 2` of matrix instruction `eight / 2`.
DEVICE size_t prepared_eight(int eight, int column, int columns) { return ((size_t)eight * columns + column) * 16; }

// Offset of one value: a row of the layout, a column.
DEVICE size_t prepared_place(int row, int column, int columns) {
  const int eight = row >> 5 << 2 | (row >> 2 & 1) << 1 | (row >> 1 & 1);
  return prepared_eight(eight, column, columns) + (row >> 3 & 3) * 4 + (row & 1) * 2;
}

// Columns of which a matmul writes the input of the next one in its own order.
constexpr int UNTRANSPOSED = 32;

// `transposes` of src/ops/linear/batch/plan.rs.
constexpr bool prepared_transposes(int columns) { return columns != UNTRANSPOSED; }

// Offset of the first eight columns of a row of the transposed layout for wgmma; the next eight are 128 bytes further.
DEVICE size_t prepared_transposed(int row, int columns) {
  const int eight = row >> 5 << 2 | (row >> 2 & 1) << 1 | (row >> 1 & 1);
  return prepared_eight(eight, 0, columns) + ((row >> 3 & 3) * 2 + (row & 1)) * 16;
}

DEVICE size_t prepared_block(int u, int n, int column_tiles) { return ((size_t)u * column_tiles + n) * PREPARED_BYTES; }

template <int NT>
struct PreparedColumns {
  const uint8_t* block[NT];
  int lane;
  DEVICE uint4 get(int n, int k) const { return *reinterpret_cast<const uint4*>(block[n] + k * 16 + lane * 16); }
};
