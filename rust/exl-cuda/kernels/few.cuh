// y = f(x @ W) for 3 to 8 activation rows on sm_90 and later: the ring kernel's walk over rows that a kernel before has laid out.
//
// A group of `cut` blocks, a cluster where there is more than one, walks a contiguous run of row tiles of up to three matrices over one input, `cut` tiles a
// round. K is whole, in halves or in quarters (those of `sum_classes`): a block has its share of each tile of a round, and its share of the
// activations (prepared.cuh) stays in shared memory. One warp streams stages, a few units of each tile of a round, through a ring of slots;
// sixteen warps multiply, a class of units of one tile each, another with every round. Two warps take turns at what follows: they add
// classes to quarters, send those of a cut tile to the block whose turn it is, add the quarters, do what follows the product and store.
// Same bits as the ring kernel.
//
// In a decode step other kernels run in between, and a launch finds neither its instructions nor its parameters in the
// multiprocessor's caches: what is passed once is in loops that are not unrolled.
#pragma once
#include "activate.cuh"
#include "cluster.cuh"
#include "pipeline.cuh"
#include "tile.cuh"

// Two quarters of a multiprocessor hold five of these warps and then 72 registers a lane of one more: a block of attention
// (attention_few.cuh). With a fifth warp in every quarter it is the same. Each finisher has result buffers of its own: one that skipped
// over others' rounds could meet a buffer's barrier in the phase before the last.
constexpr int MULTIPLIERS = 16, FINISHERS = 2, FEW_THREADS = (MULTIPLIERS + 1 + FINISHERS) * 32, FEW_REGISTERS = 88;
constexpr int FEW_MATRICES = 3, X_BYTES = 4096;  // X_BYTES: of a unit and eight activation rows, as in prepared.cuh
enum { PREPARED = 3 };                           // results that are the prepared input of another launch

// One matrix of a launch; places are bytes in shared memory.
struct FewPart {
  Matrix a;
  uint32_t pieces_at;  // for each piece of a stage {offset in the tile, bytes, place in the slot}
  uint32_t units_at;   // for each unit {place in the slot, where its scales begin in the halves of a word; widths}
  uint32_t maxima_at, x_at;
  int copy;  // which of the prepared copies of x
  int y_offset;
};

// The same struct as `ops::few::Task`.
struct FewTask {
  uint32_t barriers_at, stage_stride;
  int slots, window, count, cut;
  int units, stages;    // the most units that a matrix has; stages of a round
  int stage_log;        // units of a tile in a stage, as a power of two
  int rounds, longer;   // of a group of blocks (pairs of rounds where tiles of two matrices take turns), and how many groups have one more
  int tiles;            // of all matrices
  int gate;             // activation of the first of two matrices that gates the second, or -1
  uint32_t results_at, places_at, mail_at;
  int buffers, mails;   // result buffers; tiles or gated pairs that come by mail
  int m, y_kind, y_stride, scaled, copies;
  size_t copy_bytes;
  const uint8_t* x;          // prepared: copies, each [units][X_BYTES]
  const float* multipliers;  // [m] when scaled
  void* y;
  const void* residual;            // like y; null when there is none
  const uint16_t* row_of_feature;  // of PREPARED results; null when rows stand in the features' order
  FewPart part[FEW_MATRICES];
};

#if __CUDA_ARCH__ >= 900
// How K is cut: a block has 16 / cut classes, of each of the `cut` tiles of a round. A quarter has every fourth unit, a block `quarters`
// of them, in whose order its units stand.
struct Cut {
  int log, rank, stage_log;
  DEVICE Cut(const FewTask& p) : log(p.cut >> 1), rank(p.cut > 1 ? blockIdx.z : 0), stage_log(p.stage_log) {}
  DEVICE int quarters() const { return 4 >> log; }
  DEVICE int classes() const { return MULTIPLIERS >> log; }
  DEVICE int unit(int local) const { return local >> (2 - log) << 2 | rank << (2 - log) | (local & (quarters() - 1)); }
  // Units in a piece, which lie side by side in the tile, and pieces of a tile in a stage.
  DEVICE int piece_log() const { return log ? 2 - log : stage_log; }
  DEVICE int pieces_log() const { return stage_log - piece_log(); }
};

