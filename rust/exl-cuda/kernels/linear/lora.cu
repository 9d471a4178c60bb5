// Low-rank adapters: y = y + (A x) B, where each row has its own adapter or none. Two launches for a matrix, or for all matrices of a joined
// matmul, of any ranks.
//
// A row's sums have one order, independent of the other rows. Thread i of a block adds elements 8 i .. 8 i + 7 of every 2,048, then the
// block adds its threads. An output adds its ranks from the first to the last.
#include "common/abi.cuh"
#include "common/activate.cuh"
#include "common/block_sum.cuh"

// The adapter of one slot for one matrix [in, out].
struct LoraEntry {
  const __half* a;     // [rank, in]
  const __half* b;     // [rank, out]
  const float* scale;  // [rank]
  const float* bias;   // [out], or null
  int64_t rank;        // 0: no adapter
};
ABI_SIZE(LoraEntry, 40); ABI_AT(LoraEntry, a, 0); ABI_AT(LoraEntry, b, 8); ABI_AT(LoraEntry, scale, 16); ABI_AT(LoraEntry, bias, 24);
ABI_AT(LoraEntry, rank, 32);

// The entry of a row: slot `slots[row]`, or slot 0 for all rows without `slots`; null if the row has no adapter.
DEVICE const LoraEntry* entry_of(const LoraEntry* table, const int* slots, int row) {
  const int slot = slots ? slots[row] : 0;
  return slot < 0 || table[slot].rank == 0 ? nullptr : table + slot;
}

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
