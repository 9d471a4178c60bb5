// Attention of few tokens. A block takes a share of one tile's keys; its four warps work on one unit together; the last block of a tile
// joins the parts that the other blocks wrote. Keys are rows of the matmuls and queries are columns, so that 8 or 16 queries fill a tile.
//
// In a unit, warp w computes the logits and weights of keys 16 w .. 16 w + 15. Shared memory passes the weights to all warps, and each warp
// sums a quarter of the dimensions.
#pragma once
#include "attention/attention_queries.cuh"

template <int KEY_CODEC, int VALUE_CODEC, int DIM_, int COLUMN_TILES>
struct Decode : Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 106496> {
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, NT = COLUMN_TILES, WARPS = 4, COLUMNS = 8 * NT;
  static constexpr int MT = DIM / 64;                // tiles of sixteen dimensions that a warp sums
  static constexpr bool REGISTERS = DIM * NT <= 256;  // queries stay in registers
  static constexpr int ROW = DIM + 4;                // floats of a row of results: sums, largest logit, sum of weights
  // After the ring: queries, weights, largest logits, own key and value, scratch rows. At the end: rows of results.
  static constexpr int WEIGHTS_AT = COLUMNS * DIM * 2, MAXIMA_AT = WEIGHTS_AT + 4 * NT * 256, OWN_AT = MAXIMA_AT + 4 * COLUMNS * 4;
  static constexpr int SCRATCH_AT = OWN_AT + packed_bytes<KC, DIM>() + packed_bytes<VC, DIM>();
  // For joining: a part's staged share, four dimensions a thread, and the state and factors of each of its rows.
  static constexpr int OF_ROW = DIM / 4, PART_ROWS = 32 * WARPS / OF_ROW, PART_BYTES = 16 * 32 * WARPS + 32 * PART_ROWS;
};

// Index of this warp among the four that work on a unit together.
DEVICE int team_warp() { return threadIdx.x >> 5 & 3; }

// Running softmax and sums. Element [j][e] is column 8 j + 2 t + e; acc[m][j]: dimensions `dim_of(m, 0)` in elements 0, 1, `dim_of(m, 1)` in 2, 3.
template <class S>
struct Sums {
  float max[S::NT][2], sum[S::NT][2], acc[S::MT][S::NT][4];
  DEVICE void clear() {
#pragma unroll
    for (int j = 0; j < S::NT; j++) max[j][0] = max[j][1] = -INFINITY, sum[j][0] = sum[j][1] = 0.f;
#pragma unroll
    for (int m = 0; m < S::MT; m++)
#pragma unroll
      for (int j = 0; j < S::NT; j++) acc[m][j][0] = acc[m][j][1] = acc[m][j][2] = acc[m][j][3] = 0.f;
  }
  DEVICE void join(const Sums& part) {
#pragma unroll
    for (int j = 0; j < S::NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float kept, added;
        join_factors(max[j][e], part.max[j][e], part.sum[j][e], kept, added);
        sum[j][e] = join_value(sum[j][e], kept, part.sum[j][e], added);
#pragma unroll
        for (int m = 0; m < S::MT; m++) {
          acc[m][j][e] = join_value(acc[m][j][e], kept, part.acc[m][j][e], added);
          acc[m][j][2 + e] = join_value(acc[m][j][2 + e], kept, part.acc[m][j][2 + e], added);
        }
      }
  }
  DEVICE static int dim_of(int m, int i) {
    const int g = threadIdx.x >> 2 & 7;
    return team_warp() * 16 * S::MT + (S::VC == F16 ? 16 * m + g + 8 * i : 2 * S::MT * g + 2 * m + i);
  }
  // Writes column `column` to row `column` of `rows`. `valid`: bit c says that column c exists.
  DEVICE void write(float* rows, uint32_t valid) const {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int j = 0; j < S::NT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 8 * j + 2 * t + e;
        if (!(valid >> column & 1)) continue;
        float* row = rows + column * S::ROW;
        if ((threadIdx.x & 127) < 4) *reinterpret_cast<float2*>(row + S::DIM) = make_float2(max[j][e], sum[j][e]);
#pragma unroll
        for (int m = 0; m < S::MT; m++) {
          if constexpr (S::VC == F16) row[dim_of(m, 0)] = acc[m][j][e], row[dim_of(m, 1)] = acc[m][j][2 + e];
          else *reinterpret_cast<float2*>(row + dim_of(m, 0)) = make_float2(acc[m][j][e], acc[m][j][2 + e]);
        }
      }
  }
};

