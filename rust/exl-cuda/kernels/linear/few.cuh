// y = f(x @ W) for 3 to 8 activation rows on sm_90 and later: walks the tiles as the ring kernel does, over rows that an earlier kernel has
// packed.
//
// A group of `cut` blocks, which is a cluster if `cut` exceeds one, walks a contiguous run of row tiles, `cut` tiles an iteration. The
// tiles belong to up to three matrices over one input. K is whole, in halves or in quarters (those of `sum_classes`). A block has its share
// of each tile of an iteration, and its share of the activations (prepared.cuh) stays in shared memory; if that has no room for all of
// them, the block walks its tiles twice, with a part of K each time. One warp streams stages, a few units of each tile of an iteration,
// through a ring of slots. Sixteen warps multiply, each a class of units of one tile, and another class in every iteration. Three warps
// alternate in the epilogue: they add classes to quarters and send those of a cut tile to the block that finishes it. That block adds the
// quarters, applies the epilogue and stores. Results are bitwise identical to the ring kernel's.
//
// Results may be written as the packed input of the next launch, with the sums of squares that its norm needs: then no launch is needed
// between two matmuls.
//
// In a decode step other kernels run in between, and a launch finds neither its instructions nor its parameters in the SM's caches. So
// loops over code that runs once are not unrolled. The end of a tile is unrolled: in its first iteration it overlaps matrix instructions,
// and nothing overlaps the last one.
#pragma once
#include "common/cluster.cuh"
#include "linear/few_finish.cuh"
#include "linear/few_task.cuh"

