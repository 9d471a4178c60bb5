// Low-rank adapters: y = y + (A x) B, where each row has its own adapter or none. Two launches for a matrix, or for all matrices of a joined
// matmul, of any ranks.
//
// A row's sums have one order, independent of the other rows. Thread i of a block adds elements 8 i .. 8 i + 7 of every 2,048, then the
// block adds its threads. An output adds its ranks from the first to the last.
#include "common/abi.cuh"
#include "common/activate.cuh"
#include "common/block_sum.cuh"
#include "common/row_limits.cuh"
#include "linear/adapters.cuh"

// middle[row, r] = scale[r] * sum_k x[row, k] a[r, k]. A block is one row and rank.
extern "C" __global__ void __launch_bounds__(THREADS) lora_shrink(const __half* x, const LoraEntry* table, const int* slots,
                                                                  float* middle, int in, int most_rank) {
  pdl_trigger();
  const int rank = blockIdx.x, row = blockIdx.y;
  pdl_wait();
  const LoraEntry* entry = entry_of(table, slots, row);
  if (entry == nullptr || rank >= entry->rank) return;
  const __half* a = entry->a + (size_t)rank * in;
  x += (size_t)row * in;
  float sum = 0.f;
  for (int k = threadIdx.x * 8; k < in; k += THREADS * 8) {
    float v[8], w[8];
    load8(v, x + k);
    load8(w, a + k);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(v[i], w[i], sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) middle[(size_t)row * most_rank + rank] = sum * entry->scale[rank];
}

// y[row, n] += bias[n] + sum_r middle[row, r] b[r, n]. A thread has two neighbouring outputs.
extern "C" __global__ void __launch_bounds__(THREADS) lora_expand(__half* y, const LoraEntry* table, const int* slots,
                                                                  const float* middle, int out, int most_rank) {
  pdl_trigger();
  const int n = (blockIdx.x * THREADS + threadIdx.x) * 2, row = blockIdx.y;
  pdl_wait();
  const LoraEntry* entry = entry_of(table, slots, row);
  if (entry == nullptr || n >= out) return;
  const __half* b = entry->b + n;
  middle += (size_t)row * most_rank;
  float2 sum = entry->bias ? make_float2(entry->bias[n], entry->bias[n + 1]) : make_float2(0.f, 0.f);
#pragma unroll 8
  for (int r = 0; r < (int)entry->rank; r++) {
    const float2 w = __half22float2(*reinterpret_cast<const __half2*>(b + (size_t)r * out));
    sum.x = fmaf(middle[r], w.x, sum.x);
    sum.y = fmaf(middle[r], w.y, sum.y);
  }
  __half2* at = reinterpret_cast<__half2*>(y + (size_t)row * out + n);
  const float2 old = __half22float2(*at);
  *at = __floats2half2_rn(old.x + sum.x, old.y + sum.y);
}

// ------------------------------------------------------------------------------------------------ all matrices of a joined matmul
//
// `table` has a line of `sets` entries for each matrix, and these lines again for each further adapter of a row. `middle` has `most_rank`
// columns for each line. Adapters and slots were written before the captured graph began, so the kernels read them before they wait.

DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// middle[row, line, r] = scale[r] * sum_k h[row, k] a[r, k], where h is x, or its RMS norm rounded to half if there is a weight, which is
// stored too. A block is one row and RANKS columns of `middle`. It loads HELD pieces of A before it waits.
template <int RANKS, int HELD>
DEVICE void shrink_group(const __half* x, const float* weight, __half* normed, const LoraEntry* table, const int* slots, float* middle,
                         int in, int sets, int most_rank, int columns, float eps, float offset) {
  __shared__ float parts[RANKS][THREADS / 32];
  pdl_trigger();
  const int row = blockIdx.y, first = blockIdx.x * RANKS, from = threadIdx.x * 8;
  const __half* a[RANKS];
  float factor[RANKS];
  bool some = false;
#pragma unroll
  for (int i = 0; i < RANKS; i++) {
    const int line = (first + i) / most_rank, rank = (first + i) % most_rank;
    const LoraEntry* entry = first + i < columns ? entry_of(table + (size_t)line * sets, slots, row) : nullptr;
    const bool known = entry != nullptr && rank < entry->rank;
    a[i] = known ? entry->a + (size_t)rank * in : nullptr;
    factor[i] = known ? entry->scale[rank] : 0.f;
    some |= known;
  }
  uint4 held[RANKS][HELD];
#pragma unroll
  for (int i = 0; i < RANKS; i++) {
    if (a[i] == nullptr) continue;
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (from + j * THREADS * 8 < in) held[i][j] = *reinterpret_cast<const uint4*>(a[i] + from + j * THREADS * 8);
    for (int k = from + HELD * THREADS * 8; k < in; k += THREADS * 8) prefetch_l2(a[i] + k);
  }
  const bool stores = normed != nullptr && blockIdx.x == 0;
  if (weight != nullptr && (some || stores))
    for (int k = from; k < in; k += THREADS * 8) prefetch_l2(weight + k);
  pdl_wait();
  if (!some && !stores) return;
  x += (size_t)row * in;
  float scale = 1.f;
  if (weight != nullptr) {  // the order of kernels/elementwise/norm.cu
    float squares = 0.f;
    for (int k = from; k < in; k += THREADS * 8) {
      float v[8];
      load8(v, x + k);
      squares += eight_squares(v);
    }
    scale = 1.f / sqrtf(block_sum(squares) / (float)in + eps);
  }
  float sum[RANKS];
#pragma unroll
  for (int i = 0; i < RANKS; i++) sum[i] = 0.f;
  auto add = [&](int k, int j) {  // the elements of one piece; j: its number among those that are held
    float v[8];
    load8(v, x + k);
    if (weight != nullptr) {
      float w[8];
      load8(w, weight + k);
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = __half2float(__float2half_rn(v[e] * scale * (w[e] + offset)));
      if (stores) store8(normed + (size_t)row * in + k, v);
    }
#pragma unroll
    for (int i = 0; i < RANKS; i++) {
      if (a[i] == nullptr) continue;
      union {
        uint4 word;
        __half items[8];
      } u;
      u.word = j < HELD ? held[i][j] : *reinterpret_cast<const uint4*>(a[i] + k);
#pragma unroll
      for (int e = 0; e < 8; e++) sum[i] = fmaf(v[e], __half2float(u.items[e]), sum[i]);
    }
  };
#pragma unroll
  for (int j = 0; j < HELD; j++)
    if (from + j * THREADS * 8 < in) add(from + j * THREADS * 8, j);
#pragma unroll 1
  for (int k = from + HELD * THREADS * 8; k < in; k += THREADS * 8) add(k, HELD);
  if (!some) return;
#pragma unroll
  for (int i = 0; i < RANKS; i++) {
    sum[i] = warp_sum(sum[i]);
    if (threadIdx.x % 32 == 0) parts[i][threadIdx.x / 32] = sum[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < RANKS; i++) {
    if (threadIdx.x != i || a[i] == nullptr) continue;
    float all = 0.f;  // as block_sum
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) all += parts[i][w];
    middle[(size_t)row * columns + first + i] = all * factor[i];
  }
}

// 56 registers leave room for a block beside a block of the ring kernel.
#define SHRINK_GROUP(RANKS, HELD)                                                                                                       \
  extern "C" __global__ void __maxnreg__(56) lora_shrink_group_##RANKS(                                                                 \
      const __half* x, const float* weight, __half* normed, const LoraEntry* table, const int* slots, float* middle, int in, int sets,  \
      int most_rank, int columns, float eps, float offset) {                                                                            \
    shrink_group<RANKS, HELD>(x, weight, normed, table, slots, middle, in, sets, most_rank, columns, eps, offset);                      \
  }
