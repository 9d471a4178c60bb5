// y = f(x @ W) for at most eight activation rows on sm_80, sm_86 and sm_89.
//
// A block walks a contiguous run of row tiles of up to three matrices over one input. Teams of four warps take tiles in turn, and each warp of
// a team has a quarter of K. A warp copies the units that it multiplies into its own ring of shared-memory slots, so the loop over units needs
// no barrier of the block: `cp.async` groups and __syncwarp order a warp's copies, reads and next copies. The copies run ahead over tiles. After a
// tile, the four warps exchange the sums of their quarters through shared memory, and each of their 128 threads finishes one result.
//
// The activations are in shared memory beside the rings. Where all of them do not fit, a block walks its tiles once for each quarter of K, and
// the warps of a team have a class of that quarter each. The sums so far stay in shared memory. Both ways add in the order of `sum_classes`.
// Classes without units add nothing: a sum that starts from +0 is never -0, so leaving out +0 does not change it.
//
// x is either [m, k], which the prologue normalizes and orders as in ring.cuh, or packed by an earlier launch as in few.cuh.
#pragma once
#include "common/activate.cuh"
#include "linear/warp_ring_fill.cuh"
#include "linear/warp_ring_task.cuh"

#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
struct WarpColumns {
  uint32_t at, slice;
  DEVICE uint4 get(int, int k) const { return SharedBytes{at + (k >> 5) * slice}.get16(0); }
};

// The copies of one warp.
struct Stream {
  const WarpTask& p;
  const uint32_t base, ring;
  const int lane, role;
  Steps step;
  const uint8_t* from = nullptr;
  uint32_t list = 0;
  int left = 0, slot = 0;

  DEVICE Stream(const WarpTask& p, uint32_t base, uint32_t ring, int team, int role)
      : p(p), base(base), ring(ring), lane(threadIdx.x % 32), role(role), step(p, team) {
    find();
  }
  // The first tile from `step` on of which this warp has units.
  DEVICE void find() {
#pragma unroll 1
    for (; step.more(); step.advance()) {
      int matrix, tile;
      step.find(matrix, tile);
      const WarpPart& part = p.part[matrix];
      const Lists lists(p, part.a);
      left = lists.size(step.phase, role);
      list = base + part.list_at + lists.begin(step.phase, role) * sizeof(Entry);
      from = part.a.image + (size_t)tile * part.a.tile_bytes;
      if (left > 0) return;
    }
  }
  // Requests the next unit, if there is one. Groups are counted, so each call commits one.
  DEVICE void request() {
    if (left > 0) {
      const Entry unit = Entry::at(list);
      const uint32_t to = ring + slot * p.slot_bytes;
      const int words = unit.sizes & 0xffff;
#pragma unroll 1
      for (int i = lane; i < words; i += 32) copy16(to + i * 16, from + unit.offset + i * 16);
      list += sizeof(Entry);
      if (--left == 0) {
        step.advance();
        find();
      }
    }
    commit_copies();
    if (++slot == p.stages) slot = 0;
  }
};

// One result of a tile for a thread of the team: (row, feature). Rounds where separate operators round. Operands in global memory are requested
// before the sums are present.
struct WarpOutput {
  const WarpTask& p;
  const int row;
  int feature;
  bool wanted;
  size_t at;
  float bias, residual;
  uint32_t place;  // in the order of `next`

  DEVICE WarpOutput(const WarpTask& p, int matrix, int tile) : p(p), row(threadIdx.x % TEAM_THREADS / TILE) {
    const WarpPart& part = p.part[matrix];
    feature = tile * TILE + threadIdx.x % TILE;
    wanted = row < p.m && feature < part.a.out_features;
    at = (size_t)row * p.y_stride + part.y_offset + feature;
    bias = wanted && part.a.bias ? part.a.bias[feature] : 0.f;
    residual = wanted && p.residual ? load_result(p.residual, at, p.y_kind) : 0.f;
    place = wanted && p.next && p.next_rows ? p.next_rows[feature] : feature;
  }
  // `gate`: the activation that gates this result, if any.
  DEVICE void store(float v, float gate) const {
    if (p.gate >= 0) v = gate * rounded(v, p.y_kind);
    if (p.residual) v = residual + rounded(v, p.y_kind);
    if (wanted && p.next) {
      const uint32_t to = (place >> 5) * PACKED_SLICE + row * 64 + (place & 31) * 2;
      *reinterpret_cast<__half*>(p.next + to) = __float2half_rn(v);
    }
    if (wanted && p.y) store_result(p.y, at, p.y_kind, v);
    if (p.next_squares) store_squares(wanted ? rounded(v, OUT_F16) : 0.f);
  }
  // As `eight_squares`: neighbouring lanes hold neighbouring features.
  DEVICE void store_squares(float v) const {
    v = __fmul_rn(v, v);
#pragma unroll
    for (int o = 1; o < 8; o *= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, o));
    if (feature % 8 == 0 && feature < p.part[0].a.out_features) p.next_squares[feature + row] = v;
  }
};

