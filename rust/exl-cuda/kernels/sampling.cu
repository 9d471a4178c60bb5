// From rows of logits to tokens, to the bits of exl-cpu's sampling (rust/exl-cpu/src/sampling says what and why): fixed-point weights,
// integer sums, total orders. Three launches a batch: shape the logits and find block maxima; sum weights a block; choose, one block a
// row. Rows whose candidates do not fit a block's table answer FALLBACK and are sampled on the CPU, to the same token.
//
// Answers are written to pinned host memory in place: no copy to wait for.
// Products and sums are written as intrinsics wherever the compiler could fuse them: a fused one gives other bits.
#include "common.cuh"

typedef unsigned long long u64;

constexpr int SEGMENT = 2048;  // ids a block of the first two kernels handles
constexpr int BLOCK = 256;     // ids a maximum and a sum stand for: one warp's share
constexpr int CAPACITY = 2048; // candidates a row may have
constexpr int THREADS = 1024;  // of the choosing block
constexpr int MOST_BLOCKS = 2048;
constexpr int MOST_TOP = 64;
constexpr int NEG_INF = (int)0x807fffff;  // key of -inf
constexpr int BAD = 0x7fffffff;           // key of NaN and +inf

enum { OK = 0, EMPTY = 1, NOT_FINITE = 2, FALLBACK = 3 };
enum { GREEDY = 1, SMOOTH = 2, DESCENDING = 4, SKIP = 8, SUMS = 16, LATE_FIXED = 32, LATE_DYNAMIC = 64, PLAIN = 128 };

// x := (x > 0 ? x / factor : x * factor) - minus; x := -minus where factor is 0
struct Edit {
  double factor, minus;
  unsigned id;
};

struct Row {
  const float* logits;
  const float* bias;
  const int* mask;           // null: all allowed
  const Edit* edits[2];      // before and after the bias, ids of a segment together
  const unsigned* starts[2]; // first edit of each segment, and the end
  const int* ignored;
  double top_p, top_a, min_p, tfs, mirostat, xtc_probability, xtc_threshold, low, high, exponent, uniform;
  float scale, late_scale;
  int size, bias_length, mask_words, ignored_words, top_k, top_n, flags, padding;
};

struct Answer {
  int token, status, top, padding;
  u64 weight, total;
  u64 top_weights[MOST_TOP];
  unsigned top_ids[MOST_TOP];
};

