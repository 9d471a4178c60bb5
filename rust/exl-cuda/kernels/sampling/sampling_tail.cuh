// The tail-free cut of sample_wide: the weights of its candidates in order, and where their bends exceed their share.
//
// The curve depends only on weights, and a weight has 28 bits (`depth_of`), so only these are sorted: counted by their upper bits, spread
// over bins in memory, then sorted by whole bins in shared memory. A bin that is too large for it is one of equal depths or of a crowd
// in few of its depths: these are counted, by windows of as many depths as there are counters.
//
// The border lies where the weights bend, so it is the last or the last but one candidate of its weight: the cut is a least weight,
// and in the latter case without the last candidate that has it.
#pragma once
#include "sampling/sampling_wide.cuh"

constexpr int EACH = BINS / WIDE_THREADS;  // bins of a thread

// Sums and numbers of a block's candidates by the values of a digit; zero between passes.
struct Histogram {
  u64 sums[BINS];
  unsigned counts[BINS];
};

// Shared memory of a block that sorts, in the place of its histogram.
struct Sorter {
  unsigned starts[BINS];  // of the row's bins
  unsigned keys[BINS];    // exchanged, or the first place of each depth of a window
  unsigned counts[BINS];
};
static_assert(sizeof(Sorter) <= sizeof(Histogram), "it takes the histogram's place");

// Reads data that other blocks write, past this SM's L1 cache.
template <class T>
DEVICE T fresh(const T* p) {
  return __ldcg(p);
}

// Exclusive running sums of the block's values, and their total.
DEVICE u64 scan_threads(u64 v, u64* total) {
  __shared__ u64 parts[WIDE_THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = v;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const u64 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();
  if (lane == 31) parts[warp] = sum;
  __syncthreads();
  u64 before = 0, all = 0;
  for (int w = 0; w < WIDE_THREADS / 32; w++) {
    if (w < warp) before += parts[w];
    all += parts[w];
  }
  *total = all;
  return before + sum - v;
}

constexpr unsigned NO_DEPTH = ~0u;  // of an id that is not a candidate

// Counts the candidates from `base` to `end` by their bins, writes their depths and adds up their weights.
DEVICE void bin_ids(const Wide& s, const Slope& slope, const float* x, int base, int end, WideRow* memory, unsigned* depths,
                    Histogram& h) {
  u64 total = 0;
  const Cuts cuts = cuts_of(s);
#pragma unroll 2
  for (int id = base + threadIdx.x; id < end; id += WIDE_THREADS) {
    unsigned depth = NO_DEPTH;
    const Candidate c = candidate(slope, x[id], id);
    if (key_of(x[id]) > NEG_INF && is_kept(cuts, s, c)) {
      depth = depth_of(weight(c.l));
      total += c.q;
      atomicAdd(&h.counts[depth >> WIDEST_SHIFT], 1u);
    }
    depths[id] = depth;
  }
  total = warp_sum_u64(total);
  if (threadIdx.x % 32 == 0 && total) atomicAdd(&memory->state.total, total);
  __syncthreads();
}

// Counts the candidates by their bins again.
DEVICE void bin_depths(const Wide& s, int base, int end, const unsigned* depths, Histogram& h) {
#pragma unroll 4
  for (int id = base + threadIdx.x; id < end; id += WIDE_THREADS) {
    const unsigned depth = fresh(depths + id);
    if (depth <= s.tail_deepest) atomicAdd(&h.counts[depth >> s.tail_shift], 1u);
  }
  __syncthreads();
}

// Writes the depths of the candidates to their bins. The block takes as many places of each bin as it has candidates there.
DEVICE void spread_depths(const Wide& s, int base, int end, WideRow* memory, const unsigned* depths, unsigned* binned, Histogram& h) {
  bin_depths(s, base, end, depths, h);
  for (int i = threadIdx.x; i < BINS; i += WIDE_THREADS)
    if (h.counts[i]) h.counts[i] = fresh(memory->starts + i) + atomicAdd(&memory->counts[i], h.counts[i]);
  __syncthreads();
#pragma unroll 4
  for (int id = base + threadIdx.x; id < end; id += WIDE_THREADS) {
    const unsigned depth = fresh(depths + id);
    if (depth <= s.tail_deepest) binned[atomicAdd(&h.counts[depth >> s.tail_shift], 1u)] = depth;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += WIDE_THREADS) h.counts[i] = 0;
  __syncthreads();
}

// Sorts the block's keys, `N` a thread: key i * N + j of the order ends up as keys[j] of thread i.
template <int N>
DEVICE void sort_keys(unsigned (&keys)[N], unsigned* exchange) {
  const int first = threadIdx.x * N;
#pragma unroll 1
  for (int k = 2; k <= N * WIDE_THREADS; k <<= 1) {
#pragma unroll 1
    for (int j = k / 2; j >= N; j /= 2) {  // with another thread
      const int apart = j / N;
      const bool takes_less = ((threadIdx.x & apart) == 0) == ((first & k) == 0);
      unsigned other[N];
      if (apart < 32) {
#pragma unroll
        for (int i = 0; i < N; i++) other[i] = __shfl_xor_sync(~0u, keys[i], apart);
      } else {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) exchange[i * WIDE_THREADS + threadIdx.x] = keys[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) other[i] = exchange[i * WIDE_THREADS + (threadIdx.x ^ apart)];
      }
#pragma unroll
      for (int i = 0; i < N; i++) keys[i] = takes_less ? min(keys[i], other[i]) : max(keys[i], other[i]);
    }
#pragma unroll
    for (int j = N / 2; j; j /= 2) {  // within the thread
      if (j >= k) continue;
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (i & j) continue;
        const bool rises = ((first + i) & k) == 0;
        const unsigned less = min(keys[i], keys[i | j]), more = max(keys[i], keys[i | j]);
        keys[i] = rises ? less : more;
        keys[i | j] = rises ? more : less;
      }
    }
  }
}

