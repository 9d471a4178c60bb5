// y = x @ W for 9 to 128 activation rows on sm_90a: each weight is unpacked once and multiplied by the tensor cores of a warpgroup.
//
// An item is 64 features (four row tiles), the work of one warpgroup. A block processes all of K, or four blocks process a quarter each
// (the units u = j mod 4). A block has up to W warpgroups with neighbouring items and one warp that streams stages. A stage is one unit of
// every tile, with the packed activations of its rows, which stay in shared memory if the block needs them again and they fit. The
// activations of more than 64 columns have a ring of half units and a warp that copies them, because two whole units of them and the sums
// leave little room for weights. A warp's
// fragments of mma.sync are its part of a warpgroup's A operand, so codes go from shared memory to registers to the tensor cores. Results
// are bitwise identical to the ring kernel's: the order of sums (`sum_classes`) is the same.
//
// Branches that depend on loaded data use a vote: ptxas serializes the matrix instructions if it cannot prove that a warp does not diverge.
// Code that a warp runs once is short, because the instruction cache is cold in a decode step. Clusters in place of the workspace were
// slower: the hardware kept fewer of their blocks resident.
#pragma once
#include "linear/batch_finish.cuh"
#include "common/wgmma.cuh"

template <int KIND, int ENTRY, int N, int W, bool TRANSPOSED>
struct Batch;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// TRANSPOSED: the core matrices of the activations are transposed (prepared.cuh).
template <int KIND, int ENTRY, int N, int W, bool TRANSPOSED>
struct Batch : BatchFinish<N, true> {
  using Finish = BatchFinish<N, true>;
  using Finish::Finish;
  using Finish::S, Finish::p, Finish::memory, Finish::base, Finish::full, Finish::empty, Finish::present, Finish::step, Finish::first;
  using Finish::order, Finish::own, Finish::per_block, Finish::place, Finish::numbered, Finish::leave, Finish::go_on, typename Finish::Place;
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY, X_BYTES = 512 * N, HALF_BYTES = X_BYTES / 2;
  // Whether half units of activations have a ring of their own.
  static constexpr bool HALVES = N > STAGED_COLUMNS;
  // A unit's row in the block's table: {offset, bytes, widths | number << WIDTHS_BITS}, maxima.
  static constexpr int ROW = ENTRY == 128 ? 16 : 32, MAXIMA_AT = ENTRY == 128 ? 12 : 16;