#if __CUDA_ARCH__ >= 900
// ---------------------------------------------------------------------------------------------------- weights and activations
template <bool GENERAL>
DEVICE void few_stream(const FewTask& p, uint8_t* memory, uint32_t base) {
  const int lane = threadIdx.x % 32, cut = p.cut;
  const FewBarriers s(p, base);
  const Cut c(p);
  const int pieces_log = c.pieces_log(), pieces = p.stages << pieces_log, units = 1 << c.piece_log();
#pragma unroll 1
  for (int i = lane; i < 2 * p.slots + 2 * FINISHERS + 1; i += 32) {
    const int result = i - 2 * p.slots, warps = result < 0 ? cut << c.stage_log : result <= FINISHERS ? MULTIPLIERS : 1;
    const int count = i < p.slots ? 1 : warps * WARP_ARRIVALS;
    barrier_init(s.full + i * 8, count);
  }
  barriers_visible();
  __syncwarp();
  bar_arrive<1>(FEW_THREADS);
  bar_arrive<2>(64);
  pdl_trigger();
#pragma unroll 1
  for (int m = 0; m < p.count; m++) {
    const FewPart& part = p.part[m];
#pragma unroll 1
    for (int i = lane; i < pieces; i += 32) {
      const int first = c.unit(i << c.piece_log()), before = c.unit((i & ~1) << c.piece_log());
      const auto offset = [&](int u) { return few_unit(p, part, u).x; };
      const uint32_t begin = offset(first), end = offset(first + units);
      const uint32_t at = pieces_log && i % 2 ? offset(before + units) - offset(before) : 0;
      reinterpret_cast<uint4*>(memory + part.pieces_at)[i] = make_uint4(begin, end - begin, at, 0);
    }
  }
  __syncwarp();
  const uint64_t policy = evict_first();
  Turn turn, landed;
  int count = 0;
  const FewWalk walk(p);
  const int place = lane >> pieces_log;
  const uint32_t room = p.stage_stride >> c.log;
#pragma unroll 1
  for (int step = 0; step < (walks_twice<GENERAL>(p) ? 2 * walk.rounds : walk.rounds); step++) {
    const bool second = walks_twice<GENERAL>(p) && step >= walk.rounds;
    const Pass<GENERAL> pass(p, second);
    int matrix = 0, tile = 0;
    const bool some = place < cut && walk.find(p, second ? step - walk.rounds : step, place, matrix, tile);
    const uint8_t* from = p.part[matrix].a.image + (size_t)tile * p.part[matrix].a.tile_bytes;
    const uint4* table = reinterpret_cast<const uint4*>(memory + p.part[matrix].pieces_at) + (lane & pieces_log);
#pragma unroll 1
    for (int i = pass.begin; i < pass.end; i++, count++) {
      uint4 piece = table[i << pieces_log];
      if (!some) piece.y = 0;
      const uint32_t full = s.full + turn.slot * 8, total = cut == 1 ? piece.y : __reduce_add_sync(~0u, piece.y);
      if (count >= p.slots) barrier_wait(s.empty + turn.slot * 8, turn.phase ^ 1);
      // A deep queue of weights delays all other memory traffic.
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

// One warp fetches the activations once they are present. This function prepares everything that does not depend on them.
DEVICE void few_expect(const FewTask& p, uint32_t base) {
  const FewBarriers s(p, base);
  const Cut c(p);
#pragma unroll 1
  for (int stage = threadIdx.x % 32; stage < p.stages; stage += 32) {
    const int known = min(max(c.units(p.units) - (stage << c.stage_log), 0), 1 << c.stage_log);
    barrier_expect(s.present + stage * 8, known * p.copies * X_BYTES);
  }
}
template <bool GENERAL>
DEVICE void few_activations(const FewTask& p, uint32_t base, const Pass<GENERAL>& pass) {
  const FewBarriers s(p, base);
  const Cut c(p);
  const int lane = threadIdx.x % 32, begin = pass.begin << c.stage_log, own = (pass.end - pass.begin) << c.stage_log;
  const uint64_t again = evict_last();
#pragma unroll 1
  for (int copy = 0; copy < p.copies; copy++) {
    int m = 0;
    while (p.part[m].copy != copy) m++;
    const uint32_t to = base + p.part[m].x_at;
    const uint8_t* from = p.x + copy * p.copy_bytes;
    // All blocks read the same data: they begin at different offsets, so that they do not all read the same part of L2.
#pragma unroll 1
    for (int at = lane; at < (own + 7 & ~7); at += 32) {
      const int i = (at & ~7) | ((at + blockIdx.x) & 7), u = c.unit(begin + i);
      pdl_wait();  // after everything that does not depend on the predecessor; only the first call waits
      const uint32_t present = s.present + (begin + i >> c.stage_log) * 8;
      if (i < own && u < p.units) copy_to_shared(to + i * X_BYTES, from + (size_t)u * X_BYTES, X_BYTES, present, again);
    }
  }
  pdl_wait();
}

// ---------------------------------------------------------------------------------------------------- matmul
// Tables of each unit for the loop, in shared memory; four warps a matrix.
template <int ENTRY>
DEVICE void few_tables(const FewTask& p, const Cut& c, uint8_t* memory, uint32_t base) {
  constexpr int ENTRIES = UNIT_ROWS / ENTRY, TEAM = 128;
  static_assert(FEW_MATRICES * TEAM <= MULTIPLIERS * 32, "a team a matrix");
  const int each = (p.stages << c.stage_log) * ENTRIES, m = threadIdx.x / TEAM;
  const FewPart& part = p.part[min(m, FEW_MATRICES - 1)];
  const int entries = part.a.maxima ? (part.a.rows + ENTRY - 1) / ENTRY : 0;
#pragma unroll 1
  for (int j = threadIdx.x % TEAM; j < each && m < p.count; j += TEAM) {
    const int local = j / ENTRIES, u = c.unit(local), e = u * ENTRIES + j % ENTRIES;
    __half maximum = __half(0.f);
    if (e < entries) maximum = part.a.maxima[e];
    if (j % ENTRIES == 0) {
      const int units = 1 << c.piece_log(), piece = local >> c.piece_log();
      const uint2 unit = few_unit(p, part, u);
      uint32_t place = unit.x - few_unit(p, part, c.unit(piece << c.piece_log())).x;
      if (c.pieces_log() && piece % 2) {
        const int before = c.unit((piece - 1) << c.piece_log());
        place += few_unit(p, part, before + units).x - few_unit(p, part, before).x;
      }
      const uint32_t widths = u < part.a.unit_count ? unit.y : 0;
      reinterpret_cast<uint2*>(memory + part.units_at)[local] = make_uint2(place | code_bytes(widths) << 16, widths);
    }
    reinterpret_cast<__half*>(memory + part.maxima_at)[j] = maximum;
  }
  if (threadIdx.x < p.count) {
    const FewPart& part = p.part[threadIdx.x];
    reinterpret_cast<uint4*>(memory + p.places_at)[threadIdx.x] = make_uint4(base + part.x_at, base + part.units_at, base + part.maxima_at, 0);
  }
}

// The rows' sums of squares, in the order of norm.cu: group of eight e is added by lane e % 32 of its warp e / 32 % 8. A warp here does the
// work of four rows of one warp there.
using SquareParts = float[8][8];
DEVICE void few_squares(const FewTask& p, SquareParts& parts) {
  const int lane = threadIdx.x % 32, there = threadIdx.x / 32 % 8, first = threadIdx.x / 256 * 4;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  pdl_wait();
#pragma unroll 2
  for (int e = there * 32 + lane; e < p.k / 8; e += 256) sum = add4(sum, __ldcg(reinterpret_cast<const float4*>(p.squares + e * 8 + first)));
  // `warp_sum` of each row with the same pairs; lanes that finish one row continue with another.
  const auto swap = [](float v, int o) { return __shfl_xor_sync(~0u, v, o); };
  const bool upper = lane & 16, second = lane & 8;
  const float keep0 = upper ? sum.z : sum.x, keep1 = upper ? sum.w : sum.y;
  const float x = keep0 + swap(upper ? sum.x : sum.z, 16), y = keep1 + swap(upper ? sum.y : sum.w, 16);
  float v = (second ? y : x) + swap(second ? x : y, 8);
#pragma unroll
  for (int o = 4; o; o >>= 1) v += swap(v, o);
  if (lane % 8 == 0) parts[there][first + lane / 8] = v;
}
// Normalizes the rows in place. A lane has the same eight values of K of each row, one row after the other, so that their weights are read
// once. Lanes begin with different rows to avoid bank conflicts.
struct FewNorm {
  const FewTask& p;
  const Cut& c;
  const int lane;
  float4 low, high;  // the lane's weights of a unit

  DEVICE FewNorm(const FewTask& p, const Cut& c) : p(p), c(c), lane(threadIdx.x % 32) {}
  DEVICE void weights(int i) {
    const float4* from = reinterpret_cast<const float4*>(p.norm + min(c.unit(i), p.units - 1) * UNIT_ROWS + lane * 8);
    low = __ldg(from);
    high = __ldg(from + 1);
  }
  DEVICE void run(uint32_t base, const SquareParts& parts) {
    const FewBarriers s(p, base);
    const int own = p.stages << c.stage_log;
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) all += parts[w][lane / 4];
    const float scale = 1.f / sqrtf(all / (float)p.k + p.eps);
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < own; i += MULTIPLIERS) {
      if (i >= MULTIPLIERS) weights(i);
      const uint32_t x = base + p.part[0].x_at + i * X_BYTES + lane / 4 * 512 + lane % 4 * 16;
      const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      barrier_wait(s.present + (i >> c.stage_log) * 8, 0);
#pragma unroll 2
      for (int j = 0; j < 8; j++) {
        const int row = (lane / 4 + j) & 7;
        const float by = __shfl_sync(~0u, scale, row * 4);
        union {
          uint4 word;
          __half2 v[4];
        } eight;
        eight.word = SharedBytes{x}.get16(row * 64);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 v = __half22float2(eight.v[e]);
          eight.v[e] = __floats2half2_rn(v.x * by * w[2 * e], v.y * by * w[2 * e + 1]);
        }
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x + row * 64), "r"(eight.word.x), "r"(eight.word.y), "r"(eight.word.z),
                     "r"(eight.word.w)
                     : "memory");
      }
    }
    warp_arrives(s.normed, lane);
  }
};