// The first of `n` ascending numbers that is at least `v`; `n` if there is none.
DEVICE int lower_bound(const unsigned* numbers, int n, unsigned v) {
  int low = 0, high = n;
  while (low < high) {
    const int half = (low + high) / 2;
    if (numbers[half] < v) {
      low = half + 1;
    } else {
      high = half;
    }
  }
  return low;
}

// Sorts whole bins, `count` depths in all, the first of which begins at place `from`: by as many places as each bin has candidates, then
// among those of a place. Where too many share one, by comparisons that do not depend on how the depths lie.
DEVICE void sort_group(const Wide& s, const Tail& tail, unsigned from, int count, Sorter& h) {
  constexpr int CROWD = 64;
  const auto place = [&](unsigned depth) {
    const unsigned bin = depth >> s.tail_shift, start = h.starts[bin], end = bin + 1 < BINS ? h.starts[bin + 1] : s.tail_count;
    return start - from + ((depth & ((1u << s.tail_shift) - 1)) * (end - start) >> s.tail_shift);
  };
  unsigned keys[EACH];
  bool crowded = false;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; i++) h.counts[i * WIDE_THREADS + threadIdx.x] = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * WIDE_THREADS + threadIdx.x;
    keys[i] = at < count ? fresh(tail.binned + from + at) : NO_DEPTH;
  }
  __syncthreads();
  unsigned before[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (keys[i] != NO_DEPTH) crowded |= (before[i] = atomicAdd(&h.counts[place(keys[i])], 1u)) >= CROWD;
  if (__syncthreads_or(crowded)) {
    sort_keys(keys, h.keys);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = threadIdx.x * EACH + i;
      if (at < count) tail.sorted[from + at] = keys[i];
    }
    return;
  }
  u64 sum = 0, total;
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += h.counts[threadIdx.x * EACH + i];
  unsigned first = (unsigned)scan_threads(sum, &total);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    h.keys[threadIdx.x * EACH + i] = first;
    first += h.counts[threadIdx.x * EACH + i];
  }
  __syncthreads();  // from here on `counts` holds the depths by their places
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (keys[i] != NO_DEPTH) h.counts[h.keys[place(keys[i])] + before[i]] = keys[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * WIDE_THREADS + threadIdx.x;
    if (at >= count) break;
    const unsigned depth = h.counts[at], mine = place(depth);
    const int begin = (int)h.keys[mine], end = mine + 1 < BINS ? (int)h.keys[mine + 1] : count;
    int rank = begin;
    for (int j = begin; j < end; j++) rank += h.counts[j] < depth || (h.counts[j] == depth && j < at);
    tail.sorted[from + rank] = depth;
  }
}

