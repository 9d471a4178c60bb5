// Parameters of the kernel of 3 to 8 rows (few.cuh), and the division of work among its blocks and warps.
#pragma once
#include "common/abi.cuh"
#include "common/pipeline.cuh"
#include "linear/gate.cuh"
#include "linear/tile_layout.cuh"

// Two of an SM's quarters hold five of these warps, and then 72 registers a lane of one more warp: a block of attention
// (attention_few.cuh). A fifth warp in every quarter leaves the same room. Each finisher has its own result buffers: a finisher that
// skipped the iterations of others could read a buffer's barrier in the phase before the last.
constexpr int MULTIPLIERS = 16, FINISHERS = 3, FEW_THREADS = (MULTIPLIERS + 1 + FINISHERS) * 32, FEW_REGISTERS = 88;
constexpr int FEW_MATRICES = 3, FEW_LISTED = 80, X_BYTES = 4096;  // of a unit: eight activation rows in the layout of prepared.cuh

// One matrix of a launch. Offsets are bytes in shared memory.
struct FewPart {
  Matrix a;
  uint32_t pieces_at;  // for each piece of a stage: {offset in the tile, bytes, offset in the slot}
  uint32_t units_at;   // for each unit: {offset in the slot, offset of its scales, in the halves of a word; widths}
  uint32_t maxima_at, x_at;
  int copy;  // which of the packed copies of x
  int y_offset;
  int listed;  // index of its first unit in `units_listed`; -1 if its units are not listed
};
ABI_SIZE(FewPart, 104); ABI_AT(FewPart, a, 0); ABI_AT(FewPart, pieces_at, 72); ABI_AT(FewPart, units_at, 76);
ABI_AT(FewPart, maxima_at, 80); ABI_AT(FewPart, x_at, 84); ABI_AT(FewPart, copy, 88); ABI_AT(FewPart, y_offset, 92);
ABI_AT(FewPart, listed, 96);

// The same struct as `ops::linear::few::Task`.
struct FewTask {
  uint32_t barriers_at, stage_stride;
  int slots, window, count, cut;
  int units, stages;    // the most units of any matrix; stages of an iteration
  int stage_log;        // units of a tile in a stage, as a power of two
  // Of a group of blocks (pairs of iterations if tiles of two matrices alternate), and the number of groups with one more
  int rounds, longer;
  int tiles;            // of all matrices
  int gate;             // as in gate.cuh
  uint32_t results_at, places_at, exchange_at;  // exchange buffers, or gates of a block's tiles: 512 bytes each
  int exchanges;        // tiles or gated pairs that arrive in exchange buffers
  int m, y_kind, y_stride, scaled, copies;
  int class_step;       // from a warp's class in an iteration to that in the next one
  int stay;             // consecutive iterations in which a warp may keep its class, if a tile has two stages of eight units
  // Stages of the first pass over the tiles. A second pass does the rest of K where there is no room for all of a block's activations:
  // they take the place of the first ones, and sums wait in the result buffers. All stages if there is one pass.
  int first_stages;
  size_t copy_bytes;
  const uint8_t* x;          // packed: copies, each [units][X_BYTES]
  const float* multipliers;  // [m] when scaled
  // An RMS norm of x, which is packed before the norm: weight plus offset, in the order of x, [units][256]; null if there is none.
  const float* norm;
  const float* squares;  // [k / 8][8] sums of squares of eight features of a row
  float eps;
  int k;
  void* y;               // null if only `next` is wanted
  const void* residual;  // of the same form as y; null if there is none
  // The results as the packed input of another launch, and their sums of squares; null if not wanted.
  uint8_t* next;
  const uint16_t* next_rows;  // null if rows are in the features' order
  float* next_squares;
  uint32_t units_listed[FEW_LISTED];  // {offset / 16, widths} in a word, with each matrix's end
  FewPart part[FEW_MATRICES];
};
ABI_SIZE(FewTask, 824); ABI_AT(FewTask, barriers_at, 0); ABI_AT(FewTask, stage_stride, 4); ABI_AT(FewTask, slots, 8);
ABI_AT(FewTask, window, 12); ABI_AT(FewTask, count, 16); ABI_AT(FewTask, cut, 20); ABI_AT(FewTask, units, 24);
ABI_AT(FewTask, stages, 28); ABI_AT(FewTask, stage_log, 32); ABI_AT(FewTask, rounds, 36); ABI_AT(FewTask, longer, 40);
ABI_AT(FewTask, tiles, 44); ABI_AT(FewTask, gate, 48); ABI_AT(FewTask, results_at, 52); ABI_AT(FewTask, places_at, 56);
ABI_AT(FewTask, exchange_at, 60); ABI_AT(FewTask, exchanges, 64); ABI_AT(FewTask, m, 68); ABI_AT(FewTask, y_kind, 72);
ABI_AT(FewTask, y_stride, 76); ABI_AT(FewTask, scaled, 80); ABI_AT(FewTask, copies, 84); ABI_AT(FewTask, class_step, 88);
ABI_AT(FewTask, stay, 92); ABI_AT(FewTask, first_stages, 96); ABI_AT(FewTask, copy_bytes, 104); ABI_AT(FewTask, x, 112);
ABI_AT(FewTask, multipliers, 120); ABI_AT(FewTask, norm, 128); ABI_AT(FewTask, squares, 136); ABI_AT(FewTask, eps, 144);
ABI_AT(FewTask, k, 148); ABI_AT(FewTask, y, 152); ABI_AT(FewTask, residual, 160); ABI_AT(FewTask, next, 168);
ABI_AT(FewTask, next_rows, 176); ABI_AT(FewTask, next_squares, 184); ABI_AT(FewTask, units_listed, 192); ABI_AT(FewTask, part, 512);