DEVICE int key_of(float x) {
  const int bits = __float_as_int(__fadd_rn(x, 0.f));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
DEVICE float from_key(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }
// Ascending = logit descending, then id ascending.
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

// The row's description into shared memory; every thread of the block calls it.
DEVICE void load_row(Row* to, const Row* from) {
  static_assert(sizeof(Row) % 8 == 0, "rows are copied by words");
  const u64* words = reinterpret_cast<const u64*>(from);
  if (threadIdx.x < sizeof(Row) / 8) reinterpret_cast<u64*>(to)[threadIdx.x] = words[threadIdx.x];
  __syncthreads();
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

// Steps 2 to 8: the shaped logits and the largest key of each block of ids.
extern "C" __global__ void __launch_bounds__(256) sample_shape(const Row* rows, float* shaped, int* maxima, int pitch) {
  __shared__ Row row;
  __shared__ float x[SEGMENT];
  load_row(&row, rows + blockIdx.y);
  const int base = blockIdx.x * SEGMENT;
  if (row.flags & SKIP || base >= row.size) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = warp * BLOCK + lane;
#pragma unroll
  for (int j = 0; j < BLOCK / 32; j++) {
    const int id = base + first + 32 * j;
    x[first + 32 * j] = id < row.size ? row.logits[id] : 0.f;
  }
  apply_edits(row, 0, x);
  if (row.bias) {
#pragma unroll
    for (int j = 0; j < BLOCK / 32; j++) {
      const int id = base + first + 32 * j;
      if (id < row.bias_length) x[first + 32 * j] = __fadd_rn(x[first + 32 * j], row.bias[id]);
    }
  }
  apply_edits(row, 1, x);
  shaped += (size_t)blockIdx.y * pitch;
  int high = (int)0x80000000;
#pragma unroll
  for (int j = 0; j < BLOCK / 32; j++) {
    const int id = base + first + 32 * j;
    if (id >= row.size) break;
    float v = x[first + 32 * j];
    if (row.mask) {
      const int word = id / 32 < row.mask_words ? row.mask[id / 32] : 0;
      if (!(word >> (id % 32) & 1)) v = __int_as_float(0xff800000);
    }
    const int bits = __float_as_int(v);
    const bool bad = bits == 0x7f800000 || (bits & 0x7fffffff) > 0x7f800000;
    high = max(high, bad ? BAD : key_of(v));
    shaped[id] = v;
  }
  high = warp_max_int(high);
  if (lane == 0) maxima[blockIdx.y * MOST_BLOCKS + blockIdx.x * (SEGMENT / BLOCK) + warp] = high;
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
  // A draw over all takes its late temperature at once: the largest log-weight is 0.
  const float late = row.flags & PLAIN ? row.late_scale : 1.f;
  return Slope{from_key(peak), row.scale, late, (row.flags & SMOOTH) != 0};
}

// Sums of weights of each block of ids, for rows that need the weight of all.
extern "C" __global__ void __launch_bounds__(256)
    sample_sums(const Row* rows, const float* shaped, const int* maxima, u64* sums, int pitch) {
  __shared__ Row row;
  load_row(&row, rows + blockIdx.y);
  const int base = blockIdx.x * SEGMENT;
  if (row.flags & SKIP || !(row.flags & SUMS) || base >= row.size) return;
  maxima += blockIdx.y * MOST_BLOCKS;
  int peak = (int)0x80000000;
  const int blocks = (row.size + BLOCK - 1) / BLOCK;
  for (int i = threadIdx.x; i < blocks; i += 256) peak = max(peak, maxima[i]);
  peak = block_max<256>(peak);
  const Slope slope = slope_of(row, peak);
  shaped += (size_t)blockIdx.y * pitch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = 0;
#pragma unroll
  for (int j = 0; j < BLOCK / 32; j++) {
    const int id = base + warp * BLOCK + 32 * j + lane;
    if (id < row.size) sum += weigh(slope, shaped[id]);
  }
  sum = warp_sum_u64(sum);
  if (lane == 0) sums[blockIdx.y * MOST_BLOCKS + blockIdx.x * (SEGMENT / BLOCK) + warp] = sum;
}

// ---- the choosing block ----

DEVICE u64 block_sum(u64 v) {
  __shared__ u64 parts[32];
  v = warp_sum_u64(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) v += parts[i];
  return v;
}

// The smallest `v` of the block.
DEVICE int block_min(int v) { return -block_max<THREADS>(-v); }

// running[i] = values[0] + .. + values[i] for i < n <= CAPACITY; may be in place. Ends with a barrier.
DEVICE void scan(const u64* values, u64* running, int n) {
  __shared__ u64 parts[32];
  const int i = 2 * threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u64 a = i < n ? values[i] : 0, b = i + 1 < n ? values[i + 1] : 0;
  u64 sum = a + b;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const u64 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();
  if (lane == 31) parts[warp] = sum;
  __syncthreads();
  u64 before = 0;
  for (int w = 0; w < warp; w++) before += parts[w];
  sum += before;
  if (i < n) running[i] = sum - b;
  if (i + 1 < n) running[i + 1] = sum;
  __syncthreads();
}

// Sorts the pairs by place, or by (weight descending, place). Places up to the next power of two are filled up.
template <bool BY_WEIGHT>
DEVICE void sort_pairs(u64* place, u64* q, int n) {
  int m = 2;
  while (m < n) m <<= 1;
  __syncthreads();
  for (int i = n + threadIdx.x; i < m; i += THREADS) place[i] = ~0ull, q[i] = 0;
  __syncthreads();
  for (int k = 2; k <= m; k <<= 1) {
    for (int j = k >> 1; j; j >>= 1) {
      const int t = threadIdx.x;
      if (t < m / 2) {
        const int a = 2 * t - (t & (j - 1)), b = a + j;
        const u64 pa = place[a], pb = place[b], qa = q[a], qb = q[b];
        const bool above = BY_WEIGHT ? qa < qb || (qa == qb && pa > pb) : pa > pb;
        if (above == ((a & k) == 0)) place[a] = pb, place[b] = pa, q[a] = qb, q[b] = qa;
      }
      __syncthreads();
    }
  }
}

struct Table {
  u64* place;
  u64* q;
  u64* running;
};

struct View {
  const float* x;
  const int* maxima;
  const u64* sums;
  int size, blocks;
};

// Largest key that at least `count` block maxima reach; NEG_INF if there are fewer blocks.
DEVICE int border(const View& view, int count) {
  if (count >= view.blocks) return NEG_INF;
  const int i = threadIdx.x;
  const unsigned low = i < view.blocks ? (unsigned)view.maxima[i] ^ 0x80000000u : 0;
  const unsigned high = i + THREADS < view.blocks ? (unsigned)view.maxima[i + THREADS] ^ 0x80000000u : 0;
  const bool two = view.blocks > THREADS;
  unsigned found = 0;
  for (unsigned bit = 0x80000000u; bit; bit >>= 1) {
    const unsigned tried = found | bit;
    int reach = __syncthreads_count(low >= tried);
    if (two) reach += __syncthreads_count(high >= tried);
    if (reach >= count) found = tried;
  }
  return (int)(found ^ 0x80000000u);
}

// Adds a candidate to the table; `count` counts on beyond its capacity.
DEVICE void add(const Table& table, int* count, float x, int id) {
  const int at = atomicAdd(count, 1);
  if (at < CAPACITY) table.place[at] = place_of(x, id);
}

// Lists the candidates with a key of at least `least_key` and, where `slope` is given, a weight of at least `least`. Returns their
// number, which may exceed the table. Order is whatever comes; sorting follows.
DEVICE int gather(const View& view, const Table& table, int least_key, const Slope* slope, u64 least) {
  __shared__ int count, found;
  int* blocks = reinterpret_cast<int*>(table.running);
  __syncthreads();
  if (threadIdx.x == 0) count = 0, found = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < view.blocks; b += THREADS)
    if (slope ? view.sums[b] >= least : view.maxima[b] >= least_key) blocks[atomicAdd(&found, 1)] = b;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < found; i += THREADS / 32) {
    const int base = blocks[i] * BLOCK + lane;
    float v[BLOCK / 32];
#pragma unroll
    for (int j = 0; j < BLOCK / 32; j++) v[j] = base + 32 * j < view.size ? view.x[base + 32 * j] : __int_as_float(0xff800000);
#pragma unroll
    for (int j = 0; j < BLOCK / 32; j++) {
      const int key = key_of(v[j]);
      if (key > NEG_INF && (slope ? weigh(*slope, v[j]) >= least : key >= least_key)) add(table, &count, v[j], base + 32 * j);
    }
  }
  __syncthreads();
  return count;
}

