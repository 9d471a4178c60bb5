// Float experts with a few rows each, with weights read from global memory directly into registers.
#include "linear/float_rows.cuh"
#include "moe/experts_float.cuh"

// A block has two tiles of eight features, of down or one each of gate and up, and 8 * NT rows. Each of its warps has a slice of K; there
// are as many warps as slices that have numbers.
template <int NT, int AHEAD, bool DOWN>
DEVICE void expert_rows(const FloatExpertCall& call) {
  constexpr int ROWS = 8 * NT, FT = 2, FEATURES = DOWN ? 8 * FT : 8;
  __shared__ float parts[SLICES][ROWS][8 * FT];
  const FloatItem<DOWN> item(call);
  if (!item.exists) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, first = blockIdx.x * FEATURES;
  const int begin = min(warp * call.slice, item.k()), end = min(begin + call.slice, item.k());
  const __half *weights[FT], *x[NT];
  float sums[FT][4];
#pragma unroll
  for (int f = 0; f < FT; f++) {
    weights[f] = item.weights(f, first + (DOWN ? 8 * f : 0) + g);
    sums[f][0] = sums[f][1] = sums[f][2] = sums[f][3] = 0.f;
  }
#pragma unroll
  for (int c = 0; c < NT; c++) x[c] = item.row(8 * c + g);
  if (call.whole) slice_of_rows<NT, FT, AHEAD, true>(sums, weights, x, begin, end);
  else slice_of_rows<NT, FT, 1, false>(sums, weights, x, begin, end);
#pragma unroll
  for (int f = 0; f < FT; f++)
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) parts[warp][i / 2 * 8 + g][8 * f + 2 * t + i % 2] = sums[f][i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * FEATURES; i += blockDim.x) {
    const int row = i / FEATURES, feature = i % FEATURES;
    float sum = 0.f, up = 0.f;
    for (int s = 0; s < blockDim.x / 32; s++) {
      sum += parts[s][row][feature];
      if constexpr (!DOWN) up += parts[s][row][8 + feature];
    }
    item.store(row, first + feature, sum, up);
  }
}

#define EXPERT_ROWS(PART, DOWN, NT, AHEAD, ROWS)                                                                                  \
  extern "C" __global__ void __launch_bounds__(FLOAT_THREADS, 2) experts_float_##PART##_##ROWS(const __grid_constant__ FloatExpertCall call) { \
    expert_rows<NT, AHEAD, DOWN>(call);                                                                                           \
  }
EXPERT_ROWS(gate_up, false, 1, 6, 8)
EXPERT_ROWS(gate_up, false, 2, 4, 16)
EXPERT_ROWS(down, true, 1, 6, 8)
EXPERT_ROWS(down, true, 2, 4, 16)
