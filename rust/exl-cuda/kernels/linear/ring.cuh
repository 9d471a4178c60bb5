// y = f(x @ W) for at most eight activation rows on sm_90 and later, near the memory roofline.
//
// One block per SM walks a contiguous run of row tiles of up to three matrices over one input. One warp streams stages (eight units of a
// tile each) through a ring of shared-memory slots with bulk copies, with at most `window` stages in flight. The sixteen consumer warps
// multiply, each a class of units, and another class with every tile, so that wide units load all warps equally. One warp adds the classes
// in order, applies the epilogue, and stores. Weights are fetched before the wait for the predecessor kernel; activations after it.
//
// If a block has many tiles of 9 to 16 units (`keep`), a warp keeps its class for eight tiles and looks up its unit's tables once. A gated
// pair's gates then all come before the tiles that they gate. The walk tile by tile starts sooner, which matters for short launches. Both
// are one kernel: in a decode step, separate kernels cost more in instruction fetches than they save.
//
// In a decode step other kernels run in between, and a launch finds none of its instructions and parameters in the SM's caches. Code that
// runs once costs more to fetch than to execute, so loops are not unrolled without need.
#pragma once
#include "linear/gate.cuh"
#include "linear/ring_adapters.cuh"
#include "linear/ring_fill.cuh"
#include "linear/ring_task.cuh"

#if __CUDA_ARCH__ >= 900
// Requests up to a window of the first tile's stages before any set-up but their barriers: the remaining set-up overlaps their latency. One
// thread of a warp issues the requests; the function returns their number to the whole warp.
DEVICE int stream_first(const Task& p, uint32_t base, bool one) {
  const Barriers s(p, base);
  const Walk walk(p);
  int matrix, tile;
  walk.find(p, matrix, tile);
  const Part& part = p.part[matrix];
  const int stages = min(p.window, part.stages);  // every block has a tile
  if (one) {
    const uint64_t policy = evict_first();
    const uint8_t* from = part.a.image + (size_t)tile * part.a.tile_bytes;
    set_up(s.full, 0, p.window, 1);
    barriers_visible();
#pragma unroll 1
    for (int i = 0; i < stages; i++) {
      const uint32_t begin = p.stage_begin[matrix][i], bytes = p.stage_begin[matrix][i + 1] - begin, full = s.full + i * 8;
      barrier_expect(full, bytes);
      copy_to_shared(base + i * p.stage_stride, from + begin, bytes, full, policy);
    }
  }
  return stages;
}
// Streams the remaining stages from one thread: the compiler then keeps the walk in uniform registers, as copies need. `first`: number of
// stages already requested.
DEVICE void stream_weights(const Task& p, uint32_t base, int first) {
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
      // A deep queue of weights delays all other memory traffic.
      if (count >= p.window) {
        barrier_wait(s.full + landed.slot * 8, landed.phase);
        landed.advance(p.slots);
      }
      if (count >= first) {
        const uint32_t full = s.full + turn.slot * 8;
        barrier_expect(full, bytes);
        copy_to_shared(base + turn.slot * p.stage_stride, from + begin, bytes, full, policy);
      }
      begin = end;
      turn.advance(p.slots);
    }
  }
}
DEVICE void stream_all(const Task& p, uint32_t base) {
  const bool one = threadIdx.x % 32 == 0;
  const int first = stream_first(p, base, one);
  if (one) {
    pdl_trigger();
    set_up(Barriers(p, base).full, Barriers::fours(p.window), p.slots, 1);
    barriers_visible();
  }
  __syncwarp();
  // Waits until the storing warp has done its share of the set-up. In the build for racecheck the barrier of the whole block, at which this
  // warp then waits, signals that.
  if (!RACECHECK) bar<5>(64);
  bar_arrive<1>(RING_THREADS);
  if (one) stream_weights(p, base, first);
}