SHRINK_GROUP(1, 4)
SHRINK_GROUP(4, 1)

// The same struct as `ops::linear::lora::PackingShrink`.
struct PackingShrink {
  const __half* x;      // [rows, inputs]
  const float* weight;  // of an RMS norm of x; null when there is none
  const LoraEntry* table;
  const int* slots;
  float* middle;        // [rows, columns]
  uint8_t* packed;      // gets h as the packed input of a matmul
  const int* features;  // of the packed input: the feature in each row of the layout, or -1
  int inputs, rows, sets, most_rank, columns;
  int ranks, share;                           // columns of `middle` and groups of eight of the packed row of a block
  int pack_columns, units, layout_rows;       // the layout: columns, units of K, rows that may have a feature
  float eps, offset;
};
ABI_SIZE(PackingShrink, 104); ABI_AT(PackingShrink, x, 0); ABI_AT(PackingShrink, weight, 8); ABI_AT(PackingShrink, table, 16);
ABI_AT(PackingShrink, slots, 24); ABI_AT(PackingShrink, middle, 32); ABI_AT(PackingShrink, packed, 40); ABI_AT(PackingShrink, features, 48);
ABI_AT(PackingShrink, inputs, 56); ABI_AT(PackingShrink, rows, 60); ABI_AT(PackingShrink, sets, 64); ABI_AT(PackingShrink, most_rank, 68);
ABI_AT(PackingShrink, columns, 72); ABI_AT(PackingShrink, ranks, 76); ABI_AT(PackingShrink, share, 80);
ABI_AT(PackingShrink, pack_columns, 84); ABI_AT(PackingShrink, units, 88); ABI_AT(PackingShrink, layout_rows, 92);
ABI_AT(PackingShrink, eps, 96); ABI_AT(PackingShrink, offset, 100);

