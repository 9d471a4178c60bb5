// y = f(x @ W) for 3 to 8 activation rows on sm_90 and later: weights at the pace of one row.
//
// K is whole or cut in four (the quarters of `sum_classes`), and a block has one part of a contiguous run of columns: two row tiles of one
// matrix, or a tile of each of two where the first gates the second. Its part of the activations, prepared by a kernel before
// (prepared.cuh), stays in shared memory. One warp streams stages, one unit of each of the eight tiles of a round, through a ring of
// slots, another fetches the activations. Sixteen warps multiply: two tiles and a quarter of the block's classes each. The last of the
// warps that have a part of the same tiles adds the quarters and, where K is cut, leaves the sum in a workspace in L2; the last of the
// blocks adds the parts, in their order. It does what follows the product and stores. Same bits as the ring kernel.
//
// In a decode step other kernels run in between, and a launch finds neither its instructions nor its parameters in the
// multiprocessor's caches: what is passed once is in loops that are not unrolled.
#pragma once
#include "activate.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

// Eighteen warps of 96 registers leave room for blocks of the kernel that prepares the next input.
constexpr int GROUP = 8, ITEMS = 4, SIDES = 4, MULTIPLIERS = ITEMS * SIDES, BUFFERS = 1, SKINNY_MATRICES = 3;
constexpr int SKINNY_THREADS = (MULTIPLIERS + 2) * 32;
constexpr int X_BYTES = 4096;  // of a unit and eight activation rows, as in prepared.cuh

// One matrix of a launch; places are bytes in shared memory.
struct SkinnyPart {
  Matrix a;
  uint32_t stages_at;  // for each stage {offset in the tile, bytes}
  uint32_t units_at;   // for each stage {widths, where scales begin in the unit}
  uint32_t maxima_at, x_at;
  int copy;     // which of the prepared copies of x
  int columns;  // of this matrix
  int y_offset;
};

// The same struct as `ops::skinny::Task`.
struct SkinnyTask {
  uint32_t barriers_at, stage_stride, unit_room;
  int slots, window, count, cut, units;  // units: the most that a matrix has
  int columns, longer;                   // of a block, and how many runs have one more
  int gate;                              // activation of the first of two matrices that gates the second, or -1
  uint32_t results_at, places_at;
  int m, y_kind, y_stride, scaled, copies;
  size_t copy_bytes;
  const uint8_t* x;          // prepared: copies, each [units][X_BYTES]
  const float* multipliers;  // [m] when scaled
  float4* sums;              // [column][2 tiles][cut][32 lanes]
  int* arrivals;             // [column], zero before and after
  void* y;
  const void* residual;        // like y; null when there is none
  const uint16_t* row_of_feature;  // of PREPARED results; null when rows stand in the features' order
  SkinnyPart part[SKINNY_MATRICES];
};

enum { PREPARED = 3 };  // results that are the prepared input of another launch

#if __CUDA_ARCH__ >= 900
// The class in place `leaf` of the order of `sum_classes`: quarter after quarter.
DEVICE int class_of(int leaf) { return leaf >> 2 | (leaf & 2) << 1 | (leaf & 1) << 3; }

// The units of a block: four sides of `leaves` classes each, whose units take turns in the ring. A side that has fewer than another
// gets empty stages, so that no warp steps further than SIDES stages.
struct Share {
  int first, leaves, units, length;
  DEVICE Share(const SkinnyTask& p) : leaves(CLASSES / SIDES / p.cut), units(p.units), length(0) {
    first = static_cast<int>(blockIdx.x) % p.cut * SIDES * leaves;
#pragma unroll 1
    for (int s = 0; s < SIDES; s++) {
      int own = 0;
#pragma unroll 1
      for (int l = 0; l < leaves; l++) own += in_class(s, l);
      length = max(length, own);
    }
  }
  DEVICE int leaf_class(int side, int leaf) const { return class_of(first + side * leaves + leaf); }
  DEVICE int in_class(int side, int leaf) const { return (units + CLASSES - 1 - leaf_class(side, leaf)) / CLASSES; }
  DEVICE int stages() const { return SIDES * length; }
  // The unit of a stage, or `units` where there is none.
  DEVICE int unit(int stage) const {
    const int side = stage % SIDES;
    int i = stage / SIDES;
#pragma unroll 1
    for (int leaf = 0; leaf < leaves; leaf++) {
      const int count = in_class(side, leaf);
      if (i < count) return leaf_class(side, leaf) + CLASSES * i;
      i -= count;
    }
    return units;
  }
};