// ---------------------------------------------------------------------------------------------------- matmul
// The work of a warp that keeps its class, for matrices of 9 to 16 units each: it has at most one unit of a tile.
template <int KIND, int ENTRY>
struct Keeper {
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY, NEXT_CLASS = 5;
  static constexpr int STAY = 8;  // consecutive tiles in which a warp keeps its class
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
  // Passes on the sum of a class.
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
  // Tiles up to `end`. B: the unit's bits; 0: no unit; -1: several widths. SCALED: as in UnitMatmul.
  template <bool SCALED, int B>
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
        UnitMatmul<KIND, ENTRY, 1, 1, SharedBytes, SharedColumns, SharedMaxima> product{weights, columns, maxima, total, lane, {}};
        if constexpr (B > 0) product.template run_uniform<SCALED, B>();
        else product.template run_mixed<SCALED>(unit.y);
      }
      warp_arrives(empty + slot * 8, lane);
      skip(2);  // stages a tile
      leave(total[0]);
    }
  }
  template <bool SCALED>
  DEVICE void tiles_of(uint32_t widths, const uint4& place, uint2 unit, int end) {
    switch (widths) {
      case 0: tiles<SCALED, 0>(place, unit, end); break;
      case 0x4444: tiles<SCALED, 4>(place, unit, end); break;
      case 0x3333: tiles<SCALED, 3>(place, unit, end); break;
      case 0x2222: tiles<SCALED, 2>(place, unit, end); break;
      case 0x8888: tiles<SCALED, 8>(place, unit, end); break;
      case 0x5555: if constexpr (KIND == EXL2) tiles<SCALED, 5>(place, unit, end); break;
      case 0x6666: if constexpr (KIND == EXL2) tiles<SCALED, 6>(place, unit, end); break;
      default: tiles<SCALED, -1>(place, unit, end);
    }
  }
  DEVICE void some_tiles(const uint4& place, int end) {
    const int stage = cls >> 3;
    const uint2 unit = cls < place.w ? SharedBytes{place.y}.get8(cls * 8) : make_uint2(0, 0);
    skip(stage);
    if (scales_weights<ENTRY>(unit.y)) tiles_of<ENTRY == 32>(unit.y, place, unit, end);
    else tiles_of<false>(ENTRY == 32 ? unit.y & ~ONE_SCALE_A_HALF : unit.y, place, unit, end);
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

// A warp's path through its units of a tile. The loop over units is inside the branch for a width: the loop exits when another width
// begins, and its code is contiguous.
template <int KIND, int ENTRY>
struct Walker {
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY;
  const Task& p;
  const uint32_t base, full, empty, stride, row;
  const int lane, slots;
  uint4 place;
  int u;
  Turn mine;  // the slot of its next unit's stage
  uint2 unit;
  Sums<1> total[1];

  DEVICE Walker(const Task& p, uint32_t base, const Barriers& s)
      : p(p), base(base), full(s.full), empty(s.empty), stride(p.stage_stride),
        row(min(static_cast<int>(threadIdx.x) % 32 >> 2, p.m - 1) * p.x_stride * 2 + threadIdx.x % 4 * 16), lane(threadIdx.x % 32), slots(p.slots) {}

  DEVICE uint2 unit_at(int u) const { return u < static_cast<int>(place.w) ? SharedBytes{place.y}.get8(u * 8) : make_uint2(0, 0); }
  // Units in sequence as long as they have B bits; 0: no unit; -1: several widths.
  template <bool SCALED, int B>
  DEVICE void units() {
    constexpr uint32_t WIDTHS = B > 0 ? B * 0x1111 | (ENTRY == 32 && !SCALED ? ONE_SCALE_A_HALF : 0) : 0;
#pragma unroll 1
    do {
      const uint2 next = unit_at(u + CLASSES);
      barrier_wait(full + mine.slot * 8, mine.phase);
      if constexpr (B != 0) {
        const SharedBytes weights[1] = {{base + mine.slot * stride + unit.x}};
        const SharedColumns columns{place.x + row + u * UNIT_ROWS * 2};
        const SharedMaxima maxima{place.z + u * ENTRIES * 2};
        UnitMatmul<KIND, ENTRY, 1, 1, SharedBytes, SharedColumns, SharedMaxima> product{weights, columns, maxima, total, lane, {}};
        if constexpr (B > 0) product.template run_uniform<SCALED, B>();
        else product.template run_mixed<SCALED>(unit.y);
      }
      warp_arrives(empty + mine.slot * 8, lane);
      mine.slot += 2;
      if (mine.slot >= slots) {
        mine.slot -= slots;
        mine.phase ^= 1;
      }
      u += CLASSES;
      unit = next;
    } while (B > 0 && unit.y == WIDTHS);
  }
  DEVICE void some_units() {
    if (scales_weights<ENTRY>(unit.y)) units_of<ENTRY == 32>(unit.y);
    else units_of<false>(ENTRY == 32 ? unit.y & ~ONE_SCALE_A_HALF : unit.y);
  }
  template <bool SCALED>
  DEVICE void units_of(uint32_t widths) {
    switch (widths) {
      case 0: units<SCALED, 0>(); break;
      case 0x4444: units<SCALED, 4>(); break;
      case 0x3333: units<SCALED, 3>(); break;
      case 0x2222: units<SCALED, 2>(); break;
      case 0x8888: units<SCALED, 8>(); break;
      case 0x5555: if constexpr (KIND == EXL2) units<SCALED, 5>(); break;
      case 0x6666: if constexpr (KIND == EXL2) units<SCALED, 6>(); break;
      default: units<SCALED, -1>();
    }
  }
};

template <int KIND, int ENTRY, bool GENERAL, bool ADAPTED>
DEVICE void consume(const Task& p, const EpilogueAdapters* adapters, KnownAdapters* known, uint8_t* memory, uint32_t base, const uint4* places) {
  constexpr int NEXT_CLASS = 5, NEVER = 0x7fffffff;
  const Barriers s(p, base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  if constexpr (ADAPTED) {
    const Adding adding{p, *adapters, memory, *known};
    const Adding::Found found(adding.entry(lane));
    adding.fetch(found);
    fill_shared<GENERAL>(p, memory);
    bar<1>(RING_THREADS);
    bar_arrive<7>(CONSUMERS * 32 + 32);
    adding.multiply_slices(found);
  } else {
    fill_shared<GENERAL>(p, memory);
    bar<1>(RING_THREADS);
  }
  if (p.flags & KEEP) {
    Keeper<KIND, ENTRY>(p, base, s).run(places);
    return;
  }
  const int slots = p.slots, stored = 2 * t < p.columns;
  const uint32_t result_row = p.columns * 4, result_place = base + p.results_at + (g * p.columns + 2 * t) * 4;
  const bool gated = p.gate >= 0;
  const int second = p.count > 1 ? p.part[0].a.tiles : NEVER, third = p.count > 2 ? second + p.part[1].a.tiles : NEVER;
  Turn turn, result;  // turn: the ring's slot of the tile's first stage
  int cls = warp;
  Walker<KIND, ENTRY> w(p, base, s);
#pragma unroll 1
  for (Walk walk(p); walk.more(); walk.at++) {
    const int matrix = gated ? walk.at & 1 : (walk.at >= second) + (walk.at >= third);
    w.place = places[matrix];
    const int stages = (w.place.w + 7) / 8;
    w.mine = turn;
    w.mine.skip(cls / 8, slots);
    w.u = cls;
    w.unit = w.unit_at(cls);
    clear(w.total[0]);
#pragma unroll 1
    while (w.u < 8 * stages) w.some_units();
    turn.skip(stages, slots);
    barrier_wait(s.free + result.slot * 8, result.phase ^ 1);
    if (stored) {
      const uint32_t to = result_place + (result.slot * CLASSES + cls) * (TILE * result_row);
      store_pair(to, w.total[0][0][0], w.total[0][0][1]);
      store_pair(to + 8 * result_row, w.total[0][0][2], w.total[0][0][3]);
    }
    warp_arrives(s.ready + result.slot * 8, lane);
    result.advance(RESULT_BUFFERS);
    // With an odd number of stages, the first half of the classes has one stage more, so the next stage belongs to the other warps.
    if (stages % 2 == 0) cls = (cls + NEXT_CLASS) & (CLASSES - 1);
    else cls = cls < 8 ? cls + 8 : (cls + NEXT_CLASS) & 7;
  }
}

// ---------------------------------------------------------------------------------------------------- epilogue
// Stores the results of one row, as `store_tiles` does for more. Work that does not depend on the sums is done before they are present:
// after the last tile, no other work overlaps the epilogue.
DEVICE void store_row(const Task& p, uint32_t base, const Barriers& s) {
  const int lane = threadIdx.x % 32, row = lane % 16, kind = p.y_kind, gate = p.gate;
  const bool gated = gate >= 0;
  const uint32_t sums = base + p.results_at + row * 8, gates_at = base + p.gates_at + lane * 4;
  Turn result;
#pragma unroll 1
  for (Walk walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const Part& part = p.part[matrix];
    const int n = tile * TILE + row, at = part.y_offset + n;
    const bool known = n < part.a.out_features, gates_next = gated && matrix == 0;
    const uint32_t place = gates_at + (p.flags & KEEP ? (tile - (walk.end / 2 - walk.half)) * 128 : 0), from = sums + result.slot * (CLASSES * TILE * 8);
    const float bias = part.a.bias && known ? part.a.bias[n] : 0.f, prescale = part.a.prescale;
    const float residual = p.residual && known ? load_result(p.residual, at, kind) : 0.f;
    const float activated = gated && !gates_next ? activate(__uint_as_float(SharedBytes{place}.get4(0)), gate) : 0.f;
    uint8_t* to = static_cast<uint8_t*>(p.y) + ((size_t)at << (kind == OUT_F32 ? 2 : 1));
    asm volatile("" : "+l"(to));
    barrier_wait(s.ready + result.slot * 8, result.phase);
    const float multiplier = __uint_as_float(SharedBytes{base + p.multipliers_at}.get4(0));
    const float sum = sum_classes([&](int c) { return __uint_as_float(SharedBytes{from}.get4(c * (TILE * 8))); });
    float v = finish(sum, multiplier, bias, prescale);
    if (gates_next) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(place), "f"(rounded(v, kind)) : "memory");
    } else {
      if (gated) v = activated * rounded(v, kind);
      else if (__builtin_expect(gate < NO_GATE, 0)) v = activate(rounded(v, kind), activation_of(gate));
      if (p.residual) v = residual + rounded(v, kind);
      if (known && lane < 16) store_result(to, 0, kind, v);
    }
    warp_arrives(s.free + result.slot * 8, lane);
    result.advance(RESULT_BUFFERS);
  }
}

