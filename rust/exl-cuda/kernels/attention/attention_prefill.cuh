// Attention of many tokens. Each warp has 16 query rows, all dimensions and all keys of its block; the block's warps share the stages. Units
// and splits join as they arrive. The arithmetic is that of attention_decode.cuh, with queries as rows of the matmuls.
//
// Several blocks may share a tile's keys. The first joins its splits as they arrive, the others write each split to the workspace, and
// `attention_join`, a launch of its own, joins these parts in order.
//
// The small kernels are for cards whose blocks have too little shared memory for the totals. They keep them in the workspace, as the first
// part of a tile; a warp reads and writes them once every eight units. The order of arithmetic is the same.
#pragma once
#include "attention/attention_queries.cuh"

constexpr int ROWS = 16;

template <int KEY_CODEC, int VALUE_CODEC, int DIM_, int WARPS_, bool SMALL_ = false>
struct Prefill : Stages<KEY_CODEC, VALUE_CODEC, DIM_, WARPS_, 0> {
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, WARPS = WARPS_, TILES = DIM / 8;
  static constexpr bool REGISTERS = DIM <= 128, SMALL = SMALL_;
  // Memory of a warp: queries, then totals. If queries move to registers, totals take their place.
  static constexpr int QUERY_BYTES = ROWS * DIM * 2, TOTAL_BYTES = ROWS * DIM * 4, TOTAL_AT = REGISTERS ? 0 : QUERY_BYTES;
  // Small kernels: queries, then 64 dimensions of results. If queries move to registers, this memory is that of the units, before the first
  // and after the last of them.
  static constexpr int BLOCK_BYTES = ROWS * 64 * 4, SMALL_BYTES = QUERY_BYTES > BLOCK_BYTES ? QUERY_BYTES : BLOCK_BYTES;
  static constexpr int WARP_BYTES = SMALL ? SMALL_BYTES : TOTAL_AT + TOTAL_BYTES;
  static constexpr bool BESIDE_UNITS = !SMALL || !REGISTERS;
};

// Running softmax of a lane's two rows, g and g + 8.
template <int TILES>
struct State {
  float max[2], sum[2], acc[TILES][4];
  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < 2; r++) max[r] = -INFINITY, sum[r] = 0.f;
#pragma unroll
    for (int n = 0; n < TILES; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
  }
};

struct Visible {
  int from[2], to[2];
};

// The units of a run that block `chunk` of a tile takes, and the parts that all its blocks write.
struct PromptShare {
  int from, to;
  int parts;  // of the run; 0: the first block has all keys and stores the result
  int slot;   // of this block's first part
  DEVICE PromptShare(const Attention& a, const Keys& keys, int chunk) {
    const int begin = keys.from / UNIT, stop = (keys.to + UNIT - 1) / UNIT;
    from = begin, to = chunk ? begin : stop, parts = 0, slot = 0;
    if (a.chunks == 1) return;
    const int first = begin / SPLIT_UNITS, splits = (stop + SPLIT_UNITS - 1) / SPLIT_UNITS - first;
    // The first block also takes the splits that the workspace has no room for.
    const int joined = max((splits + a.chunks - 1) / a.chunks, splits - (a.part_slots - 1));
    if (joined >= splits) return;
    const int each = (splits - joined + a.chunks - 2) / (a.chunks - 1), before = chunk ? joined + (chunk - 1) * each : 0;
    from = max(begin, (first + before) * SPLIT_UNITS);
    to = min(stop, (first + before + (chunk ? each : joined)) * SPLIT_UNITS);
    parts = 1 + splits - joined;
    slot = chunk ? 1 + before - joined : 0;
  }
};

