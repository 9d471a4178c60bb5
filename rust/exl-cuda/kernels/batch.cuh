// y = x @ W for 9 to 64 activation rows on sm_90a: each weight is unpacked once and multiplied by the tensor cores of a warpgroup.
//
// An item is 64 features (four row tiles), the work of one warpgroup. Either a block has all of K, or four blocks have a quarter each (the
// units u = j mod 4). A block is up to W warpgroups, whose items are neighbours, and one warp that streams stages: one unit of every tile,
// and the prepared activations of these rows (which stay in shared memory where a block meets them again and they fit). A warp's fragments
// of mma.sync are its part of a warpgroup's A operand, so codes go from shared memory to registers to the tensor cores. Same bits as the
// ring kernel, whose order of sums (`sum_classes`) is kept.
//
// Sums of quarters meet in memory of their own, between launches all ones. Each of the four blocks has a share of the rows to add up and
// store, and leaves the sums of the others' rows there. It reads until no word is `ABSENT` any more, which is no sum (arithmetic has one
// NaN, 0x7fffffff), and leaves the memory as it was. So nothing has to be ordered. No block waits for one that may not have begun: see
// `agree`.
//
// Branches that depend on what is read ask for a vote first: ptxas would take the tensor cores' work one by one where it cannot see that a
// warp goes one way. What a warp passes once is short, since it is cold in a decode step. (Clusters in place of the workspace: the H200 ran
// only a third of their blocks at a time.)
#pragma once
#include "activate.cuh"
#include "pipeline.cuh"
#include "prepared.cuh"
#include "wgmma.cuh"

constexpr int QUARTERS = 4, ITEM_TILES = 4, ITEM_ROWS = ITEM_TILES * TILE, BATCH_MATRICES = 3;

// One matrix of a launch.
struct BatchPart {
  Matrix a;
  int y_offset, first_item;  // column in y; items of the launch are counted through its matrices
  uint32_t units_at, padding;
};

// The same struct as `ops::batch::Task`; places are bytes in shared memory.
struct BatchTask {
  const uint8_t* x;  // prepared
  const float* multipliers;
  float4* sums;   // [items][tile][quarter][N / 8][lane], where K is cut: what a thread has of eight activation rows
  int* arrivals;  // [blocks of a quarter], all ones before and after, as the sums are, where K is cut
  void* y;
  int count, items, m, y_kind, y_stride;
  int paired;            // whether results can be stored in pairs
  int groups, scaled;    // warpgroups of a block that work; whether multipliers are other than one
  int slots, resident;   // stages of the ring; whether activations stay
  uint32_t stage_stride, unit_room;
  uint32_t ring_at, x_at, barriers_at, numbered_at, sums_at;
  int cut;   // blocks that share K: 1 or QUARTERS
  int looks;  // how often a block looks whether the others have begun
  int gate;  // activation of the first of two matrices that gates the second, feature by feature, or -1; then K is not cut
  const void* residual;  // like y, added to it; null when there is none
  // Where gated results go in place of y: the input of the product that comes next, of as many columns, and the rows of its layout.
  uint8_t* into;
  const uint16_t* into_rows;  // null when rows stand in the features' order
  BatchPart part[BATCH_MATRICES];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block's units in their order: quarter after quarter, in each the classes j, j + 8, j + 4, j + 12.
struct Order {
  int first, quarters, units;
  DEVICE static int class_of(int quarter, int step) { return quarter + (step & 1) * 8 + (step >> 1) * 4; }
  DEVICE int in_class(int quarter, int step) const { return (units + CLASSES - 1 - class_of(quarter, step)) / CLASSES; }
  DEVICE int in_quarter(int quarter) const { return (units + QUARTERS - 1 - quarter) / QUARTERS; }
  DEVICE int own() const { return quarters == 1 ? in_quarter(first) : units; }
  DEVICE int unit(int i) const {
    int quarter = first, step = 0;
    for (; quarter < QUARTERS - 1 && i >= in_quarter(quarter); quarter++) i -= in_quarter(quarter);
    for (; step < 3 && i >= in_class(quarter, step); step++) i -= in_class(quarter, step);
    return class_of(quarter, step) + CLASSES * i;
  }
};

template <int KIND, int ENTRY, int N, int W>
struct Batch {
  static constexpr int S = N / 2;  // sums a thread
  static constexpr int THREADS = W * 128 + 32;
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY, X_BYTES = 512 * N, EIGHTS = N / 8;
  // A unit's row in the block's table: {offset, bytes, widths | number << 16}, maxima.
  static constexpr int ROW = ENTRY == 128 ? 16 : 32, MAXIMA_AT = ENTRY == 128 ? 12 : 16;

  const BatchTask& p;
  uint8_t* const memory;
  const uint32_t base, full, empty, present;
  const int step, first;  // blocks of a quarter; the first item's number of this one, in whole blocks
  const Order order;
  const int own;

