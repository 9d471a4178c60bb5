// Shared by the sampling kernels: a row's description, logits as ordered keys, weights in fixed point, sums and maxima of a block.
#pragma once
#include "common/abi.cuh"
#include "common/common.cuh"

typedef unsigned long long u64;

constexpr int SEGMENT = 2048;  // ids that a block of the first two kernels handles
constexpr int BLOCK = 256;     // ids of one maximum and one sum: the share of one warp
constexpr int CAPACITY = 2048; // candidates that a row may have
constexpr int THREADS = 1024;  // of the choosing block
constexpr int MOST_BLOCKS = 2048;
constexpr int MOST_TOP = 64;
constexpr int NEG_INF = (int)0x807fffff;  // key of -inf
constexpr int BAD = 0x7fffffff;           // key of NaN and +inf

enum { OK = 0, EMPTY = 1, NOT_FINITE = 2, FALLBACK = 3 };
enum { GREEDY = 1, SMOOTH = 2, DESCENDING = 4, SKIP = 8, SUMS = 16, LATE_FIXED = 32, LATE_DYNAMIC = 64, PLAIN = 128, WIDE = 256 };

// x := (x > 0 ? x / factor : x * factor) - minus; if factor is 0: x := -minus
struct Edit {
  double factor, minus;
  unsigned id;
};
ABI_SIZE(Edit, 24); ABI_AT(Edit, factor, 0); ABI_AT(Edit, minus, 8); ABI_AT(Edit, id, 16);

struct Row {
  const float* logits;
  const float* positive;  // two rows of `width` logits to be mixed; null: no mix
  const float* negative;
  const float* bias;
  const int* mask;           // null: all ids are allowed
  const Edit* edits[2];      // before and after the bias; the edits of a segment are contiguous
  const unsigned* starts[2]; // first edit of each segment, and the end
  const int* ignored;
  double top_p, top_a, min_p, tfs, typical, mirostat, xtc_probability, xtc_threshold, low, high, exponent, uniform, mix;
  float scale, late_scale;
  int size, bias_length, mask_words, ignored_words, top_k, top_n, flags, width;
};
ABI_SIZE(Row, 224); ABI_AT(Row, logits, 0); ABI_AT(Row, positive, 8); ABI_AT(Row, negative, 16); ABI_AT(Row, bias, 24);
ABI_AT(Row, mask, 32); ABI_AT(Row, edits, 40); ABI_AT(Row, starts, 56); ABI_AT(Row, ignored, 72); ABI_AT(Row, top_p, 80);
ABI_AT(Row, top_a, 88); ABI_AT(Row, min_p, 96); ABI_AT(Row, tfs, 104); ABI_AT(Row, typical, 112); ABI_AT(Row, mirostat, 120);
ABI_AT(Row, xtc_probability, 128); ABI_AT(Row, xtc_threshold, 136); ABI_AT(Row, low, 144); ABI_AT(Row, high, 152);
ABI_AT(Row, exponent, 160); ABI_AT(Row, uniform, 168); ABI_AT(Row, mix, 176); ABI_AT(Row, scale, 184); ABI_AT(Row, late_scale, 188);
ABI_AT(Row, size, 192); ABI_AT(Row, bias_length, 196); ABI_AT(Row, mask_words, 200); ABI_AT(Row, ignored_words, 204);
ABI_AT(Row, top_k, 208); ABI_AT(Row, top_n, 212); ABI_AT(Row, flags, 216); ABI_AT(Row, width, 220);

struct Answer {
  int token, status, top, padding;
  u64 weight, total;
  u64 top_weights[MOST_TOP];
  unsigned top_ids[MOST_TOP];
};
ABI_SIZE(Answer, 800); ABI_AT(Answer, token, 0); ABI_AT(Answer, status, 4); ABI_AT(Answer, top, 8); ABI_AT(Answer, padding, 12);
ABI_AT(Answer, weight, 16); ABI_AT(Answer, total, 24); ABI_AT(Answer, top_weights, 32); ABI_AT(Answer, top_ids, 544);

