// The choosing block's table of candidates: sums and scans of the block, gathering by key, weight and bins, sorting, and cuts of the tail.
#pragma once
#include "sampling/sampling_rows.cuh"

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

enum Sort { PLACES, PAIRS, PAIRS_BY_WEIGHT };

// Sorts places, or pairs of place and weight by place or by (weight descending, place). Pads them up to the next power of two.
template <Sort SORT>
DEVICE void sort_pairs(u64* place, u64* q, int n) {
  int m = 2;
  while (m < n) m <<= 1;
  __syncthreads();
  for (int i = n + threadIdx.x; i < m; i += THREADS) {
    place[i] = ~0ull;
    if (SORT != PLACES) q[i] = 0;
  }
  __syncthreads();
  for (int k = 2; k <= m; k <<= 1) {
    for (int j = k >> 1; j; j >>= 1) {
      const int t = threadIdx.x;
      if (t < m / 2) {
        const int a = 2 * t - (t & (j - 1)), b = a + j;
        const u64 pa = place[a], pb = place[b], qa = SORT == PLACES ? 0 : q[a], qb = SORT == PLACES ? 0 : q[b];
        const bool above = SORT == PAIRS_BY_WEIGHT ? qa < qb || (qa == qb && pa > pb) : pa > pb;
        if (above == ((a & k) == 0)) {
          place[a] = pb, place[b] = pa;
          if (SORT != PLACES) q[a] = qb, q[b] = qa;
        }
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

// Adds a candidate to the table; `count` keeps counting past the capacity.
DEVICE void add(const Table& table, int* count, float x, int id) {
  const int at = atomicAdd(count, 1);
  if (at < CAPACITY) table.place[at] = place_of(x, id);
}

// Lists the candidates with a key of at least `least_key` and, if `slope` is given, a weight of at least `least`. Returns their number,
// which may exceed the table. The list is not ordered; callers sort it.
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
    if (*static_cast<volatile int*>(&count) > CAPACITY) break;  // a larger count does not change the outcome
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

// Lists the `most` first candidates, and some more that are as large as the last block that must be examined. Returns their number; 0 if
// the table cannot hold them.
DEVICE int gather_first(const View& view, const Table& table, int most) {
  const int n = gather(view, table, border(view, most), nullptr, 0);
  return n <= CAPACITY ? n : 0;
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

// Number of candidates of a table in descending order that reach `target`, including the one that crosses it.
DEVICE int prefix(const Table& table, int n, u64 target) {
  scan(table.q, table.running, n);
  int at = n - 1;
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (table.running[i] >= target) at = min(at, i);
  return block_min(at) + 1;
}

// Number of candidates of at least this weight in a table in descending order; at least one.
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
