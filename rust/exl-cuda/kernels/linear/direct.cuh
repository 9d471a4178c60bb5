// y = f(x @ W) for at most eight packed activation rows, on cards without bulk copies: up to three matrices over one input in one launch.
//
// The task is that of few.cuh, with the same results. A block has a tile, or a gated pair of tiles; its warps load weights from global memory
// directly into registers, as in tile.cuh. Blocks end soon and three share an SM, so that the scheduler of the card balances them. A norm of the
// input is a small launch of its own (`norm_packed`): here every block would repeat it.
#pragma once
#include "common/row_limits.cuh"
#include "linear/gate.cuh"
#include "linear/prepared.cuh"

// For the struct only: few_task.cuh includes what needs sm_90 under its own conditions.
#include "linear/few_task.cuh"

constexpr int DIRECT_WARPS = 8, DIRECT_THREADS = DIRECT_WARPS * 32, PACKED_SLICE = 512;
constexpr int DIRECT_BLOCKS = 3;  // of an SM

// The packed rows of a unit. Columns past the last row repeat it, so that they cost no memory traffic; nothing reads their results.
struct PackedRows {
  const uint8_t* at;  // includes the lane's offset
  DEVICE uint4 get(int, int k) const { return *reinterpret_cast<const uint4*>(at + k * 16); }
};

// Sums of a tile by class: classes c and c + 8 share place c for c < 4; class c + 8 has place c + 4 for larger c.
struct TileSums {
  float v[12][FEW_ROWS][TILE];
  // In the order of `sum_classes`.
  DEVICE float added(int row, int feature) const {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float quarter = (v[j][row][feature] + v[j + 4][row][feature]) + v[j + 8][row][feature];
      sum = j == 0 ? quarter : sum + quarter;
    }
    return sum;
  }
};

// One result for a thread: (row, feature). Rounds where separate operators round. Operands in global memory are requested before the sums are
// there.
struct TileOutput {
  const FewTask& p;
  const int row, feature;
  const bool wanted;
  const size_t at;
  float residual = 0.f;
  uint32_t place;  // in the order of `next`

  DEVICE TileOutput(const FewTask& p, const FewPart& part, int tile)
      : p(p), row(threadIdx.x / TILE), feature(tile * TILE + threadIdx.x % TILE), wanted(row < p.m && feature < part.a.out_features),
        at((size_t)row * p.y_stride + part.y_offset + feature), place(feature) {
    if (wanted && p.residual) residual = load_result(p.residual, at, p.y_kind);
    if (wanted && p.next && p.next_rows) place = p.next_rows[feature];
  }
  DEVICE void store(float v) const {
    if (p.residual) v = residual + rounded(v, p.y_kind);
    if (wanted && p.next)
      *reinterpret_cast<__half*>(p.next + (place >> 5) * PACKED_SLICE + row * 64 + (place & 31) * 2) = __float2half_rn(v);
    if (wanted && p.y) store_result(p.y, at, p.y_kind, v);
    if (p.next_squares) store_squares(wanted ? rounded(v, OUT_F16) : 0.f);
  }
  // As `eight_squares`: neighbouring lanes have neighbouring features.
  DEVICE void store_squares(float v) const {
    v = __fmul_rn(v, v);
#pragma unroll
    for (int o = 1; o < 8; o *= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, o));
    if (feature % 8 == 0 && feature < p.part[0].a.out_features) p.next_squares[feature + row] = v;
  }
};

template <int KIND, int ENTRY>
DEVICE void multiply_tile(const FewTask& p, const FewPart& part, int tile, TileSums& sums) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const uint8_t* x = p.x + part.copy * p.copy_bytes + min(g, p.m - 1) * 64 + t * 16;
  const uint8_t* image = part.a.image + (size_t)tile * part.a.tile_bytes;
#pragma unroll 1
  for (int c = warp; c < CLASSES; c += DIRECT_WARPS) {
    Sums<1> total[1];
    clear(total[0]);
#pragma unroll 1
    for (int u = c; u < part.a.unit_count; u += CLASSES) {
      const uint2 unit = __ldg(part.a.units + u);
      const GlobalBytes weights[1] = {{image + unit.x}};
      const PackedRows columns{x + (size_t)u * PREPARED_BYTES};
      UnitMatmul<KIND, ENTRY, 1, 1, GlobalBytes, PackedRows> product{weights, columns, part.a.maxima + u * (UNIT_ROWS / ENTRY), total, lane, {}};
      product.run(unit.y);
    }
    const bool again = c != warp, onto = again && warp < 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float& d = sums.v[again && !onto ? warp + 4 : warp][2 * t + i % 2][g + i / 2 * 8];
      d = onto ? d + total[0][0][i] : total[0][0][i];
    }
  }
}