  // Set-up by the streaming warp: barriers and tables.
  DEVICE void set_up_stream() const {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < p.slots; i += 32) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, p.groups * 4 * WARP_ARRIVALS);
    }
    if (lane == 0) barrier_init(numbered(), 1);
    if (HALVES)
      for (int i = lane; i < p.half_slots; i += 32) {
        barrier_init(present + i * 8, 1);
        barrier_init(released(i), p.groups * 4 * WARP_ARRIVALS);
      }
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
        row[2] = unit.y | u << WIDTHS_BITS;
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

  // ---- one warp streams; each lane takes one tile of the block's items
  struct Source {
    const uint8_t* from;
    uint32_t units;
    bool some;
  };
  DEVICE Source source(int block) const { return source_of(place(block, min(threadIdx.x % 32 / ITEM_TILES, p.groups - 1))); }
  DEVICE Source source_of(const Place& at) const {
    const int lane = threadIdx.x % 32, group = lane / ITEM_TILES;
    const BatchPart& part = p.part[at.matrix];
    const int tile = at.tile + lane % ITEM_TILES;
    return {part.a.image + (size_t)tile * part.a.tile_bytes, base + part.units_at, group < p.groups && at.some && tile < part.a.tiles};
  }
  DEVICE void copy_weights(const Source& source, int i, Turn turn, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    const uint2 unit = SharedBytes{source.units}.get8(i * ROW);
    const uint32_t bar = full + turn.slot * 8, bytes = __reduce_add_sync(~0u, source.some ? unit.y : 0);
    if (lane == 0) barrier_expect(bar, bytes + (HALVES || p.resident ? 0 : X_BYTES));
    __syncwarp();
    if (source.some) copy_to_shared(base + p.ring_at + turn.slot * p.stage_stride + lane * p.unit_room, source.from + unit.x, unit.y, bar, policy);
  }
  DEVICE void copy_activations(int i, uint32_t to, uint32_t bar, uint64_t policy) const {
    const uint32_t u = SharedBytes{base + p.part[0].units_at}.get4(i * ROW + 8) >> WIDTHS_BITS;
    copy_to_shared(to, p.x + (size_t)u * X_BYTES, X_BYTES, bar, policy);
  }
  DEVICE void copy_staged_activations(int i, Turn turn, uint64_t policy) const {
    if (threadIdx.x % 32 == 0)
      copy_activations(i, base + p.ring_at + turn.slot * p.stage_stride + p.groups * ITEM_TILES * p.unit_room, full + turn.slot * 8, policy);
  }
  DEVICE void stream() const {
    const uint64_t once = evict_first(), again = evict_last();
    const int mine = (p.shares - first + step - 1) / step, total = mine * own;
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
    if constexpr (!HALVES) pdl_wait();
    if (HALVES) {
      // Another warp copies the activations.
    } else if (p.resident) {
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
      if (!HALVES && !p.resident) copy_staged_activations(i, turn, again);
    }
  }
  // The barrier that signals that all warps have read a slot of the ring of half units.
  DEVICE uint32_t released(int slot) const { return present + (p.half_slots + slot) * 8; }
  // Run by one thread.
  DEVICE void stream_activations() const {
    const uint64_t again = evict_last();
    Turn turn;
    pdl_wait();
#pragma unroll 1
    for (int block = first; block < p.shares; block += step)
#pragma unroll 1
      for (int h = 0; h < 2 * own; h++, turn.advance(p.half_slots)) {
        const uint32_t u = SharedBytes{base + p.part[0].units_at}.get4(h / 2 * ROW + 8) >> WIDTHS_BITS, bar = present + turn.slot * 8;
        barrier_wait(released(turn.slot), turn.phase ^ 1);
        barrier_expect(bar, HALF_BYTES);
        copy_to_shared(base + p.x_at + turn.slot * HALF_BYTES, p.x + (size_t)u * X_BYTES + h % 2 * HALF_BYTES, HALF_BYTES, bar, again);
      }
  }

  // ---- warpgroups multiply
  // Half units of activations in a ring of their own, and where this warp is in it. Nothing up to 64 columns: references that are never used
  // cost registers.
  struct Halves {
    const Batch& batch;
    Turn& half;
  };
  struct NoHalves {};
  DEVICE auto halves_of(Turn& half) const {
    if constexpr (HALVES) return Halves{*this, half};
    else return NoHalves();
  }

  // One unit of this warp's tile.
  struct Unit : std::conditional_t<HALVES, Halves, NoHalves> {
    const uint32_t weights;
    uint64_t x;  // the descriptor of the first core matrices or, with three warpgroups, of the next
    const uint32_t maxima;  // address of the maxima or, for entries of 128 rows, the maxima themselves
    const int lane;
    float (&total)[S];
    UnitScales<KIND, ENTRY, SharedBytes> scales;

    // Of a half of the unit that has one.
    DEVICE uint32_t scale(int half) const {
      const int e = half * (ENTRIES / 2);
      if constexpr (KIND == GPTQ) return scales.halves(e, __half(0.f));
      else if constexpr (ENTRY == 32) return scales.halves(e, SharedMaxima{maxima}[e]);
      else return mul2(scales.squares(e), __byte_perm(maxima, 0, e ? 0x3232 : 0x1010));
    }
    // The next COUNT matrix instructions of the unit, from i on.
    template <int COUNT, bool ADD>
    DEVICE void multiply(float (&sums)[S], const uint32_t (*a)[4], int i) {
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        // Advancing in place saves registers, but is slower where registers are not scarce.
        const uint64_t at = W == 3 ? x : descriptor_of(static_cast<uint32_t>(x) + (HALVES ? i + j & 7 : i + j) * 2 * N, 128 >> 4);
        if (j == 0) product<ADD, TRANSPOSED>(sums, a[0], at);
        else product<true, TRANSPOSED>(sums, a[j], at);
        if constexpr (W == 3) advance(x, 2 * N);
      }
      products_commit();
    }
    // Adds the sums of half a unit. `scale_of`: its scale, if weights are not SCALED.
    template <bool SCALED>
    DEVICE void add(const float (&sums)[S], uint32_t scale_of) {
      const float2 scale = to_float2(scale_of);
#pragma unroll
      for (int i = 0; i < S; i++) total[i] = SCALED ? total[i] + sums[i] : fmaf(i % 4 / 2 ? scale.y : scale.x, sums[i], total[i]);
    }
    // Scales of the entries of chunk c, by which weights are multiplied if they are SCALED.
    template <bool SCALED>
    DEVICE uint2 factors(int c) const {
      if constexpr (SCALED) return scales.two(c, SharedMaxima{maxima});
      else return {0, 0};
    }
    // Four chunks of one width: the next one is unpacked while the current one is multiplied.
    template <bool SCALED, int B>
    DEVICE void uniform() {
      uint32_t w[B], a[2][2][4], scale_of[2] = {};
      float sums[S];
      load_words<B>(w, SharedBytes{weights}, lane);
      scales.load({weights + 512 * B}, lane >> 2);
      uint2 by = factors<SCALED>(0);
      unpack_half<SCALED, B, 0>(a[0], w, 0, by);
      multiply<2, false>(sums, a[0], 0);
      unpack_half<SCALED, B, 1>(a[1], w, 0, by);
      load_words<B>(w, SharedBytes{weights + 128 * B}, lane);
      multiply<2, true>(sums, a[1], 2);
      by = factors<SCALED>(1);
      wgmma_pending<1>();
      unpack_half<SCALED, B, 0>(a[0], w, 1, by);
      multiply<2, true>(sums, a[0], 4);
      wgmma_pending<1>();
      unpack_half<SCALED, B, 1>(a[1], w, 1, by);
      load_words<B>(w, SharedBytes{weights + 256 * B}, lane);
      multiply<2, true>(sums, a[1], 6);
      if constexpr (!SCALED) {
        scale_of[0] = scale(0);
        scale_of[1] = scale(1);
      }
      by = factors<SCALED>(2);
      wgmma_pending<1>();
      unpack_half<SCALED, B, 0>(a[0], w, 2, by);
      wgmma_wait<0>(sums);
      next_half();
      add<SCALED>(sums, scale_of[0]);
      multiply<2, false>(sums, a[0], 8);
      unpack_half<SCALED, B, 1>(a[1], w, 2, by);
      load_words<B>(w, SharedBytes{weights + 384 * B}, lane);
      multiply<2, true>(sums, a[1], 10);
      by = factors<SCALED>(3);
      wgmma_pending<1>();
      unpack_half<SCALED, B, 0>(a[0], w, 3, by);
      multiply<2, true>(sums, a[0], 12);
      wgmma_pending<1>();
      unpack_half<SCALED, B, 1>(a[1], w, 3, by);
      multiply<2, true>(sums, a[1], 14);
      wgmma_wait<0>(sums);
      add<SCALED>(sums, scale_of[1]);
    }
    // 32 rows of chunk c.
    template <bool SCALED, int B, int H>
    DEVICE void unpack_half(uint32_t (&a)[2][4], const uint32_t (&w)[B], int c, uint2 by) {
      const uint2 zeros = scales.zeros((64 * c + 32 * H) / ENTRY);
      operand<KIND, SCALED, B, 2 * H>(a[0], w, zeros, by);
      operand<KIND, SCALED, B, 2 * H + 1>(a[1], w, zeros, by);
      // The unpacking must be finished here, not later, while matrix instructions are in flight.
#pragma unroll
      for (int j = 0; j < 8; j++) asm volatile("" : "+r"(a[j / 4][j % 4]));
    }

    template <bool SCALED, int B>
    DEVICE void chunk_of(uint32_t (&a)[4][4], uint32_t codes, int c) const {
      uint32_t w[B];
      load_words<B>(w, SharedBytes{codes}, lane);
      const uint2 low = scales.zeros(64 * c / ENTRY), high = scales.zeros((64 * c + 32) / ENTRY);
      const uint2 by = factors<SCALED>(c);
      operand<KIND, SCALED, B, 0>(a[0], w, low, by);
      operand<KIND, SCALED, B, 1>(a[1], w, low, by);
      operand<KIND, SCALED, B, 2>(a[2], w, high, by);
      operand<KIND, SCALED, B, 3>(a[3], w, high, by);
    }
    // Any unit, chunk after chunk.
    template <bool SCALED>
    DEVICE void any(uint32_t widths) {
      uint32_t bits = 0, offset = 0;
#pragma unroll
      for (int c = 0; c < 4; c++) bits += widths >> (4 * c) & 15;
      scales.load({weights + 128 * bits}, lane >> 2);
#pragma unroll 1
      for (int c = 0; c < 4; c++) {
        const uint32_t b = widths >> (4 * c) & 15;
        if (HALVES && all(c == 2)) next_half();
        if (all(b == 0)) {
          if (HALVES && all(c < 2)) next_half();
          break;
        }
        uint32_t a[4][4];
        const uint32_t codes = weights + offset;
        if (b == 4) {
          chunk_of<SCALED, 4>(a, codes, c);
        } else if (b == 3) {
          chunk_of<SCALED, 3>(a, codes, c);
        } else if (b == 2) {
          chunk_of<SCALED, 2>(a, codes, c);
        } else if (KIND == EXL2 && b == 5) {
          if constexpr (KIND == EXL2) chunk_of<SCALED, 5>(a, codes, c);
        } else if (KIND == EXL2 && b == 6) {
          if constexpr (KIND == EXL2) chunk_of<SCALED, 6>(a, codes, c);
        } else {
          chunk_of<SCALED, 8>(a, codes, c);
        }
        offset += 128 * b;
        if (all((c & 1) == 0)) multiply<4, false>(held, a, 4 * c);
        else multiply<4, true>(held, a, 4 * c);
        wgmma_wait<0>(held);
        if (all((c & 1) != 0 || (widths >> (4 * c + 4) & 15) == 0)) add<SCALED>(held, SCALED ? 0 : scale(c / 2));
      }
    }
    // Goes on to the second half of the unit's activations. No matrix instruction is in flight.
    DEVICE void next_half() {
      if constexpr (HALVES) {
        this->batch.release_half(this->half);
        x = this->batch.await_half(this->half);
      }
    }
    float held[S];  // sums of half a unit, of two chunks
    DEVICE static bool all(bool v) { return __all_sync(~0u, v); }
    template <bool SCALED>
    DEVICE void run_widths(uint32_t widths) {
      if (all(widths == 0x4444)) return uniform<SCALED, 4>();
      if constexpr (KIND == EXL2) {
        if (all(widths == 0x5555)) return uniform<SCALED, 5>();
      }
      if (all(widths == 0x3333)) return uniform<SCALED, 3>();
      if (all(widths == 0x2222)) return uniform<SCALED, 2>();
      if (all(widths == 0x8888)) return uniform<SCALED, 8>();
      if constexpr (KIND == EXL2) {
        if (all(widths == 0x6666)) return uniform<SCALED, 6>();
      }
      any<SCALED>(widths);
    }
    DEVICE void run(uint32_t widths) {
      if constexpr (ENTRY == 32)
        if (all(scales_weights<ENTRY>(widths))) return run_widths<true>(widths);
      run_widths<false>(ENTRY == 32 ? widths & ~ONE_SCALE_A_HALF : widths);
    }
  };

  // Waits for half a unit of activations; returns its descriptor.
  DEVICE uint64_t await_half(Turn half) const {
    barrier_wait(present + half.slot * 8, half.phase);
    return descriptor_at(base + p.x_at + half.slot * HALF_BYTES);
  }
  DEVICE void release_half(Turn& half) const {
    warp_arrives(released(half.slot), threadIdx.x % 32);
    half.advance(p.half_slots);
  }
  // From one lane, so that the compiler keeps descriptors in uniform registers.
  DEVICE static uint64_t descriptor_at(uint32_t x) { return descriptor_of(__shfl_sync(~0u, x >> 4 | (16 * N >> 4) << 16, 0), 128 >> 4); }
  DEVICE uint32_t room_of_warp() const { return threadIdx.x / 32 * p.unit_room; }
  // Adds the sums of a quarter, beginning at `row` of the table at `rows`.
  DEVICE void add_quarter(float (&sum)[S], int quarter, uint32_t rows, uint32_t& row, uint32_t mine, Turn& turn, bool waits) const {
    Turn none;
    add_quarter(sum, quarter, rows, row, mine, turn, none, waits);
  }
  DEVICE void add_quarter(float (&sum)[S], int quarter, uint32_t rows, uint32_t& row, uint32_t mine, Turn& turn, Turn& half, bool waits) const {
    const int lane = threadIdx.x % 32;
    float total[S];
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
        if (!HALVES && waits) barrier_wait(present + (row - rows) / ROW * 8, 0);
        barrier_wait(full + turn.slot * 8, turn.phase);
        const uint64_t descriptor = HALVES ? await_half(half) : descriptor_at(x);
        Unit unit{halves_of(half), at + mine, descriptor, ENTRY == 128 ? unit_row.y : row + MAXIMA_AT, lane, total, {}};
        unit.run(unit_row.x & WIDTHS_MASK);
        if constexpr (HALVES) release_half(half);
        warp_arrives(empty + turn.slot * 8, lane);
        turn.advance(p.slots);
      }