constexpr int MOST_COLUMNS = 32;

// Columns of a block for its row: their A [inputs], or null, and their scales.
struct BlockColumns {
  const __half* a[MOST_COLUMNS];
  float scale[MOST_COLUMNS];
};

// Multiplies the row h by columns `first` and `first` + 1 of a block. A thread reads of h what it stored itself.
DEVICE void multiply_pair(const __half* h, const BlockColumns& known, int first, int count, int inputs, float (&parts)[MOST_COLUMNS][THREADS / 32]) {
  const __half* const a = known.a[first];
  const __half* const b = first + 1 < count ? known.a[first + 1] : nullptr;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum[2] = {0.f, 0.f};
#pragma unroll 2
  for (int k = threadIdx.x * 8; k < inputs; k += THREADS * 8) {
    union {
      uint4 word;
      __half items[8];
    } u[2];
    u[0].word = a ? *reinterpret_cast<const uint4*>(a + k) : make_uint4(0, 0, 0, 0);
    u[1].word = b ? *reinterpret_cast<const uint4*>(b + k) : make_uint4(0, 0, 0, 0);
    float v[8];
    load8(v, h + k);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      sum[0] = fmaf(v[e], __half2float(u[0].items[e]), sum[0]);
      sum[1] = fmaf(v[e], __half2float(u[1].items[e]), sum[1]);
    }
  }
  sum[0] = warp_sum(sum[0]);
  sum[1] = warp_sum(sum[1]);
  if (lane < 2 && first + lane < count) parts[first + lane][warp] = lane ? sum[1] : sum[0];
}

// As lora_shrink_group, and packs h. A block has a row, some columns of `middle`, and a share of the row to pack. It keeps h in shared
// memory, so it norms a row once for all its columns. Loops are hardly unrolled, because a launch meets a cold instruction cache.
extern "C" __global__ void __maxnreg__(64) lora_shrink_packing(const __grid_constant__ PackingShrink p) {
  extern __shared__ __align__(16) __half h[];
  __shared__ float parts[MOST_COLUMNS][THREADS / 32];
  __shared__ BlockColumns known;
  pdl_trigger();
  const int row = blockIdx.y, part = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = threadIdx.x * 8;
  const int first = part * p.ranks, count = row < p.rows ? min(p.ranks, p.columns - first) : 0;
  const int begin = part * p.share, eights = min(p.share, 32 * p.units - begin);
  bool has = false;
  if ((int)threadIdx.x < count) {
    const int line = (first + threadIdx.x) / p.most_rank, rank = (first + threadIdx.x) % p.most_rank;
    const LoraEntry* const entry = entry_of(p.table + (size_t)line * p.sets, p.slots, row);
    has = entry != nullptr && rank < entry->rank;
    known.a[threadIdx.x] = has ? entry->a + (size_t)rank * p.inputs : nullptr;
    known.scale[threadIdx.x] = has ? entry->scale[rank] : 0.f;
  }
  int2 of[4];  // features of a group of eight
  auto find = [&](int i) {
    const int eight = begin + i;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      // In the layout for wgmma, of 16 pairs of neighbouring rows those four apart belong to one group of eight.
      const int pair = p.pack_columns == FEW_ROWS ? 4 * eight + e : 4 * (eight & ~3) + (eight & 3) + 4 * e;
      of[e] = i < eights && 2 * pair < p.layout_rows ? __ldg(reinterpret_cast<const int2*>(p.features) + pair) : make_int2(-1, -1);
    }
  };
  find(threadIdx.x);
  if (p.weight)
#pragma unroll 1
    for (int k = threadIdx.x * 32; k < p.inputs; k += THREADS * 32) prefetch_l2(p.weight + k);
  const bool some = __syncthreads_or(has);
