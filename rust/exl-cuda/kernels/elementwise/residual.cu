// x = x + y, then out = rms_norm(x): the end of one sub-layer and the beginning of the next in one launch. One block a row.
//
// Bitwise identical to an addition of tensors followed by norm.cu: x is rounded to its type before the norm reads it, and element k is
// added by thread (k / 8) % 256.
#include "elementwise/eight.cuh"
#include "elementwise/packed_rows.cuh"

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

// x = x + post(y), then out = rms_norm(x) as halves: the end of a sub-layer whose result is normed, or whose hidden state is FP32, and the
// beginning of the next. Bitwise identical to norm.cu for y in x's type, an addition of tensors, and norm.cu for x rounded to halves.
struct RowNorm {
  const float* weight;  // null: no norm
  float eps, offset;
};

// Eight elements of a row from `k` on, zeros beyond its end.
template <class T>
DEVICE void row8(float (&v)[8], const T* row, int k, int width, bool wide) {
  if (wide) return load8(v, row + k);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = k + i < width ? to_float(row[k + i]) : 0.f;
}
template <class T>
DEVICE void put_row8(T* row, const float (&v)[8], int k, int width, bool wide) {
  if (wide) return store8(row + k, v);
  for (int i = 0; i < 8 && k + i < width; i++) row[k + i] = from_float<T>(v[i]);
}

template <class T>
DEVICE void add_post_norm_kernel(T* x, const __half* y, const RowNorm& post, const RowNorm& norm, __half* out, int width) {
  pdl_trigger();
  x += (size_t)blockIdx.x * width;
  y += (size_t)blockIdx.x * width;
  if (out) out += (size_t)blockIdx.x * width;
  const bool wide = width % 8 == 0 && aligned8(x) && aligned8(y) && aligned8(out) && aligned8(post.weight) && aligned8(norm.weight);
  constexpr int BATCH = THREADS * 8;
  float weights[2][HELD][8];  // weights of `post` and of `norm`
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int k = i * BATCH + threadIdx.x * 8;
    if (k >= width) break;
    if (post.weight) row8(weights[0][i], post.weight, k, width, wide);
    if (norm.weight) row8(weights[1][i], norm.weight, k, width, wide);
  }
  pdl_wait();
  float scale = 1.f;
  if (post.weight) {
    float sum = 0.f;
    for (int k = threadIdx.x * 8; k < width; k += BATCH) {
      float v[8];
      row8(v, y, k, width, wide);
      sum += eight_squares(v);
    }
    scale = 1.f / sqrtf(block_sum(sum) / (float)width + post.eps);
  }
  float sum = 0.f, held[HELD][8];
  auto add = [&](float (&v)[8], const float (&w)[8], int k) {
    float u[8];
    row8(v, x, k, width, wide);
    row8(u, y, k, width, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float n = post.weight ? to_float(from_float<T>(u[j] * scale * (w[j] + post.offset))) : u[j];
      v[j] = k + j < width ? to_float(from_float<T>(__fadd_rn(v[j], n))) : 0.f;
    }
    put_row8(x, v, k, width, wide);
    sum += eight_squares(v);
  };
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int k = i * BATCH + threadIdx.x * 8;
    if (k < width) add(held[i], weights[0][i], k);
  }
  for (int k = HELD * BATCH + threadIdx.x * 8; k < width; k += BATCH) {
    float v[8], w[8] = {};
    if (post.weight) row8(w, post.weight, k, width, wide);
    add(v, w, k);
  }
  if (!norm.weight) return;
  scale = 1.f / sqrtf(block_sum(sum) / (float)width + norm.eps);
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int k = i * BATCH + threadIdx.x * 8;
    if (k >= width) break;
#pragma unroll
    for (int j = 0; j < 8; j++) held[i][j] = held[i][j] * scale * (weights[1][i][j] + norm.offset);
    put_row8(out, held[i], k, width, wide);
  }
  for (int k = HELD * BATCH + threadIdx.x * 8; k < width; k += BATCH) {
    float v[8], w[8];
    row8(v, x, k, width, wide);
    row8(w, norm.weight, k, width, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] * scale * (w[j] + norm.offset);
    put_row8(out, v, k, width, wide);
  }
}

// x = x + post(y) for eight elements, also in `v`; `w`: the weights of `post`.
template <class T>
DEVICE void add_normed(float (&v)[8], Eight<T>& x, const Eight<__half>& y, const RowNorm& post, const float (&w)[8], float scale) {
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const float u = to_float(y.items[j]), n = post.weight ? to_float(from_float<T>(u * scale * (w[j] + post.offset))) : u;
    x.items[j] = from_float<T>(__fadd_rn(to_float(x.items[j]), n));
    v[j] = to_float(x.items[j]);
  }
}
template <class T>
DEVICE void normed(float (&v)[8], const Eight<T>& x, const RowNorm& norm, const float (&w)[8], float scale) {
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = to_float(x.items[j]) * scale * (w[j] + norm.offset);
}

