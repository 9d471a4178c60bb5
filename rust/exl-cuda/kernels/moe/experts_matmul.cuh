// The matmuls of experts: gate and up with the activation between them, and down. An item is up to 8, 16 or 32 rows of an expert, whose
// weights are unpacked once for all of them. An item with room for 16 or 32 that has at most half as many is multiplied at half the width.
//
// A step is one row tile of an item: of gate and up, or of down. A launch has as many blocks as are resident at once, and each does a run
// of steps that should take as long as any other, which may cross from an item to the next. The four warps of a block each have a quarter
// of K, so a class is summed by one warp and the quarters of a tile meet in shared memory once. Each warp copies the units of its quarter
// into two slots of its own, one to multiply and one under way, and waits for no other warp until a tile is done. Rows are read through
// L1, and packed for it (`packed_at`). Kernels of pairs multiply the units of two tiles with one load of rows.
//
// The order of sums is that of all other matmuls: a pair's result is bitwise that of its row alone in any kernel.
#pragma once
#include "common/activate.cuh"
#include "common/pipeline.cuh"
#include "common/row_limits.cuh"
#include "moe/experts.cuh"

// Blocks of an SM: the registers that they leave a thread hold all without spilling.
constexpr int EXPERT_BLOCKS = 4, EXPERT_BLOCKS_OF_MANY = 3, EXPERT_MANY_RESULTS = 32;  // many: rows times tiles
constexpr int EXPERT_WARPS = 4, EXPERT_THREADS = EXPERT_WARPS * 32, EXPERT_SLOTS = 2, SLOT_BARRIER_BYTES = 8;
// Floats between columns of a quarter's sums: no two lanes of a warp use a bank at once.
constexpr int COLUMN_FLOATS = 20;

// Packed rows of an item from a unit on: column n * 8 + g of the `AT_ONCE` for which there is room belongs to a lane. Columns past the
// last row repeat it, which costs no memory traffic. `k`: a multiple of 32.
template <int NT, int AT_ONCE>
struct RowColumns {
  const __half* at[NT];
  // Not volatile, and no access to memory for the compiler, which would keep it behind the loads of weights. The addresses are known only
  // after the wait for the predecessor, so this load, too, follows it.
  DEVICE uint4 get(int n, int k) const {
    uint4 v;
    asm("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at[n] + AT_ONCE * k));
    return v;
  }
};
struct Maxima {
  const __half* at;
  DEVICE __half operator[](int entry) const { return __ldg(at + entry); }
};
DEVICE uint32_t two_maxima(const Maxima& maxima, int c) { return two_maxima(maxima.at, c); }

// The slots of a warp, each with room for a unit of each of `TILES` tiles, which are filled and read in turn.
#if __CUDA_ARCH__ >= 900
template <int TILES>
struct UnitSlots {
  uint32_t memory, barriers;
  int bytes;  // of a unit
  bool one;
  uint64_t policy;
  Turn fill, use;

  DEVICE UnitSlots(uint8_t* all, const ExpertCall& call, int warp, int lane)
      : memory(shared_address(all) + warp * EXPERT_SLOTS * TILES * call.unit_bytes),
        barriers(shared_address(all) + EXPERT_SLOTS * (EXPERT_WARPS * TILES * call.unit_bytes + warp * SLOT_BARRIER_BYTES)), bytes(call.unit_bytes),
        one(lane == 0), policy(evict_first()) {
    if (one) {
      for (int i = 0; i < EXPERT_SLOTS; i++) barrier_init(barriers + i * SLOT_BARRIER_BYTES, 1);
      barriers_visible();
    }
    __syncwarp();
  }
  // Units of `size` bytes of R tiles, `apart` bytes from one another.
  template <int R>
  DEVICE void copy(const uint8_t* from, uint32_t size, uint32_t apart, int) {
    if (one) {
      const uint32_t full = barriers + fill.slot * SLOT_BARRIER_BYTES;
      barrier_expect(full, R * size);
#pragma unroll
      for (int r = 0; r < R; r++) copy_to_shared(memory + (fill.slot * TILES + r) * bytes, from + r * apart, size, full, policy);
    }
    fill.advance(EXPERT_SLOTS);
  }
  DEVICE void end_request() {}
  // Waits for the unit that is next; the address of its slot.
  DEVICE uint32_t next() {
    const uint32_t found = memory + use.slot * TILES * bytes;
    barrier_wait(barriers + use.slot * SLOT_BARRIER_BYTES, use.phase);
    use.advance(EXPERT_SLOTS);
    return found;
  }
};
#else
template <int TILES>
struct UnitSlots {
  static_assert(TILES == 1);
  uint32_t memory;
  int bytes, fill = 0, use = 0;