// The columns of this block.
struct SkinnyWalk {
  int at, end;
  DEVICE SkinnyWalk(const SkinnyTask& p) {
    const int run = static_cast<int>(blockIdx.x) / p.cut;
    at = run * p.columns + min(run, p.longer);
    end = at + p.columns + (run < p.longer);
  }
};
// Place `at` of a round that begins with column `first`: two of a column, or gate, gate, up, up of two gated columns.
DEVICE bool find_place(const SkinnyTask& p, int first, int end, int at, int& matrix, int& tile) {
  if (p.gate >= 0) {
    matrix = at >> 1 & 1;
    tile = first + (at >> 2) * 2 + (at & 1);
    return tile < end;
  }
  int column = first + (at >> 1);
  const bool known = column < end;
  if (!known) column = first;
  matrix = 0;
#pragma unroll 1
  while (matrix + 1 < p.count && column >= p.part[matrix].columns) column -= p.part[matrix++].columns;
  tile = 2 * column + (at & 1);
  return known && tile < p.part[matrix].a.tiles;
}

// A counter in shared memory by which the warps of a team find out who is the last. In the build for racecheck, which follows no
// atomics, it is a barrier, and the team's first warp waits for all.
DEVICE void clear_counter(uint32_t counter, int warps) {
  if constexpr (RACECHECK) barrier_init(counter, warps * WARP_ARRIVALS);
  else asm volatile("st.shared.u32 [%0], 0;" ::"r"(counter) : "memory");
}
// Counts a warp in; whether it is the last of so many, which then sees what all have written and finds the counter at zero again.
DEVICE bool count_in(uint32_t counter, int warps, bool first, uint32_t phase) {
  __syncwarp();
  if constexpr (RACECHECK) {
    barrier_arrive(counter);
    if (first) barrier_wait(counter, phase);
    return first;
  } else {
    uint32_t before = 0;
    if (threadIdx.x % 32 == 0) {
      asm volatile("atom.add.acq_rel.cta.shared::cta.u32 %0, [%1], 1;" : "=r"(before) : "r"(counter) : "memory");
      if (before + 1 == warps) asm volatile("st.shared.u32 [%0], 0;" ::"r"(counter) : "memory");
    }
    __syncwarp();
    return __shfl_sync(~0u, before, 0) + 1 == warps;
  }
}

struct SkinnyBarriers {
  uint32_t full, empty, free, counters, present;
  DEVICE SkinnyBarriers(const SkinnyTask& p, uint32_t base)
      : full(base + p.barriers_at),
        empty(full + p.slots * 8),
        free(empty + p.slots * 8),
        counters(free + BUFFERS * ITEMS * 8),
        present(counters + BUFFERS * ITEMS * 8) {}
  DEVICE void init(const SkinnyTask& p, int stages) const {
    const int count = 2 * p.slots + 2 * BUFFERS * ITEMS + stages;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const uint32_t at = full + i * 8;
      if (at >= counters && at < present) clear_counter(at, (p.gate >= 0 ? 2 : 1) * SIDES);
      else barrier_init(at, at < empty || at >= present ? 1 : at < free ? ITEMS * WARP_ARRIVALS : WARP_ARRIVALS);
    }
    barriers_visible();
    __syncwarp();
  }
};

struct SharedPrepared {
  uint32_t at;  // with the lane's place
  DEVICE uint4 get(int, int k) const { return SharedBytes{at}.get16(k * 16); }
};

