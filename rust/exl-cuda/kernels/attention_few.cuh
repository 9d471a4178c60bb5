// Attention of one token a sequence, where a step's other kernels run before and after: what a launch costs there is not the
// arithmetic but the way to the first product and the joining. So: small blocks (80 registers, some 40 KB) that find room beside a
// block of the ring kernel and have their keys and values before the launch before them ends; a pass over nothing in the meantime,
// after which the instructions are in the caches; and blocks of a cluster that join what they have over distributed shared memory.
//
// A cluster has splits of eight units one after the other, its blocks every so many-th unit of each. Units, splits and what is left
// in the workspace join in the order of attention_common.cuh: the bits are those of attention_decode.cuh.
#pragma once
#include "attention_decode.cuh"

template <class ELEMENT, int KEY_CODEC, int VALUE_CODEC, int DIM_, int COLUMN_TILES>
struct Few : Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 0> {
  using Base = Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 0>;
  using Element = ELEMENT;
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, NT = COLUMN_TILES, WARPS = 4, THREADS = 128, COLUMNS = 8 * NT;
  static constexpr int MT = DIM / 64, BLOCKS = DIM / 64, ROW = DIM + 4;
  static constexpr int ITEM = 68, ITEM_BYTES = 4 * ITEM;  // floats of 64 dimensions of a row: sums; largest logit, sum of weights, padding
  static constexpr bool REGISTERS = false;  // queries stay in shared memory
  // A unit's keys and values, then: queries, weights, largest logits, own key and value, a barrier, rows of a unit's results, what the
  // cluster's blocks sent of their units, totals.
  static constexpr int QUERIES_AT = Base::UNIT_BYTES, WEIGHTS_AT = QUERIES_AT + COLUMNS * DIM * 2, MAXIMA_AT = WEIGHTS_AT + 4 * NT * 256;
  static constexpr int OWN_AT = MAXIMA_AT + 4 * COLUMNS * 4, BARRIER_AT = OWN_AT + packed_bytes<KC, DIM>() + packed_bytes<VC, DIM>();
  static constexpr int ROWS_AT = BARRIER_AT + 16;
};

#if __CUDA_ARCH__ >= 900
// Meeting of a cluster's threads. Nothing is handed over by it: arriving with release would wait for all writes on their way.
DEVICE void cluster_meet() {
  __syncwarp();  // lanes may have left a wait one by one
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  asm volatile("barrier.cluster.wait;" ::: "memory");
}
DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE uint32_t address_of_block(uint32_t at, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Into another block's memory, counted by its barrier: what has been counted is there to be read.
DEVICE void send(uint32_t to, uint32_t barrier, float4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(__float_as_int(v.x)),
               "r"(__float_as_int(v.y)), "r"(__float_as_int(v.z)), "r"(__float_as_int(v.w)), "r"(barrier)
               : "memory");
}
DEVICE void inbox_init(uint32_t barrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory"); }
DEVICE void inbox_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void inbox_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Two neighbouring elements, and their places as a word.
DEVICE float2 pair_of(uint32_t word, __half) { return __half22float2(*reinterpret_cast<const __half2*>(&word)); }
DEVICE float2 pair_of(uint32_t word, __nv_bfloat16) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word)); }
DEVICE uint32_t word_of(float2 v, __half) { return as_word(__floats2half2_rn(v.x, v.y)); }
DEVICE uint32_t word_of(float2 v, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x, v.y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Rotation of whole heads whose lane l holds elements 64 b + 2 l and the next.
template <class ELEMENT, int DIM>
struct Rotation {
  float cos[2] = {1.f, 1.f}, sin[2] = {0.f, 0.f};
  bool turns = false;
  DEVICE Rotation(const Attention& a, int token) {
    if (!a.cos || a.rotated == 0) return;
    const int64_t position = a.rope_positions[token];
    turns = position >= 0 && position < a.table_rows;
    if (!turns) return;
    const int lane = threadIdx.x & 31, base = a.interleaved ? lane : DIM == 64 ? 2 * (lane & 15) : 2 * lane, step = a.interleaved ? 32 : 1;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (DIM == 64 && a.interleaved && j) break;
      cos[j] = a.cos[position * (DIM / 2) + base + j * step];
      sin[j] = a.sin[position * (DIM / 2) + base + j * step];
    }
  }
  DEVICE void turn(const Attention& a, Head<DIM>& head) const {
    if (!turns) return;
    if (a.interleaved) {
#pragma unroll
      for (int b = 0; b < DIM / 64; b++) head.pairs[b] = rotate(head.pairs[b].x, head.pairs[b].y, cos[b], sin[b]);
    } else if constexpr (DIM == 128) {
      const float2 x = rotate(head.pairs[0].x, head.pairs[1].x, cos[0], sin[0]), y = rotate(head.pairs[0].y, head.pairs[1].y, cos[1], sin[1]);
      head.pairs[0] = make_float2(x.x, y.x);
      head.pairs[1] = make_float2(x.y, y.y);
    } else {
      const bool upper = threadIdx.x & 16;
      const float2 mine = head.pairs[0];
      const float2 other = make_float2(__shfl_xor_sync(~0u, mine.x, 16), __shfl_xor_sync(~0u, mine.y, 16));
      const float2 x = upper ? rotate(other.x, mine.x, cos[0], sin[0]) : rotate(mine.x, other.x, cos[0], sin[0]);
      const float2 y = upper ? rotate(other.y, mine.y, cos[1], sin[1]) : rotate(mine.y, other.y, cos[1], sin[1]);
      head.pairs[0] = upper ? make_float2(x.y, y.y) : make_float2(x.x, y.x);
    }
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) head.pairs[b] = pair_of(word_of(head.pairs[b], ELEMENT()), ELEMENT());
  }
};

