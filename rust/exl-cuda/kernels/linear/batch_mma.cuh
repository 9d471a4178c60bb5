// y = x @ W for 9 to 64 activation rows on cards from sm_80 on without wgmma: batch.cuh with `mma.sync` and `cp.async`.
//
// The division of work, the packed activations, the exchange between blocks and the results are those of batch.cuh. All warps of a block
// multiply, one row tile each, and copy: a warp the weights of its tile, all warps the activations. A stage of the ring is one unit of K.
// The ring is empty between items, so that the sums of a block that processes all of K can take its place.
#pragma once
#include "linear/batch_finish.cuh"

#if __CUDA_ARCH__ >= 800 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BATCH_MMA 1

// Packed activations of one unit in shared memory, N columns.
template <int N>
struct StagedColumns {
  uint32_t at;  // includes the lane's offset
  DEVICE StagedColumns(uint32_t stage, int lane) : at(stage + (lane / 8 * N + lane % 8) * 16) {}
  DEVICE uint4 get(int n, int k) const {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at + k * (2 * N) + n * 128)
                 : "memory");
    return v;
  }
};

template <int PENDING>
DEVICE void await_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int KIND, int ENTRY, int N, int W>
struct BatchMma : BatchFinish<N, false> {
  using Finish = BatchFinish<N, false>;
  using Finish::Finish;
  using Finish::S, Finish::p, Finish::memory, Finish::base, Finish::step, Finish::first, Finish::order, Finish::own, Finish::per_block;
  using Finish::place, Finish::number, Finish::announce, Finish::agree, Finish::leave, typename Finish::Place;
  static constexpr int NT = N / 8, THREADS = W * 128, ENTRIES = UNIT_ROWS / ENTRY, X_BYTES = 512 * N;
  // A unit's row in the block's table: {offset, bytes, widths | number << WIDTHS_BITS}, maxima.
  static constexpr int ROW = ENTRY == 128 ? 16 : 32, MAXIMA_AT = ENTRY == 128 ? 12 : 16;

  DEVICE void set_up() const {
#pragma unroll 1
    for (int m = 0; m < p.count; m++) {
      const BatchPart& part = p.part[m];
      const int entries = (part.a.rows + ENTRY - 1) / ENTRY;
#pragma unroll 1
      for (int i = threadIdx.x; i < own; i += THREADS) {
        const int u = order.unit(i);
        const uint2 unit = __ldg(part.a.units + u);
        uint8_t* const row = memory + part.units_at + i * ROW;
        uint32_t* const words = reinterpret_cast<uint32_t*>(row);
        words[0] = unit.x;
        words[1] = __ldg(&part.a.units[u + 1].x) - unit.x;
        words[2] = unit.y | u << WIDTHS_BITS;
        __half* const maxima = reinterpret_cast<__half*>(row + MAXIMA_AT);
        for (int e = 0; e < ENTRIES; e++)
          maxima[e] = part.a.maxima && u * ENTRIES + e < entries ? part.a.maxima[u * ENTRIES + e] : __half(0.f);
      }
    }
    __syncthreads();
  }

  // ---- copies
  DEVICE static void copy16(uint32_t to, const uint8_t* from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
  }
  DEVICE static uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }
  DEVICE uint32_t slot_at(int slot) const { return base + p.ring_at + slot * p.stage_stride; }
  DEVICE uint32_t rows_of(int matrix) const { return base + p.part[matrix].units_at; }
  struct Source {
    const uint8_t* tile;  // null if this warp has none
    uint32_t rows;        // of the matrix's table
  };
  DEVICE Source source(const Place& here) const {
    const int tile = here.tile + threadIdx.x / 32 % 4;
    const BatchPart& part = p.part[here.matrix];
    const bool some = here.some && static_cast<int>(threadIdx.x / 128) < p.groups && tile < part.a.tiles;
    return {some ? part.a.image + (size_t)tile * part.a.tile_bytes : nullptr, rows_of(here.matrix)};
  }
  DEVICE void copy_weights(const Source& source, int i, int slot, uint64_t policy) const {
    if (!source.tile) return;
    const uint2 unit = SharedBytes{source.rows}.get8(i * ROW);
    const uint32_t to = slot_at(slot) + threadIdx.x / 32 * p.unit_room;
#pragma unroll 4
    for (uint32_t at = threadIdx.x % 32 * 16; at < unit.y; at += 512) copy16(to + at, source.tile + unit.x + at, policy);
  }
  DEVICE void copy_activations(int i, int slot) const {
    const uint32_t u = SharedBytes{rows_of(0)}.get4(i * ROW + 8) >> WIDTHS_BITS, to = slot_at(slot) + p.groups * ITEM_TILES * p.unit_room;
    const uint8_t* from = p.x + (size_t)u * X_BYTES;
    static_assert(X_BYTES % (THREADS * 16) == 0, "all threads copy as much");
#pragma unroll
    for (int at = 0; at < X_BYTES; at += THREADS * 16) {
      const uint32_t mine = at + threadIdx.x * 16;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + mine), "l"(from + mine) : "memory");
    }
  }
  DEVICE static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Waits for the oldest stage, of p.slots - 1 that are under way.
  DEVICE void await_stage() const {
    if (p.slots == 2) await_all_but<0>();
    else if (p.slots == 3) await_all_but<1>();
    else await_all_but<2>();
    __syncthreads();
  }

  // ---- one item of each warpgroup
  struct Ring {
    Source from;
    int i = 0, slot = 0;  // the next unit, and its slot
    uint64_t policy;
  };
  DEVICE void copy_next(Ring& ring) const {
    if (ring.i < own) {
      copy_weights(ring.from, ring.i, ring.slot, ring.policy);
      copy_activations(ring.i, ring.slot);
    }
    commit();
    ring.i++;
    ring.slot = ring.slot + 1 == p.slots ? 0 : ring.slot + 1;
  }
  // `waits`: the previous launch may still write the activations.
  DEVICE Ring fill(const Source& from, bool waits) const {
    Ring ring{from};
    ring.policy = evict_first();
#if __CUDA_ARCH__ >= 900
    if (waits) {
      const int ahead = min(p.slots - 1, own);
#pragma unroll 1
      for (int s = 0; s < ahead; s++) copy_weights(from, s, s, ring.policy);
      pdl_wait();
#pragma unroll 1
      for (int s = 0; s < p.slots - 1; s++) {
        if (s < ahead) copy_activations(s, s);
        commit();
      }
      ring.i = ring.slot = p.slots - 1;
      return ring;
    }
#endif
#pragma unroll 1
    for (int s = 1; s < p.slots; s++) copy_next(ring);
    return ring;
  }
  DEVICE void multiply() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / 128;
    int begun = 0;
    bool agrees = p.cut > 1, waits = true;
