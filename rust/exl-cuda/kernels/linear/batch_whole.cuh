// Matmuls of 33 to 64 rows on sm_90a, for matrices that are large enough for blocks with all of K: batch.cuh with a more even division.
//
// Whole iterations leave some items over. Blocks first process a quarter of K of one or a few of these items each. The workspace collects
// the sums of quarters, and the last warpgroup to arrive adds them. So no block waits for another, and this work overlaps the matmuls of
// the others.
#pragma once
#include "linear/batch.cuh"

template <int KIND, int ENTRY, int N, int W>
struct BatchWhole;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int KIND, int ENTRY, int N, int W>
struct BatchWhole : Batch<KIND, ENTRY, N, W, false> {
  using Base = Batch<KIND, ENTRY, N, W, false>;
  using Base::Base;
  using Base::p, Base::S, Base::EIGHTS, Base::ROW, Base::first, Base::step, Base::own, Base::order, Base::base, Base::full, Base::empty;
  using typename Base::Place, typename Base::Source;

  // A block's consecutive work: units [from, to) in its order, of a quarter of K of leftover items, or of all of K of the items of `block`.
  struct Span {
    int block, from, to;
    bool quarter;
  };
  DEVICE int blocks() const { return (p.items - p.left + p.groups - 1) / p.groups; }
  // Blocks that form groups of four, each group with the quarters of the same items.
  DEVICE int in_fours() const { return step & ~(QUARTERS - 1); }
  DEVICE bool begin(Span& at) const {
    if (first < min(in_fours(), p.left * QUARTERS)) {
      int from = 0;
      for (int q = 0; q < first % QUARTERS; q++) from += order.in_quarter(q);
      at = {first - step, from, from + order.in_quarter(first % QUARTERS), true};
      return true;
    }
    at = {first, 0, own, false};
    return first < blocks();
  }
  DEVICE bool next(Span& at) const {
    at = {at.block + step, 0, own, false};
    return at.block < blocks();
  }
  DEVICE Place place(const Span& at, int group) const {
    const int whole = p.items - p.left, nth = group * in_fours() + first;
    const int item = at.quarter ? whole + nth / QUARTERS : at.block * p.groups + group;
    Place here = this->item_place(item);
    here.some = at.quarter ? nth < p.left * QUARTERS : item < whole;
    return here;
  }
  DEVICE Source source(const Span& at) const { return this->source_of(place(at, min(threadIdx.x % 32 / ITEM_TILES, p.groups - 1))); }

  DEVICE void stream() const {
    const uint64_t once = evict_first(), again = evict_last();
    Turn turn;
    Span at, of_x;
    int ahead = 0;
    bool more = begin(at);
    int i = at.from, x = at.from;
    of_x = at;
    Source from = source(at);
    auto advance = [&] {
      turn.advance(p.slots);
      if (++i < at.to) return;
      more = next(at);
      i = 0;
      if (more) from = source(at);
    };
#pragma unroll 1
    for (; ahead < p.slots && more; ahead++, advance()) this->copy_weights(from, i, turn, once);
    pdl_wait();
    Turn t;
#pragma unroll 1
    for (; ahead > 0; ahead--, t.advance(p.slots)) {
      this->copy_staged_activations(x, t, again);
      if (++x == of_x.to) {
        next(of_x);
        x = 0;
      }
    }
#pragma unroll 1
    for (; more; advance()) {
      barrier_wait(empty + turn.slot * 8, turn.phase ^ 1);
      this->copy_weights(from, i, turn, once);
      this->copy_staged_activations(i, turn, again);
    }
  }

  DEVICE void multiply() const {
    const int group = threadIdx.x / 128;
    const uint32_t mine = this->room_of_warp();
    Turn turn;
    Span at;
#pragma unroll 1
    for (bool more = begin(at); more; more = next(at)) {
      const Place here = place(at, group);
      if (Base::Unit::all(!here.some)) {
        pass(at, turn);
        continue;
      }
      const uint32_t rows = base + p.part[here.matrix].units_at;
      uint32_t row = rows + at.from * ROW;
      float sum[S];
      if (Base::Unit::all(at.quarter)) {
        this->add_quarter(sum, first % QUARTERS, rows, row, mine, turn, false);
        if (leave_quarter(here, sum)) this->store_item(here, this->own_sums());
        continue;
      }
#pragma unroll 1
      for (int quarter = 0; quarter < QUARTERS; quarter++) {
        this->add_quarter(sum, quarter, rows, row, mine, turn, false);
        this->keep(quarter > 0, sum);
      }
      this->store_item(here, this->own_sums());
    }
  }
  // Skips stages that hold nothing for this warpgroup.
  DEVICE void pass(const Span& at, Turn& turn) const {
#pragma unroll 1
    for (int i = at.from; i < at.to; i++, turn.advance(p.slots)) {
      barrier_wait(full + turn.slot * 8, turn.phase);
      warp_arrives(empty + turn.slot * 8, threadIdx.x % 32);
    }
  }