DEVICE int key_of(float x) {
  const int bits = __float_as_int(__fadd_rn(x, 0.f));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
DEVICE float from_key(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }
// Ascending: logit descending, then id ascending.
DEVICE u64 place_of(float x, unsigned id) { return (u64)(~((unsigned)key_of(x) ^ 0x80000000u)) << 32 | id; }
DEVICE float logit_at(u64 place) { return from_key((int)(~(unsigned)(place >> 32) ^ 0x80000000u)); }

struct Slope {
  float peak, scale, late;
  bool smooth;
};

DEVICE float log_weight(const Slope& s, float x) {
  float d = __fsub_rn(x, s.peak);
  if (s.smooth) d = -__fmul_rn(d, d);
  return __fmul_rn(__fmul_rn(d, s.scale), s.late);
}

DEVICE float weight(float l) {
  constexpr float ROUNDER = 12582912.f;
  const float held = l > -40.f ? l : -40.f;
  const float t = __fadd_rn(__fmul_rn(held, 1.44269504088896340736f), ROUNDER);
  const float n = __fsub_rn(t, ROUNDER);
  float r = __fsub_rn(held, __fmul_rn(n, 0.6933594f));
  r = __fsub_rn(r, __fmul_rn(n, -2.1219444e-4f));
  const float z = __fmul_rn(r, r);
  float p = 1.f / 5040.f;
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 720.f);
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 120.f);
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 24.f);
  p = __fadd_rn(__fmul_rn(p, r), 1.f / 6.f);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, z), r), 1.f);
  const int exponent = __float_as_int(t) - __float_as_int(ROUNDER) + 127;
  const float w = __fmul_rn(p, __int_as_float(exponent << 23));
  return l >= -31.f ? w : 0.f;
}

DEVICE u64 fixed(float w) {
  const unsigned bits = __float_as_uint(w);
  const u64 mantissa = (bits & 0x007fffffu) | 0x00800000u;
  const unsigned down = min(127u - (bits >> 23), 63u);
  return (mantissa << 21) >> down;
}

DEVICE u64 weigh(const Slope& s, float x) { return fixed(weight(log_weight(s, x))); }

DEVICE u64 warp_sum_u64(u64 v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEVICE int warp_max_int(int v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = max(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// Copies the row's description into shared memory; all threads of the block call it.
DEVICE void load_row(Row* to, const Row* from) {
  static_assert(sizeof(Row) % 8 == 0, "rows are copied by words");
  const u64* words = reinterpret_cast<const u64*>(from);
  if (threadIdx.x < sizeof(Row) / 8) reinterpret_cast<u64*>(to)[threadIdx.x] = words[threadIdx.x];
  __syncthreads();
}

// Whether sample_shape changes a row's logits. Those that it leaves as they are stay where they are: a copy of 64 rows takes longer than
// reading them.
DEVICE bool is_shaped(const Row& row) { return row.mask || row.bias || row.starts[0] || row.starts[1]; }
// The logits of the row `index` after sample_shape.
DEVICE const float* shaped_logits(const Row& row, const float* shaped, int index, int pitch) {
  return is_shaped(row) ? shaped + (size_t)index * pitch : row.logits;
}

DEVICE void apply_edits(const Row& row, int list, float* x) {
  const unsigned* starts = row.starts[list];
  if (!starts) return;
  __syncthreads();
  const unsigned from = starts[blockIdx.x], to = starts[blockIdx.x + 1];
  for (unsigned i = from + threadIdx.x; i < to; i += blockDim.x) {
    const Edit edit = row.edits[list][i];
    float& v = x[edit.id - blockIdx.x * SEGMENT];
    const double wide = v;
    double scaled = 0.0;
    if (edit.factor != 0.0) scaled = wide > 0.0 ? __ddiv_rn(wide, edit.factor) : __dmul_rn(wide, edit.factor);
    v = __double2float_rn(__dsub_rn(scaled, edit.minus));
  }
  __syncthreads();
}

template <int N>
DEVICE int block_max(int v) {
  __shared__ int parts[32];
  v = warp_max_int(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = parts[0];
  for (int i = 1; i < N / 32; i++) v = max(v, parts[i]);
  return v;
}

DEVICE Slope slope_of(const Row& row, int peak) {
  // A draw over all logits applies its late temperature here: the largest log-weight is 0.
  const float late = row.flags & PLAIN ? row.late_scale : 1.f;
  return Slope{from_key(peak), row.scale, late, (row.flags & SMOOTH) != 0};
}
