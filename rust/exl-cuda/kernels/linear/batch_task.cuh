// Parameters of the kernels of 9 to 128 rows (batch.cuh), and the division of work among their blocks.
#pragma once
#include "common/abi.cuh"
#include "common/pipeline.cuh"
#include "linear/tile_layout.cuh"

constexpr int QUARTERS = 4, ITEM_TILES = 4, ITEM_ROWS = ITEM_TILES * TILE, BATCH_MATRICES = 3;
// Columns of the launches of which the last round may be spread over all blocks.
constexpr int SPREAD_COLUMNS = 32;
// Most columns whose activations are in the stages of the weights.
constexpr int STAGED_COLUMNS = 64;

// One matrix of a launch.
struct BatchPart {
  Matrix a;
  int y_offset, first_item;  // column in y; items are counted over all matrices of the launch
  uint32_t units_at, padding;
};
ABI_SIZE(BatchPart, 88); ABI_AT(BatchPart, a, 0); ABI_AT(BatchPart, y_offset, 72); ABI_AT(BatchPart, first_item, 76);
ABI_AT(BatchPart, units_at, 80); ABI_AT(BatchPart, padding, 84);

// The same struct as `ops::linear::batch::Task`. Offsets are bytes in shared memory.
struct BatchTask {
  const uint8_t* x;  // packed
  const float* multipliers;
  float4* sums;   // [items][tile][quarter][N / 8][lane], if K is cut: a thread's sums of eight activation rows
  int* arrivals;  // [blocks of a quarter], all ones before and after, like the sums, if K is cut
  void* y;
  int count, items, m, y_kind, y_stride;
  int paired;            // whether results can be stored in pairs
  int groups, scaled;    // warpgroups of a block that work; whether any multiplier differs from one
  int slots, resident;   // stages of the ring; whether activations stay in shared memory
  uint32_t stage_stride, unit_room;
  uint32_t ring_at, x_at, barriers_at, numbered_at, sums_at;
  int cut;   // blocks that share K: 1 or QUARTERS
  int looks;  // how often a block polls whether the others have started
  int gate;  // activation of the first of two matrices, which gates the second one feature by feature, or -1; K is then not cut
  int left;  // batch_whole.cuh: number of the last items, of which blocks first process a quarter of K each
  // A block takes shares of `groups` items (of gated pairs, half as many) with numbers `gridDim.x` apart, or a quarter of that. The shares
  // from number `full` on have `last_items` items at most: what is left for the last round is spread over all blocks, up to SPREAD_COLUMNS.
  int shares, full, last_items;
  int half_slots;  // slots of half units of activations at `x_at`, if these have a ring of their own: at more than 64 columns
  const void* residual;  // added to y and of the same form; null if there is none
  // If gated results go to the next matmul instead of y: its input, of as many columns, and the rows of its layout.
  uint8_t* into;
  const uint16_t* into_rows;  // null if rows are in the features' order
  BatchPart part[BATCH_MATRICES];
};
ABI_SIZE(BatchTask, 432); ABI_AT(BatchTask, x, 0); ABI_AT(BatchTask, multipliers, 8); ABI_AT(BatchTask, sums, 16);
ABI_AT(BatchTask, arrivals, 24); ABI_AT(BatchTask, y, 32); ABI_AT(BatchTask, count, 40); ABI_AT(BatchTask, items, 44);
ABI_AT(BatchTask, m, 48); ABI_AT(BatchTask, y_kind, 52); ABI_AT(BatchTask, y_stride, 56); ABI_AT(BatchTask, paired, 60);
ABI_AT(BatchTask, groups, 64); ABI_AT(BatchTask, scaled, 68); ABI_AT(BatchTask, slots, 72); ABI_AT(BatchTask, resident, 76);
ABI_AT(BatchTask, stage_stride, 80); ABI_AT(BatchTask, unit_room, 84); ABI_AT(BatchTask, ring_at, 88); ABI_AT(BatchTask, x_at, 92);
ABI_AT(BatchTask, barriers_at, 96); ABI_AT(BatchTask, numbered_at, 100); ABI_AT(BatchTask, sums_at, 104); ABI_AT(BatchTask, cut, 108);
ABI_AT(BatchTask, looks, 112); ABI_AT(BatchTask, gate, 116); ABI_AT(BatchTask, left, 120); ABI_AT(BatchTask, shares, 124);
ABI_AT(BatchTask, full, 128); ABI_AT(BatchTask, last_items, 132); ABI_AT(BatchTask, half_slots, 136); ABI_AT(BatchTask, residual, 144);
ABI_AT(BatchTask, into, 152); ABI_AT(BatchTask, into_rows, 160); ABI_AT(BatchTask, part, 168);

#if __CUDA_ARCH__ >= 800
// A block's units in order: quarter after quarter, and in each the classes j, j + 8, j + 4, j + 12.
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

// The position of a block and its work.
struct BatchBlock {
  const BatchTask& p;
  uint8_t* const memory;
  const uint32_t base, full, empty, present;  // the dynamic shared memory; barriers of the ring's slots and of resident activations
  const int step, first;  // blocks of a quarter; number of this block's first item, in whole blocks
  const Order order;
  const int own;  // number of units

  DEVICE BatchBlock(const BatchTask& p, uint8_t* memory)
      : p(p),
        memory(memory),
        base(static_cast<uint32_t>(__cvta_generic_to_shared(memory))),
        full(base + p.barriers_at),
        empty(full + p.slots * 8),
        present(empty + p.slots * 8),
        step(p.cut == 1 ? gridDim.x : gridDim.x / QUARTERS),
        first(p.cut == 1 ? blockIdx.x : blockIdx.x / QUARTERS),
        order{p.cut == 1 ? 0 : static_cast<int>(blockIdx.x % QUARTERS), p.cut == 1 ? QUARTERS : 1, p.part[0].a.unit_count},
        own(order.own()) {}

  // The work of a warpgroup: a matrix and the first of four tiles. For gated matrices, half of the warpgroups take each matrix, the same
  // tiles.
  struct Place {
    int matrix, tile, item;
    bool some;
  };
  DEVICE bool gated() const { return p.gate >= 0; }
  DEVICE int per_block() const { return gated() ? p.groups / 2 : p.groups; }
  // If all shares but the last have `groups` items.
  DEVICE Place even_place(int block, int group) const {
    if (!gated()) return item_place(block * p.groups + group);
    const int each = per_block(), second = group >= each, item = block * each + group - (second ? each : 0);
    return {second, item * ITEM_TILES, item, item < p.items};
  }
  // If the last round is spread over all blocks.
  DEVICE Place spread_place(int block, int group) const {
    const int each = per_block(), second = gated() && group >= each, within = group - (second ? each : 0), after = max(block - p.full, 0);
    const int item = min(block, p.full) * each + after * p.last_items + within;
    const bool some = item < p.items && (block < p.full || within < p.last_items);
    if (gated()) return {second, item * ITEM_TILES, item, some};
    Place here = item_place(item);
    here.some = some;
    return here;
  }
  DEVICE Place item_place(int item) const {
    int matrix = 0;
    while (matrix + 1 < p.count && item >= p.part[matrix + 1].first_item) matrix++;
    return {matrix, (item - p.part[matrix].first_item) * ITEM_TILES, item, item < p.items};
  }
};
#endif
