// The passes over rows whose candidates do not fit sample_choose's table (sampling_wide.cuh), and the mix of two rows of logits.
#include "sampling/sampling_tail.cuh"

// Writes a row's token into its answer and into the inputs of the next step.
DEVICE void answer_token(Answer* answer, int64_t* next, int limit, unsigned token, u64 q, u64 total) {
  if (next) *next = max(0, min((int)token, limit - 1));
  answer->token = (int)token;
  answer->weight = q;
  answer->total = total;
  answer->status = OK;
}

DEVICE void copy_state(Wide* to, const Wide* from) {
  static_assert(sizeof(Wide) % 4 == 0, "copied by words");
  for (int i = threadIdx.x; i < (int)sizeof(Wide) / 4; i += WIDE_THREADS)
    reinterpret_cast<unsigned*>(to)[i] = fresh(reinterpret_cast<const unsigned*>(from) + i);
}

// Barrier of all blocks. Returns, the same to all blocks, whether no row has a pass left.
DEVICE bool synchronize(WideControl* control, unsigned generation) {
  __shared__ bool over;
  __syncthreads();
  if (threadIdx.x == 0) {
    volatile unsigned* passed = &control->passed;
    __threadfence();
    if (atomicAdd(&control->arrived, 1) + 1 == generation * gridDim.x) {
      const bool none = fresh(&control->active) == 0;
      __threadfence();
      *passed = 2 * generation + none;
    }
    while (*passed < 2 * generation) __nanosleep(20);
    over = *passed & 1;
    __threadfence();
  }
  __syncthreads();
  return over;
}

// Adds to a sum in shared memory, which has no addition of 64 bits without a loop.
DEVICE void add_to_sum(u64* sum, u64 q) {
  unsigned* word = reinterpret_cast<unsigned*>(sum);
  const unsigned low = (unsigned)q, before = atomicAdd(word, low);
  const unsigned high = (unsigned)(q >> 32) + (before + low < low);
  if (high) atomicAdd(word + 1, high);
}

DEVICE void add_to_bin(Histogram& h, bool wanted, unsigned bin, u64 q) {
  // Equal logits share a bin: if all lanes have the same bin, they add once.
  const unsigned lanes = __ballot_sync(~0u, wanted);
  if (!lanes) return;
  const unsigned first = __shfl_sync(~0u, bin, __ffs(lanes) - 1);
  if (__all_sync(~0u, !wanted || bin == first)) {
    const u64 sum = warp_sum_u64(wanted ? q : 0);
    if (threadIdx.x % 32 == 0) {
      add_to_sum(&h.sums[first], sum);
      atomicAdd(&h.counts[first], (unsigned)__popc(lanes));
    }
  } else if (wanted) {
    add_to_sum(&h.sums[bin], q);
    atomicAdd(&h.counts[bin], 1u);
  }
}

// Returns whether a candidate's words begin like the border's.
DEVICE bool at_border(const Wide& s, const unsigned (&w)[WORDS]) {
  bool same = true;
#pragma unroll
  for (int i = 0; i < WORDS; i++) same &= (w[i] & s.mask[i]) == s.prefix[i];
  return same;
}
DEVICE bool up_to_border(const Wide& s, const unsigned (&w)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const unsigned last = s.prefix[i] | ~s.mask[i];
    if (w[i] != last) return w[i] < last;
  }
  return true;
}

DEVICE void clear_bins(Histogram& h) {
  for (int i = threadIdx.x; i < BINS; i += WIDE_THREADS) h.sums[i] = 0, h.counts[i] = 0;
}