#pragma unroll 1
    for (int block = first; block < p.shares; block += step) {
      const Place here = place(block, min(group, p.groups - 1));
      const Source from = source(here);
      Ring ring = fill(from, waits);
      if (agrees && threadIdx.x == 0) begun = announce();
      waits = false;
      const uint32_t rows = rows_of(here.matrix);
      uint32_t row = rows;
      int slot = 0;
      float held[S];
#pragma unroll
      for (int e = 0; e < S; e++) held[e] = 0.f;
#pragma unroll 1
      for (int quarter = order.first; quarter < order.first + order.quarters; quarter++) {
        float sum[S];
#pragma unroll
        for (int e = 0; e < S; e++) sum[e] = 0.f;
#pragma unroll 1
        for (int s = 0; s < 4; s++) {
          Sums<NT> total[1];
          clear(total[0]);
#pragma unroll 1
          for (const uint32_t end = row + order.in_class(quarter, s) * ROW; row != end; row += ROW) {
            await_stage();
            copy_next(ring);
            if (from.tile) {
              const uint32_t at = slot_at(slot);
              const SharedBytes weights[1] = {{at + warp * p.unit_room}};
              const StagedColumns<N> columns(at + p.groups * ITEM_TILES * p.unit_room, lane);
              UnitMatmul<KIND, ENTRY, NT, 1, SharedBytes, StagedColumns<N>, SharedMaxima> product{
                  weights, columns, SharedMaxima{row + MAXIMA_AT}, total, lane, {}};
              product.run(SharedBytes{row}.get4(8) & WIDTHS_MASK);
            }
            slot = slot + 1 == p.slots ? 0 : slot + 1;
          }
#pragma unroll
          for (int e = 0; e < S; e++) sum[e] += total[0][e / 4][e % 4];
        }
#pragma unroll
        for (int e = 0; e < S; e++) held[e] += sum[e];
      }
      if (agrees && threadIdx.x == 0) number() = agree(begun);
      agrees = false;
      __syncthreads();  // the ring is empty
      if (group < p.groups) leave(block, order.first + order.quarters - 1, held);
      __syncthreads();
    }
  }
};
#endif

template <int KIND, int ENTRY, int N, int W>
DEVICE void batch_mma(const BatchTask& p) {
#ifdef BATCH_MMA
  extern __shared__ __align__(128) uint8_t memory[];
  const BatchMma<KIND, ENTRY, N, W> batch(p, memory);
  pdl_trigger();
  batch.set_up();
  batch.multiply();
#else
  __trap();  // the host starts this kernel only where the code has it
#endif
}

#define BATCH_MMA_OF(KIND, kind, ENTRY, N, W)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(W * 128, 1) gemm_batch_mma_##kind##_##ENTRY##_##N##x##W(const __grid_constant__ BatchTask p) { \
    batch_mma<KIND, ENTRY, N, W>(p);                                                                                                          \
  }
// In the order of `MMA_VARIANTS` in src/ops/linear/batch/plan.rs.
#define BATCHES_MMA(KIND, kind, ENTRY)    \
  BATCH_MMA_OF(KIND, kind, ENTRY, 16, 4) \
  BATCH_MMA_OF(KIND, kind, ENTRY, 32, 4) \
  BATCH_MMA_OF(KIND, kind, ENTRY, 64, 2)