// Falls along the descending order: 64 bins a unit of log-weight.
DEVICE int bin_of(float l) {
  const float place = __fmul_rn(-l, 64.f);
  return place < CAPACITY - 1 ? (int)place : CAPACITY - 1;
}

// Lists a prefix of the descending order that holds `most` candidates or more, or a weight of `target` or more where `most` is 0, with
// little beyond. Returns their number; 0 if the table cannot hold it. For rows whose block maxima say too little.
DEVICE int gather_by_bins(const View& view, const Table& table, const Slope& slope, int most, u64 target) {
  __shared__ int count;
  __syncthreads();
  for (int i = threadIdx.x; i < CAPACITY; i += THREADS) table.q[i] = 0, table.running[i] = 0;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int id = threadIdx.x; id < view.size; id += THREADS) {
    const float v = view.x[id];
    if (key_of(v) <= NEG_INF) continue;
    const float l = log_weight(slope, v);
    const int bin = bin_of(l);
    atomicAdd(&table.q[bin], 1ull);
    if (!most) atomicAdd(&table.running[bin], fixed(weight(l)));
  }
  __syncthreads();
  scan(table.q, table.q, CAPACITY);
  scan(table.running, table.running, CAPACITY);
  int last = CAPACITY;
  for (int i = threadIdx.x; i < CAPACITY; i += THREADS)
    if (most ? table.q[i] >= most : table.running[i] >= target) last = min(last, i);
  last = min(block_min(last), CAPACITY - 1);
  if (table.q[last] > CAPACITY) return 0;
  __syncthreads();
  for (int id = threadIdx.x; id < view.size; id += THREADS) {
    const float v = view.x[id];
    if (key_of(v) > NEG_INF && bin_of(log_weight(slope, v)) <= last) add(table, &count, v, id);
  }
  __syncthreads();
  return count;
}

