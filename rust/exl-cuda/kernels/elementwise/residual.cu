// x = x + y, then out = rms_norm(x): the end of one sub-layer and the beginning of the next in one launch. One block a row.
//
// Bit for bit what an addition of tensors followed by norm.cu gives: x is rounded to its type before the norm reads it, and element k
// is added by thread (k / 8) % 256.
#include "common/block_sum.cuh"

constexpr int HELD = 4;  // batches of eight elements that a thread keeps in registers: rows of up to 8192

template <class T>
DEVICE void add_rms_norm_kernel(T* x, const T* y, const float* weight, T* out, int width, float eps, float offset) {
  pdl_trigger();
  x += (size_t)blockIdx.x * width;
  y += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  const bool wide = width % 8 == 0 && aligned8(x) && aligned8(y) && aligned8(out) && aligned8(weight);
  float held[HELD][8], w[HELD][8];
  if (wide) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int k = (i * THREADS + threadIdx.x) * 8;
      if (k < width) load8(w[i], weight + k);
    }
  }
  pdl_wait();
  float sum = 0.f;
  auto add = [&](float (&v)[8], int k) {
    float u[8];
    load8(v, x + k);
    load8(u, y + k);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = to_float(from_float<T>(v[j] + u[j]));
    store8(x + k, v);
    sum += eight_squares(v);
  };
  if (wide) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int k = (i * THREADS + threadIdx.x) * 8;
      if (k < width) add(held[i], k);
    }
    for (int k = (HELD * THREADS + threadIdx.x) * 8; k < width; k += THREADS * 8) {
      float v[8];
      add(v, k);
    }
  } else {
    for (int k = threadIdx.x * 8; k < width; k += THREADS * 8) {
      float v[8] = {};
      for (int j = 0; j < 8 && k + j < width; j++) {
        const T added = from_float<T>(to_float(x[k + j]) + to_float(y[k + j]));
        x[k + j] = added;
        v[j] = to_float(added);
      }
      sum += eight_squares(v);
    }
  }
  const float scale = 1.f / sqrtf(block_sum(sum) / (float)width + eps);
  if (wide) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      const int k = (i * THREADS + threadIdx.x) * 8;
      if (k >= width) break;
#pragma unroll
      for (int j = 0; j < 8; j++) held[i][j] = held[i][j] * scale * (w[i][j] + offset);
      store8(out + k, held[i]);
    }
  }
  for (int k = ((wide ? HELD * THREADS : 0) + threadIdx.x) * 8; k < width; k += THREADS * 8)
    for (int j = 0; j < 8 && k + j < width; j++)
      out[k + j] = from_float<T>(to_float(x[k + j]) * scale * (weight[k + j] + offset));
}

#define ADD_RMS_NORM(T, t)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS) add_rms_norm_##t(T* x, const T* y, const float* weight, T* out, \
                                                                         int width, float eps, float offset) {          \
    add_rms_norm_kernel(x, y, weight, out, width, eps, offset);                                                         \
  }
ADD_RMS_NORM(__half, f16)
ADD_RMS_NORM(__nv_bfloat16, bf16)
ADD_RMS_NORM(float, f32)
