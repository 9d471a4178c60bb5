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
#include <type_traits>

#include "activate.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

constexpr int CONSUMERS = 16, RING_THREADS = CONSUMERS * 32 + 64, RESULT_BUFFERS = 4;
constexpr int MATRICES = 3, MOST_STAGES = 32;
// Two quarters of a multiprocessor hold five of these warps, and then 72 registers a lane of one more: a block of attention
// (attention_few.cuh) that runs beside the product before it. A GPTQ step of an 8B model took 115 us longer with 94.
constexpr int RING_REGISTERS = 88;

// One matrix of a product; places are bytes in shared memory.
struct Part {
  Matrix a;
  uint32_t units_at, maxima_at, x_at;
  int stages;
  int order;  // the first matrix whose rows stand in the same order; its x_at is this one's too
  int y_offset;
};

// Everything a launch needs, worked out by the host; the same struct as `ops::ring::Task`. First what the streaming thread reads.
struct Task {
  uint32_t barriers_at, stage_stride;
  int slots, window, count;
  // A block's tiles (pairs of them when gated), and how many blocks have one more.
  int tiles, longer;
  int gate;  // activation of the first of two matrices that gates the second, or -1
  uint32_t results_at, multipliers_at, x_stride;
  uint32_t gates_at;  // what gates, of a pair or (`keep`) of all pairs of a block, two rows by 16 features a time
  int keep;           // whether a warp keeps its class over tiles
  int m, columns;  // columns: m, made even
  int x_kind, y_kind, y_stride;
  float eps, offset;
  const void* x;
  void* y;
  const void* residual;  // like y; null when there is none
  const float4* norm;    // weight of an RMS norm of x; null when there is none
  Part part[MATRICES];
  uint32_t stage_begin[MATRICES][MOST_STAGES + 1];  // bytes within a tile
};

#if __CUDA_ARCH__ >= 900
struct SharedMaxima {
  uint32_t at;
  DEVICE __half operator[](int entry) const { return __ushort_as_half(SharedBytes{at}.get2(entry * 2)); }
};
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

// A launch's parameters reach an SM a line at a time, each after a trip to L2: every consumer warp asks for some of them at once.
DEVICE void touch_parameters(const Task& p) {
  __shared__ int touched[CONSUMERS];
  constexpr int WORDS = sizeof(Task) / 4;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 != 0) return;
  int v = 0;
  for (int i = warp * 16 + 4; i < WORDS; i += CONSUMERS * 16) v += reinterpret_cast<const int*>(&p)[i];
  touched[warp] = v;
}

// The tiles of this block, one after the other.
struct Walk {
  int at, end, half;  // half: of gated pairs
  DEVICE Walk(const Task& p) {
    const int pair = p.gate >= 0 ? 2 : 1;
    const int block = blockIdx.x;
    half = p.tiles + (block < p.longer);
    at = pair * (block * p.tiles + min(block, p.longer));
    end = at + pair * half;
  }
  DEVICE bool more() const { return at < end; }
  DEVICE void find(const Task& p, int& matrix, int& tile) const {
    matrix = 0;
    tile = at;
    if (p.gate >= 0 && p.keep) {
      const int first = end - 2 * half;
      matrix = at - first >= half;
      tile = first / 2 + at - first - (matrix ? half : 0);
    } else if (p.gate >= 0) {
      matrix = at & 1;
      tile = at >> 1;
    } else {
#pragma unroll 1
      while (matrix + 1 < p.count && tile >= p.part[matrix].a.tiles) tile -= p.part[matrix++].a.tiles;
    }
  }
  // How many tiles of the matrix found follow each other, where warps keep their class.
  DEVICE int rest(const Task& p, int matrix, int tile) const {
    if (p.gate >= 0) return matrix ? end - at : end - half - at;
    return min(end - at, p.part[matrix].a.tiles - tile);
  }
};

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

// ---------------------------------------------------------------------------------------------------- before the first product
// Unit tables and entries' maxima of every matrix to shared memory, four warps a matrix.
template <int ENTRY>
DEVICE void load_constants(const Task& p, uint8_t* memory) {
  constexpr int TEAM = 128;
  const int matrix = threadIdx.x / TEAM;
  if (matrix >= p.count) return;
  const Part& part = p.part[matrix];
  const int units = part.a.unit_count, entries = part.a.maxima ? (part.a.rows + ENTRY - 1) / ENTRY : 0;
#pragma unroll 1
  for (int e = threadIdx.x % TEAM; e < max(units, entries); e += TEAM) {
    uint2 unit = make_uint2(0, 0);
    __half maximum = __half(0.f);
    if (e < units) unit = __ldg(part.a.units + e);
    if (e < entries) maximum = part.a.maxima[e];
    if (e < units) reinterpret_cast<uint2*>(memory + part.units_at)[e] = make_uint2(unit.x - p.stage_begin[matrix][e / 8], unit.y);
    if (e < entries) reinterpret_cast<__half*>(memory + part.maxima_at)[e] = maximum;
  }
}
static_assert(CONSUMERS * 32 >= MATRICES * 128, "a team a matrix");