// Weights of the table's first n.
DEVICE void weigh_table(const Table& table, int n, const Slope& slope) {
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) table.q[i] = weigh(slope, logit_at(table.place[i]));
  __syncthreads();
}

DEVICE u64 total_of(const Table& table, int n) {
  u64 sum = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) sum += table.q[i];
  return block_sum(sum);
}

DEVICE u64 share(double part, u64 total) {
  const u64 wanted = __double2ull_rz(ceil(__dmul_rn(part, __ull2double_rn(total))));
  return max(1ull, min(wanted, max(total, 1ull)));
}

// Candidates of a table in descending order that reach `target`, the crossing one included.
DEVICE int prefix(const Table& table, int n, u64 target) {
  scan(table.q, table.running, n);
  int at = n - 1;
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (table.running[i] >= target) at = min(at, i);
  return block_min(at) + 1;
}

// Candidates of at least this weight in a table in descending order; at least one.
DEVICE int heavier(const Table& table, int n, double least) {
  const u64 weight = __double2ull_rz(ceil(least));
  int at = n;
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (table.q[i] < weight) at = min(at, i);
  return max(1, block_min(at));
}

DEVICE int tail_free(const Table& table, int n, double z, u64 total) {
  const u64 least = __double2ull_rz(ceil(__dmul_rn(1e-8, __ull2double_rn(total))));
  int kept = n;
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (table.q[i] < least) kept = min(kept, i);
  kept = block_min(kept);
  if (kept < 3) return n;
  for (int i = threadIdx.x; i < kept - 2; i += THREADS) {
    const long long d = (long long)table.q[i] - 2 * (long long)table.q[i + 1] + (long long)table.q[i + 2];
    table.running[i] = d < 0 ? -d : d;
  }
  __syncthreads();
  scan(table.running, table.running, kept - 2);
  const u64 all = table.running[kept - 3];
  if (all == 0) return n;
  const u64 limit = __double2ull_rz(__dmul_rn(z, __ull2double_rn(all)));
  int leading = kept - 2;
  for (int i = threadIdx.x; i < kept - 2; i += THREADS)
    if (table.running[i] > limit) leading = min(leading, i);
  return block_min(leading) + 1;
}