// Whether a logit's words begin like the border's, and then its value of a digit and its weight, or 1 where candidates are counted.
DEVICE bool digit_at(const Row& row, const Wide& s, const Cuts& cuts, const Digit& digit, const Candidate& c, unsigned* bin, u64* q) {
  if (!is_kept(cuts, s, c)) return false;
  const u64 weight = weight_of(row, s, c);
  *q = s.goal == COUNT ? 1 : weight;
  *bin = first_digit(s, c, weight);
  if (s.digit == 0) return true;
  if (*bin != s.prefix[0]) return false;  // almost all candidates
  unsigned w[WORDS];
  words_of(s, c, weight, w);
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++)  // an index that is not known would put the words into memory
    if (i == digit.word) word = w[i];
  *bin = (word & ~s.mask[digit.word]) >> digit.shift;
  return at_border(s, w);
}

// Adds the ids from `base` to `end` to the sums of a digit.
DEVICE void select_pass(const Row& row, const Wide& s, const Slope& slope, const float* x, int base, int end, Histogram& h) {
  const Digit digit = digit_of(s.order, s.digit);
  const Cuts cuts = cuts_of(s);
#pragma unroll 1
  for (int first = base; first < end; first += WIDE_THREADS) {
    const int id = first + threadIdx.x;
    unsigned bin = 0;
    u64 q = 0;
    const bool wanted =
        id < end && key_of(x[id]) > NEG_INF && digit_at(row, s, cuts, digit, candidate(slope, x[id], id), &bin, &q);
    add_to_bin(h, wanted, bin, q);
  }
}

// The same for the first digit of ids: a warp takes neighbouring ones, which have the same.
DEVICE void draw_pass(const Row& row, const Wide& s, const Slope& slope, const float* x, int base, int end, Histogram& h) {
  constexpr int TAKEN = WIDE_SEGMENT / WIDE_THREADS;  // ids of a thread in a segment
  const Cuts cuts = cuts_of(s);
  const bool as_they_are = !s.late_on && !s.xtc_on;
#pragma unroll 1
  for (base += threadIdx.x / 32 * 32 * TAKEN; base < end; base += WIDE_SEGMENT) {
    u64 sum = 0;
#pragma unroll
    for (int j = 0; j < TAKEN; j++) {
      const int id = base + 32 * j + threadIdx.x % 32;
      if (id >= end || key_of(x[id]) <= NEG_INF) continue;
      const Candidate c = candidate(slope, x[id], id);
      if (is_kept(cuts, s, c)) sum += as_they_are ? c.q : weight_of(row, s, c);
    }
    sum = warp_sum_u64(sum);
    if (threadIdx.x % 32 == 0 && sum) {
      add_to_sum(&h.sums[base >> 9], sum);
      atomicAdd(&h.counts[base >> 9], 1u);
    }
  }
}

// Lists the candidates at the border, in any order. The block collects them in the place of its histogram: the row has one counter.
DEVICE void near_pass(const Row& row, const Wide& s, const Slope& slope, const float* x, int base, int end, WideRow* memory, Histogram& h) {
  constexpr int HELD = sizeof(Histogram) / sizeof(unsigned);
  static_assert(HELD % WIDE_THREADS == 0, "whole rounds");
  __shared__ unsigned held, place;
  unsigned* ids = reinterpret_cast<unsigned*>(&h);
  const Digit digit = digit_of(s.order, s.digit);
  const Cuts cuts = cuts_of(s);
#pragma unroll 1
  for (; base < end; base += HELD) {
    if (threadIdx.x == 0) held = 0;
    __syncthreads();
#pragma unroll 1
    for (int first = base; first < min(end, base + HELD); first += WIDE_THREADS) {
      const int id = first + threadIdx.x;
      unsigned bin;
      u64 q;
      const bool near =
          id < end && key_of(x[id]) > NEG_INF && digit_at(row, s, cuts, digit, candidate(slope, x[id], id), &bin, &q);
      const unsigned lanes = __ballot_sync(~0u, near), lane = threadIdx.x % 32;
      if (!lanes) continue;
      unsigned at = 0;
      if (lane == 0) at = atomicAdd(&held, (unsigned)__popc(lanes));
      at = __shfl_sync(~0u, at, 0) + __popc(lanes & ((1u << lane) - 1));
      if (near) ids[at] = (unsigned)id;
    }
    __syncthreads();
    if (threadIdx.x == 0 && held) place = atomicAdd(&memory->state.listed, held);
    __syncthreads();
    for (unsigned i = threadIdx.x; i < held; i += WIDE_THREADS) memory->near[place + i] = ids[i];
    __syncthreads();
  }
  clear_bins(h);
}

