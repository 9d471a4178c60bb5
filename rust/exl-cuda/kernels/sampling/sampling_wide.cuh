// Sampling of rows whose candidates do not fit sample_choose's table: each row runs a program of passes over all logits.
//
// Nothing is sorted but the weights of a tail-free cut. A cut keeps a prefix of a total order, so its last candidate defines it. Radix
// selection finds that candidate digit by digit. A pass adds the weights of the candidates of each value of a digit. The digit at which the
// sum reaches the target weight belongs to the border. Sums are integers, so their order does not matter. Once few candidates have the
// border's digits, a pass lists them, and one block finds the others.
#pragma once
#include "sampling/sampling_math.cuh"
#include "sampling/sampling_table.cuh"

constexpr int BINS = 2048;         // values of a digit
constexpr int WIDE_THREADS = 512;  // of sample_wide
constexpr int WIDE_SEGMENT = 1024; // ids that a block takes at a time

// Orders of candidates, ascending. Each is read as five words of 32 bits: a coarse word of 11 bits, two words of the value, the key and the
// id.
enum Order { BY_PLACE, BY_AWAY, BY_WEIGHT, BY_ID };
constexpr int WORDS = 5;
enum Goal { COUNT, SHARE, DRAW };
enum Op { DONE, MEASURE, SELECT, NEAR, EXCLUDE, LIST, FIND, LAST, BIN, REBIN, SPREAD, SORT, CURVE };
// The transforms in their order: the position of a row's program.
enum Stage {
  AT_TOP_K, AT_TOP_P, AT_TOP_A, TOP_A_MEASURED, AT_TFS, TFS_BINNED, TFS_SPREAD, TFS_SORTED, TFS_CURVED, TFS_ENDED,
  AT_TYPICAL, TYPICAL_MEASURED, AT_MIROSTAT, MIROSTAT_MEASURED, AT_LATE, LATE_MEASURED,
  AT_XTC, XTC_MEASURED, XTC_EXCLUDED, AT_REPORT, REPORT_SELECTED, REPORT_LISTED, AT_DRAW, DRAWN, FOUND
};

struct Listed {
  u64 q, place;
};

struct Wide {
  // sums of a pass
  u64 total, surprise, first, last, excluded;
  unsigned seen, alive, chosen, arrived, listed, found, near;
  // The pass.
  int op, stage, order, goal, digit;
  double part;
  u64 target, below;
  unsigned prefix[WORDS], mask[WORDS];
  // The candidates that are kept: up to a place, of at least a weight, and within a distance of the entropy.
  unsigned border_bin, away_bin;
  u64 border, least, away, away_place;
  double expected;
  bool typical, tail_tied;
  // Weights of the kept candidates.
  bool late_on, xtc_on;
  float highest, late, peak;
  u64 xtc_least, xtc_last, all;
  double gain, loss;
  // A tail-free cut: its candidates are those down to a depth, so many; bits of a depth below its bin. `tail_tied`: the last one of the
  // least weight is cut.
  unsigned tail_deepest, tail_count, tail_shift;
};

// Candidates at a border that one block tells apart. As many as a value of a first digit has of 128,256 logits of deviation 1.
constexpr int MOST_NEAR = 8192;

// Memory of a row: its state, then the weight and the number of candidates of each value of a digit, zero between passes.
struct WideRow {
  Wide state;
  Listed list[MOST_TOP];
  u64 sums[BINS];
  unsigned counts[BINS];
  union {
    unsigned near[MOST_NEAR];  // ids of the candidates at a border
    unsigned starts[BINS];     // place of the first candidate of each bin of a tail-free cut
  };
};

// Depths of the candidates of a row's tail-free cut (sampling_tail.cuh): by bins, and in order.
struct Tail {
  unsigned* binned;
  unsigned* sorted;
};
ABI_SIZE(WideRow, 58640); ABI_AT(WideRow, state, 0); ABI_AT(WideRow, list, 272); ABI_AT(WideRow, sums, 1296);
ABI_AT(WideRow, counts, 17680); ABI_AT(WideRow, near, 25872);