// The rounds of this group of blocks.
struct FewWalk {
  int at, end;
  bool turns;  // two matrices' tiles take turns
  DEVICE FewWalk(const FewTask& p) : turns(p.gate >= 0 && p.cut == 1) {
    const int pair = turns ? 2 : 1, group = blockIdx.x;
    at = pair * (group * p.rounds + min(group, p.longer));
    end = at + pair * (p.rounds + (group < p.longer));
  }
  // A round's tile in this place; whether there is one.
  DEVICE bool find(const FewTask& p, int round, int place, int& matrix, int& tile) const {
    const int flat = round * p.cut + place;
    matrix = 0;
    if (p.gate >= 0) {
      matrix = flat & 1;
      tile = flat >> 1;
      return flat < p.tiles;
    }
    const bool known = flat < p.tiles;
    tile = known ? flat : 0;
#pragma unroll 1
    while (matrix + 1 < p.count && tile >= p.part[matrix].a.tiles) tile -= p.part[matrix++].a.tiles;
    return known;
  }
};

struct FewBarriers {
  uint32_t full, empty, ready, free, present, mail;
  DEVICE FewBarriers(const FewTask& p, uint32_t base)
      : full(base + p.barriers_at),
        empty(full + p.slots * 8),
        ready(empty + p.slots * 8),
        free(ready + p.buffers * 8),
        present(free + p.buffers * 8),
        mail(present + 8) {}
};

struct SharedPrepared {
  uint32_t at;  // with the lane's place
  DEVICE uint4 get(int, int k) const { return SharedBytes{at}.get16(k * 16); }
};

// ---------------------------------------------------------------------------------------------------- weights and activations
DEVICE void few_stream(const FewTask& p, uint8_t* memory, uint32_t base) {
  const int lane = threadIdx.x % 32, cut = p.cut;
  const FewBarriers s(p, base);
  const Cut c(p);
  const int pieces_log = c.pieces_log(), pieces = p.stages << pieces_log, units = 1 << c.piece_log();
#pragma unroll 1
  for (int i = lane; i < 2 * p.slots + 2 * p.buffers; i += 32) {
    const int count = i < p.slots ? 1 : i < 2 * p.slots ? (cut << c.stage_log) * WARP_ARRIVALS : i < 2 * p.slots + p.buffers ? MULTIPLIERS * WARP_ARRIVALS : WARP_ARRIVALS;
    barrier_init(s.full + i * 8, count);
  }
  barriers_visible();
  __syncwarp();
  bar_arrive<1>(FEW_THREADS);
  pdl_trigger();
#pragma unroll 1
  for (int m = 0; m < p.count; m++) {
    const Matrix& a = p.part[m].a;
#pragma unroll 1
    for (int i = lane; i < pieces; i += 32) {
      const int first = c.unit(i << c.piece_log()), before = c.unit((i & ~1) << c.piece_log());
      const auto offset = [&](int u) { return __ldg(&a.units[min(u, a.unit_count)].x); };
      const uint32_t begin = offset(first), end = offset(first + units);
      const uint32_t at = pieces_log && i % 2 ? offset(before + units) - offset(before) : 0;
      reinterpret_cast<uint4*>(memory + p.part[m].pieces_at)[i] = make_uint4(begin, end - begin, at, 0);
    }
  }
  __syncwarp();
  const uint64_t policy = evict_first();
  Turn turn, landed;
  int count = 0;
  const FewWalk walk(p);
  const int place = lane >> pieces_log;
  const uint32_t room = p.stage_stride / cut;
#pragma unroll 1
  for (int round = walk.at; round < walk.end; round++) {
    int matrix = 0, tile = 0;
    const bool some = place < cut && walk.find(p, round, place, matrix, tile);
    const uint8_t* from = p.part[matrix].a.image + (size_t)tile * p.part[matrix].a.tile_bytes;
    const uint4* table = reinterpret_cast<const uint4*>(memory + p.part[matrix].pieces_at) + (lane & pieces_log);
#pragma unroll 1
    for (int i = 0; i < p.stages; i++, count++) {
      uint4 piece = table[i << pieces_log];
      if (!some) piece.y = 0;
      const uint32_t full = s.full + turn.slot * 8, total = cut == 1 ? piece.y : __reduce_add_sync(~0u, piece.y);
      if (count >= p.slots) barrier_wait(s.empty + turn.slot * 8, turn.phase ^ 1);
      // Weights queued far ahead delay everything else the memory has to deliver; spec/kernels-measured.md 6.1.
      if (count >= p.window) {
        barrier_wait(s.full + landed.slot * 8, landed.phase);
        landed.advance(p.slots);
      }
      if (lane == 0) barrier_expect(full, total);
      __syncwarp();
      if (piece.y) copy_to_shared(base + turn.slot * p.stage_stride + place * room + piece.z, from + piece.x, piece.y, full, policy);
      turn.advance(p.slots);
    }
  }
}