// Adds the block's sums to the row's memory and clears them.
DEVICE void merge_bins(Histogram& h, WideRow* memory) {
  for (int i = threadIdx.x; i < BINS; i += WIDE_THREADS) {
    if (!h.counts[i]) continue;
    atomicAdd(&memory->counts[i], h.counts[i]);
    if (h.sums[i]) atomicAdd(&memory->sums[i], h.sums[i]);
    h.sums[i] = 0;
    h.counts[i] = 0;
  }
}

DEVICE u64 warp_min_u64(u64 v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = min(v, __shfl_xor_sync(~0u, v, o));
  return v;
}
DEVICE u64 warp_max_u64(u64 v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = max(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// Runs all other kinds of passes over the ids from `base` to `end`.
DEVICE void other_pass(const Row& row, const Wide& s, const Slope& slope, const float* x, int base, int end, WideRow* memory) {
  Wide* to = &memory->state;
  u64 total = 0, surprise = 0, first = ~0ull, last = 0;
  unsigned seen = 0, alive = 0;
  const Cuts cuts = cuts_of(s);
#pragma unroll 1
  for (int id = base + threadIdx.x; id < end; id += WIDE_THREADS) {
    if (key_of(x[id]) <= NEG_INF) continue;
    const Candidate c = candidate(slope, x[id], id);
    if (!is_kept(cuts, s, c)) continue;
    const u64 q = weight_of(row, s, c);
    if (s.op == MEASURE) {
      const float w = weight(c.l);
      total += q;
      surprise += fixed(w > 0.f ? __fmul_rn(w, -c.l) : 0.f);
      first = min(first, c.place);
      last = max(last, c.place);
      seen++;
      alive += c.l >= -745.f;
    } else if (s.op == EXCLUDE) {
      const bool ignored = id / 32 < row.ignored_words && (row.ignored[id / 32] >> (id % 32) & 1);
      if (q >= s.xtc_least && !ignored) seen++, total += q, last = max(last, c.place);
    } else if (s.op == LAST) {
      if (q == s.least) seen++, last = max(last, c.place);
    } else {
      unsigned w[WORDS];
      words_of(s, c, q, w);
      if (s.op == LIST && up_to_border(s, w)) memory->list[atomicAdd(&to->listed, 1u)] = Listed{q, c.place};
      if (s.op == FIND && at_border(s, w)) to->found = (unsigned)id;
    }
  }
  if (s.op != MEASURE && s.op != EXCLUDE && s.op != LAST) return;
  total = warp_sum_u64(total);
  surprise = warp_sum_u64(surprise);
  first = warp_min_u64(first);
  last = warp_max_u64(last);
  seen = (unsigned)warp_sum_u64(seen);
  alive = (unsigned)warp_sum_u64(alive);
  if (threadIdx.x % 32 != 0 || seen == 0) return;
  if (s.op == MEASURE) {
    atomicAdd(&to->total, total);
    atomicAdd(&to->surprise, surprise);
    atomicMin(&to->first, first);
    atomicMax(&to->last, last);
    atomicAdd(&to->seen, seen);
    atomicAdd(&to->alive, alive);
  } else {
    atomicAdd(&to->excluded, total);
    atomicMax(&to->last, last);
    atomicAdd(&to->chosen, seen);
  }
}

// The sums of a thread's values of a digit.
struct Share {
  u64 sums[EACH];
  unsigned counts[EACH];
};

// Reads and clears the sums of all segments, or of this block.
DEVICE Share take_sums(WideRow* memory) {
  static_assert(EACH == 4, "read as vectors");
  uint4* four = reinterpret_cast<uint4*>(memory->counts) + threadIdx.x;
  ulonglong2* two = reinterpret_cast<ulonglong2*>(memory->sums) + 2 * threadIdx.x;
  const uint4 n = fresh(four);
  const ulonglong2 low = fresh(two), high = fresh(two + 1);
  *four = make_uint4(0, 0, 0, 0);
  two[0] = two[1] = make_ulonglong2(0, 0);
  return Share{{low.x, low.y, high.x, high.y}, {n.x, n.y, n.z, n.w}};
}
DEVICE Share take_sums(Histogram& h) {
  Share taken;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int bin = threadIdx.x * EACH + i;
    taken.sums[i] = h.sums[bin], taken.counts[i] = h.counts[bin];
    h.sums[bin] = 0, h.counts[bin] = 0;
  }
  return taken;
}

// Finds the digit of the border from the sums of its values. Returns true once the border is known.
DEVICE bool resolve_digit(Wide& s, const Share& taken) {
  __shared__ bool known;
  const u64 (&sums)[EACH] = taken.sums;
  const unsigned (&counts)[EACH] = taken.counts;
  const u64 sum = sums[0] + sums[1] + sums[2] + sums[3];
  u64 total;
  u64 before = scan_threads(sum, &total);
  if (threadIdx.x == 0) {
    known = false;
    if (s.digit == 0) {
      if (s.goal == COUNT) s.target = (u64)s.part;
      if (s.goal == SHARE) s.target = share(s.part, total);
      if (s.goal == DRAW) {
        s.all = total;
        s.target = min(__double2ull_rz(__dmul_rn(s.part, __ull2double_rn(total))), total - 1) + 1;
      }
    }
    if (s.goal == COUNT && s.digit == 0 && total <= s.target) {  // all candidates are within it
      for (int i = 0; i < WORDS; i++) s.prefix[i] = s.mask[i] = 0;
      known = true;
    }
  }
  __syncthreads();
  if (known) return true;
  const u64 target = s.target;
  before += s.below;
  const Digit digit = digit_of(s.order, s.digit);
  __syncthreads();
  if (before < target && before + sum >= target) {  // true for one thread
    int j = 0;
#pragma unroll
    for (int i = 0; i < EACH - 1; i++) {
      if (j == i && before + sums[i] < target) before += sums[i], j++;
    }
    unsigned count = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i == j) count = counts[i];
    const unsigned bin = threadIdx.x * EACH + j;
    s.below = before;
    s.near = count;
    s.prefix[digit.word] |= bin << digit.shift;
    s.mask[digit.word] = ~0u << digit.shift;
    if (s.order == BY_AWAY && s.digit == 0) {
      s.mask[1] = known_away(bin, &s.prefix[1]);
      s.digit += s.mask[1] != 0;
    }
    s.digit++;
    known = digit.last || (count == 1 && s.order != BY_ID);
  }
  __syncthreads();
  return known;
}