  DEVICE UnitSlots(uint8_t* all, const ExpertCall& call, int warp, int)
      : memory(static_cast<uint32_t>(__cvta_generic_to_shared(all)) + warp * EXPERT_SLOTS * call.unit_bytes), bytes(call.unit_bytes) {}
  template <int R>
  DEVICE void copy(const uint8_t* from, uint32_t size, uint32_t, int lane) {
    const uint32_t to = memory + fill * bytes + lane * 16;
    from += lane * 16;
    const int mine = static_cast<int>(size) - lane * 16;
    // Most units have four times 512 bytes and a little more.
#if __CUDA_ARCH__ >= 800
    const auto copy16 = [&](int i) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory"); };
#pragma unroll
    for (int i = 0; i < 2048; i += 512)
      if (i < mine) copy16(i);
#pragma unroll 1
    for (int i = 2048; i < mine; i += 512) copy16(i);
#else
#pragma unroll 1
    for (int i = 0; i < mine; i += 2048) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + 512 * j < mine) v[j] = __ldcs(reinterpret_cast<const uint4*>(from + i + 512 * j));
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + 512 * j < mine)
          asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + i + 512 * j), "r"(v[j].x), "r"(v[j].y), "r"(v[j].z), "r"(v[j].w) : "memory");
    }
#endif
    fill = (fill + 1) % EXPERT_SLOTS;
  }
  // Every request is a group of copies, so that all waits count alike.
  DEVICE void end_request() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  DEVICE uint32_t next() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(EXPERT_SLOTS - 1) : "memory");
#endif
    __syncwarp();
    const uint32_t found = memory + use * bytes;
    use = (use + 1) % EXPERT_SLOTS;
    return found;
  }
};
#endif

// The units of a matrix that a warp multiplies, in the order in which `sum_classes` adds their classes: lane i has the i-th.
struct QuarterUnits {
  uint32_t place;  // offset in the tile and bytes, both in units of 16; the highest bit: the last unit of its class
  uint32_t kind;   // widths, and the unit's number above them
  int count, classes;

  DEVICE void load(const Matrix& a, int quarter, int lane) {
    int unit = -1, at = lane;
    bool last = false;
    count = classes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int c = quarter + (j & 1) * 8 + (j & 2) * 2, size = max(a.unit_count - c + CLASSES - 1, 0) / CLASSES;
      if (unit < 0 && at < size) {
        unit = c + CLASSES * at;
        last = at == size - 1;
      }
      at -= size;
      count += size;
      classes += size != 0;
    }
    place = kind = 0;
    if (unit < 0) return;
    const uint2 found = __ldg(a.units + unit);
    const uint32_t bytes = __ldg(&a.units[unit + 1].x) - found.x;
    place = found.x / 16 | bytes << 12 | static_cast<uint32_t>(last) << 31;
    kind = found.y | unit << WIDTHS_BITS;
  }
};

extern __shared__ __align__(16) uint8_t expert_memory[];

// The state of a block over all of its steps. Shared memory has the slots of each warp, the barriers of slots and sums.
template <int MATS, int NT, int TILES_>
struct ExpertBlock {
  static constexpr int TILES = TILES_;
  // Two buffers of eight columns of a tile, which steps use in turn so that they need one barrier; one of more, for which a step needs two.
  static constexpr int BUFFERS = NT * TILES == 1 ? 2 : 1, QUARTER = 8 * NT * COLUMN_FLOATS, BUFFER = MATS * EXPERT_WARPS * QUARTER;
  const ExpertCall& call;
  int warp, lane;
  UnitSlots<TILES> slots;
  int buffer = 0;

