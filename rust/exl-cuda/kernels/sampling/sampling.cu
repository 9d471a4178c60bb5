// From rows of logits to tokens, bitwise identical to exl-cpu's sampling (rust/exl-cpu/src/sampling defines the transforms): fixed-point
// weights, integer sums, total orders. A batch takes three launches: shape the logits and find block maxima; sum the weights of each block;
// choose, one block a row. Rows whose candidates do not fit a block's table are left to sample_wide.
//
// Answers are written directly to pinned host memory, so there is no copy to wait for. Each launch begins while its predecessor ends, and
// waits for it before it reads its results. So work after the last launch is ordered after all of them. Multiplications and additions are
// intrinsics wherever the compiler could fuse them, because a fused one rounds differently.
#include "common/abi.cuh"
#include "sampling/sampling_wide.cuh"

// Inputs of the step after the sampling, beside its tokens: their source in pinned host memory, and their destination.
struct Inputs {
  const unsigned* from;
  unsigned* to;
  int words;
};
ABI_SIZE(Inputs, 24); ABI_AT(Inputs, from, 0); ABI_AT(Inputs, to, 8); ABI_AT(Inputs, words, 16);

// Steps 2 to 8: the shaped logits and the largest key of each block of ids. The blocks past the last row copy the next step's inputs while
// the others work: a separate copy between this launch and the next would add latency.
extern "C" __global__ void __launch_bounds__(256)
    sample_shape(const Row* rows, float* shaped, int* maxima, int pitch, int count, Inputs inputs, WideControl* control) {
  __shared__ Row row;
  __shared__ float x[SEGMENT];
  pdl_trigger();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *control = WideControl{};
  if ((int)blockIdx.y == count) {
    for (int i = blockIdx.x * 256 + threadIdx.x; i < inputs.words; i += gridDim.x * 256) inputs.to[i] = __ldcv(inputs.from + i);
    return;
  }
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
  const bool copies = is_shaped(row);
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
    if (copies) shaped[id] = v;
  }
  high = warp_max_int(high);
  if (lane == 0) maxima[blockIdx.y * MOST_BLOCKS + blockIdx.x * (SEGMENT / BLOCK) + warp] = high;
}

// Sums of weights of each block of ids, for rows that need the total weight.
extern "C" __global__ void __launch_bounds__(256)
    sample_sums(const Row* rows, const float* shaped, const int* maxima, u64* sums, int pitch) {
  __shared__ Row row;
  pdl_trigger();
  load_row(&row, rows + blockIdx.y);
  pdl_wait();
  const int base = blockIdx.x * SEGMENT;
  if (row.flags & SKIP || !(row.flags & SUMS) || base >= row.size) return;
  maxima += blockIdx.y * MOST_BLOCKS;
  int peak = (int)0x80000000;
  const int blocks = (row.size + BLOCK - 1) / BLOCK;
  for (int i = threadIdx.x; i < blocks; i += 256) peak = max(peak, maxima[i]);
  peak = block_max<256>(peak);
  const Slope slope = slope_of(row, peak);
  const float* x = shaped_logits(row, shaped, blockIdx.y, pitch);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = 0;
#pragma unroll
  for (int j = 0; j < BLOCK / 32; j++) {
    const int id = base + warp * BLOCK + 32 * j + lane;
    if (id < row.size) sum += weigh(slope, x[id]);
  }
  sum = warp_sum_u64(sum);
  if (lane == 0) sums[blockIdx.y * MOST_BLOCKS + blockIdx.x * (SEGMENT / BLOCK) + warp] = sum;
}

// ---- the choosing block ----

// Step 18: late temperature. The table is in descending order, so its first entry has the highest log-weight.
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
    scale = late_scale(row, sum, (int)block_sum((u64)alive), total);
  }
  const float highest = log_weight(slope, logit_at(table.place[0]));
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const float l = log_weight(slope, logit_at(table.place[i]));
    table.q[i] = fixed(weight(__fmul_rn(__fsub_rn(l, highest), scale)));
  }
  __syncthreads();
}

// Step 19: exclude top choices.
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

// Destination of a row's results: the answer in pinned host memory, and the token, clamped to ids below `limit`, in the inputs of the next
// step. If the row's candidates do not fit the table: the memory of its passes.
struct Results {
  Answer* answer;
  int64_t* next;
  int limit;
  WideRow* wide;
  WideControl* control;
};

DEVICE void report(const Table& table, int n, int top_n, Answer* answer) {
  const int top = min(n, top_n);
  if ((int)threadIdx.x < top) {
    answer->top_ids[threadIdx.x] = (unsigned)table.place[threadIdx.x];
    answer->top_weights[threadIdx.x] = table.q[threadIdx.x];
  }
  if (threadIdx.x == 0) answer->top = top;
}

DEVICE void finish(const Results& to, int status, int token, u64 weight, u64 total) {
  if (threadIdx.x == 0) {
    if (to.next) *to.next = max(0, min(token, to.limit - 1));
    to.answer->token = token;
    to.answer->weight = weight;
    to.answer->total = total;
    to.answer->status = status;
  }
}

DEVICE void leave_to_passes(const Row& row, int peak, const Results& to) {
  if (threadIdx.x == 0) begin_wide(row, to.wide, to.control, peak);
}

