// Attention of one token a sequence, between the other kernels of a decode step. There, a launch's cost is the latency before the first
// matmul and the joining, not the arithmetic. So blocks are small (72 registers, about 42 KB): they fit on an SM beside a block of the ring
// kernel and prefetch their keys and values before the previous launch ends. Blocks of a cluster join their parts through distributed
// shared memory.
//
// A cluster takes a split of eight units, and each of its blocks every n-th unit for n blocks. Units join in the cluster and splits join in
// the workspace, in the order of attention_common.cuh. The results are bitwise identical to those of attention_decode.cuh.
#pragma once
#include "attention/attention_single.cuh"
#include "common/cluster.cuh"

template <class ELEMENT, int KEY_CODEC, int VALUE_CODEC, int DIM_, int COLUMN_TILES, bool PADDED_>
struct Few : Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 0> {
  using Base = Stages<KEY_CODEC, VALUE_CODEC, DIM_, 4, 0>;
  using Element = ELEMENT;
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, NT = COLUMN_TILES, WARPS = 4, THREADS = 128, FETCHERS = 128, COLUMNS = 8 * NT;
  static constexpr int MT = DIM / 64, BLOCKS = DIM / 64, ROW = DIM + 4;
  static constexpr int ITEM = 68, ITEM_BYTES = 4 * ITEM;  // floats of 64 dimensions of a row: sums; largest logit, sum of weights, padding
  static constexpr int JOINED = 16;         // splits that the last block loads at once
  static constexpr bool REGISTERS = false, PADDED = PADDED_;  // queries stay in shared memory
  static constexpr int UNROLLED = 2, JOIN_ROUNDS = 2;  // little code: a launch takes longer to fetch it than to run it
  // A unit's keys and values, then: queries, weights, largest logits, own key and value, a barrier, the places of results (`ordered`), rows
  // of a unit's results, and the unit results that the cluster's blocks sent.
  static constexpr int QUERIES_AT = Base::UNIT_BYTES, WEIGHTS_AT = QUERIES_AT + COLUMNS * DIM * 2, MAXIMA_AT = WEIGHTS_AT + 4 * NT * 256;
  static constexpr int OWN_AT = MAXIMA_AT + 4 * COLUMNS * 4, BARRIER_AT = OWN_AT + packed_bytes<KC, DIM>() + packed_bytes<VC, DIM>();
  static constexpr int PLACES_AT = BARRIER_AT + 16, ROWS_AT = PLACES_AT + 4 * THREADS;
  DEVICE static constexpr int warps() { return WARPS; }
};

#if __CUDA_ARCH__ >= 900
// Returns zero, which the compiler cannot know. It computes addresses that depend on it where they are used and does not keep them in
// registers.
DEVICE uint32_t not_before() {
  uint32_t zero = 0;
  asm volatile("" : "+r"(zero));
  return zero;
}

// A unit's logits, weights and sums. `next`: the unit after it, or -1, and the place of its keys.
template <class S>
DEVICE void attend_unit_few(const Attention& a, const Job& job, Sums<S>& unit, uint8_t* shared, int index, int next,
                            Rows rows) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, key = index * UNIT + 16 * warp + (lane >> 2);
  float* maxima = reinterpret_cast<float*>(shared + S::MAXIMA_AT);
  uint2* weights = reinterpret_cast<uint2*>(shared + S::WEIGHTS_AT);
  float x[S::NT][4];
  unit_logits<S>(x, shared, nullptr, reinterpret_cast<const uint4*>(shared + S::QUERIES_AT));
#pragma unroll
  for (int j = 0; j < S::NT; j++) {
    scale_logits(a, x[j]);
#pragma unroll
    for (int i = 0; i < 4; i++) x[j][i] = key + 8 * (i >> 1) < job.to ? x[j][i] : -INFINITY;
  }
  unit_maxima<S>(x, maxima);
  copy_wait<0>();
  __syncthreads();
  if (next >= 0) {
    fetch_keys<S>(a, job, shared, rows, next);
    copy_commit();
  }
  unit_weights<S>(unit, x, maxima, weights);
  __syncthreads();
  unit_values<S>(unit, shared + S::KEY_BYTES, weights);
  if (next >= 0) {
    __syncthreads();
    fetch_values<S>(a, job, shared, rows, next);
    copy_commit();
  }
}

// Sends a unit's results to the blocks that join them: item i to block i of the cluster, cyclically.
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