// State of a multiplying warp between iterations.
template <int KIND, int ENTRY, bool GENERAL>
struct FewConsumer {
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY;
  using Product = UnitMatmul<KIND, ENTRY, 1, 1, SharedBytes, SharedPrepared, SharedMaxima>;
  const FewTask& p;
  const Cut c;
  const FewWalk walk;
  const FewBarriers s;
  const uint32_t base;
  const int lane, slots, step;
  int at;  // class, and which of the iteration's tiles
  int round = 0;
  Turn turn;               // of the iteration's first stage
  uint32_t phases = 0;     // of the result buffers
  const bool awaits;       // the activations may not be present yet: each stage's have a barrier, which stays complete

  DEVICE FewConsumer(const FewTask& p, const Cut& c, uint32_t base)
      : p(p), c(c), walk(p), s(p, base), base(base), lane(threadIdx.x % 32), slots(p.slots), step(c.classes() >> c.stage_log), at(threadIdx.x / 32),
        awaits(!p.norm) {}
  DEVICE uint4 where(int matrix) const { return SharedBytes{base + p.places_at}.get16(matrix * 16); }
  // Called before the first unit of a stage that this warp processes, in any iteration: its first iteration may have given it another
  // stage, or none. If K is whole, a warp has itself normalized what it multiplies in the first iteration.
  DEVICE void wait_for_activations(int stage) const {
    if (awaits) barrier_wait(s.present + stage * 8, 0);
    else if (round || c.log) barrier_wait(s.normed, 0);
  }
  DEVICE void wait_for_weights(const Turn& mine) const { barrier_wait(s.full + mine.slot * 8, mine.phase); }
  // This lane's part of the sum of the warp's class.
  DEVICE uint32_t result(int buffer) const { return base + p.results_at + (buffer * MULTIPLIERS + at) * 512 + lane * 16; }
  // Passes on the sum of a class.
  DEVICE void leave(const Sums<1>& total) {
    const int buffer = walk.finisher(round);
    barrier_wait(s.free + buffer * 8, (phases >> buffer & 1) ^ 1);
    store_four(result(buffer), total[0]);
    warp_arrives(s.ready + buffer * 8, lane);
    phases ^= 1u << buffer;
    round++;
  }

