// y = f(x @ W) for at most eight activation rows on sm_90 and later, near the memory roof (design: spec/kernels-measured.md 3.2).
//
// One block per multiprocessor walks a contiguous run of row tiles, of up to three matrices over one input. One thread streams stages
// (eight units of a tile each) through a ring of shared-memory slots with bulk copies, never more than `window` stages in flight. The
// sixteen consumer warps multiply, one unit each; one half of them takes a tile's even stages, the other its odd ones, so that a warp and
// a class are the same thing. One warp adds the classes in order, does what follows the product, and stores.
// Weights are fetched before the wait for the predecessor kernel; activations after it.
#pragma once
#include <type_traits>

#include "activate.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

constexpr int CONSUMERS = 16, RING_THREADS = CONSUMERS * 32 + 64, RESULT_BUFFERS = 4, RING_COLUMNS = 8, MATRICES = 3, MOST_STAGES = 32;

// One matrix of a launch; places are bytes in shared memory.
struct Part {
  Matrix a;
  uint32_t units_at, maxima_at, x_at, sums_at;
  int order;  // the first matrix whose rows stand in the same order; its x_at and sums_at are this one's too
  int y_offset;
};

// Everything a launch needs, worked out by the host; the same struct as `ops::ring::Task`.
struct Task {
  const void* x;
  void* y;
  const void* residual;  // like y; null when there is none
  const float4* norm;    // weight of an RMS norm of x; null when there is none
  uint32_t results_at, barriers_at, multipliers_at, stage_stride, x_stride;
  // A block's tiles (pairs of them when gated), and how many blocks have one more; `columns`: m, made even.
  int count, tiles, longer, m, columns, slots, window;
  int gate;                                     // activation of the first of two matrices that gates the second, or -1
  int x_kind, y_kind, y_stride;
  float eps, offset;
  Part part[MATRICES];
  uint32_t stage_begin[MATRICES][MOST_STAGES + 1];  // bytes within a tile
};

#if __CUDA_ARCH__ >= 900
struct SharedColumns {
  uint32_t at;
  DEVICE uint4 get(int, int k) const { return SharedBytes{at}.get16(k * 2); }
};

// Barriers of the ring and of the result buffers.
struct Barriers {
  uint32_t full, empty, ready, free;
  DEVICE Barriers(const Task& p, uint32_t base)
      : full(base + p.barriers_at), empty(full + p.slots * 8), ready(empty + p.slots * 8), free(ready + RESULT_BUFFERS * 8) {}
};

// A launch's parameters reach an SM a line at a time, each after a trip to L2: every warp asks for one of them at once.
DEVICE void touch_parameters(const Task& p) {
  constexpr int LINE = 64 / 4, LINES = (sizeof(Task) / 4 + LINE - 1) / LINE;
  const int line = threadIdx.x / 32;
  if (line < LINES) {
    const int v = reinterpret_cast<const int*>(&p)[min(line * LINE, static_cast<int>(sizeof(Task) / 4) - 1)];
    asm volatile("" ::"r"(v));
  }
}

// A matrix's parameters by its number: selects between registers and constants where indexing would wait for the constant cache.
template <bool MANY, class F>
DEVICE auto pick(int matrix, F of) {
  auto v = of(0);
  if constexpr (MANY) {
    if (matrix == 1) v = of(1);
    if (matrix == 2) v = of(2);
  }
  return v;
}
#define PICK(FIELD) pick<MANY>(matrix, [&](int i) { return p.part[i].FIELD; })

// The tiles of this block, one after the other.
template <bool MANY>
struct Walk {
  int at, end;
  DEVICE Walk(const Task& p) {
    const int pair = MANY && p.gate >= 0 ? 2 : 1;
    const int block = blockIdx.x;
    at = pair * (block * p.tiles + min(block, p.longer));
    end = at + pair * (p.tiles + (block < p.longer));
  }
  DEVICE bool more() const { return at < end; }
  DEVICE void find(const Task& p, int& matrix, int& tile) const {
    matrix = 0;
    tile = at;
    if constexpr (MANY) {
      if (p.gate >= 0) {
        matrix = at & 1;
        tile = at >> 1;
      } else {
        const int first = p.part[0].a.tiles, second = p.part[1].a.tiles;
        if (tile >= first) {
          matrix = 1;
          tile -= first;
          if (p.count == 3 && tile >= second) {
            matrix = 2;
            tile -= second;
          }
        }
      }
    }
  }
};