#pragma unroll 1
  for (int i = warp; i < count; i += THREADS / 32)
    if (known.a[i])
#pragma unroll 1
      for (int k = lane * 64; k < p.inputs; k += 32 * 64) prefetch_l2(known.a[i] + k);
  pdl_wait();
  if (row < p.rows) {
    const __half* const x = p.x + (size_t)row * p.inputs;
    float squares = 0.f;
#pragma unroll 2
    for (int k = at; k < p.inputs; k += THREADS * 8) {
      const uint4 word = *reinterpret_cast<const uint4*>(x + k);
      *reinterpret_cast<uint4*>(h + k) = word;
      if (p.weight) {  // the order of kernels/elementwise/norm.cu
        float v[8];
        load8(v, reinterpret_cast<const __half*>(&word));
        squares += eight_squares(v);
      }
    }
    if (p.weight) {
      const float scale = 1.f / sqrtf(block_sum(squares) / (float)p.inputs + p.eps);
#pragma unroll 1
      for (int k = at; k < p.inputs; k += THREADS * 8) {
        float v[8], w[8];
        load8(w, p.weight + k);
        load8(v, h + k);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = v[e] * scale * (w[e] + p.offset);
        store8(h + k, v);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < eights; i += THREADS) {
    if (i >= THREADS) find(i);
    union {
      uint4 word;
      __half v[8];
    } out;
    out.word = make_uint4(0, 0, 0, 0);
    if (row < p.rows)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (of[e].x >= 0) out.v[2 * e] = h[of[e].x];
        if (of[e].y >= 0) out.v[2 * e + 1] = h[of[e].y];
      }
    const int eight = begin + i;
    const size_t place = p.pack_columns == FEW_ROWS ? eight / 4 * 32 + row * 4 + eight % 4 : (size_t)eight * p.pack_columns + row;
    reinterpret_cast<uint4*>(p.packed)[place] = out.word;
  }
  if (!some) return;
#pragma unroll 1
  for (int i = 0; i < count; i += 2) multiply_pair(h, known, i, count, p.inputs, parts);
  __syncthreads();
  if (has) {
    float all = 0.f;  // as block_sum
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) all += parts[threadIdx.x][w];
    p.middle[(size_t)row * p.columns + first + threadIdx.x] = all * known.scale[threadIdx.x];
  }
}

constexpr int EXPAND_THREADS = 128, EXPAND_HELD = 16;

// Two neighbouring outputs of the adapter of one row and matrix.
struct Expansion {
  const __half* b;  // of rank 0
  int rank, out;
  float2 bias;

  // `n`: place among the matrix's outputs.
  DEVICE Expansion(const LoraEntry* entry, int n, int outputs) : b(nullptr), rank(0), out(outputs), bias(make_float2(0.f, 0.f)) {
    if (entry == nullptr) return;
    b = entry->b + n;
    rank = (int)entry->rank;
    if (entry->bias) bias = make_float2(entry->bias[n], entry->bias[n + 1]);
  }
  DEVICE __half2 at(int r) const { return *reinterpret_cast<const __half2*>(b + (size_t)r * out); }
  template <int HELD>
  DEVICE void hold(__half2 (&held)[HELD]) const {
#pragma unroll
    for (int r = 0; r < HELD; r++)
      if (r < rank) held[r] = at(r);
    for (int r = HELD; r < rank; r++)
      if (threadIdx.x % 32 == 0) prefetch_l2(b + (size_t)r * out);
  }
  // y + bias + sum_r middle[r] b[r], rounded, in the order of lora_expand.
  template <int HELD>
  DEVICE __half2 added(__half2 y, const float* middle, const __half2 (&held)[HELD]) const {
    if (rank == 0) return y;
    float m[HELD];
#pragma unroll
    for (int r = 0; r < HELD; r++)
      if (r < rank) m[r] = middle[r];
    float2 sum = bias;
#pragma unroll
    for (int r = 0; r < HELD; r++)
      if (r < rank) add(sum, m[r], held[r]);
    return rest(y, middle, sum, HELD);
  }
  // The sum from rank `first` on, added to y.
  DEVICE __half2 rest(__half2 y, const float* middle, float2 sum, int first) const {
#pragma unroll 8
    for (int r = first; r < rank; r++) add(sum, middle[r], at(r));
    const float2 old = __half22float2(y);
    return __floats2half2_rn(old.x + sum.x, old.y + sum.y);
  }
  static DEVICE void add(float2& sum, float m, __half2 b) {
    const float2 w = __half22float2(b);
    sum.x = fmaf(m, w.x, sum.x);
    sum.y = fmaf(m, w.y, sum.y);
  }
};