// The keys that this lane's columns see, and the keys that all columns of the tile see.
template <class S>
struct Sight {
  int from[S::NT][2], to[S::NT][2], all_from, all_to;
};

DEVICE uint32_t transposed(uint32_t pair) {
#if __CUDA_ARCH__ >= 750
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
#endif
}

template <class S>
DEVICE void unit_logits(float (&x)[S::NT][4], const uint8_t* stage, const uint4 (*queries)[S::NT], const uint4* query_words) {
  constexpr int STRIDE = key_stride<S::KC, S::DIM>();
  const int warp = team_warp(), lane = threadIdx.x & 31, row = 16 * warp + (lane >> 2);
#pragma unroll
  for (int j = 0; j < S::NT; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
  uint32_t low[S::KC == F16 ? 4 : S::DIM / 8], high[S::KC == F16 ? 4 : S::DIM / 8];
  if constexpr (S::KC != F16) {
    const __half* scales = reinterpret_cast<const __half*>(stage + STAGE * STRIDE) + row * (S::DIM / 32);
    key_words<S::KC, S::DIM>(low, stage + row * STRIDE, scales);
    key_words<S::KC, S::DIM>(high, stage + (row + 8) * STRIDE, scales + 8 * (S::DIM / 32));
  }
#pragma unroll
  for (int s = 0; s < S::DIM / 16; s++) {
    uint32_t k[4];
    if constexpr (S::KC == F16) {
      load_matrices<false>(k, stage + (16 * warp + (lane & 15)) * STRIDE + s * 32 + (lane >> 4) * 16);
    } else {
      k[0] = low[2 * s], k[1] = high[2 * s], k[2] = low[2 * s + 1], k[3] = high[2 * s + 1];
    }
#pragma unroll
    for (int j = 0; j < S::NT; j++) {
      const uint4 q = S::REGISTERS ? queries[s / 2][j] : query_words[(s / 2 * S::COLUMNS + 8 * j) * 4 + lane];
      mma(x[j], k[0], k[1], k[2], k[3], s & 1 ? q.z : q.x, s & 1 ? q.w : q.y);
    }
  }
}

template <class S>
DEVICE void unit_values(Sums<S>& unit, const uint8_t* stage, const uint2* weights) {
  constexpr int STRIDE = value_stride<S::VC, S::DIM>();
  constexpr uint32_t ONES = 0x3c003c00u;
  const int warp = team_warp(), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float total[S::NT][4];
#pragma unroll
  for (int j = 0; j < S::NT; j++) total[j][0] = total[j][1] = total[j][2] = total[j][3] = 0.f;
#pragma unroll
  for (int m = 0; m < S::MT; m++)
#pragma unroll
    for (int j = 0; j < S::NT; j++) unit.acc[m][j][0] = unit.acc[m][j][1] = unit.acc[m][j][2] = unit.acc[m][j][3] = 0.f;
#pragma unroll
  for (int s = 0; s < 4; s++) {
    uint32_t v[S::MT][4];
    if constexpr (S::VC == F16) {
#pragma unroll
      for (int m = 0; m < S::MT; m++)
        load_matrices<true>(v[m], stage + (16 * s + (lane & 7) + (lane >> 4) * 8) * STRIDE + ((warp * S::MT + m) * 16 + (lane >> 3 & 1) * 8) * 2);
    } else {
      constexpr int COUNT = 2 * S::MT;
      const int key = 16 * s + 2 * t, dim = warp * 16 * S::MT + COUNT * g;
      const uint8_t* at = stage + key * STRIDE + dim * unit_bytes<S::VC>() / 8;
      uint32_t one[COUNT], two[COUNT];
      value_pairs<S::VC>(one, at, at + STRIDE, value_scale<S::VC, S::DIM>(stage, key, dim / 32));
      value_pairs<S::VC>(two, at + 8 * STRIDE, at + 9 * STRIDE, value_scale<S::VC, S::DIM>(stage, key + 8, dim / 32));
#pragma unroll
      for (int m = 0; m < S::MT; m++) v[m][0] = one[2 * m], v[m][1] = one[2 * m + 1], v[m][2] = two[2 * m], v[m][3] = two[2 * m + 1];
    }
#pragma unroll
    for (int j = 0; j < S::NT; j++) {
      const uint2 w = weights[(s * S::NT + j) * 32 + lane];
      mma(total[j], ONES, ONES, ONES, ONES, w.x, w.y);
#pragma unroll
      for (int m = 0; m < S::MT; m++) mma(unit.acc[m][j], v[m][0], v[m][1], v[m][2], v[m][3], w.x, w.y);
    }
  }
#pragma unroll
  for (int j = 0; j < S::NT; j++) unit.sum[j][0] = total[j][0], unit.sum[j][1] = total[j][1];
}

// The largest of this warp's logits of each column, shared with all four warps.
template <class S>
DEVICE void unit_maxima(const float (&x)[S::NT][4], float* maxima) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
    float most[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      most[e] = fmaxf(x[j][e], x[j][2 + e]);
#pragma unroll
      for (int o = 4; o < 32; o *= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], o));
    }
    if (lane < 4) *reinterpret_cast<float2*>(maxima + team_warp() * S::COLUMNS + 8 * j + 2 * lane) = make_float2(most[0], most[1]);
  }
}
// The unit's largest logits, from those of the four warps, and its weights where `unit_values` reads them.
template <class S>
DEVICE void unit_weights(Sums<S>& unit, float (&x)[S::NT][4], const float* maxima, uint2* weights) {
  const int warp = team_warp(), lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float2 most = *reinterpret_cast<const float2*>(maxima + w * S::COLUMNS + 8 * j + 2 * t);
      unit.max[j][0] = w ? fmaxf(unit.max[j][0], most.x) : most.x;
      unit.max[j][1] = w ? fmaxf(unit.max[j][1], most.y) : most.y;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float reference = unit.max[j][e] == -INFINITY ? 0.f : unit.max[j][e];
      x[j][e] = weight_of(x[j][e], reference);
      x[j][2 + e] = weight_of(x[j][2 + e], reference);
    }
    weights[(warp * S::NT + j) * 32 + lane] = make_uint2(transposed(as_word(__floats2half2_rn(x[j][0], x[j][1]))),
                                                         transposed(as_word(__floats2half2_rn(x[j][2], x[j][3]))));
  }
}