// A part of 16 rows: a lane's sums in the layout of `State`, tile by tile, then the largest logits and the sums of weights of its two rows.
template <class S>
DEVICE float4* part_at(const Attention& a, int group, int warp, int slot) {
  return reinterpret_cast<float4*>(a.parts) + (((int64_t)group * S::WARPS + warp) * a.part_slots + slot) * (S::TILES + 1) * 32;
}
// Writes what belongs to rows that are `live`; other runs of the tile have the rest.
DEVICE void write_part(float4* part, int tile, const float4& v, const bool (&live)[2]) {
  float4* to = part + tile * 32 + (threadIdx.x & 31);
  if (live[0] && live[1]) *to = v;
  else if (live[0]) *reinterpret_cast<float2*>(to) = make_float2(v.x, v.y);
  else if (live[1]) *(reinterpret_cast<float2*>(to) + 1) = make_float2(v.z, v.w);
}
template <int TILES>
DEVICE void write_part(float4* part, const float (&max)[2], const float (&sum)[2], const float (&acc)[TILES][4], const bool (&live)[2]) {
#pragma unroll
  for (int n = 0; n < TILES; n++) write_part(part, n, make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]), live);
  write_part(part, TILES, make_float4(max[0], sum[0], max[1], sum[1]), live);
}

// Tile n holds keys first_key + 8n..8n+7; keys out of sight get -inf.
DEVICE void finish_logits(const Attention& a, const Keys& keys, const Visible& seen, int first_key, float (&x)[8][4]) {
  const int t = threadIdx.x & 3;
  const bool all = first_key >= max(seen.from[0], seen.from[1]) && first_key + UNIT <= min(seen.to[0], seen.to[1]);
#pragma unroll
  for (int n = 0; n < 8; n++) scale_logits(a, x[n]);
  if (all && !keys.mask) return;
#pragma unroll
  for (int n = 0; n < 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int key = first_key + 8 * n + 2 * t + (e & 1), r = e >> 1;
      const bool in_sight = key >= seen.from[r] && key < seen.to[r];
      x[n][e] = !in_sight ? -INFINITY : keys.mask ? masked(x[n][e], keys.mask[key]) : x[n][e];
    }
}

// Turns a unit's logits into weights (operand A of four matmuls of 16 keys each), with their reference and sum.
DEVICE void unit_softmax(float (&x)[8][4], uint32_t (&weights)[4][4], float (&max_of)[2], float (&sum_of)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < 8; n++) most = fmaxf(most, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    max_of[r] = most;
    const float reference = most == -INFINITY ? 0.f : most;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) x[n][2 * r + e] = weight_of(x[n][2 * r + e], reference);
  }
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int s = 0; s < 4; s++) {
    weights[s][0] = as_word(__floats2half2_rn(x[2 * s][0], x[2 * s][1]));
    weights[s][1] = as_word(__floats2half2_rn(x[2 * s][2], x[2 * s][3]));
    weights[s][2] = as_word(__floats2half2_rn(x[2 * s + 1][0], x[2 * s + 1][1]));
    weights[s][3] = as_word(__floats2half2_rn(x[2 * s + 1][2], x[2 * s + 1][3]));
    mma(sums, weights[s][0], weights[s][1], weights[s][2], weights[s][3], 0x3c003c00u, 0x3c003c00u);
  }
  sum_of[0] = sums[0];
  sum_of[1] = sums[2];
}

template <class S>
DEVICE void attend_unit(Ring<S>& ring, State<S::TILES>& split, const Attention& a, const Keys& keys, const Visible& seen, int index,
                        const uint4 (*queries)[2], const uint4* query_rows) {
  float x[8][4], max_of[2], sum_of[2], kept[2], added[2];
  uint32_t weights[4][4];
  stage_logits<S::KC, S::DIM, S::REGISTERS>(x, ring.take_keys(), queries, query_rows);
  finish_logits(a, keys, seen, index * UNIT, x);
  const uint8_t* values = ring.take_values();
  unit_softmax(x, weights, max_of, sum_of);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    join_factors(split.max[r], max_of[r], sum_of[r], kept[r], added[r]);
    split.sum[r] = join_value(split.sum[r], kept[r], sum_of[r], added[r]);
  }
  const bool same = __all_sync(~0u, kept[0] == 1.f && kept[1] == 1.f);
#pragma unroll
  for (int first = 0; first < S::TILES; first += 8) {
    float part[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.f;
    stage_values<S::VC, S::DIM>(part, values, first, weights);
    if (same) {
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) split.acc[first + n][e] = __fmaf_rn(part[n][e], added[e >> 1], split.acc[first + n][e]);
    } else {
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) split.acc[first + n][e] = join_value(split.acc[first + n][e], kept[e >> 1], part[n][e], added[e >> 1]);
    }
  }
}