// ---------------------------------------------------------------------------------------------------- weights
DEVICE void skinny_stream(const SkinnyTask& p, uint8_t* memory, uint32_t base) {
  const int lane = threadIdx.x % 32;
  const SkinnyBarriers s(p, base);
  const Share share(p);
  const int stages = share.stages();
  s.init(p, stages);
  asm volatile("bar.arrive 1, %0;" ::"r"(SKINNY_THREADS - 32) : "memory");
  asm volatile("bar.arrive 2, 64;" ::: "memory");
  pdl_trigger();
#pragma unroll 1
  for (int m = 0; m < p.count; m++) {
    const SkinnyPart& part = p.part[m];
    uint2* to = reinterpret_cast<uint2*>(memory + part.stages_at);
#pragma unroll 1
    for (int i = lane; i < stages; i += 32) {
      const int u = share.unit(i);
      uint32_t begin = 0, end = 0;
      if (u < part.a.unit_count) {
        begin = __ldg(&part.a.units[u].x);
        end = __ldg(&part.a.units[u + 1].x);
      }
      to[i] = make_uint2(begin, end - begin);
    }
  }
  __syncwarp();
  const uint64_t policy = evict_first();
  Turn turn, landed;
  int count = 0;
  const SkinnyWalk walk(p);
#pragma unroll 1
  for (int first = walk.at; first < walk.end; first += ITEMS) {
    int matrix = 0, tile = 0;
    const bool some = lane < GROUP && find_place(p, first, walk.end, lane, matrix, tile);
    const uint8_t* from = p.part[matrix].a.image + (size_t)tile * p.part[matrix].a.tile_bytes;
    const uint2* table = reinterpret_cast<const uint2*>(memory + p.part[matrix].stages_at);
#pragma unroll 1
    for (int i = 0; i < stages; i++, count++) {
      uint2 place = table[i];
      if (!some) place.y = 0;
      const uint32_t total = __reduce_add_sync(~0u, place.y), full = s.full + turn.slot * 8;
      if (count >= p.slots) barrier_wait(s.empty + turn.slot * 8, turn.phase ^ 1);
      // Weights queued far ahead delay everything else the memory has to deliver; spec/kernels-measured.md 6.1.
      if (count >= p.window) {
        barrier_wait(s.full + landed.slot * 8, landed.phase);
        landed.advance(p.slots);
      }
      if (lane == 0) barrier_expect(full, total);
      __syncwarp();
      if (place.y) copy_to_shared(base + turn.slot * p.stage_stride + lane * p.unit_room, from + place.x, place.y, full, policy);
      turn.advance(p.slots);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- after the products
DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float4 turned(float4 v) { return make_float4(v.y, v.z, v.w, v.x); }
// The same of the blocks that have a part of a column.
DEVICE bool count_in(int* counter, int blocks) {
  int before = 0;
  if (threadIdx.x % 32 == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (before + 1 == blocks) *counter = 0;
  }
  __syncwarp();
  return __shfl_sync(~0u, before, 0) + 1 == blocks;
}
// Halves of either kind, in few instructions.
DEVICE float load_half(const void* y, size_t at, int kind) {
  if (kind == OUT_F32) return static_cast<const float*>(y)[at];
  const uint32_t v = static_cast<const uint16_t*>(y)[at];
  return kind == OUT_BF16 ? __uint_as_float(v << 16) : __half2float(__ushort_as_half(v));
}
DEVICE uint16_t half_bits(float v, int kind) {
  return kind == OUT_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v)) : __half_as_ushort(__float2half_rn(v));
}
DEVICE float rounded_half(float v, int kind) {
  const uint32_t bits = half_bits(v, kind);
  return kind == OUT_F32 ? v : kind == OUT_BF16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

// What a warp stores: a column's two tiles, or two gated columns. Element e of a tile is (feature, row) = (g, 2 t), (g, 2 t + 1),
// (g + 8, 2 t), (g + 8, 2 t + 1). Rounded where separate operators round.
struct SkinnyOutput {
  const SkinnyTask& p;
  const bool gated;
  const int lane, column, token, last;  // last: of two gated columns, 0 where the second is another block's
  int matrix, n, limit;  // feature of the thread; features from `limit` on are none, or another block's
  float4 sum[2], gate[2];

  // `results`: sums of the sides, place after place, with the lane's place.
  DEVICE SkinnyOutput(const SkinnyTask& p, int column, int end, uint32_t results)
      : p(p), gated(p.gate >= 0), lane(threadIdx.x % 32), column(column), token(2 * (lane & 3)), last(gated && column + 1 == end ? 0 : 1) {
    int tile;
    find_place(p, column, end, gated ? 2 : 0, matrix, tile);
    n = tile * TILE + (lane >> 2);
    limit = p.part[matrix].a.out_features;
    if (gated) limit = min(limit, end * TILE);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      gate[h] = sides(results + h * SIDES * 512);
      if (gated) sum[h] = sides(results + (2 + h) * SIDES * 512);
      else sum[h] = gate[h];
    }
  }
  DEVICE static float4 side(uint32_t at) {
    const uint4 v = SharedBytes{at}.get16(0);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  }
  DEVICE static float4 sides(uint32_t at) { return add4(add4(add4(side(at), side(at + 512)), side(at + 1024)), side(at + 1536)); }

  // Leaves this block's part; whether it was the last, which then has the sums.
  DEVICE bool join() {
    float4* parts = p.sums + (size_t)column * 2 * p.cut * 32 + lane;
    const int tile = p.cut * 32, stride = gated ? 2 * tile : tile, rank = static_cast<int>(blockIdx.x) % p.cut * 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h > last) break;
      __stcg(parts + h * stride + rank, sum[h]);
      if (gated) __stcg(parts + tile + h * stride + rank, gate[h]);
    }
    __syncwarp();
    if (!count_in(p.arrivals + column, p.cut)) return false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h > last) break;
      sum[h] = fetch(parts + h * stride);
      if (gated) gate[h] = fetch(parts + tile + h * stride);
    }
    return true;
  }
  DEVICE float4 fetch(const float4* parts) const {
    float4 v[4];
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = __ldcg(parts + c * 32);
    return add4(add4(add4(v[0], v[1]), v[2]), v[3]);
  }

  DEVICE void put(int feature, int row, int r, float v) const {
    if (p.y_kind == PREPARED) {
      const uint32_t at = (r >> 5) * 512 + (row * 4 + (r >> 3 & 3)) * 16 + (r & 7) * 2;
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.y) + at) = half_bits(v, OUT_F16);
      return;
    }
    const size_t at = (size_t)row * p.y_stride + p.part[matrix].y_offset + feature;
    if (p.y_kind == OUT_F32) static_cast<float*>(p.y)[at] = v;
    else static_cast<uint16_t*>(p.y)[at] = half_bits(v, p.y_kind);
  }
  DEVICE float bias(int m, int feature) const { return p.part[m].a.bias && feature < limit ? p.part[m].a.bias[feature] : 0.f; }
  DEVICE void store() {
    const float prescale = p.part[matrix].a.prescale, gate_prescale = p.part[0].a.prescale;
    float4 residual[2];
    float times[2];
    uint32_t places[2];  // of PREPARED results: for features n and n + 8 in the halves of a word
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int feature = n + h * TILE;
      places[h] = feature | (feature + 8) << 16;
      if (p.y_kind == PREPARED && p.row_of_feature)
        places[h] = (feature < limit ? p.row_of_feature[feature] : 0u) | (feature + 8 < limit ? p.row_of_feature[feature + 8] : 0u) << 16;
      times[h] = p.scaled && token + h < p.m ? __ldcg(p.multipliers + token + h) : 1.f;
      residual[h] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (!p.residual) continue;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int feature = n + h * TILE + e / 2 * 8, row = token + e % 2;
        const size_t at = (size_t)row * p.y_stride + p.part[matrix].y_offset + feature;
        if (row < p.m && feature < limit) (&residual[h].x)[e] = load_half(p.residual, at, p.y_kind);
      }
    }