template <class S>
DEVICE void attend_unit(const Attention& a, const Keys& keys, Ring<S>& ring, Sums<S>& unit, const Sight<S>& sight, int index,
                        const uint4 (*queries)[S::NT], uint8_t* rest) {
  const int key = index * UNIT + 16 * team_warp() + ((threadIdx.x & 31) >> 2);
  float* maxima = reinterpret_cast<float*>(rest + S::MAXIMA_AT);
  uint2* weights = reinterpret_cast<uint2*>(rest + S::WEIGHTS_AT);
  const bool all = index * UNIT >= sight.all_from && (index + 1) * UNIT <= sight.all_to && !keys.mask;
  float x[S::NT][4];
  unit_logits<S>(x, ring.take_keys(), queries, reinterpret_cast<const uint4*>(rest));
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
    scale_logits(a, x[j]);
    if (!all)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = key + 8 * (i >> 1);
        const bool seen = k >= sight.from[j][i & 1] && k < sight.to[j][i & 1];
        x[j][i] = !seen ? -INFINITY : keys.mask ? masked(x[j][i], keys.mask[k]) : x[j][i];
      }
  }
  unit_maxima<S>(x, maxima);
  const uint8_t* values = ring.take_values();  // its barrier makes the maxima visible to all threads
  unit_weights<S>(unit, x, maxima, weights);
  __syncthreads();
  unit_values<S>(unit, values, weights);
}