DEVICE double ln(double x) {
  const long long bits = __double_as_longlong(x);
  long long exponent = (long long)((unsigned long long)bits >> 52) - 1023;
  double m = __longlong_as_double((bits & 0x000fffffffffffffLL) | 0x3ff0000000000000LL);
  if (m > 1.41421356237309504880) m = __dmul_rn(m, 0.5), exponent++;
  const double s = __ddiv_rn(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  const double z = __dmul_rn(s, s);
  double sum = 0.0;
  for (int k = 11; k >= 0; k--) sum = __dadd_rn(__dmul_rn(sum, z), __ddiv_rn(1.0, (double)(2 * k + 1)));
  const double e = (double)exponent;
  const double low = __dadd_rn(__dmul_rn(__dmul_rn(2.0, s), sum), __dmul_rn(e, 1.9082149292705877e-10));
  return __dadd_rn(__dmul_rn(e, 0.6931471803691238), low);
}

DEVICE double exponential(double x) {
  if (x < -700.0) return 0.0;
  const double n = floor(__dadd_rn(__dmul_rn(x, 1.44269504088896340736), 0.5));
  const double r = __dsub_rn(__dsub_rn(x, __dmul_rn(n, 0.6931471803691238)), __dmul_rn(n, 1.9082149292705877e-10));
  double sum = 1.0;
  for (int k = 14; k >= 1; k--) sum = __dadd_rn(__ddiv_rn(__dmul_rn(sum, r), (double)k), 1.0);
  return __dmul_rn(sum, __longlong_as_double(((long long)n + 1023) << 52));
}

DEVICE double power(double x, double y) {
  if (y == 0.0) return 1.0;
  if (x < 2.2250738585072014e-308) return 0.0;
  return exponential(fmin(__dmul_rn(y, ln(x)), 700.0));
}

// Step 18; the table is in descending order, so its first has the highest log-weight.
DEVICE void late(const Row& row, const Table& table, int n, const Slope& slope, u64 total) {
  float scale = row.late_scale;
  if (row.flags & LATE_DYNAMIC) {
    u64 sum = 0;
    int alive = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const float l = log_weight(slope, logit_at(table.place[i])), w = weight(l);
      sum += fixed(w > 0.f ? __fmul_rn(w, -l) : 0.f);
      alive += l >= -745.f;
    }
    sum = block_sum(sum);
    alive = (int)block_sum((u64)alive);
    const double expected = __ddiv_rn(__ull2double_rn(sum), __ull2double_rn(total));
    double most = ln((double)max(alive, 1));
    if (!(most > 0.0)) most = 1.0;
    const double entropy = __dadd_rn(ln(__ddiv_rn(__ull2double_rn(total), 17592186044416.0)), expected);
    const double part = fmin(fmax(__ddiv_rn(entropy, most), 0.0), 1.0);
    const double t = __dadd_rn(row.low, __dmul_rn(__dsub_rn(row.high, row.low), power(part, row.exponent)));
    scale = __double2float_rn(__ddiv_rn(1.0, fmax(t, 1e-4)));
  }
  const float highest = log_weight(slope, logit_at(table.place[0]));
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float l = log_weight(slope, logit_at(table.place[i]));
    table.q[i] = fixed(weight(__fmul_rn(__fsub_rn(l, highest), scale)));
  }
  __syncthreads();
}

// Step 19.
DEVICE void exclude_top(const Row& row, const Table& table, int n, u64 total) {
  const u64 least = __double2ull_rz(ceil(__dmul_rn(row.xtc_threshold, __ull2double_rn(total))));
  int count = 0, last = -1;
  u64 excluded = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const unsigned id = (unsigned)table.place[i];
    const bool ignored = id / 32 < (unsigned)row.ignored_words && (row.ignored[id / 32] >> (id % 32) & 1);
    const bool chosen = table.q[i] >= least && !ignored;
    table.running[i] = chosen;
    if (chosen) count++, last = i, excluded += table.q[i];
  }
  count = (int)block_sum((u64)count);
  last = block_max<THREADS>(last);
  excluded = block_sum(excluded);
  if (count < 2) return;
  excluded -= table.q[last];
  const double rest = __ull2double_rn(total - excluded);
  if (rest == 0.0) return;
  const double gain = __dadd_rn(1.0, __ddiv_rn(__dmul_rn(row.xtc_probability, __ull2double_rn(excluded)), rest));
  const double loss = __dsub_rn(1.0, row.xtc_probability);
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const bool out = table.running[i] && i != last;
    table.q[i] = __double2ull_rz(__dmul_rn(__ull2double_rn(table.q[i]), out ? loss : gain));
  }
  __syncthreads();
}

DEVICE u64 draw_target(double uniform, u64 total) {
  return min(__double2ull_rz(__dmul_rn(uniform, __ull2double_rn(total))), total - 1);
}

DEVICE void report(const Table& table, int n, int top_n, Answer* answer) {
  const int top = min(n, top_n);
  if ((int)threadIdx.x < top) {
    answer->top_ids[threadIdx.x] = (unsigned)table.place[threadIdx.x];
    answer->top_weights[threadIdx.x] = table.q[threadIdx.x];
  }
  if (threadIdx.x == 0) answer->top = top;
}

DEVICE void finish(Answer* answer, int status, int token, u64 weight, u64 total) {
  if (threadIdx.x == 0) {
    answer->token = token;
    answer->weight = weight;
    answer->total = total;
    answer->status = status;
  }
}

