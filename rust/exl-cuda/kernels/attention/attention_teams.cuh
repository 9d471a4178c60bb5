// Attention of one token a sequence in code for sm_80, sm_86 and sm_89, and for sm_100 and later: no clusters and no mbarriers. A block takes a
// whole split of eight units. Its one to four teams of four warps work on a unit each: team i of n takes units i, i + n, ... A team copies
// its own units with `cp.async`, keys and values as separate groups, into one or two slots. Named barriers order its warps.
//
// The teams join their units in order in one set of rows in shared memory: each waits for the team of the unit before. Splits join in the
// workspace. The order of arithmetic is that of attention_common.cuh, so results are bitwise identical to those of attention_decode.cuh.
#pragma once
#include "attention/attention_single.cuh"

template <class ELEMENT, int KEY_CODEC, int VALUE_CODEC, int DIM_, int COLUMN_TILES, bool PADDED_>
struct Teams : Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 0> {
  using Element = ELEMENT;
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, NT = COLUMN_TILES, THREADS = 128, FETCHERS = 128, JOINED = 16, UNROLLED = 8, JOIN_ROUNDS = 1;
  static constexpr int COLUMNS = 8 * NT, MT = DIM / 64, BLOCKS = DIM / 64, ROW = DIM + 4;
  static constexpr bool REGISTERS = false, PADDED = PADDED_;
  // Queries; own key and value; each team's weights and largest logits. Then rows of results and the teams' units.
  static constexpr int QUERIES_AT = 0, OWN_AT = COLUMNS * DIM * 2, WEIGHTS_AT = OWN_AT + packed_bytes<KC, DIM>() + packed_bytes<VC, DIM>();
  static constexpr int MAXIMA_OF_TEAM = 4 * NT * 256, TEAM_BYTES = MAXIMA_OF_TEAM + 4 * COLUMNS * 4;
  DEVICE static int warps() { return blockDim.x / 32; }
};

#if (__CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1000
constexpr int MOST_TEAMS = 4;
// The build for racecheck (see pipeline.cuh) has barriers of the whole block alone, since the tool loses count of teams that synchronize
// separately. All teams take as many of them in each round: three of a team, one before its next values, and one after each turn.
#ifdef EXL_EACH_LANE_ARRIVES
constexpr bool WHOLE_BLOCKS = true;
#else
constexpr bool WHOLE_BLOCKS = false;
#endif
constexpr int TEAM_BARRIERS = 4;
// One instruction for all callers, as whole_block_barrier() of pipeline.cuh.
__device__ __noinline__ void blocks_meet(int times) {
#pragma unroll 1
  for (int i = 0; i < times; i++) asm volatile("bar.sync 0;" ::: "memory");
}
// Waits until all warps of a team are here.
DEVICE void team_meets(int team) {
  if constexpr (WHOLE_BLOCKS) blocks_meet(1);
  else asm volatile("bar.sync %0, 128;" ::"r"(1 + team) : "memory");
}
// Waits until the team before has joined its unit, and lets the next team join.
DEVICE void wait_for_turn(int team) {
  if constexpr (WHOLE_BLOCKS) blocks_meet(team);
  else asm volatile("bar.sync %0, 256;" ::"r"(1 + MOST_TEAMS + team) : "memory");
}
DEVICE void pass_turn(int team, int teams) {
  if constexpr (WHOLE_BLOCKS) blocks_meet(teams - team);
  else asm volatile("bar.arrive %0, 256;" ::"r"(1 + MOST_TEAMS + (team + 1 == teams ? 0 : team + 1)) : "memory");
}

// Waits for the oldest group of copies. A team has two groups a slot in flight.
DEVICE void wait_for_copies(int slots) {
  if (slots == 1) copy_wait<1>();
  else copy_wait<3>();
}

// The split of a block, and the team that this thread belongs to.
struct TeamShare {
  int begin, units;  // first unit that the token sees, and number of units
  int from;          // first key that the token sees
  int team, teams;
  int page_of_lane;  // lane i: page of unit i
};