// Finds the border among the listed candidates, whose words begin like it. Once they are as few as threads, each has one.
DEVICE void resolve_near(const Row& row, Wide& s, const Slope& slope, const float* x, const WideRow* memory, Histogram& h) {
  constexpr int AT_ONCE = 4;  // loads under way
  __shared__ unsigned few[WIDE_THREADS], found;
  const int count = (int)s.listed;
  const Cuts cuts = cuts_of(s);
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  for (;;) {
    const Digit digit = digit_of(s.order, s.digit);
    const bool last = s.near <= WIDE_THREADS;
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE * WIDE_THREADS) {
      unsigned ids[AT_ONCE];
      float v[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const int i = first + j * WIDE_THREADS + threadIdx.x;
        ids[j] = i < count ? fresh(memory->near + i) : ~0u;
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) v[j] = ids[j] != ~0u ? x[ids[j]] : 0.f;
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        unsigned bin = 0;
        u64 q = 0;
        const bool wanted = ids[j] != ~0u && digit_at(row, s, cuts, digit, candidate(slope, v[j], ids[j]), &bin, &q);
        if (!last) {
          add_to_bin(h, wanted, bin, q);
        } else if (wanted) {
          few[atomicAdd(&found, 1u)] = ids[j];
        }
      }
    }
    __syncthreads();
    if (last) break;
    if (resolve_digit(s, take_sums(h))) return;
  }
  const bool one = threadIdx.x < found;
  const unsigned id = one ? few[threadIdx.x] : 0;
  const Candidate c = candidate(slope, x[id], id);
  do {
    unsigned bin = 0;
    u64 q = 0;
    const bool wanted = one && digit_at(row, s, cuts, digit_of(s.order, s.digit), c, &bin, &q);
    add_to_bin(h, wanted, bin, q);
    __syncthreads();
  } while (!resolve_digit(s, take_sums(h)));
}