  DEVICE Batch(const BatchTask& p, uint8_t* memory)
      : p(p),
        memory(memory),
        base(shared_address(memory)),
        full(base + p.barriers_at),
        empty(full + p.slots * 8),
        present(empty + p.slots * 8),
        step(p.cut == 1 ? gridDim.x : gridDim.x / QUARTERS),
        first(p.cut == 1 ? blockIdx.x : blockIdx.x / QUARTERS),
        order{p.cut == 1 ? 0 : static_cast<int>(blockIdx.x % QUARTERS), p.cut == 1 ? QUARTERS : 1, p.part[0].a.unit_count},
        own(order.own()) {}

  // What a warpgroup of a block has: a matrix and the first of four tiles. Of two gated matrices half of the groups have each, the same tiles.
  struct Place {
    int matrix, tile, item;
    bool some;
  };
  DEVICE bool gated() const { return p.gate >= 0; }
  DEVICE int per_block() const { return gated() ? p.groups / 2 : p.groups; }
  DEVICE Place place(int block, int group) const {
    const int each = per_block(), second = gated() && group >= each, item = block * each + group - (second ? each : 0);
    int matrix = second;
    if (!gated())
      for (matrix = 0; matrix + 1 < p.count && item >= p.part[matrix + 1].first_item;) matrix++;
    const int first = gated() ? 0 : p.part[matrix].first_item;
    return {matrix, (item - first) * ITEM_TILES, item, item < p.items};
  }

  // The streaming warp's part: barriers, and tables.
  DEVICE void set_up_stream() const {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < p.slots; i += 32) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, p.groups * 4 * WARP_ARRIVALS);
    }
    if (lane == 0) barrier_init(numbered(), 1);
    if (p.resident)
      for (int i = lane; i < own; i += 32) barrier_init(present + i * 8, 1);
    barriers_visible();
#pragma unroll 1
    for (int m = 0; m < p.count; m++)