template <bool MANY>
DEVICE void stream_weights(const Task& p, uint32_t base) {
  const Barriers s(p, base);
  const uint64_t policy = evict_first();
  pdl_trigger();
  Turn turn, landed;
  int count = 0;
  for (Walk<MANY> walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const uint8_t* from = PICK(a.image) + (size_t)tile * PICK(a.tile_bytes);
    const int stages = (PICK(a.unit_count) + 7) / 8;
    uint32_t begin = 0;
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

// One activation row in the hands of `team` threads: BATCH groups of eight elements a thread at a time.
template <class T, int BATCH>
struct Row {
  union Eight {
    uint4 word;
    T v[8];
  } in[BATCH];
  int first, team, eights;

  // Through L2: a block that started early may hold stale lines of what the predecessor wrote.
  DEVICE void load(const T* x, int batch) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = first + (batch * BATCH + j) * team;
      if (i < eights) in[j].word = __ldcg(reinterpret_cast<const uint4*>(x) + i);
    }
  }
  template <class F>
  DEVICE void each(int batch, F f) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = first + (batch * BATCH + j) * team;
      if (i < eights) f(i, j, in[j].v);
    }
  }
};

// Unit tables and entries' maxima of every matrix, on their way to shared memory: one a thread at first, the rest when they are stored.
template <bool MANY, int ENTRY>
struct Constants {
  static constexpr int COUNT = MANY ? MATRICES : 1;
  uint2 unit[COUNT];
  __half maximum[COUNT];

  DEVICE static int entries(const Matrix& a) { return a.maxima ? (a.rows + ENTRY - 1) / ENTRY : 0; }
  DEVICE void load(const Task& p) {
    const int tid = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (MANY && i >= p.count) break;
      const Matrix& a = p.part[i].a;
      if (tid < a.unit_count) unit[i] = __ldg(a.units + tid);
      if (tid < entries(a)) maximum[i] = a.maxima[tid];
    }
  }
  DEVICE void store(const Task& p, uint8_t* memory) const {
    const int tid = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (MANY && i >= p.count) break;
      const Matrix& a = p.part[i].a;
      uint2* units = reinterpret_cast<uint2*>(memory + p.part[i].units_at);
      __half* maxima = reinterpret_cast<__half*>(memory + p.part[i].maxima_at);
      if (tid < a.unit_count) units[tid] = make_uint2(unit[i].x - p.stage_begin[i][tid / 8], unit[i].y);
      if (tid < entries(a)) maxima[tid] = maximum[i];
      for (int e = tid + CONSUMERS * 32; e < entries(a); e += CONSUMERS * 32) maxima[e] = a.maxima[e];
    }
  }
};