#pragma unroll
      for (int e = 0; e < S; e++) sum[e] += total[e];
    }
  }
  // Skips the units of a share in which this warpgroup has no item.
  DEVICE void pass(Turn& turn, Turn& half) const {
#pragma unroll 1
    for (int i = 0; i < own; i++, turn.advance(p.slots)) {
      barrier_wait(full + turn.slot * 8, turn.phase);
      if constexpr (HALVES) {
#pragma unroll 1
        for (int h = 0; h < 2; h++) {
          barrier_wait(present + half.slot * 8, half.phase);
          release_half(half);
        }
      }
      warp_arrives(empty + turn.slot * 8, threadIdx.x % 32);
    }
  }
  DEVICE void multiply() const {
    const int group = threadIdx.x / 128;
    const uint32_t mine = room_of_warp();
    Turn turn, half;
    bool waits = p.resident;
#pragma unroll 1
    for (int block = first; block < p.shares; block += step, waits = false) {
      const Place here = place(block, group);
      if (Finish::SPREADS && Unit::all(!here.some)) {
        pass(turn, half);
        continue;
      }
      const uint32_t rows = base + p.part[here.matrix].units_at;
      uint32_t row = rows;
#pragma unroll 1
      for (int quarter = order.first; quarter < order.first + order.quarters; quarter++) {
        float sum[S];
        add_quarter(sum, quarter, rows, row, mine, turn, half, waits);
        leave(block, quarter, sum);
      }
      if constexpr (Finish::TRANSPOSES) {
        if (p.into) go_on(block);
      }
    }
  }
};
#endif

