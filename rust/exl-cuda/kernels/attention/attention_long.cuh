// Attention of one token a sequence, for more keys than the resident clusters of attention_few.cuh hold. A block takes a whole split of
// eight units. One warp fetches as far ahead as there is room; each team of four warps works on its own unit. Splits join in the workspace.
// The order of arithmetic is the same, so results are bitwise identical.
#pragma once
#include "attention/attention_single.cuh"

template <class ELEMENT, int KEY_CODEC, int VALUE_CODEC, int DIM_, int COLUMN_TILES, int TEAMS_, bool PADDED_>
struct Long : Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 0> {
  using Element = ELEMENT;
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, NT = COLUMN_TILES, TEAMS = TEAMS_, WARPS = 4 * TEAMS, THREADS = 32 * WARPS;
  static constexpr int FETCHERS = 32, JOINED = 16, UNROLLED = 8, JOIN_ROUNDS = 1, COLUMNS = 8 * NT, MT = DIM / 64, BLOCKS = DIM / 64, ROW = DIM + 4;
  static constexpr bool REGISTERS = false, PADDED = PADDED_;
  // Queries; each team's weights and largest logits; own key and value; barriers; rows of results, one set a unit if teams share a split;
  // then the ring of units.
  static constexpr int QUERIES_AT = 0, WEIGHTS_AT = COLUMNS * DIM * 2, WEIGHT_BYTES = 4 * NT * 256, MAXIMA_AT = WEIGHTS_AT + TEAMS * WEIGHT_BYTES;
  static constexpr int MAXIMUM_BYTES = 4 * COLUMNS * 4, OWN_AT = MAXIMA_AT + TEAMS * MAXIMUM_BYTES;
  static constexpr int BARRIERS_AT = OWN_AT + packed_bytes<KC, DIM>() + packed_bytes<VC, DIM>(), ROWS_AT = BARRIERS_AT + 4 * 8 * SPLIT_UNITS;
  static constexpr int PARTS = TEAMS == 1 ? 1 : SPLIT_UNITS;
  DEVICE static constexpr int warps() { return WARPS; }
};

#if __CUDA_ARCH__ >= 900
// Makes the completion of this thread's pending copies count as its arrival.
DEVICE void copies_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Barriers of a slot: keys present, values present, keys consumed, values consumed.
struct Slots {
  uint32_t at;
  int count;
  DEVICE uint32_t full(int slot, int plane) const { return at + 8 * (2 * slot + plane); }
  DEVICE uint32_t empty(int slot, int plane) const { return at + 8 * (2 * (SPLIT_UNITS + slot) + plane); }
};

// For halves, limits the units in flight below the room in the ring: more loads in flight lower the memory throughput.
template <class S>
DEVICE void fewer_on_their_way() {
  if constexpr (S::KC == F16) {
    copy_commit();
    copy_wait<1>();
  }
}

template <class S>
DEVICE void fetch_split(const Attention& a, const Job& job, uint8_t* ring, const Slots& slots, int begin, int units) {
  const int lane = threadIdx.x & 31, page_of_lane = units > 0 ? job.pages[page_of(a, (begin + min(lane, units - 1)) * UNIT)] : 0;
  Turn turn;
#pragma unroll 1
  for (int i = 0; i < units; i++) {
    const Rows rows = rows_of(a, job, begin + i, __shfl_sync(~0u, page_of_lane, i));
    uint8_t* to = ring + turn.slot * S::UNIT_BYTES;
    if (i >= slots.count) barrier_wait(slots.empty(turn.slot, 0), turn.phase ^ 1);
    fewer_on_their_way<S>();
    fetch_keys<S>(a, job, to, rows, begin + i);
    copies_arrive(slots.full(turn.slot, 0));
    if (i >= slots.count) barrier_wait(slots.empty(turn.slot, 1), turn.phase ^ 1);
    fewer_on_their_way<S>();
    fetch_values<S>(a, job, to, rows, begin + i);
    copies_arrive(slots.full(turn.slot, 1));
    turn.advance(slots.count);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// If the previous matmul leaves four SMs free, the first blocks run there, two on each, and wait for the matmul. Meanwhile they prefetch
// keys and values of all heads of their sequence's first page into L2, at most `ahead` bytes of each. The loads of the other blocks, which
// start all at once, then hit L2.
constexpr int EARLY_BLOCKS = 8;
template <class S>
DEVICE void ask_ahead(const Attention& a, const Job& job) {
  constexpr int PIECE = 16384;
  if (!a.early || blockIdx.x >= EARLY_BLOCKS || blockIdx.y + blockIdx.z > 0) return;
  const int row = page_bytes<S, S::KC>(a), bytes = min(min(job.to, a.page_size) * a.heads * row, a.ahead), page = bytes > 0 ? job.pages[0] : -1;
  if ((unsigned)page >= (unsigned)a.num_pages) return;
  const int64_t first = (int64_t)page * a.page_size * a.heads * row;
#pragma unroll 1
  for (int at = (threadIdx.x & 31) * PIECE; at < bytes; at += 32 * PIECE) {
    const int size = min(PIECE, bytes - at);
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.key + first + at), "r"(size) : "memory");
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(a.value + first + at), "r"(size) : "memory");
  }
}

