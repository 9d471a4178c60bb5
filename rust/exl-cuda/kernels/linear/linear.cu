// Kernels before and after the matmuls: activations packed into the layout, and a whole matrix dequantized to halves.
#include <type_traits>

#include "linear/batch_rows.cuh"
#include "linear/dequantize.cuh"
#include "linear/prepared.cuh"

// Inverses of the factors of BF16 rows; one block a row.
extern "C" __global__ void __launch_bounds__(256) row_multipliers(const __nv_bfloat16* x, float* multipliers, int k) {
  __shared__ float largest[8];
  pdl_trigger();
  x += (size_t)blockIdx.x * k;
  pdl_wait();
  float v = 0.f;
  for (int i = threadIdx.x; i < k; i += 256) v = fmaxf(v, fabsf(to_float(x[i])));
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = v;
  __syncthreads();
  v = largest[0];
  for (int w = 1; w < 8; w++) v = fmaxf(v, largest[w]);
  if (threadIdx.x == 0) multipliers[blockIdx.x] = 1.f / row_factor(v);
}

// Packs x [m, in_features] into the blocks of prepared.cuh, for wgmma if `columns` (N) is not zero. A block of threads writes eight rows of
// a unit. FP16 rows get multipliers of one.
template <class T>
DEVICE void prepare(const Matrix& a, const int* features, const T* x, uint8_t* out, float* multipliers, int m, int columns) {
  constexpr bool SCALED = !std::is_same<T, __half>::value;
  __shared__ uint4 block[256];
  const int u = blockIdx.x, n = blockIdx.y, tid = threadIdx.x, lane = tid % 32, token = 8 * n + (lane >> 2);
  const int first = u * UNIT_ROWS + tid / 32 * 32 + 8 * (lane & 3);
  pdl_trigger();
  union {
    uint4 word;
    __half v[8];
  } v;
  int feature[8];
#pragma unroll
  for (int e = 0; e < 8; e++) feature[e] = first + e < a.rows ? features[first + e] : -1;
  pdl_wait();
  float factor = 1.f;
  if (SCALED && token < m) factor = 1.f / multipliers[token];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    v.v[e] = __half(0.f);
    if (token >= m || feature[e] < 0) continue;
    const T from = x[(size_t)token * a.in_features + feature[e]];
    if constexpr (SCALED) v.v[e] = __float2half_rn(to_float(from) * factor);
    else v.v[e] = from;
  }
  if (!SCALED && u == 0 && token < m && tid < 32 && lane % 4 == 0) multipliers[token] = 1.f;
  if (columns == 0) {
    reinterpret_cast<uint4*>(out + prepared_block(u, n, gridDim.y))[tid] = v.word;
    return;
  }
  block[tid] = v.word;
  __syncthreads();
  // Column c, values 8 h .. 8 h + 7 of K of instruction i: a pair of each of the four lanes of that column.
  const int c = tid % 8, half = tid / 8 % 2, i = tid / 16, word = 2 * (i % 2) + half;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(block + i / 2 * 32 + 4 * c) + word;
  *reinterpret_cast<uint4*>(out + prepared_eight(32 * u + 2 * i + half, 8 * n + c, columns)) = make_uint4(from[0], from[4], from[8], from[12]);
}
extern "C" __global__ void __launch_bounds__(256) prepare_f16(
    const __grid_constant__ Matrix a, const int* features, const __half* x, uint8_t* out, float* multipliers, int m, int columns) {
  prepare(a, features, x, out, multipliers, m, columns);
}
extern "C" __global__ void __launch_bounds__(256) prepare_bf16(
    const __grid_constant__ Matrix a, const int* features, const __nv_bfloat16* x, uint8_t* out, float* multipliers, int m, int columns) {
  prepare(a, features, x, out, multipliers, m, columns);
}

PACK_ROWS(__half, f16)
PACK_ACTIVATED_ROWS()
PACK_ROWS(__nv_bfloat16, bf16)

#define DEQUANTIZE(KIND, kind, ENTRY)                                                                \
  extern "C" __global__ void __launch_bounds__(256) dequantize_##kind##_##ENTRY(                     \
      const __grid_constant__ Matrix a, const int* features, __half* out) {                          \
    dequantize<KIND, ENTRY>(a, features, out);                                                       \
  }
DEQUANTIZE(EXL2, exl2, 128)
DEQUANTIZE(EXL2, exl2, 32)
DEQUANTIZE(GPTQ, gptq, 128)
DEQUANTIZE(GPTQ, gptq, 32)
