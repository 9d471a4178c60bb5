// Attention of query tokens over paged keys and values, split over the keys (spec/core.md 6.3, 6.5).
//
// A block takes one token, one key/value head with up to G of its query heads, and the keys [SPLIT z, SPLIT (z + 1)) of the sequence.
// Cuts lie at fixed key numbers, so a token's result depends on nothing else in the call. A second kernel adds the parts in order.
// LANES lanes share a key, eight elements each; every such team keeps its own running maximum, sum and result.
#pragma once
#include "pages.cuh"

constexpr int SPLIT = 128, WARPS = 8, UNROLL = 4;

// The same struct as `ops::attention::Query`.
struct Query {
  const void* q;  // [tokens, query heads, head_dim]
  const int* block_table;  // [sequences, table_width]
  const int* rows;
  const int* positions;
  const float* mask;  // [sequences, mask_width], added to the logits; null when there is none
  float* parts;       // [tokens, query heads, splits, padded + 2]: result, maximum, sum
  void* out;          // as q
  int element;        // of q and out: 0 half, 1 bfloat16, 2 float
  int tokens, query_heads, sequences, table_width, mask_width, window, splits;
  float scale, softcap;
};

DEVICE float load_element(const void* p, size_t i, int element) {
  if (element == 0) return __half2float(static_cast<const __half*>(p)[i]);
  if (element == 1) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return static_cast<const float*>(p)[i];
}
DEVICE void store_element(void* p, size_t i, int element, float v) {
  if (element == 0) static_cast<__half*>(p)[i] = __float2half_rn(v);
  else if (element == 1) static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  else static_cast<float*>(p)[i] = v;
}

// A running softmax: result, maximum and sum of what was seen. An empty one has maximum -inf and sum 0.
DEVICE float weight_of(float maximum, float common) { return maximum == -INFINITY ? 0.f : expf(maximum - common); }