// Writes a bin of any size in order. Its depths begin with `bin`.
DEVICE void write_counted(unsigned bin, unsigned shift, const unsigned* from, unsigned* to, int count, Sorter& h) {
  constexpr unsigned LOW = BINS - 1;
  constexpr int MOST_WINDOWS = (int)((DEEPEST + 1) / BINS / BINS);  // of a bin
  __shared__ unsigned windows[MOST_WINDOWS];
  const unsigned begin = bin << shift;
  __syncthreads();
  if (threadIdx.x < MOST_WINDOWS) windows[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += WIDE_THREADS) atomicAdd(&windows[(fresh(from + i) - begin) / BINS], 1u);
  __syncthreads();
  for (unsigned window = 0; window < MOST_WINDOWS; window++) {
    const unsigned inside = windows[window];
    if (inside == 0) continue;  // uniform over the block
    for (int i = threadIdx.x; i < BINS; i += WIDE_THREADS) h.counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += WIDE_THREADS) {
      const unsigned depth = fresh(from + i) - begin;
      if (depth / BINS == window) atomicAdd(&h.counts[depth & LOW], 1u);
    }
    __syncthreads();
    u64 sum = 0, total;
    for (int i = 0; i < EACH; i++) sum += h.counts[threadIdx.x * EACH + i];
    unsigned end = (unsigned)scan_threads(sum, &total);
    for (int i = 0; i < EACH; i++) h.keys[threadIdx.x * EACH + i] = end += h.counts[threadIdx.x * EACH + i];
    __syncthreads();
    // The depth at a place: the first whose last place is beyond it.
    for (unsigned i = threadIdx.x; i < inside; i += WIDE_THREADS)
      to[i] = begin + window * BINS + (unsigned)lower_bound(h.keys, BINS, i + 1);
    __syncthreads();
    to += inside;
  }
}

// Sorts the bins that begin at a place from `base` to `end`.
DEVICE void sort_bins(const Wide& s, int base, int end, const WideRow* memory, const Tail& tail, Sorter& h) {
  const unsigned all = s.tail_count;
  for (int i = threadIdx.x; i < BINS; i += WIDE_THREADS) h.starts[i] = min(fresh(memory->starts + i), all);
  __syncthreads();
  const int last = end < (int)all ? lower_bound(h.starts, BINS, end) : BINS;
  const auto start = [&](int bin) { return bin < BINS ? h.starts[bin] : all; };
  for (int bin = lower_bound(h.starts, BINS, base), next; bin < last; bin = next) {
    const unsigned from = start(bin);
    next = lower_bound(h.starts, BINS, from + BINS + 1);  // the first bin that begins too far behind
    if (next < BINS || all > from + BINS) next--;         // the one before it is not whole
    next = min(next, last);
    if (next == bin) {
      next = bin + 1;
      write_counted((unsigned)bin, s.tail_shift, tail.binned + from, tail.sorted + from, (int)(start(next) - from), h);
      continue;
    }
    const int count = (int)(start(next) - from);
    if (count > 0) sort_group(s, tail, from, count, h);
  }
  __syncthreads();
}

// How much the weights bend at place i of the order.
DEVICE u64 bend(const Wide& s, const Tail& tail, int i) {
  if (i >= (int)s.tail_count - 2) return 0;
  const unsigned* depths = tail.sorted + i;
  const long long a = (long long)weight_at_depth(fresh(depths)), b = (long long)weight_at_depth(fresh(depths + 1));
  const long long d = a - 2 * b + (long long)weight_at_depth(fresh(depths + 2));
  return (u64)(d < 0 ? -d : d);
}

// Adds the bends at the places from `base` to `end` to the sums of their segments.
DEVICE void add_bends(const Wide& s, int base, int end, WideRow* memory, const Tail& tail) {
  end = min(end, (int)s.tail_count);
#pragma unroll 1
  for (int first = base; first < end; first += WIDE_THREADS) {  // a segment is a multiple of the block
    const int i = first + threadIdx.x;
    const u64 sum = warp_sum_u64(i < end ? bend(s, tail, i) : 0);
    if (threadIdx.x % 32 == 0 && sum) atomicAdd(&memory->sums[first / WIDE_SEGMENT], sum);
  }
}