  // Writes a quarter's sums to the workspace. Returns true in the last of four warpgroups, whose block then holds the total of all four.
  DEVICE bool leave_quarter(const Place& here, const float (&sums)[S]) const {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, nth = here.item - (p.items - p.left);
    float4* const places = p.sums + (size_t)(nth * ITEM_TILES + warp) * (QUARTERS * EIGHTS * 32) + lane;
    Base::leave_sums(places + first % QUARTERS * (EIGHTS * 32), sums, 0);
    __threadfence();
    if (!last_of_four(p.arrivals + nth, group)) return false;
    __threadfence();
    float4* const to = this->own_sums();
    constexpr int AT_ONCE = 2;
#pragma unroll 1
    for (int q = 0; q < EIGHTS; q += AT_ONCE) {
      float4 v[AT_ONCE][QUARTERS];
      float4* const from = places + q * 32;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int k = 0; k < QUARTERS; k++) v[i][k] = __ldcg(from + (k * EIGHTS + i) * 32);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
        for (int k = 0; k < QUARTERS; k++) reinterpret_cast<uint4*>(from)[(k * EIGHTS + i) * 32] = Base::absent();
        to[(q + i) * 32] = make_float4(((v[i][0].x + v[i][1].x) + v[i][2].x) + v[i][3].x, ((v[i][0].y + v[i][1].y) + v[i][2].y) + v[i][3].y,
                                       ((v[i][0].z + v[i][1].z) + v[i][2].z) + v[i][3].z, ((v[i][0].w + v[i][1].w) + v[i][2].w) + v[i][3].w);
      }
    }
    return true;
  }
  // Returns whether this warpgroup is the last of four to arrive at `counter`. The count continues from launch to launch, in the bits above
  // those that `agree` uses.
  DEVICE static bool last_of_four(int* counter, int group) {
    asm volatile("barrier.cta.sync %0, 128;" ::"r"(2 + group) : "memory");
    int last = 0;
    if (threadIdx.x % 128 == 0) last = (atomicAdd(counter, 16) + 16 >> 4 & 3) == QUARTERS - 1;
    asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %0, 0; barrier.cta.red.or.pred q, %1, 128, p; selp.b32 %0, 1, 0, q; }" : "+r"(last) : "r"(2 + group) : "memory");
    return last;
  }
};
#endif

#define BATCH_WHOLE(KIND, kind, ENTRY, N, W, REGISTERS, MORE, FEWER)                                                                     \
  extern "C" __global__ void __maxnreg__(REGISTERS) gemm_batch_whole_##kind##_##ENTRY##_##N##x##W(const __grid_constant__ BatchTask p) { \
    static_assert((W + 1) * REGISTERS == W * MORE + FEWER && (W + 1) * 128 * REGISTERS <= 65536, "registers are handed on");             \
    batch_matmul<BatchWhole<KIND, ENTRY, N, W>, W, MORE, FEWER>(p);                                                                      \
  }
// In the order of `VARIANTS` in src/ops/linear/batch/plan.rs. Registers of a thread: at the launch, if it multiplies, and if it does not.
#define BATCHES(KIND, kind, ENTRY)                                                  \
  BOTH(gemm_batch_##kind##_##ENTRY##_16x4, 96, KIND, ENTRY, 16, 4, 112, 32)         \
  BATCH(gemm_batch_##kind##_##ENTRY##_32x4, 96, KIND, ENTRY, 32, 4, false, 112, 32) \
  BOTH(gemm_batch_##kind##_##ENTRY##_48x3, 128, KIND, ENTRY, 48, 3, 160, 32)        \
  BOTH(gemm_batch_##kind##_##ENTRY##_64x2, 152, KIND, ENTRY, 64, 2, 208, 40)        \
  BOTH(gemm_batch_##kind##_##ENTRY##_64x3, 128, KIND, ENTRY, 64, 3, 160, 32)        \
  BOTH(gemm_batch_##kind##_##ENTRY##_80x2, 152, KIND, ENTRY, 80, 2, 208, 40)        \
  BOTH(gemm_batch_##kind##_##ENTRY##_96x2, 152, KIND, ENTRY, 96, 2, 208, 40)        \
  BOTH(gemm_batch_##kind##_##ENTRY##_128x2, 168, KIND, ENTRY, 128, 2, 240, 24)