// The units of a run that this block takes, the number of blocks, and the number of parts that they write.
struct Share {
  int from, to, active, parts;
  bool by_unit;
  DEVICE Share(const Attention& a, int begin, int stop) {
    const int units = stop - begin, first = begin / SPLIT_UNITS, splits = (stop + SPLIT_UNITS - 1) / SPLIT_UNITS - first, chunk = blockIdx.z;
    const int share = units <= a.chunks ? 1 : (units + a.chunks - 1) / a.chunks;
    by_unit = a.chunks > 1 && units <= UNIT_PARTS && share < SPLIT_UNITS;
    if (by_unit) {
      from = begin + chunk * share;
      to = min(from + share, stop);
      active = share == 1 ? units : (units + share - 1) / share;
      parts = units;
    } else {
      const int each = splits <= a.chunks ? 1 : (splits + a.chunks - 1) / a.chunks;
      from = max(begin, (first + chunk * each) * SPLIT_UNITS);
      to = min(stop, (first + (chunk + 1) * each) * SPLIT_UNITS);
      active = each == 1 ? splits : a.chunks == 1 ? min(splits, 1) : (splits + each - 1) / each;
      parts = splits;
    }
  }
};

// The factors that join a row's parts, one lane a part: of this part into its split (`kept`, `added`), and of its split into the total.
// Lane 0 is at the beginning of a split; a missing part has -inf and 0. `before`: the largest logit of all earlier parts.
DEVICE float4 part_factors(float2 state, bool by_unit, float& before) {
  const int lane = threadIdx.x & 31, width = by_unit ? SPLIT_UNITS : 1;
  float most = state.x;
#pragma unroll
  for (int o = 1; o < SPLIT_UNITS; o *= 2) {
    const float other = __shfl_up_sync(~0u, most, o);
    if (lane % width >= o) most = fmaxf(most, other);
  }
  float earlier = __shfl_up_sync(~0u, most, 1);
  if (lane % width == 0) earlier = -INFINITY;
  float4 out;
  join_factors(earlier, state.x, state.y, out.x, out.y);
  // From here on for splits: `whole` is the largest logit of this lane's split, `so_far` that of all splits up to it.
  const float whole = __shfl_sync(~0u, most, lane | (width - 1));
  float so_far = whole;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float other = __shfl_up_sync(~0u, so_far, o);
    if (lane >= o) so_far = fmaxf(so_far, other);
  }
  float others = __shfl_sync(~0u, so_far, max((lane & ~(width - 1)) - 1, 0));
  others = lane < width ? before : fmaxf(before, others);
  join_factors(others, whole, whole == -INFINITY ? 0.f : 1.f, out.z, out.w);
  before = fmaxf(before, __shfl_sync(~0u, so_far, 31));
  return out;
}

struct Joined {
  float4 sums = make_float4(0.f, 0.f, 0.f, 0.f);
  float sum = 0.f;
  DEVICE void join(const float4& part, float part_sum, float kept, float added) {
    sums.x = join_value(sums.x, kept, part.x, added);
    sums.y = join_value(sums.y, kept, part.y, added);
    sums.z = join_value(sums.z, kept, part.z, added);
    sums.w = join_value(sums.w, kept, part.w, added);
    sum = join_value(sum, kept, part_sum, added);
  }
  // Joins by the factors that begin at FIRST behind the part's state.
  template <int FIRST>
  DEVICE void join(const uint8_t* state, const float4& part) {
    const float2 f = *reinterpret_cast<const float2*>(state + 16 + 4 * FIRST);
    join(part, reinterpret_cast<const float*>(state)[1], f.x, f.y);
  }
};