  DEVICE explicit ExpertBlock(const ExpertCall& call)
      : call(call), warp(threadIdx.x / 32), lane(threadIdx.x % 32), slots(expert_memory, call, warp, lane) {}
  DEVICE float* sums(int r, int matrix, int quarter) const {
    float* const all = reinterpret_cast<float*>(expert_memory + EXPERT_WARPS * EXPERT_SLOTS * (TILES * call.unit_bytes + SLOT_BARRIER_BYTES));
    return all + (buffer + r) * BUFFER + (matrix * EXPERT_WARPS + quarter) * QUARTER;
  }
  // One result of tile `r` of a step, rounded to half.
  DEVICE float result(int r, int matrix, const Matrix& a, int row, int column, int feature) const {
    float sum = 0.f;
#pragma unroll
    for (int q = 0; q < EXPERT_WARPS; q++) {
      const float quarter = sums(r, matrix, q)[column * COLUMN_FLOATS + row];
      sum = q == 0 ? quarter : sum + quarter;
    }
    return rounded(finish(sum, 1.f, a.bias ? a.bias[feature] : 0.f, a.prescale), OUT_F16);
  }
};

// An item.
struct ExpertRows {
  const Expert& expert;
  const int* pairs;
  int count;
  size_t column;  // its first one in the packed inputs
};

// Stores the results of a tile, the r-th of a step, whose sums are in shared memory.
template <bool DOWN, class B>
DEVICE void store_tile(const B& block, const ExpertRows& rows, int tile, int r) {
  const ExpertCall& call = block.call;
  const Expert& e = rows.expert;
  __half* const inner = call.inner + rows.column * call.inner_stride;
  for (int i = threadIdx.x; i < TILE * rows.count; i += EXPERT_THREADS) {
    const int row = i % TILE, column = i / TILE, feature = tile * TILE + row;
    if constexpr (DOWN) {
      const size_t pair = rows.pairs[column];
      if (feature < e.down.out_features) call.parts[pair * call.hidden + feature] = __float2half_rn(block.result(r, 0, e.down, row, column, feature));
    } else if (feature < e.gate.out_features) {
      const float gate = block.result(r, 0, e.gate, row, column, feature), up = block.result(r, 1, e.up, row, column, feature);
      const int to = e.down.row_of_feature ? e.down.row_of_feature[feature] : feature;
      inner[packed_at(call.at_once, column, to)] = __float2half_rn(activate(gate, call.activation) * up);
    }
  }
  if constexpr (!DOWN) {
    if (tile == 0 && e.down.rows != e.down.in_features)
      for (int k = threadIdx.x; k < e.down.rows; k += EXPERT_THREADS)
        if (e.down_features[k] < 0)
          for (int column = 0; column < rows.count; column++) inner[packed_at(call.at_once, column, k)] = __half(0.f);
  }
}