// In the racecheck build both teams use one barrier, the same number of times: the tool loses count of teams that synchronize separately.
template <class S>
constexpr bool TEAMS_SHARE_BARRIER = RACECHECK && S::TEAMS == 2;
template <class S>
DEVICE void team_meets(int team) {
  if constexpr (TEAMS_SHARE_BARRIER<S>) bar<9>(S::THREADS);
  else asm volatile("bar.sync %0, 128;" ::"r"(1 + team) : "memory");
}

// A team's unit, up to its weighted sums.
template <class S>
DEVICE void attend_unit_long(const Attention& a, const Job& job, Sums<S>& unit, uint8_t* shared, uint8_t* stage, const Slots& slots, Turn turn,
                             int team, int index) {
  const int lane = threadIdx.x & 31, key = index * UNIT + 16 * team_warp() + (lane >> 2);
  float* maxima = reinterpret_cast<float*>(shared + S::MAXIMA_AT + team * S::MAXIMUM_BYTES);
  uint2* weights = reinterpret_cast<uint2*>(shared + S::WEIGHTS_AT + team * S::WEIGHT_BYTES);
  float x[S::NT][4];
  barrier_wait(slots.full(turn.slot, 0), turn.phase);
  // The own key is added here and the own value further down: a slot's keys may be this unit's while the previous unit's values are still
  // read there.
  const bool home = job.fresh >= 0 && job.fresh / UNIT == index;
  const uint8_t* own = shared + S::OWN_AT;
  if (home && team_warp() == 0) bring_home<S::KC, S::DIM, key_stride<S::KC, S::DIM>()>(stage, own, job.fresh % UNIT);
  if (home || TEAMS_SHARE_BARRIER<S>) team_meets<S>(team);
  unit_logits<S>(x, stage, nullptr, reinterpret_cast<const uint4*>(shared + S::QUERIES_AT));
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
    scale_logits(a, x[j]);
#pragma unroll
    for (int i = 0; i < 4; i++) x[j][i] = key + 8 * (i >> 1) < job.to ? x[j][i] : -INFINITY;
  }
  warp_arrives(slots.empty(turn.slot, 0), lane);
  unit_maxima<S>(x, maxima);
  team_meets<S>(team);
  unit_weights<S>(unit, x, maxima, weights);
  team_meets<S>(team);
  barrier_wait(slots.full(turn.slot, 1), turn.phase);
  if (home && team_warp() == 0)
    bring_home<S::VC, S::DIM, value_stride<S::VC, S::DIM>()>(stage + S::KEY_BYTES, own + packed_bytes<S::KC, S::DIM>(), job.fresh % UNIT);
  if (home || TEAMS_SHARE_BARRIER<S>) team_meets<S>(team);
  unit_values<S>(unit, stage + S::KEY_BYTES, weights);
  warp_arrives(slots.empty(turn.slot, 1), lane);
}