// total = total joined with the split that just finished; tile n of a lane's totals is total[n * stride]. `put(n, tile)` stores a tile.
template <int TILES, class Put>
DEVICE void join_split(const float4* total, int stride, float (&max)[2], float (&sum)[2], const State<TILES>& split, Put put) {
  float kept[2], added[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    join_factors(max[r], split.max[r], split.sum[r], kept[r], added[r]);
    sum[r] = join_value(sum[r], kept[r], split.sum[r], added[r]);
  }
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    float4 v = total[n * stride];
    v.x = join_value(v.x, kept[0], split.acc[n][0], added[0]);
    v.y = join_value(v.y, kept[0], split.acc[n][1], added[0]);
    v.z = join_value(v.z, kept[1], split.acc[n][2], added[1]);
    v.w = join_value(v.w, kept[1], split.acc[n][3], added[1]);
    put(n, v);
  }
}
template <int TILES>
DEVICE void join_split(float4* total, int stride, float (&max)[2], float (&sum)[2], const State<TILES>& split) {
  join_split(total, stride, max, sum, split, [&](int n, const float4& v) { total[n * stride] = v; });
}

// Stores the warp's totals to `out`, or packed for a matmul, through shared memory, with rows in the order of the dimension: TILES tiles of eight dimensions from
// block `first_block` of 64 dimensions on.
template <class S, int TILES = S::TILES>
DEVICE void totals_to_out(const Attention& a, float4* total, const float (&sum)[2], const Place (&mine)[2], int first_block = 0) {
  constexpr int DIM = TILES * 8;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float4 v[TILES];
#pragma unroll
  for (int n = 0; n < TILES; n++) v[n] = total[n * 32 + lane];
  __syncwarp();
  float* rows = reinterpret_cast<float*>(total);
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    const int d0 = result_dim(S::VC == F16, n, 2 * t), d1 = result_dim(S::VC == F16, n, 2 * t + 1);
    rows[g * DIM + d0] = v[n].x;
    rows[g * DIM + d1] = v[n].y;
    rows[(g + 8) * DIM + d0] = v[n].z;
    rows[(g + 8) * DIM + d1] = v[n].w;
  }
  __syncwarp();
#pragma unroll 4
  for (int row = 0; row < ROWS; row++) {
    const int owner = (row & 7) * 4, half = row >> 3;
    const int token = __shfl_sync(~0u, half ? mine[1].token : mine[0].token, owner);
    const int head = __shfl_sync(~0u, half ? mine[1].head : mine[0].head, owner);
    const float inverse = inverse_of(__shfl_sync(~0u, half ? sum[1] : sum[0], owner));
    if (token < 0) continue;
    for (int block = first_block; block < first_block + DIM / 64 && block * 64 < a.dim; block++)
      result_to_out<true>(a, rows + row * DIM - first_block * 64, block, inverse, token, head, is_hadamard<S::VC>());
  }
  __syncwarp();
}

// Loads the rows of this warp, from the tile's row `first_row`, and passes each to `put(row of the warp, head, is it a query?)`. Eight
// loads are in flight at once.
template <class S, class Put>
DEVICE void load_rows(const Attention& a, int first_row, int first, int end, int key_head, int head_tile, Put put) {
#pragma unroll 1
  for (int base = 0; base < ROWS; base += 8) {
    Head<S::DIM> heads[8];
    bool live[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const Place p = place_of(a, first_row + base + i, first, end, key_head, head_tile);
      live[i] = p.token >= 0;
      heads[i].load(a, live[i] ? a.q : nullptr, (int64_t)p.token * a.q_stride + p.head * a.dim);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) put(base + i, heads[i], live[i]);
  }
}

// Stores a warp's totals, which are in the workspace, through `staged`: shared memory for 64 dimensions.
template <class S>
DEVICE void part_to_out(const Attention& a, const float4* total, float4* staged, const float (&sum)[2], const Place (&mine)[2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int block = 0; block < S::DIM / 64; block++) {
#pragma unroll
    for (int n = 0; n < 8; n++) staged[n * 32 + lane] = total[(8 * block + n) * 32 + lane];
    totals_to_out<S, 8>(a, staged, sum, mine, block);
  }
}