// Joins the tile's parts into `rows`; a thread has four dimensions of a row. `stage`: the ring's memory.
template <class S>
DEVICE void join_parts(const Attention& a, const Share& share, int begin, const float* parts, uint32_t valid, uint8_t* stage, float* rows) {
  constexpr int STATES_AT = 16 * 32 * S::WARPS;
  const int tile_rows = a.tile_heads * a.tile_tokens, capacity = a.ring * S::UNIT_BYTES / S::PART_BYTES / SPLIT_UNITS * SPLIT_UNITS;
  // Parts are counted from the beginning of their split.
  const int skipped = share.by_unit ? begin % SPLIT_UNITS : 0, last = skipped + share.parts, lane = threadIdx.x & 31, warp = warp_index();
#pragma unroll 1
  for (int base = 0; base < tile_rows * S::OF_ROW; base += 32 * S::WARPS) {
    const int item = base + threadIdx.x, row = item / S::OF_ROW, column = item % S::OF_ROW * 4;
    const bool live = item < tile_rows * S::OF_ROW && valid >> row & 1;
    const float* from = parts + row * S::ROW;
    uint8_t *own = stage + 16 * threadIdx.x, *state = stage + STATES_AT + threadIdx.x / S::OF_ROW * 32;
    Joined total;
    constexpr int HELD = (S::PART_ROWS + S::WARPS - 1) / S::WARPS;  // rows whose factors this warp computes
    float before[HELD];
#pragma unroll
    for (int r = 0; r < HELD; r++) before[r] = -INFINITY;
#pragma unroll 1
    for (int first = 0; first < last; first += capacity) {
      const int from_part = max(first, skipped), end = min(first + capacity, last);
      if (live) {
        // Whole batches of eight, with zeros for missing parts.
        const float* part = from + (int64_t)(first - skipped) * tile_rows * S::ROW;
#pragma unroll 4
        for (int i = first; i < (end + 7) / 8 * 8; i++) {
          const bool there = i >= from_part && i < end;
          const float* source = there ? part : from;
          copy_async<16>(own + (i - first) * S::PART_BYTES, source + column, there);
          if (column == 0) copy_async<16>(state + (i - first) * S::PART_BYTES, source + S::DIM, there);
          part += tile_rows * S::ROW;
        }
      }
      copy_commit();
      copy_wait<0>();
      __syncthreads();
#pragma unroll
      for (int r = 0; r < HELD; r++)
#pragma unroll 1
        for (int i = first; i < end && r * S::WARPS + warp < S::PART_ROWS; i += 32) {
          uint8_t* at = stage + STATES_AT + 32 * (r * S::WARPS + warp) + (i - first + lane) * S::PART_BYTES;
          const bool there = i + lane >= from_part && i + lane < end;
          const float2 s = there ? *reinterpret_cast<const float2*>(at) : make_float2(-INFINITY, 0.f);
          const float4 factors = part_factors(s, share.by_unit, before[r]);
          if (i + lane < (end + 7) / 8 * 8) *reinterpret_cast<float4*>(at + 16) = factors;
        }
      __syncthreads();
#pragma unroll 1
      for (int i = first; i < end; i += 8) {
        const uint8_t *at = state + (i - first) * S::PART_BYTES, *sums = own + (i - first) * S::PART_BYTES;
        if (share.by_unit) {
          Joined split;
#pragma unroll
          for (int k = 0; k < 8; k++) split.join<0>(at + k * S::PART_BYTES, *reinterpret_cast<const float4*>(sums + k * S::PART_BYTES));
          const float* f = reinterpret_cast<const float*>(at + (S::PART_BYTES * 7) + 16);
          total.join(split.sums, split.sum, f[2], f[3]);
        } else {
#pragma unroll
          for (int k = 0; k < 8; k++) total.join<2>(at + k * S::PART_BYTES, *reinterpret_cast<const float4*>(sums + k * S::PART_BYTES));
        }
      }
      __syncthreads();
    }
    if (!live) continue;
    *reinterpret_cast<float4*>(rows + row * S::ROW + column) = total.sums;
    if (column == 0) rows[row * S::ROW + S::DIM + 1] = total.sum;
  }
}

// Returns whether this is the last block to arrive. The last block then sees everything that the others wrote before.
DEVICE bool is_last(unsigned* ticket, unsigned count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    last = before == count - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  return last;
}