#pragma unroll 1
      for (int i = lane; i < own; i += 32) {
        const int u = order.unit(i);
        const uint2* units = p.part[m].a.units + u;
        const uint2 unit = __ldg(units);
        uint32_t* row = reinterpret_cast<uint32_t*>(memory + p.part[m].units_at + i * ROW);
        row[0] = unit.x;
        row[1] = __ldg(&units[1].x) - unit.x;
        row[2] = unit.y | u << 16;
      }
    __syncwarp();
  }
  DEVICE void set_up_maxima() const {
    for (int m = 0; m < p.count; m++) {
      const BatchPart& part = p.part[m];
      if (!part.a.maxima) continue;
      const int entries = (part.a.rows + ENTRY - 1) / ENTRY;
      for (int i = threadIdx.x; i < own * ENTRIES; i += W * 128) {
        const int e = order.unit(i / ENTRIES) * ENTRIES + i % ENTRIES;
        *reinterpret_cast<__half*>(memory + part.units_at + i / ENTRIES * ROW + MAXIMA_AT + i % ENTRIES * 2) = e < entries ? part.a.maxima[e] : __half(0.f);
      }
    }
  }

  // ---- one warp streams; each lane has a tile of the block's items
  struct Source {
    const uint8_t* from;
    uint32_t units;
    bool some;
  };
  DEVICE Source source(int block) const {
    const int lane = threadIdx.x % 32, group = lane / ITEM_TILES;
    const Place at = place(block, min(group, p.groups - 1));
    const BatchPart& part = p.part[at.matrix];
    const int tile = at.tile + lane % ITEM_TILES;
    return {part.a.image + (size_t)tile * part.a.tile_bytes, base + part.units_at, group < p.groups && at.some && tile < part.a.tiles};
  }
  DEVICE void copy_weights(const Source& source, int i, Turn turn, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    const uint2 unit = SharedBytes{source.units}.get8(i * ROW);
    const uint32_t bar = full + turn.slot * 8, bytes = __reduce_add_sync(~0u, source.some ? unit.y : 0);
    if (lane == 0) barrier_expect(bar, bytes + (p.resident ? 0 : X_BYTES));
    __syncwarp();
    if (source.some) copy_to_shared(base + p.ring_at + turn.slot * p.stage_stride + lane * p.unit_room, source.from + unit.x, unit.y, bar, policy);
  }
  DEVICE void copy_activations(int i, uint32_t to, uint32_t bar, uint64_t policy) const {
    const uint32_t u = SharedBytes{base + p.part[0].units_at}.get4(i * ROW + 8) >> 16;
    copy_to_shared(to, p.x + (size_t)u * X_BYTES, X_BYTES, bar, policy);
  }
  DEVICE void copy_staged_activations(int i, Turn turn, uint64_t policy) const {
    if (threadIdx.x % 32 == 0)
      copy_activations(i, base + p.ring_at + turn.slot * p.stage_stride + p.groups * ITEM_TILES * p.unit_room, full + turn.slot * 8, policy);
  }
  DEVICE void stream() const {
    const uint64_t once = evict_first(), again = evict_last();
    const int blocks = (p.items + per_block() - 1) / per_block(), mine = (blocks - first + step - 1) / step, total = mine * own;
    const int ahead = min(p.slots, total);
    Turn turn;
    int block = first, i = 0;
    Source from = source(block);
    auto next = [&] {
      turn.advance(p.slots);
      if (++i == own) {
        i = 0;
        block += step;
        from = source(block);
      }
    };
#pragma unroll 1
    for (int s = 0; s < ahead; s++, next()) copy_weights(from, i, turn, once);
    pdl_wait();
    if (p.resident) {
#pragma unroll 1
      for (int x = threadIdx.x % 32; x < own; x += 32) {
        barrier_expect(present + x * 8, X_BYTES);
        copy_activations(x, base + p.x_at + x * X_BYTES, present + x * 8, again);
      }
    } else {
      Turn t;
#pragma unroll 1
      for (int s = 0; s < ahead; s++, t.advance(p.slots)) copy_staged_activations(s % own, t, again);
    }
#pragma unroll 1
    for (int s = ahead; s < total; s++, next()) {
      barrier_wait(empty + turn.slot * 8, turn.phase ^ 1);
      copy_weights(from, i, turn, once);
      if (!p.resident) copy_staged_activations(i, turn, again);
    }
  }

  // ---- warpgroups multiply
  template <int B, int J>
  DEVICE static void unpack(uint32_t (&a)[4], const uint32_t (&w)[B], uint2 zeros) {
    a[0] = centred<KIND, B, 4 * J>(w, zeros.x);
    a[1] = centred<KIND, B, 4 * J + 1>(w, zeros.y);
    a[2] = centred<KIND, B, 4 * J + 2>(w, zeros.x);
    a[3] = centred<KIND, B, 4 * J + 3>(w, zeros.y);
  }
  template <int B>
  DEVICE static void unpack_chunk(uint32_t (&a)[4][4], const uint32_t (&w)[B], uint2 low, uint2 high) {
    unpack<B, 0>(a[0], w, low);
    unpack<B, 1>(a[1], w, low);
    unpack<B, 2>(a[2], w, high);
    unpack<B, 3>(a[3], w, high);
  }
  DEVICE static void fold(const float (&sums)[S], float (&total)[S], uint32_t scales) {
    const float2 scale = to_float2(scales);
#pragma unroll
    for (int i = 0; i < S; i++) total[i] = fmaf(i % 4 / 2 ? scale.y : scale.x, sums[i], total[i]);
  }

  // One unit of this warp's tile.
  struct Unit {
    const uint32_t weights, x;  // x: the low half of the descriptor of the first core matrices
    const uint32_t maxima;  // where they are, or, of entries of 128 rows, they themselves
    const int lane;
    float (&total)[S];
    UnitScales<KIND, ENTRY, SharedBytes> scales;

    DEVICE uint32_t scale(int e) const {
      if constexpr (KIND == GPTQ) return scales.halves(e, __half(0.f));
      else if constexpr (ENTRY == 128) return mul2(scales.squares(e), __byte_perm(maxima, 0, e ? 0x3232 : 0x1010));
      else return scales.halves(e, __ushort_as_half(SharedBytes{maxima}.get2(e * 2)));
    }
    // Matrix instructions i .. of the unit.
    template <int COUNT, bool ADD>
    DEVICE void multiply(float (&sums)[S], const uint32_t (*a)[4], int i) const {
      products_begin();
      product<ADD>(sums, a[0], x + i * 2 * N, 128 >> 4);
#pragma unroll
      for (int j = 1; j < COUNT; j++) product<true>(sums, a[j], x + (i + j) * 2 * N, 128 >> 4);
      products_commit();
    }
    template <int B>
    DEVICE static void unpack_here(uint32_t (&a)[4][4], const uint32_t (&w)[B], uint2 low, uint2 high) {
      unpack_chunk<B>(a, w, low, high);
      // Here and not later: products are on their way.
#pragma unroll
      for (int j = 0; j < 16; j++) asm volatile("" : "+r"(a[j / 4][j % 4]));
    }

    // Four chunks of one width, entries of 128 rows: while one is multiplied, the next is unpacked.
    template <int B>
    DEVICE void uniform() {
      uint32_t w[B], a[2][2][4], scale_of[2];
      float sums[S];
      load_words<B>(w, SharedBytes{weights}, lane);
      scales.load({weights + 512 * B}, lane >> 2);
      unpack_half<B, 0>(a[0], w, 0);
      multiply<2, false>(sums, a[0], 0);
      unpack_half<B, 1>(a[1], w, 0);
      load_words<B>(w, SharedBytes{weights + 128 * B}, lane);
      multiply<2, true>(sums, a[1], 2);
      products_pending<1>();
      unpack_half<B, 0>(a[0], w, 0);
      multiply<2, true>(sums, a[0], 4);
      products_pending<1>();
      unpack_half<B, 1>(a[1], w, 0);
      load_words<B>(w, SharedBytes{weights + 256 * B}, lane);
      multiply<2, true>(sums, a[1], 6);
      scale_of[0] = scale(0);
      scale_of[1] = scale(1);
      products_pending<1>();
      unpack_half<B, 0>(a[0], w, 1);
      products_wait<0>(sums);
      fold(sums, total, scale_of[0]);
      multiply<2, false>(sums, a[0], 8);
      unpack_half<B, 1>(a[1], w, 1);
      load_words<B>(w, SharedBytes{weights + 384 * B}, lane);
      multiply<2, true>(sums, a[1], 10);
      products_pending<1>();
      unpack_half<B, 0>(a[0], w, 1);
      multiply<2, true>(sums, a[0], 12);
      products_pending<1>();
      unpack_half<B, 1>(a[1], w, 1);
      multiply<2, true>(sums, a[1], 14);
      products_wait<0>(sums);
      fold(sums, total, scale_of[1]);
    }
    template <int B, int H>
    DEVICE void unpack_half(uint32_t (&a)[2][4], const uint32_t (&w)[B], int entry) {
      const uint2 zeros = scales.zeros(entry);
      unpack<B, 2 * H>(a[0], w, zeros);
      unpack<B, 2 * H + 1>(a[1], w, zeros);
#pragma unroll
      for (int j = 0; j < 8; j++) asm volatile("" : "+r"(a[j / 4][j % 4]));
    }

    template <int B>
    DEVICE void chunk_of(uint32_t (&a)[4][4], uint32_t codes, int c) const {
      uint32_t w[B];
      load_words<B>(w, SharedBytes{codes}, lane);
      unpack_chunk<B>(a, w, scales.zeros(64 * c / ENTRY), scales.zeros((64 * c + 32) / ENTRY));
    }
    // Any unit, chunk after chunk.
    DEVICE void any(uint32_t widths) {
      uint32_t bits = 0, offset = 0;
#pragma unroll
      for (int c = 0; c < 4; c++) bits += widths >> (4 * c) & 15;
      scales.load({weights + 128 * bits}, lane >> 2);
#pragma unroll 1
      for (int c = 0; c < 4; c++) {
        const uint32_t b = widths >> (4 * c) & 15;
        if (all(b == 0)) break;
        uint32_t a[4][4];
        const uint32_t codes = weights + offset;
        if (b == 4) {
          chunk_of<4>(a, codes, c);
        } else if (b == 3) {
          chunk_of<3>(a, codes, c);
        } else if (b == 2) {
          chunk_of<2>(a, codes, c);
        } else if (KIND == EXL2 && b == 5) {
          if constexpr (KIND == EXL2) chunk_of<5>(a, codes, c);
        } else if (KIND == EXL2 && b == 6) {
          if constexpr (KIND == EXL2) chunk_of<6>(a, codes, c);
        } else {
          chunk_of<8>(a, codes, c);
        }
        offset += 128 * b;
        // Pieces of an entry, added by hand to one chain.
        float sums[S];
        if constexpr (ENTRY == 32) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            multiply<2, false>(sums, a + 2 * h, 4 * c + 2 * h);
            products_wait<0>(sums);
            fold(sums, total, scale(2 * c + h));
          }
        } else {
          if (all((c & 1) == 0)) multiply<4, false>(held, a, 4 * c);
          else multiply<4, true>(held, a, 4 * c);
          products_wait<0>(held);
          if (all((c & 1) != 0 || (widths >> (4 * c + 4) & 15) == 0)) fold(held, total, scale(c / 2));
        }
      }
    }
    float held[S];
    DEVICE static bool all(bool v) { return __all_sync(~0u, v); }
    DEVICE void run(uint32_t widths) {
      if constexpr (ENTRY == 128) {
        if (all(widths == 0x4444)) return uniform<4>();
        if constexpr (KIND == EXL2) {
          if (all(widths == 0x5555)) return uniform<5>();
        }
        if (all(widths == 0x3333)) return uniform<3>();
        if (all(widths == 0x2222)) return uniform<2>();
        if (all(widths == 0x8888)) return uniform<8>();
        if constexpr (KIND == EXL2) {
          if (all(widths == 0x6666)) return uniform<6>();
        }
      }
      any(widths);
    }
  };

  DEVICE void multiply() const {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const uint32_t mine = (group * 4 + warp) * p.unit_room;
    Turn turn;
    bool waits = p.resident;
#pragma unroll 1
    for (int block = first; block * per_block() < p.items; block += step, waits = false) {
      const BatchPart& part = p.part[place(block, group).matrix];
      const uint32_t rows = base + part.units_at;
      uint32_t row = rows;
#pragma unroll 1
      for (int quarter = order.first; quarter < order.first + order.quarters; quarter++) {
        float total[S], sum[S];
#pragma unroll
        for (int e = 0; e < S; e++) sum[e] = 0.f;
#pragma unroll 1
        for (int s = 0; s < 4; s++) {
#pragma unroll
          for (int e = 0; e < S; e++) total[e] = 0.f;
#pragma unroll 1
          for (const uint32_t end = row + order.in_class(quarter, s) * ROW; row != end; row += ROW) {
            const uint32_t at = base + p.ring_at + turn.slot * p.stage_stride;
            const uint32_t x = p.resident ? base + p.x_at + (row - rows) / ROW * X_BYTES : at + p.groups * ITEM_TILES * p.unit_room;
            const uint2 unit_row = SharedBytes{row}.get8(8);
            if (waits) barrier_wait(present + (row - rows) / ROW * 8, 0);
            barrier_wait(full + turn.slot * 8, turn.phase);
            // From one lane, so that the compiler keeps descriptors in uniform registers.
            const uint32_t descriptor = __shfl_sync(~0u, x >> 4 | (16 * N >> 4) << 16, 0);
            Unit unit{at + mine, descriptor, ENTRY == 128 ? unit_row.y : row + MAXIMA_AT, lane, total, {}};
            unit.run(unit_row.x & 0xffff);
            warp_arrives(empty + turn.slot * 8, lane);
            turn.advance(p.slots);
          }
#pragma unroll
          for (int e = 0; e < S; e++) sum[e] += total[e];
        }
        leave(block, quarter, sum);
      }
    }
  }

  // ---- results. A thread has float4s of a warp's 16 features and eight rows: (feature, row) = (g, 2 t), (g, 2 t + 1), (g + 8, 2 t),
  // (g + 8, 2 t + 1). Uncut, they add up in shared memory of the warp's own, and where one matrix gates another, the warps that have the same
  // tile of both meet and take half of the rows each.
  static constexpr uint32_t ABSENT = ~0u;
  DEVICE static uint4 absent() { return make_uint4(ABSENT, ABSENT, ABSENT, ABSENT); }

  // Behind the ring's barriers: one that says that the number is there, and the number.
  DEVICE uint32_t numbered() const { return base + p.numbered_at; }
  DEVICE int& number() const { return *reinterpret_cast<int*>(memory + p.numbered_at + 8); }
  // One warp's part where K is cut: whose shares of the rows this block adds up, a bit for each of the four, and ALONE in the one that began
  // last. Blocks count themselves in. One that sees all four for a while stays and adds its share. One that does not, leaves all its sums and
  // says so, in one step with a last look; the one that began last then has its share, too, and is the only one that is sure of the others.
  static constexpr int ALONE = 16;
  DEVICE void agree() const {
    if (threadIdx.x % 32) return;
    int* const counter = p.arrivals + first;
    const int mine = 1 << order.first, begun = atomicAdd(counter, 16), before = begun + 16 >> 4 & 3;
    auto all_there = [&](int now) { return ((now >> 4) - (begun >> 4) & 0xfff) >= QUARTERS - before; };
    int shares = mine;
    if (before == QUARTERS - 1) {
      shares |= ~begun & 15;
      if (shares != mine) atomicOr(counter, 15);
      shares |= ALONE;
    } else {
      int tries = p.looks;
      while (--tries && !all_there(load_relaxed(counter)));
      if (tries == 0) {
        if (all_there(atomicAnd(counter, ~mine))) atomicOr(counter, mine);
        else shares = 0;
      }
    }
    number() = shares;
    barrier_arrive(numbered());
  }
  DEVICE static int load_relaxed(const int* from) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
  }
  DEVICE int agreed() const {
    barrier_wait(numbered(), 0);
    return __shfl_sync(~0u, number(), 0);
  }
  // Of N / 8 eights of rows a share is SHARE ones; of 16 rows two blocks have one.
  static constexpr int SHARE = EIGHTS < QUARTERS ? 1 : EIGHTS / QUARTERS;
  DEVICE static void leave_sums(float4* to, const float (&sums)[S], int but) {
#pragma unroll
    for (int q = 0; q < EIGHTS; q++)
      if (!(but >> q / SHARE & 1))
        asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + q * 32), "f"(sums[4 * q]), "f"(sums[4 * q + 1]),
                     "f"(sums[4 * q + 2]), "f"(sums[4 * q + 3])
                     : "memory");
  }
  DEVICE void leave(int block, int quarter, float (&sums)[S]) const {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const Place here = place(block, group);
    if (!here.some) return;
    float4* to;
    if (p.cut == 1) {
      // The quarters before in this block's memory.
      to = reinterpret_cast<float4*>(memory + p.sums_at) + (group * 4 + warp) * (EIGHTS * 32) + lane;
#pragma unroll
      for (int q = 0; q < EIGHTS; q++) {
        const float4 before = quarter ? to[q * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
        to[q * 32] = make_float4(before.x + sums[4 * q], before.y + sums[4 * q + 1], before.z + sums[4 * q + 2], before.w + sums[4 * q + 3]);
      }
      if (quarter < QUARTERS - 1) return;
    } else {
      float4* const places = p.sums + (size_t)(here.item * ITEM_TILES + warp) * (QUARTERS * EIGHTS * 32) + lane;
      to = places + quarter * (EIGHTS * 32);
      const int shares = agreed();
      const bool halves = p.paired && p.y_kind == OUT_F16 && !p.scaled;
      if (halves || !(shares & ALONE)) {
        leave_sums(to, sums, halves ? shares : 0);
        if (halves) add_halves(places, here, quarter, shares, sums);
        return;
      }
      add_all(places, quarter, sums);
#pragma unroll
      for (int q = 0; q < EIGHTS; q++) to[q * 32] = make_float4(sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]);
    }
    __syncwarp();
    const int n = (here.tile + warp) * TILE + 2 * (lane >> 3);
    if (gated()) {
      const int half = p.groups / 2, mine = group >= half, pair = group - (mine ? half : 0), between = half * 4 * EIGHTS * 32;
      meet(pair);
      store_gated(to - lane - mine * between, between, n, mine);
      // What has been read here is written again in the next round.
      meet(pair);
    } else {
      store_sums(to - lane, p.part[here.matrix], n);
      __syncwarp();
      if (p.cut > 1)
#pragma unroll
        for (int q = 0; q < EIGHTS; q++) reinterpret_cast<uint4*>(to)[q * 32] = absent();
    }
  }

  // What the other quarters left of some eights of rows, as soon as it is there; the memory is as it was then. `places`: this lane's of the
  // first quarter.
  DEVICE static void take(uint4 (&v)[SHARE][QUARTERS - 1], float4* places, int quarter, int first) {
    uint4* const from = reinterpret_cast<uint4*>(places) + first * 32;
    uint4* const others[QUARTERS - 1] = {from + (quarter <= 0) * (EIGHTS * 32), from + (1 + (quarter <= 1)) * (EIGHTS * 32),
                                         from + (2 + (quarter <= 2)) * (EIGHTS * 32)};
    uint32_t largest;
    do {
      largest = 0;
#pragma unroll
      for (int q = 0; q < SHARE; q++)
#pragma unroll
        for (int k = 0; k < QUARTERS - 1; k++)
          asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[q][k].x), "=r"(v[q][k].y), "=r"(v[q][k].z), "=r"(v[q][k].w)
                       : "l"(others[k] + q * 32)
                       : "memory");