// The lines of a matrix: the first adapters of all sets, then the next ones.
struct Lines {
  const LoraEntry* table;
  const int* slots;
  const float* middle;  // of the row
  int sets, most_rank, matrices, levels, row, matrix;

  DEVICE const LoraEntry* entry(int level) const { return entry_of(table + (size_t)(level * matrices + matrix) * sets, slots, row); }
  DEVICE const float* ranks(int level) const { return middle + (level * matrices + matrix) * most_rank; }
  // y plus the adapters of the row after its first one.
  DEVICE __half2 with_next(__half2 y, int n, int out) const {
    for (int level = 1; level < levels; level++) {
      const Expansion next(entry(level), n, out);
      if (next.rank != 0) y = next.rest(y, ranks(level), next.bias, 0);
    }
    return y;
  }
};

DEVICE __half2* pair_at(__half* y, int row, int width, int n) { return reinterpret_cast<__half2*>(y + (size_t)row * width + n); }

// out = y + adapters [+ residual], of matrices whose outputs lie side by side in y [rows, width], the second and third from columns
// `second` and `third` on. out may be y or the residual.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) lora_expand_group(const __half* y, const __half* residual, __half* out,
                                                                               const LoraEntry* table, const int* slots, const float* middle,
                                                                               int width, int second, int third, int sets, int most_rank,
                                                                               int matrices, int levels) {
  pdl_trigger();
  const int n = (blockIdx.x * EXPAND_THREADS + threadIdx.x) * 2, row = blockIdx.y;
  const int matrix = (n >= second) + (n >= third), begin = matrix == 0 ? 0 : matrix == 1 ? second : third;
  const int outputs = (matrix == 0 ? second : matrix == 1 ? third : width) - begin;
  const Lines lines{table, slots, middle + (size_t)row * levels * matrices * most_rank, sets, most_rank, matrices, levels, row, matrix};
  const Expansion first(n < width ? lines.entry(0) : nullptr, n - begin, outputs);
  __half2 held[EXPAND_HELD];
  first.hold(held);
  pdl_wait();
  if (n >= width) return;
  const __half2 base = *pair_at(const_cast<__half*>(y), row, width, n);
  float2 more = make_float2(0.f, 0.f);
  if (residual) more = __half22float2(*pair_at(const_cast<__half*>(residual), row, width, n));
  __half2 v = lines.with_next(first.added(base, lines.ranks(0), held), n - begin, outputs);
  if (residual) {
    const float2 f = __half22float2(v);
    v = __floats2half2_rn(more.x + f.x, more.y + f.y);
  }
  *pair_at(out, row, width, n) = v;
}

// out [rows, width] = activation(gate + adapters) * (up + adapters), where y [rows, 2 width] has gate and up side by side.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) lora_expand_gated(const __half* y, __half* out, const LoraEntry* table,
                                                                               const int* slots, const float* middle, int width, int sets,
                                                                               int most_rank, int levels, int kind) {
  pdl_trigger();
  const int n = (blockIdx.x * EXPAND_THREADS + threadIdx.x) * 2, row = blockIdx.y;
  const float* const of_row = middle + (size_t)row * levels * 2 * most_rank;
  const Lines gates{table, slots, of_row, sets, most_rank, 2, levels, row, 0}, ups{table, slots, of_row, sets, most_rank, 2, levels, row, 1};
  const Expansion first_gate(n < width ? gates.entry(0) : nullptr, n, width), first_up(n < width ? ups.entry(0) : nullptr, n, width);
  __half2 gate_held[EXPAND_HELD], up_held[EXPAND_HELD];
  first_gate.hold(gate_held);
  first_up.hold(up_held);
  pdl_wait();
  if (n >= width) return;
  const __half2 gate = *pair_at(const_cast<__half*>(y), row, 2 * width, n), up = *pair_at(const_cast<__half*>(y), row, 2 * width, width + n);
  const float2 g = __half22float2(gates.with_next(first_gate.added(gate, gates.ranks(0), gate_held), n, width));
  const float2 u = __half22float2(ups.with_next(first_up.added(up, ups.ranks(0), up_held), n, width));
  *pair_at(out, row, width, n) = __floats2half2_rn(activate(g.x, kind) * u.x, activate(g.y, kind) * u.y);
}