// A draw over all logits by ascending id.
DEVICE void draw_all(const Row& row, const View& view, const Table& table, const Slope& slope, Answer* answer) {
  u64 sum = 0;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS) sum += view.sums[b];
  const u64 total = block_sum(sum), target = draw_target(row.uniform, total);
  if (row.top_n) {
    int n = row.top_n < view.blocks ? gather(view, table, border(view, row.top_n), nullptr, 0) : CAPACITY + 1;
    if (n > CAPACITY) n = gather_by_bins(view, table, slope, row.top_n, 0);
    if (n == 0) return finish(answer, FALLBACK, 0, 0, 0);
    sort_pairs<false>(table.place, table.q, n);
    weigh_table(table, n, slope);
    report(table, n, row.top_n, answer);
  }
  scan(view.sums, table.running, view.blocks);
  int block = view.blocks;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS)
    if (table.running[b] > target) block = min(block, b);
  block = block_min(block);
  const u64 before = block ? table.running[block - 1] : 0;
  const int id = block * BLOCK + threadIdx.x;
  __syncthreads();
  if (threadIdx.x < BLOCK) table.q[threadIdx.x] = id < view.size ? weigh(slope, view.x[id]) : 0;
  __syncthreads();
  scan(table.q, table.running, BLOCK);
  int at = BLOCK;
  if (threadIdx.x < BLOCK && before + table.running[threadIdx.x] > target) at = threadIdx.x;
  at = block_min(at);
  finish(answer, OK, block * BLOCK + at, table.q[at], total);
}

DEVICE void greedy(const Row& row, const View& view, int peak, Answer* answer) {
  int block = view.blocks;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS)
    if (view.maxima[b] == peak) block = min(block, b);
  block = block_min(block);
  const int id = block * BLOCK + threadIdx.x;
  const bool best = threadIdx.x < BLOCK && id < view.size && key_of(view.x[id]) == peak;
  const int token = block_min(best ? id : 0x7fffffff);
  if (threadIdx.x == 0 && row.top_n) {
    answer->top = 1;
    answer->top_ids[0] = token;
    answer->top_weights[0] = 1;
  }
  finish(answer, OK, token, 1, 1);
}

enum Cut { NONE, TOP_P, TOP_A, MIN_P, TFS, MIROSTAT };

// Fills the table with the sorted candidates that top-k, or without it the first cut, leaves. Returns their number, 0 where the table
// is too small, and which cut has been made.
DEVICE int first_candidates(const Row& row, const View& view, const Table& table, const Slope& slope, int peak, Cut* made) {
  *made = NONE;
  if (row.top_k) {
    int n = row.top_k < view.blocks ? gather(view, table, border(view, row.top_k), nullptr, 0) : CAPACITY + 1;
    if (n > CAPACITY) n = gather_by_bins(view, table, slope, row.top_k, 0);
    if (n == 0) return 0;
    sort_pairs<false>(table.place, table.q, n);
    const int kept = min(n, row.top_k);
    weigh_table(table, kept, slope);
    return kept;
  }
  u64 sum = 0;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS) sum += view.sums[b];
  const u64 total = block_sum(sum);
  if (row.top_p > 0.0) {
    *made = TOP_P;
    const u64 target = share(row.top_p, total);
    int n = 0;
    bool reached = false;
    for (int count = 16; count <= 256 && count < view.blocks && n <= CAPACITY && !reached; count *= 4) {
      n = gather(view, table, border(view, count), nullptr, 0);
      if (n > CAPACITY) break;
      weigh_table(table, n, slope);
      reached = total_of(table, n) >= target;
    }
    if (!reached) {
      n = gather_by_bins(view, table, slope, 0, target);
      if (n == 0) return 0;
      weigh_table(table, n, slope);
    }
    sort_pairs<false>(table.place, table.q, n);
    return prefix(table, n, target);
  }
  double least;
  const double all = __ull2double_rn(total), highest = __ull2double_rn(weigh(slope, slope.peak));
  if (row.top_a > 0.0) {
    *made = TOP_A;
    least = __ddiv_rn(__dmul_rn(__dmul_rn(row.top_a, highest), highest), all);
  } else if (row.min_p > 0.0) {
    *made = MIN_P;
    least = __dmul_rn(row.min_p, highest);
  } else {
    *made = MIROSTAT;
    least = __dmul_rn(row.mirostat, all);
  }
  int n = gather(view, table, 0, &slope, __double2ull_rz(ceil(least)));
  if (n > CAPACITY) return 0;
  const bool none = n == 0;
  if (none) n = gather(view, table, peak, nullptr, 0);
  if (n > CAPACITY) return 0;
  sort_pairs<false>(table.place, table.q, n);
  if (none) n = 1;
  weigh_table(table, n, slope);
  return n;
}

