// y = (x @ W^T * scale + bias) * prescale for a matrix W of halves as files store it: [n, k], row by row.
//
// K is cut in eight slices. A slice is one chain of matrix instructions in the order of K, and slices add up in their order. All kernels
// have this order, and the same places of K's numbers in a matrix instruction, so a row's result depends neither on the kernel nor on the
// other rows.
#pragma once
#include "common/abi.cuh"
#include "linear/tile_layout.cuh"

constexpr int SLICES = 8, FLOAT_THREADS = 256;
static_assert(FLOAT_THREADS == 32 * SLICES);
// Numbers of K of a stage of float_tile.cu, of which slices have whole ones, and those of two matrix instructions.
constexpr int STAGE_K = 64, CHUNK_K = 32;

// The same struct as `ops::linear::float::Argument`.
struct FloatCall {
  const __half* weight;      // [n, k]
  const __half* x;           // [m, k]
  const float* multipliers;  // [m], of the rows of x; null: ones
  const float* bias;         // [n] or null
  void* y;                   // [m, n]
  float* sums;               // [SLICES, m, n], if blocks share K
  int m, k, n;
  int slice;  // numbers of K of a slice: a multiple of STAGE_K
  int whole;  // rows are multiples of 16 bytes, and aligned to 16
  int parts;  // blocks that share K: 1, or a divisor of SLICES
  int y_kind;
  float scale;  // factor of x @ W^T
  float prescale;
  int padding;
};
ABI_SIZE(FloatCall, 88); ABI_AT(FloatCall, weight, 0); ABI_AT(FloatCall, x, 8); ABI_AT(FloatCall, multipliers, 16);
ABI_AT(FloatCall, bias, 24); ABI_AT(FloatCall, y, 32); ABI_AT(FloatCall, sums, 40); ABI_AT(FloatCall, m, 48); ABI_AT(FloatCall, k, 52);
ABI_AT(FloatCall, n, 56); ABI_AT(FloatCall, slice, 60); ABI_AT(FloatCall, whole, 64); ABI_AT(FloatCall, parts, 68);
ABI_AT(FloatCall, y_kind, 72); ABI_AT(FloatCall, scale, 76); ABI_AT(FloatCall, prescale, 80); ABI_AT(FloatCall, padding, 84);

DEVICE void store(const FloatCall& call, int row, int feature, float sum) {
  const float multiplier = call.multipliers ? call.multipliers[row] * call.scale : call.scale, bias = call.bias ? call.bias[feature] : 0.f;
  store_result(call.y, (size_t)row * call.n + feature, call.y_kind, finish(sum, multiplier, bias, call.prescale));
}

// The matrix instructions of a chunk: 16 rows times tiles of eight features, two for each tile. `rows`: the operands A of both. `weights`:
// numbers 8 t .. 8 t + 7 of feature g. A lane's sums are those of rows g, g, g + 8, g + 8 and features 2 t, 2 t + 1, 2 t, 2 t + 1.
template <int FT>
DEVICE void multiply_chunk(float (&sums)[FT][4], const uint32_t (&rows)[2][4], const uint4 (&weights)[FT]) {
  // The second instruction of a tile waits for the first one.
#pragma unroll
  for (int f = 0; f < FT; f++) mma(sums[f], rows[0], weights[f].x, weights[f].y);
#pragma unroll
  for (int f = 0; f < FT; f++) mma(sums[f], rows[1], weights[f].z, weights[f].w);
}

// Eight numbers of a row from k on; zeros from `end` on.
template <bool WHOLE>
DEVICE uint4 eight(const __half* row, int k, int end) {
  if constexpr (WHOLE) {
    return k < end ? *reinterpret_cast<const uint4*>(row + k) : make_uint4(0, 0, 0, 0);
  } else {
    union {
      uint4 words;
      __half v[8];
    } u;
#pragma unroll
    for (int i = 0; i < 8; i++) u.v[i] = k + i < end ? row[k + i] : __half(0.f);
    return u.words;
  }
}
// The same of weights, which are read once: the following ones of the row come to L2 with them.
template <bool WHOLE>
DEVICE uint4 eight_weights(const __half* row, int k, int end) {
#if __CUDA_ARCH__ >= 800
  if constexpr (WHOLE) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (k < end)
      asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(row + k));
    return v;
  }
#endif
  return eight<WHOLE>(row, k, end);
}