// The epilogue: bias and prescale, the gate's activation, the residual. Each rounds where separate operators round. There is nothing to
// store before the first tile is done, so this warp first sets up data for the others.
template <int ENTRY, bool ADAPTED>
DEVICE void store_tiles(const Task& p, const EpilogueAdapters* adapters, KnownAdapters* known, uint8_t* memory, uint32_t base, uint4* places) {
  constexpr int TURNS = 4;  // of two rows
  const Barriers s(p, base);
  const int lane = threadIdx.x % 32, row = lane % 16;
  const float* multipliers = reinterpret_cast<const float*>(memory + p.multipliers_at);
  Turn result;
  if (lane == 0) {
    set_up(s.empty, 0, p.slots, 8 * WARP_ARRIVALS);
    set_up(s.ready, 0, RESULT_BUFFERS, CONSUMERS * WARP_ARRIVALS);
    set_up(s.free, 0, RESULT_BUFFERS, WARP_ARRIVALS);
    barriers_visible();
  }
  __syncwarp();
  if (!RACECHECK) bar_arrive<5>(64);
  load_constants<ENTRY>(p, memory, places);
  if constexpr (ADAPTED) {
    const Adding adding{p, *adapters, memory, *known};
    bar_arrive<1>(RING_THREADS);
    adding.find();
    pdl_wait();
    bar<7>(CONSUMERS * 32 + 32);  // the input is in shared memory
    return adding.store(s);
  }
  pdl_wait();
  bar<1>(RING_THREADS);
  if (p.m == 1) return store_row(p, base, s);
#pragma unroll 1
  for (Walk walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const Part& part = p.part[matrix];
    float* gates = reinterpret_cast<float*>(memory + p.gates_at) + lane;
    if (p.flags & KEEP) gates += (tile - (walk.end / 2 - walk.half)) * (p.columns / 2 * 32);
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
    // Unrolled: in sequence, eight rows would make the consumers wait.
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
      if (2 * i >= p.m) break;
      const int token = lane / 16 + 2 * i;
      const bool wanted = token < p.m && known;
      const float sum = sum_classes([&](int c) { return parts[c * TILE * p.columns + min(token, p.m - 1)]; });
      float v = finish(sum, wanted ? multipliers[token] : 1.f, bias, prescale);
      if (gates_next) {
        gates[i * 32] = rounded(v, p.y_kind);
      } else if (p.gate != NO_GATE) {
        const float own = rounded(v, p.y_kind);
        v = activate(gated ? gates[i * 32] : own, activation_of(p.gate));
        if (gated) v *= own;
      }
      if (p.residual) v = residual[i] + rounded(v, p.y_kind);
      if (wanted && !gates_next) store_result(p.y, (size_t)token * p.y_stride + at, p.y_kind, v);
    }
    warp_arrives(s.free + result.slot * 8, lane);
    result.advance(RESULT_BUFFERS);
  }
}

