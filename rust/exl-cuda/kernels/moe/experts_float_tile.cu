// Float experts with more rows each (sm_80 and later).
#include "linear/float_tile.cuh"
#include "moe/experts_float.cuh"

#if __CUDA_ARCH__ >= 800
// A block has ROWS rows and TILE_FEATURES lines of weights: features of down, or half as many of gate and of up. Of a warp's tiles of eight
// lines, the first half is gate's and the other one up's, so a lane has both sums of a feature.
template <int ROWS, bool DOWN>
DEVICE void expert_tile(const FloatExpertCall& call) {
  extern __shared__ __align__(128) uint8_t float_memory[];
  using Tile = FloatTile<ROWS>;
  constexpr int HALF = Tile::FT / 2, FEATURES = DOWN ? TILE_FEATURES : TILE_FEATURES / 2;
  pdl_trigger();
  pdl_wait();
  const FloatItem<DOWN> item(call);
  if (!item.exists) return;
  const int first = blockIdx.x * FEATURES;
  // The feature of a line, of its matrix.
  const auto feature_of = [&](int line) { return first + (DOWN ? line : line / (16 * HALF) * (8 * HALF) + line % (8 * HALF)); };
  Tile tile(
      float_memory, 0, item.k(), [&](int line) { return item.weights(line / (8 * HALF) % 2, feature_of(line)); },
      [&](int row) { return item.row(row); });
  float total[Tile::RT][Tile::FT][4];
  Tile::each([&](int r, int f, int e) { total[r][f][e] = 0.f; });
  tile.run(call.slice / STAGE_K, [&] {
    Tile::each([&](int r, int f, int e) {
      total[r][f][e] += tile.sums[r][f][e];
      tile.sums[r][f][e] = 0.f;
    });
  });
  // Read again, so that it takes no registers of the loop.
  const FloatItem<DOWN> to(call);
  Tile::each([&](int r, int f, int e) {
    if constexpr (DOWN) to.store(tile.row_at(r, e), feature_of(tile.line_at(f, e)), total[r][f][e], 0.f);
    else if (f < HALF) to.store(tile.row_at(r, e), feature_of(tile.line_at(f, e)), total[r][f][e], total[r][f + HALF][e]);
  });
}
#else
template <int ROWS, bool DOWN>
DEVICE void expert_tile(const FloatExpertCall&) {
  __trap();  // the host starts these kernels from sm_80 on only
}
#endif

#define EXPERT_TILE(PART, DOWN, ROWS)                                                                                             \
  extern "C" __global__ void __launch_bounds__(FLOAT_THREADS, 2) experts_float_##PART##_##ROWS(const __grid_constant__ FloatExpertCall call) { \
    expert_tile<ROWS, DOWN>(call);                                                                                                \
  }
EXPERT_TILE(gate_up, false, 32)
EXPERT_TILE(gate_up, false, 64)
EXPERT_TILE(down, true, 32)
EXPERT_TILE(down, true, 64)