#pragma unroll
      for (int q = 0; q < SHARE; q++)
#pragma unroll
        for (int k = 0; k < QUARTERS - 1; k++) largest = max(largest, max(max(v[q][k].x, v[q][k].y), max(v[q][k].z, v[q][k].w)));
    } while (__any_sync(~0u, largest == ABSENT));
#pragma unroll
    for (int q = 0; q < SHARE; q++)
#pragma unroll
      for (int k = 0; k < QUARTERS - 1; k++) others[k][q * 32] = absent();
  }
  DEVICE static void add_all(float4* places, int quarter, float (&sums)[S]) {
#pragma unroll
    for (int first = 0; first < EIGHTS; first += SHARE) {
      uint4 v[SHARE][QUARTERS - 1];
      take(v, places, quarter, first);
#pragma unroll
      for (int q = 0; q < SHARE; q++) add_four(sums, 4 * (first + q), quarter, v[q]);
    }
  }
  // This block's shares, where results are halves in pairs.
  DEVICE void add_halves(float4* places, const Place& here, int quarter, int shares, float (&sums)[S]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, odd = lane >> 2 & 1, token = 2 * (lane & 3) + odd;
    const BatchPart& part = p.part[here.matrix];
    const int n = (here.tile + warp) * TILE + (lane >> 3) * 2, stride = p.y_stride / 2;
    float bias[4];
    bias_of(bias, part, n);
#pragma unroll
    for (int first = 0; first < EIGHTS; first += SHARE) {
      if (!(shares >> first / SHARE & 1)) continue;
      const size_t at = place_of(part, n, 8 * first + token) / 2;
      __half2* const y = static_cast<__half2*>(p.y) + at;
      const __half2* const from = static_cast<const __half2*>(p.residual) + at;
      uint4 v[SHARE][QUARTERS - 1];
      __half2 residual[SHARE][2];
#pragma unroll
      for (int q = 0; q < SHARE; q++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const bool some = p.residual && 8 * (first + q) + token < p.m && n + 8 * h < part.a.out_features;
          residual[q][h] = some ? __ldcg(from + 8 * q * stride + 4 * h) : __half2(__half(0.f), __half(0.f));
        }
      take(v, places, quarter, first);
#pragma unroll
      for (int q = 0; q < SHARE; q++) {
        const int i = 4 * (first + q);
        add_four(sums, i, quarter, v[q]);
        const float4 r = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        // Lanes of neighbouring features exchange: one has both of row 2 t, the other of row 2 t + 1.
        const float low = __shfl_xor_sync(~0u, odd ? r.x : r.y, 4), high = __shfl_xor_sync(~0u, odd ? r.z : r.w, 4);
        if (8 * (first + q) + token >= p.m) continue;
        store_halves(y + 8 * q * stride, residual[q][0], part, n, odd ? make_float2(low, r.y) : make_float2(r.x, low), bias);
        store_halves(y + 8 * q * stride + 4, residual[q][1], part, n + 8, odd ? make_float2(high, r.w) : make_float2(r.z, high), bias + 2);
      }
    }
  }
  DEVICE void store_halves(__half2* y, __half2 residual, const BatchPart& part, int n, float2 v, const float* bias) const {
    if (n >= part.a.out_features) return;
    __half2 result = __floats2half2_rn(finish(v.x, 1.f, bias[0], part.a.prescale), finish(v.y, 1.f, bias[1], part.a.prescale));
    if (p.residual) {
      const float2 a = __half22float2(result), b = __half22float2(residual);
      result = __floats2half2_rn(a.x + b.x, a.y + b.y);
    }
    *y = result;
  }
  // A quarter's own sums and the others' in the order of quarters.
  DEVICE static float added(float own, int quarter, uint32_t a, uint32_t b, uint32_t c) {
    const float second = __uint_as_float(b), third = __uint_as_float(c);
    return ((__uint_as_float(a) + (quarter < 2 ? own : second)) + (quarter < 2 ? second : quarter == 2 ? own : third)) + (quarter < 3 ? third : own);
  }
  DEVICE static void add_four(float (&sums)[S], int i, int quarter, const uint4 (&v)[QUARTERS - 1]) {
    sums[i] = added(sums[i], quarter, v[0].x, v[1].x, v[2].x);
    sums[i + 1] = added(sums[i + 1], quarter, v[0].y, v[1].y, v[2].y);
    sums[i + 2] = added(sums[i + 2], quarter, v[0].z, v[1].z, v[2].z);
    sums[i + 3] = added(sums[i + 3], quarter, v[0].w, v[1].w, v[2].w);
  }
  // The warpgroups of two gated items.
  DEVICE static void meet(int pair) { asm volatile("bar.sync %0, 256;" ::"r"(2 + pair) : "memory"); }

  // A thread adds and stores features n, n + 1, n + 8 and n + 9 of two rows at a time: of pairs of eight rows the one that `odd` says.
  DEVICE static const float4* of_pair(const float4* places, int lane) { return places + (lane >> 2 & 1) * 32 + 8 * (lane >> 3) + (lane & 3); }
  DEVICE static void bias_of(float (&bias)[4], const BatchPart& part, int n) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int feature = n + i / 2 * 8 + i % 2;
      bias[i] = part.a.bias && feature < part.a.out_features ? part.a.bias[feature] : 0.f;
    }
  }
  DEVICE void store_sums(const float4* places, const BatchPart& part, int n) const {
    const int lane = threadIdx.x % 32, t = lane & 3, odd = lane >> 2 & 1;
    const float4* from = of_pair(places, lane);
    float bias[4];
    bias_of(bias, part, n);
    constexpr int PAIRS = EIGHTS < 4 ? 1 : 2;
#pragma unroll 1
    for (int q = 0; q < EIGHTS; q += 2 * PAIRS, from += PAIRS * 64) {
      uint32_t residual[PAIRS][4];
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        if (p.residual)
#pragma unroll
          for (int k = 0; k < 4; k++) residual[i][k] = residual_of(part, n + k / 2 * 8, 8 * (q + 2 * i + odd) + 2 * t + k % 2);
      }
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const float4 low = from[i * 64], high = from[i * 64 + 4];
        const int token = 8 * (q + 2 * i + odd) + 2 * t;
        store_pair_of(part, n, token, low.x, high.x, bias, residual[i][0]);
        store_pair_of(part, n, token + 1, low.y, high.y, bias, residual[i][1]);
        store_pair_of(part, n + 8, token, low.z, high.z, bias + 2, residual[i][2]);
        store_pair_of(part, n + 8, token + 1, low.w, high.w, bias + 2, residual[i][3]);
      }
    }
  }
  // `between`: from a gate's sums to those that it gates; rows 16 i .. 16 i + 15 with i of the kind of `mine`.
  DEVICE void store_gated(const float4* places, int between, int n, int mine) const {
    const int lane = threadIdx.x % 32, t = lane & 3, odd = lane >> 2 & 1;
    const uint32_t rows[2] = {rows_into(n), rows_into(n + 8)};
    const float4* from = of_pair(places, lane) + mine * 64;
    float bias[2][4];
    bias_of(bias[0], p.part[0], n);
    bias_of(bias[1], p.part[1], n);
#pragma unroll 1
    for (int q = 2 * mine; q < EIGHTS; q += 4, from += 128) {
      float4 low = from[0], high = from[4], up_low = from[between], up_high = from[between + 4];
      const int token = 8 * (q + odd) + 2 * t;
#pragma unroll 1
      for (int k = 0; k < 4; k++) {
        const int row = token + (k & 1), feature = n + (k >> 1) * 8;
        store_gated_pair(feature, row, k >> 1 ? rows[1] : rows[0], make_float2(low.x, high.x), make_float2(up_low.x, up_high.x), k >> 1 ? make_float4(bias[0][2], bias[0][3], bias[1][2], bias[1][3]) : make_float4(bias[0][0], bias[0][1], bias[1][0], bias[1][1]));
        low = turned(low), high = turned(high), up_low = turned(up_low), up_high = turned(up_high);
      }
    }
  }
  DEVICE static float4 turned(float4 v) { return make_float4(v.y, v.z, v.w, v.x); }
  // A gate's and the other's sums of features n and n + 1, biases likewise.
  DEVICE void store_gated_pair(int n, int token, uint32_t rows, float2 gate, float2 up, float4 bias) const {
    const int limit = p.part[0].a.out_features;
    if (token >= (p.into ? N : p.m) || n >= limit) return;
    const float multiplier = p.scaled ? __ldcg(p.multipliers + token) : 1.f;
    const float g = p.part[0].a.prescale, u = p.part[1].a.prescale;
    const float a = one_gated(finish(gate.x, multiplier, bias.x, g), finish(up.x, multiplier, bias.z, u));
    const float b = one_gated(finish(gate.y, multiplier, bias.y, g), finish(up.y, multiplier, bias.w, u));
    if (p.into) {
      const bool some = token < p.m;
      *reinterpret_cast<__half*>(p.into + prepared_place(rows & 0xffff, token, N)) = __float2half_rn(some ? a : 0.f);
      *reinterpret_cast<__half*>(p.into + prepared_place(rows >> 16, token, N)) = __float2half_rn(some ? b : 0.f);
    } else {
      store_two(p.part[0], n, token, a, b);
    }
  }
  // Rows of features n and n + 1 in the layout of the product that comes next.
  DEVICE uint32_t rows_into(int n) const {
    if (!p.into || n >= p.part[0].a.out_features) return 0;
    return p.into_rows ? __ldg(reinterpret_cast<const uint32_t*>(p.into_rows + n)) : n * 0x10001u + 0x10000u;
  }
  DEVICE float one_gated(float gate, float up) const { return activate(rounded(gate, p.y_kind), p.gate) * rounded(up, p.y_kind); }

  DEVICE size_t place_of(const BatchPart& part, int n, int token) const { return (size_t)token * p.y_stride + part.y_offset + n; }
  // Two halves of the residual; where there is one, results are halves and stored in pairs.
  DEVICE uint32_t residual_of(const BatchPart& part, int n, int token) const {
    if (token >= p.m || n >= part.a.out_features) return 0;
    return __ldcg(static_cast<const uint32_t*>(p.residual) + place_of(part, n, token) / 2);
  }
  DEVICE void store_pair_of(const BatchPart& part, int n, int token, float a, float b, const float* bias, uint32_t residual) const {
    if (token >= p.m || n >= part.a.out_features) return;
    const float multiplier = p.scaled ? __ldcg(p.multipliers + token) : 1.f;
    a = finish(a, multiplier, bias[0], part.a.prescale);
    b = finish(b, multiplier, bias[1], part.a.prescale);
    if (p.residual) {
      const bool bf16 = p.y_kind == OUT_BF16;
      const __half2 halves = *reinterpret_cast<__half2*>(&residual);
      a = rounded(a, p.y_kind) + (bf16 ? __uint_as_float(residual << 16) : __low2float(halves));
      b = rounded(b, p.y_kind) + (bf16 ? __uint_as_float(residual & 0xffff0000u) : __high2float(halves));
    }
    store_two(part, n, token, a, b);
  }
  DEVICE void store_two(const BatchPart& part, int n, int token, float a, float b) const {
    const size_t at = place_of(part, n, token);
    if (p.paired) {
      if (p.y_kind == OUT_F16) static_cast<__half2*>(p.y)[at / 2] = __floats2half2_rn(a, b);
      else if (p.y_kind == OUT_BF16) static_cast<__nv_bfloat162*>(p.y)[at / 2] = __floats2bfloat162_rn(a, b);
      else static_cast<float2*>(p.y)[at / 2] = make_float2(a, b);
    } else {
      store_result(p.y, at, p.y_kind, a);
      if (n + 1 < part.a.out_features) store_result(p.y, at + 1, p.y_kind, b);
    }
  }
};
#endif