#pragma unroll 1
    for (int e = 0; e < 4; e++) {
      const int row = token + (e & 1);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int feature = n + h * TILE + (e >> 1) * 8;
        float v = finish(sum[h].x, times[0], bias(matrix, feature), prescale);
        if (gated) v = activate(rounded_half(finish(gate[h].x, times[0], bias(0, feature), gate_prescale), p.y_kind), p.gate) * rounded_half(v, p.y_kind);
        if (p.residual) v = residual[h].x + rounded_half(v, p.y_kind);
        if (row < p.m && feature < limit) put(feature, row, e >> 1 ? places[h] >> 16 : places[h] & 0xffff, v);
        sum[h] = turned(sum[h]);
        gate[h] = turned(gate[h]);
        residual[h] = turned(residual[h]);
      }
      const float other = times[1];
      times[1] = times[0];
      times[0] = other;
    }
  }
};

// ---------------------------------------------------------------------------------------------------- products
// What the loop needs of each unit, in shared memory.
template <int ENTRY>
DEVICE void skinny_tables(const SkinnyTask& p, const Share& share, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY, THREADS = MULTIPLIERS * 32;
  const int stages = share.stages();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.count * stages * ENTRIES; i += THREADS) {
    const int m = i / (stages * ENTRIES), j = i % (stages * ENTRIES), stage = j / ENTRIES, u = share.unit(stage), e = u * ENTRIES + j % ENTRIES;
    const SkinnyPart& part = p.part[m];
    const bool known = part.a.maxima && e < (part.a.rows + ENTRY - 1) / ENTRY;
    const __half maximum = known ? part.a.maxima[e] : __half(0.f);
    if (j % ENTRIES == 0) {
      const uint32_t widths = u < part.a.unit_count ? __ldg(&part.a.units[u].y) : 0;
      uint32_t bits = 0;
#pragma unroll
      for (int c = 0; c < 4; c++) bits += widths >> (4 * c) & 15;
      reinterpret_cast<uint2*>(memory + part.units_at)[stage] = make_uint2(widths, 128 * bits);
    }
    reinterpret_cast<__half*>(memory + part.maxima_at)[j] = maximum;
  }
  if (threadIdx.x < p.count) {
    const SkinnyPart& part = p.part[threadIdx.x];
    reinterpret_cast<uint4*>(memory + p.places_at)[threadIdx.x] = make_uint4(base + part.x_at, part.units_at, part.maxima_at, 0);
  }
}