// Loads a warp's queries to `own`, and from there to registers if they have room.
template <class S>
DEVICE void load_queries(const Attention& a, uint8_t* own, uint4 (*queries)[2], int first_row, int first, int end, int key_head, int head_tile) {
  const int lane = threadIdx.x & 31;
  load_rows<S>(a, first_row, first, end, key_head, head_tile, [&](int row, Head<S::DIM>& head, bool live) {
    head.template put_query<S::KC>(reinterpret_cast<uint32_t*>(own) + row * 16, ROWS * 16, live);
  });
  __syncwarp();
  if constexpr (S::REGISTERS) {
#pragma unroll
    for (int j = 0; j < S::DIM / 32; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) queries[j][r] = reinterpret_cast<uint4*>(own)[j * 64 + 32 * r + lane];
    __syncwarp();
  }
}

// Attends one run of tokens of a tile to this block's share of its keys.
template <class S>
DEVICE void attend_run(const Attention& a, uint8_t* shared, int first, int run, int end, int key_head, int head_tile, int group) {
  const Keys keys = run_keys(a, run, end);
  const PromptShare share(a, keys, blockIdx.z);
  const int begin = share.from, stop = share.to;
  if (begin >= stop && blockIdx.z > 0) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_row = warp * ROWS;
  uint8_t* own = shared + (S::BESIDE_UNITS ? a.ring * S::UNIT_BYTES : 0) + warp * S::WARP_BYTES;
  uint4 queries[S::REGISTERS ? S::DIM / 32 : 1][2];
  if constexpr (!S::BESIDE_UNITS) {
    load_queries<S>(a, own, queries, first_row, first, end, key_head, head_tile);
    __syncthreads();
  }
  Ring<S> ring(a, keys, shared, nullptr, key_head, begin, max(stop - begin, 0));
  if constexpr (S::BESIDE_UNITS) load_queries<S>(a, own, queries, first_row, first, end, key_head, head_tile);
  Place mine[2];
  Visible seen;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    mine[r] = place_of(a, first_row + (lane >> 2) + 8 * r, first, end, key_head, head_tile);
    if (mine[r].token < run) mine[r].token = -1;
    const int position = mine[r].token < 0 || keys.to == 0 ? -1 : a.positions[mine[r].token];
    seen.from[r] = visible_from(a, position);
    seen.to[r] = visible_to(a, position);
  }
  const bool live[2] = {mine[0].token >= 0, mine[1].token >= 0};
  float4* part = part_at<S>(a, group, warp, share.slot);
  float4* total = S::SMALL ? part_at<S>(a, group, warp, 0) : reinterpret_cast<float4*>(own + S::TOTAL_AT);
  const auto put_total = [&](int n, const float4& v) {
    if constexpr (S::SMALL) write_part(total, n, v, live);
    else total[n * 32 + lane] = v;
  };
  float max_of[2] = {-INFINITY, -INFINITY}, sum_of[2] = {0.f, 0.f};
  // Blocks with a later slot have no total; the workspace at this place is another block's.
  if (!S::SMALL || !share.slot)
#pragma unroll
    for (int n = 0; n < S::TILES; n++) put_total(n, make_float4(0.f, 0.f, 0.f, 0.f));
  State<S::TILES> split;
  split.clear();
  for (int index = begin; index < stop; index++) {
    attend_unit<S>(ring, split, a, keys, seen, index, queries, reinterpret_cast<const uint4*>(own));
    if ((index + 1) % SPLIT_UNITS == 0 || index + 1 == stop) {
      if (share.slot) {
        write_part(part, split.max, split.sum, split.acc, live);
        part += (S::TILES + 1) * 32;
      } else {
        join_split(total + lane, 32, max_of, sum_of, split, put_total);
      }
      split.clear();
    }
    ring.unit_done();
  }
  if (!S::BESIDE_UNITS && !share.parts) {
    copy_wait<0>();
    __syncthreads();
  }
  if (!share.parts) {
    if constexpr (S::SMALL) part_to_out<S>(a, total, reinterpret_cast<float4*>(own), sum_of, mine);
    else totals_to_out<S>(a, total, sum_of, mine);
  } else if (!share.slot) {
    if constexpr (!S::SMALL)
#pragma unroll
      for (int n = 0; n < S::TILES; n++) write_part(part, n, total[n * 32 + lane], live);
    write_part(part, S::TILES, make_float4(max_of[0], sum_of[0], max_of[1], sum_of[1]), live);
  }
  copy_wait<0>();
  __syncthreads();
}