// State of a launch: rows that are not done, and the barrier of all blocks.
struct WideControl {
  unsigned active, arrived, passed, padding;
};
ABI_SIZE(WideControl, 16); ABI_AT(WideControl, active, 0); ABI_AT(WideControl, arrived, 4); ABI_AT(WideControl, passed, 8);
ABI_AT(WideControl, padding, 12);

struct Candidate {
  float l;
  u64 place, q;
};

// ---- weights as numbers of 28 bits ----

constexpr unsigned DEEPEST = (1u << 28) - 1;
constexpr unsigned FULL_WEIGHT = 0x3f800000u;  // bits of 1.f
constexpr unsigned WIDEST_SHIFT = 17;          // bits of a depth below its bin, if all depths have one
static_assert(DEEPEST >> WIDEST_SHIFT == BINS - 1, "one bin each");

// A weight of at least 2^-32 as a number that grows as the weight falls.
DEVICE unsigned depth_of(float w) { return min(FULL_WEIGHT - __float_as_uint(w), DEEPEST); }
DEVICE u64 weight_at_depth(unsigned depth) { return fixed(__uint_as_float(FULL_WEIGHT - depth)); }

// The depth of the least weight of at least `least`, at most 2^44.
DEVICE unsigned deepest_of(u64 least) {
  constexpr float UNIT = 1.f / 17592186044416.f;  // 2^-44, the unit of weights
  const float near = __ull2float_rn(least);
  const unsigned up = __float2ull_rz(near) < least;  // the next larger float
  return FULL_WEIGHT - (__float_as_uint(__fmul_rn(near, UNIT)) + up);
}

// The coarse words are coarse enough that a segment has few different ones, each of which costs an addition in memory that all blocks
// share. They are fine enough that few candidates share one.
DEVICE unsigned bin_of(float l) {  // 16 a unit of log-weight, the most likely first
  const float place = __fmul_rn(-l, 16.f);
  return place < BINS - 1 ? (unsigned)place : BINS - 1;
}
DEVICE unsigned bin_of_weight(u64 q) {  // 8 an octave, the largest weights first; rounding to float keeps the order
  constexpr unsigned LOWEST = 127 << 3;
  const unsigned bits = __float_as_uint(__ull2float_rn(q)) >> 20;
  return BINS - 1 - min(max(bits, LOWEST) - LOWEST, (unsigned)BINS - 1);
}
DEVICE u64 away_of(const Wide& s, float l) { return (u64)__double_as_longlong(fabs(__dsub_rn(-(double)l, s.expected))); }
DEVICE unsigned bin_of_away(u64 away) {
  return (unsigned)fmin(__dmul_rn(__longlong_as_double((long long)away), 16.0), (double)(BINS - 1));
}
// All distances in a bin other than the first and the last share sign and exponent. Returns a mask of the bits of the upper word that this
// determines.
DEVICE unsigned known_away(unsigned bin, unsigned* prefix) {
  constexpr unsigned DIGIT = ~0u << 21;  // a whole digit; the exponent's last bit belongs to the next one
  if (bin == 0 || bin == BINS - 1) return 0;
  *prefix = (unsigned)__double2hiint((double)bin / 16.0) & DIGIT;
  return DIGIT;
}

// The cuts that every candidate is compared with. They are read once a pass: the state is in shared memory.
struct Cuts {
  u64 border, least;
  unsigned border_bin;
  bool typical;
};
DEVICE Cuts cuts_of(const Wide& s) { return Cuts{s.border, s.least, s.border_bin, s.typical}; }

DEVICE bool is_kept(const Cuts& cuts, const Wide& s, const Candidate& c) {
  const unsigned bin = bin_of(c.l);
  if (bin > cuts.border_bin || (bin == cuts.border_bin && c.place > cuts.border) || c.q < cuts.least) return false;
  if (!cuts.typical) return true;
  const u64 away = away_of(s, c.l);
  const unsigned far = bin_of_away(away);
  if (far != s.away_bin) return far < s.away_bin;
  return away != s.away ? away < s.away : c.place <= s.away_place;
}

