// y = x @ W for up to 8 * NT activation rows at a time, weights read from global memory straight into registers.
//
// A block has R row tiles; warp c takes the units u = c (mod 8) in ascending order ("class" c), the classes are added in order at the
// end. Any architecture; also the way for shapes whose activations do not fit the ring kernel's shared memory.
#pragma once
#include "tile.cuh"

template <int NT>
struct GlobalColumns {
  const __half* row[NT];
  DEVICE uint4 get(int n, int k) const { return *reinterpret_cast<const uint4*>(row[n] + k); }
};

// x [m, rows of the layout] halves in layout order, multipliers [m]; y [m, out_features].
template <int KIND, int ENTRY, int NT, int R>
DEVICE void matmul(const Matrix& a, const __half* x, const float* multipliers, void* y, int m, int y_kind) {
  constexpr int COLUMNS = 8 * NT, ROWS = R * TILE;
  __shared__ float parts[CLASSES][ROWS][COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int first_tile = blockIdx.x * R, first_row = blockIdx.y * COLUMNS;
  const __half* column[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) column[n] = x + (size_t)min(first_row + 8 * n + g, m - 1) * a.rows + 8 * t;
  const uint8_t* tile[R];
#pragma unroll
  for (int r = 0; r < R; r++) tile[r] = a.image + (size_t)min(first_tile + r, a.tiles - 1) * a.tile_bytes;
  Sums<NT> total[R];
#pragma unroll
  for (int r = 0; r < R; r++) clear(total[r]);
#pragma unroll 1
  for (int u = warp; u < a.unit_count; u += CLASSES) {
    const uint2 unit = __ldg(a.units + u);
    GlobalBytes weights[R];
#pragma unroll
    for (int r = 0; r < R; r++) weights[r].at = tile[r] + unit.x;
    GlobalColumns<NT> columns;
#pragma unroll
    for (int n = 0; n < NT; n++) columns.row[n] = column[n] + u * UNIT_ROWS;
    UnitProduct<KIND, ENTRY, NT, R, GlobalBytes, GlobalColumns<NT>> product{
        weights, columns, a.maxima + u * (UNIT_ROWS / ENTRY), total, lane, {}};
    product.run(unit.y);
  }
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float* d = &parts[warp][r * TILE + g][n * 8 + 2 * t];
      d[0] = total[r][n][0];
      d[1] = total[r][n][1];
      d[8 * COLUMNS] = total[r][n][2];
      d[8 * COLUMNS + 1] = total[r][n][3];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {
    const int row = i % ROWS, token = first_row + i / ROWS, n = first_tile * TILE + row;
    if (token >= m || n >= a.out_features) continue;
    const float v = finish(&parts[0][row][i / ROWS], ROWS * COLUMNS, multipliers[token], a, n);
    store_result(y, (size_t)token * a.out_features + n, y_kind, v);
  }
}

#define MATMUL(KIND, kind, ENTRY, NT, R)                                                                                       \
  extern "C" __global__ void __launch_bounds__(256, NT == 1 ? 3 : NT == 2 ? 2 : 1) matmul_##kind##_##ENTRY##_##NT(                                        \
      const __grid_constant__ Matrix a, const __half* x, const float* multipliers, void* y, int m, int y_kind) {               \
    matmul<KIND, ENTRY, NT, R>(a, x, multipliers, y, m, y_kind);                                                               \
  }