// Draws from the ids that begin like the border, one a thread.
DEVICE void resolve_id(const Row& row, Wide& s, const Slope& slope, const float* x) {
  const int id = (int)s.prefix[4] + threadIdx.x;
  u64 q = 0, all;
  if (id < row.size && key_of(x[id]) > NEG_INF) {
    const Candidate c = candidate(slope, x[id], id);
    if (is_kept(cuts_of(s), s, c)) q = weight_of(row, s, c);
  }
  const u64 before = s.below + scan_threads(q, &all);
  if (before < s.target && before + q >= s.target) s.prefix[4] = (unsigned)id, s.mask[4] = ~0u;  // true for one thread
  __syncthreads();
}

// Writes the list, sorted by (weight descending, place), into the answer.
DEVICE void report_list(const WideRow* memory, Answer* answer) {
  __shared__ Listed list[MOST_TOP];
  const int n = min((int)fresh(&memory->state.listed), MOST_TOP), i = threadIdx.x;
  if (i < n) list[i] = Listed{fresh(&memory->list[i].q), fresh(&memory->list[i].place)};
  __syncthreads();
  if (i < n) {
    int at = 0;
    for (int j = 0; j < n; j++) at += list[j].q > list[i].q || (list[j].q == list[i].q && list[j].place < list[i].place);
    answer->top_ids[at] = (unsigned)list[i].place;
    answer->top_weights[at] = list[i].q;
  }
  if (i == 0) answer->top = n;
  __syncthreads();
}

// Runs after a pass over all segments of a row, in the block that ended it: evaluates the pass and picks the next one.
DEVICE void resolve(const Row& row, Wide& s, const Slope& slope, const float* x, WideRow* memory, WideControl* control, Answer* answer,
                    int64_t* next, int limit, const Tail& tail, Histogram& h) {
  copy_state(&s, &memory->state);
  __syncthreads();
  bool more = false;
  if (s.op == SELECT) {
    more = !resolve_digit(s, take_sums(memory));
    if (more && s.order == BY_ID) {
      resolve_id(row, s, slope, x);
      more = false;
    }
  } else if (s.op == NEAR) {
    resolve_near(row, s, slope, x, memory, h);
  } else if (s.op == LIST) {
    report_list(memory, answer);
  } else if (s.op == BIN || s.op == REBIN) {
    more = resolve_bins(s, memory);
  } else if (s.op == SPREAD) {
    resolve_spread(s, memory);
  } else if (s.op == CURVE) {
    resolve_curve(row, s, memory, tail);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (more) {
      s.listed = 0;
      if (s.op == SELECT && s.near <= MOST_NEAR) s.op = NEAR;
    } else {
      if (s.op == SELECT || s.op == NEAR) take_border(s);
      advance(row, slope, s);
      if (s.op == DONE) {
        const Candidate c = candidate(slope, x[s.found], s.found);
        answer_token(answer, next, limit, s.found, weight_of(row, s, c), s.all);
        atomicSub(&control->active, 1u);
      }
    }
    s.arrived = 0;
    memory->state = s;
    __threadfence();
  }
}