// `tiles` row tiles from `first` on, R at a time, for at most 8 * NT rows of an item with room for AT_ONCE.
template <int KIND, int ENTRY, bool DOWN, int NT, int R, int AT_ONCE, class B>
DEVICE void expert_tiles(B& block, const ExpertRows& rows, int first, int tiles) {
  constexpr int MATS = DOWN ? 1 : 2;
  const ExpertCall& call = block.call;
  const int lane = block.lane, g = lane >> 2, t = lane & 3;
  const Matrix* const matrices = DOWN ? &rows.expert.down : &rows.expert.gate;
  QuarterUnits first_units, second_units;
  first_units.load(matrices[0], block.warp, lane);
  if constexpr (MATS == 2) second_units.load(matrices[1], block.warp, lane);
  else second_units = first_units;
  const uint8_t *from = matrices[0].image + (size_t)first * matrices[0].tile_bytes, *from_second = nullptr;
  if constexpr (MATS == 2) from_second = matrices[1].image + (size_t)first * matrices[1].tile_bytes;
  const uint32_t tile_bytes = matrices[0].tile_bytes, tile_bytes_second = matrices[MATS - 1].tile_bytes;
  const __half* row[NT];
  const __half* const x = DOWN ? call.inner + rows.column * call.inner_stride : call.x + rows.column * call.x_stride;
  const size_t up_at = !DOWN && call.inputs > 1 ? (size_t)call.columns * call.x_stride : 0;
#pragma unroll
  for (int n = 0; n < NT; n++) row[n] = x + packed_at(AT_ONCE, min(n * 8 + g, rows.count - 1), 8 * t);

  int left = tiles / R * (first_units.count + (MATS == 2 ? second_units.count : 0)), at = 0;
  bool second_next = MATS == 2 && first_units.count == 0;  // the matrix of the next request
  // Requests the next unit, if there is one.
  const auto request = [&] {
    if (left > 0) {
      left--;
      const uint32_t place = __shfl_sync(~0u, second_next ? second_units.place : first_units.place, at);
      block.slots.template copy<R>((second_next ? from_second : from) + (place & 0xffff) * 16, place >> 16 << 4 & 0x7fff0,
                                   second_next ? tile_bytes_second : tile_bytes, lane);
      if (++at == (second_next ? second_units.count : first_units.count)) {
        at = 0;
        if (MATS == 1) from += R * tile_bytes;
        else if (second_next) from_second += R * tile_bytes_second;
        else from += R * tile_bytes;
        if (MATS == 2 && (second_next ? first_units.count : second_units.count) != 0) second_next = !second_next;
      }
    }
    block.slots.end_request();
  };
#pragma unroll 1
  for (int i = 1; i < EXPERT_SLOTS; i++) request();
  if constexpr (DOWN) {
    pdl_wait();
    // An address that is known only now keeps the loads of rows behind the wait.
#pragma unroll
    for (int n = 0; n < NT; n++) asm volatile("" : "+l"(row[n])::"memory");
  }
#pragma unroll 1
  for (int tile = first; tile < first + tiles; tile += R) {
#pragma unroll 1
    for (int m = 0; m < MATS; m++) {
      const bool second = MATS == 2 && m;
      const __half* const maxima = matrices[m].maxima;
      const int count = second ? second_units.count : first_units.count;
      Sums<NT> total[R], quarter[R];
#pragma unroll
      for (int r = 0; r < R; r++) {
        clear(total[r]);
        // A negative zero: adding to it changes nothing.
#pragma unroll
        for (int n = 0; n < NT; n++) quarter[r][n][0] = quarter[r][n][1] = quarter[r][n][2] = quarter[r][n][3] = -0.f;
      }
#pragma unroll 1
      for (int i = 0; i < count; i++) {
        request();
        const uint32_t place = __shfl_sync(~0u, second ? second_units.place : first_units.place, i);
        const uint32_t kind = __shfl_sync(~0u, second ? second_units.kind : first_units.kind, i);
        const int u = kind >> WIDTHS_BITS;
        RowColumns<NT, AT_ONCE> columns;
#pragma unroll
        for (int n = 0; n < NT; n++) columns.at[n] = row[n] + (second ? up_at : 0) + packed_at(AT_ONCE, 0, u * UNIT_ROWS);
        SharedBytes weights[R];
        weights[0] = {block.slots.next()};
#pragma unroll
        for (int r = 1; r < R; r++) weights[r] = weights[0] + r * call.unit_bytes;
        UnitMatmul<KIND, ENTRY, NT, R, SharedBytes, RowColumns<NT, AT_ONCE>, Maxima> product{
            weights, columns, {maxima + u * (UNIT_ROWS / ENTRY)}, total, lane, {}};
        product.run(kind & WIDTHS_MASK);
        if (place >> 31) {
#pragma unroll
          for (int r = 0; r < R; r++) {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int j = 0; j < 4; j++) quarter[r][n][j] += total[r][n][j];
            clear(total[r]);
          }
        }
        __syncwarp();  // before the next copy into this slot
      }
      const bool whole = (second ? second_units.classes : first_units.classes) == 4;
#pragma unroll
      for (int r = 0; r < R; r++) {
        float* const to = block.sums(r, m, block.warp);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            // Classes without units are zeros.
            const float v = whole ? quarter[r][n][j] : quarter[r][n][j] + 0.f;
            to[(n * 8 + 2 * t + j % 2) * COLUMN_FLOATS + g + j / 2 * 8] = v;
          }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < R; r++) store_tile<DOWN>(block, rows, tile + r, r);
    if constexpr (B::BUFFERS == 2) block.buffer ^= 1;
    else __syncthreads();
  }
}

// Steps `step` to `end` of the items from `items` on, which have at most 8 * NT rows.
template <int KIND, int ENTRY, bool DOWN, int NT, int AT_ONCE, class B>
DEVICE void expert_steps(B& block, const int4* items, int step, int end) {
  const ExpertCall& call = block.call;
#pragma unroll 1
  for (int some; step < end; step += some) {
    const int item = step / call.tiles, first = step - item * call.tiles;
    const int4 found = __ldcg(items + item);  // see expert_product
    const ExpertRows rows{call.experts[found.x], call.order + found.y, found.z, column_of(call, found.x, found.y)};
    some = min(end - step, call.tiles - first);
    const int together = some / B::TILES * B::TILES;
    if (together) expert_tiles<KIND, ENTRY, DOWN, NT, B::TILES, AT_ONCE>(block, rows, first, together);
    if constexpr (B::TILES > 1)
      if (some > together) expert_tiles<KIND, ENTRY, DOWN, NT, 1, AT_ONCE>(block, rows, first + together, some - together);
  }
}

