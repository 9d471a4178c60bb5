// Shared by the attention kernels: the operands, the keys that a token sees, the joining of partial results, and the storing of results.
//
// All kernels and launches use one order of arithmetic. Keys are grouped in units of 64 from position 0. A unit's weights refer to the
// unit's own largest logit, and its weighted sums start at zero. Units join in order within splits of eight, and splits join in order. A
// query row's result depends only on its position and its sequence's pages. It does not depend on the batch, the chunk, the kernel, or the
// number of blocks that share the work. The other rows of its tile have no effect either: rows of a matmul do not mix.
#pragma once
#include "common/abi.cuh"
#include "common/hadamard.cuh"
#include "common/row_limits.cuh"

struct Attention {
  const void* q;
  void* out;
  const uint8_t *key, *value;
  const __half *key_scales, *value_scales;
  const int *block_table, *rows, *positions;
  const float* key_mask;
  float* parts;       // [tiles, key heads x head tiles, part slots, rows of a tile, padded head dim + 4]: weighted sums; largest logit, sum of weights
  unsigned* tickets;  // [tiles, key heads x head tiles, tokens of a tile]: zero before and after
  // The tokens' own keys and values, not yet in the pages (else null), and how they and the queries are rotated and stored.
  const void *new_key, *new_value;
  const float *cos, *sin;
  const int64_t *rope_positions, *slots;
  int q_stride, new_stride;  // elements between tokens
  int rotated, table_rows, interleaved, early;
  int element;  // of q, new keys and values and out: 0 half, 1 bfloat16, 2 float
  // Results packed as the input of a matmul of few rows (see `store_ordered`), or null.
  uint8_t* ordered;
  const uint16_t* row_of_feature;  // null if rows are in the features' order
  int columns;
  int tokens, q_heads, heads, dim, group, tile_heads, tile_tokens;
  int page_size, page_shift, max_pages, num_pages, batch, mask_width, window;
  int chunks, part_slots, ring;  // blocks that share a tile's keys, parts that they may write, units in shared memory
  unsigned page_inverse;  // 2^32 / page_size, rounded up, if page_size is not a power of two
  int key_limit;  // keys at or beyond this index are not read
  float scale, softcap;
  int ahead;  // attention_long.cuh: most bytes of keys, and of values, that one of the first blocks prefetches
  float norm_eps;
  const float *q_norm, *k_norm;  // [dim] each: RMS norms of each head of q and of the new keys, before the rotation; or both null
};
ABI_SIZE(Attention, 304); ABI_AT(Attention, q, 0); ABI_AT(Attention, out, 8); ABI_AT(Attention, key, 16); ABI_AT(Attention, value, 24);
ABI_AT(Attention, key_scales, 32); ABI_AT(Attention, value_scales, 40); ABI_AT(Attention, block_table, 48); ABI_AT(Attention, rows, 56);
ABI_AT(Attention, positions, 64); ABI_AT(Attention, key_mask, 72); ABI_AT(Attention, parts, 80); ABI_AT(Attention, tickets, 88);
ABI_AT(Attention, new_key, 96); ABI_AT(Attention, new_value, 104); ABI_AT(Attention, cos, 112); ABI_AT(Attention, sin, 120);
ABI_AT(Attention, rope_positions, 128); ABI_AT(Attention, slots, 136); ABI_AT(Attention, q_stride, 144);
ABI_AT(Attention, new_stride, 148); ABI_AT(Attention, rotated, 152); ABI_AT(Attention, table_rows, 156);
ABI_AT(Attention, interleaved, 160); ABI_AT(Attention, early, 164); ABI_AT(Attention, element, 168); ABI_AT(Attention, ordered, 176);
ABI_AT(Attention, row_of_feature, 184); ABI_AT(Attention, columns, 192); ABI_AT(Attention, tokens, 196);
ABI_AT(Attention, q_heads, 200); ABI_AT(Attention, heads, 204); ABI_AT(Attention, dim, 208); ABI_AT(Attention, group, 212);
ABI_AT(Attention, tile_heads, 216); ABI_AT(Attention, tile_tokens, 220); ABI_AT(Attention, page_size, 224);
ABI_AT(Attention, page_shift, 228); ABI_AT(Attention, max_pages, 232); ABI_AT(Attention, num_pages, 236); ABI_AT(Attention, batch, 240);
ABI_AT(Attention, mask_width, 244); ABI_AT(Attention, window, 248); ABI_AT(Attention, chunks, 252); ABI_AT(Attention, part_slots, 256);
ABI_AT(Attention, ring, 260); ABI_AT(Attention, page_inverse, 264); ABI_AT(Attention, key_limit, 268); ABI_AT(Attention, scale, 272);
ABI_AT(Attention, softcap, 276); ABI_AT(Attention, ahead, 280);
ABI_AT(Attention, norm_eps, 284); ABI_AT(Attention, q_norm, 288); ABI_AT(Attention, k_norm, 296);

