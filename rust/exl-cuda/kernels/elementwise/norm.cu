// RMSNorm: out = x / sqrt(mean(x^2) + eps) * (weight + offset). LayerNorm: out = (x - mean) / sqrt(var + eps) * weight + bias.
// One block a row. The order of a row's sums does not depend on the number of rows.
#include "elementwise/eight.cuh"
#include "elementwise/packed_rows.cuh"

// A row; waits for the previous launch.
template <class T, class W>
DEVICE void rms_norm_row(const T* x, const W* weight, T* out, int width, float eps, float offset) {
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
DEVICE void rms_norm_kernel(const T* x, const W* weight, T* out, int width, int heads, float eps, float offset) {
  pdl_trigger();
  rms_norm_row(x + (size_t)blockIdx.x * width, weight + (size_t)(blockIdx.x % heads) * width, out + (size_t)blockIdx.x * width, width, eps,
               offset);
}

// Norms the two first parts of each row in place. Grid: rows, parts.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_parts(__half* x, const float* first, const float* second, int first_width,
                                                                     int second_width, int stride, float eps) {
  pdl_trigger();
  const bool later = blockIdx.y;
  __half* const row = x + (size_t)blockIdx.x * stride + (later ? first_width : 0);
  rms_norm_row(row, later ? second : first, row, later ? second_width : first_width, eps, 0.f);
}

// Weight and bias of eight elements.
struct Affine {
  float weight[8], bias[8];
  template <class W>
  DEVICE void load(const W* weights, const W* biases, int k) {
    load8(weight, weights + k);
    if (biases) {
      load8(bias, biases + k);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) bias[i] = 0.f;
    }
  }
  template <class T>
  DEVICE void apply(float (&to)[8], const Eight<T>& v, float mean, float scale) const {
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = fmaf((to_float(v.items[i]) - mean) * scale, weight[i], bias[i]);
  }
};

template <class T, class W>
DEVICE void layer_norm_kernel(const T* x, const W* weight, const W* bias, T* out, int width, int heads, float eps) {
  pdl_trigger();
  x += (size_t)blockIdx.x * width;
  out += (size_t)blockIdx.x * width;
  weight += (size_t)(blockIdx.x % heads) * width;
  if (bias) bias += (size_t)(blockIdx.x % heads) * width;
  const bool wide = width % 8 == 0 && aligned8(x) && aligned8(out) && aligned8(weight) && aligned8(bias);
  const int first = threadIdx.x * 8;
  constexpr int BATCH = THREADS * 8, KEPT = sizeof(T) == 4 ? 2 : 4;  // batches that a thread keeps: rows of up to 8192, FP32 4096
  for (int k = first; k < width; k += BATCH) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + k));
    if (bias) asm volatile("prefetch.global.L2 [%0];" ::"l"(bias + k));
  }
  pdl_wait();
  // As in rms_norm_kernel, thread (k / 8) % 256 adds element k.
  Eight<T> kept[KEPT], later;
#pragma unroll
  for (int i = 0; i < KEPT; i++)
    if (first + i * BATCH < width) kept[i].load(x, first + i * BATCH, width, wide);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < KEPT; i++)
    if (first + i * BATCH < width) sum += kept[i].sum();
  for (int k = first + KEPT * BATCH; k < width; k += BATCH) {
    later.load(x, k, width, wide);
    sum += later.sum();
  }
  const float mean = block_sum(sum) / (float)width;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < KEPT; i++)
    if (first + i * BATCH < width) squares += kept[i].squares(mean, width - first - i * BATCH);
  for (int k = first + KEPT * BATCH; k < width; k += BATCH) {
    later.load(x, k, width, wide);
    squares += later.squares(mean, width - k);
  }
  const float scale = 1.f / sqrtf(block_sum(squares) / (float)width + eps);
  auto store = [&](const Eight<T>& v, int k) {
    if (wide) {
      Affine of;
      of.load(weight, bias, k);
      float r[8];
      of.apply(r, v, mean, scale);
      store8(out + k, r);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (k + i >= width) break;
        const float b = bias ? to_float(bias[k + i]) : 0.f;
        out[k + i] = from_float<T>(fmaf((to_float(v.items[i]) - mean) * scale, to_float(weight[k + i]), b));
      }
    }
  };
#pragma unroll
  for (int i = 0; i < KEPT; i++)
    if (first + i * BATCH < width) store(kept[i], first + i * BATCH);
  for (int k = first + KEPT * BATCH; k < width; k += BATCH) {
    later.load(x, k, width, wide);
    store(later, k);
  }
}

// The same for rows of multiples of eight elements, aligned to 16 bytes, as the input of a matmul. `once`: registers hold all of a row.
template <Packing LAYOUT>
DEVICE void layer_norm_packed_kernel(const __half* x, const float* weight, const float* bias, int width, float eps, const PackedRows& packed,
                                     const RowMemory& memory) {
  pdl_trigger();
  const unsigned token = blockIdx.x;
  if (token >= packed.m) {
    pdl_wait();
    return pack_zeros<LAYOUT>(packed, token);
  }
  x += (size_t)token * width;
  const int first = 8 * threadIdx.x, step = 8 * blockDim.x;
  const bool once = width <= step;
  ChunkOrder<LAYOUT> order;
  order.load(packed, threadIdx.x);
  Affine affine;
  if (first < width) affine.load(weight, bias, first);
  pdl_wait();
  Eight<__half> v;
  if (first < width) v.load(x, first, width, true);
  const float mean = memory.sum(width, [&](int k) {
    if (!once) v.load(x, k, width, true);
    return v.sum();
  }) / (float)width;
  const float squares = memory.sum(width, [&](int k) {
    if (!once) v.load(x, k, width, true);
    return v.squares(mean, 8);
  });
  const float scale = 1.f / sqrtf(squares / (float)width + eps);
#pragma unroll 1
  for (int k = first; k < width; k += step) {
    if (!once) v.load(x, k, width, true), affine.load(weight, bias, k);
    float r[8];
    affine.apply(r, v, mean, scale);
    store8(memory.row + k, r);
  }
  pack_row<LAYOUT>(packed, token, memory.row, order);
}

#define RMS_NORM(T, t, W, w)                                                                                       \
  extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_##t##_##w(const T* x, const W* weight, T* out,    \
                                                                           int width, int heads, float eps,        \
                                                                           float offset) {                         \
    rms_norm_kernel(x, weight, out, width, heads, eps, offset);                                                    \
  }                                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 5) layer_norm_##t##_##w(                                   \
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

#define LAYER_NORM_PACKED(NAME, LAYOUT)                                                                                               \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) NAME(const __half* x, const float* weight, const float* bias, int width, \
                                                                  float eps, uint8_t* out, const int* features, int units, int rows,  \
                                                                  int m, int columns) {                                               \
    extern __shared__ __align__(16) uint8_t memory[];                                                                                 \
    layer_norm_packed_kernel<LAYOUT>(x, weight, bias, width, eps, PackedRows{out, features, units, rows, (unsigned)m, columns},       \
                                     RowMemory(memory));                                                                              \
  }
LAYER_NORM_PACKED(layer_norm_packed, FEW_COLUMNS)
LAYER_NORM_PACKED(layer_norm_packed_for_batch, BATCH_COLUMNS)
