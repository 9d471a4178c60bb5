// Attention of one token a sequence, where a step's other kernels run before and after: what a launch costs there is not the
// arithmetic but the way to the first product and the joining. So: small blocks (80 registers, some 40 KB) that find room beside a
// block of the ring kernel and have their keys and values before the launch before them ends; and blocks of a cluster that join what
// they have over distributed shared memory.
//
// A cluster has a split of eight units, its blocks every so many-th unit of it. Units join in the cluster, splits in the workspace, in the
// order of attention_common.cuh: the bits are those of attention_decode.cuh.
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
  int token, key_head, rank, to;
  int fresh;  // key that is not in the pages yet, or -1
};

// Where the first key of a unit is for this head, in rows of pages, and how many keys there are.
struct Rows {
  int first, count;
};
DEVICE int page_of(const Attention& a, int key) {
  const int index = (int)__umulhi((unsigned)key, a.page_inverse);  // at most one too many, where no power of two is divided by
  return a.page_shift >= 0 ? key >> a.page_shift : index - (index * a.page_size > key);
}
DEVICE Rows rows_of(const Attention& a, const Job& job, int unit, int page) {
  const int key = unit * UNIT, inside = key - page_of(a, key) * a.page_size;
  const bool known = (unsigned)page < (unsigned)a.num_pages;
  return {((known ? page : 0) * a.page_size + inside) * a.heads + job.key_head, known ? job.to - key : 0};
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

// Where a key (or value) stands in a stage: its row and its scales.
template <int CODEC, int DIM, int STRIDE>
DEVICE int row_of(int key) { return key * STRIDE; }
template <int CODEC, int DIM, int STRIDE>
DEVICE int scales_of(int key) { return STAGE * STRIDE + key * scale_bytes<CODEC, DIM>(); }
template <int CODEC, int DIM, int STRIDE>
DEVICE void bring_home(uint8_t* stage, const uint8_t* aside, int key) {
  constexpr int WORDS = row_bytes<CODEC, DIM>() / 4, SCALES = scale_bytes<CODEC, DIM>() / 4;
  const int lane = threadIdx.x & 31;
  uint8_t *row = stage + row_of<CODEC, DIM, STRIDE>(key), *scales = stage + scales_of<CODEC, DIM, STRIDE>(key);
#pragma unroll 1
  for (int i = lane; i < WORDS; i += 32) reinterpret_cast<uint32_t*>(row)[i] = reinterpret_cast<const uint32_t*>(aside)[i];
  if (lane < SCALES) reinterpret_cast<uint32_t*>(scales)[lane] = reinterpret_cast<const uint32_t*>(aside)[WORDS + lane];
}

// As the cache rounds. What came out of a half, or was rounded to one, is one.
DEVICE uint32_t saturated(float2 v, __half) { return as_word(__floats2half2_rn(v.x, v.y)); }
DEVICE uint32_t saturated(float2 v, __nv_bfloat16) { return as_word(__halves2half2(saturating_half(v.x), saturating_half(v.y))); }

// A query as halves where the products want it.
template <class ELEMENT, int CODEC, int DIM>
DEVICE void put_pairs(uint32_t* words, int stride, Head<DIM>& head) {
  if constexpr (is_hadamard<CODEC>()) {
    head.template put_query<CODEC>(words, stride, true);
  } else {
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) {
      const QueryPlace p = query_place<CODEC, DIM>(64 * b + 2 * (threadIdx.x & 31));
      words[p.word / 4 * stride + p.t * 4 + p.word % 4] = saturated(head.pairs[b], ELEMENT());
    }
  }
}