constexpr int UNIT = 64, SPLIT_UNITS = 8, UNIT_PARTS = 32;
constexpr float LOG2E = 1.4426950408889634f;

// A token sees the keys from `visible_from` (included) to `visible_to` (excluded).
DEVICE int visible_to(const Attention& a, int position) {
  const int to = min(max(position, -1), a.key_limit - 1) + 1;
  return a.key_mask ? min(to, a.mask_width) : to;
}
DEVICE int visible_from(const Attention& a, int position) { return a.window ? max(position - a.window + 1, 0) : 0; }

// The keys that a run of tokens (neighbours of one sequence) reads, and their location.
struct Keys {
  const int* pages;
  const float* mask;
  int from, to;
  int fresh;  // index of the key that is not in the pages yet, or -1
};

// Page row of a key for this head; -1 if there is nothing to read.
DEVICE int locate(const Attention& a, const Keys& keys, int head, int key) {
  if (key < keys.from || key >= keys.to || key == keys.fresh) return -1;
  if (keys.mask && keys.mask[key] == -INFINITY) return -1;
  int index = (int)__umulhi((unsigned)key, a.page_inverse);  // the quotient may be one too large if page_size is not a power of two
  index = a.page_shift >= 0 ? key >> a.page_shift : index - (index * a.page_size > key);
  const int page = keys.pages[index];
  return (unsigned)page < (unsigned)a.num_pages ? (page * a.page_size + key - index * a.page_size) * a.heads + head : -1;
}

DEVICE int run_end(const Attention& a, int first, int end) {
  if (first + 1 >= end) return end;
  const int row = a.rows[first], lane = threadIdx.x & 31;
  for (int base = first; base < end; base += 32) {
    const int token = base + lane;
    const unsigned other = __ballot_sync(~0u, token >= end || a.rows[token] != row);
    if (other) return base + __ffs(other) - 1;
  }
  return end;
}

// The run's keys: the union of the keys that its tokens see.
DEVICE Keys run_keys(const Attention& a, int first, int end) {
  const int row = a.rows[first];
  int from = 0x7fffffff, to = 0, fresh = -1;
  if (first + 1 == end) {
    const int position = a.positions[first];
    if (row >= 0 && row < a.batch) from = visible_from(a, position), to = visible_to(a, position), fresh = position;
    if (from >= to) to = 0;
    const bool here = to > 0;
    return {a.block_table + (here ? (int64_t)row * a.max_pages : 0), here && a.key_mask ? a.key_mask + (int64_t)row * a.mask_width : nullptr,
            here ? from : 0, to, a.new_key ? fresh : -1};
  }
  if (row >= 0 && row < a.batch)
    for (int token = first + (threadIdx.x & 31); token < end; token += 32) {
      const int position = a.positions[token], begin = visible_from(a, position), stop = visible_to(a, position);
      if (begin < stop) from = min(from, begin), to = max(to, stop), fresh = position;
    }
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    from = min(from, __shfl_xor_sync(~0u, from, o));
    to = max(to, __shfl_xor_sync(~0u, to, o));
    fresh = max(fresh, __shfl_xor_sync(~0u, fresh, o));
  }
  const bool here = to > 0;
  return {a.block_table + (here ? (int64_t)row * a.max_pages : 0), here && a.key_mask ? a.key_mask + (int64_t)row * a.mask_width : nullptr,
          here ? from : 0, to, a.new_key ? fresh : -1};
}

// The warp's number. The shuffle tells the compiler that it is uniform.
DEVICE int warp_index() { return __shfl_sync(~0u, (int)threadIdx.x >> 5, 0); }

// The query that a row of the tile holds; token -1: none.
struct Place {
  int token, head;
};
DEVICE Place place_of(const Attention& a, int row, int first_token, int end_token, int key_head, int head_tile) {
  const int of_tile = a.tile_tokens == 1 ? row >= a.tile_heads : row / a.tile_heads;  // a division is expensive
  const int token = first_token + of_tile, head = head_tile * a.tile_heads + row - of_tile * a.tile_heads;
  const bool there = row < a.tile_heads * a.tile_tokens && token < end_token && head < a.group;
  return {there ? token : -1, key_head * a.group + head};
}

// Two neighbouring elements of the activations' type.
DEVICE float2 load_pair(int element, const void* from, int64_t at) {
  if (element == 0) return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(from) + at));
  if (element == 1) return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(from) + at));
  return *reinterpret_cast<const float2*>(static_cast<const float*>(from) + at);
}

DEVICE float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^(logit - reference), with logits in units of log 2. The difference comes first because a mask may make logits as large as -1e30.
DEVICE float weight_of(float logit, float reference) { return power_of_two(__fsub_rn(logit, reference)); }