// The keys of a unit that a window does not hide.
struct SeenRows : Rows {
  int low;
  DEVICE bool has(int row) const { return row >= low && row < count; }
};
DEVICE SeenRows rows_of_unit(const Attention& a, const Job& job, const TeamShare& share, int i) {
  const int page = __shfl_sync(~0u, share.page_of_lane, min(i, SPLIT_UNITS - 1));
  return {rows_of(a, job, share.begin + i, page), share.from - (share.begin + i) * UNIT};
}

// Joins a unit with the units before it. A thread has the same elements of the rows in every team. The rows' states have two places: other
// warps of the team may still read the state before.
template <class S>
DEVICE void join_unit(const Sums<S>& unit, float* rows, int group, int index) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < S::NT; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = 8 * j + 2 * t + e;
      if (column >= group) continue;
      float* row = rows + column * S::ROW;
      float2 state = make_float2(-INFINITY, 0.f);
      if (index) state = *reinterpret_cast<const float2*>(row + S::DIM + 2 * (~index & 1));
      float kept, added;
      join_factors(state.x, unit.max[j][e], unit.sum[j][e], kept, added);
      state.y = join_value(state.y, kept, unit.sum[j][e], added);
      if ((threadIdx.x & 127) < 4) *reinterpret_cast<float2*>(row + S::DIM + 2 * (index & 1)) = state;
#pragma unroll
      for (int m = 0; m < S::MT; m++) {
        float *low = row + Sums<S>::dim_of(m, 0), *high = row + Sums<S>::dim_of(m, 1);
        *low = join_value(index ? *low : 0.f, kept, unit.acc[m][j][e], added);
        *high = join_value(index ? *high : 0.f, kept, unit.acc[m][j][2 + e], added);
      }
    }
}

// Attends a team's units of the split. `stages`: its slots. The own key and value are already in the `resident` units that the first copies
// brought; a later unit takes them from aside.
template <class S>
DEVICE void attend_units(const Attention& a, const Job& job, const TeamShare& share, uint8_t* shared, uint8_t* stages, float* rows) {
  const int lane = threadIdx.x & 31, team = share.team, teams = share.teams, resident = a.ring * teams;
  const int home = job.fresh >= 0 ? job.fresh / UNIT - share.begin : -1;
  uint2* weights = reinterpret_cast<uint2*>(shared + S::WEIGHTS_AT + team * S::TEAM_BYTES);
  float* maxima = reinterpret_cast<float*>(shared + S::WEIGHTS_AT + team * S::TEAM_BYTES + S::MAXIMA_OF_TEAM);
  const int end = WHOLE_BLOCKS ? (share.units + teams - 1) / teams * teams : share.units;
  int slot = 0;
#pragma unroll 1
  for (int i = team; i < end; i += teams) {
    if (WHOLE_BLOCKS && i >= share.units) {
      blocks_meet(TEAM_BARRIERS + teams);
      continue;
    }
    const int key = (share.begin + i) * UNIT + 16 * team_warp() + (lane >> 2), next = i + resident;
    const SeenRows later = rows_of_unit(a, job, share, next);
    const bool brings = i == home && i >= resident && team_warp() == 0;
    uint8_t* stage = stages + slot * S::UNIT_BYTES;
    float x[S::NT][4];
    Sums<S> unit;
    wait_for_copies(a.ring);
    if (brings) bring_home<S::KC, S::DIM, key_stride<S::KC, S::DIM>()>(stage, shared + S::OWN_AT, job.fresh % UNIT);
    team_meets(team);
    unit_logits<S>(x, stage, nullptr, reinterpret_cast<const uint4*>(shared + S::QUERIES_AT));
#pragma unroll
    for (int j = 0; j < S::NT; j++) {
      scale_logits(a, x[j]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int k = key + 8 * (e >> 1);
        if (k < share.from || k >= job.to) x[j][e] = -INFINITY;
      }
    }
    unit_maxima<S>(x, maxima);
    team_meets(team);
    if (next < share.units) fetch_keys<S>(a, job, stage, later, share.begin + next);
    copy_commit();
    unit_weights<S>(unit, x, maxima, weights);
    wait_for_copies(a.ring);
    if (brings)
      bring_home<S::VC, S::DIM, value_stride<S::VC, S::DIM>()>(stage + S::KEY_BYTES, shared + S::OWN_AT + packed_bytes<S::KC, S::DIM>(), job.fresh % UNIT);
    team_meets(team);
    unit_values<S>(unit, stage + S::KEY_BYTES, weights);
    if (WHOLE_BLOCKS || next < share.units) {
      team_meets(team);
      if (next < share.units) fetch_values<S>(a, job, stage, later, share.begin + next);
    }
    copy_commit();
    if (WHOLE_BLOCKS || (i > 0 && teams > 1)) wait_for_turn(team);
    join_unit<S>(unit, rows, a.group, i);
    if (WHOLE_BLOCKS || (i + 1 < share.units && teams > 1)) pass_turn(team, teams);
    slot ^= a.ring - 1;
  }
  copy_wait<0>();
}