// The token's own key or value: encoded into shared memory and, if there is a slot, into the pages.
template <class ELEMENT, int CODEC, int DIM>
DEVICE void encode_own(const Attention& a, int plane, const Head<DIM>& head, uint8_t* row, uint8_t* scales, int64_t slot, int key_head) {
  constexpr int BYTES = row_bytes<CODEC, DIM>();
  const int lane = threadIdx.x & 31;
  const int64_t at = slot * a.heads + key_head;
  const bool stores = slot >= 0 && slot < (int64_t)a.num_pages * a.page_size;
  uint8_t* out = const_cast<uint8_t*>(plane ? a.value : a.key) + at * BYTES;
  if constexpr (CODEC == F16) {
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) {
      const uint32_t pair = saturated(head.pairs[b], ELEMENT());
      reinterpret_cast<uint32_t*>(row)[32 * b + lane] = pair;
      if (stores) reinterpret_cast<uint32_t*>(out)[32 * b + lane] = pair;
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

// Where an item is that a warp prepares: the own value, the own key (`before` 2: where the block has them), queries; null beyond.
template <class S>
DEVICE const unsigned* source_of(const Attention& a, const Job& job, int item, int before) {
  const int column = item - before;
  if (column >= a.group) return nullptr;
  const void* from = column >= 0 ? a.q : column == -1 ? a.new_key : a.new_value;
  const int at = column >= 0 ? job.token * a.q_stride + (job.key_head * a.group + column) * S::DIM : job.token * a.new_stride + job.key_head * S::DIM;
  return static_cast<const unsigned*>(from) + at / 2 + (threadIdx.x & 31);
}

template <class S>
DEVICE void load_items(uint32_t (&raw)[2][S::BLOCKS], const unsigned* first, const unsigned* second) {
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
    raw[0][b] = raw[1][b] = 0;
    if (first) raw[0][b] = __ldcg(first + 32 * b);
    if (second) raw[1][b] = __ldcg(second + 32 * b);
  }
}

// Queries, and the own key and value where this block has them (`home_unit` 0: in the first unit, later ones: aside, -1: not here).
// What the launch before wrote is never read from this multiprocessor's own cache, which may hold older lines. `raw`: the warp's first
// two items.
template <class S>
DEVICE void prepare_few(const Attention& a, const Job& job, const Rotation<typename S::Element, S::DIM>& rotation, uint8_t* shared, int home_unit,
                        int64_t slot, uint32_t (&raw)[2][S::BLOCKS]) {
  using Element = typename S::Element;
  const int warp = warp_index(), before = home_unit >= 0 ? 2 : 0, items = before + a.group;
  uint32_t* queries = reinterpret_cast<uint32_t*>(shared + S::QUERIES_AT);
#pragma unroll 1
  for (int base = warp; base < items; base += 2 * S::WARPS) {
    if (base != warp) load_items<S>(raw, source_of<S>(a, job, base, before), source_of<S>(a, job, base + S::WARPS, before));
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
        put_pairs<Element, S::KC, S::DIM>(queries + column * 16, S::COLUMNS * 16, head);
        continue;
      }
      // Its place in the first unit, or a place beside, for later.
      constexpr int KS = key_stride<S::KC, S::DIM>(), VS = value_stride<S::VC, S::DIM>(), VALUE_AT = S::OWN_AT + packed_bytes<S::KC, S::DIM>();
      const int key = job.fresh % UNIT, plane = -1 - column;
      int row = plane ? VALUE_AT : S::OWN_AT;
      int scales = row + (plane ? row_bytes<S::VC, S::DIM>() : row_bytes<S::KC, S::DIM>());
      if (home_unit == 0) {
        row = plane ? S::KEY_BYTES + row_of<S::VC, S::DIM, VS>(key) : row_of<S::KC, S::DIM, KS>(key);
        scales = plane ? S::KEY_BYTES + scales_of<S::VC, S::DIM, VS>(key) : scales_of<S::KC, S::DIM, KS>(key);
      }
      if (S::KC == S::VC || !plane) encode_own<Element, S::KC, S::DIM>(a, plane, head, shared + row, shared + scales, slot, job.key_head);
      else encode_own<Element, S::VC, S::DIM>(a, plane, head, shared + row, shared + scales, slot, job.key_head);
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

// 64 dimensions of a row, two a lane, and the row's largest logit and sum of weights.
struct Pair {
  float2 sums = make_float2(0.f, 0.f);
  float max = -INFINITY, sum = 0.f;
  DEVICE void join(float2 part, float part_sum, float kept, float added) {
    sums.x = join_value(sums.x, kept, part.x, added);
    sums.y = join_value(sums.y, kept, part.y, added);
    sum = join_value(sum, kept, part_sum, added);
  }
  DEVICE void join(const Pair& part) {
    float kept, added;
    join_factors(max, part.max, part.sum, kept, added);
    join(part.sums, part.sum, kept, added);
  }
};

// A unit's results to whom they are due: item i to block i of the cluster, in turn.
template <class S>
DEVICE void send_items(const Attention& a, const Sums<S>& unit, uint8_t* shared, int unit_of_split) {
  float* rows = reinterpret_cast<float*>(shared + S::ROWS_AT);
  const int mask = (1 << a.ring) - 1, items = a.group * S::BLOCKS;
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(shared + S::BARRIER_AT);
  const uint32_t inbox = (uint32_t)__cvta_generic_to_shared(rows + a.group * S::ROW) + unit_of_split * S::ITEM_BYTES;
  unit.write(rows, (1u << a.group) - 1);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < items * 16; i += S::THREADS) {
    const int item = i / 16, quad = i % 16, row = item / S::BLOCKS, block = item % S::BLOCKS, to = item & mask;
    const float* from = rows + row * S::ROW;
    const uint32_t there = address_of_block(inbox + (item >> a.ring) * (SPLIT_UNITS * S::ITEM_BYTES), to), counter = address_of_block(barrier, to);
    send(there + quad * 16, counter, *reinterpret_cast<const float4*>(from + block * 64 + 4 * quad));
    if (quad == 0) send(there + 256, counter, *reinterpret_cast<const float4*>(from + S::DIM));
  }
}

// Joins parts of 64 dimensions of a row, in order: the units of a split (`from` below zero) or splits of the workspace.
template <int MOST, class F, class G>
DEVICE void join_parts_few(Pair& pair, int count, F sums_of, G state_of) {
  const int lane = threadIdx.x & 31;
  float2 sums[MOST], state = make_float2(-INFINITY, 0.f);
#pragma unroll
  for (int k = 0; k < MOST; k++) sums[k] = sums_of(k);  // what lies beyond `count` is not joined
  if (lane < min(count, MOST)) state = state_of(lane);
  // A part a lane: the largest logit of all before it, and its factors.
  float most = state.x, kept, added;
#pragma unroll
  for (int o = 1; o < MOST; o *= 2) {
    const float other = __shfl_up_sync(~0u, most, o);
    if (lane >= o) most = fmaxf(most, other);
  }
  most = fmaxf(most, pair.max);
  float earlier = __shfl_up_sync(~0u, most, 1);
  if (lane == 0) earlier = pair.max;
  join_factors(earlier, state.x, state.y, kept, added);
  pair.max = __shfl_sync(~0u, most, MOST - 1);
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    if (k >= count) break;
    pair.join(sums[k], __shfl_sync(~0u, state.y, k), __shfl_sync(~0u, kept, k), __shfl_sync(~0u, added, k));
  }
}