// Updates `max` and returns the factors of the existing sum and of the added part. A part without keys changes nothing.
DEVICE void join_factors(float& max, float part_max, float part_sum, float& kept, float& added) {
  const bool empty = part_max == -INFINITY && part_sum == 0.f;
  const float most = fmaxf(max, part_max), reference = most == -INFINITY ? 0.f : most;
  kept = empty ? 1.f : weight_of(max, reference);
  added = empty ? 0.f : weight_of(part_max, reference);
  max = empty ? max : most;
}
// If `kept` is one, the multiplication by it may be left out: the result is bitwise identical.
DEVICE float join_value(float total, float kept, float part, float added) { return __fmaf_rn(part, added, __fmul_rn(total, kept)); }

// The factor of a result, computed once for all its dimensions.
DEVICE float inverse_of(float sum) { return sum == 0.f ? 0.f : __frcp_rn(sum); }
// Two neighbouring elements of the result.
DEVICE void store_pair(const Attention& a, int64_t at, float x, float y) {
  if (a.element == 0) *reinterpret_cast<__half2*>(static_cast<__half*>(a.out) + at) = __floats2half2_rn(x, y);
  else if (a.element == 1) *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(a.out) + at) = __floats2bfloat162_rn(x, y);
  else *reinterpret_cast<float2*>(static_cast<float*>(a.out) + at) = make_float2(x, y);
}

// Two neighbouring results of a token, packed as the input of a matmul of few rows. The results are halves of feature `feature`, which is
// even, and the next one. The layout is that of prepared.cuh if `columns` is 16 or more, and of rows.cuh if it is FEW_ROWS. `rows`: their
// rows of K. Columns past the tokens become zeros, unless OWN_COLUMN.
DEVICE uint32_t ordered_rows(const Attention& a, int feature) {
  return a.row_of_feature ? __ldg(reinterpret_cast<const uint32_t*>(a.row_of_feature + feature)) : feature * 0x10001u + 0x10000u;
}
DEVICE uint32_t ordered_place(int columns, int row, int column) {
  const int eight = row >> 3 & 3, pair = row >> 1 & 3;
  if (columns == FEW_ROWS) return (row >> 5) * 512 + column * 64 + eight * 16 + (row & 7) * 2;
  return (row >> 5) * 64 * columns + pair * 16 * columns + column * 16 + eight * 4 + (row & 1) * 2;
}
template <bool OWN_COLUMN = false>
DEVICE void store_ordered(const Attention& a, int token, uint32_t rows, uint32_t pair) {
#pragma unroll
  for (int e = 0; e < 2; e++)
    for (int column = token; column < (OWN_COLUMN ? token + 1 : a.columns); column += a.tokens) {
      uint8_t* to = a.ordered + ordered_place(a.columns, e ? rows >> 16 : rows & 0xffff, column);
      *reinterpret_cast<uint16_t*>(to) = column == token ? pair >> 16 * e : 0;
    }
}

// Logits of the matmul in units of log 2, scaled and capped. Not inlined: few models cap, and inlining would repeat the code in every loop.
static __device__ __noinline__ float capped(float x, float scale, float cap) { return __fmul_rn(cap * LOG2E, tanhf(__fmul_rn(x, scale / cap))); }
template <int N>
DEVICE void scale_logits(const Attention& a, float (&x)[N]) {
  if (a.softcap > 0.f) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = capped(x[i], a.scale, a.softcap);
    return;
  }
  const float scale = a.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = __fmul_rn(x[i], scale);
}
// A finished logit plus the mask's entry. The lowest float stays finite.
DEVICE float masked(float x, float added) { return __fadd_rn(x, added == -INFINITY ? added : fmaxf(__fmul_rn(added, LOG2E), -1.7e38f)); }

// Block `block` of 64 dimensions of a result row, times `inverse`, transformed back if values are stored transformed.
template <bool ORDERED>
DEVICE void result_to_out(const Attention& a, const float* row, int block, float inverse, int token, int head, bool transformed) {
  const int lane = threadIdx.x & 31, e = block * 64 + 2 * lane;
  float even = row[e], odd = row[e + 1];
  if (transformed) {
    butterflies<false>(even, odd);
    even *= 1.f / 32.f;
    odd *= 1.f / 32.f;
  }
  if (e >= a.dim) return;
  even = __fmul_rn(even, inverse), odd = __fmul_rn(odd, inverse);
  if (ORDERED && a.ordered) {
    const __half2 pair = __floats2half2_rn(even, odd);
    store_ordered(a, token, ordered_rows(a, head * a.dim + e), *reinterpret_cast<const uint32_t*>(&pair));
  } else {
    store_pair(a, ((int64_t)token * a.q_heads + head) * a.dim + e, even, odd);
  }
}