// A candidate's weight at this stage; c.q is its initial weight.
DEVICE u64 weight_of(const Row& row, const Wide& s, const Candidate& c) {
  u64 q = s.late_on ? fixed(weight(__fmul_rn(__fsub_rn(c.l, s.highest), s.late))) : c.q;
  if (!s.xtc_on) return q;
  const unsigned id = (unsigned)c.place;
  const bool ignored = id / 32 < (unsigned)row.ignored_words && (row.ignored[id / 32] >> (id % 32) & 1);
  const bool out = q >= s.xtc_least && !ignored && c.place != s.xtc_last;
  return __double2ull_rz(__dmul_rn(__ull2double_rn(q), out ? s.loss : s.gain));
}

DEVICE Candidate candidate(const Slope& slope, float x, unsigned id) {
  const float l = log_weight(slope, x);
  return Candidate{l, place_of(x, id), fixed(weight(l))};
}

// The first digit of a candidate's words.
DEVICE unsigned first_digit(const Wide& s, const Candidate& c, u64 q) {
  if (s.order == BY_ID) return (unsigned)c.place >> 9;
  if (s.order == BY_PLACE) return bin_of(c.l);
  return s.order == BY_AWAY ? bin_of_away(away_of(s, c.l)) : bin_of_weight(q);
}

DEVICE void words_of(const Wide& s, const Candidate& c, u64 q, unsigned (&w)[WORDS]) {
  w[0] = w[1] = w[2] = w[3] = 0;
  w[4] = (unsigned)c.place;
  if (s.order == BY_ID) return;
  w[3] = (unsigned)(c.place >> 32);
  if (s.order == BY_PLACE) {
    w[0] = bin_of(c.l);
    return;
  }
  const u64 value = s.order == BY_AWAY ? away_of(s, c.l) : ~q;
  w[0] = s.order == BY_AWAY ? bin_of_away(value) : bin_of_weight(q);
  w[1] = (unsigned)(value >> 32);
  w[2] = (unsigned)value;
}

// The word and the lowest bit of a digit, and whether it is the order's last digit. Digits have 11 bits; the lowest digit of a word has 10,
// and the two of an id have 10 and 9. Passes over ids end with the first of these, which leaves as many ids as a block has threads.
struct Digit {
  int word, shift;
  bool last;
};
DEVICE Digit digit_of(int order, int number) {
  if (order == BY_ID) return Digit{4, 9, false};
  if (number == 0) return Digit{0, 0, false};
  const int n = number - 1 + (order == BY_PLACE ? 6 : 0);
  if (n >= 9) return Digit{4, n == 9 ? 9 : 0, n == 10};
  return Digit{1 + n / 3, n % 3 == 0 ? 21 : n % 3 == 1 ? 10 : 0, false};
}

// ---- a row's program: one thread; each function ends where a pass is needed ----

DEVICE void ask(Wide& s, int op, int stage) {
  s.op = op;
  s.stage = stage;
  s.total = s.surprise = s.last = s.excluded = 0;
  s.first = ~0ull;
  s.seen = s.alive = s.chosen = s.listed = 0;
}
DEVICE void ask_for(Wide& s, Order order, Goal goal, double part, int stage) {
  ask(s, SELECT, stage);
  s.order = order;
  s.goal = goal;
  s.part = part;
  s.digit = 0;
  s.below = 0;
  for (int i = 0; i < WORDS; i++) {
    // Words that an order does not use are known: they are zero.
    const bool known = order == BY_ID ? i < 4 : order == BY_PLACE && (i == 1 || i == 2);
    s.mask[i] = known ? ~0u : 0;
    s.prefix[i] = 0;
  }
}
// Keeps candidates of at least this weight; if none is left, the first one.
DEVICE void keep_least(Wide& s, const Slope& slope, double least, u64 first) {
  const Candidate best = candidate(slope, logit_at(first), (unsigned)first);
  const u64 wanted = __double2ull_rz(ceil(least));
  if (wanted <= best.q) {
    s.least = max(s.least, wanted);
  } else {
    s.border_bin = bin_of(best.l);
    s.border = first;
  }
}
DEVICE u64 last_of(unsigned prefix, unsigned mask) { return prefix | ~mask; }
DEVICE u64 last_place(const Wide& s) { return last_of(s.prefix[3], s.mask[3]) << 32 | last_of(s.prefix[4], s.mask[4]); }
DEVICE float late_scale(const Row& row, u64 surprise, int alive, u64 total) {
  const double expected = __ddiv_rn(__ull2double_rn(surprise), __ull2double_rn(total));
  double most = ln((double)max(alive, 1));
  if (!(most > 0.0)) most = 1.0;
  const double entropy = __dadd_rn(ln(__ddiv_rn(__ull2double_rn(total), 17592186044416.0)), expected);
  const double part = fmin(fmax(__ddiv_rn(entropy, most), 0.0), 1.0);
  const double t = __dadd_rn(row.low, __dmul_rn(__dsub_rn(row.high, row.low), power(part, row.exponent)));
  return __double2float_rn(__ddiv_rn(1.0, fmax(t, 1e-4)));
}