// The times of a step of half the columns and of one of all, relative to one another, by measurement on an H200.
template <int TILES>
constexpr int NARROW_COST = TILES == 1 ? 5 : 4;
template <int TILES>
constexpr int WIDE_COST = TILES == 1 ? 8 : 5;

template <int KIND, int ENTRY, bool DOWN, int TILES, int ROWS>
DEVICE void expert_product(const ExpertCall& call) {
  // Down reads the tables of items before it waits: gate and up, the launch directly before it, let it begin only when these are complete.
  // It reads them from L2, since L1 may have lines of the layer before.
  if constexpr (!DOWN) pdl_wait();
  pdl_trigger();
  ExpertBlock<DOWN ? 1 : 2, ROWS / 8, TILES> block(call);
  const int2 items = __ldcg(reinterpret_cast<const int2*>(call.item_counts));
  if constexpr (ROWS == 8) {
    const uint64_t steps = (uint64_t)items.y * call.tiles;
    expert_steps<KIND, ENTRY, DOWN, 1, 8>(block, call.items, static_cast<int>(steps * blockIdx.x / gridDim.x),
                                          static_cast<int>(steps * (blockIdx.x + 1) / gridDim.x));
  } else {
    // A block has an equal share of the cost of all steps, of which those that begin in it are its own.
    constexpr int EACH = NARROW_COST<TILES>, EACH_WIDE = WIDE_COST<TILES>;
    const int wide = items.x * call.tiles, narrow = items.y * call.tiles, wide_cost = wide * EACH_WIDE;
    const uint64_t cost = (uint64_t)wide_cost + narrow * EACH;
    const int begin = static_cast<int>(cost * blockIdx.x / gridDim.x), end = static_cast<int>(cost * (blockIdx.x + 1) / gridDim.x);
    const auto wide_step = [&](int at) { return min((at + EACH_WIDE - 1) / EACH_WIDE, wide); };
    const auto narrow_step = [&](int at) { return (max(at - wide_cost, 0) + EACH - 1) / EACH; };
    expert_steps<KIND, ENTRY, DOWN, ROWS / 8, ROWS>(block, call.items, wide_step(begin), wide_step(end));
    expert_steps<KIND, ENTRY, DOWN, ROWS / 16, ROWS>(block, call.items + items.x, narrow_step(begin), narrow_step(end));
  }
  if constexpr (DOWN) pdl_wait();  // also of a block without steps: later launches count on all before this one
}

#define EXPERT_MATMUL(part, KIND, kind, ENTRY, DOWN, TILES, ROWS, name)                                                                      \
  extern "C" __global__ void __launch_bounds__(EXPERT_THREADS, TILES * ROWS >= EXPERT_MANY_RESULTS ? EXPERT_BLOCKS_OF_MANY : EXPERT_BLOCKS)  \
      experts_##part##_##kind##_##ENTRY##_##name(const __grid_constant__ ExpertCall call) {                                                  \
    expert_product<KIND, ENTRY, DOWN, TILES, ROWS>(call);                                                                                    \
  }
#define EXPERT_MATMULS(KIND, kind, ENTRY)                    \
  EXPERT_MATMUL(gate_up, KIND, kind, ENTRY, false, 1, 8, 8)  \
  EXPERT_MATMUL(gate_up, KIND, kind, ENTRY, false, 1, 16, 16) \
  EXPERT_MATMUL(gate_up, KIND, kind, ENTRY, false, 1, 32, 32) \
  EXPERT_MATMUL(down, KIND, kind, ENTRY, true, 1, 8, 8)      \
  EXPERT_MATMUL(down, KIND, kind, ENTRY, true, 1, 16, 16)    \
  EXPERT_MATMUL(down, KIND, kind, ENTRY, true, 1, 32, 32)
// Two tiles at a time.
#define EXPERT_MATMULS_OF_PAIRS(KIND, kind, ENTRY)              \
  EXPERT_MATMUL(gate_up, KIND, kind, ENTRY, false, 2, 8, 2x8)   \
  EXPERT_MATMUL(gate_up, KIND, kind, ENTRY, false, 2, 16, 2x16) \
  EXPERT_MATMUL(down, KIND, kind, ENTRY, true, 2, 8, 2x8)       \
  EXPERT_MATMUL(down, KIND, kind, ENTRY, true, 2, 16, 2x16)