// One warp fetches the activations as soon as they are there.
DEVICE void few_activations(const FewTask& p, uint32_t base) {
  const FewBarriers s(p, base);
  const Cut c(p);
  const int lane = threadIdx.x % 32, own = p.stages << c.stage_log;
  const uint64_t again = evict_last();
  int known = 0;
#pragma unroll 1
  for (int i = 0; i < own; i++) known += c.unit(i) < p.units;
  if (lane == 0) barrier_expect(s.present, known * p.copies * X_BYTES);
  __syncwarp();
  pdl_wait();
#pragma unroll 1
  for (int copy = 0; copy < p.copies; copy++) {
    int m = 0;
    while (p.part[m].copy != copy) m++;
    const uint32_t to = base + p.part[m].x_at;
    const uint8_t* from = p.x + copy * p.copy_bytes;
#pragma unroll 1
    for (int i = lane; i < own; i += 32) {
      const int u = c.unit(i);
      if (u < p.units) copy_to_shared(to + i * X_BYTES, from + (size_t)u * X_BYTES, X_BYTES, s.present, again);
    }
  }
}

// ---------------------------------------------------------------------------------------------------- products
// What the loop needs of each unit, in shared memory.
template <int ENTRY>
DEVICE void few_tables(const FewTask& p, const Cut& c, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY, THREADS = MULTIPLIERS * 32;
  const int own = p.stages << c.stage_log, each = own * ENTRIES;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.count * each; i += THREADS) {
    const int m = i / each, j = i % each, local = j / ENTRIES, u = c.unit(local), e = u * ENTRIES + j % ENTRIES;
    const FewPart& part = p.part[m];
    const bool known = part.a.maxima && e < (part.a.rows + ENTRY - 1) / ENTRY;
    const __half maximum = known ? part.a.maxima[e] : __half(0.f);
    if (j % ENTRIES == 0) {
      const auto at = [&](int v) { return __ldg(&part.a.units[min(v, part.a.unit_count)]); };
      const int units = 1 << c.piece_log(), piece = local >> c.piece_log();
      const uint2 unit = at(u);
      uint32_t place = unit.x - at(c.unit(piece << c.piece_log())).x;
      if (c.pieces_log() && piece % 2) {
        const int before = c.unit((piece - 1) << c.piece_log());
        place += at(before + units).x - at(before).x;
      }
      const uint32_t widths = u < part.a.unit_count ? unit.y : 0;
      uint32_t bits = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) bits += widths >> (4 * k) & 15;
      reinterpret_cast<uint2*>(memory + part.units_at)[local] = make_uint2(place | bits << 23, widths);
    }
    reinterpret_cast<__half*>(memory + part.maxima_at)[j] = maximum;
  }
  if (threadIdx.x < p.count) {
    const FewPart& part = p.part[threadIdx.x];
    reinterpret_cast<uint4*>(memory + p.places_at)[threadIdx.x] = make_uint4(base + part.x_at, part.units_at, part.maxima_at, 0);
  }
}