// Prepares the tile's queries, and the token's own key and value if this block has them.
template <class S>
DEVICE void prepare(const Attention& a, uint8_t* rest, int first, int end, int key_head, int head_tile, bool own) {
  const int warp = warp_index();
  const Angles<S::DIM> angles(a, first < end ? first : -1);  // rotated queries have one token a tile
  if (a.early) pdl_wait();
  float* scratch = reinterpret_cast<float*>(rest + S::SCRATCH_AT) + warp * S::DIM;
  const int before = own ? 2 : 0;  // value, key, then the queries
  const int64_t slot = own && head_tile == 0 ? a.slots[first] : -1;
  for (int base = warp; base < before + S::COLUMNS; base += 2 * S::WARPS) {
    Head<S::DIM> heads[2];
    bool live[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = base + i * S::WARPS - before;
      const Place p = place_of(a, max(column, 0), first, end, key_head, head_tile);
      live[i] = column < 0 || (column < S::COLUMNS && p.token >= 0);
      const void* from = column >= 0 ? a.q : column == -1 ? a.new_key : a.new_value;
      const int64_t at = column >= 0 ? (int64_t)p.token * a.q_stride + p.head * a.dim : (int64_t)first * a.new_stride + key_head * a.dim;
      heads[i].load(a, live[i] ? from : nullptr, at);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = base + i * S::WARPS - before;
      if (column >= S::COLUMNS) break;
      if (live[i] && column >= -1) {
        if (a.q_norm) heads[i].norm_as_element(a, column >= 0 ? a.q_norm : a.k_norm);
        heads[i].turn(a, angles, scratch);
      }
      if (i == 0 && column < 0) {  // the own key and value are among the first items
        const int plane = -1 - column;
        uint8_t* packed = rest + S::OWN_AT + (plane ? packed_bytes<S::KC, S::DIM>() : 0);
        if (S::KC == S::VC || !plane) pack_own<S::KC, S::DIM>(a, plane, heads[i], scratch, packed, slot, key_head);
        else pack_own<S::VC, S::DIM>(a, plane, heads[i], scratch, packed, slot, key_head);
        continue;
      }
      heads[i].template put_query<S::KC>(reinterpret_cast<uint32_t*>(rest) + column * 16, S::COLUMNS * 16, live[i]);
    }
  }
}