// Activations into layout order, as halves; 512 threads. The norm is that of kernels/norm.cu, sum for sum, and so has 256 threads a row;
// a norm and BF16 rows are the host's promise to fit one batch. Every load from global memory costs a trip to L2 (about 0.5 us), so a
// batch's are issued together; what is done with them is a loop over BATCH groups of eight elements, whose registers change places.
template <class T, int BATCH>
struct Fill {
  static constexpr bool SCALED = !std::is_same<T, __half>::value;
  static constexpr int THREADS = CONSUMERS * 32;
  static constexpr bool EARLY = BATCH == 2;  // registers for the norm's weights
  union Eight {
    uint4 word;
    T v[8];
  };
  const Task& p;
  uint8_t* memory;
  float (*parts)[2][CONSUMERS];
  int k, eights, team, teams, mine, rank, held;
  Eight in[BATCH];
  uint4 rows[BATCH];
  float4 weights[BATCH][2];

  DEVICE Fill(const Task& p, uint8_t* memory, float (*parts)[2][CONSUMERS]) : p(p), memory(memory), parts(parts) {
    const int tid = threadIdx.x;
    k = p.part[0].a.in_features;
    eights = k / 8;
    team = p.norm ? 256 : THREADS;
    teams = THREADS / team;
    mine = tid / team;
    rank = tid % team;
    held = 0;
  }
  DEVICE void turn(uint4 (&v)[BATCH]) {
    const uint4 first = v[0];
#pragma unroll
    for (int j = 1; j < BATCH; j++) v[j - 1] = v[j];
    v[BATCH - 1] = first;
  }
  DEVICE void turn(Eight (&v)[BATCH]) { turn(reinterpret_cast<uint4(&)[BATCH]>(v)); }
  // Calls f(number of the group of eight) for each group of a batch, its elements in in[0], and `next` after each place of the batch.
  template <class F, class N>
  DEVICE void each(int batch, F f, N next) {
#pragma unroll 1
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      if (i < eights) f(i);
      turn(in);
      next();
    }
  }
  template <class F>
  DEVICE void each(int batch, F f) {
    each(batch, f, [] {});
  }
  DEVICE void load_rows(const Matrix& a, int batch) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      rows[j] = make_uint4(0, 0, 0, 0);
      if (i < eights) rows[j] = __ldg(reinterpret_cast<const uint4*>(a.row_of_feature) + i);
    }
  }
  // What does not depend on the predecessor.
  DEVICE void early() {
    // Registers that are not always written would count as used ever since the start.
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      rows[j] = make_uint4(0, 0, 0, 0);
      weights[j][0] = weights[j][1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (p.part[0].a.row_of_feature) load_rows(p.part[0].a, 0);
    if (EARLY && p.norm) {
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const int i = rank + j * team;
        if (i < eights) {
          weights[j][0] = __ldg(p.norm + 2 * i);
          weights[j][1] = __ldg(p.norm + 2 * i + 1);
        }
      }
    }
  }
  // From L2, where the predecessor left it: a line is used once. (After pdl_wait a plain load sees it as well, by what PTX says of the
  // wait; only `__ldg` might not.)
  DEVICE void load(const T* x, int batch) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      in[j].word = make_uint4(0, 0, 0, 0);
      if (i < eights) in[j].word = __ldcg(reinterpret_cast<const uint4*>(x) + i);
    }
  }
  // In the build for racecheck both teams meet at one barrier: the tool loses count of teams that meet apart (racecheck_mbarrier.cu).
  DEVICE void meet() {
    if (teams == 1 || RACECHECK) bar<4>(THREADS);
    else if (mine == 0) bar<2>(256);
    else bar<3>(256);
  }
  DEVICE void normalise(int turn_) {
    float sum = 0.f;
    each(0, [&](int) {
      float v[8];
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = to_float(in[0].v[e]);
      sum += eight_squares(v);
    });
    sum = warp_sum(sum);
    if (rank % 32 == 0) parts[0][turn_][threadIdx.x / 32] = sum;
    meet();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += parts[0][turn_][8 * mine + w];
    const float scale = 1.f / sqrtf(sum / (float)k + p.eps);
    auto apply = [&](int i) {
      float4 a = weights[0][0], b = weights[0][1];
      if (!EARLY) {
        a = __ldg(p.norm + 2 * i);
        b = __ldg(p.norm + 2 * i + 1);
      }
      const float w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int e = 0; e < 8; e++) in[0].v[e] = from_float<T>(to_float(in[0].v[e]) * scale * (w[e] + p.offset));
    };
    each(0, apply, [&] {
      if (!EARLY) return;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4 first = weights[0][h];
        weights[0][h] = weights[1][h];
        weights[1][h] = first;
      }
    });
  }
  // The factor that brings a BF16 row into the range of halves.
  DEVICE float factor(int turn_) {
    float largest = 0.f;
    each(0, [&](int) {
#pragma unroll
      for (int e = 0; e < 8; e++) largest = fmaxf(largest, fabsf(to_float(in[0].v[e])));
    });
#pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    if (rank % 32 == 0) parts[1][turn_][threadIdx.x / 32] = largest;
    meet();
    for (int w = 0; w < team / 32; w++) largest = fmaxf(largest, parts[1][turn_][8 * mine + w]);
    return row_factor(largest);
  }
  // A batch of a row into the order of matrix `i`.
  DEVICE void write(int i, int token, int batch, float factor) {
    const Part& part = p.part[i];
    __half* to = reinterpret_cast<__half*>(memory + part.x_at) + token * p.x_stride;
    const bool ordered = !part.a.row_of_feature;
    auto put = [&](int at) {
      union {
        uint4 word;
        __half v[8];
      } out;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        if constexpr (SCALED) out.v[e] = __float2half_rn(to_float(in[0].v[e]) * factor);
        else out.v[e] = in[0].v[e];
      }
      if (ordered) {
        reinterpret_cast<uint4*>(to)[at] = out.word;
      } else {
        union {
          uint4 word;
          uint16_t v[8];
        } row;
        row.word = rows[0];
#pragma unroll
        for (int e = 0; e < 8; e++)
          to[row.v[e]] = out.v[e];
      }
    };
    each(batch, put, [&] { turn(rows); });
  }
  DEVICE void run() {
    early();
    pdl_wait();
    const int batches = SCALED || p.norm ? 1 : (eights + BATCH * team - 1) / (BATCH * team);
    int turn_ = 0;
#pragma unroll 1
    for (int token = mine; token < p.m; token += teams, turn_ ^= 1) {
      const T* x = static_cast<const T*>(p.x) + (size_t)token * k;
#pragma unroll 1
      for (int b = 0; b < batches; b++) {
        load(x, b);
        if (p.norm) normalise(turn_);
        const float f = SCALED ? factor(turn_) : 1.f;
        if (rank == 0) reinterpret_cast<float*>(memory + p.multipliers_at)[token] = 1.f / f;
#pragma unroll 1
        for (int i = 0; i < p.count; i++) {
          if (p.part[i].order != i) continue;
          if (p.part[i].a.row_of_feature && (batches > 1 || held != i)) {
            load_rows(p.part[i].a, b);
            held = i;
          }
          write(i, token, b, f);
        }
      }
    }
    if (RACECHECK && mine == 1 && p.m % 2 == 1)
      for (int i = 0; i < 1 + SCALED; i++) meet();  // as often as the first team
  }
};