template <Storage KEY, Storage VALUE, int LANES, int G>
DEVICE void attend(const Pages& p, const Query& a) {
  constexpr int TEAMS = 32 / LANES, WIDTH = LANES * 8;
  __shared__ float query[G][WIDTH];
  __shared__ float results[WARPS * TEAMS][G][2];
  __shared__ float sums[WARPS][G][WIDTH];
  const int t = blockIdx.x, split = blockIdx.z, group = a.query_heads / p.heads, parts_of_group = (group + G - 1) / G;
  const int head = blockIdx.y / parts_of_group, first_query = blockIdx.y % parts_of_group * G, queries = min(G, group - first_query);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = lane / LANES, i = lane % LANES;
  const int key_width = padded(p.head_dim, KEY), value_width = padded(p.head_dim, VALUE);
  pdl_trigger();
  pdl_wait();
  const int row = a.rows[t], last = a.positions[t];
  const int first = max(split * SPLIT, a.window > 0 ? last - a.window + 1 : 0), end = min((split + 1) * SPLIT, last + 1);
  float* part = a.parts + (((size_t)t * a.query_heads + head * group + first_query) * a.splits + split) * (value_width + 2);
  const size_t part_stride = (size_t)a.splits * (value_width + 2);
  if (row < 0 || row >= a.sequences || first >= end) {
    if (threadIdx.x < queries) {
      part[threadIdx.x * part_stride + value_width] = -INFINITY;
      part[threadIdx.x * part_stride + value_width + 1] = 0.f;
    }
    return;
  }
  for (int e = threadIdx.x; e < G * WIDTH; e += WARPS * 32) {
    const int g = e / WIDTH, d = e % WIDTH;
    const bool known = g < queries && d < p.head_dim;
    query[g][d] = known ? load_element(a.q, ((size_t)t * a.query_heads + head * group + first_query + g) * p.head_dim + d, a.element) : 0.f;
  }
  __syncthreads();
  if constexpr (KEY == Q8 || KEY == Q4) {
    // k = B(codes)/32 with a symmetric B, so q . k = B(q)/32 . codes.
    for (int b = warp; b < G * (WIDTH / 64); b += WARPS) {
      float* block = &query[b / (WIDTH / 64)][b % (WIDTH / 64) * 64];
      float x = block[2 * lane], y = block[2 * lane + 1];
      butterflies(x, y);
      block[2 * lane] = x * (1.f / 32.f);
      block[2 * lane + 1] = y * (1.f / 32.f);
    }
    __syncthreads();
  }
  float acc[G][8], maximum[G], sum[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    maximum[g] = -INFINITY;
    sum[g] = 0.f;
#pragma unroll
    for (int e = 0; e < 8; e++) acc[g][e] = 0.f;
  }
  const int* table = a.block_table + (size_t)row * a.table_width;
  // Team of a key: by its number alone, so that the order of sums does not depend on where a window begins.
  constexpr int STEP = WARPS * TEAMS;
  for (int base = split * SPLIT + warp * TEAMS + team; base < (split + 1) * SPLIT; base += STEP * UNROLL) {
    // All loads of an iteration first: one after the other each would cost a trip to memory.
    float logits[UNROLL][G];
    int64_t place[UNROLL];
    Stored<KEY> keys[UNROLL];
    Stored<VALUE> values[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int key = base + u * STEP;
      place[u] = -1;
      if (key >= first && key < end && key / p.page_size < a.table_width) {
        const int page = table[key / p.page_size];
        if (page >= 0 && page < p.pages) place[u] = ((int64_t)page * p.page_size + key % p.page_size) * p.heads + head;
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      keys[u].clear();
      values[u].clear();
      if (place[u] >= 0 && 8 * i < key_width) keys[u].load(p.key, place[u], p.head_dim, i);
      if (place[u] >= 0 && 8 * i < value_width) values[u].load(p.value, place[u], p.head_dim, i);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int key = base + u * STEP;
      float k[8];
      keys[u].convert(k);
#pragma unroll
      for (int g = 0; g < G; g++) {
        float dot = 0.f;
#pragma unroll
        for (int e = 0; e < 8; e++) dot = fmaf(query[g][8 * i + e], k[e], dot);
#pragma unroll
        for (int o = LANES / 2; o; o >>= 1) dot += __shfl_xor_sync(~0u, dot, o);
        dot *= a.scale;
        if (a.softcap > 0.f) dot = a.softcap * tanhf(dot / a.softcap);
        if (a.mask && place[u] >= 0 && key < a.mask_width) dot += a.mask[(size_t)row * a.mask_width + key];
        logits[u][g] = place[u] >= 0 ? dot : -INFINITY;
      }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
      float top = maximum[g];
#pragma unroll
      for (int u = 0; u < UNROLL; u++) top = fmaxf(top, logits[u][g]);
      if (top == -INFINITY) continue;
      const float keep = weight_of(maximum[g], top);
      maximum[g] = top;
      sum[g] *= keep;
#pragma unroll
      for (int e = 0; e < 8; e++) acc[g][e] *= keep;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      float v[8];
      values[u].convert(v);
#pragma unroll
      for (int g = 0; g < G; g++) {
        // A key taken out by the mask contributes nothing, whatever its value holds.
        if (logits[u][g] == -INFINITY) continue;
        const float w = expf(logits[u][g] - maximum[g]);
        sum[g] += w;
#pragma unroll
        for (int e = 0; e < 8; e++) acc[g][e] = fmaf(w, v[e], acc[g][e]);
      }
    }
  }
  // Teams in order: first those of a warp, then the warps.
#pragma unroll
  for (int g = 0; g < G; g++)
    if (i == 0) {
      results[warp * TEAMS + team][g][0] = maximum[g];
      results[warp * TEAMS + team][g][1] = sum[g];
    }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < G; g++) {
    float top = -INFINITY;
    for (int w = 0; w < WARPS * TEAMS; w++) top = fmaxf(top, results[w][g][0]);
    const float own = weight_of(maximum[g], top);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      float r = acc[g][e] * own;
#pragma unroll
      for (int o = LANES; o < 32; o *= 2) r += __shfl_xor_sync(~0u, r, o);
      if (team == 0) sums[warp][g][8 * i + e] = r;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < queries * (WIDTH + 1); e += WARPS * 32) {
    const int g = e / (WIDTH + 1), d = e % (WIDTH + 1);
    float* to = part + g * part_stride;
    if (d < WIDTH) {
      float r = 0.f;
      for (int w = 0; w < WARPS; w++) r += sums[w][g][d];
      if (d < value_width) to[d] = r;
    } else {
      float top = -INFINITY, r = 0.f;
      for (int w = 0; w < WARPS * TEAMS; w++) top = fmaxf(top, results[w][g][0]);
      for (int w = 0; w < WARPS * TEAMS; w++) r += results[w][g][1] * weight_of(results[w][g][0], top);
      to[value_width] = top;
      to[value_width + 1] = r;
    }
  }
}

#define ATTEND_ONE(KEY, VALUE, name, LANES, G)                                                                          \
  extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_##name##_##LANES##_##G(                               \
      const __grid_constant__ Pages p, const __grid_constant__ Query a) {                                               \
    attend<KEY, VALUE, LANES, G>(p, a);                                                                                 \
  }
// Eight query heads of 256 dimensions would need more than 48 KB of shared memory.
#define ATTEND(KEY, VALUE, name)       \
  ATTEND_ONE(KEY, VALUE, name, 8, 1)   \
  ATTEND_ONE(KEY, VALUE, name, 8, 4)   \
  ATTEND_ONE(KEY, VALUE, name, 8, 8)   \
  ATTEND_ONE(KEY, VALUE, name, 16, 1)  \
  ATTEND_ONE(KEY, VALUE, name, 16, 4)  \
  ATTEND_ONE(KEY, VALUE, name, 16, 8)  \
  ATTEND_ONE(KEY, VALUE, name, 32, 1)  \
  ATTEND_ONE(KEY, VALUE, name, 32, 4)