  // An iteration in which a warp may have any number of units. The first of two passes leaves its sums in the result buffers, of which
  // each iteration then has one.
  DEVICE void one_round(const Pass<GENERAL>& pass) {
    const int classes = c.classes(), cls = at & (classes - 1), place = at >> (4 - c.log), begin = pass.begin << c.stage_log,
              end = pass.end << c.stage_log;
    int matrix, tile;
    const bool some = walk.find(p, round, place, matrix, tile);
    const uint4 tables = where(matrix);
    const uint32_t codes = base + place * (p.stage_stride >> c.log);
    Turn mine = turn;
    mine.skip(cls >> c.stage_log, slots);
    Sums<1> total[1];
    clear(total[0]);
    if (begin) {
      const float4 before = shared_four(result(round));
      total[0][0][0] = before.x, total[0][0][1] = before.y, total[0][0][2] = before.z, total[0][0][3] = before.w;
    }
#pragma unroll 1
    for (int u = begin + cls; u < end; u += classes) {
      const uint2 unit = SharedBytes{tables.y}.get8(u * 8);
      wait_for_activations(u >> c.stage_log);
      wait_for_weights(mine);
      if (some && unit.y) {
        const SharedBytes weights[1] = {{codes + mine.slot * p.stage_stride + (unit.x & 0xffff)}};
        const SharedPrepared columns{tables.x + (u - begin) * X_BYTES + lane * 16};
        Product product{weights, columns, {tables.z + u * ENTRIES * 2}, total, lane, {}};
        product.run(unit.y, unit.x >> 16);
      }
      warp_arrives(s.empty + mine.slot * 8, lane);
      mine.skip(step, slots);
    }
    turn.skip(pass.end - pass.begin, slots);
    if (GENERAL && pass.end < p.stages) {
      store_four(result(round), total[0][0]);
      round++;
    } else {
      leave(total[0]);
    }
  }