template <class B, int W, int MORE, int FEWER>
DEVICE void batch_matmul(const BatchTask& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t memory[];
  const B batch(p, memory);
  // One or two warps only fill the last warpgroup, so that it can release its registers.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  constexpr int BARRIER_THREADS = W * 128 + (RACECHECK ? 128 : B::HALVES ? 96 : 64);  // racecheck's build: all threads of the block
  if (group == W) {
    if constexpr (FEWER > 0) fewer_registers<FEWER>();
    if (threadIdx.x < W * 128 + 32) {
      pdl_trigger();
      batch.set_up_stream();
      bar_arrive<1>(BARRIER_THREADS);
      batch.stream();
    } else if (threadIdx.x < W * 128 + 64) {
      bar<1>(BARRIER_THREADS);
      pdl_wait();
      if (p.cut > 1) batch.agree();
      __syncwarp();  // one lane polls for the other blocks
    } else if (B::HALVES && threadIdx.x < W * 128 + 96) {
      bar<1>(BARRIER_THREADS);
      if (threadIdx.x % 32 == 0) batch.stream_activations();
      __syncwarp();
    } else if (RACECHECK) {
      bar_arrive<1>(BARRIER_THREADS);
    }
  } else {
    if constexpr (FEWER > 0) more_registers<MORE>();
    batch.set_up_maxima();
    bar<1>(BARRIER_THREADS);
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

// REGISTERS of a thread at the launch leave room for a block of 128 threads with 32 registers, of the kernel that packs the next input.
#define BATCH(NAME, REGISTERS, KIND, ENTRY, N, W, TRANSPOSED, MORE, FEWER)                                                            \
  extern "C" __global__ void __maxnreg__(REGISTERS) NAME(const __grid_constant__ BatchTask p) {                                   \
    static_assert((W + 1) * REGISTERS == W * MORE + FEWER && (W + 1) * 128 * REGISTERS <= 65536, "registers are handed on");     \
    batch_matmul<Batch<KIND, ENTRY, N, W, TRANSPOSED>, W, MORE, FEWER>(p);                                                            \
  }
#define BOTH(NAME, REGISTERS, KIND, ENTRY, N, W, MORE, FEWER)             \
  BATCH(NAME, REGISTERS, KIND, ENTRY, N, W, false, MORE, FEWER)           \
  BATCH(NAME##_transposed, REGISTERS, KIND, ENTRY, N, W, true, MORE, FEWER)
