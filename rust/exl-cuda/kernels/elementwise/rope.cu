// Rotary embedding in place: one block a token, one thread a pair. NeoX pairs are (i, i + rotated/2), interleaved ones (2i, 2i + 1).
#include "elementwise/rope.cuh"

template <class T>
DEVICE void rope_kernel(T* x, const float* cos, const float* sin, const int64_t* positions, int heads, int head_dim,
                        int rotated, int table_rows, int interleaved) {
  pdl_trigger();
  pdl_wait();
  const int64_t position = positions[blockIdx.x];
  if (position < 0 || position >= table_rows) return;
  const int half_dim = rotated / 2;
  cos += position * half_dim;
  sin += position * half_dim;
  x += (size_t)blockIdx.x * heads * head_dim;
  for (int pair = threadIdx.x; pair < heads * half_dim; pair += blockDim.x) {
    const int head = pair / half_dim, i = pair % half_dim;
    T* a = x + (size_t)head * head_dim + (interleaved ? 2 * i : i);
    T* b = a + (interleaved ? 1 : half_dim);
    const float2 rotated_pair = rotate(to_float(*a), to_float(*b), cos[i], sin[i]);
    *a = from_float<T>(rotated_pair.x);
    *b = from_float<T>(rotated_pair.y);
  }
}

#define ROPE(T, t)                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256) rope_##t(T* x, const float* cos, const float* sin,              \
                                                             const int64_t* positions, int heads, int head_dim,     \
                                                             int rotated, int table_rows, int interleaved) {        \
    rope_kernel(x, cos, sin, positions, heads, head_dim, rotated, table_rows, interleaved);                         \
  }
ROPE(__half, f16)
ROPE(__nv_bfloat16, bf16)
ROPE(float, f32)