template <int KIND, int ENTRY>
DEVICE void few_multiply(const FewTask& p, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY, NEXT = 5;
  const FewBarriers s(p, base);
  const Cut c(p);
  few_tables<ENTRY>(p, c, memory, base);
  bar<1>(FEW_THREADS);
  if (p.cut > 1) cluster_wait();
  const int lane = threadIdx.x % 32, slots = p.slots, stages = p.stages, stage_log = c.stage_log, classes = c.classes(), step = classes >> stage_log;
  const uint32_t stride = p.stage_stride, room = stride >> c.log, result_place = base + p.results_at + lane * 16;
  const FewWalk walk(p);
  Turn turn, result;  // turn: the ring's slot of the round's first stage
  int at = threadIdx.x / 32;
  barrier_wait(s.present, 0);
#pragma unroll 1
  for (int round = walk.at; round < walk.end; round++) {
    const int cls = at & (classes - 1), place = at >> (4 - c.log);
    int matrix, tile;
    const bool some = walk.find(p, round, place, matrix, tile);
    const uint4 where = reinterpret_cast<const uint4*>(memory + p.places_at)[matrix];
    Turn mine = turn;
    mine.skip(cls >> stage_log, slots);
    Sums<1> total[1];
    clear(total[0]);
#pragma unroll 1
    for (int u = cls; u < stages << stage_log; u += classes) {
      const uint2 unit = reinterpret_cast<const uint2*>(memory + where.y)[u];
      barrier_wait(s.full + mine.slot * 8, mine.phase);
      if (some && unit.y) {
        const SharedBytes weights[1] = {{base + mine.slot * stride + place * room + (unit.x & 0xffff)}};
        const SharedPrepared columns{where.x + u * X_BYTES + lane * 16};
        const __half* maxima = reinterpret_cast<const __half*>(memory + where.z) + u * ENTRIES;
        UnitProduct<KIND, ENTRY, 1, 1, SharedBytes, SharedPrepared> product{weights, columns, maxima, total, lane, {}};
        product.run(unit.y, unit.x >> 16);
      }
      warp_arrives(s.empty + mine.slot * 8, lane);
      mine.skip(step, slots);
    }
    turn.skip(stages, slots);
    barrier_wait(s.free + result.slot * 8, result.phase ^ 1);
    store_four(result_place + (result.slot * MULTIPLIERS + at) * 512, total[0][0]);
    warp_arrives(s.ready + result.slot * 8, lane);
    result.advance(p.buffers);
    at = (at + NEXT) & (MULTIPLIERS - 1);
  }
}