  // `count` iterations over one matrix in which this warp has one unit of B bits (0: none; -1: several widths). The unit's tables are
  // looked up once. SCALED: as in UnitMatmul.
  template <bool SCALED, int B>
  DEVICE void stay(const uint4& tables, uint2 unit, int count) {
    const int stage = at >> 3;
    const uint32_t codes = base + (unit.x & 0xffff);
    const SharedPrepared columns{tables.x + at * X_BYTES + lane * 16};
    const SharedMaxima maxima{tables.z + at * ENTRIES * 2};
    Turn mine = turn;
    mine.skip(stage, slots);
    turn.skip(2 * count, slots);
    wait_for_activations(stage);
#pragma unroll 1
    for (; count > 0; count--) {
      wait_for_weights(mine);
      Sums<1> total[1];
      clear(total[0]);
      if constexpr (B != 0) {
        const SharedBytes weights[1] = {{codes + mine.slot * p.stage_stride}};
        Product product{weights, columns, maxima, total, lane, {}};
        if constexpr (B > 0) product.template run_uniform<SCALED, B>();
        else product.template run_mixed<SCALED>(unit.y);
      }
      warp_arrives(s.empty + mine.slot * 8, lane);
      mine.skip(2, slots);
      leave(total[0]);
    }
  }
  // As many iterations as possible over one matrix whose tiles have two stages of eight units.
  DEVICE void some_rounds() {
    int matrix, tile;
    walk.find(p, round, 0, matrix, tile);
    const int left = walk.rounds - round;
    int count = p.gate >= 0 ? (round < walk.dealt ? walk.dealt - round : left) : min(left, p.part[matrix].a.tiles - tile);
    count = min(count, p.stay);
    const uint4 tables = where(matrix);
    const uint2 unit = SharedBytes{tables.y}.get8(at * 8);
    if (scales_weights<ENTRY>(unit.y)) stay_of<ENTRY == 32>(unit.y, tables, unit, count);
    else stay_of<false>(ENTRY == 32 ? unit.y & ~ONE_SCALE_A_HALF : unit.y, tables, unit, count);
  }
  template <bool SCALED>
  DEVICE void stay_of(uint32_t widths, const uint4& tables, uint2 unit, int count) {
    switch (widths) {
      case 0: stay<SCALED, 0>(tables, unit, count); break;
      case 0x4444: stay<SCALED, 4>(tables, unit, count); break;
      case 0x3333: stay<SCALED, 3>(tables, unit, count); break;
      case 0x2222: stay<SCALED, 2>(tables, unit, count); break;
      case 0x8888: stay<SCALED, 8>(tables, unit, count); break;
      case 0x5555: if constexpr (KIND == EXL2) { stay<SCALED, 5>(tables, unit, count); break; }
      case 0x6666: if constexpr (KIND == EXL2) { stay<SCALED, 6>(tables, unit, count); break; }
      default: stay<SCALED, -1>(tables, unit, count);
    }
  }
  // Two passes need as many result buffers as iterations, and no norm, whose barrier tells that the first one is done.
  DEVICE void run() {
    const bool stays = p.cut == 1 && p.stages == 2 && c.stage_log == 3;
#pragma unroll 1
    for (int number = 0; number < (walks_twice<GENERAL>(p) ? 2 : 1); number++) {
      const Pass<GENERAL> pass(p, number);
      at = threadIdx.x / 32;
#pragma unroll 1
      for (round = 0; round < walk.rounds;) {
        if (stays) some_rounds();
        else one_round(pass);
        at = (at + p.class_step) & (MULTIPLIERS - 1);
      }
      if (GENERAL && pass.end < p.stages) warp_arrives(s.normed, lane);
    }
  }
};

