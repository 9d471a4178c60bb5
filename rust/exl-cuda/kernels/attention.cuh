// Attention over pages (spec core 6.3, 6.5; performance 4.3), FP32 sums and softmax, half operands.
//
// One order of arithmetic, whatever the launch: keys in blocks of 64 from position 0, joined by the online softmax in order within
// splits of 256 keys, splits joined in order. A query row's numbers depend on nothing but its own position and its sequence's pages:
// not on the other rows of its tile (rows of a matrix product do not mix), on the batch, on the chunk, nor on which of the two kernels
// ran. `decode`: 16 query rows a block, one split of their keys; its four warps share the keys of a block of 64 for the logits and the
// dimensions for the sums; parts go to global memory and `attention_join` joins them. `prefill`: each warp has 16 query rows of its
// own, all keys and all dimensions; the block's warps share the stages, and join splits as they go.
#pragma once
#include "attention_join.cuh"
#include "attention_stage.cuh"

constexpr int KEY_BLOCK = 64, ROWS = 16;

// One kernel's shapes. SLOTS: stages in flight and in use.
template <int KEY_CODEC, int VALUE_CODEC, int DIM_, bool PREFILL_, int WARPS_, int SLOTS_>
struct Shape {
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, WARPS = WARPS_, SLOTS = SLOTS_;
  static constexpr bool PREFILL = PREFILL_, REGISTERS = DIM <= 128;
  static constexpr int TILES = DIM / 8 / (PREFILL ? 1 : WARPS);  // of eight dimensions, that a warp sums
  static constexpr int KEY_BYTES = key_stage_bytes<KC, DIM>(), VALUE_BYTES = value_stage_bytes<VC, DIM>();
  static constexpr int SLOT_BYTES = KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES;
  static constexpr int QUERY_STRIDE = 2 * DIM + 64, QUERY_BYTES = ROWS * QUERY_STRIDE;
  // Prefill, of a warp: queries, then totals; where queries move to registers, totals take their place.
  static constexpr int TOTAL_BYTES = ROWS * DIM * 4, TOTAL_AT = REGISTERS ? 0 : QUERY_BYTES;
  static constexpr int WARP_BYTES = TOTAL_AT + TOTAL_BYTES;
  static constexpr int KEYS_PER_WARP = STAGE / WARPS;
};

// The keys a run of tokens (neighbours of one sequence) looks at, and where they are.
struct Keys {
  const int* pages;
  const float* mask;
  int from, to;
};

// Page row of a key for this head, -1 where there is nothing to read.
DEVICE int locate(const Attention& a, const Keys& keys, int head, int key) {
  if (key < keys.from || key >= keys.to) return -1;
  if (keys.mask && keys.mask[key] == -INFINITY) return -1;
  const bool power = (a.page_size & (a.page_size - 1)) == 0;
  const int index = power ? key >> (__ffs(a.page_size) - 1) : key / a.page_size, page = keys.pages[index];
  return (unsigned)page < (unsigned)a.num_pages ? (page * a.page_size + key - index * a.page_size) * a.heads + head : -1;
}

// Ring of stages: keys, then values, of each block of 64.
template <class S>
struct Ring {
  const Attention& a;
  const Keys& keys;
  uint8_t* slots;
  int head, first_block, stages, issued = 0, issue_slot = 0, take_slot = 0, row;