// Grid: tokens, key heads, splits. `a.ring`: units in shared memory.
template <class S>
DEVICE void attention_long(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  if (!a.early) pdl_wait();
  const Job job(a, 0);
  const int split = blockIdx.z;
  const int units = (job.to + UNIT - 1) / UNIT, splits = (units + SPLIT_UNITS - 1) / SPLIT_UNITS, begin = split * SPLIT_UNITS;
  if (split > 0 && split >= splits) {
    if (a.early) pdl_wait();
    return;
  }
  const int of_split = min(units - begin, SPLIT_UNITS), warp = warp_index(), lane = threadIdx.x & 31;
  float* rows = reinterpret_cast<float*>(shared + S::ROWS_AT);
  uint8_t* ring = shared + (S::ROWS_AT + S::PARTS * a.group * S::ROW * 4 + 127) / 128 * 128;
  const Slots slots{shared_address(shared + S::BARRIERS_AT), a.ring};
  if (warp == S::WARPS) {
    if (lane < 2 * a.ring) {
      barrier_init(slots.at + 8 * lane, 32);
      barrier_init(slots.at + 8 * (2 * SPLIT_UNITS + lane), 4 * WARP_ARRIVALS);
    }
    barriers_visible();
    __syncwarp();
    bar_arrive<8>(S::THREADS + 32);
    if constexpr (S::KC == F16) ask_ahead<S>(a, job);
    fetch_split<S>(a, job, ring, slots, begin, of_split);
    return;
  }
  const Rotation<S> rotation(a, job.token);
  const bool own = job.fresh >= 0 && job.fresh / UNIT >= begin && job.fresh / UNIT < begin + of_split;
  const int64_t slot = own && a.slots ? a.slots[job.token] : -1;
  for (int i = threadIdx.x; i < S::COLUMNS * S::DIM / 8; i += S::THREADS) reinterpret_cast<uint4*>(shared + S::QUERIES_AT)[i] = make_uint4(0, 0, 0, 0);
  const float2 norms = load_norms<S>(a);
  const int before = own ? 2 : 0, items = a.group * S::BLOCKS;
  const unsigned *source = source_of<S>(a, job, warp, before), *second = source_of<S>(a, job, warp + S::WARPS, before);
  put_norms<S>(a, shared, norms);
  bar<9>(S::THREADS);
  if (a.early) pdl_wait();
  uint32_t raw[2][S::BLOCKS];
  load_items<S>(a, raw, source, second);
  prepare_items<S>(a, job, rotation, shared, own, -1, slot, raw);
  bar<8>(S::THREADS + 32);
  const int team = warp / 4;
  const uint32_t valid = (1u << a.group) - 1;
  Turn turn;
  turn.skip(team, a.ring);
  Sums<S> total;
  if constexpr (S::TEAMS == 1) total.clear();
#pragma unroll 1
  for (int i = team; i < of_split; i += S::TEAMS) {
    Sums<S> unit;
    attend_unit_long<S>(a, job, unit, shared, ring + turn.slot * S::UNIT_BYTES, slots, turn, team, begin + i);
    if constexpr (S::TEAMS == 1) total.join(unit);
    else unit.write(rows + i * a.group * S::ROW, valid);
    turn.skip(S::TEAMS, a.ring);
  }
  if (TEAMS_SHARE_BARRIER<S> && team == 1 && of_split % 2 == 1)
    for (int i = 0; i < 4; i++) team_meets<S>(team);
  if constexpr (S::TEAMS == 1) total.write(rows, valid);
  bar<9>(S::THREADS);
#pragma unroll 1
  for (int item = warp; item < items; item += S::WARPS) {
    const int row = item / S::BLOCKS, block = item % S::BLOCKS;
    const float* from = rows + row * S::ROW;
    Pair pair;
    if constexpr (S::TEAMS == 1) {
      pair.sums = *reinterpret_cast<const float2*>(from + block * 64 + 2 * lane);
      pair.max = from[S::DIM], pair.sum = from[S::DIM + 1];
    } else {
      const int stride = a.group * S::ROW;
      join_in_order<SPLIT_UNITS, S::JOIN_ROUNDS>(
          pair, of_split, [&](int k) { return *reinterpret_cast<const float2*>(from + k * stride + block * 64 + 2 * lane); },
          [&](int k) { return *reinterpret_cast<const float2*>(from + k * stride + S::DIM); });
    }
    if (splits > 1 && !join_splits<S>(a, pair, row, block, split, splits)) continue;
    store_item<S>(a, job, pair, item, nullptr);
  }
}
#else
template <class S>
DEVICE void attention_long(const Attention&) {}
#endif

#define LONG_KERNEL(name, ELEMENT, KC, VC, DIM, NT, TEAMS, PADDED)                                                      \
  extern "C" __global__ void __launch_bounds__(128 * TEAMS + 32, TEAMS == 1 ? 4 : 2) name(const __grid_constant__ Attention a) { \
    attention_long<Long<ELEMENT, KC, VC, DIM, NT, TEAMS, PADDED>>(a);                                                   \
  }
#define LONG(kind, element, ELEMENT, KC, VC, DIM, NT, TEAMS) \
  LONG_KERNEL(attention_##kind##_##element##_##DIM##_long##NT##x##TEAMS, ELEMENT, KC, VC, DIM, NT, TEAMS, false)
#define LONGS_OF(kind, element, ELEMENT, KC, VC, TEAMS)                                                                 \
  LONG(kind, element, ELEMENT, KC, VC, 64, 1, TEAMS) LONG(kind, element, ELEMENT, KC, VC, 64, 2, TEAMS)                 \
  LONG(kind, element, ELEMENT, KC, VC, 128, 1, TEAMS) LONG(kind, element, ELEMENT, KC, VC, 128, 2, TEAMS)               \
  LONG(kind, element, ELEMENT, KC, VC, 256, 1, TEAMS) LONG_WIDEST_##TEAMS(kind, element, ELEMENT, KC, VC)               \
  LONG_KERNEL(attention_##kind##_##element##_padded_long1x##TEAMS, ELEMENT, KC, VC, 128, 1, TEAMS, true)
#define LONG_WIDEST_1(kind, element, ELEMENT, KC, VC) LONG(kind, element, ELEMENT, KC, VC, 256, 2, 1)
#define LONG_WIDEST_2(kind, element, ELEMENT, KC, VC)  // two teams' results do not fit half of an SM's shared memory
#define LONGS(kind, KC, VC, TEAMS) LONGS_OF(kind, f16, __half, KC, VC, TEAMS) LONGS_OF(kind, bf16, __nv_bfloat16, KC, VC, TEAMS)