// Zero, but the compiler does not know: addresses that depend on it are worked out where they are needed, not kept in registers.
DEVICE uint32_t not_before() {
  uint32_t zero = 0;
  asm volatile("" : "+r"(zero));
  return zero;
}

// What a block has to do.
struct Job {
  const int* pages;
  int token, key_head, rank, to, units;
  int fresh;  // key that is not in the pages yet, or -1
};

// Where the first key of a unit is for this head, in rows of pages, and how many keys there are.
struct Rows {
  int first, count;
};
DEVICE Rows rows_of(const Attention& a, const Job& job, int unit) {
  const int key = unit * UNIT;
  int index = (int)__umulhi((unsigned)key, a.page_inverse);
  index = a.page_shift >= 0 ? key >> a.page_shift : index - (index * a.page_size > key);
  const int page = job.pages[index];
  const bool known = (unsigned)page < (unsigned)a.num_pages;
  return {((known ? page : 0) * a.page_size + key - index * a.page_size) * a.heads + job.key_head, known ? job.to - key : 0};
}

// A unit's keys or values on their way: rows that exist and are not the fresh one; zeros for those beyond the last.
template <int CODEC, int DIM>
DEVICE void fetch(uint8_t* to, int stride, const uint8_t* from, const uint8_t* scales, int heads, Rows rows, int skip) {
  constexpr int BYTES = row_bytes<CODEC, DIM>(), CHUNKS = BYTES / 16, ROWS = 128 / CHUNKS, PASSES = STAGE / ROWS;
  const int tid = threadIdx.x, row = tid / CHUNKS;
  const uint8_t* source = from + ((int64_t)(rows.first + row * heads) * BYTES + tid % CHUNKS * 16);
  const int64_t step = (int64_t)(heads * BYTES * ROWS);
  uint8_t* mine = to + row * stride + tid % CHUNKS * 16;
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int r = row + i * ROWS;
    if (r != skip) copy_async<16>(mine, source, r < rows.count);
    source += step;
    mine += ROWS * stride;
  }
  if constexpr (is_hadamard<CODEC>()) {
    constexpr int WIDE = DIM / 16;
    if (tid < STAGE && tid != skip)
      copy_async<WIDE>(to + STAGE * stride + tid * WIDE, scales + (int64_t)(rows.first + tid * heads) * WIDE, tid < rows.count);
  }
  copy_commit();
}
template <class S>
DEVICE void fetch_keys(const Attention& a, const Job& job, uint8_t* shared, Rows rows, int unit) {
  fetch<S::KC, S::DIM>(shared, key_stride<S::KC, S::DIM>(), a.key, reinterpret_cast<const uint8_t*>(a.key_scales), a.heads, rows, job.fresh - unit * UNIT);
}
template <class S>
DEVICE void fetch_values(const Attention& a, const Job& job, uint8_t* shared, Rows rows, int unit) {
  fetch<S::VC, S::DIM>(shared + S::KEY_BYTES, value_stride<S::VC, S::DIM>(), a.value, reinterpret_cast<const uint8_t*>(a.value_scales), a.heads, rows,
                       job.fresh - unit * UNIT);
}