template <int KIND, int ENTRY>
DEVICE void skinny_multiply(const SkinnyTask& p, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY;
  const SkinnyBarriers s(p, base);
  const Share share(p);
  skinny_tables<ENTRY>(p, share, memory, base);
  bar<1>(SKINNY_THREADS - 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = warp / ITEMS, place = warp % ITEMS * 2;
  const int stages = share.stages(), slots = p.slots, leaves = share.leaves;
  const uint32_t room = p.unit_room, stride = p.stage_stride;
  const bool gated = p.gate >= 0;
  const SkinnyWalk walk(p);
  Turn turn;
  turn.skip(side, slots);
  int buffer = 0;
  uint32_t buffer_phase = 1;
  bool fresh = true;
#pragma unroll 1
  for (int first = walk.at; first < walk.end; first += ITEMS) {
    int matrix, tile;
    const bool some = find_place(p, first, walk.end, place, matrix, tile);
    const uint4 where = reinterpret_cast<const uint4*>(memory + p.places_at)[matrix];
    const uint2* units = reinterpret_cast<const uint2*>(memory + where.y);
    Sums<1> total[2], held[2];  // of a class, of those before
    int stage = side;
#pragma unroll 1
    for (int leaf = 0; leaf < leaves; leaf++) {
      clear(total[0]), clear(total[1]);
#pragma unroll 1
      for (int left = share.in_class(side, leaf) + (leaf + 1 == leaves ? stages : 0); left > 0 && stage < stages; left--, stage += SIDES) {
        const uint2 unit = units[stage];
        barrier_wait(s.full + turn.slot * 8, turn.phase);
        if (fresh) barrier_wait(s.present + stage * 8, 0);
        if (some && unit.x) {
          const uint32_t codes = base + turn.slot * stride + place * room;
          const SharedBytes weights[2] = {{codes}, {codes + room}};
          const SharedPrepared columns{where.x + stage * X_BYTES + lane * 16};
          const __half* maxima = reinterpret_cast<const __half*>(memory + where.z) + stage * ENTRIES;
          UnitProduct<KIND, ENTRY, 1, 2, SharedBytes, SharedPrepared> product{weights, columns, maxima, total, lane, {}};
          product.run(unit.x, unit.y);
        }
        warp_arrives(s.empty + turn.slot * 8, lane);
        turn.skip(SIDES, slots);
      }
      // Whole quarters, where K is whole; else a class.
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int e = 0; e < 4; e++) held[r][0][e] = leaf == 0 ? total[r][0][e] : held[r][0][e] + total[r][0][e];
    }
    fresh = false;
    const int team = gated ? place >> 2 : place >> 1, at = buffer * ITEMS + team;
    barrier_wait(s.free + at * 8, buffer_phase);
    const uint32_t results = base + p.results_at + buffer * (GROUP * SIDES * 512) + lane * 16, to = results + (place * SIDES + side) * 512;
    store_four(to, held[0][0]);
    store_four(to + SIDES * 512, held[1][0]);
    const bool team_first = side == 0 && place == team * (gated ? 4 : 2);
    if (count_in(s.counters + at * 8, gated ? 2 * SIDES : SIDES, team_first, buffer_phase ^ 1)) {
      const int column = first + team * (gated ? 2 : 1);
      SkinnyOutput output(p, min(column, walk.end - 1), walk.end, results + team * (gated ? 4 : 2) * SIDES * 512);
      warp_arrives(s.free + at * 8, lane);
      pdl_wait();
      if (column < walk.end && (p.cut == 1 || output.join())) output.store();
    }
    if (++buffer == BUFFERS) {
      buffer = 0;
      buffer_phase ^= 1;
    }
  }
}