// Two blocks an SM, all of them resident. A block takes neighbouring segments, so that it merges its sums once a row.
extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 2)
    sample_wide(const Row* rows, const float* shaped, WideRow* memory, WideControl* control, Answer* answers, int pitch, int count,
                int64_t* next, int limit, unsigned* tails) {
  __shared__ Histogram histogram;
  __shared__ Row row;
  __shared__ Wide state;
  __shared__ bool ended;
  clear_bins(histogram);
  pdl_wait();
  if (fresh(&control->active) == 0) return;  // constant until all blocks have arrived
  const int segments = (pitch + WIDE_SEGMENT - 1) / WIDE_SEGMENT, items = count * segments;
  const int each = (items + gridDim.x - 1) / gridDim.x, end = min(items, (int)(blockIdx.x + 1) * each);
  for (unsigned generation = 1;; generation++) {
    for (int item = blockIdx.x * each; item < end;) {
      const int r = item / segments, stop = min(end, (r + 1) * segments), first = item - r * segments;
      int base = first * WIDE_SEGMENT;
      item = stop;
      const int size = fresh(&rows[r].size), last = min(size, (stop - r * segments) * WIDE_SEGMENT);
      if (base >= last || fresh(&memory[r].state.op) == DONE) continue;  // uniform over the block: a row is ended by its last block
      const int mine = (last + WIDE_SEGMENT - 1) / WIDE_SEGMENT - first;
      __syncthreads();
      copy_state(&state, &memory[r].state);
      load_row(&row, rows + r);
      const float* x = shaped_logits(row, shaped, r, pitch);
      Slope slope = slope_of(row, 0);
      slope.peak = state.peak;
      unsigned* ids = tails ? tails + (size_t)r * 2 * pitch : nullptr;
      const Tail tail{ids, ids + pitch};
      if (state.op == SELECT) {
        if (state.order == BY_ID) {
          draw_pass(row, state, slope, x, base, last, histogram);
        } else {
          select_pass(row, state, slope, x, base, last, histogram);
        }
        __syncthreads();
        merge_bins(histogram, memory + r);
      } else if (state.op == NEAR) {
        near_pass(row, state, slope, x, base, last, memory + r, histogram);
      } else if (state.op == BIN || state.op == REBIN) {
        if (state.op == BIN) {
          bin_ids(state, slope, x, base, last, memory + r, tail.sorted, histogram);
        } else {
          bin_depths(state, base, last, tail.sorted, histogram);
        }
        merge_bins(histogram, memory + r);
      } else if (state.op == SPREAD) {
        spread_depths(state, base, last, memory + r, tail.sorted, tail.binned, histogram);
      } else if (state.op == SORT) {
        sort_bins(state, base, last, memory + r, tail, reinterpret_cast<Sorter&>(histogram));
        clear_bins(histogram);
      } else if (state.op == CURVE) {
        add_bends(state, base, last, memory + r, tail);
      } else {
        other_pass(row, state, slope, x, base, last, memory + r);
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0)
        ended = atomicAdd(&memory[r].state.arrived, mine) + mine == (unsigned)((size + WIDE_SEGMENT - 1) / WIDE_SEGMENT);
      __syncthreads();
      if (ended) {
        __threadfence();
        resolve(row, state, slope, x, memory + r, control, answers + r, next ? next + r : nullptr, limit, tail, histogram);
      }
    }
    if (synchronize(control, generation)) return;
  }
}

// ---- scale * logsoftmax(positive) + (1 - scale) * logsoftmax(negative), in three launches ----
// All logits of both rows take part, including padding: a NaN or +inf in one of them makes the whole mix NaN.

constexpr int MIX_THREADS = WIDE_THREADS;

DEVICE const float* mixed_row(const Row& row, int which) { return which ? row.negative : row.positive; }