#if __CUDA_ARCH__ >= 900
// {offset in the tile, widths} of a unit, or of the end of the last one. Parameters arrive one latency of L2 before the memory that they
// point to.
DEVICE uint2 few_unit(const FewTask& p, const FewPart& part, int u) {
  u = min(u, part.a.unit_count);
  if (part.listed < 0) return __ldg(&part.a.units[u]);
  const uint32_t unit = p.units_listed[part.listed + u];
  constexpr uint32_t OFFSET_BITS = 32 - WIDTHS_BITS;
  return make_uint2((unit & (1u << OFFSET_BITS) - 1) * 16, unit >> OFFSET_BITS);
}

// How K is cut: a block has 16 / cut classes of each of the `cut` tiles of an iteration. A quarter has every fourth unit. A block has
// `quarters` quarters, and its units are in their order.
struct Cut {
  int log, rank, stage_log;
  DEVICE Cut(const FewTask& p) : log(p.cut >> 1), rank(p.cut > 1 ? blockIdx.z : 0), stage_log(p.stage_log) {}
  DEVICE int quarters() const { return 4 >> log; }
  DEVICE int classes() const { return MULTIPLIERS >> log; }
  DEVICE int unit(int local) const { return local >> (2 - log) << 2 | rank << (2 - log) | (local & (quarters() - 1)); }
  // The number of this block's units among the first `all` units; they are the first ones in its order.
  DEVICE int units(int all) const { return all / 4 * quarters() + min(max(all % 4 - rank * quarters(), 0), quarters()); }
  // Units in a piece, which are contiguous in the tile, and pieces of a tile in a stage.
  DEVICE int piece_log() const { return log ? 2 - log : stage_log; }
  DEVICE int pieces_log() const { return stage_log - piece_log(); }
};

// The iterations of this group of blocks, by number. For gated pairs with whole K, first the gates of all and then the tiles that they
// gate.
struct FewWalk {
  int first, dealt, rounds;
  DEVICE FewWalk(const FewTask& p) {
    const int group = blockIdx.x;
    first = group * p.rounds + min(group, p.longer);
    dealt = p.rounds + (group < p.longer);
    rounds = p.gate >= 0 && p.cut == 1 ? 2 * dealt : dealt;
  }
  // Finds the tile of an iteration at this place; returns whether there is one.
  DEVICE bool find(const FewTask& p, int round, int place, int& matrix, int& tile) const {
    if (rounds != dealt) {
      matrix = round >= dealt;
      tile = first + round - (matrix ? dealt : 0);
      return true;
    }
    const int flat = (first + round) * p.cut + place;
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
  // The finisher of an iteration: a gate and the tile that it gates have the same one.
  DEVICE int finisher(int round) const { return (round >= dealt ? round - dealt : round) % FINISHERS; }
};

// The kernels have two forms. The GENERAL one also walks its tiles twice and activates results that gate nothing: where a launch needs
// neither, it takes the other one, whose loops and epilogue are shorter.
template <bool GENERAL>
DEVICE bool walks_twice(const FewTask& p) {
  if constexpr (GENERAL) return p.first_stages < p.stages;
  return false;
}
template <bool GENERAL>
DEVICE bool activates(const FewTask& p) {
  if constexpr (GENERAL) return p.gate < NO_GATE;
  return false;
}

// The stages of a pass.
template <bool GENERAL>
struct Pass {
  int begin, end;
  DEVICE Pass(const FewTask& p, int number) : begin(0), end(p.stages) {
    if constexpr (GENERAL) {
      begin = number ? p.first_stages : 0;
      if (!number) end = p.first_stages;
    }
  }
};

// `normed`: the activations are normed or, if there is a second pass, those of the first pass are no longer read.
struct FewBarriers {
  uint32_t full, empty, ready, normed, free, present, exchange;
  DEVICE FewBarriers(const FewTask& p, uint32_t base)
      : full(base + p.barriers_at),
        empty(full + p.slots * 8),
        ready(empty + p.slots * 8),
        normed(ready + FINISHERS * 8),
        free(normed + 8),
        present(free + FINISHERS * 8),
        exchange(present + p.stages * 8) {}
};

struct SharedPrepared {
  uint32_t at;  // includes the lane's offset
  DEVICE uint4 get(int, int k) const { return SharedBytes{at}.get16(k * 16); }
};

DEVICE float4 add4(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float4 shifted(float4 v) { return make_float4(v.y, v.z, v.w, v.x); }
DEVICE float4 shared_four(uint32_t at) {
  const uint4 v = SharedBytes{at}.get16(0);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
#endif