DEVICE int later_cuts(const Row& row, const Table& table, int n, Cut made) {
  if (made < TOP_P && row.top_p > 0.0 && n > 1) n = prefix(table, n, share(row.top_p, total_of(table, n)));
  if (made < TOP_A && row.top_a > 0.0 && n > 1) {
    const double high = __ull2double_rn(table.q[0]), all = __ull2double_rn(total_of(table, n));
    n = heavier(table, n, __ddiv_rn(__dmul_rn(__dmul_rn(row.top_a, high), high), all));
  }
  if (made < MIN_P && row.min_p > 0.0 && n > 1) n = heavier(table, n, __dmul_rn(row.min_p, __ull2double_rn(table.q[0])));
  if (made < TFS && row.tfs > 0.0 && n > 1) n = tail_free(table, n, row.tfs, total_of(table, n));
  if (made < MIROSTAT && row.mirostat > 0.0 && n > 1)
    n = heavier(table, n, __dmul_rn(row.mirostat, __ull2double_rn(total_of(table, n))));
  return n;
}

// Steps 9 to 22, one block a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_choose(const Row* rows, const float* shaped, const int* maxima, const u64* sums, Answer* answers, int pitch) {
  extern __shared__ u64 memory[];
  __shared__ Row row;
  load_row(&row, rows + blockIdx.x);
  if (row.flags & SKIP) return;
  Answer* answer = answers + blockIdx.x;
  const Table table{memory, memory + CAPACITY, memory + 2 * CAPACITY};
  __shared__ int high[MOST_BLOCKS];
  const View view{shaped + (size_t)blockIdx.x * pitch, high, sums + blockIdx.x * MOST_BLOCKS, row.size, (row.size + BLOCK - 1) / BLOCK};
  int peak = (int)0x80000000;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS) {
    high[b] = maxima[blockIdx.x * MOST_BLOCKS + b];
    peak = max(peak, high[b]);
  }
  peak = block_max<THREADS>(peak);
  if (peak == BAD) return finish(answer, NOT_FINITE, 0, 0, 0);
  if (peak <= NEG_INF) return finish(answer, EMPTY, 0, 0, 0);
  if (row.flags & GREEDY) return greedy(row, view, peak, answer);
  const Slope slope = slope_of(row, peak);
  if (row.flags & PLAIN) return draw_all(row, view, table, slope, answer);
  Cut made;
  int n = first_candidates(row, view, table, slope, peak, &made);
  if (n == 0) return finish(answer, FALLBACK, 0, 0, 0);
  n = later_cuts(row, table, n, made);
  if (row.flags & (LATE_FIXED | LATE_DYNAMIC) && n > 1) late(row, table, n, slope, total_of(table, n));
  if (row.xtc_probability > 0.0) {
    exclude_top(row, table, n, total_of(table, n));
    if (row.flags & DESCENDING || row.top_n) sort_pairs<true>(table.place, table.q, n);
  }
  const u64 total = total_of(table, n), target = draw_target(row.uniform, total);
  report(table, n, row.top_n, answer);
  if (!(row.flags & DESCENDING)) {
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) table.place[i] = table.place[i] << 32 | table.place[i] >> 32;
    sort_pairs<false>(table.place, table.q, n);
  }
  scan(table.q, table.running, n);
  int at = n;
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (table.running[i] > target) at = min(at, i);
  at = block_min(at);
  const u64 place = table.place[at];
  finish(answer, OK, (int)(row.flags & DESCENDING ? place & 0xffffffff : place >> 32), table.q[at], total);
}