// The token's own key or value: encoded into shared memory and, if there is a slot, into the pages.
template <int CODEC, int DIM>
DEVICE void encode_own(const Attention& a, int plane, const Head<DIM>& head, uint8_t* row, uint8_t* scales, int64_t slot, int key_head) {
  constexpr int BYTES = row_bytes<CODEC, DIM>();
  const int lane = threadIdx.x & 31;
  const int64_t at = slot * a.heads + key_head;
  const bool stores = slot >= 0 && slot < (int64_t)a.num_pages * a.page_size;
  uint8_t* out = const_cast<uint8_t*>(plane ? a.value : a.key) + at * BYTES;
  if constexpr (CODEC == F16) {
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) {
      const __half2 pair = __halves2half2(saturating_half(head.pairs[b].x), saturating_half(head.pairs[b].y));
      reinterpret_cast<__half2*>(row)[32 * b + lane] = pair;
      if (stores) reinterpret_cast<__half2*>(out)[32 * b + lane] = pair;
    }
  } else {
    Pages p;
    p.data[0] = row;
    p.scales[0] = reinterpret_cast<__half*>(scales);
    p.codec[0] = CODEC;
    p.heads = 1, p.dim = DIM, p.blocks = DIM / 64;
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) encode(p, 0, 0, b, head.pairs[b].x, head.pairs[b].y);
    __syncwarp();
    if (!stores) return;
    for (int i = lane; i < BYTES / 4; i += 32) reinterpret_cast<uint32_t*>(out)[i] = reinterpret_cast<const uint32_t*>(row)[i];
    if (is_hadamard<CODEC>() && lane < DIM / 64)
      reinterpret_cast<uint32_t*>(const_cast<__half*>(plane ? a.value_scales : a.key_scales))[at * (DIM / 64) + lane] =
          reinterpret_cast<const uint32_t*>(scales)[lane];
  }
}

// Where the own key (or value) belongs: its place in the first unit, or a place beside, for later.
struct Home {
  uint8_t *row, *scales;
};
template <int CODEC, int DIM, int STRIDE>
DEVICE Home home_of(uint8_t* stage, uint8_t* aside, int key, bool in_first) {
  if (in_first) return {stage + key * STRIDE, stage + STAGE * STRIDE + key * scale_bytes<CODEC, DIM>()};
  return {aside, aside + row_bytes<CODEC, DIM>()};
}
template <int CODEC, int DIM, int STRIDE>
DEVICE void bring_home(uint8_t* stage, const uint8_t* aside, int key) {
  constexpr int WORDS = row_bytes<CODEC, DIM>() / 4, SCALES = scale_bytes<CODEC, DIM>() / 4;
  const int lane = threadIdx.x & 31;
  const Home home = home_of<CODEC, DIM, STRIDE>(stage, nullptr, key, true);
#pragma unroll 1
  for (int i = lane; i < WORDS; i += 32) reinterpret_cast<uint32_t*>(home.row)[i] = reinterpret_cast<const uint32_t*>(aside)[i];
  if (lane < SCALES) reinterpret_cast<uint32_t*>(home.scales)[lane] = reinterpret_cast<const uint32_t*>(aside)[WORDS + lane];
}