  DEVICE Ring(const Attention& a, const Keys& keys, uint8_t* slots, int head, int first_block, int blocks)
      : a(a), keys(keys), slots(slots), head(head), first_block(first_block), stages(blocks * 2) {
    row = find(0);
#pragma unroll
    for (int i = 0; i < S::SLOTS - 1; i++) issue();
  }
  DEVICE int find(int block) const {
    const int key = (first_block + block) * KEY_BLOCK + (threadIdx.x >> 5) * S::KEYS_PER_WARP + threadIdx.x % S::KEYS_PER_WARP;
    return 2 * block < stages ? locate(a, keys, head, key) : -1;
  }
  // The next stage's copies; the rows of the next block are looked up one stage ahead.
  DEVICE void issue() {
    if (issued < stages) {
      uint8_t* to = slots + issue_slot * S::SLOT_BYTES;
      const int first = (threadIdx.x >> 5) * S::KEYS_PER_WARP;
      if (issued & 1) {
        copy_rows<S::VC, S::DIM, S::KEYS_PER_WARP>(to, value_stride<S::VC, S::DIM>(), first, a.value, a.value_scales, row, a.dim);
        row = find((issued + 1) / 2);
      } else {
        copy_rows<S::KC, S::DIM, S::KEYS_PER_WARP>(to, key_stride<S::KC, S::DIM>(), first, a.key, a.key_scales, row, a.dim);
      }
    }
    copy_commit();
    issued++;
    issue_slot = issue_slot + 1 == S::SLOTS ? 0 : issue_slot + 1;
  }
  // The oldest stage, once it is there; its predecessor's slot is filled anew. A barrier of the block.
  DEVICE const uint8_t* take() {
    copy_wait<S::SLOTS - 2>();
    __syncthreads();
    issue();
    const uint8_t* stage = slots + take_slot * S::SLOT_BYTES;
    take_slot = take_slot + 1 == S::SLOTS ? 0 : take_slot + 1;
    return stage;
  }
};

// Running softmax of a lane's two rows, g and g + 8. `sum` is the lane's share of four until `whole_sums`.
template <int TILES>
struct State {
  float max[2], sum[2], acc[TILES][4];
  DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < 2; r++) max[r] = -INFINITY, sum[r] = 0.f;
#pragma unroll
    for (int n = 0; n < TILES; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
  }
  DEVICE void whole_sums() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }
};

struct Visible {
  int from[2], to[2];
};

// logit -> scale, softcap -> mask; keys out of sight get -inf. Tile n holds keys first_key + 8n..8n+7.
template <int TILES>
DEVICE void finish_logits(const Attention& a, const Keys& keys, const Visible& seen, int first_key, float (&x)[TILES][4]) {
  const int t = threadIdx.x & 3;
  if (a.softcap > 0.f) {
    const float in_caps = a.scale / a.softcap;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) x[n][e] = a.softcap * tanhf(x[n][e] * in_caps);
  } else {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) x[n][e] *= a.scale;
  }
  const bool all = first_key >= max(seen.from[0], seen.from[1]) && first_key + 8 * TILES <= min(seen.to[0], seen.to[1]);
  if (all && !keys.mask) return;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int key = first_key + 8 * n + 2 * t + (e & 1), r = e >> 1;
      const bool in_sight = key >= seen.from[r] && key < seen.to[r];
      if (keys.mask && in_sight) x[n][e] += keys.mask[key];
      if (!in_sight) x[n][e] = -INFINITY;
    }
}

// A block's logits to weights (operand A of four products of 16 keys each); brings the state along. Without `upper`, rows 8 to 15
// of the tile are no queries.
template <int TILES>
DEVICE void softmax(State<TILES>& state, float (&x)[8][4], uint32_t (&weights)[4][4], bool upper) {
  float factor[2] = {1.f, 1.f};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (r == 1 && !upper) break;
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < 8; n++) most = fmaxf(most, fmaxf(x[n][2 * r], x[n][2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(most, state.max[r]);
    const float reference = most == -INFINITY ? 0.f : most;
    factor[r] = state.max[r] == most ? 1.f : weight_of(state.max[r], reference);
    state.max[r] = most;
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        x[n][2 * r + e] = weight_of(x[n][2 * r + e], reference);
        sums[e] += x[n][2 * r + e];
      }
    state.sum[r] = __fmaf_rn(state.sum[r], factor[r], sums[0] + sums[1]);
  }
  // Times one changes nothing, so leaving it out does not either.
  if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) state.acc[n][e] *= factor[e >> 1];
  }
#pragma unroll
  for (int s = 0; s < 4; s++) {
    weights[s][0] = as_word(__floats2half2_rn(x[2 * s][0], x[2 * s][1]));
    weights[s][2] = as_word(__floats2half2_rn(x[2 * s + 1][0], x[2 * s + 1][1]));
    weights[s][1] = upper ? as_word(__floats2half2_rn(x[2 * s][2], x[2 * s][3])) : 0u;
    weights[s][3] = upper ? as_word(__floats2half2_rn(x[2 * s + 1][2], x[2 * s + 1][3])) : 0u;
  }
}

