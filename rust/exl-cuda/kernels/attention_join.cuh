// What both attention kernels and the joining kernel share: the operands, the joining of splits, the way of a result to `out`.
#pragma once
#include "hadamard.cuh"

struct Attention {  // mirrored in ops/attention.rs
  const void* q;
  void* out;
  const uint8_t *key, *value;
  const __half *key_scales, *value_scales;
  const int *block_table, *rows, *positions;
  const float* key_mask;
  float* parts;    // [tokens, q_heads, splits, padded head dim]: weighted sums, in the order of the matrix products' columns
  float2* states;  // [tokens, q_heads, splits]: largest logit, sum of weights
  int element;     // of q and out: 0 half, 1 bfloat16, 2 float
  int tokens, q_heads, heads, dim, group, tile_heads, tile_tokens;
  int page_size, max_pages, num_pages, batch, mask_width, window, splits;
  float scale, softcap;
};

constexpr int SPLIT = 256;  // keys

// A token sees keys from `visible_from` up to `visible_to`, not included.
DEVICE int visible_to(const Attention& a, int position) {
  const int to = min(max(position, -1), a.max_pages * a.page_size - 1) + 1;
  return a.key_mask ? min(to, a.mask_width) : to;
}
DEVICE int visible_from(const Attention& a, int position) { return a.window ? max(position - a.window + 1, 0) : 0; }

constexpr float LOG2E = 1.4426950408889634f;

// exp(logit - reference). The difference comes first: logits may be as large as a mask's -1e30.
DEVICE float weight_of(float logit, float reference) {
  float weight;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(__fmul_rn(__fsub_rn(logit, reference), LOG2E)));
  return weight;
}

// Brings `max` along and gives the factors of what there was and of what comes. A part without keys leaves no trace.
DEVICE void join_factors(float& max, float part_max, float part_sum, float& kept, float& added) {
  if (part_max == -INFINITY && part_sum == 0.f) {
    kept = 1.f;
    added = 0.f;
    return;
  }
  const float most = fmaxf(max, part_max), reference = most == -INFINITY ? 0.f : most;
  kept = weight_of(max, reference);
  added = weight_of(part_max, reference);
  max = most;
}
DEVICE float join_value(float total, float kept, float part, float added) { return __fmaf_rn(total, kept, __fmul_rn(part, added)); }

// Block `block` of 64 dimensions of a result row: transformed back where values are, divided by the sum of weights.
DEVICE void result_to_out(const Attention& a, const float* row, int block, float sum, int64_t out, bool transformed) {
  const int lane = threadIdx.x & 31, e = block * 64 + 2 * lane;
  float even = row[e], odd = row[e + 1];
  if (transformed) {
    butterflies<false>(even, odd);
    even *= 1.f / 32.f;
    odd *= 1.f / 32.f;
  }
  if (e >= a.dim) return;
  even = sum == 0.f ? 0.f : even / sum;
  odd = sum == 0.f ? 0.f : odd / sum;
  if (a.element == 0) *reinterpret_cast<__half2*>(static_cast<__half*>(a.out) + out + e) = __floats2half2_rn(even, odd);
  else if (a.element == 1) *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) + out + e) = __floats2bfloat162_rn(even, odd);
  else *reinterpret_cast<float2*>(static_cast<float*>(a.out) + out + e) = make_float2(even, odd);
}