// Rows of the layout that no feature stands in.
DEVICE void clear_padding(const Task& p, uint8_t* memory) {
  constexpr int THREADS = CONSUMERS * 32;
  bool padded = false;
#pragma unroll 1
  for (int i = 0; i < p.count; i++) {
    if (p.part[i].order != i || p.part[i].a.rows == p.part[i].a.in_features) continue;
    padded = true;
    uint32_t* to = reinterpret_cast<uint32_t*>(memory + p.part[i].x_at);
    for (int e = threadIdx.x; e < p.m * static_cast<int>(p.x_stride) / 2; e += THREADS) to[e] = 0;
  }
  if (padded) bar<4>(THREADS);
}

DEVICE void fill_shared(const Task& p, uint8_t* memory) {
  __shared__ float parts[2][2][CONSUMERS];
  clear_padding(p, memory);
  const bool small = p.part[0].a.in_features <= 16 * (p.norm ? 256 : CONSUMERS * 32);
  if (p.x_kind == OUT_F16) {
    if (small) Fill<__half, 2>(p, memory, parts).run();
    else Fill<__half, 4>(p, memory, parts).run();
  } else {
    if (small) Fill<__nv_bfloat16, 2>(p, memory, parts).run();
    else Fill<__nv_bfloat16, 4>(p, memory, parts).run();
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