// Activations into layout order, as halves, and everything else the consumers read from shared memory; 512 threads.
// Every load from global memory costs a trip to L2 (about 0.5 us), so all of them are issued before the first result is used; those of
// constants before the wait for the predecessor. The norm is that of kernels/norm.cu, sum for sum, and so has 256 threads a row; a norm
// and BF16 rows are the host's promise to fit one batch.
template <bool MANY, int ENTRY, class T, int BATCH>
DEVICE void fill_shared(const Task& p, uint8_t* memory) {
  constexpr bool SCALED = !std::is_same<T, __half>::value;
  constexpr int THREADS = CONSUMERS * 32, COUNT = MANY ? MATRICES : 1;
  __shared__ float parts[2][2][CONSUMERS];
  const int tid = threadIdx.x, k = p.part[0].a.in_features, eights = k / 8;
  const int team = p.norm ? 256 : THREADS, teams = THREADS / team, mine = tid / team, rank = tid % team;
  Row<T, BATCH> row;
  row.first = rank;
  row.team = team;
  row.eights = eights;
  Constants<MANY, ENTRY> constants;
  constants.load(p);
  union Rows {
    uint4 word;
    uint16_t v[8];
  } rows[BATCH];
  auto load_rows = [&](const Matrix& a, int batch) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      if (i < eights) rows[j].word = __ldg(reinterpret_cast<const uint4*>(a.row_of_feature) + i);
    }
  };
  if (p.part[0].a.row_of_feature) load_rows(p.part[0].a, 0);
  int held = 0;  // the matrix whose first rows are in `rows`
  constexpr bool EARLY = BATCH == 2;  // registers for the norm's weights
  float4 weights[BATCH][2];
  auto load_norm = [&](int i, int j) {
    weights[j][0] = __ldg(p.norm + 2 * i);
    weights[j][1] = __ldg(p.norm + 2 * i + 1);
  };
  if (EARLY && p.norm) row.each(0, [&](int i, int j, T(&)[8]) { load_norm(i, j); });
  bool padded = false;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    if (MANY && (i >= p.count || p.part[i].order != i)) continue;
    if (p.part[i].a.rows == k) continue;
    padded = true;
    uint32_t* to = reinterpret_cast<uint32_t*>(memory + p.part[i].x_at);
    for (int e = tid; e < p.m * static_cast<int>(p.x_stride) / 2; e += THREADS) to[e] = 0;
  }
  if (padded) bar<4>(THREADS);
  pdl_wait();
  const T* x = static_cast<const T*>(p.x) + (size_t)mine * k;
  if (mine < p.m) row.load(x, 0);  // of a single row the second team has none
  constants.store(p, memory);
  const int batches = SCALED || p.norm ? 1 : (eights + BATCH * team - 1) / (BATCH * team);
#pragma unroll 1
  for (int token = mine, turn = 0; token < p.m; token += teams, turn ^= 1, x += (size_t)teams * k) {
    if (token != mine) row.load(x, 0);
    if (p.norm) {
      float sum = 0.f;
      row.each(0, [&](int, int, T(&v)[8]) {
#pragma unroll
        for (int e = 0; e < 8; e++) sum = fmaf(to_float(v[e]), to_float(v[e]), sum);
      });
      sum = warp_sum(sum);
      if (rank % 32 == 0) parts[0][turn][tid / 32] = sum;
      if (mine == 0) bar<2>(256);
      else bar<3>(256);
      sum = 0.f;
#pragma unroll
      for (int w = 0; w < 8; w++) sum += parts[0][turn][8 * mine + w];
      const float scale = 1.f / sqrtf(sum / (float)k + p.eps);
      row.each(0, [&](int i, int j, T(&v)[8]) {
        if (!EARLY) load_norm(i, j);
        const float w[8] = {weights[j][0].x, weights[j][0].y, weights[j][0].z, weights[j][0].w,
                            weights[j][1].x, weights[j][1].y, weights[j][1].z, weights[j][1].w};
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = from_float<T>(to_float(v[e]) * scale * (w[e] + p.offset));
      });
    }
    float factor = 1.f;
    if constexpr (SCALED) {
      float largest = 0.f;
      row.each(0, [&](int, int, T(&v)[8]) {
#pragma unroll
        for (int e = 0; e < 8; e++) largest = fmaxf(largest, fabsf(to_float(v[e])));
      });
#pragma unroll
      for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
      if (rank % 32 == 0) parts[1][turn][tid / 32] = largest;
      if (teams == 1) bar<4>(THREADS);
      else if (mine == 0) bar<2>(256);
      else bar<3>(256);
      for (int w = 0; w < team / 32; w++) largest = fmaxf(largest, parts[1][turn][8 * mine + w]);
      factor = row_factor(largest);
    }
    if (rank == 0) reinterpret_cast<float*>(memory + p.multipliers_at)[token] = 1.f / factor;
#pragma unroll 1
    for (int b = 0; b < batches; b++) {
      if (b > 0) row.load(x, b);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        if (MANY && (i >= p.count || p.part[i].order != i)) continue;
        const Matrix& a = p.part[i].a;
        __half* to = reinterpret_cast<__half*>(memory + p.part[i].x_at) + token * p.x_stride;
        if (a.row_of_feature && (batches > 1 || held != i)) {
          load_rows(a, b);
          held = i;
        }
        row.each(b, [&](int at, int j, T(&v)[8]) {
          union {
            uint4 word;
            __half v[8];
          } out;
#pragma unroll
          for (int e = 0; e < 8; e++) {
            if constexpr (SCALED) out.v[e] = __float2half_rn(to_float(v[e]) * factor);
            else out.v[e] = v[e];
          }
          if (!a.row_of_feature) {
            reinterpret_cast<uint4*>(to)[at] = out.word;
          } else {
            // Unpacked anew for every activation row: kept unpacked, the row numbers would fill the registers.
            uint4& packed = rows[j].word;
            asm volatile("" : "+r"(packed.x), "+r"(packed.y), "+r"(packed.z), "+r"(packed.w));
#pragma unroll
            for (int e = 0; e < 8; e++) to[rows[j].v[e]] = out.v[e];
          }
        });
      }
    }
  }
}

