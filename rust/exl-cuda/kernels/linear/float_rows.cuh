// A slice of K of a few rows and float weights, which go from global memory directly into registers.
#pragma once
#include "linear/float.cuh"

// A warp's slice for FT tiles of eight features and 8 * NT rows, NT at most two. Chunks of zeros change no sum.
template <int NT, int FT, int AHEAD, bool WHOLE>
DEVICE void slice_of_rows(float (&sums)[FT][4], const __half* const (&weights)[FT], const __half* const (&x)[NT], int begin, int end) {
  // Chunks of rows that are loaded at a time.
  constexpr int TOGETHER = AHEAD < 2 ? 1 : 2;
  const int t = threadIdx.x & 3;
  // Chunks of weights that are under way.
  uint4 w[AHEAD][FT];
  const auto load = [&](int i, int k) {
#pragma unroll
    for (int f = 0; f < FT; f++) w[i][f] = eight_weights<WHOLE>(weights[f], k + i * CHUNK_K + 8 * t, end);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) load(i, begin);
  pdl_wait();
#pragma unroll 1
  for (int k = begin; k < end; k += AHEAD * CHUNK_K) {
    uint4 v[TOGETHER][NT];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (i % TOGETHER == 0)
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
#pragma unroll
          for (int c = 0; c < NT; c++) v[j][c] = eight<WHOLE>(x[c], k + (i + j) * CHUNK_K + 8 * t, end);
      const uint4 low = v[i % TOGETHER][0], high = NT == 2 ? v[i % TOGETHER][NT - 1] : make_uint4(0, 0, 0, 0);
      const uint32_t rows[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
      multiply_chunk(sums, rows, w[i]);
      load(i, k + AHEAD * CHUNK_K);
    }
  }
}