// Leaves a split in the workspace; the last to come joins all of them: true, and `pair` is the whole.
template <class S>
DEVICE bool join_splits(const Attention& a, Pair& pair, int row, int block, int split, int splits) {
  constexpr int MOST = 16;
  const int lane = threadIdx.x & 31, group = blockIdx.x * gridDim.y + blockIdx.y, stride = a.group * S::ROW;
  float* parts = a.parts + (int64_t)group * a.part_slots * stride + row * S::ROW;
  float* mine = parts + split * stride;
  __stcg(reinterpret_cast<float2*>(mine + block * 64 + 2 * lane), pair.sums);
  if (lane == 0) __stcg(reinterpret_cast<float2*>(mine + S::DIM + 2 * block), make_float2(pair.max, pair.sum));
  __syncwarp();
  int before = 0;
  unsigned* ticket = a.tickets + (group * a.group + row) * S::BLOCKS + block;
  if (lane == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    if (before == splits - 1) *ticket = 0;
  }
  if (__shfl_sync(~0u, before, 0) != splits - 1) return false;
  pair = Pair();
#pragma unroll 1
  for (int from = 0; from < splits; from += MOST) {
    const float* at = parts + from * stride;
    join_parts_few<MOST>(
        pair, splits - from,
        [&](int k) { return __ldcg(reinterpret_cast<const float2*>(parts + min(from + k, splits - 1) * stride + block * 64 + 2 * lane)); },
        [&](int k) { return __ldcg(reinterpret_cast<const float2*>(at + k * stride + S::DIM + 2 * block)); });
  }
  return true;
}