template <int KIND, int ENTRY, int N, int W, int MORE, int FEWER>
DEVICE void batch_matmul(const BatchTask& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t memory[];
  const Batch<KIND, ENTRY, N, W> batch(p, memory);
  // Two warps are there only so that the last two are a warpgroup's, which can give its registers away.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  constexpr int MEETING = W * 128 + (RACECHECK ? 128 : 64);  // racecheck's build: all threads of the block
  if (group == W) {
    if constexpr (FEWER > 0) fewer_registers<FEWER>();
    if (threadIdx.x < W * 128 + 32) {
      pdl_trigger();
      batch.set_up_stream();
      bar_arrive<1>(MEETING);
      batch.stream();
    } else if (threadIdx.x < W * 128 + 64) {
      bar<1>(MEETING);
      pdl_wait();
      if (p.cut > 1) batch.agree();
    } else if (RACECHECK) {
      bar_arrive<1>(MEETING);
    }
  } else {
    if constexpr (FEWER > 0) more_registers<MORE>();
    batch.set_up_maxima();
    bar<1>(MEETING);
    if (group < p.groups) {
      pdl_wait();
      batch.multiply();
    }
  }
  all_leave();
#else
  __trap();  // the host starts this kernel on sm_90a only
#endif
}

// REGISTERS of a thread at the launch leave 128 threads of 32 to a block of the kernel that prepares the next input.
#define BATCH(KIND, kind, ENTRY, N, W, REGISTERS, MORE, FEWER)                                                                    \
  extern "C" __global__ void __maxnreg__(REGISTERS) batch_##kind##_##ENTRY##_##N##x##W(const __grid_constant__ BatchTask p) {     \
    static_assert((W + 1) * REGISTERS == W * MORE + FEWER && (W + 1) * 128 * REGISTERS <= 65536 - 4096, "registers are handed on"); \
    batch_matmul<KIND, ENTRY, N, W, MORE, FEWER>(p);                                                                              \
  }
// As `VARIANTS` in src/ops/batch.rs has them; registers of a thread at the launch, of one that multiplies and of one that does not.
#define BATCHES(KIND, kind, ENTRY)              \
  BATCH(KIND, kind, ENTRY, 16, 4, 96, 112, 32)  \
  BATCH(KIND, kind, ENTRY, 32, 4, 96, 112, 32)  \
  BATCH(KIND, kind, ENTRY, 64, 2, 152, 208, 40) \
  BATCH(KIND, kind, ENTRY, 64, 3, 120, 152, 24)