// The static arrays of a block.
using Places = uint4[MATRICES];
constexpr size_t STATIC_ARRAYS = sizeof(Places) + sizeof(Touched) + sizeof(TeamParts);
static_assert(STATIC_ARRAYS <= RING_STATIC);
static_assert(STATIC_ARRAYS + sizeof(KnownAdapters) + sizeof(Scales) <= RING_STATIC_ADAPTED);
#endif

// `adapters`: of the rows; null if the form has none.
template <int KIND, int ENTRY, bool GENERAL, bool ADAPTED>
DEVICE void ring_matmul(const Task& p, const EpilogueAdapters* adapters) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Places places;
  KnownAdapters* known = nullptr;
  if constexpr (ADAPTED) {
    __shared__ KnownAdapters of_block;
    known = &of_block;
  }
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32;
  if (warp == CONSUMERS) {
    stream_all(p, base);
  } else if (warp < CONSUMERS) {
    touch_parameters(p);
    consume<KIND, ENTRY, GENERAL, ADAPTED>(p, adapters, known, memory, base, places);
    if constexpr (ADAPTED) {
      bar<6>(CONSUMERS * 32 + 32);
      Adding{p, *adapters, memory, *known}.add();
    }
  } else {
    store_tiles<ENTRY, ADAPTED>(p, adapters, known, memory, base, places);
  }
  all_leave();
#endif
}

// BOUND limits the registers: RING_REGISTERS if the compiler would use more.
#define RING_FORM(NAME, KIND, ENTRY, GENERAL, BOUND)                            \
  extern "C" __global__ void BOUND NAME(const __grid_constant__ Task p) { \
    ring_matmul<KIND, ENTRY, GENERAL, false>(p, nullptr);                       \
  }
#define RING_ADAPTED(KIND, kind, ENTRY, BOUND)                                                                                         \
  extern "C" __global__ void BOUND gemv_ring_adapted_##kind##_##ENTRY(const __grid_constant__ Task p, const __grid_constant__ EpilogueAdapters a) { \
    ring_matmul<KIND, ENTRY, false, true>(p, &a);                                                                                      \
  }
#define RING(KIND, kind, ENTRY, BOUND)                             \
  RING_FORM(gemv_ring_##kind##_##ENTRY, KIND, ENTRY, false, BOUND) \
  RING_FORM(gemv_ring_##kind##_##ENTRY##_general, KIND, ENTRY, true, BOUND) \
  RING_ADAPTED(KIND, kind, ENTRY, BOUND)