// Keeps candidates up to a place, unless the border of an earlier cut is nearer.
DEVICE void keep_up_to(Wide& s, unsigned bin, u64 place) {
  if (bin < s.border_bin) {
    s.border_bin = bin;
    s.border = place;
  } else if (bin == s.border_bin) {
    s.border = min(s.border, place);
  }
}

// The cuts, up to the pass that the next cut needs.
DEVICE void cut(const Row& row, const Slope& slope, Wide& s) {
  for (;;) {
    switch (s.stage) {
      case AT_TOP_K:
        if (row.top_k) return ask_for(s, BY_PLACE, COUNT, row.top_k, AT_TOP_P);
        s.stage = AT_TOP_P;
        break;
      case AT_TOP_P:
        if (row.top_p > 0.0) return ask_for(s, BY_PLACE, SHARE, row.top_p, AT_TOP_A);
        s.stage = AT_TOP_A;
        break;
      case AT_TOP_A:
        if (row.top_a > 0.0 || row.min_p > 0.0) return ask(s, MEASURE, TOP_A_MEASURED);
        s.stage = AT_TFS;
        break;
      case TOP_A_MEASURED: {
        const double high = __ull2double_rn(candidate(slope, logit_at(s.first), 0).q);
        if (row.top_a > 0.0)
          keep_least(s, slope, __ddiv_rn(__dmul_rn(__dmul_rn(row.top_a, high), high), __ull2double_rn(s.total)), s.first);
        if (row.min_p > 0.0) keep_least(s, slope, __dmul_rn(row.min_p, high), s.first);
        s.stage = AT_TFS;
        break;
      }
      case AT_TFS:
        if (row.tfs > 0.0) {
          s.tail_shift = WIDEST_SHIFT;
          return ask(s, BIN, TFS_BINNED);
        }
        s.stage = AT_TYPICAL;
        break;
      case TFS_BINNED: return ask(s, SPREAD, TFS_SPREAD);
      case TFS_SPREAD:
        if (s.tail_count >= 3) return ask(s, SORT, TFS_SORTED);
        s.stage = AT_TYPICAL;  // fewer have no curve
        break;
      case TFS_SORTED: return ask(s, CURVE, TFS_CURVED);
      case TFS_CURVED:
        if (s.tail_tied) return ask(s, LAST, TFS_ENDED);
        s.stage = AT_TYPICAL;
        break;
      case TFS_ENDED:
        keep_up_to(s, bin_of(log_weight(slope, logit_at(s.last))), s.last - 1);
        s.stage = AT_TYPICAL;
        break;
      case AT_TYPICAL:
        if (row.typical > 0.0) return ask(s, MEASURE, TYPICAL_MEASURED);
        s.stage = AT_MIROSTAT;
        break;
      case TYPICAL_MEASURED:
        s.expected = __ddiv_rn(__ull2double_rn(s.surprise), __ull2double_rn(s.total));
        return ask_for(s, BY_AWAY, SHARE, row.typical, AT_MIROSTAT);
      case AT_MIROSTAT:
        if (row.mirostat > 0.0) return ask(s, MEASURE, MIROSTAT_MEASURED);
        s.stage = AT_LATE;
        break;
      case MIROSTAT_MEASURED:
        keep_least(s, slope, __dmul_rn(row.mirostat, __ull2double_rn(s.total)), s.first);
        s.stage = AT_LATE;
        break;
      default: return;
    }
  }
}