// Grid: tokens, key heads, blocks of all clusters of a key head. `a.ring`: log2 of the blocks of a cluster; one cluster takes one split.
template <class S>
DEVICE void attention_few(const Attention& a) {
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  if (!a.early) pdl_wait();
  const Job job(a, cluster_rank());
  const int shift = a.ring, size = 1 << shift, split = blockIdx.z >> shift;
  const int units = (job.to + UNIT - 1) / UNIT, splits = (units + SPLIT_UNITS - 1) / SPLIT_UNITS;
  if (split > 0 && split >= splits) {
    if (a.early) pdl_wait();
    return;
  }
  const int of_split = min(units - split * SPLIT_UNITS, SPLIT_UNITS), begin = split * SPLIT_UNITS + job.rank, stop = split * SPLIT_UNITS + of_split;
  // Loaded before the keys and values, because later loads would queue behind those; one lane a unit of this block.
  const int unit_of_lane = min(begin + ((int)(threadIdx.x & 31) << shift), stop - 1);
  const int page_of_lane = begin < stop ? job.pages[page_of(a, unit_of_lane * UNIT)] : -1;
  const Rotation<S> rotation(a, job.token);
  const int64_t any_slot = a.slots ? a.slots[job.token] : -1;
  const float2 norms = load_norms<S>(a);
  const int items = a.group * S::BLOCKS, my_items = (items - job.rank + size - 1) >> shift, lane = threadIdx.x & 31;
  if (a.row_of_feature && warp_index() < my_items) {
    if constexpr (S::PADDED) {
      const int feature = padded_feature<S>(a, job, (warp_index() << shift) + job.rank);
      copy_async<4>(shared + S::PLACES_AT + 4 * threadIdx.x, a.row_of_feature + max(feature, 0), feature >= 0);
    } else {
      const int at = (job.key_head * items + (warp_index() << shift) + job.rank) * 32 + lane;
      copy_async<4>(shared + S::PLACES_AT + 4 * threadIdx.x, reinterpret_cast<const uint32_t*>(a.row_of_feature) + at, true);
    }
    copy_commit();
  }
  if (begin < stop) {
    const Rows rows = rows_of(a, job, begin, __shfl_sync(~0u, page_of_lane, 0));
    fetch_keys<S>(a, job, shared, rows, begin);
    copy_commit();
    fetch_values<S>(a, job, shared, rows, begin);
    copy_commit();
  }
  const int fresh_unit = job.fresh / UNIT;
  const bool own = job.fresh >= 0 && fresh_unit >= begin && fresh_unit < stop && ((fresh_unit - begin) & (size - 1)) == 0;
  const int home_unit = own ? (fresh_unit - begin) >> shift : -1;
  const int64_t slot = own ? any_slot : -1;
  for (int i = threadIdx.x; i < S::COLUMNS * S::DIM / 8; i += S::THREADS) reinterpret_cast<uint4*>(shared + S::QUERIES_AT)[i] = make_uint4(0, 0, 0, 0);
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(shared + S::BARRIER_AT);
  const float* inbox = reinterpret_cast<const float*>(shared + S::ROWS_AT) + a.group * S::ROW;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(barrier, my_items * max(of_split, 0) * S::ITEM_BYTES);
  }
  const int before = own ? 2 : 0;
  const unsigned *source = source_of<S>(a, job, warp_index(), before), *second = source_of<S>(a, job, warp_index() + S::WARPS, before);
  put_norms<S>(a, shared, norms);
  __syncthreads();
  cluster_arrive();  // lanes may have left a wait one by one
  cluster_wait();
  if (a.early) pdl_wait();
  uint32_t raw[2][S::BLOCKS];
  load_items<S>(a, raw, source, second);
  prepare_items<S>(a, job, rotation, shared, own, home_unit == 0 ? 0 : -1, slot, raw);
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
  if (warp_index() < my_items) barrier_wait_cluster(barrier, 0);
  __syncwarp();
#pragma unroll 1
  for (int number = warp_index(); number < my_items; number += S::WARPS) {
    const int item = (number << shift) + job.rank, row = item / S::BLOCKS, block = item % S::BLOCKS;
    const float* sent = inbox + number * SPLIT_UNITS * S::ITEM;
    Pair pair;
    join_in_order<SPLIT_UNITS, S::JOIN_ROUNDS>(
        pair, of_split, [&](int k) { return *reinterpret_cast<const float2*>(sent + k * S::ITEM + 2 * lane); },
        [&](int k) { return *reinterpret_cast<const float2*>(sent + k * S::ITEM + 64); });
    if (splits > 1 && !join_splits<S>(a, pair, row, block, split, splits)) continue;
    const bool known = a.row_of_feature && number < S::WARPS;
    store_item<S>(a, job, pair, item, known ? reinterpret_cast<const uint32_t*>(shared + S::PLACES_AT) + threadIdx.x : nullptr);
  }
}
#else
template <class S>
DEVICE void attention_few(const Attention&) {}
#endif

#define FEW_KERNEL(name, ELEMENT, KC, VC, DIM, NT, PADDED, BLOCKS)                                          \
  extern "C" __global__ void __launch_bounds__(128, BLOCKS) name(const __grid_constant__ Attention a) {      \
    attention_few<Few<ELEMENT, KC, VC, DIM, NT, PADDED>>(a);                                                 \
  }
#define FEW(kind, element, ELEMENT, KC, VC, DIM, NT, BLOCKS) \
  FEW_KERNEL(attention_##kind##_##element##_##DIM##_few##NT, ELEMENT, KC, VC, DIM, NT, false, BLOCKS)
#define FEWS_OF(kind, element, ELEMENT, KC, VC)                                                       \
  FEW(kind, element, ELEMENT, KC, VC, 64, 1, 7) FEW(kind, element, ELEMENT, KC, VC, 64, 2, 5)         \
  FEW(kind, element, ELEMENT, KC, VC, 128, 1, 7) FEW(kind, element, ELEMENT, KC, VC, 128, 2, 4)       \
  FEW(kind, element, ELEMENT, KC, VC, 256, 1, 5) FEW(kind, element, ELEMENT, KC, VC, 256, 2, 3)       \
  FEW_KERNEL(attention_##kind##_##element##_padded_few1, ELEMENT, KC, VC, 128, 1, true, 7)
#define FEWS(kind, KC, VC) FEWS_OF(kind, f16, __half, KC, VC) FEWS_OF(kind, bf16, __nv_bfloat16, KC, VC)