// A block of 64 keys. `exchange`: shared memory in which decode's warps bring their logits together.
template <class S>
DEVICE void attend_block(Ring<S>& ring, State<S::TILES>& state, const Attention& a, const Keys& keys, const Visible& seen, int block,
                         const uint4 (*queries)[2], const uint8_t* query_rows, float4* exchange) {
  float x[8][4];
  uint32_t weights[4][4];
  if constexpr (S::PREFILL) {
    stage_logits<S::KC, S::DIM, S::REGISTERS>(x, ring.take(), 0, queries, query_rows);
    finish_logits(a, keys, seen, block * KEY_BLOCK, x);
    const uint8_t* values = ring.take();
    softmax(state, x, weights, true);
    stage_values<S::VC, S::DIM>(state.acc, values, 0, weights);
  } else {
    constexpr int SHARE = 8 / S::WARPS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float own[SHARE][4];
    stage_logits<S::KC, S::DIM, S::REGISTERS>(own, ring.take(), warp * SHARE * 8, queries, query_rows);
    finish_logits(a, keys, seen, block * KEY_BLOCK + warp * SHARE * 8, own);
#pragma unroll
    for (int n = 0; n < SHARE; n++) exchange[(warp * SHARE + n) * 32 + lane] = make_float4(own[n][0], own[n][1], own[n][2], own[n][3]);
    const uint8_t* values = ring.take();
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float4 v = exchange[n * 32 + lane];
      x[n][0] = v.x, x[n][1] = v.y, x[n][2] = v.z, x[n][3] = v.w;
    }
    softmax(state, x, weights, a.tile_heads * a.tile_tokens > 8);
    stage_values<S::VC, S::DIM>(state.acc, values, warp * S::TILES, weights);
  }
}

// Which query a row of the tile is; token -1: none.
struct Place {
  int token, head;
};
DEVICE Place place_of(const Attention& a, int row, int first_token, int end_token, int key_head, int head_tile) {
  const int token = first_token + row / a.tile_heads, head = head_tile * a.tile_heads + row % a.tile_heads;
  const bool there = row < a.tile_heads * a.tile_tokens && token < end_token && head < a.group;
  return {there ? token : -1, key_head * a.group + head};
}

DEVICE float load_query(const Attention& a, int64_t at) {
  if (a.element == 0) return __half2float(static_cast<const __half*>(a.q)[at]);
  if (a.element == 1) return __bfloat162float(static_cast<const __nv_bfloat16*>(a.q)[at]);
  return static_cast<const float*>(a.q)[at];
}

// Queries `begin` to `end` (rows of the 16 at `rows`) as halves in `key_order`, transformed where the keys are (H is its own inverse times 32).
template <class S>
DEVICE void load_queries(const Attention& a, uint8_t* rows, int begin, int end, int first_row, int first_token, int end_token,
                         int key_head, int head_tile) {
  const int lane = threadIdx.x & 31;
  __half* q = reinterpret_cast<__half*>(rows);
#pragma unroll 4
  for (int item = begin * (S::DIM / 64); item < end * (S::DIM / 64); item++) {
    const int row = item / (S::DIM / 64), e = item % (S::DIM / 64) * 64 + 2 * lane;
    const Place p = place_of(a, first_row + row, first_token, end_token, key_head, head_tile);
    float even = 0.f, odd = 0.f;
    if (p.token >= 0) {
      const int64_t at = ((int64_t)p.token * a.q_heads + p.head) * a.dim + e;
      if (e < a.dim) even = load_query(a, at), odd = load_query(a, at + 1);
      if (is_hadamard<S::KC>()) {
        butterflies<false>(even, odd);
        even *= 1.f / 32.f;
        odd *= 1.f / 32.f;
      }
    }
    __half* to = q + row * (S::QUERY_STRIDE / 2) + (e & ~7);
    to[key_order<S::KC>(e & 7)] = saturating_half(even);
    to[key_order<S::KC>((e & 7) + 1)] = saturating_half(odd);
  }
}

DEVICE int run_end(const Attention& a, int first, int end) {
  const int row = a.rows[first], lane = threadIdx.x & 31;
  for (int base = first; base < end; base += 32) {
    const int token = base + lane;
    const unsigned other = __ballot_sync(~0u, token >= end || a.rows[token] != row);
    if (other) return base + __ffs(other) - 1;
  }
  return end;
}