// Stores a result. `places`: its rows in the input order of the next matmul. A matmul of eight columns reads none past its rows, so those
// are not written: for one row, that would be seven scattered stores for each that counts.
template <class S>
DEVICE void store_result(const Attention& a, const Job& job, const Pair& pair, int item, uint32_t places) {
  if (a.columns == FEW_ROWS) store_item<S, true>(a, job, pair, item, &places);
  else store_item<S>(a, job, pair, item, &places);
}

// Grid: tokens, key heads, splits. `a.ring`: slots of a team, one or two. All copies of the first units start before a warp waits for the
// queries.
template <class S>
DEVICE void attention_teams(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  pdl_wait();
  Job job(a, 0);
  const int warp = warp_index(), lane = threadIdx.x & 31, split = blockIdx.z;
  TeamShare share;
  share.from = visible_from(a, a.positions[job.token]);
  if (share.from >= job.to) share.from = job.to = 0, job.fresh = -1;
  const int units = (job.to + UNIT - 1) / UNIT, first = share.from / UNIT, first_split = first / SPLIT_UNITS;
  const int splits = (units + SPLIT_UNITS - 1) / SPLIT_UNITS - first_split;
  if (split > 0 && split >= splits) return;
  share.begin = max(first, (first_split + split) * SPLIT_UNITS);
  share.units = min(units, (first_split + split + 1) * SPLIT_UNITS) - share.begin;
  share.team = warp / 4, share.teams = S::warps() / 4;
  share.page_of_lane = share.units > 0 ? job.pages[page_of(a, (share.begin + min(lane, share.units - 1)) * UNIT)] : -1;
  // All loads are started before the copies, behind which they would queue.
  const Rotation<S> rotation(a, job.token);
  const int home = job.fresh >= 0 ? job.fresh / UNIT - share.begin : -1, resident = a.ring * share.teams, items = a.group * S::BLOCKS;
  const bool own = home >= 0 && home < share.units;
  const int64_t own_slot = own && a.slots ? a.slots[job.token] : -1;
  const float2 norms = load_norms<S>(a);
  uint32_t raw[2][S::BLOCKS];
  load_items<S>(a, raw, source_of<S>(a, job, warp, own ? 2 : 0), source_of<S>(a, job, warp + S::warps(), own ? 2 : 0));
  auto places_of = [&](int item) {
    const int feature = S::PADDED ? padded_feature<S>(a, job, item) : 64 * (job.key_head * items + item) + 2 * lane;
    return a.ordered && item < items && feature >= 0 ? ordered_rows(a, feature) : 0;
  };
  const uint32_t places = places_of(warp);
  const int rows_at = S::WEIGHTS_AT + share.teams * S::TEAM_BYTES, units_at = (rows_at + a.group * S::ROW * 4 + 127) / 128 * 128;
  float* rows = reinterpret_cast<float*>(shared + rows_at);
  uint8_t* stages = shared + units_at + share.team * a.ring * S::UNIT_BYTES;
#pragma unroll 1
  for (int slot = 0; slot < a.ring; slot++) {
    const int i = share.team + slot * share.teams;
    const SeenRows keys = rows_of_unit(a, job, share, i);
    if (i < share.units) fetch_keys<S>(a, job, stages + slot * S::UNIT_BYTES, keys, share.begin + i);
    copy_commit();
    if (i < share.units) fetch_values<S>(a, job, stages + slot * S::UNIT_BYTES, keys, share.begin + i);
    copy_commit();
  }
  for (int i = threadIdx.x; i < S::COLUMNS * S::DIM / 8; i += blockDim.x)
    if (i / 4 % S::COLUMNS >= a.group) reinterpret_cast<uint4*>(shared + S::QUERIES_AT)[i] = make_uint4(0, 0, 0, 0);
  if (share.units <= 0)
    for (int i = threadIdx.x; i < a.group * S::ROW; i += blockDim.x) rows[i] = 0.f;
  if (a.q_norm) {
    put_norms<S>(a, shared, norms);
    __syncthreads();
  }
  const int home_at = units_at + (home % share.teams * a.ring + home / share.teams) * S::UNIT_BYTES;
  prepare_items<S>(a, job, rotation, shared, own, own && home < resident ? home_at : -1, own_slot, raw);
  __syncthreads();
  attend_units<S>(a, job, share, shared, stages, rows);
  __syncthreads();
  const int state_at = S::DIM + 2 * (max(share.units - 1, 0) & 1);
#pragma unroll 1
  for (int item = warp; item < items; item += S::warps()) {
    const int row = item / S::BLOCKS, block = item % S::BLOCKS;
    const float* from = rows + row * S::ROW;
    Pair pair;
    pair.sums = *reinterpret_cast<const float2*>(from + block * 64 + 2 * lane);
    pair.max = from[state_at], pair.sum = from[state_at + 1];
    if (splits > 1 && !join_splits<S>(a, pair, row, block, split, splits)) continue;
    store_result<S>(a, job, pair, item, item == warp ? places : places_of(item));
  }
}
#else
template <class S>
DEVICE void attention_teams(const Attention&) {}
#endif