// Grid: tokens, key heads, blocks of all clusters of a key head. `a.ring`: blocks of a cluster, as a power of two; a cluster a split.
template <class S>
DEVICE void attention_few(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  if (!a.early) pdl_wait();
  Job job;
  job.token = blockIdx.x, job.key_head = blockIdx.y, job.rank = cluster_rank();
  const int seq = a.rows[job.token], position = a.positions[job.token], shift = a.ring, size = 1 << shift, split = blockIdx.z >> shift;
  const bool here = (unsigned)seq < (unsigned)a.batch;
  job.pages = a.block_table + (here ? seq * a.max_pages : 0);
  job.to = here ? min(max(position, -1), a.key_limit - 1) + 1 : 0;
  job.fresh = here && a.new_key && position < job.to ? position : -1;
  const int units = (job.to + UNIT - 1) / UNIT, splits = (units + SPLIT_UNITS - 1) / SPLIT_UNITS;
  if (split > 0 && split >= splits) {
    if (a.early) pdl_wait();
    return;
  }
  const int of_split = min(units - split * SPLIT_UNITS, SPLIT_UNITS), begin = split * SPLIT_UNITS + job.rank, stop = split * SPLIT_UNITS + of_split;
  // Before the keys and values, behind which everything else would queue; a lane a unit of this block.
  const int unit_of_lane = min(begin + ((int)(threadIdx.x & 31) << shift), stop - 1);
  const int page_of_lane = begin < stop ? job.pages[page_of(a, unit_of_lane * UNIT)] : -1;
  const Rotation<typename S::Element, S::DIM> rotation(a, job.token);
  const int64_t any_slot = a.slots ? a.slots[job.token] : -1;
  if (begin < stop) {
    const Rows rows = rows_of(a, job, begin, __shfl_sync(~0u, page_of_lane, 0));
    fetch_keys<S>(a, job, shared, rows, begin);
    fetch_values<S>(a, job, shared, rows, begin);
  }
  const int fresh_unit = job.fresh / UNIT;
  const bool own = job.fresh >= 0 && fresh_unit >= begin && fresh_unit < stop && ((fresh_unit - begin) & (size - 1)) == 0;
  const int home_unit = own ? (fresh_unit - begin) >> shift : -1;
  const int64_t slot = own ? any_slot : -1;
  for (int i = threadIdx.x; i < S::COLUMNS * S::DIM / 8; i += S::THREADS) reinterpret_cast<uint4*>(shared + S::QUERIES_AT)[i] = make_uint4(0, 0, 0, 0);
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(shared + S::BARRIER_AT);
  const int items = a.group * S::BLOCKS, my_items = (items - job.rank + size - 1) >> shift, lane = threadIdx.x & 31;
  const float* inbox = reinterpret_cast<const float*>(shared + S::ROWS_AT) + a.group * S::ROW;
  if (threadIdx.x == 0) {
    inbox_init(barrier);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    inbox_expect(barrier, my_items * max(of_split, 0) * S::ITEM_BYTES);
  }
  const int before = own ? 2 : 0;
  const unsigned *source = source_of<S>(a, job, warp_index(), before), *second = source_of<S>(a, job, warp_index() + S::WARPS, before);
  __syncthreads();
  cluster_meet();
  if (a.early) pdl_wait();
  uint32_t raw[2][S::BLOCKS];
  load_items<S>(raw, source, second);
  prepare_few<S>(a, job, rotation, shared, home_unit, slot, raw);
#pragma unroll 1
  for (int index = begin, turn = 0; index < stop; index += size, turn++) {
    const int next = index + size < stop ? index + size : -1;
    const Rows rows = rows_of(a, job, index + size, __shfl_sync(~0u, page_of_lane, turn + 1));
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
    send_items<S>(a, unit, here_now, (turn << shift) + job.rank);
  }
  if (warp_index() < my_items) inbox_wait(barrier, 0);
  __syncwarp();
#pragma unroll 1
  for (int number = warp_index(); number < my_items; number += S::WARPS) {
    const int item = (number << shift) + job.rank, row = item / S::BLOCKS, block = item % S::BLOCKS;
    const float* sent = inbox + number * SPLIT_UNITS * S::ITEM;
    Pair pair;
    join_parts_few<SPLIT_UNITS>(
        pair, of_split, [&](int k) { return *reinterpret_cast<const float2*>(sent + k * S::ITEM + 2 * lane); },
        [&](int k) { return *reinterpret_cast<const float2*>(sent + k * S::ITEM + 64); });
    if (splits > 1 && !join_splits<S>(a, pair, row, block, split, splits)) continue;
    float even = pair.sums.x, odd = pair.sums.y;
    if (is_hadamard<S::VC>()) {
      butterflies<false>(even, odd);
      even *= 1.f / 32.f;
      odd *= 1.f / 32.f;
    }
    const float inverse = inverse_of(pair.sum);
    static_cast<uint32_t*>(a.out)[((job.token * a.q_heads + job.key_head * a.group + row) * S::BLOCKS + block) * 32 + lane] =
        word_of(make_float2(__fmul_rn(even, inverse), __fmul_rn(odd, inverse)), typename S::Element());
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
