// y = x @ W for packed activations, 8 * NT rows at a time, with weights read from global memory directly into registers.
//
// A block has R row tiles. Warp c takes the units u = c (mod 16) and then the units u = c + 8 (mod 16), each in ascending order. Runs on
// any architecture, for shapes and rows that the pipelined kernels do not take.
#pragma once
#include "linear/prepared.cuh"

// x as `prepare` writes it, multipliers [m]; y [m, out_features].
template <int KIND, int ENTRY, int NT, int R>
DEVICE void tile_matmul(const Matrix& a, const uint8_t* x, const float* multipliers, void* y, int m, int y_kind) {
  constexpr int COLUMNS = 8 * NT, ROWS = R * TILE;
  // Classes c and c + 8 share a place for c < 4; class c + 8 has place c + 4 for larger c.
  __shared__ float parts[12][ROWS][COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int first_tile = blockIdx.x * R, first_row = blockIdx.y * COLUMNS, column_tiles = (m + 7) / 8;
  const uint8_t* tile[R];
#pragma unroll
  for (int r = 0; r < R; r++) tile[r] = a.image + (size_t)min(first_tile + r, a.tiles - 1) * a.tile_bytes;
#pragma unroll 1
  for (int c = warp; c < CLASSES; c += 8) {
    Sums<NT> total[R];
#pragma unroll
    for (int r = 0; r < R; r++) clear(total[r]);
#pragma unroll 1
    for (int u = c; u < a.unit_count; u += CLASSES) {
      const uint2 unit = __ldg(a.units + u);
      GlobalBytes weights[R];
#pragma unroll
      for (int r = 0; r < R; r++) weights[r].at = tile[r] + unit.x;
      PreparedColumns<NT> columns;
#pragma unroll
      for (int n = 0; n < NT; n++)
        columns.block[n] = x + prepared_block(u, min(first_row / 8 + n, column_tiles - 1), column_tiles);
      // Columns past the last row of a single column tile repeat it, so that they cost no memory traffic.
      columns.lane = NT == 1 ? min(g, m - first_row - 1) * 4 + t : lane;
      UnitMatmul<KIND, ENTRY, NT, R, GlobalBytes, PreparedColumns<NT>> product{
          weights, columns, a.maxima + u * (UNIT_ROWS / ENTRY), total, lane, {}};
      product.run(unit.y);
    }
    const bool again = c != warp, onto = again && warp < 4;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& d = parts[again && !onto ? warp + 4 : warp][r * TILE + g + i / 2 * 8][n * 8 + 2 * t + i % 2];
          d = onto ? d + total[r][n][i] : total[r][n][i];
        }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {
    const int row = i % ROWS, token = first_row + i / ROWS, n = first_tile * TILE + row;
    if (token >= m || n >= a.out_features) continue;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float quarter = (parts[j][row][i / ROWS] + parts[j + 4][row][i / ROWS]) + parts[j + 8][row][i / ROWS];
      sum = j == 0 ? quarter : sum + quarter;
    }
    store_result(y, (size_t)token * a.out_features + n, y_kind, finish(sum, multipliers[token], a.bias ? a.bias[n] : 0.f, a.prescale));
  }
}

#define TILE_MATMUL(KIND, kind, ENTRY, NT, R)                                                                     \
  extern "C" __global__ void __launch_bounds__(256, NT == 1 ? 2 : 1) gemm_tile_##kind##_##ENTRY##_##NT(           \
      const __grid_constant__ Matrix a, const uint8_t* x, const float* multipliers, void* y, int m, int y_kind) { \
    tile_matmul<KIND, ENTRY, NT, R>(a, x, multipliers, y, m, y_kind);                                             \
  }
