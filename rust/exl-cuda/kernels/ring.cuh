// y = x @ W for at most eight activation rows on sm_90 and later, near the memory roof (design: spec/kernels-measured.md 3.2).
//
// One block per multiprocessor walks its row tiles. Warp 8 streams units through a ring of shared-memory slots with bulk copies, never
// more than `window` stages (eight units each) in flight; warps 0-7 multiply, one unit of a stage each; warp 9 adds their sums in class
// order and stores. The stream of units runs on across tiles, so no warp idles where a tile has no multiple of eight units.
// Weights are fetched before the wait for the predecessor kernel; activations after it.
#pragma once
#include <type_traits>

#include "tile.cuh"

constexpr int CONSUMERS = 8, RING_THREADS = 10 * 32, RESULT_BUFFERS = 4, RING_COLUMNS = 8;

// What the host works out; the same struct as `ops::linear::Ring`.
struct Ring {
  int slots, window;
  uint32_t stage_stride;  // bytes of shared memory for a stage
};

#if __CUDA_ARCH__ >= 900
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void barrier_init(uint32_t b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count) : "memory"); }
DEVICE void barrier_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEVICE void barrier_expect(uint32_t b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(uint32_t b, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(b),
      "r"(phase)
      : "memory");
}
DEVICE void copy_to_shared(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Position in a ring of `size` barriers: a slot and the phase its barrier is in.
struct Turn {
  int slot = 0;
  uint32_t phase = 0;
  DEVICE void advance(int size) {
    if (++slot == size) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct SharedColumns {
  uint32_t at;
  DEVICE uint4 get(int, int k) const { return SharedBytes{at}.get16(k * 2); }
};

// Where things stand in dynamic shared memory; `bytes` is mirrored by `Ring::shared_bytes` on the host.
struct RingMemory {
  uint32_t ring, full, empty, ready, free;
  __half* x;
  uint32_t x_stride;  // halves
  uint2* units;
  __half* maxima;
  float* results;  // [RESULT_BUFFERS][CLASSES][TILE][RING_COLUMNS]
  float* multipliers;

  DEVICE RingMemory(uint8_t* base, const Matrix& a, const Ring& r, int m, int entry) {
    auto aligned = [](uint8_t* p) { return p + (16 - shared_address(p) % 16) % 16; };
    uint8_t* p = base;
    ring = shared_address(p);
    p += (size_t)r.slots * r.stage_stride;
    x = reinterpret_cast<__half*>(p);
    x_stride = a.rows + 32;  // 64 bytes past a multiple of 128: eight rows' loads meet no bank twice
    p += (size_t)m * x_stride * 2;
    results = reinterpret_cast<float*>(p = aligned(p));
    p += RESULT_BUFFERS * CLASSES * TILE * RING_COLUMNS * 4;
    multipliers = reinterpret_cast<float*>(p);
    p += RING_COLUMNS * 4;
    units = reinterpret_cast<uint2*>(p);
    p += (a.unit_count + 1) * 8;
    full = shared_address(p);
    empty = full + r.slots * 8;
    ready = empty + r.slots * 8;
    free = ready + RESULT_BUFFERS * 8;
    p += (2 * r.slots + 2 * RESULT_BUFFERS) * 8;
    maxima = reinterpret_cast<__half*>(p);
  }
};

// Tiles of this block: blockIdx.x, + gridDim.x, ...
DEVICE int own_tiles(const Matrix& a) { return (a.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x); }

// A place in the block's stream of units: which of its tiles, which unit of it.
struct Place {
  int tile, u;
  DEVICE void advance(int units) {
    for (u += CONSUMERS; u >= units; u -= units) tile++;
  }
};

DEVICE void stream_weights(const Matrix& a, const Ring& r, const RingMemory& s) {
  const int lane = threadIdx.x % 32, units = a.unit_count, total = own_tiles(a) * units, stages = (total + CONSUMERS - 1) / CONSUMERS;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (lane == 0) pdl_trigger();
  Place place{lane / units, lane % units};  // of this lane's unit; lanes 0-7 have one
  Turn turn, landed;
  uint32_t begin = 0, end = 0;
  // Where the unit of stage i stands; read a stage ahead, because a trip to L2 would hold up the stream.
  auto look_up = [&](int i) {
    const bool has = lane < CONSUMERS && i * CONSUMERS + lane < total;
    begin = has ? __ldg(&a.units[place.u].x) : 0;
    end = has ? __ldg(&a.units[place.u + 1].x) : 0;
  };
  look_up(0);
  for (int i = 0; i < stages; i++) {
    // Units of one tile follow each other in memory: the first of a run copies all of it, at `before` in the stage.
    uint32_t before = end - begin;
#pragma unroll
    for (int o = 1; o < CONSUMERS; o *= 2) {
      const uint32_t v = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before += v;
    }
    const uint32_t all = __shfl_sync(~0u, before, CONSUMERS - 1);
    before -= end - begin;
    const bool leads = end != begin && (lane == 0 || place.u == 0);
    const uint32_t leaders = __ballot_sync(~0u, leads) & ~((2u << lane) - 1);
    const uint32_t next = __shfl_sync(~0u, before, leaders ? __ffs(leaders) - 1 : 0);
    const uint32_t bytes = (leaders ? next : all) - before;
    const uint8_t* from = a.image + (size_t)(blockIdx.x + place.tile * gridDim.x) * a.tile_bytes + begin;
    place.advance(units);
    look_up(i + 1);
    if (i >= r.slots) barrier_wait(s.empty + turn.slot * 8, turn.phase ^ 1);
    // Weights queued far ahead delay everything else the memory has to deliver; spec/kernels-measured.md 6.1.
    if (i >= r.window) {
      barrier_wait(s.full + landed.slot * 8, landed.phase);
      landed.advance(r.slots);
    }
    const uint32_t full = s.full + turn.slot * 8;
    if (lane == 0) barrier_expect(full, all);
    __syncwarp();
    if (leads) copy_to_shared(s.ring + turn.slot * r.stage_stride + before, from, bytes, full, policy);
    turn.advance(r.slots);
  }
}

// Activations into layout order, as halves; 256 threads. `row_of_feature` is null when the layout's order is the features' own.
// Also copies the unit table and the entries' maxima. Every load from global memory costs a trip to L2 (about 0.5 us), so all of them
// are issued before the first result is used; those of constants before the wait for the predecessor.
template <int ENTRY, class T>
DEVICE void fill_shared(const Matrix& a, const RingMemory& s, const T* x, int m) {
  constexpr bool SCALED = !std::is_same<T, __half>::value;
  constexpr int BATCH = 4, STEP = CONSUMERS * 32;
  __shared__ float largest[RING_COLUMNS][CONSUMERS];
  const int tid = threadIdx.x, k = a.in_features, eights = k / 8;
  const bool wide = k % 8 == 0 && aligned8(x), ordered = a.row_of_feature == nullptr;
  union Eight {
    uint4 word;
    T v[8];
  };
  union Rows {
    uint4 word;
    uint16_t v[8];
  } rows[BATCH];
  auto load_rows = [&](int first) {
#pragma unroll
    for (int j = 0; j < BATCH; j++)
      if (first + j * STEP < eights) rows[j].word = __ldg(reinterpret_cast<const uint4*>(a.row_of_feature) + first + j * STEP);
  };
  const int entries = a.maxima ? (a.rows + ENTRY - 1) / ENTRY : 0;
  const uint2 unit = tid <= a.unit_count ? __ldg(a.units + tid) : make_uint2(0, 0);
  const __half maximum = tid < entries ? a.maxima[tid] : __half(0.f);
  auto store_constants = [&] {
    if (tid <= a.unit_count) s.units[tid] = unit;
    if (tid < entries) s.maxima[tid] = maximum;
    for (int i = tid + STEP; i <= a.unit_count; i += STEP) s.units[i] = a.units[i];
    for (int i = tid + STEP; i < entries; i += STEP) s.maxima[i] = a.maxima[i];
  };
  if (a.rows != k) {
    for (int i = tid; i < m * static_cast<int>(s.x_stride); i += STEP) s.x[i] = __half(0.f);
    asm volatile("bar.sync 2, 256;" ::: "memory");
  }
  if (wide && !ordered) load_rows(tid);
  pdl_wait();
  if constexpr (SCALED) {
    for (int row = 0; row < m; row++) {
      float v = 0.f;
      for (int i = tid; i < k; i += STEP) v = fmaxf(v, fabsf(to_float(x[(size_t)row * k + i])));
#pragma unroll
      for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
      if (tid % 32 == 0) largest[row][tid / 32] = v;
    }
    asm volatile("bar.sync 2, 256;" ::: "memory");
  }
  auto factor_of = [&](int row) {
    if constexpr (!SCALED) return 1.f;
    float v = largest[row][0];
    for (int w = 1; w < CONSUMERS; w++) v = fmaxf(v, largest[row][w]);
    return row_factor(v);
  };
  auto convert = [](T v, float factor) {
    if constexpr (SCALED) return __float2half_rn(to_float(v) * factor);
    else return v;
  };
  if (tid < m) s.multipliers[tid] = 1.f / factor_of(tid);
  if (!wide) {
    store_constants();
    for (int row = 0; row < m; row++) {
      const float factor = factor_of(row);
      for (int i = tid; i < k; i += STEP)
        s.x[(size_t)row * s.x_stride + (ordered ? i : a.row_of_feature[i])] = convert(x[(size_t)row * k + i], factor);
    }
    return;
  }
  for (int first = tid; first < eights; first += BATCH * STEP) {
    if (first != tid && !ordered) load_rows(first);
    for (int row = 0; row < m; row++) {
      const float factor = factor_of(row);
      __half* to = s.x + (size_t)row * s.x_stride;
      Eight in[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        // Through L2: a block that started early may hold stale lines of what the predecessor wrote.
        if (first + j * STEP < eights) in[j].word = __ldcg(reinterpret_cast<const uint4*>(x + (size_t)row * k) + first + j * STEP);
      if (first == tid && row == 0) store_constants();
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        if (first + j * STEP >= eights) break;
        if (ordered) {
          union {
            uint4 word;
            __half v[8];
          } out;
#pragma unroll
          for (int e = 0; e < 8; e++) out.v[e] = convert(in[j].v[e], factor);
          reinterpret_cast<uint4*>(to)[first + j * STEP] = out.word;
        } else {
#pragma unroll
          for (int e = 0; e < 8; e++) to[rows[j].v[e]] = convert(in[j].v[e], factor);
        }
      }
    }
  }
}

template <int KIND, int ENTRY>
DEVICE void multiply(const Matrix& a, const Ring& r, const RingMemory& s, int m) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, units = a.unit_count;
  const uint32_t x = shared_address(s.x) + min(g, m - 1) * s.x_stride * 2 + t * 16;
  const int tiles = own_tiles(a);
  Turn turn, result;
  Place stage{0, 0};  // the first unit of the stage
  for (int tile = 0, first = 0; tile < tiles; tile++, first += units) {
    const int c = (warp - first) & (CLASSES - 1);
    Sums<1> total[1];
    clear(total[0]);
#pragma unroll 1
    for (int u = c; u < units; u += CLASSES) {
      const uint2 unit = s.units[u];
      const uint32_t before = (tile - stage.tile) * a.tile_bytes + unit.x - s.units[stage.u].x;
      const SharedBytes weights[1] = {{s.ring + turn.slot * r.stage_stride + before}};
      barrier_wait(s.full + turn.slot * 8, turn.phase);
      const SharedColumns columns{x + u * UNIT_ROWS * 2};
      UnitProduct<KIND, ENTRY, 1, 1, SharedBytes, SharedColumns> product{
          weights, columns, s.maxima + u * (UNIT_ROWS / ENTRY), total, lane, {}};
      product.run(unit.y);
      __syncwarp();
      if (lane == 0) barrier_arrive(s.empty + turn.slot * 8);
      turn.advance(r.slots);
      stage.advance(units);
    }
    barrier_wait(s.free + result.slot * 8, result.phase ^ 1);
    float* d = s.results + ((size_t)(result.slot * CLASSES + c) * TILE + g) * RING_COLUMNS + 2 * t;
    *reinterpret_cast<float2*>(d) = make_float2(total[0][0][0], total[0][0][1]);
    *reinterpret_cast<float2*>(d + 8 * RING_COLUMNS) = make_float2(total[0][0][2], total[0][0][3]);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.ready + result.slot * 8);
    result.advance(RESULT_BUFFERS);
  }
}

DEVICE void store_tiles(const Matrix& a, const RingMemory& s, void* y, int m, int y_kind) {
  const int lane = threadIdx.x % 32, tiles = own_tiles(a);
  Turn result;
  for (int tile = 0; tile < tiles; tile++) {
    barrier_wait(s.ready + result.slot * 8, result.phase);
    const float* parts = s.results + (size_t)result.slot * CLASSES * TILE * RING_COLUMNS;
    for (int i = lane; i < TILE * m; i += 32) {
      const int row = i % TILE, token = i / TILE, n = (blockIdx.x + tile * gridDim.x) * TILE + row;
      if (n >= a.out_features) continue;
      const float v = finish(parts + row * RING_COLUMNS + token, TILE * RING_COLUMNS, s.multipliers[token], a, n);
      store_result(y, (size_t)token * a.out_features + n, y_kind, v);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.free + result.slot * 8);
    result.advance(RESULT_BUFFERS);
  }
}
#endif

template <int KIND, int ENTRY>
DEVICE void ring_matmul(const Matrix& a, const Ring& r, const void* x, int x_kind, void* y, int m, int y_kind) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  const RingMemory s(memory, a, r, m, ENTRY);
  const int tid = threadIdx.x, warp = tid / 32;
  if (tid == CONSUMERS * 32) {
    for (int i = 0; i < r.slots; i++) {
      barrier_init(s.full + i * 8, 1);
      barrier_init(s.empty + i * 8, CONSUMERS);
    }
    for (int i = 0; i < RESULT_BUFFERS; i++) {
      barrier_init(s.ready + i * 8, CONSUMERS);
      barrier_init(s.free + i * 8, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == CONSUMERS) return stream_weights(a, r, s);
  if (warp < CONSUMERS) {
    if (x_kind == OUT_F16) fill_shared<ENTRY>(a, s, static_cast<const __half*>(x), m);
    else fill_shared<ENTRY>(a, s, static_cast<const __nv_bfloat16*>(x), m);
  } else {
    pdl_wait();
  }
  asm volatile("bar.sync 1, 288;" ::: "memory");
  if (warp < CONSUMERS) multiply<KIND, ENTRY>(a, r, s, m);
  else store_tiles(a, s, y, m, y_kind);
#endif
}

#define RING(KIND, kind, ENTRY)                                                                                          \
  extern "C" __global__ void __launch_bounds__(RING_THREADS, 1) ring_##kind##_##ENTRY(                                   \
      const __grid_constant__ Matrix a, const __grid_constant__ Ring r, const void* x, int x_kind, void* y, int m,       \
      int y_kind) {                                                                                                      \
    ring_matmul<KIND, ENTRY>(a, r, x, x_kind, y, m, y_kind);                                                             \
  }
