// The parts of a token's head added in key order; Hadamard values rotated back. One block a head of a token.
#include "attention.cuh"

constexpr int COMBINE_THREADS = 128, TILE_PARTS = 256;

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    attention_combine(const __grid_constant__ Query a, int head_dim, int width, int rotate) {
  __shared__ float weights[TILE_PARTS], tops[COMBINE_THREADS / 32], result[256];
  const int64_t head = blockIdx.x;
  const int tid = threadIdx.x, stride = width + 2;
  pdl_trigger();
  pdl_wait();
  // Parts beyond the token's own position are empty; a token without keys gets zeros.
  const int last = a.positions[head / a.query_heads], used = min(a.splits, last < 0 ? 0 : last / SPLIT + 1);
  const float* parts = a.parts + head * a.splits * stride;
  float top = -INFINITY;
  for (int s = tid; s < used; s += COMBINE_THREADS) top = fmaxf(top, parts[(size_t)s * stride + width]);
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if (tid % 32 == 0) tops[tid / 32] = top;
  __syncthreads();
  for (int w = 0; w < COMBINE_THREADS / 32; w++) top = fmaxf(top, tops[w]);
  // Element tid and tid + 128; the sum of weights goes along in every thread.
  float x = 0.f, y = 0.f, sum = 0.f;
  for (int first = 0; first < used; first += TILE_PARTS) {
    const int count = min(TILE_PARTS, used - first);
    __syncthreads();
    for (int s = tid; s < count; s += COMBINE_THREADS) weights[s] = weight_of(parts[(size_t)(first + s) * stride + width], top);
    __syncthreads();
#pragma unroll 8
    for (int s = 0; s < count; s++) {
      const float* part = parts + (size_t)(first + s) * stride;
      const float w = weights[s];
      // An empty part holds a maximum and a sum only.
      const float p = w != 0.f && tid < width ? part[tid] : 0.f, q = w != 0.f && tid + COMBINE_THREADS < width ? part[tid + COMBINE_THREADS] : 0.f;
      x = fmaf(p, w, x);
      y = fmaf(q, w, y);
      sum = fmaf(part[width + 1], w, sum);
    }
  }
  // NaN goes through: only a token that saw nothing has no sum.
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  result[tid] = x * inverse;
  result[tid + COMBINE_THREADS] = y * inverse;
  __syncthreads();
  if (rotate && 64 * (tid / 32) < width) {
    float* block = result + 64 * (tid / 32);
    float u = block[2 * (tid % 32)], v = block[2 * (tid % 32) + 1];
    butterflies(u, v);
    block[2 * (tid % 32)] = u * (1.f / 32.f);
    block[2 * (tid % 32) + 1] = v * (1.f / 32.f);
  }
  __syncthreads();
  for (int d = tid; d < head_dim; d += COMBINE_THREADS) store_element(a.out, head * head_dim + d, a.element, result[d]);
}