// Grid: tiles of tokens, key heads x tiles of their query heads, blocks that share a tile's keys.
template <class S>
DEVICE void attention_prefill(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  pdl_wait();
  const int head_tiles = (a.group + a.tile_heads - 1) / a.tile_heads;
  // Later tokens see more keys, so begin with them.
  const int tile = gridDim.x - 1 - blockIdx.x, first = tile * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
  for (int run = first; run < end;) {
    const int next = run_end(a, run, end);
    attend_run<S>(a, shared, first, run, next, blockIdx.y / head_tiles, blockIdx.y % head_tiles, tile * gridDim.y + blockIdx.y);
    run = next;
  }
}

// Joins the parts of a tile's runs and stores the results; a warp has 16 rows and 64 dimensions. Grid: as for the launch that wrote the
// parts, but a block for each of its warps.
template <class S>
DEVICE void attention_join(const Attention& a) {
  constexpr int TILES = 8;
  __shared__ float4 totals[S::DIM / 64][TILES * 32];
  pdl_trigger();
  pdl_wait();
  const int head_tiles = (a.group + a.tile_heads - 1) / a.tile_heads, key_head = blockIdx.y / head_tiles, head_tile = blockIdx.y % head_tiles;
  const int first = blockIdx.x * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
  const int block = warp_index(), lane = threadIdx.x & 31, first_row = blockIdx.z * ROWS;
  for (int run = first; run < end;) {
    const int next = run_end(a, run, end);
    const PromptShare share(a, run_keys(a, run, next), 0);
    Place mine[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      mine[r] = place_of(a, first_row + (lane >> 2) + 8 * r, first, next, key_head, head_tile);
      if (mine[r].token < run) mine[r].token = -1;
    }
    run = next;
    if (!share.parts || __all_sync(~0u, mine[0].token < 0 && mine[1].token < 0)) continue;
    const float4* part = part_at<S>(a, blockIdx.x * gridDim.y + blockIdx.y, blockIdx.z, 0);
    float4 total[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) total[n] = part[(block * TILES + n) * 32 + lane];
    const float4 begin = part[S::TILES * 32 + lane];
    float max[2] = {begin.x, begin.z}, sum[2] = {begin.y, begin.w};
#pragma unroll 2
    for (int i = 1; i < share.parts; i++) {
      part += (S::TILES + 1) * 32;
      State<TILES> split;
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const float4 v = part[(block * TILES + n) * 32 + lane];
        split.acc[n][0] = v.x, split.acc[n][1] = v.y, split.acc[n][2] = v.z, split.acc[n][3] = v.w;
      }
      const float4 state = part[S::TILES * 32 + lane];
      split.max[0] = state.x, split.sum[0] = state.y, split.max[1] = state.z, split.sum[1] = state.w;
      join_split(total, 1, max, sum, split);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) totals[block][n * 32 + lane] = total[n];
    totals_to_out<S, TILES>(a, totals[block], sum, mine, block);
  }
}

#define PREFILL(kind, KC, VC, DIM, WARPS)                                                                                  \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) attention_##kind##_##DIM##_prefill(const __grid_constant__ Attention a) { \
    attention_prefill<Prefill<KC, VC, DIM, WARPS>>(a);                                                                     \
  }                                                                                                                        \
  extern "C" __global__ void __launch_bounds__(DIM / 2, 1) attention_##kind##_##DIM##_join(const __grid_constant__ Attention a) { \
    attention_join<Prefill<KC, VC, DIM, WARPS>>(a);                                                                        \
  }
#define PREFILLS(kind, KC, VC) PREFILL(kind, KC, VC, 64, 8) PREFILL(kind, KC, VC, 128, 8) PREFILL(kind, KC, VC, 256, 4)
#define PREFILL_SMALL(kind, KC, VC, DIM, WARPS)                                                                                    \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) attention_##kind##_##DIM##_small_prefill(const __grid_constant__ Attention a) { \
    attention_prefill<Prefill<KC, VC, DIM, WARPS, true>>(a);                                                                       \
  }