// The run's keys: the union of what its tokens see.
DEVICE Keys run_keys(const Attention& a, int first, int end) {
  const int row = a.rows[first];
  int from = 0x7fffffff, to = 0;
  if (row >= 0 && row < a.batch)
    for (int token = first + (threadIdx.x & 31); token < end; token += 32) {
      const int begin = visible_from(a, a.positions[token]), stop = visible_to(a, a.positions[token]);
      if (begin < stop) from = min(from, begin), to = max(to, stop);
    }
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    from = min(from, __shfl_xor_sync(~0u, from, o));
    to = max(to, __shfl_xor_sync(~0u, to, o));
  }
  const bool here = to > 0;
  return {a.block_table + (here ? (int64_t)row * a.max_pages : 0), here && a.key_mask ? a.key_mask + (int64_t)row * a.mask_width : nullptr,
          here ? from : 0, to};
}

template <class S>
DEVICE void split_to_memory(const Attention& a, const State<S::TILES>& state, const Place (&mine)[2], int split) {
  const int t = threadIdx.x & 3, warp = threadIdx.x >> 5;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (mine[r].token < 0) continue;
    const int64_t part = ((int64_t)mine[r].token * a.q_heads + mine[r].head) * a.splits + split;
    if (t == 0 && warp == 0) a.states[part] = make_float2(state.max[r], state.sum[r]);
    float2* to = reinterpret_cast<float2*>(a.parts + part * S::DIM) + warp * S::TILES * 4 + t;
#pragma unroll
    for (int n = 0; n < S::TILES; n++) to[n * 4] = make_float2(state.acc[n][2 * r], state.acc[n][2 * r + 1]);
  }
}

// total = total and the split just finished; totals lie in shared memory, each lane's own.
template <int TILES>
DEVICE void join_split(float4* total, float (&max)[2], float (&sum)[2], const State<TILES>& state) {
  const int lane = threadIdx.x & 31;
  float kept[2], added[2];
#pragma unroll
  for (int r = 0; r < 2; r++) join_factors(max[r], state.max[r], state.sum[r], kept[r], added[r]);
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = join_value(sum[r], kept[r], state.sum[r], added[r]);
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    float4 v = total[n * 32 + lane];
    v.x = join_value(v.x, kept[0], state.acc[n][0], added[0]);
    v.y = join_value(v.y, kept[0], state.acc[n][1], added[0]);
    v.z = join_value(v.z, kept[1], state.acc[n][2], added[1]);
    v.w = join_value(v.w, kept[1], state.acc[n][3], added[1]);
    total[n * 32 + lane] = v;
  }
}