// A query as halves where the products want it.
template <int CODEC, int DIM>
DEVICE void put_pairs(uint32_t* words, int stride, Head<DIM>& head) {
  if constexpr (is_hadamard<CODEC>()) {
    head.template put_query<CODEC>(words, stride, true);
  } else {
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) {
      const QueryPlace p = query_place<CODEC, DIM>(64 * b + 2 * (threadIdx.x & 31));
      words[p.word / 4 * stride + p.t * 4 + p.word % 4] = as_word(__halves2half2(saturating_half(head.pairs[b].x), saturating_half(head.pairs[b].y)));
    }
  }
}

// Queries, and the own key and value where this block has them (`home_unit` 0: in the first unit, later ones: aside, -1: not here).
// What the launch before wrote is never read from this multiprocessor's own cache, which the pass over nothing filled.
template <class S>
DEVICE void prepare_few(const Attention& a, const Job& job, const Rotation<typename S::Element, S::DIM>& rotation, uint8_t* shared, int home_unit,
                        int64_t slot) {
  using Element = typename S::Element;
  const int warp = warp_index(), before = home_unit >= 0 ? 2 : 0, items = before + a.group, lane = threadIdx.x & 31;
  uint32_t* queries = reinterpret_cast<uint32_t*>(shared + S::QUERIES_AT);
#pragma unroll 1
  for (int base = warp; base < items; base += 2 * S::WARPS) {
    uint32_t raw[2][S::BLOCKS];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = base + i * S::WARPS - before;
      const void* from = column >= 0 ? a.q : column == -1 ? a.new_key : a.new_value;
      const int at = column >= 0 ? job.token * a.q_stride + (job.key_head * a.group + column) * S::DIM : job.token * a.new_stride + job.key_head * S::DIM;
#pragma unroll
      for (int b = 0; b < S::BLOCKS; b++)
        raw[i][b] = column < a.group ? __ldcg(static_cast<const unsigned*>(from) + (at / 2 + 32 * b + lane)) : 0u;
    }
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const int column = base + i * S::WARPS - before;
      if (column >= a.group) break;
      Head<S::DIM> head;
#pragma unroll
      for (int b = 0; b < S::BLOCKS; b++) {
        head.pairs[b] = pair_of(raw[0][b], Element());
        raw[0][b] = raw[1][b];
      }
      if (column >= -1) rotation.turn(a, head);
      if (column >= 0) {
        put_pairs<S::KC, S::DIM>(queries + column * 16, S::COLUMNS * 16, head);
        continue;
      }
      const int key = job.fresh % UNIT, plane = -1 - column;
      const Home home =
          plane ? home_of<S::VC, S::DIM, value_stride<S::VC, S::DIM>()>(shared + S::KEY_BYTES, shared + S::OWN_AT + packed_bytes<S::KC, S::DIM>(), key,
                                                                        home_unit == 0)
                : home_of<S::KC, S::DIM, key_stride<S::KC, S::DIM>()>(shared, shared + S::OWN_AT, key, home_unit == 0);
      if (S::KC == S::VC || !plane) encode_own<S::KC, S::DIM>(a, plane, head, home.row, home.scales, slot, job.key_head);
      else encode_own<S::VC, S::DIM>(a, plane, head, home.row, home.scales, slot, job.key_head);
    }
  }
}

// A unit's logits, weights and sums; `next`: the unit after it, or -1, and where its keys are.
template <class S>
DEVICE void attend_unit_few(const Attention& a, const Job& job, Sums<S>& unit, uint8_t* shared, int index, int next,
                            Rows rows) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, key = index * UNIT + 16 * warp + (lane >> 2);
  float* maxima = reinterpret_cast<float*>(shared + S::MAXIMA_AT);
  uint2* weights = reinterpret_cast<uint2*>(shared + S::WEIGHTS_AT);
  const float scale = a.scale * LOG2E;
  float x[S::NT][4];
  unit_logits<S>(x, shared, nullptr, reinterpret_cast<const uint4*>(shared + S::QUERIES_AT));
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[j][i] = key + 8 * (i >> 1) < job.to ? __fmul_rn(x[j][i], scale) : -INFINITY;
    float most[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      most[e] = fmaxf(x[j][e], x[j][2 + e]);
#pragma unroll
      for (int o = 4; o < 32; o *= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], o));
    }
    if (lane < 4) *reinterpret_cast<float2*>(maxima + warp * S::COLUMNS + 8 * j + 2 * t) = make_float2(most[0], most[1]);
  }
  copy_wait<0>();
  __syncthreads();
  if (next >= 0) fetch_keys<S>(a, job, shared, rows, next);
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) {
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
  __syncthreads();
  unit_values<S>(unit, shared + S::KEY_BYTES, weights);
  if (next >= 0) {
    __syncthreads();
    fetch_values<S>(a, job, shared, rows, next);
  }
}