template <int KIND, int ENTRY>
DEVICE void direct_matmul(const FewTask& p) {
  __shared__ TileSums sums[2];
  const bool gated = p.gate >= 0;
  pdl_trigger();
  int matrix = 0, tile = blockIdx.x;
  if (!gated)
#pragma unroll 1
    while (matrix + 1 < p.count && tile >= p.part[matrix].a.tiles) tile -= p.part[matrix++].a.tiles;
  pdl_wait();
  multiply_tile<KIND, ENTRY>(p, p.part[matrix], tile, sums[0]);
  if (gated) multiply_tile<KIND, ENTRY>(p, p.part[1], tile, sums[1]);
  const FewPart& part = p.part[gated ? 1 : matrix];
  const bool finishes = threadIdx.x < FEW_ROWS * TILE;
  const TileOutput output(p, part, finishes ? tile : 1 << 26);
  __syncthreads();
  if (!finishes) return;
  const float multiplier = p.scaled && output.wanted ? __ldcg(p.multipliers + output.row) : 1.f;
  auto result = [&](const FewPart& of, const TileSums& from) {
    const float bias = output.wanted && of.a.bias ? of.a.bias[output.feature] : 0.f;
    return finish(from.added(output.row, threadIdx.x % TILE), multiplier, bias, of.a.prescale);
  };
  float v = result(part, sums[gated]);
  if (gated) v = activate(rounded(result(p.part[0], sums[0]), p.y_kind), p.gate) * rounded(v, p.y_kind);
  else if (p.gate < NO_GATE) v = activate(rounded(v, p.y_kind), activation_of(p.gate));
  output.store(v);
}

// Norms the packed rows in place. The sum of squares adds in the order of kernels/elementwise/norm.cu: group of eight e is added by lane e % 32
// of warp e / 32 % 8. Every block adds all of them.
DEVICE void norm_packed_rows(const FewTask& p) {
  __shared__ float parts[FEW_ROWS][DIRECT_WARPS];
  pdl_trigger();
  pdl_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = 4 * p.m, words = p.units * (UNIT_ROWS / 32) * each;
  const int i = blockIdx.x * blockDim.x + threadIdx.x, slice = i / each, word = i - slice * each;
  union {
    uint4 word;
    __half2 v[4];
  } eight;
  uint4* at = reinterpret_cast<uint4*>(const_cast<uint8_t*>(p.x) + (size_t)slice * PACKED_SLICE + word * 16);
  float w[8];
  if (i < words) {
    eight.word = __ldcg(at);
    load8(w, p.norm + slice * 32 + word % 4 * 8);
  }
  float sum[FEW_ROWS] = {};
#pragma unroll 1
  for (int e = warp * 32 + lane; e < p.k / 8; e += 256) {
    const float4* from = reinterpret_cast<const float4*>(p.squares + e * 8);
    const float4 low = __ldcg(from), high = p.m > 4 ? __ldcg(from + 1) : make_float4(0.f, 0.f, 0.f, 0.f);
    const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int r = 0; r < 8; r++) sum[r] += v[r];
  }
#pragma unroll
  for (int r = 0; r < FEW_ROWS; r++) {
    if (r >= p.m) break;
    sum[r] = warp_sum(sum[r]);
    if (lane == 0) parts[r][warp] = sum[r];
  }
  __syncthreads();
  if (i >= words) return;
  float all = 0.f;
#pragma unroll
  for (int v = 0; v < DIRECT_WARPS; v++) all += parts[word / 4][v];
  const float by = 1.f / sqrtf(all / (float)p.k + p.eps);
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 v = __half22float2(eight.v[e]);
    eight.v[e] = __floats2half2_rn(v.x * by * w[2 * e], v.y * by * w[2 * e + 1]);
  }
  *at = eight.word;
}

#define DIRECT(KIND, kind, ENTRY)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(DIRECT_THREADS, DIRECT_BLOCKS) gemm_direct_##kind##_##ENTRY(const __grid_constant__ FewTask p) { \
    direct_matmul<KIND, ENTRY>(p);                                                                                                              \
  }
