// Parameters of the ring kernel (ring.cuh), and the division of work among its blocks and warps.
#pragma once
#include "common/abi.cuh"
#include "common/pipeline.cuh"
#include "linear/tile_layout.cuh"

constexpr int CONSUMERS = 16, RING_THREADS = CONSUMERS * 32 + 64, RESULT_BUFFERS = 4;
constexpr int MATRICES = 3, MOST_STAGES = 32;
// Two of an SM's quarters hold five of these warps, and then 72 registers a lane of one more warp: a block of attention (attention_few.cuh)
// that runs beside the matmul before it.
constexpr int RING_REGISTERS = 88;
// Bytes of a block's shared memory that the host leaves to static arrays, without and with adapters; ring.cuh adds them up.
constexpr int RING_STATIC = 1024, RING_STATIC_ADAPTED = 2048;

// One matrix of a matmul. Offsets are bytes in shared memory.
struct Part {
  Matrix a;
  uint32_t units_at, maxima_at, x_at;
  int stages;
  int order;  // the first matrix with the same order of rows, whose x_at this one shares
  int y_offset;
};
ABI_SIZE(Part, 96); ABI_AT(Part, a, 0); ABI_AT(Part, units_at, 72); ABI_AT(Part, maxima_at, 76); ABI_AT(Part, x_at, 80);
ABI_AT(Part, stages, 84); ABI_AT(Part, order, 88); ABI_AT(Part, y_offset, 92);

enum { KEEP = 1, PADDED = 2, ROW = 4, LAYER = 8, FILLS = 8 };
// The parameters of a launch, computed by the host; the same struct as `ops::linear::ring::Task`. The fields that the streaming thread
// reads come first.
struct Task {
  uint32_t barriers_at, stage_stride;
  int slots, window, count;
  // A block's tiles (pairs of them if gated), and the number of blocks with one more.
  int tiles, longer;
  int gate;  // as in gate.cuh
  uint32_t results_at, multipliers_at, x_stride;
  uint32_t gates_at;  // gates of a pair or (KEEP) of all pairs of a block, two rows by 16 features each
  // KEEP: a warp keeps its class over tiles. PADDED: some rows hold no feature. ROW: one row of halves without a norm, in one order, short
  // enough for `fill_row`. LAYER: the norm is a LayerNorm. From bit FILLS on: the matrices whose `order` is their own index.
  int flags;
  int m, columns;  // columns: m rounded up to even
  int x_kind, y_kind, y_stride;
  float eps, offset;
  const void* x;
  void* y;
  const void* residual;  // of the same form as y; null if there is none
  const float4* norm;    // weight of a norm of x; null if there is none
  const float4* norm_bias;  // of a LayerNorm; null if there is none
  Part part[MATRICES];
  uint32_t stage_begin[MATRICES][MOST_STAGES + 1];  // bytes within a tile
};
ABI_SIZE(Task, 808); ABI_AT(Task, barriers_at, 0); ABI_AT(Task, stage_stride, 4); ABI_AT(Task, slots, 8); ABI_AT(Task, window, 12);
ABI_AT(Task, count, 16); ABI_AT(Task, tiles, 20); ABI_AT(Task, longer, 24); ABI_AT(Task, gate, 28); ABI_AT(Task, results_at, 32);
ABI_AT(Task, multipliers_at, 36); ABI_AT(Task, x_stride, 40); ABI_AT(Task, gates_at, 44); ABI_AT(Task, flags, 48); ABI_AT(Task, m, 52);
ABI_AT(Task, columns, 56); ABI_AT(Task, x_kind, 60); ABI_AT(Task, y_kind, 64); ABI_AT(Task, y_stride, 68); ABI_AT(Task, eps, 72);
ABI_AT(Task, offset, 76); ABI_AT(Task, x, 80); ABI_AT(Task, y, 88); ABI_AT(Task, residual, 96); ABI_AT(Task, norm, 104);
ABI_AT(Task, norm_bias, 112); ABI_AT(Task, part, 120); ABI_AT(Task, stage_begin, 408);

#if __CUDA_ARCH__ >= 900
struct SharedColumns {
  uint32_t at;
  DEVICE uint4 get(int, int k) const { return SharedBytes{at}.get16(k * 2); }
};

// Barriers of the ring, set up in groups of four, and of the result buffers.
struct Barriers {
  uint32_t full, empty, ready, free;
  DEVICE Barriers(const Task& p, uint32_t base)
      : full(base + p.barriers_at), empty(full + fours(p.slots) * 8), ready(empty + fours(p.slots) * 8), free(ready + RESULT_BUFFERS * 8) {}
  DEVICE static int fours(int slots) { return slots + 3 & ~3; }
};
// Sets up the barriers from `from` up to `to`, four at a time: each group costs a fence.
DEVICE void set_up(uint32_t barriers, int from, int to, int arrivals) {
#pragma unroll 1
  for (int i = from; i < to; i += 4) {
#pragma unroll
    for (int j = 0; j < 4; j++) barrier_init(barriers + (i + j) * 8, arrivals);
  }
}

// A launch's parameters reach an SM one line at a time, each with the latency of L2: all consumer warps request different lines at once.
using Touched = int[CONSUMERS];
DEVICE void touch_parameters(const Task& p) {
  __shared__ Touched touched;
  constexpr int WORDS = sizeof(Task) / 4;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 != 0) return;
  int v = 0;
  for (int i = warp * 16 + 4; i < WORDS; i += CONSUMERS * 16) v += reinterpret_cast<const int*>(&p)[i];
  touched[warp] = v;
}

// The tiles of this block in sequence.
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
    if (p.gate >= 0 && p.flags & KEEP) {
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
  // The number of consecutive tiles of the matrix found, if warps keep their class.
  DEVICE int rest(const Task& p, int matrix, int tile) const {
    if (p.gate >= 0) return matrix ? end - at : end - half - at;
    return min(end - at, p.part[matrix].a.tiles - tile);
  }
};
#endif