// The same for aligned rows of at most SHORT batches. A thread reads x and y once and keeps them in their types, and reads weights while the
// block adds, so a block is small enough to be resident beside one of the ring kernel.
constexpr int SHORT = 2, SHORT_REGISTERS = 56;
template <class T>
DEVICE void add_short_post_norm_kernel(T* x, const __half* y, const RowNorm& post, const RowNorm& norm, __half* out, int width) {
  constexpr int BATCH = THREADS * 8;
  const int first = threadIdx.x * 8;
  pdl_trigger();
  x += (size_t)blockIdx.x * width;
  y += (size_t)blockIdx.x * width;
  if (out) out += (size_t)blockIdx.x * width;
  Eight<T> xs[SHORT];
  Eight<__half> ys[SHORT];
  float w[SHORT][8];  // weights of `post`, then of `norm`
  auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < SHORT; i++)
      if (first + i * BATCH < width) f(i, first + i * BATCH);
  };
  for (int k = first; k < width; k += BATCH) {
    if (post.weight) asm volatile("prefetch.global.L2 [%0];" ::"l"(post.weight + k));
    if (norm.weight) asm volatile("prefetch.global.L2 [%0];" ::"l"(norm.weight + k));
  }
  pdl_wait();
  each([&](int i, int k) {
    ys[i].load(y, k, width, true);
    xs[i].load(x, k, width, true);
  });
  float scale = 1.f;
  if (post.weight) {
    each([&](int i, int k) { load8(w[i], post.weight + k); });
    float sum = 0.f;
    each([&](int i, int) { sum += ys[i].squares(0.f, 8); });
    scale = 1.f / sqrtf(block_sum(sum) / (float)width + post.eps);
  }
  float sum = 0.f;
  each([&](int i, int k) {
    float v[8];
    add_normed(v, xs[i], ys[i], post, w[i], scale);
    store8(x + k, v);
    sum += eight_squares(v);
  });
  if (!norm.weight) return;
  each([&](int i, int k) { load8(w[i], norm.weight + k); });
  scale = 1.f / sqrtf(block_sum(sum) / (float)width + norm.eps);
  each([&](int i, int k) {
    float v[8];
    normed(v, xs[i], norm, w[i], scale);
    store8(out + k, v);
  });
}

// The same for aligned rows as the input of a matmul. `once`: registers hold all of a row.
template <class T, Packing LAYOUT>
DEVICE void add_post_norm_packed_kernel(T* x, const __half* y, const RowNorm& post, const RowNorm& norm, int width, const PackedRows& packed,
                                        const RowMemory& memory) {
  pdl_trigger();
  const unsigned token = blockIdx.x;
  if (token >= packed.m) {
    pdl_wait();
    return pack_zeros<LAYOUT>(packed, token);
  }
  x += (size_t)token * width;
  y += (size_t)token * width;
  const int first = 8 * threadIdx.x, step = 8 * blockDim.x;
  const bool once = width <= step;
  ChunkOrder<LAYOUT> order;
  order.load(packed, threadIdx.x);
  float w[8], last[8];  // weights of `post` and of `norm`
  if (first < width) {
    if (post.weight) load8(w, post.weight + first);
    load8(last, norm.weight + first);
  }
  pdl_wait();
  Eight<T> xs;
  Eight<__half> ys;
  if (first < width) {
    ys.load(y, first, width, true);
    xs.load(x, first, width, true);
  }
  float scale = 1.f;
  if (post.weight) {
    const float squares = memory.sum(width, [&](int k) {
      if (!once) ys.load(y, k, width, true);
      return ys.squares(0.f, 8);
    });
    scale = 1.f / sqrtf(squares / (float)width + post.eps);
  }
  const float squares = memory.sum(width, [&](int k) {
    if (!once) {
      ys.load(y, k, width, true);
      xs.load(x, k, width, true);
      if (post.weight) load8(w, post.weight + k);
    }
    float v[8];
    add_normed(v, xs, ys, post, w, scale);
    store8(x + k, v);
    return eight_squares(v);
  });
  scale = 1.f / sqrtf(squares / (float)width + norm.eps);
#pragma unroll 1
  for (int k = first; k < width; k += step) {
    if (!once) {
      xs.load(x, k, width, true);
      load8(last, norm.weight + k);
    }
    float v[8];
    normed(v, xs, norm, last, scale);
    store8(memory.row + k, v);
  }
  pack_row<LAYOUT>(packed, token, memory.row, order);
}

#define ADD_POST_NORM(BOUNDS, NAME, T, t)                                                                                        \
  extern "C" __global__ void BOUNDS NAME##_##t(T* x, const __half* y, const float* post, float post_eps, float post_offset,        \
                                               const float* weight, float eps, float offset, __half* out, int width) {             \
    NAME##_kernel<T>(x, y, RowNorm{post, post_eps, post_offset}, RowNorm{weight, eps, offset}, out, width);                        \
  }
#define ADD_POST_NORM_PACKED(NAME, LAYOUT, T, t)                                                                                   \
  extern "C" __global__ void __launch_bounds__(MOST_THREADS) NAME##_##t(                                                           \
      T* x, const __half* y, const float* post, float post_eps, float post_offset, const float* weight, float eps, float offset,   \
      int width, uint8_t* out, const int* features, int units, int rows, int m, int columns) {                                     \
    extern __shared__ __align__(16) uint8_t memory[];                                                                              \
    add_post_norm_packed_kernel<T, LAYOUT>(x, y, RowNorm{post, post_eps, post_offset}, RowNorm{weight, eps, offset}, width,        \
                                           PackedRows{out, features, units, rows, (unsigned)m, columns}, RowMemory(memory));       \
  }
#define ADD_POST_NORMS(T, t)                                                       \
  ADD_POST_NORM(__launch_bounds__(THREADS), add_post_norm, T, t)                   \
  ADD_POST_NORM(__maxnreg__(SHORT_REGISTERS), add_short_post_norm, T, t)           \
  ADD_POST_NORM_PACKED(add_post_norm_packed, FEW_COLUMNS, T, t)                    \
  ADD_POST_NORM_PACKED(add_post_norm_packed_for_batch, BATCH_COLUMNS, T, t)
ADD_POST_NORMS(__half, f16)
ADD_POST_NORMS(float, f32)
