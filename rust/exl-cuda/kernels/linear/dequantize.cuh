// A matrix dequantized to halves in file order.
#pragma once
#include "linear/tile_layout.cuh"

constexpr int BLOCK_COLUMNS = 8 * TILE;

// Offset of eight columns of a row in shared memory. A warp's lanes write rows 8 apart at once; the XOR puts them in different banks.
DEVICE int eight_of(int row, int eight) { return eight ^ (row >> 3 & 3); }

template <int KIND, int B, int F>
DEVICE void write_field(__half (*tile)[BLOCK_COLUMNS], const uint32_t (&w)[B], const uint32_t (&scale)[2][2],
                        const uint2 (&zeros)[2], int lane, int column) {
  constexpr int J = F / 4, SLICE = J / 2, ROW = 32 * SLICE + 4 * (J % 2) + 2 * (F % 4 / 2), UPPER = F % 2;
  const uint32_t v = mul2(centred<KIND, B, F>(w, UPPER ? zeros[SLICE].y : zeros[SLICE].x), scale[SLICE][UPPER]);
  const int row = ROW + 8 * (lane & 3), col = eight_of(row, column / 8 + UPPER) * 8 + (lane >> 2);
  tile[row][col] = __ushort_as_half(v & 0xffff);
  tile[row + 1][col] = __ushort_as_half(v >> 16);
}
template <int KIND, int B, int F = 0>
DEVICE void write_fields(__half (*tile)[BLOCK_COLUMNS], const uint32_t (&w)[B], const uint32_t (&scale)[2][2],
                         const uint2 (&zeros)[2], int lane, int column) {
  write_field<KIND, B, F>(tile, w, scale, zeros, lane, column);
  if constexpr (F + 1 < 16) write_fields<KIND, B, F + 1>(tile, w, scale, zeros, lane, column);
}
template <int KIND, int B>
DEVICE void write_chunk(__half (*tile)[BLOCK_COLUMNS], GlobalBytes chunk, const uint32_t (&scale)[2][2],
                        const uint2 (&zeros)[2], int lane, int column) {
  uint32_t w[B];
  load_words<B>(w, chunk, lane);
  write_fields<KIND, B>(tile, w, scale, zeros, lane, column);
}

// W [in_features, out_features] as halves in file order: h16(h16-rounded scale * (code - zero)), bitwise identical to the dequantization of
// exl-format. A block takes 64 rows of eight tiles.
template <int KIND, int ENTRY>
DEVICE void dequantize(const Matrix& a, const int* features, __half* out) {
  __shared__ __align__(16) __half tile[64][BLOCK_COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = blockIdx.x, u = chunk / 4, c = chunk % 4;
  const int row_tile = min(static_cast<int>(blockIdx.y) * 8 + warp, a.tiles - 1);
  const uint2 unit = a.units[u];
  uint32_t before = 0, bits = 0;
  for (int i = 0; i < 4; i++) {
    if (i < c) before += unit.y >> (4 * i) & 15;
    bits += unit.y >> (4 * i) & 15;
  }
  const GlobalBytes base{a.image + (size_t)row_tile * a.tile_bytes + unit.x};
  UnitScales<KIND, ENTRY, GlobalBytes> scales;
  scales.load(base + 128 * bits, lane >> 2);
  uint32_t scale[2][2];
  uint2 zeros[2];
  for (int h = 0; h < 2; h++) {
    const int entry = (64 * c + 32 * h) / ENTRY;
    const uint32_t v = scales.halves(entry, KIND == EXL2 ? a.maxima[u * (UNIT_ROWS / ENTRY) + entry] : __half(0.f));
    scale[h][0] = __byte_perm(v, v, 0x1010);
    scale[h][1] = __byte_perm(v, v, 0x3232);
    zeros[h] = scales.zeros(entry);
  }
  const GlobalBytes codes = base + 128 * before;
  switch (unit.y >> (4 * c) & 15) {
    case 2: write_chunk<KIND, 2>(tile, codes, scale, zeros, lane, warp * TILE); break;
    case 3: write_chunk<KIND, 3>(tile, codes, scale, zeros, lane, warp * TILE); break;
    case 4: write_chunk<KIND, 4>(tile, codes, scale, zeros, lane, warp * TILE); break;
    case 5: write_chunk<KIND, 5>(tile, codes, scale, zeros, lane, warp * TILE); break;
    case 6: write_chunk<KIND, 6>(tile, codes, scale, zeros, lane, warp * TILE); break;
    case 8: write_chunk<KIND, 8>(tile, codes, scale, zeros, lane, warp * TILE); break;
  }
  __syncthreads();
  const int first = blockIdx.y * BLOCK_COLUMNS;
  const bool wide = a.out_features % 8 == 0;
  for (int i = threadIdx.x; i < 64 * BLOCK_COLUMNS / 8; i += blockDim.x) {
    const int row = i / (BLOCK_COLUMNS / 8), col = i % (BLOCK_COLUMNS / 8) * 8, feature = features[chunk * 64 + row];
    if (feature < 0) continue;
    __half* to = out + (size_t)feature * a.out_features + first + col;
    const __half* from = &tile[row][eight_of(row, col / 8) * 8];
    if (wide && first + col < a.out_features) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 8 && first + col + e < a.out_features; e++) to[e] = from[e];
    }
  }
}
