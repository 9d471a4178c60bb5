// RMSNorm: out = x / sqrt(mean(x^2) + eps) * (weight + offset). LayerNorm: out = (x - mean) / sqrt(var + eps) * weight + bias.
// One block a row. The order of a row's sums does not depend on the number of rows.
#include "common/block_sum.cuh"

template <class T, class W>
DEVICE void rms_norm_kernel(const T* x, const W* weight, T* out, int width, int heads, float eps, float offset) {
  pdl_trigger();
  x += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  weight += (size_t)(blockIdx.x % heads) * width;
  const bool wide = width % 8 == 0 && aligned8(x) && aligned8(out) && aligned8(weight);
  pdl_wait();
  // Element k is added by thread (k / 8) % 256, with its seven neighbours, on both paths: an address's alignment cannot change the sum.
  float sum = 0.f;
  for (int k = threadIdx.x * 8; k < width; k += THREADS * 8) {
    float v[8];
    if (wide) {
      load8(v, x + k);
    } else {
      for (int i = 0; i < 8; i++) v[i] = k + i < width ? to_float(x[k + i]) : 0.f;
    }
    sum += eight_squares(v);
  }
  const float scale = 1.f / sqrtf(block_sum(sum) / (float)width + eps);
  for (int k = threadIdx.x * 8; k < width; k += THREADS * 8) {
    if (wide) {
      float v[8], w[8];
      load8(v, x + k);
      load8(w, weight + k);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = v[i] * scale * (w[i] + offset);
      store8(out + k, v);
    } else {
      for (int i = 0; i < 8 && k + i < width; i++)
        out[k + i] = from_float<T>(to_float(x[k + i]) * scale * (to_float(weight[k + i]) + offset));
    }
  }
}

template <class T, class W>
DEVICE void layer_norm_kernel(const T* x, const W* weight, const W* bias, T* out, int width, int heads, float eps) {
  pdl_trigger();
  x += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  weight += (size_t)(blockIdx.x % heads) * width;
  if (bias) bias += (size_t)(blockIdx.x % heads) * width;
  pdl_wait();
  float sum = 0.f;
  for (int k = threadIdx.x; k < width; k += THREADS) sum += to_float(x[k]);
  const float mean = block_sum(sum) / (float)width;
  float squares = 0.f;
  for (int k = threadIdx.x; k < width; k += THREADS) {
    const float d = to_float(x[k]) - mean;
    squares = fmaf(d, d, squares);
  }
  const float scale = 1.f / sqrtf(block_sum(squares) / (float)width + eps);
  for (int k = threadIdx.x; k < width; k += THREADS)
    out[k] = from_float<T>((to_float(x[k]) - mean) * scale * to_float(weight[k]) + (bias ? to_float(bias[k]) : 0.f));
}

#define RMS_NORM(T, t, W, w)                                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_##t##_##w(const T* x, const W* weight, T* out,    \
                                                                           int width, int heads, float eps,        \
                                                                           float offset) {                         \
    rms_norm_kernel(x, weight, out, width, heads, eps, offset);                                                    \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS) layer_norm_##t##_##w(                                      \
      const T* x, const W* weight, const W* bias, T* out, int width, int heads, float eps) {                       \
    layer_norm_kernel(x, weight, bias, out, width, heads, eps);                                                    \
  }
#define RMS_NORM_ALL(T, t)               \
  RMS_NORM(T, t, __half, f16)            \
  RMS_NORM(T, t, __nv_bfloat16, bf16)    \
  RMS_NORM(T, t, float, f32)
RMS_NORM_ALL(__half, f16)
RMS_NORM_ALL(__nv_bfloat16, bf16)
RMS_NORM_ALL(float, f32)
