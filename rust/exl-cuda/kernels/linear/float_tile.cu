// Float matrices and more rows (sm_80 and later).
#include "linear/float_tile.cuh"

#if __CUDA_ARCH__ >= 800
// A block has TILE_FEATURES features and ROWS rows, and all slices or some of them.
template <int ROWS, bool PARTS>
DEVICE void float_tile(const FloatCall& call) {
  extern __shared__ __align__(128) uint8_t float_memory[];
  pdl_trigger();
  const int own = PARTS ? SLICES / call.parts : SLICES, first_row = blockIdx.x * ROWS, first = blockIdx.y * TILE_FEATURES;
  int slice = PARTS ? blockIdx.z * own : 0;
  const int last = slice + own;
  using Tile = FloatTile<ROWS>;
  Tile tile(
      float_memory, min(slice * call.slice, call.k), min(last * call.slice, call.k),
      [&](int line) { return call.weight + (size_t)min(first + line, call.n - 1) * call.k; },
      [&](int row) { return call.x + (size_t)min(first_row + row, call.m - 1) * call.k; });
  float total[Tile::RT][Tile::FT][4];
  Tile::each([&](int r, int f, int e) { total[r][f][e] = 0.f; });
  const auto leave = [&] {
    Tile::each([&](int r, int f, int e) {
      if constexpr (PARTS) {
        const int row = first_row + tile.row_at(r, e), feature = first + tile.line_at(f, e);
        if (row < call.m && feature < call.n) call.sums[((size_t)slice * call.m + row) * call.n + feature] = tile.sums[r][f][e];
      } else {
        total[r][f][e] += tile.sums[r][f][e];
      }
      tile.sums[r][f][e] = 0.f;
    });
    slice++;
  };
  tile.run(call.slice / STAGE_K, leave);
  if constexpr (PARTS) {
    while (slice < last) leave();  // slices of a small K without numbers
  } else {
    Tile::each([&](int r, int f, int e) {
      const int row = first_row + tile.row_at(r, e), feature = first + tile.line_at(f, e);
      if (row < call.m && feature < call.n) store(call, row, feature, total[r][f][e]);
    });
  }
}
#else
template <int ROWS, bool PARTS>
DEVICE void float_tile(const FloatCall&) {
  __trap();  // the host starts these kernels from sm_80 on only
}
#endif
#define FLOAT_TILE(NAME, ROWS, PARTS)                                                                           \
  extern "C" __global__ void __launch_bounds__(FLOAT_THREADS, 2) NAME(const __grid_constant__ FloatCall call) { \
    float_tile<ROWS, PARTS>(call);                                                                              \
  }
FLOAT_TILE(gemm_float_tile_32, 32, false)
FLOAT_TILE(gemm_float_tile_64, 64, false)
FLOAT_TILE(gemm_float_parts_32, 32, true)
FLOAT_TILE(gemm_float_parts_64, 64, true)
