// Rows of the embedding table as halves or FP32, times a factor in FP32. One block a token; an id outside the table reads the nearest row.
#include "common/common.cuh"

template <class T, class O>
DEVICE void embed_kernel(const T* table, const int64_t* ids, O* out, int width, int64_t rows, float factor) {
  pdl_trigger();
  pdl_wait();
  const int64_t id = min(max(ids[blockIdx.x], int64_t(0)), rows - 1);
  table += id * width;
  out += (size_t)blockIdx.x * width;
  const bool wide = width % 8 == 0 && aligned8(table) && aligned8(out);
  for (int k = threadIdx.x * 8; k < width; k += blockDim.x * 8) {
    if (wide) {
      float v[8];
      load8(v, table + k);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] *= factor;
      store8(out + k, v);
    } else {
      for (int i = k; i < min(k + 8, width); i++) out[i] = from_float<O>(to_float(table[i]) * factor);
    }
  }
}

#define EMBED(T, t, O, o)                                                                                       \
  extern "C" __global__ void __launch_bounds__(256) embed_##t##_##o(const T* table, const int64_t* ids, O* out, \
                                                                    int width, int64_t rows, float factor) {    \
    embed_kernel(table, ids, out, width, rows, factor);                                                         \
  }
#define EMBEDS(T, t) EMBED(T, t, __half, f16) EMBED(T, t, float, f32)
EMBEDS(__half, f16)
EMBEDS(__nv_bfloat16, bf16)
EMBEDS(float, f32)