// Late temperature and XTC, then the report and the draw.
DEVICE void weigh_again(const Row& row, const Slope& slope, Wide& s) {
  for (;;) {
    switch (s.stage) {
      case AT_LATE:
        // A draw over all logits has its late temperature in the slope.
        if (!(row.flags & PLAIN) && row.flags & (LATE_FIXED | LATE_DYNAMIC)) return ask(s, MEASURE, LATE_MEASURED);
        s.stage = AT_XTC;
        break;
      case LATE_MEASURED:
        s.late = row.flags & LATE_DYNAMIC ? late_scale(row, s.surprise, (int)s.alive, s.total) : row.late_scale;
        s.highest = log_weight(slope, logit_at(s.first));
        s.late_on = true;
        s.stage = AT_XTC;
        break;
      case AT_XTC:
        if (row.xtc_probability > 0.0) return ask(s, MEASURE, XTC_MEASURED);
        s.stage = AT_REPORT;
        break;
      case XTC_MEASURED:
        s.all = s.total;
        s.xtc_least = __double2ull_rz(ceil(__dmul_rn(row.xtc_threshold, __ull2double_rn(s.total))));
        return ask(s, EXCLUDE, XTC_EXCLUDED);
      case XTC_EXCLUDED:
        s.stage = AT_REPORT;
        if (s.chosen >= 2) {
          const u64 spared = weight_of(row, s, candidate(slope, logit_at(s.last), (unsigned)s.last));
          const u64 excluded = s.excluded - spared;
          const double rest = __ull2double_rn(s.all - excluded);
          if (rest != 0.0) {
            s.gain = __dadd_rn(1.0, __ddiv_rn(__dmul_rn(row.xtc_probability, __ull2double_rn(excluded)), rest));
            s.loss = __dsub_rn(1.0, row.xtc_probability);
            s.xtc_last = s.last;
            s.xtc_on = true;
          }
        }
        break;
      case AT_REPORT:
        if (row.top_n) return ask_for(s, BY_WEIGHT, COUNT, row.top_n, REPORT_SELECTED);
        s.stage = AT_DRAW;
        break;
      case REPORT_SELECTED: return ask(s, LIST, REPORT_LISTED);
      case REPORT_LISTED: s.stage = AT_DRAW; break;
      case AT_DRAW: return ask_for(s, row.flags & DESCENDING ? BY_WEIGHT : BY_ID, DRAW, row.uniform, DRAWN);
      case DRAWN:
        if (s.mask[4] != ~0u) return ask(s, FIND, FOUND);
        s.found = s.prefix[4];
        s.stage = FOUND;
        break;
      default: s.op = DONE; return;
    }
  }
}

DEVICE void advance(const Row& row, const Slope& slope, Wide& s) {
  if (s.stage < AT_LATE) cut(row, slope, s);
  if (s.stage >= AT_LATE) weigh_again(row, slope, s);
}

// Keeps candidates up to the border that a selection found.
DEVICE void take_border(Wide& s) {
  if (s.order == BY_PLACE) {
    // A selection that ended early knows only the first digits of its border.
    keep_up_to(s, (unsigned)last_of(s.prefix[0], s.mask[0]), last_place(s));
  } else if (s.order == BY_AWAY) {
    s.away_bin = (unsigned)last_of(s.prefix[0], s.mask[0]);
    s.away = last_of(s.prefix[1], s.mask[1]) << 32 | last_of(s.prefix[2], s.mask[2]);
    s.away_place = last_place(s);
    s.typical = true;
  }
}

// Begins a row's program in one thread. `memory` of the row and of the launch is zero except for states.
DEVICE void begin_wide(const Row& row, WideRow* memory, WideControl* control, int peak) {
  Wide s{};
  s.peak = from_key(peak);
  s.border_bin = ~0u;
  s.border = ~0ull;
  s.stage = AT_TOP_K;
  advance(row, slope_of(row, peak), s);
  memory->state = s;
  atomicAdd(&control->active, 1);
}