// One warp fetches the activations as soon as they are there.
DEVICE void copy_activations(const SkinnyTask& p, uint32_t base) {
  const SkinnyBarriers s(p, base);
  const Share share(p);
  const int stages = share.stages();
  const uint64_t again = evict_last();
  bar<2>(64);
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < stages; i += 32) barrier_expect(s.present + i * 8, share.unit(i) < share.units ? p.copies * X_BYTES : 0);
  // Places of the usual single copy are known before the wait.
  const int first = threadIdx.x % 32, first_unit = first < stages ? share.unit(first) : share.units;
  const uint8_t* from = p.x + (size_t)first_unit * X_BYTES;
  const uint32_t to = base + p.part[0].x_at + first * X_BYTES, present = s.present + first * 8;
  pdl_wait();
  if (first_unit < share.units) copy_to_shared(to, from, X_BYTES, present, again);
#pragma unroll 1
  for (int copy = 0; copy < p.copies; copy++) {
    int m = 0;
    while (p.part[m].copy != copy) m++;
#pragma unroll 1
    for (int i = first + (copy == 0 ? 32 : 0); i < stages; i += 32) {
      const int unit = share.unit(i);
      if (unit < share.units)
        copy_to_shared(base + p.part[m].x_at + i * X_BYTES, p.x + copy * p.copy_bytes + (size_t)unit * X_BYTES, X_BYTES, s.present + i * 8, again);
    }
  }
}
#endif

template <int KIND, int ENTRY>
DEVICE void skinny_matmul(const SkinnyTask& p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32;
  if (warp < MULTIPLIERS) skinny_multiply<KIND, ENTRY>(p, memory, base);
  else if (warp == MULTIPLIERS) skinny_stream(p, memory, base);
  else copy_activations(p, base);
  all_leave();
#endif
}

#define SKINNY(KIND, kind, ENTRY)                                                              \
  extern "C" __global__ void __launch_bounds__(SKINNY_THREADS, 1) skinny_##kind##_##ENTRY(     \
      const __grid_constant__ SkinnyTask p) {                                                  \
    skinny_matmul<KIND, ENTRY>(p);                                                             \
  }