template <bool MANY, int ENTRY, class T>
DEVICE void fill_by_size(const Task& p, uint8_t* memory) {
  if (p.part[0].a.in_features <= 16 * (p.norm ? 256 : CONSUMERS * 32)) fill_shared<MANY, ENTRY, T, 2>(p, memory);
  else fill_shared<MANY, ENTRY, T, 4>(p, memory);
}

template <int KIND, int ENTRY, bool MANY>
DEVICE void multiply(const Task& p, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY;
  const Barriers s(p, base);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, group = warp / 8, place = warp % 8;
  const uint32_t row = min(g, p.m - 1) * p.x_stride * 2 + t * 16;
  __syncwarp();
  Turn turn, result;
  int stood = 0, first = 0;  // stage of `turn` in the block's stream; first stage of the tile
  for (Walk<MANY> walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const int units = PICK(a.unit_count), stages = (units + 7) / 8;
    const uint32_t x = base + PICK(x_at) + row;
    const uint2* table = reinterpret_cast<const uint2*>(memory + PICK(units_at));
    const __half* maxima = reinterpret_cast<const __half*>(memory + PICK(maxima_at));
    Sums<1> total[1];
    clear(total[0]);
#pragma unroll 1
    for (int i = group; i < stages; i += 2) {
      const int u = 8 * i + place;
      const uint2 unit = u < units ? table[u] : make_uint2(0, 0);
      turn.skip(first + i - stood, p.slots);
      stood = first + i;
      barrier_wait(s.full + turn.slot * 8, turn.phase);
      if (u < units) {
        const SharedBytes weights[1] = {{base + turn.slot * p.stage_stride + unit.x}};
        const SharedColumns columns{x + u * UNIT_ROWS * 2};
        UnitProduct<KIND, ENTRY, 1, 1, SharedBytes, SharedColumns> product{weights, columns, maxima + u * ENTRIES, total, lane, {}};
        product.run(unit.y);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(s.empty + turn.slot * 8);
    }
    first += stages;
    barrier_wait(s.free + result.slot * 8, result.phase ^ 1);
    if (2 * t < p.columns) {
      float* d = reinterpret_cast<float*>(memory + p.results_at) + ((result.slot * CLASSES + warp) * TILE + g) * p.columns + 2 * t;
      *reinterpret_cast<float2*>(d) = make_float2(total[0][0][0], total[0][0][1]);
      *reinterpret_cast<float2*>(d + 8 * p.columns) = make_float2(total[0][0][2], total[0][0][3]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.ready + result.slot * 8);
    result.advance(RESULT_BUFFERS);
  }
}

// What follows a product: bias and prescale, the gate's activation, the residual; each rounded where separate operators round.
template <bool MANY>
DEVICE void store_tiles(const Task& p, const uint8_t* memory, uint32_t base) {
  const Barriers s(p, base);
  const int lane = threadIdx.x % 32;
  const float* multipliers = reinterpret_cast<const float*>(memory + p.multipliers_at);
  Turn result;
  float gate[4] = {};
  for (Walk<MANY> walk(p); walk.more(); walk.at++) {
    int matrix, tile;
    walk.find(p, matrix, tile);
    const int row = lane % 16, n = tile * TILE + row;
    const size_t at = (size_t)PICK(y_offset) + n;
    const bool known = n < PICK(a.out_features), gates = MANY && p.gate >= 0 && matrix == 0;
    const float* biases = PICK(a.bias);
    const float bias = biases && known ? biases[n] : 0.f, prescale = PICK(a.prescale);
    float residual[4] = {};
    if (p.residual && known) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = lane / 16 + 2 * i;
        if (token < p.m) residual[i] = load_result(p.residual, (size_t)token * p.y_stride + at, p.y_kind);
      }
    }
    barrier_wait(s.ready + result.slot * 8, result.phase);
    const float* parts = reinterpret_cast<const float*>(memory + p.results_at) + (result.slot * CLASSES * TILE + row) * p.columns;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = lane / 16 + 2 * i;
      if (token >= p.m || !known) continue;
      const float sum = sum_classes([&](int c) { return parts[c * TILE * p.columns + token]; });
      float v = finish(sum, multipliers[token], bias, prescale);
      if (gates) {
        gate[i] = rounded(v, p.y_kind);
        continue;
      }
      if (MANY && p.gate >= 0) v = activate(gate[i], p.gate) * rounded(v, p.y_kind);
      if (p.residual) v = residual[i] + rounded(v, p.y_kind);
      store_result(p.y, (size_t)token * p.y_stride + at, p.y_kind, v);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.free + result.slot * 8);
    result.advance(RESULT_BUFFERS);
  }
}
#endif

