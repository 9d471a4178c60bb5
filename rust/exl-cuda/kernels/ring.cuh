// y = f(x @ W) for at most eight activation rows on sm_90 and later, near the memory roof (design: spec/kernels-measured.md 3.2).
//
// One block per multiprocessor walks a contiguous run of row tiles, of up to three matrices over one input. One thread streams stages
// (eight units of a tile each) through a ring of shared-memory slots with bulk copies, never more than `window` stages in flight. The
// sixteen consumer warps multiply, a class of units each, another class with every tile, so that wide units burden all alike. One warp
// adds the classes in order, does what follows the product, and stores.
// Weights are fetched before the wait for the predecessor kernel; activations after it.
//
// Where a block has many tiles of 9 to 16 units (`keep`), a warp keeps its class for eight tiles and finds what belongs to its unit once; gated
// pairs then are all tiles that gate and after them what these gate. The walk tile by tile begins sooner, which is what short launches are. Both
// are one kernel: in a decode step, a kernel of its own for each costs more in instructions fetched than it saves.
//
// In a decode step other kernels run in between, and a launch finds none of its instructions and parameters in the multiprocessor's
// caches: code that is passed once costs more than what it does. So loops are not unrolled where they need not be.
#pragma once
#include "activate.cuh"
#include "ring_fill.cuh"
#include "ring_task.cuh"