template <int KIND, int ENTRY>
struct WarpRing {
  static constexpr int ENTRIES = UNIT_ROWS / ENTRY;
  const WarpTask& p;
  uint8_t* memory;
  const uint32_t base, ring, column;
  const int lane, team, role;
  int slot = 0, buffer = 0;
  float gate = 1.f;
  Stream stream;

  DEVICE WarpRing(const WarpTask& p, uint8_t* memory, uint32_t base)
      : p(p), memory(memory), base(base), ring(base + p.rings_at + threadIdx.x / 32 * (p.stages * p.slot_bytes)),
        column(base + min(static_cast<int>(threadIdx.x) % 32 >> 2, p.m - 1) * 64 + threadIdx.x % 4 * 16), lane(threadIdx.x % 32),
        team(threadIdx.x / TEAM_THREADS), role(threadIdx.x / 32 % TEAM), stream(p, base, ring, team, role) {}

  // The sum of this warp's units of a tile.
  DEVICE void multiply(const WarpPart& part, int phase, Sums<1>& sum) {
    const Lists lists(p, part.a);
    const uint32_t x = column + part.x_at, maxima = base + part.maxima_at;
    const int shift = p.phases == 1 ? 0 : 2, slice = p.m * 64;
    uint32_t list = base + part.list_at + lists.begin(phase, role) * sizeof(Entry);
    Sums<1> total[1];
    clear(sum);
    clear(total[0]);
#pragma unroll 1
    for (int left = lists.size(phase, role); left > 0; left--, list += sizeof(Entry)) {
      wait_copies(p.stages - 2);
      // All lanes' copies have landed, and all lanes have read the slot that is requested next.
      __syncwarp();
      stream.request();
      const Entry unit = Entry::at(list);
      const SharedBytes weights[1] = {{ring + slot * p.slot_bytes}};
      const WarpColumns columns{x + (unit.index() >> shift) * 8 * slice, static_cast<uint32_t>(slice)};
      UnitMatmul<KIND, ENTRY, 1, 1, SharedBytes, WarpColumns, SharedMaxima> product{
          weights, columns, {maxima + unit.index() * (ENTRIES * 2)}, total, lane, {}};
      product.run(unit.widths, unit.sizes >> 16);
      if (++slot == p.stages) slot = 0;
      if (!unit.last()) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum[0][i] += total[0][0][i];
        total[0][0][i] = 0.f;
      }
    }
  }

  // One tile of this team in one phase.
  DEVICE void tile(const Steps& step) {
    int matrix, number;
    step.find(matrix, number);
    Sums<1> sum;
    multiply(p.part[matrix], step.phase, sum);
    const int last = step.phase == p.phases - 1;
    const WarpOutput output(p, matrix, last ? number : 1 << 26);
    float* parts = reinterpret_cast<float*>(memory + p.results_at) + (team * 2 + buffer) * TEAM * p.m * RESULT_ROW;
    float* mine = parts + role * p.m * RESULT_ROW;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = 2 * t + i % 2;
      if (row < p.m) mine[row * RESULT_ROW + g + i / 2 * 8] = sum[0][i];
    }
    // Two buffers: a thread that writes one of them has passed the barrier after which all have read it.
    team_barrier(team);
    buffer ^= 1;
    float v = 0.f;
    if (output.row < p.m) {
      const float* from = parts + output.row * RESULT_ROW + threadIdx.x % TILE;
      const int stride = p.m * RESULT_ROW;
      v = ((from[0] + from[stride]) + from[2 * stride]) + from[3 * stride];
      if (p.phases > 1) {
        float& carry = reinterpret_cast<float*>(memory + p.carries_at)[step.number() * p.m * TILE + threadIdx.x % TEAM_THREADS];
        if (step.phase) v = carry + v;
        if (!last) carry = v;
      }
    }
    if (!last) return;
    const float multiplier = output.row < p.m ? reinterpret_cast<const RowValues*>(memory + p.rows_at)->multiplier[output.row] : 1.f;
    v = finish(v, multiplier, output.bias, p.part[matrix].a.prescale);
    if (p.gate >= 0 && matrix == 0) gate = activate(rounded(v, p.y_kind), p.gate);
    else output.store(v, gate);
  }

  DEVICE void run() {
    Steps step(p, team);
#pragma unroll 1
    for (int phase = 0; phase < p.phases; phase++) {
      if (phase) __syncthreads();
      fill_activations(p, memory, phase);
      __syncthreads();
#pragma unroll 1
      for (; step.phase == phase; step.advance()) tile(step);
    }
  }
};
#endif

template <int KIND, int ENTRY>
DEVICE void warp_ring_matmul(const WarpTask& p) {
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  load_lists<ENTRY>(p, memory);
  __syncthreads();
  WarpRing<KIND, ENTRY> ring(p, memory, base);
#pragma unroll 1
  for (int i = 1; i < p.stages; i++) ring.stream.request();
  ring.run();
#endif
}

#define WARP_RING(KIND, kind, ENTRY)                                                                                         \
  extern "C" __global__ void __launch_bounds__(WARP_RING_THREADS) warp_ring_##kind##_##ENTRY(const __grid_constant__ WarpTask p) { \
    warp_ring_matmul<KIND, ENTRY>(p);                                                                                        \
  }