// The largest key of each segment of both rows.
extern "C" __global__ void __launch_bounds__(MIX_THREADS) sample_mix_maxima(const Row* rows, int* maxima) {
  __shared__ Row row;
  load_row(&row, rows + blockIdx.y);
  const int base = blockIdx.x * SEGMENT;
  if (!row.negative || base >= row.width) return;
  for (int which = 0; which < 2; which++) {
    const float* x = mixed_row(row, which);
    int high = (int)0x80000000;
    for (int i = base + threadIdx.x; i < min(base + SEGMENT, row.width); i += MIX_THREADS) {
      const int bits = __float_as_int(x[i]);
      const bool bad = bits == 0x7f800000 || (bits & 0x7fffffff) > 0x7f800000;
      high = max(high, bad ? BAD : key_of(x[i]));
    }
    high = block_max<MIX_THREADS>(high);
    if (threadIdx.x == 0) maxima[blockIdx.y * MOST_BLOCKS + 2 * blockIdx.x + which] = high;
  }
}

DEVICE int mix_peak(const Row& row, const int* maxima, int which) {
  int high = (int)0x80000000;
  for (int i = threadIdx.x; i < (row.width + SEGMENT - 1) / SEGMENT; i += MIX_THREADS)
    high = max(high, maxima[blockIdx.y * MOST_BLOCKS + 2 * i + which]);
  return block_max<MIX_THREADS>(high);
}

// The weight of each segment of both rows.
extern "C" __global__ void __launch_bounds__(MIX_THREADS) sample_mix_sums(const Row* rows, const int* maxima, u64* sums) {
  __shared__ Row row;
  load_row(&row, rows + blockIdx.y);
  const int base = blockIdx.x * SEGMENT;
  if (!row.negative || base >= row.width) return;
  for (int which = 0; which < 2; which++) {
    const float* x = mixed_row(row, which);
    const Slope slope{from_key(mix_peak(row, maxima, which)), 1.f, 1.f, false};
    u64 sum = 0, all;
    for (int i = base + threadIdx.x; i < min(base + SEGMENT, row.width); i += MIX_THREADS) sum += weigh(slope, x[i]);
    scan_threads(sum, &all);
    if (threadIdx.x == 0) sums[blockIdx.y * MOST_BLOCKS + 2 * blockIdx.x + which] = all;
  }
}

// ln of the sum of e^x; NaN if the mix is NaN.
DEVICE double log_sum(const Row& row, const int* maxima, const u64* sums, int which) {
  const int peak = mix_peak(row, maxima, which);
  u64 sum = 0, all;
  for (int i = threadIdx.x; i < (row.width + SEGMENT - 1) / SEGMENT; i += MIX_THREADS) sum += sums[blockIdx.y * MOST_BLOCKS + 2 * i + which];
  scan_threads(sum, &all);
  if (peak == BAD || peak <= NEG_INF) return __longlong_as_double(0x7ff8000000000000ll);
  return __dadd_rn((double)from_key(peak), ln(__ddiv_rn(__ull2double_rn(all), 17592186044416.0)));
}

// The mix for the ids of the vocabulary, written to row.logits.
extern "C" __global__ void __launch_bounds__(MIX_THREADS)
    sample_mix(const Row* rows, const int* maxima, const u64* sums, float* shaped, int pitch) {
  __shared__ Row row;
  load_row(&row, rows + blockIdx.y);
  const int base = blockIdx.x * SEGMENT;
  if (!row.negative || base >= row.size) return;
  const double other = __dsub_rn(1.0, row.mix);
  const double ours = __dmul_rn(row.mix, log_sum(row, maxima, sums, 0));
  const double shift = __dadd_rn(ours, __dmul_rn(other, log_sum(row, maxima, sums, 1)));
  const bool broken = shift != shift;
  float* out = shaped + (size_t)blockIdx.y * pitch;
  for (int i = base + threadIdx.x; i < min(base + SEGMENT, row.size); i += MIX_THREADS) {
    const float a = row.positive[i];
    const double sum = __dadd_rn(__dmul_rn(row.mix, (double)a), __dmul_rn(other, (double)row.negative[i]));
    const float mixed = __double2float_rn(__dsub_rn(sum, shift));
    out[i] = a == __int_as_float(0xff800000) && !broken ? a : mixed;
  }
}