// A draw over all logits in ascending order of id.
DEVICE void draw_all(const Row& row, const View& view, const Table& table, const Slope& slope, int peak, const Results& to) {
  u64 sum = 0;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS) sum += view.sums[b];
  const u64 total = block_sum(sum), target = draw_target(row.uniform, total);
  if (row.top_n) {
    const int n = gather_first(view, table, row.top_n);
    if (n == 0) return leave_to_passes(row, peak, to);
    sort_pairs<PLACES>(table.place, table.q, n);
    weigh_table(table, n, slope);
    report(table, n, row.top_n, to.answer);
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
  finish(to, OK, block * BLOCK + at, table.q[at], total);
}

DEVICE void greedy(const Row& row, const View& view, int peak, const Results& to) {
  int block = view.blocks;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS)
    if (view.maxima[b] == peak) block = min(block, b);
  block = block_min(block);
  const int id = block * BLOCK + threadIdx.x;
  const bool best = threadIdx.x < BLOCK && id < view.size && key_of(view.x[id]) == peak;
  const int token = block_min(best ? id : 0x7fffffff);
  if (threadIdx.x == 0 && row.top_n) {
    to.answer->top = 1;
    to.answer->top_ids[0] = token;
    to.answer->top_weights[0] = 1;
  }
  finish(to, OK, token, 1, 1);
}

enum Cut { NONE, TOP_P, TOP_A, MIN_P, TFS, MIROSTAT };

// Fills the table with the sorted candidates that top-k, or without it the first cut, keeps. Returns their number, 0 if the table is too
// small, and the cut that was made.
DEVICE int first_candidates(const Row& row, const View& view, const Table& table, const Slope& slope, int peak, Cut* made) {
  *made = NONE;
  if (row.top_k) {
    const int n = gather_first(view, table, row.top_k);
    if (n == 0) return 0;
    sort_pairs<PLACES>(table.place, table.q, n);
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
    for (int count = 16; count <= 1024 && n <= CAPACITY && !reached; count *= 4) {
      const int least = border(view, count);
      // Candidates weigh no more than the blocks that contain them.
      u64 most = 0;
      for (int b = threadIdx.x; b < view.blocks; b += THREADS) most += view.maxima[b] >= least ? view.sums[b] : 0;
      if (block_sum(most) < target) continue;
      n = gather(view, table, least, nullptr, 0);
      if (n > CAPACITY) break;
      weigh_table(table, n, slope);
      reached = total_of(table, n) >= target;
    }
    if (!reached) return 0;
    sort_pairs<PAIRS>(table.place, table.q, n);
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
  sort_pairs<PLACES>(table.place, table.q, n);
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
    sample_choose(const Row* rows, const float* shaped, const int* maxima, const u64* sums, Answer* answers, int pitch,
                  int64_t* next, int limit, WideRow* wide, WideControl* control) {
  extern __shared__ u64 memory[];
  __shared__ Row row;
  load_row(&row, rows + blockIdx.x);
  pdl_wait();
  // Ends a program that a call that failed between this kernel and the passes may have left.
  if (threadIdx.x == 0) wide[blockIdx.x].state.op = DONE;
  if (row.flags & SKIP) return;
  const Results to{answers + blockIdx.x, next ? next + blockIdx.x : nullptr, limit, wide + blockIdx.x, control};
  const Table table{memory, memory + CAPACITY, memory + 2 * CAPACITY};
  __shared__ int high[MOST_BLOCKS];
  const View view{shaped_logits(row, shaped, blockIdx.x, pitch), high, sums + blockIdx.x * MOST_BLOCKS, row.size, (row.size + BLOCK - 1) / BLOCK};
  int peak = (int)0x80000000;
  for (int b = threadIdx.x; b < view.blocks; b += THREADS) {
    high[b] = maxima[blockIdx.x * MOST_BLOCKS + b];
    peak = max(peak, high[b]);
  }
  peak = block_max<THREADS>(peak);
  if (peak == BAD) return finish(to, NOT_FINITE, 0, 0, 0);
  if (peak <= NEG_INF) return finish(to, EMPTY, 0, 0, 0);
  if (row.flags & GREEDY) return greedy(row, view, peak, to);
  if (row.flags & WIDE) return leave_to_passes(row, peak, to);
  const Slope slope = slope_of(row, peak);
  if (row.flags & PLAIN) return draw_all(row, view, table, slope, peak, to);
  Cut made;
  int n = first_candidates(row, view, table, slope, peak, &made);
  if (n == 0) return leave_to_passes(row, peak, to);
  n = later_cuts(row, table, n, made);
  if (row.flags & (LATE_FIXED | LATE_DYNAMIC) && n > 1) late(row, table, n, slope, total_of(table, n));
  if (row.xtc_probability > 0.0) {
    exclude_top(row, table, n, total_of(table, n));
    if (row.flags & DESCENDING || row.top_n) sort_pairs<PAIRS_BY_WEIGHT>(table.place, table.q, n);
  }
  const u64 total = total_of(table, n), target = draw_target(row.uniform, total);
  report(table, n, row.top_n, to.answer);
  if (!(row.flags & DESCENDING)) {
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) table.place[i] = table.place[i] << 32 | table.place[i] >> 32;
    sort_pairs<PAIRS>(table.place, table.q, n);
  }
  scan(table.q, table.running, n);
  int at = n;
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (table.running[i] > target) at = min(at, i);
  at = block_min(at);
  const u64 place = table.place[at];
  finish(to, OK, (int)(row.flags & DESCENDING ? place & 0xffffffff : place >> 32), table.q[at], total);
}