// ---------------------------------------------------------------------------------------------------- after the products
DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float4 turned(float4 v) { return make_float4(v.y, v.z, v.w, v.x); }
DEVICE float4 shared_four(uint32_t at) {
  const uint4 v = SharedBytes{at}.get16(0);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
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

// A tile's results. Element e of a lane is (feature, row) = (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). Rounded where
// separate operators round. What it reads from global memory is asked for before the sums are there.
struct FewOutput {
  const FewTask& p;
  const int token;
  int feature, limit;
  size_t at;
  float bias[2], prescale;
  float4 residual;
  uint32_t places;  // of PREPARED results: for features g and g + 8 in the halves of a word

  DEVICE FewOutput(const FewTask& p, int matrix, int tile) : p(p), token(2 * (threadIdx.x & 3)) {
    const FewPart& part = p.part[matrix];
    feature = tile * TILE + (threadIdx.x % 32 >> 2);
    limit = part.a.out_features;
    prescale = part.a.prescale;
    at = (size_t)token * p.y_stride + part.y_offset + feature;
    residual = make_float4(0.f, 0.f, 0.f, 0.f);
    places = feature | (feature + 8) << 16;
#pragma unroll
    for (int h = 0; h < 2; h++) bias[h] = part.a.bias && feature + 8 * h < limit ? part.a.bias[feature + 8 * h] : 0.f;
    if (p.y_kind == PREPARED && p.row_of_feature)
      places = (feature < limit ? p.row_of_feature[feature] : 0u) | (feature + 8 < limit ? p.row_of_feature[feature + 8] : 0u) << 16;
    if (!p.residual) return;
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (exists(e)) (&residual.x)[e] = load_half(p.residual, at + place(e), p.y_kind);
  }
  DEVICE bool exists(int e) const { return token + (e & 1) < p.m && feature + (e >> 1) * 8 < limit; }
  DEVICE size_t place(int e) const { return (size_t)((e & 1) * p.y_stride + (e >> 1) * 8); }
  DEVICE float value(int e, float sum) const {
    const int row = token + (e & 1);
    return finish(sum, p.scaled && row < p.m ? __ldcg(p.multipliers + row) : 1.f, e >> 1 ? bias[1] : bias[0], prescale);
  }
  // What the other matrix's results are multiplied by.
  DEVICE float4 gates(float4 sum) const {
    float4 v = sum;
#pragma unroll 1
    for (int e = 0; e < 4; e++) {
      v.x = activate(rounded_half(value(e, v.x), p.y_kind), p.gate);
      v = turned(v);
    }
    return v;
  }
  DEVICE void put(int e, float v) const {
    if (p.y_kind == PREPARED) {
      const uint32_t r = e >> 1 ? places >> 16 : places & 0xffff, to = (r >> 5) * 512 + ((token + (e & 1)) * 4 + (r >> 3 & 3)) * 16 + (r & 7) * 2;
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p.y) + to) = half_bits(v, OUT_F16);
    } else if (p.y_kind == OUT_F32) {
      static_cast<float*>(p.y)[at + place(e)] = v;
    } else {
      static_cast<uint16_t*>(p.y)[at + place(e)] = half_bits(v, p.y_kind);
    }
  }
  DEVICE void store(float4 sum, float4 gate) {
#pragma unroll 1
    for (int e = 0; e < 4; e++) {
      float v = value(e, sum.x);
      if (p.gate >= 0) v = gate.x * rounded_half(v, p.y_kind);
      if (p.residual) v = residual.x + rounded_half(v, p.y_kind);
      if (exists(e)) put(e, v);
      sum = turned(sum);
      gate = turned(gate);
      residual = turned(residual);
    }
  }
};

// The sum of a quarter, the block's number `j`, from its classes' parts.
DEVICE float4 quarter_sum(uint32_t parts, int j, int quarters) {
  const uint32_t at = parts + j * 512, step = quarters * 512;
  const float4 a = shared_four(at), b = shared_four(at + 2 * step), c = shared_four(at + step), d = shared_four(at + 3 * step);
  return add4(add4(add4(a, b), c), d);
}
DEVICE float4 add_quarters(uint32_t at) {
  return add4(add4(add4(shared_four(at), shared_four(at + 512)), shared_four(at + 1024)), shared_four(at + 1536));
}

// Tiles of which a block has all of K.
DEVICE void finish_whole(const FewTask& p, uint32_t base, int finisher) {
  const FewBarriers s(p, base);
  const int lane = threadIdx.x % 32, pair = p.gate >= 0 ? 2 : 1;
  const FewWalk walk(p);
  Turn result;
  int whose = 0, within = 0;
  float4 gate = make_float4(1.f, 1.f, 1.f, 1.f);
#pragma unroll 1
  for (int round = walk.at; round < walk.end; round++) {
    if (whose == finisher) {
      int matrix, tile;
      walk.find(p, round, 0, matrix, tile);
      FewOutput output(p, matrix, tile);
      barrier_wait(s.ready + result.slot * 8, result.phase);
      const uint32_t parts = base + p.results_at + result.slot * (MULTIPLIERS * 512) + lane * 16;
      float4 sum = quarter_sum(parts, 0, 4);
#pragma unroll
      for (int j = 1; j < 4; j++) sum = add4(sum, quarter_sum(parts, j, 4));
      warp_arrives(s.free + result.slot * 8, lane);
      if (pair == 2 && within == 0) gate = output.gates(sum);
      else output.store(sum, gate);
    }
    result.advance(p.buffers);
    if (++within == pair) {
      within = 0;
      if (++whose == FINISHERS) whose = 0;
    }
  }
}