#if __CUDA_ARCH__ >= 900
DEVICE void stream_weights(const Task& p, uint32_t base) {
  const Barriers s(p, base);
  const uint64_t policy = evict_first();
  Turn turn, landed;
  int count = 0;
#pragma unroll 1
  for (Walk walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const Part& part = p.part[matrix];
    const uint8_t* from = part.a.image + (size_t)tile * part.a.tile_bytes;
    const int stages = part.stages;
    uint32_t begin = 0;
#pragma unroll 1
    for (int i = 0; i < stages; i++, count++) {
      const uint32_t end = p.stage_begin[matrix][i + 1], bytes = end - begin;
      if (count >= p.slots) barrier_wait(s.empty + turn.slot * 8, turn.phase ^ 1);
      // Weights queued far ahead delay everything else the memory has to deliver; spec/kernels-measured.md 6.1.
      if (count >= p.window) {
        barrier_wait(s.full + landed.slot * 8, landed.phase);
        landed.advance(p.slots);
      }
      const uint32_t full = s.full + turn.slot * 8;
      barrier_expect(full, bytes);
      copy_to_shared(base + turn.slot * p.stage_stride, from + begin, bytes, full, policy);
      begin = end;
      turn.advance(p.slots);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- products
// What a warp that keeps its class does, for matrices of 9 to 16 units each: it has one unit of a tile at most.
template <int KIND, int ENTRY>
struct Keeper {
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY, NEXT_CLASS = 5;
  static constexpr int STAY = 8;  // tiles in a row in which a warp keeps its class
  const Task& p;
  const uint32_t base, full, empty, row;
  const int lane, slots;
  int cls, tile = 0, slot = 0;  // slot: of the next tile's first stage
  uint32_t phase = 0;

  DEVICE Keeper(const Task& p, uint32_t base, const Barriers& s)
      : p(p), base(base), full(s.full), empty(s.empty),
        row(min(static_cast<int>(threadIdx.x) % 32 >> 2, p.m - 1) * p.x_stride * 2 + threadIdx.x % 4 * 16), lane(threadIdx.x % 32),
        slots(p.slots), cls(threadIdx.x / 32) {}

  DEVICE void skip(int count) {
    slot += count;
    if (slot >= slots) {
      slot -= slots;
      phase ^= 1;
    }
  }
  // Hands the sum of a class over.
  DEVICE void leave(const Sums<1>& total) {
    const Barriers s(p, base);
    const uint32_t buffer = tile % RESULT_BUFFERS, result_row = p.columns * 4;
    barrier_wait(s.free + buffer * 8, (tile / RESULT_BUFFERS & 1) ^ 1);
    if (2 * (lane & 3) < p.columns) {
      const uint32_t to = base + p.results_at + ((buffer * CLASSES + cls) * TILE + (lane >> 2)) * result_row + 8 * (lane & 3);
      store_pair(to, total[0][0], total[0][1]);
      store_pair(to + 8 * result_row, total[0][2], total[0][3]);
    }
    warp_arrives(s.ready + buffer * 8, lane);
    tile++;
  }
  // Tiles up to `end`. B: the unit's bits, 0 where there is none, -1 for several widths.
  template <int B>
  DEVICE void tiles(const uint4& place, uint2 unit, int end) {
    const uint32_t codes = base + unit.x;
    const SharedColumns columns{place.x + row + cls * UNIT_ROWS * 2};
    const SharedMaxima maxima{place.z + cls * ENTRIES * 2};
#pragma unroll 1
    while (tile < end) {
      barrier_wait(full + slot * 8, phase);
      Sums<1> total[1];
      clear(total[0]);
      if constexpr (B != 0) {
        const SharedBytes weights[1] = {{codes + slot * p.stage_stride}};
        UnitProduct<KIND, ENTRY, 1, 1, SharedBytes, SharedColumns, SharedMaxima> product{weights, columns, maxima, total, lane, {}};
        if constexpr (B > 0) product.template run_uniform<B>();
        else product.run(unit.y);
      }
      warp_arrives(empty + slot * 8, lane);
      skip(2);  // stages a tile
      leave(total[0]);
    }
  }
  DEVICE void some_tiles(const uint4& place, int end) {
    const int stage = cls >> 3;
    const uint2 unit = cls < place.w ? SharedBytes{place.y}.get8(cls * 8) : make_uint2(0, 0);
    skip(stage);
    switch (unit.y) {
      case 0: tiles<0>(place, unit, end); break;
      case 0x4444: tiles<4>(place, unit, end); break;
      case 0x3333: tiles<3>(place, unit, end); break;
      case 0x2222: tiles<2>(place, unit, end); break;
      case 0x8888: tiles<8>(place, unit, end); break;
      case 0x5555: if constexpr (KIND == EXL2) tiles<5>(place, unit, end); break;
      case 0x6666: if constexpr (KIND == EXL2) tiles<6>(place, unit, end); break;
      default: tiles<-1>(place, unit, end);
    }
    slot -= stage;
    if (slot < 0) {
      slot += slots;
      phase ^= 1;
    }
    cls = (cls + NEXT_CLASS) & (CLASSES - 1);
  }
  DEVICE void run(const uint4* places) {
    Walk walk(p);
    int end = 0;
#pragma unroll 1
    while (walk.more()) {
      int matrix, number;
      walk.find(p, matrix, number);
      const int count = walk.rest(p, matrix, number);
      const uint4 place = places[matrix];
      walk.at += count;
      end += count;
#pragma unroll 1
      while (tile < end) some_tiles(place, min(tile + STAY, end));
    }
  }
};

template <int KIND, int ENTRY>
DEVICE void consume(const Task& p, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY, NEXT_CLASS = 5, NEVER = 0x7fffffff;
  __shared__ uint4 places[MATRICES];
  const Barriers s(p, base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int slots = p.slots, stored = 2 * t < p.columns;
  const uint32_t stride = p.stage_stride, result_row = p.columns * 4, result_place = base + p.results_at + (g * p.columns + 2 * t) * 4;
  load_constants<ENTRY>(p, memory);
  fill_shared(p, memory);
  // Where a matrix's data stand, as the loop wants it: activations, unit table, maxima, number of units.
  if (threadIdx.x < p.count) {
    const Part& part = p.part[threadIdx.x];
    places[threadIdx.x] = make_uint4(base + part.x_at, base + part.units_at, base + part.maxima_at, part.a.unit_count);
  }
  bar<1>(RING_THREADS);
  if (p.keep) {
    Keeper<KIND, ENTRY>(p, base, s).run(places);
    return;
  }
  const uint32_t row = min(g, p.m - 1) * p.x_stride * 2 + t * 16;
  const bool gated = p.gate >= 0;
  const int second = p.count > 1 ? p.part[0].a.tiles : NEVER, third = p.count > 2 ? second + p.part[1].a.tiles : NEVER;
  Turn turn, result;  // turn: the ring's slot of the tile's first stage
  int cls = warp;
#pragma unroll 1
  for (Walk walk(p); walk.more(); walk.at++) {
    const int matrix = gated ? walk.at & 1 : (walk.at >= second) + (walk.at >= third);
    const uint4 place = places[matrix];
    const int units = place.w, stages = (units + 7) / 8;
    Turn mine = turn;
    mine.skip(cls / 8, slots);
    Sums<1> total[1];
    clear(total[0]);
#pragma unroll 1
    for (int u = cls; u < 8 * stages; u += CLASSES) {
      const uint2 unit = u < units ? SharedBytes{place.y}.get8(u * 8) : make_uint2(0, 0);
      barrier_wait(s.full + mine.slot * 8, mine.phase);
      if (u < units) {
        const SharedBytes weights[1] = {{base + mine.slot * stride + unit.x}};
        const SharedColumns columns{place.x + row + u * UNIT_ROWS * 2};
        const SharedMaxima maxima{place.z + u * ENTRIES * 2};
        UnitProduct<KIND, ENTRY, 1, 1, SharedBytes, SharedColumns, SharedMaxima> product{weights, columns, maxima, total, lane, {}};
        product.run(unit.y);
      }
      warp_arrives(s.empty + mine.slot * 8, lane);
      mine.skip(2, slots);
    }
    turn.skip(stages, slots);
    barrier_wait(s.free + result.slot * 8, result.phase ^ 1);
    if (stored) {
      const uint32_t to = result_place + (result.slot * CLASSES + cls) * (TILE * result_row);
      store_pair(to, total[0][0][0], total[0][0][1]);
      store_pair(to + 8 * result_row, total[0][0][2], total[0][0][3]);
    }
    warp_arrives(s.ready + result.slot * 8, lane);
    result.advance(RESULT_BUFFERS);
    cls = (cls + NEXT_CLASS) & (CLASSES - 1);
  }
}

// ---------------------------------------------------------------------------------------------------- after the products
// What follows a product: bias and prescale, the gate's activation, the residual; each rounded where separate operators round.
DEVICE void store_tiles(const Task& p, uint8_t* memory, uint32_t base) {
  constexpr int TURNS = 4;  // of two rows
  const Barriers s(p, base);
  const int lane = threadIdx.x % 32, row = lane % 16;
  const float* multipliers = reinterpret_cast<const float*>(memory + p.multipliers_at);
  Turn result;
  pdl_wait();
  bar<1>(RING_THREADS);
#pragma unroll 1
  for (Walk walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const Part& part = p.part[matrix];
    float* gates = reinterpret_cast<float*>(memory + p.gates_at) + lane;
    if (p.keep) gates += (tile - (walk.end / 2 - walk.half)) * (p.columns / 2 * 32);
    const int n = tile * TILE + row;
    const size_t at = (size_t)part.y_offset + n;
    const bool known = n < part.a.out_features, gated = p.gate >= 0, gates_next = gated && matrix == 0;
    const float bias = part.a.bias && known ? part.a.bias[n] : 0.f, prescale = part.a.prescale;
    float residual[TURNS] = {};
    if (p.residual && known) {
#pragma unroll
      for (int i = 0; i < TURNS; i++) {
        const int token = lane / 16 + 2 * i;
        if (token < p.m) residual[i] = load_result(p.residual, (size_t)token * p.y_stride + at, p.y_kind);
      }
    }
    barrier_wait(s.ready + result.slot * 8, result.phase);
    const float* parts = reinterpret_cast<const float*>(memory + p.results_at) + (result.slot * CLASSES * TILE + row) * p.columns;
    // Unrolled: one after the other, eight rows would keep the consumers waiting.
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      if (2 * i >= p.m) break;
      const int token = lane / 16 + 2 * i;
      const bool wanted = token < p.m && known;
      const float sum = sum_classes([&](int c) { return parts[c * TILE * p.columns + min(token, p.m - 1)]; });
      float v = finish(sum, wanted ? multipliers[token] : 1.f, bias, prescale);
      if (gates_next) {
        gates[i * 32] = rounded(v, p.y_kind);
      } else if (gated) {
        v = activate(gates[i * 32], p.gate) * rounded(v, p.y_kind);
      }
      if (p.residual) v = residual[i] + rounded(v, p.y_kind);
      if (wanted && !gates_next) store_result(p.y, (size_t)token * p.y_stride + at, p.y_kind, v);
    }
    warp_arrives(s.free + result.slot * 8, lane);
    result.advance(RESULT_BUFFERS);
  }
}
#endif

template <int KIND, int ENTRY>
DEVICE void ring_matmul(const Task& p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int tid = threadIdx.x, warp = tid / 32;
  if (warp == CONSUMERS) {
    if (tid % 32 == 0) {
      const Barriers s(p, base);
#pragma unroll 1
      for (int i = 0; i < p.slots; i++) {
        barrier_init(s.full + i * 8, 1);
        barrier_init(s.empty + i * 8, 8 * WARP_ARRIVALS);
      }
#pragma unroll 1
      for (int i = 0; i < RESULT_BUFFERS; i++) {
        barrier_init(s.ready + i * 8, CONSUMERS * WARP_ARRIVALS);
        barrier_init(s.free + i * 8, WARP_ARRIVALS);
      }
      barriers_visible();
      pdl_trigger();
    }
    __syncwarp();
    bar_arrive<1>(RING_THREADS);
    if (tid % 32 == 0) stream_weights(p, base);
  } else if (warp < CONSUMERS) {
    touch_parameters(p);
    consume<KIND, ENTRY>(p, memory, base);
  } else {
    store_tiles(p, memory, base);
  }
  all_leave();
#endif
}

// BOUND: what holds the registers. RING_REGISTERS where the compiler would take more.
#define RING(KIND, kind, ENTRY, BOUND)                                                              \
  extern "C" __global__ void BOUND ring_##kind##_##ENTRY(const __grid_constant__ Task p) { \
    ring_matmul<KIND, ENTRY>(p);                                                                    \
  }
