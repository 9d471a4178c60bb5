// Float matrices and a few rows, with weights read from global memory directly into registers, and the sum of parts of float_tile.cu.
#include "linear/float_rows.cuh"

// A block has FT tiles of eight features and 8 * NT rows, and each of its warps a slice.
template <int NT, int FT, int AHEAD>
DEVICE void float_rows(const FloatCall& call) {
  constexpr int ROWS = 8 * NT, FEATURES = 8 * FT;
  __shared__ float parts[SLICES][ROWS][FEATURES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int first = blockIdx.x * FEATURES, first_row = blockIdx.y * ROWS;
  const int begin = min(warp * call.slice, call.k), end = min(begin + call.slice, call.k);
  const __half *weights[FT], *x[NT];
  float sums[FT][4];
#pragma unroll
  for (int f = 0; f < FT; f++) {
    weights[f] = call.weight + (size_t)min(first + f * 8 + g, call.n - 1) * call.k;
    sums[f][0] = sums[f][1] = sums[f][2] = sums[f][3] = 0.f;
  }
#pragma unroll
  for (int c = 0; c < NT; c++) x[c] = call.x + (size_t)min(first_row + 8 * c + g, call.m - 1) * call.k;
  if (call.whole) slice_of_rows<NT, FT, AHEAD, true>(sums, weights, x, begin, end);
  else slice_of_rows<NT, FT, 1, false>(sums, weights, x, begin, end);
#pragma unroll
  for (int f = 0; f < FT; f++)
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) parts[warp][i / 2 * 8 + g][8 * f + 2 * t + i % 2] = sums[f][i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * FEATURES; i += FLOAT_THREADS) {
    const int feature = first + i % FEATURES, row = first_row + i / FEATURES;
    if (feature >= call.n || row >= call.m) continue;
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < SLICES; s++) sum += parts[s][i / FEATURES][i % FEATURES];
    store(call, row, feature, sum);
  }
}
#define FLOAT_ROWS(NAME, NT, FT, AHEAD)                                                                         \
  extern "C" __global__ void __launch_bounds__(FLOAT_THREADS, 2) NAME(const __grid_constant__ FloatCall call) { \
    float_rows<NT, FT, AHEAD>(call);                                                                            \
  }
FLOAT_ROWS(gemm_float_rows_8, 1, 2, 6)
FLOAT_ROWS(gemm_float_rows_2x8, 1, 4, 4)
FLOAT_ROWS(gemm_float_rows_16, 2, 2, 4)

// Adds the sums of slices.
extern "C" __global__ void __launch_bounds__(FLOAT_THREADS) gemm_float_sum(const __grid_constant__ FloatCall call) {
  pdl_trigger();
  const int row = blockIdx.y, feature = blockIdx.x * FLOAT_THREADS + threadIdx.x;
  pdl_wait();
  if (feature >= call.n) return;
  float sum = 0.f;
#pragma unroll
  for (int s = 0; s < SLICES; s++) sum += call.sums[((size_t)s * call.m + row) * call.n + feature];
  store(call, row, feature, sum);
}
