// Parameters of the warp ring kernel (warp_ring.cuh), and the division of work among its blocks, teams and warps.
#pragma once
#include "common/abi.cuh"
#include "linear/tile.cuh"

constexpr int TEAM = 4, TEAM_THREADS = TEAM * 32;  // the warps of a tile
constexpr int MOST_TEAMS = 4, WARP_RING_THREADS = MOST_TEAMS * TEAM_THREADS;
constexpr int WARP_MATRICES = 3, WARP_ROWS = 8;
constexpr int RESULT_ROW = 20;  // floats of an activation row of partial sums: 16 features, without bank conflicts
constexpr int PACKED_SLICE = 512;  // bytes of 32 values of K of eight rows in the layout of prepared.cuh

// One matrix of a launch. Offsets are bytes in shared memory.
struct WarpPart {
  Matrix a;
  uint32_t list_at;  // its units in the order of the warps: `Entry`
  uint32_t maxima_at, x_at;
  int order;  // the first matrix with the same order of rows, whose activations this one shares
  int copy;   // which of the packed copies of x
  int y_offset;
};
ABI_SIZE(WarpPart, 96); ABI_AT(WarpPart, a, 0); ABI_AT(WarpPart, list_at, 72); ABI_AT(WarpPart, maxima_at, 76);
ABI_AT(WarpPart, x_at, 80); ABI_AT(WarpPart, order, 84); ABI_AT(WarpPart, copy, 88); ABI_AT(WarpPart, y_offset, 92);

// The same struct as `ops::linear::warps::Task`.
struct WarpTask {
  uint32_t rings_at, slot_bytes;
  int stages, teams;
  int phases;  // 1: a block has all activations at once; 4: those of a quarter of K after the other
  int count;
  int tiles, longer;  // a block's tiles (pairs of them if gated), and the number of blocks with one more
  int gate;           // activation of the first of two matrices, which gates the second, or -1
  uint32_t results_at, carries_at, rows_at;
  int m, k, units;    // units: the most of any matrix
  int padded;         // some rows of a layout hold no feature
  int packed;         // x is packed as for few.cuh; otherwise it is [m, k]
  int x_kind, y_kind, y_stride, scaled;
  float eps, offset;
  int reserved;
  size_t copy_bytes;         // of a packed copy
  const void* x;
  const float* multipliers;  // [m] if packed and scaled
  const float* norm;         // weight of an RMS norm of x; of packed rows plus offset and in their order; null if there is none
  const float* squares;      // of packed rows with a norm: sums of squares, as in few_task.cuh
  void* y;                   // null if only `next` is wanted
  const void* residual;      // of the same form as y; null if there is none
  // The results as the packed input of another launch, and their sums of squares; null if not wanted.
  uint8_t* next;
  const uint16_t* next_rows;  // null if rows are in the features' order
  float* next_squares;
  WarpPart part[WARP_MATRICES];
};
ABI_SIZE(WarpTask, 464); ABI_AT(WarpTask, rings_at, 0); ABI_AT(WarpTask, slot_bytes, 4); ABI_AT(WarpTask, stages, 8);
ABI_AT(WarpTask, teams, 12); ABI_AT(WarpTask, phases, 16); ABI_AT(WarpTask, count, 20); ABI_AT(WarpTask, tiles, 24);
ABI_AT(WarpTask, longer, 28); ABI_AT(WarpTask, gate, 32); ABI_AT(WarpTask, results_at, 36); ABI_AT(WarpTask, carries_at, 40);
ABI_AT(WarpTask, rows_at, 44); ABI_AT(WarpTask, m, 48); ABI_AT(WarpTask, k, 52); ABI_AT(WarpTask, units, 56);
ABI_AT(WarpTask, padded, 60); ABI_AT(WarpTask, packed, 64); ABI_AT(WarpTask, x_kind, 68); ABI_AT(WarpTask, y_kind, 72);
ABI_AT(WarpTask, y_stride, 76); ABI_AT(WarpTask, scaled, 80); ABI_AT(WarpTask, eps, 84); ABI_AT(WarpTask, offset, 88);
ABI_AT(WarpTask, reserved, 92); ABI_AT(WarpTask, copy_bytes, 96); ABI_AT(WarpTask, x, 104); ABI_AT(WarpTask, multipliers, 112);
ABI_AT(WarpTask, norm, 120); ABI_AT(WarpTask, squares, 128); ABI_AT(WarpTask, y, 136); ABI_AT(WarpTask, residual, 144);
ABI_AT(WarpTask, next, 152); ABI_AT(WarpTask, next_rows, 160); ABI_AT(WarpTask, next_squares, 168); ABI_AT(WarpTask, part, 176);