// Tiles that the blocks of a cluster share: each sends its quarters to the one whose turn it is.
DEVICE void finish_cut(const FewTask& p, uint32_t base, int finisher) {
  const FewBarriers s(p, base);
  const Cut c(p);
  const int lane = threadIdx.x % 32, cut = p.cut, quarters = c.quarters(), classes = c.classes();
  const bool gated = p.gate >= 0;
  const int tiles = gated ? 2 : 1, items = cut / tiles;  // tiles of an item that one block finishes, items of a round
  const FewWalk walk(p);
  Turn result;
  int whose = 0, item = 0;  // item: the first of the round
#pragma unroll 1
  for (int round = walk.at; round < walk.end; round++, item += items) {
    if (whose == finisher) {
      barrier_wait(s.ready + result.slot * 8, result.phase);
      const uint32_t parts = base + p.results_at + result.slot * (MULTIPLIERS * 512) + lane * 16;
#pragma unroll 1
      for (int place = 0; place < cut; place++) {
        const int number = item + place / tiles, to = number & (cut - 1), mail = number / cut;
        const uint32_t at = base + p.mail_at + ((mail * tiles + place % tiles) * 4 + c.rank * quarters) * 512 + lane * 16;
        const uint32_t there = address_of_block(at, to), barrier = address_of_block(s.mail + mail * 8, to);
#pragma unroll 1
        for (int j = 0; j < quarters; j++) send(there + j * 512, barrier, quarter_sum(parts + place * classes * 512, j, quarters));
      }
      warp_arrives(s.free + result.slot * 8, lane);
#pragma unroll 1
      for (int i = 0; i < items; i++) {
        const int number = item + i, mail = number / cut;
        if ((number & (cut - 1)) != c.rank) continue;
        int matrix, tile;
        const bool some = walk.find(p, round, tiles * i + tiles - 1, matrix, tile);
        if (!some) tile = 1 << 24;  // beyond all features
        FewOutput output(p, matrix, tile);
        const uint32_t at = base + p.mail_at + mail * tiles * 2048 + lane * 16;
        barrier_wait_cluster(s.mail + mail * 8, 0);
        float4 gate = make_float4(1.f, 1.f, 1.f, 1.f);
        if (gated) gate = FewOutput(p, 0, tile).gates(add_quarters(at));
        output.store(add_quarters(at + (tiles - 1) * 2048), gate);
      }
    }
    result.advance(p.buffers);
    if (++whose == FINISHERS) whose = 0;
  }
}

DEVICE void few_finish(const FewTask& p, uint32_t base) {
  const FewBarriers s(p, base);
  const int lane = threadIdx.x % 32, finisher = threadIdx.x / 32 - MULTIPLIERS - 1;
  if (finisher == 0) {
    const int tiles = p.gate >= 0 ? 2 : 1;
#pragma unroll 1
    for (int i = lane; i <= p.mails; i += 32) {
      barrier_init(s.present + i * 8, 1);
      if (i) barrier_expect(s.present + i * 8, tiles * 2048);
    }
    barriers_visible();
    __syncwarp();
  }
  if (p.cut > 1) cluster_arrive();
  if (finisher == 0) few_activations(p, base);
  bar<1>(FEW_THREADS);
  pdl_wait();
  if (p.cut > 1) {
    cluster_wait();
    finish_cut(p, base, finisher);
  } else {
    finish_whole(p, base, finisher);
  }
}
#endif

template <int KIND, int ENTRY>
DEVICE void few_matmul(const FewTask& p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32;
  if (warp == MULTIPLIERS) {
    if (p.cut > 1) cluster_arrive();
    few_stream(p, memory, base);
    __syncwarp();
    if (p.cut > 1) cluster_wait();
  } else if (warp < MULTIPLIERS) {
    if (p.cut > 1) cluster_arrive();
    few_multiply<KIND, ENTRY>(p, memory, base);
  } else {
    few_finish(p, base);
  }
  all_leave();
#endif
}

#define FEW(KIND, kind, ENTRY)                                                                                                    \
  extern "C" __global__ void __maxnreg__(FEW_REGISTERS) few_##kind##_##ENTRY(const __grid_constant__ FewTask p) { few_matmul<KIND, ENTRY>(p); }
