// Loads queries and a token's own key and value into shared memory: rotated, encoded and stored, one warp a head. Results are bitwise
// identical to those of `rope` and `kv_store`.
#pragma once
#include "attention/attention_ring.cuh"
#include "kv/kv_encode.cuh"
#include "elementwise/rope.cuh"

// Cosines and sines of a token's position: pair j * 32 + lane in element j. Without a rotation: ones and zeros.
template <int DIM>
struct Angles {
  static constexpr int PAIRS = DIM / 64;
  float cos[PAIRS], sin[PAIRS];
  bool turns = false;

  DEVICE Angles(const Attention& a, int token) {
    if (!a.cos || token < 0) return;
    const int64_t position = a.rope_positions[token];
    const int pairs = a.rotated / 2;
    turns = position >= 0 && position < a.table_rows;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = j * 32 + (threadIdx.x & 31);
      const bool has = turns && i < pairs;
      cos[j] = has ? a.cos[position * pairs + i] : 1.f;
      sin[j] = has ? a.sin[position * pairs + i] : 0.f;
    }
  }
};

DEVICE float as_element(int element, float x) {
  return element == 0 ? __half2float(__float2half_rn(x)) : element == 1 ? __bfloat162float(__float2bfloat16_rn(x)) : x;
}

// One head's elements: lane l holds elements 64 b + 2 l and the next one.
template <int DIM>
struct Head {
  static constexpr int BLOCKS = DIM / 64;
  float2 pairs[BLOCKS];

  DEVICE void load(const Attention& a, const void* from, int64_t at) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int e = 64 * b + 2 * (threadIdx.x & 31);
      pairs[b] = from && e < a.dim ? load_pair(a.element, from, at + e) : make_float2(0.f, 0.f);
    }
  }
  // The factor of an RMS norm over `dim` elements; later elements are zero. The order of sums is that of norm.cu: eight neighbours in
  // pairs, then these sums in halves.
  DEVICE float norm_scale(int dim, float eps) const {
    float sums[BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      sums[b] = __fadd_rn(__fmul_rn(pairs[b].x, pairs[b].x), __fmul_rn(pairs[b].y, pairs[b].y));
      sums[b] = __fadd_rn(sums[b], __shfl_xor_sync(~0u, sums[b], 1));
      sums[b] = __fadd_rn(sums[b], __shfl_xor_sync(~0u, sums[b], 2));
    }
#pragma unroll
    for (int half = BLOCKS / 2; half; half /= 2)
#pragma unroll
      for (int b = 0; b < half; b++) sums[b] = __fadd_rn(sums[b], sums[b + half]);
#pragma unroll
    for (int o = 16; o >= 4; o /= 2) sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(~0u, sums[0], o));
    return 1.f / sqrtf(sums[0] / (float)dim + eps);
  }
  // Normalizes the head before rounding. `weight`: DIM floats, of which those from `dim` on are not read.
  DEVICE void norm(int dim, float eps, const float* weight) {
    const float scale = norm_scale(dim, eps);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int e = 64 * b + 2 * (threadIdx.x & 31);
      const float2 w = e < dim ? *reinterpret_cast<const float2*>(weight + e) : make_float2(0.f, 0.f);
      pairs[b].x = pairs[b].x * scale * (w.x + 0.f);
      pairs[b].y = pairs[b].y * scale * (w.y + 0.f);
    }
  }
  DEVICE void norm_as_element(const Attention& a, const float* weight) {
    norm(a.dim, a.norm_eps, weight);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) pairs[b] = make_float2(as_element(a.element, pairs[b].x), as_element(a.element, pairs[b].y));
  }
  // Rotates the head. `row`: DIM floats that only this warp uses.
  DEVICE void turn(const Attention& a, const Angles<DIM>& angles, float* row) {
    if (!angles.turns) return;
    const int lane = threadIdx.x & 31, pairs_of_head = a.rotated / 2;
    __syncwarp();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) *reinterpret_cast<float2*>(row + 64 * b + 2 * lane) = pairs[b];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Angles<DIM>::PAIRS; j++) {
      const int i = j * 32 + lane;
      if (i >= pairs_of_head) break;
      const int u = a.interleaved ? 2 * i : i, w = a.interleaved ? u + 1 : i + pairs_of_head;
      const float2 rotated_pair = rotate(row[u], row[w], angles.cos[j], angles.sin[j]);
      row[u] = as_element(a.element, rotated_pair.x);
      row[w] = as_element(a.element, rotated_pair.y);
    }
    __syncwarp();
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) pairs[b] = *reinterpret_cast<const float2*>(row + 64 * b + 2 * lane);
  }
  // Writes the query as halves, transformed if the keys are (H H = 32 I). `words`: lane 0's of a query's groups of four words; `stride`:
  // words between groups. Writes zeros if not `live`.
  template <int CODEC>
  DEVICE void put_query(uint32_t* words, int stride, bool live) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      float2 x = pairs[b];
      if (is_hadamard<CODEC>() && live) {
        butterflies<false>(x.x, x.y);
        x.x *= 1.f / 32.f;
        x.y *= 1.f / 32.f;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const QueryPlace p = query_place<CODEC, DIM>(64 * b + 2 * (threadIdx.x & 31) + i);
        reinterpret_cast<__half*>(words + p.word / 4 * stride + p.t * 4 + p.word % 4)[p.half] = saturating_half(i ? x.y : x.x);
      }
    }
  }
};

// Packs the token's own key (plane 0) or value (1) into `packed` and, if there is a slot, into the pages. `row`: DIM floats that only this
// warp uses.
template <int CODEC, int DIM>
DEVICE void pack_own(const Attention& a, int plane, const Head<DIM>& head, float* row, uint8_t* packed, int64_t slot, int key_head) {
  constexpr int BYTES = row_bytes<CODEC, DIM>(), SCALES = scale_bytes<CODEC, DIM>() / 4;
  const int lane = threadIdx.x & 31, blocks = (a.dim + 63) / 64, bytes = (is_hadamard<CODEC>() ? blocks * 8 : a.dim / 8) * unit_bytes<CODEC>();
  Pages p;
  p.data[0] = packed;
  p.scales[0] = reinterpret_cast<__half*>(packed + BYTES);
  p.codec[0] = CODEC;
  p.heads = 1, p.dim = a.dim, p.blocks = blocks;
  __syncwarp();
#pragma unroll
  for (int b = 0; b < DIM / 64; b++) *reinterpret_cast<float2*>(row + 64 * b + 2 * lane) = head.pairs[b];
#pragma unroll 1
  for (int i = lane; i < packed_bytes<CODEC, DIM>() / 4; i += 32) reinterpret_cast<uint32_t*>(packed)[i] = 0u;
  __syncwarp();
#pragma unroll 1
  for (int b = 0; b < blocks; b++) encode(p, 0, 0, b, row[64 * b + 2 * lane], row[64 * b + 2 * lane + 1]);
  __syncwarp();
  if (slot < 0 || slot >= (int64_t)a.num_pages * a.page_size) return;
  const int64_t at = slot * a.heads + key_head;
  uint32_t* to = reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(plane ? a.value : a.key) + at * bytes);
#pragma unroll 1
  for (int i = lane; i < bytes / 4; i += 32) to[i] = reinterpret_cast<const uint32_t*>(packed)[i];
  if (lane < SCALES && lane < blocks)
    reinterpret_cast<uint32_t*>(const_cast<__half*>(plane ? a.value_scales : a.key_scales))[at * blocks + lane] =
        reinterpret_cast<const uint32_t*>(packed + BYTES)[lane];
}