#define TEAMS_KERNEL(name, ELEMENT, KC, VC, DIM, NT, PADDED)                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) name(const __grid_constant__ Attention a) {     \
    attention_teams<Teams<ELEMENT, KC, VC, DIM, NT, PADDED>>(a);                                       \
  }
#define TEAMS(kind, element, ELEMENT, KC, VC, DIM, NT) \
  TEAMS_KERNEL(attention_##kind##_##element##_##DIM##_teams##NT, ELEMENT, KC, VC, DIM, NT, false)
#define ALL_TEAMS_OF(kind, element, ELEMENT, KC, VC)                                           \
  TEAMS(kind, element, ELEMENT, KC, VC, 64, 1) TEAMS(kind, element, ELEMENT, KC, VC, 64, 2)    \
  TEAMS(kind, element, ELEMENT, KC, VC, 128, 1) TEAMS(kind, element, ELEMENT, KC, VC, 128, 2)  \
  TEAMS(kind, element, ELEMENT, KC, VC, 256, 1) TEAMS(kind, element, ELEMENT, KC, VC, 256, 2)  \
  TEAMS_KERNEL(attention_##kind##_##element##_padded_teams1, ELEMENT, KC, VC, 128, 1, true)
#define ALL_TEAMS(kind, KC, VC) ALL_TEAMS_OF(kind, f16, __half, KC, VC) ALL_TEAMS_OF(kind, bf16, __nv_bfloat16, KC, VC)
