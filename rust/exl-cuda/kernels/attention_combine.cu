// The parts of a token's head added in key order; Hadamard values rotated back. One warp a head.
#include "attention.cuh"

extern "C" __global__ void __launch_bounds__(256) attention_combine(const __grid_constant__ Query a, int head_dim, int width, int rotate) {
  pdl_trigger();
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t head = (int64_t)blockIdx.x * 8 + warp;
  if (head >= (int64_t)a.tokens * a.query_heads) return;
  // Parts beyond the token's own position are empty; a token without keys gets zeros.
  const int last = a.positions[head / a.query_heads], used = min(a.splits, last < 0 ? 0 : last / SPLIT + 1);
  const float* parts = a.parts + head * a.splits * (width + 2);
  float top = -INFINITY;
  for (int s = 0; s < used; s++) top = fmaxf(top, parts[(size_t)s * (width + 2) + width]);
  float sum = 0.f;
  for (int s = 0; s < used; s++) sum += parts[(size_t)s * (width + 2) + width + 1] * weight_of(parts[(size_t)s * (width + 2) + width], top);
  const float inverse = sum > 0.f ? 1.f / sum : 0.f;
  for (int d = 2 * lane; d < (width + 63) / 64 * 64; d += 64) {
    float x = 0.f, y = 0.f;
    for (int s = 0; s < used; s++) {
      const float* part = parts + (size_t)s * (width + 2);
      const float w = weight_of(part[width], top);
      if (w == 0.f) continue;  // an empty part holds no result
      if (d < width) x = fmaf(part[d], w, x);
      if (d + 1 < width) y = fmaf(part[d + 1], w, y);
    }
    x *= inverse;
    y *= inverse;
    if (rotate) {
      butterflies(x, y);
      x *= 1.f / 32.f;
      y *= 1.f / 32.f;
    }
    if (d < head_dim) store_element(a.out, head * head_dim + d, a.element, x);
    if (d + 1 < head_dim) store_element(a.out, head * head_dim + d + 1, a.element, y);
  }
}