struct Pair {
  float2 sums = make_float2(0.f, 0.f);
  float max = -INFINITY, sum = 0.f;
  DEVICE void join(float2 part, float2 state) {
    float kept, added;
    join_factors(max, state.x, state.y, kept, added);
    sums.x = join_value(sums.x, kept, part.x, added);
    sums.y = join_value(sums.y, kept, part.y, added);
    sum = join_value(sum, kept, state.y, added);
  }
};

// A unit's results to whom they are due: item i to block i of the cluster, in turn.
template <class S>
DEVICE void send_items(const Attention& a, const Sums<S>& unit, uint8_t* shared, int unit_of_split) {
  float* rows = reinterpret_cast<float*>(shared + S::ROWS_AT);
  const int mask = (1 << a.ring) - 1, part_floats = a.group * S::ROW;
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(shared + S::BARRIER_AT), inbox = (uint32_t)__cvta_generic_to_shared(rows + part_floats);
  unit.write(rows, (1u << a.group) - 1);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < a.group * S::BLOCKS * 17; i += S::THREADS) {
    const int item = i / 17, quad = i - item * 17, row = item / S::BLOCKS, block = item % S::BLOCKS;
    const float4 v = *reinterpret_cast<const float4*>(rows + row * S::ROW + (quad == 16 ? S::DIM : block * 64 + 4 * quad));
    const uint32_t to = inbox + (((item >> a.ring) * SPLIT_UNITS + unit_of_split) * S::ITEM + 4 * quad) * 4;
    send(address_of_block(to, item & mask), address_of_block(barrier, item & mask), v);
  }
}

// Joins 64 dimensions of a row: what the cluster's blocks have of this split's units, in order. Where other clusters have splits of the
// same keys (`active` of them, after this split; 0: not yet all of this one's), the split is left in the workspace, and the last to come
// joins all of them. True: `pair` is the whole, or where one cluster has all, the split.
template <class S>
DEVICE bool join_items(const Attention& a, Pair& pair, const float* inbox, int row, int block, int split, int units, int splits, int active, bool real) {
  const int lane = threadIdx.x & 31, group = blockIdx.x * gridDim.y + blockIdx.y, stride = a.group * S::ROW;
  float* parts = a.parts + (int64_t)group * a.part_slots * stride + row * S::ROW;
  int from = -SPLIT_UNITS;  // below zero: units; then splits of the workspace
#pragma unroll 1
  while (true) {
    float2 sums[SPLIT_UNITS], states[SPLIT_UNITS];
    const int count = from < 0 ? units : splits - from;  // what is read beyond is not joined
    if (from < 0) {
#pragma unroll
      for (int k = 0; k < SPLIT_UNITS; k++) {
        sums[k] = *reinterpret_cast<const float2*>(inbox + k * S::ITEM + 2 * lane);
        states[k] = *reinterpret_cast<const float2*>(inbox + k * S::ITEM + 64);
      }
    } else {
#pragma unroll
      for (int k = 0; k < SPLIT_UNITS; k++) {
        const float* at = parts + min(from + k, splits - 1) * stride;
        sums[k] = __ldcg(reinterpret_cast<const float2*>(at + block * 64 + 2 * lane));
        states[k] = __ldcg(reinterpret_cast<const float2*>(at + S::DIM + 2 * block));
      }
    }
#pragma unroll
    for (int k = 0; k < SPLIT_UNITS; k++)
      if (k < count) pair.join(sums[k], states[k]);
    from += SPLIT_UNITS;
    if (from > 0) {
      if (from < splits) continue;
      return true;
    }
    if (active == 1 || !real) return real;
    float* mine = parts + split * stride;
    __stcg(reinterpret_cast<float2*>(mine + block * 64 + 2 * lane), pair.sums);
    if (lane == 0) __stcg(reinterpret_cast<float2*>(mine + S::DIM + 2 * block), make_float2(pair.max, pair.sum));
    if (active == 0) return false;
    __syncwarp();
    unsigned before = 0;
    unsigned* ticket = a.tickets + (group * a.group + row) * S::BLOCKS + block;
    if (lane == 0) {
      asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
      if (before == active - 1) *ticket = 0;
    }
    if (__shfl_sync(~0u, before, 0) != active - 1) return false;
    pair = Pair();
  }
}