// A launch's parameters reach an SM one line at a time, each with the latency of L2: all warps request different lines at once.
DEVICE void touch_parameters(const FewTask& p) {
  constexpr int WORDS = sizeof(FewTask) / 4, LINE = (WORDS + MULTIPLIERS - 1) / MULTIPLIERS;
  const int word = reinterpret_cast<const int*>(&p)[min(static_cast<int>(threadIdx.x / 32) * LINE, WORDS - 1)];
  asm volatile("" ::"r"(word));
}

template <int KIND, int ENTRY, bool GENERAL>
DEVICE void few_multiply(const FewTask& p, uint8_t* memory, uint32_t base) {
  __shared__ SquareParts parts;
  touch_parameters(p);
  const Cut c(p);
  few_tables<ENTRY>(p, c, memory, base);
  FewNorm norm(p, c);
  if (p.norm) {
    norm.weights(threadIdx.x / 32);
    few_squares(p, parts);
  }
  bar<1>(FEW_THREADS);
  if (p.cut > 1) cluster_wait();
  if (p.norm) norm.run(base, parts);
  FewConsumer<KIND, ENTRY, GENERAL>(p, c, base).run();
}

// ---------------------------------------------------------------------------------------------------- epilogue
template <bool GENERAL>
DEVICE void few_finish(const FewTask& p, uint32_t base) {
  const FewBarriers s(p, base);
  const int lane = threadIdx.x % 32, finisher = threadIdx.x / 32 - MULTIPLIERS - 1;
  if (finisher == 0) {
    const int tiles = p.gate >= 0 ? 2 : 1;
#pragma unroll 1
    for (int i = lane; i < p.stages + p.exchanges; i += 32) {
      barrier_init(s.present + i * 8, 1);
      if (i >= p.stages) barrier_expect(s.present + i * 8, tiles * 2048);
    }
    barriers_visible();
    __syncwarp();
  }
  if (p.cut > 1) cluster_arrive();
  if (finisher == 0) {
    few_expect(p, base);
    bar_arrive<1>(FEW_THREADS);
    few_activations(p, base, Pass<GENERAL>(p, 0));
    bar<2>(64);
    if (walks_twice<GENERAL>(p)) {
      barrier_wait(s.normed, 0);
      few_activations(p, base, Pass<GENERAL>(p, 1));
    }
  } else {
    bar<1>(FEW_THREADS);
    pdl_wait();
  }
  if (p.cut > 1) {
    cluster_wait();
    finish_cut<GENERAL>(p, base, finisher);
  } else {
    finish_whole<GENERAL>(p, base, finisher);
  }
}
#endif

template <int KIND, int ENTRY, bool GENERAL>
DEVICE void few_matmul(const FewTask& p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  const int warp = threadIdx.x / 32;
  if (warp == MULTIPLIERS) {
    if (p.cut > 1) cluster_arrive();
    few_stream<GENERAL>(p, memory, base);
    __syncwarp();
    if (p.cut > 1) cluster_wait();
  } else if (warp < MULTIPLIERS) {
    if (p.cut > 1) cluster_arrive();
    few_multiply<KIND, ENTRY, GENERAL>(p, memory, base);
  } else {
    few_finish<GENERAL>(p, base);
  }
  all_leave();
#endif
}

#define FEW_FORM(KIND, ENTRY, NAME, GENERAL)                                                                                        \
  extern "C" __global__ void __maxnreg__(FEW_REGISTERS) NAME(const __grid_constant__ FewTask p) { few_matmul<KIND, ENTRY, GENERAL>(p); }
#define FEW(KIND, kind, ENTRY)                                                                                                      \
  FEW_FORM(KIND, ENTRY, gemm_few_##kind##_##ENTRY, false)                                                                           \
  FEW_FORM(KIND, ENTRY, gemm_few_##kind##_##ENTRY##_general, true)