// Attends one run of tokens of a tile to this block's share of its keys.
template <class S>
DEVICE void attend_run(const Attention& a, uint8_t* shared, int first, int run, int end, int key_head, int head_tile) {
  const Keys keys = run_keys(a, run, end);
  const int begin = keys.from / UNIT, stop = (keys.to + UNIT - 1) / UNIT, lane = threadIdx.x & 31, t = lane & 3;
  const Share share(a, begin, stop);
  if (share.from >= share.to && (keys.to > 0 || blockIdx.z > 0)) return;
  uint8_t* rest = shared + a.ring * S::UNIT_BYTES;
  const bool own = keys.fresh >= share.from * UNIT && keys.fresh < min(share.to * UNIT, keys.to);
  Ring<S> ring(a, keys, shared, rest + S::OWN_AT, key_head, share.from, max(share.to - share.from, 0));
  prepare<S>(a, rest, first, end, key_head, head_tile, own);
  __syncthreads();
  uint4 queries[S::REGISTERS ? S::DIM / 32 : 1][S::NT];
  if constexpr (S::REGISTERS)
#pragma unroll
    for (int i = 0; i < S::DIM / 32; i++)
#pragma unroll
      for (int j = 0; j < S::NT; j++) queries[i][j] = reinterpret_cast<const uint4*>(rest)[(i * S::COLUMNS + 8 * j) * 4 + lane];
  Sight<S> sight;
  sight.all_from = 0, sight.all_to = 0x7fffffff;
#pragma unroll
  for (int j = 0; j < S::NT; j++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int token = place_of(a, 8 * j + 2 * t + e, first, end, key_head, head_tile).token;
      const bool there = token >= run && keys.to > 0;
      const int position = there ? a.positions[token] : -1;
      sight.from[j][e] = visible_from(a, position);
      sight.to[j][e] = visible_to(a, position);
      if (there) sight.all_from = max(sight.all_from, sight.from[j][e]), sight.all_to = min(sight.all_to, sight.to[j][e]);
    }
#pragma unroll
  for (int o = 1; o < 4; o *= 2) {
    sight.all_from = max(sight.all_from, __shfl_xor_sync(~0u, sight.all_from, o));
    sight.all_to = min(sight.all_to, __shfl_xor_sync(~0u, sight.all_to, o));
  }
  const uint32_t valid = __ballot_sync(~0u, place_of(a, lane, first, end, key_head, head_tile).token >= run);
  const int tile_rows = a.tile_heads * a.tile_tokens, group = blockIdx.x * gridDim.y + blockIdx.y, part_floats = tile_rows * S::ROW;
  float* parts = a.parts + (int64_t)group * a.part_slots * part_floats;
  const bool alone = share.active <= 1;
  Sums<S> unit, split, total;
  split.clear();
  total.clear();
#pragma unroll 1
  for (int index = share.from; index < share.to; index++) {
    attend_unit<S>(a, keys, ring, unit, sight, index, queries, rest);
    ring.unit_done();
    if (share.by_unit && !alone) {
      unit.write(parts + (int64_t)(index - begin) * part_floats, valid);
      continue;
    }
    split.join(unit);
    if ((index + 1) % SPLIT_UNITS && index + 1 < share.to) continue;
    if (alone) total.join(split);
    else split.write(parts + (int64_t)(index / SPLIT_UNITS - begin / SPLIT_UNITS) * part_floats, valid);
    split.clear();
  }
  copy_wait<0>();
  __syncthreads();
  float* rows = reinterpret_cast<float*>(rest);
  if (alone) {
    total.write(rows, valid);
  } else {
    if (!is_last(a.tickets + group * a.tile_tokens + run - first, share.active)) return;
    join_parts<S>(a, share, begin, parts, valid, shared, rows);
  }
  __syncthreads();
  const int blocks = (a.dim + 63) / 64;
#pragma unroll 1
  for (int item = warp_index(); item < tile_rows * blocks; item += S::WARPS) {
    const int row = item / blocks;
    if (!(valid >> row & 1)) continue;
    const Place p = place_of(a, row, first, end, key_head, head_tile);
    result_to_out<true>(a, rows + row * S::ROW, item % blocks, inverse_of(rows[row * S::ROW + S::DIM + 1]), p.token, p.head, is_hadamard<S::VC>());
  }
  __syncthreads();
}

// Grid: tiles of tokens, key heads x tiles of their query heads, chunks.
template <class S>
DEVICE void attention_decode(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  if (!a.early) pdl_wait();
  const int head_tiles = a.group == a.tile_heads ? 1 : (a.group + a.tile_heads - 1) / a.tile_heads;
  const int first = blockIdx.x * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
  for (int run = first; run < end;) {
    const int next = run_end(a, run, end);
    const int key_head = head_tiles == 1 ? blockIdx.y : blockIdx.y / head_tiles;
    attend_run<S>(a, shared, first, run, next, key_head, blockIdx.y - key_head * head_tiles);
    run = next;
  }
  // If no block of a launch waited, its successor could overtake its predecessor.
  if (a.early) pdl_wait();
}

#define DECODE(kind, KC, VC, DIM, NT, BLOCKS)                                                                                \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention_##kind##_##DIM##_decode##NT(const __grid_constant__ Attention a) { \
    attention_decode<Decode<KC, VC, DIM, NT>>(a);                                                                            \
  }
#define DECODES(kind, KC, VC)                                                                                                \
  DECODE(kind, KC, VC, 64, 1, 4) DECODE(kind, KC, VC, 64, 2, 4) DECODE(kind, KC, VC, 128, 1, 4) DECODE(kind, KC, VC, 128, 2, 3) \
  DECODE(kind, KC, VC, 256, 1, 3) DECODE(kind, KC, VC, 256, 2, 2)