// Grid: tokens, key heads, blocks of all clusters of a key head. `a.ring`: blocks of a cluster, as a power of two; `a.chunks`: clusters.
template <class S>
DEVICE void attention_few(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  if (!a.early) pdl_wait();
  Job job;
  job.token = blockIdx.x, job.key_head = blockIdx.y, job.rank = cluster_rank();
  const int seq = a.rows[job.token], position = a.positions[job.token], shift = a.ring, size = 1 << shift, cluster = blockIdx.z >> shift;
  const bool here = (unsigned)seq < (unsigned)a.batch;
  job.pages = a.block_table + (here ? seq * a.max_pages : 0);
  job.to = here ? min(max(position, -1), a.key_limit - 1) + 1 : 0;
  job.fresh = here && a.new_key && position < job.to ? position : -1;
  job.units = (job.to + UNIT - 1) / UNIT;
  const int splits = (job.units + SPLIT_UNITS - 1) / SPLIT_UNITS;
  int each = 1, active = splits;
  if (splits > a.chunks) each = (splits + a.chunks - 1) / a.chunks, active = (splits + each - 1) / each;
  const int first = cluster * each, last = min(first + each, splits);
  if (first >= last && cluster > 0) {
    if (a.early) pdl_wait();
    return;
  }
  const int begin = first * SPLIT_UNITS + job.rank, stop = min(last * SPLIT_UNITS, job.units);
  if (begin < stop) {
    const Rows rows = rows_of(a, job, begin);
    fetch_keys<S>(a, job, shared, rows, begin);
    fetch_values<S>(a, job, shared, rows, begin);
  }
  const Rotation<typename S::Element, S::DIM> rotation(a, job.token);
  const int fresh_unit = job.fresh / UNIT;
  const bool own = job.fresh >= 0 && fresh_unit >= begin && fresh_unit < stop && ((fresh_unit - begin) & (size - 1)) == 0;
  const int home_unit = own ? (fresh_unit - begin) >> shift : -1;
  const int64_t slot = own ? a.slots[job.token] : -1;
  for (int i = threadIdx.x; i < S::COLUMNS * S::DIM / 8; i += S::THREADS) reinterpret_cast<uint4*>(shared + S::QUERIES_AT)[i] = make_uint4(0, 0, 0, 0);
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(shared + S::BARRIER_AT);
  const int items = a.group * S::BLOCKS, my_items = (items - job.rank + size - 1) >> shift, lane = threadIdx.x & 31;
  float* inbox = reinterpret_cast<float*>(shared + S::ROWS_AT) + a.group * S::ROW;
  float4* totals = reinterpret_cast<float4*>(inbox + ((items + size - 1) >> shift) * SPLIT_UNITS * S::ITEM);
  if (threadIdx.x == 0) {
    inbox_init(barrier);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_meet();
  int parity = 0;
#pragma unroll 1
  for (int pass = a.early > 1 ? 0 : 1; pass < 2; pass++) {
    const bool real = pass == 1;
    if (real && a.early) pdl_wait();
    prepare_few<S>(a, job, rotation, shared + not_before(), home_unit, real ? slot : -1);
    int index = begin, turn = 0;
#pragma unroll 1
    for (int split = first; split == first || split < last; split++) {
      const int of_split = min(job.units - split * SPLIT_UNITS, real ? SPLIT_UNITS : size);  // units that will be sent
      if (threadIdx.x == 0) inbox_expect(barrier, max(my_items, 0) * of_split * S::ITEM_BYTES);
#pragma unroll 1
      for (int k = 0; k < (SPLIT_UNITS >> shift) && index < stop; k++, turn++) {
        const int next = real && index + size < stop ? index + size : -1;
        Rows rows = {0, 0};
        if (next >= 0) rows = rows_of(a, job, next);
        copy_wait<1>();
        if (turn && turn == home_unit && warp_index() == 0) {
          bring_home<S::KC, S::DIM, key_stride<S::KC, S::DIM>()>(shared, shared + S::OWN_AT, job.fresh % UNIT);
          bring_home<S::VC, S::DIM, value_stride<S::VC, S::DIM>()>(shared + S::KEY_BYTES, shared + S::OWN_AT + packed_bytes<S::KC, S::DIM>(),
                                                                   job.fresh % UNIT);
        }
        __syncthreads();
        Sums<S> unit;
        uint8_t* here_now = shared + not_before();
        attend_unit_few<S>(a, job, unit, here_now, index, next, rows);
        send_items<S>(a, unit, here_now, (k << shift) + job.rank);
        index += size;
        if (!real) break;
      }
      if (warp_index() < my_items) inbox_wait(barrier, parity);
      __syncwarp();
      parity ^= 1;
#pragma unroll 1
      for (int number = warp_index(); number < my_items; number += S::WARPS) {
        const int item = (number << shift) + job.rank, row = item / S::BLOCKS, block = item % S::BLOCKS, mine = number * 32 + lane;
        Pair pair;
        bool done = join_items<S>(a, pair, inbox + number * SPLIT_UNITS * S::ITEM, row, block, split, of_split, splits,
                                  active <= 1 ? 1 : split == last - 1 ? active : 0, real);
        if (active <= 1 && splits > 1 && real) {
          Pair all;
          if (split > first) {
            const float4 t = totals[mine];
            all.sums = make_float2(t.x, t.y), all.max = t.z, all.sum = t.w;
          }
          all.join(pair.sums, make_float2(pair.max, pair.sum));
          pair = all;
          totals[mine] = make_float4(all.sums.x, all.sums.y, all.max, all.sum);
          done = split == last - 1;
        }
        float even = pair.sums.x, odd = pair.sums.y;
        if (is_hadamard<S::VC>()) {
          butterflies<false>(even, odd);
          even *= 1.f / 32.f;
          odd *= 1.f / 32.f;
        }
        const float inverse = inverse_of(pair.sum);
        if (done)
          static_cast<uint32_t*>(a.out)[((job.token * a.q_heads + job.key_head * a.group + row) * S::BLOCKS + block) * 32 + lane] =
              word_of(make_float2(__fmul_rn(even, inverse), __fmul_rn(odd, inverse)), typename S::Element());
      }
      // What was sent has been read, before more is sent. (A block may end before its neighbours: what it sent has left it.)
      if (!real || split + 1 < last) cluster_meet();
      if (!real) break;
    }
  }
}
#else
template <class S>
DEVICE void attention_few(const Attention&) {}
#endif

#define FEW(kind, element, ELEMENT, KC, VC, DIM, NT, BLOCKS)                                                                        \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention_##kind##_##element##_##DIM##_few##NT(const __grid_constant__ Attention a) { \
    attention_few<Few<ELEMENT, KC, VC, DIM, NT>>(a);                                                                                \
  }
#define FEWS_OF(kind, element, ELEMENT, KC, VC)                                                       \
  FEW(kind, element, ELEMENT, KC, VC, 64, 1, 7) FEW(kind, element, ELEMENT, KC, VC, 64, 2, 5)         \
  FEW(kind, element, ELEMENT, KC, VC, 128, 1, 7) FEW(kind, element, ELEMENT, KC, VC, 128, 2, 4)
#define FEWS(kind, KC, VC) FEWS_OF(kind, f16, __half, KC, VC) FEWS_OF(kind, bf16, __nv_bfloat16, KC, VC)