// Newer code has copies that need no threads (ring.cuh, few.cuh), older code has none.
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
DEVICE void copy16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` groups of this thread's copies are in flight.
template <int PENDING>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
DEVICE void wait_copies(int pending) {
  if (pending == 2) wait_copies<2>();
  else if (pending == 1) wait_copies<1>();
  else wait_copies<0>();
}
DEVICE void team_barrier(int team) { asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM_THREADS) : "memory"); }

// A unit in the list of a warp.
struct Entry {
  uint32_t offset;  // in the tile
  uint32_t sizes;   // 16-byte words of the unit; offset of its scales, in the halves of a word
  uint32_t widths;
  uint32_t unit;    // and, in the highest bit, whether it is the last of its class
  DEVICE static Entry at(uint32_t place) {
    const uint4 v = SharedBytes{place}.get16(0);
    return {v.x, v.y, v.z, v.w};
  }
  DEVICE int index() const { return static_cast<int>(unit & 0x7fffffff); }
  DEVICE bool last() const { return unit >> 31; }
};

// The lists of a matrix's units. With one phase, warp `role` of a team has a quarter of K, class by class in the order of `sum_classes`. With
// four, phase j is quarter j, of which each warp has one class. Lists have equal room.
struct Lists {
  int units;
  bool whole;
  DEVICE Lists(const WarpTask& p, const Matrix& a) : units(a.unit_count), whole(p.phases == 1) {}
  DEVICE static int class_of(int quarter, int number) { return quarter + ((number & 1) << 3) + ((number & 2) << 1); }
  DEVICE int count(int cls) const { return (units - cls + CLASSES - 1) >> 4; }
  DEVICE int room() const { return whole ? (units + 3) >> 2 : (units + CLASSES - 1) >> 4; }
  DEVICE int size(int phase, int role) const { return whole ? (units - role + 3) >> 2 : max(count(class_of(phase, role)), 0); }
  DEVICE int begin(int phase, int role) const { return (phase * TEAM + role) * room(); }
  // Place of unit u.
  DEVICE int place(int u) const {
    const int cls = u & 15, quarter = cls & 3, number = (cls >> 3) | (cls >> 1 & 2);
    if (!whole) return begin(quarter, number) + (u >> 4);
    int before = 0;
    for (int i = 0; i < number; i++) before += max(count(class_of(quarter, i)), 0);
    return begin(0, quarter) + before + (u >> 4);
  }
};

// The tiles of a team in sequence, once in each phase. Of a gated pair the gate's tile comes first.
struct Steps {
  const WarpTask& p;
  int first, end, start;  // of the block; of the team
  int phase = 0, at, half = 0;
  DEVICE Steps(const WarpTask& p, int team) : p(p) {
    const int block = blockIdx.x;
    first = block * p.tiles + min(block, p.longer);
    end = first + p.tiles + (block < p.longer);
    start = at = first + team;
    if (start >= end) phase = p.phases;
  }
  DEVICE bool more() const { return phase < p.phases; }
  DEVICE void advance() {
    if (p.gate >= 0 && half == 0) {
      half = 1;
      return;
    }
    half = 0;
    at += p.teams;
    if (at < end) return;
    at = start;
    phase++;
  }
  DEVICE void find(int& matrix, int& tile) const {
    matrix = half;
    tile = at;
    if (p.gate >= 0) return;
#pragma unroll 1
    while (matrix + 1 < p.count && tile >= p.part[matrix].a.tiles) tile -= p.part[matrix++].a.tiles;
  }
  // The tile's number among those of the block.
  DEVICE int number() const { return p.gate >= 0 ? 2 * (at - first) + half : at - first; }
};

// The values of each activation row that the prologue computes.
struct RowValues {
  float parts[WARP_ROWS][8], scale[WARP_ROWS], factor[WARP_ROWS], multiplier[WARP_ROWS];
};
#endif