// Sets the places of the bins' first candidates from their numbers. Candidates of the deepest bin may be cut yet. Returns whether finer
// bins should be counted: where one has more candidates than a block sorts, and the bins in use can be divided.
DEVICE bool resolve_bins(Wide& s, WideRow* memory) {
  __shared__ int last, most;
  if (threadIdx.x == 0) {
    last = most = 0;
    // Weights of 1e-8 of all are the last that count.
    if (s.op == BIN) s.tail_deepest = deepest_of(__double2ull_rz(ceil(__dmul_rn(1e-8, __ull2double_rn(s.total)))));
  }
  __syncthreads();
  const int deepest = (int)(s.tail_deepest >> s.tail_shift);
  int deepest_used = 0, largest = 0;
  unsigned counts[EACH];
  u64 sum = 0, total;
  for (int i = 0; i < EACH; i++) {
    const int bin = threadIdx.x * EACH + i;
    counts[i] = bin <= deepest ? fresh(memory->counts + bin) : 0;
    memory->counts[bin] = 0;
    sum += counts[i];
    if (counts[i]) deepest_used = bin;
    largest = max(largest, (int)counts[i]);
  }
  deepest_used = warp_max_int(deepest_used);
  largest = warp_max_int(largest);
  if (threadIdx.x % 32 == 0) atomicMax(&last, deepest_used), atomicMax(&most, largest);
  u64 before = scan_threads(sum, &total);
  for (int i = 0; i < EACH; i++) {
    memory->starts[threadIdx.x * EACH + i] = (unsigned)before;
    before += counts[i];
  }
  const int spare = __clz(last) - __clz(BINS - 1);
  const bool finer = most > BINS && spare > 0 && s.tail_shift > 0;
  __syncthreads();
  if (finer && threadIdx.x == 0) {
    s.tail_deepest = min(s.tail_deepest, (((unsigned)last + 1) << s.tail_shift) - 1);
    s.tail_shift -= min((unsigned)spare, s.tail_shift);
    s.op = REBIN;
  }
  return finer;
}

// The number of candidates, from those of each bin, which are cleared.
DEVICE void resolve_spread(Wide& s, WideRow* memory) {
  u64 sum = 0, total;
  for (int i = 0; i < EACH; i++) {
    unsigned* count = memory->counts + threadIdx.x * EACH + i;
    sum += fresh(count);
    *count = 0;
  }
  scan_threads(sum, &total);
  if (threadIdx.x == 0) s.tail_count = (unsigned)total;
}

// Keeps the candidates up to the place at which the bends before it exceed their share; all if there are none.
DEVICE void resolve_curve(const Row& row, Wide& s, WideRow* memory, const Tail& tail) {
  constexpr int STEPS = WIDE_SEGMENT / WIDE_THREADS;
  __shared__ int segment, leading;
  __shared__ u64 start;
  u64 sums[EACH], sum = 0, total;
  for (int i = 0; i < EACH; i++) {
    u64* at = memory->sums + threadIdx.x * EACH + i;
    sums[i] = fresh(at);
    *at = 0;
    sum += sums[i];
  }
  u64 before = scan_threads(sum, &total);
  if (threadIdx.x == 0) s.tail_tied = false, segment = -1, leading = (int)s.tail_count - 2;
  __syncthreads();
  if (total == 0) return;  // the same in all threads
  const u64 limit = __double2ull_rz(__dmul_rn(row.tfs, __ull2double_rn(total)));
  for (int i = 0; i < EACH; i++) {
    if (before <= limit && before + sums[i] > limit) segment = threadIdx.x * EACH + i, start = before;  // once
    before += sums[i];
  }
  __syncthreads();
  const int first = segment;
  u64 running = first >= 0 ? start : 0;
  for (int step = 0; first >= 0 && step < STEPS; step++) {
    const int i = first * WIDE_SEGMENT + step * WIDE_THREADS + threadIdx.x;
    const u64 own = bend(s, tail, i);
    u64 all;
    const u64 reached = running + scan_threads(own, &all) + own;
    if (reached > limit) atomicMin(&leading, i);
    running += all;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned* depths = tail.sorted + leading;
    const u64 border = weight_at_depth(fresh(depths));
    s.least = max(s.least, border);
    s.tail_tied = border == weight_at_depth(fresh(depths + 1));
  }
  __syncthreads();
}