// The warp's totals to `out`: by way of shared memory, rows in order of the dimension.
template <class S>
DEVICE void totals_to_out(const Attention& a, float4* total, const float (&sum)[2], const Place (&mine)[2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float4 v[S::DIM / 8];
#pragma unroll
  for (int n = 0; n < S::DIM / 8; n++) v[n] = total[n * 32 + lane];
  __syncwarp();
  float* rows = reinterpret_cast<float*>(total);
#pragma unroll
  for (int n = 0; n < S::DIM / 8; n++) {
    const int d0 = result_dim(S::VC == F16, n, 2 * t), d1 = result_dim(S::VC == F16, n, 2 * t + 1);
    rows[g * S::DIM + d0] = v[n].x;
    rows[g * S::DIM + d1] = v[n].y;
    rows[(g + 8) * S::DIM + d0] = v[n].z;
    rows[(g + 8) * S::DIM + d1] = v[n].w;
  }
  __syncwarp();
  for (int row = 0; row < ROWS; row++) {
    const int owner = (row & 7) * 4, half = row >> 3;
    const int token = __shfl_sync(~0u, half ? mine[1].token : mine[0].token, owner);
    const int head = __shfl_sync(~0u, half ? mine[1].head : mine[0].head, owner);
    const float whole = __shfl_sync(~0u, half ? sum[1] : sum[0], owner);
    if (token < 0) continue;
    for (int block = 0; block * 64 < a.dim; block++)
      result_to_out(a, rows + row * S::DIM, block, whole, ((int64_t)token * a.q_heads + head) * a.dim, is_hadamard<S::VC>());
  }
  __syncwarp();
}

// One run of tokens of a tile against its keys: in decode one split of them, in prefill all.
template <class S>
DEVICE void attend_run(const Attention& a, uint8_t* shared, int first, int run, int end, int key_head, int head_tile, int split) {
  const Keys keys = run_keys(a, run, end);
  int begin = keys.from / KEY_BLOCK, stop = (keys.to + KEY_BLOCK - 1) / KEY_BLOCK;
  if (!S::PREFILL) {
    begin = max(begin, split * (SPLIT / KEY_BLOCK));
    stop = min(stop, (split + 1) * (SPLIT / KEY_BLOCK));
    if (begin >= stop) return;
  }
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_row = S::PREFILL ? warp * ROWS : 0;
  uint8_t* rest = shared + S::SLOTS * S::SLOT_BYTES;
  uint8_t* own = rest + (S::PREFILL ? warp * S::WARP_BYTES : 0);
  float4* exchange = reinterpret_cast<float4*>(rest + S::QUERY_BYTES);
  Ring<S> ring(a, keys, shared, key_head, begin, max(stop - begin, 0));
  constexpr int SHARE = S::PREFILL ? ROWS : ROWS / S::WARPS;
  const int from_row = S::PREFILL ? 0 : warp * SHARE;
  load_queries<S>(a, own, from_row, from_row + SHARE, first_row, first, end, key_head, head_tile);
  __syncthreads();
  uint4 queries[S::REGISTERS ? S::DIM / 32 : 1][2];
  Place mine[2];
  Visible seen;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = (lane >> 2) + 8 * r;
    mine[r] = place_of(a, first_row + row, first, end, key_head, head_tile);
    if (mine[r].token < run) mine[r].token = -1;
    const int position = mine[r].token < 0 || keys.to == 0 ? -1 : a.positions[mine[r].token];
    seen.from[r] = visible_from(a, position);
    seen.to[r] = visible_to(a, position);
    if constexpr (S::REGISTERS)
#pragma unroll
      for (int j = 0; j < S::DIM / 32; j++) queries[j][r] = *reinterpret_cast<uint4*>(own + row * S::QUERY_STRIDE + (4 * j + (lane & 3)) * 16);
  }
  State<S::TILES> state;
  state.clear();
  if constexpr (!S::PREFILL) {
    for (int block = begin; block < stop; block++) attend_block(ring, state, a, keys, seen, block, queries, own, exchange);
    state.whole_sums();
    split_to_memory<S>(a, state, mine, split);
  } else {
    __syncwarp();
    float4* total = reinterpret_cast<float4*>(own + S::TOTAL_AT);
    float max_of[2] = {-INFINITY, -INFINITY}, sum_of[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < S::TILES; n++) total[n * 32 + lane] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int block = begin; block < stop; block++) {
      attend_block(ring, state, a, keys, seen, block, queries, own, nullptr);
      if ((block + 1) % (SPLIT / KEY_BLOCK) == 0 || block + 1 == stop) {
        state.whole_sums();
        join_split(total, max_of, sum_of, state);
        state.clear();
      }
    }
    totals_to_out<S>(a, total, sum_of, mine);
  }
  copy_wait<0>();
  __syncthreads();
}

// Grid: tiles of tokens, key heads x tiles of their query heads, splits (1 in prefill).
template <class S>
DEVICE void attention(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  pdl_wait();
  const int head_tiles = (a.group + a.tile_heads - 1) / a.tile_heads;
  // Later tokens see more keys: begin with them.
  const int tile = gridDim.x - 1 - blockIdx.x, first = tile * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
  for (int run = first; run < end;) {
    const int next = run_end(a, run, end);
    attend_run<S>(a, shared, first, run, next, blockIdx.y / head_tiles, blockIdx.y % head_tiles, blockIdx.z);
    run = next;
  }
}

#define ATTENTION(kind, KC, VC, DIM, MODE, PREFILL, WARPS, SLOTS, BLOCKS)                                  \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                       \
      attention_##kind##_##DIM##_##MODE(const __grid_constant__ Attention a) {                           \
    attention<Shape<KC, VC, DIM, PREFILL, WARPS, SLOTS>>(a);                                             \
  }
#define DECODE(kind, KC, VC, DIM, SLOTS, BLOCKS) ATTENTION(kind, KC, VC, DIM, decode, false, 4, SLOTS, BLOCKS)
#define PREFILL(kind, KC, VC, DIM, WARPS) ATTENTION(kind, KC, VC, DIM, prefill, true, WARPS, 3, 1)