template <int KIND, int ENTRY, bool MANY>
DEVICE void ring_matmul(const Task& p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  touch_parameters(p);
  const uint32_t base = shared_address(memory);
  const int tid = threadIdx.x, warp = tid / 32;
  if (tid == CONSUMERS * 32) {
    const Barriers s(p, base);
    for (int i = 0; i < p.slots; i++) {
      barrier_init(s.full + i * 8, 1);
      barrier_init(s.empty + i * 8, 8);
    }
    for (int i = 0; i < RESULT_BUFFERS; i++) {
      barrier_init(s.ready + i * 8, CONSUMERS);
      barrier_init(s.free + i * 8, 1);
    }
    barriers_visible();
  }
  __syncthreads();
  if (warp == CONSUMERS) {
    if (tid % 32 == 0) stream_weights<MANY>(p, base);
    return;
  }
  if (warp < CONSUMERS) {
    if (p.x_kind == OUT_F16) fill_by_size<MANY, ENTRY, __half>(p, memory);
    else fill_by_size<MANY, ENTRY, __nv_bfloat16>(p, memory);
  } else {
    pdl_wait();
  }
  bar<1>(CONSUMERS * 32 + 32);
  if (warp < CONSUMERS) multiply<KIND, ENTRY, MANY>(p, memory, base);
  else store_tiles<MANY>(p, memory, base);
#endif
}

#define RING(KIND, kind, ENTRY)                                                                                              \
  extern "C" __global__ void __launch_bounds__(RING_THREADS, 1) ring_##kind##_##ENTRY##_1(const __grid_constant__ Task p) {  \
    ring_matmul<KIND, ENTRY, false>(p);                                                                                      \
  }                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(RING_THREADS, 1) ring_##kind##_##ENTRY##_3(const __grid_constant__ Task p) {  \
    ring_matmul<KIND, ENTRY, true>(p);                                                                                       \
  }
