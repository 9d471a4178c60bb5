// The matmuls of experts with many rows: gate and up with the activation between them, and down. A block has one expert, all of its rows,
// and `span` row tiles of its matrices. Weights are read from global memory directly into registers.
//
// More than FEW_ROWS rows are multiplied MANY_COLUMNS at a time, with two row tiles for each load of activations, whose traffic is the bound
// there. A task of a warp is one class of units of a matrix's row tiles. All data of a unit of one width is requested before any of it is
// multiplied: one memory latency for each part would dominate. The order of sums is that of all other matmuls.
#pragma once
#include "common/activate.cuh"
#include "common/row_limits.cuh"
#include "moe/experts.cuh"

constexpr int MANY_COLUMNS = 16;  // rows of an expert that are multiplied at a time if there are more than FEW_ROWS

// Rows of activations in the order of K; column n * 8 + g belongs to a lane.
template <int NT>
struct ColumnsOrZeros {
  const __half* at[NT];  // null: a column of zeros
  DEVICE uint4 get(int n, int k) const { return at[n] ? *reinterpret_cast<const uint4*>(at[n] + k) : make_uint4(0, 0, 0, 0); }
};

// A unit of one width in registers: its words, and the offset of its scales. Offsets are known at compile time.
template <int B>
struct HeldUnit {
  const uint32_t (*words)[B];  // of four chunks
  GlobalBytes at;
  uint32_t offset;
  DEVICE HeldUnit operator+(uint32_t o) const { return {words, at, offset + o}; }
  DEVICE uint2 get8(uint32_t o) const { return (at + offset).get8(o); }
  DEVICE uint32_t get4(uint32_t o) const { return (at + offset).get4(o); }
  DEVICE uint32_t get2(uint32_t o) const { return (at + offset).get2(o); }
};
template <int B>
DEVICE void load_words(uint32_t (&w)[B], HeldUnit<B> chunk, int) {
#pragma unroll
  for (int i = 0; i < B; i++) w[i] = chunk.words[chunk.offset / (128 * B)][i];
}
// Eight rows of a unit in registers.
struct HeldColumns {
  uint4 slices[8];
  DEVICE uint4 get(int, int k) const { return slices[k / 32]; }
};
// Loads that the compiler must not move behind later instructions.
DEVICE uint4 load_now(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
struct WordsNow {
  const uint8_t* at;
  DEVICE WordsNow operator+(uint32_t o) const { return {at + o}; }
  DEVICE uint4 get16(uint32_t o) const {
    uint4 v;
    asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at + o) : "memory");
    return v;
  }
  DEVICE uint2 get8(uint32_t o) const {
    uint2 v;
    asm volatile("ld.global.cs.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at + o) : "memory");
    return v;
  }
  DEVICE uint32_t get4(uint32_t o) const {
    uint32_t v;
    asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(v) : "l"(at + o) : "memory");
    return v;
  }
};

// One unit of B bits. `row`: a lane's column of it, null if there is none.
template <int KIND, int ENTRY, int B>
DEVICE void held_unit(GlobalBytes weights, const __half* row, const __half* maxima, Sums<1> (&total)[1], int lane) {
  uint32_t words[4][B];
  HeldColumns columns;
#pragma unroll
  for (int c = 0; c < 4; c++) load_words<B>(words[c], WordsNow{weights.at} + 128 * B * c, lane);
#pragma unroll
  for (int s = 0; s < 8; s++) columns.slices[s] = row ? load_now(reinterpret_cast<const uint4*>(row + 32 * s)) : make_uint4(0, 0, 0, 0);
  const HeldUnit<B> held[1] = {{words, weights, 0}};
  UnitMatmul<KIND, ENTRY, 1, 1, HeldUnit<B>, HeldColumns> product{held, columns, maxima, total, lane, {}};
  product.template run_uniform<B>();
}

extern __shared__ float expert_parts[];

// The block's expert and its pairs.
struct ManyRows {
  const Expert& expert;
  const int* pairs;
  int count;
};

// Prefetches tiles `first` and the following ones of a matrix into L2 at once: a single warp keeps few loads in flight.
DEVICE void fetch_tiles(const Matrix& a, int first, int span) {
  const uint8_t* from = a.image + (size_t)first * a.tile_bytes;
  const int bytes = min(span, a.tiles - first) * (int)a.tile_bytes;
  for (int at = threadIdx.x * 128; at < bytes; at += blockDim.x * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// Sums of tiles first .. first + span - 1 of each matrix, by class, into `expert_parts` [MATS][span][classes][TILE][8 * NT]. `x`: the rows
// of the first matrix's pairs, `stride` apart; those of the second are `x_step` further.
template <int KIND, int ENTRY, int NT, int R, int MATS>
DEVICE void expert_sums(const Matrix* matrices, const __half* x, size_t stride, size_t x_step, const int* pairs, int count, int first,
                        int span, int classes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, warps = blockDim.x / 32;
  const int groups = span / R;
  const __half* row[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) row[n] = n * 8 + g < count ? x + pairs[n * 8 + g] * stride + 8 * t : nullptr;
#pragma unroll 1
  for (int task = warp; task < MATS * groups * classes; task += warps) {
    const int c = task % classes, group = task / classes % groups, which = MATS == 1 ? 0 : task / (classes * groups);
    const Matrix& a = matrices[which];
    const uint8_t* tile[R];
    Sums<NT> total[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      tile[r] = a.image + (size_t)min(first + group * R + r, a.tiles - 1) * a.tile_bytes;
      clear(total[r]);
    }
#pragma unroll 1
    for (int u = c; u < a.unit_count; u += CLASSES) {
      const uint2 unit = __ldg(a.units + u);
      GlobalBytes weights[R];
#pragma unroll
      for (int r = 0; r < R; r++) weights[r].at = tile[r] + unit.x;
      const __half* maxima = a.maxima + u * (UNIT_ROWS / ENTRY);
      const size_t at = which * x_step + u * UNIT_ROWS;
      if constexpr (NT == 1 && R == 1) {
        const __half* own = row[0] ? row[0] + at : nullptr;
        bool done = true;
        if (unit.y == 0x4444) held_unit<KIND, ENTRY, 4>(weights[0], own, maxima, total, lane);
        else if (unit.y == 0x3333) held_unit<KIND, ENTRY, 3>(weights[0], own, maxima, total, lane);
        else if (KIND == EXL2 && unit.y == 0x5555) held_unit<KIND, ENTRY, KIND == EXL2 ? 5 : 4>(weights[0], own, maxima, total, lane);
        else if (KIND == EXL2 && unit.y == 0x6666) held_unit<KIND, ENTRY, KIND == EXL2 ? 6 : 4>(weights[0], own, maxima, total, lane);
        else if (unit.y == 0x2222) held_unit<KIND, ENTRY, 2>(weights[0], own, maxima, total, lane);
        else done = false;
        if (done) continue;
      }
      ColumnsOrZeros<NT> columns;
#pragma unroll
      for (int n = 0; n < NT; n++) columns.at[n] = row[n] ? row[n] + at : nullptr;
      UnitMatmul<KIND, ENTRY, NT, R, GlobalBytes, ColumnsOrZeros<NT>> product{weights, columns, maxima, total, lane, {}};
      if constexpr (NT == 1 && R == 1) product.run_mixed(unit.y);
      else product.run(unit.y);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
      float* to = expert_parts + (size_t)((which * span + group * R + r) * classes + c) * TILE * 8 * NT;
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) to[(g + i / 2 * 8) * 8 * NT + n * 8 + 2 * t + i % 2] = total[r][n][i];
    }
  }
}

// One result, rounded to half.
template <int NT>
DEVICE float expert_result(int tile, int classes, int row, int column, const Matrix& a, int feature) {
  const float* from = expert_parts + (tile * classes * TILE + row) * 8 * NT + column;
  const float sum = sum_classes([&](int c) { return c < classes ? from[c * TILE * 8 * NT] : 0.f; });
  return rounded(finish(sum, 1.f, a.bias ? a.bias[feature] : 0.f, a.prescale), OUT_F16);
}

template <int KIND, int ENTRY, int NT, int R>
DEVICE void gate_up_rows(const ExpertCall& call, const ManyRows& block, int first, int begin, int count) {
  const Expert& e = block.expert;
  const int classes = min(CLASSES, max(e.gate.unit_count, e.up.unit_count));
  const size_t up_at = call.inputs > 1 ? (size_t)call.pairs * call.x_stride : 0;
  const int* pairs = block.pairs + begin;
  expert_sums<KIND, ENTRY, NT, R, 2>(&e.gate, call.x, call.x_stride, up_at, pairs, count, first, call.span, classes);
  __syncthreads();
  for (int i = threadIdx.x; i < call.span * TILE * count; i += blockDim.x) {
    const int column = i / (call.span * TILE), within = i % (call.span * TILE), feature = first * TILE + within;
    if (feature >= e.gate.out_features) continue;
    const int tile = within / TILE, row = within % TILE;
    const float gate = expert_result<NT>(tile, classes, row, column, e.gate, feature);
    const float up = expert_result<NT>(call.span + tile, classes, row, column, e.up, feature);
    const int to = e.down.row_of_feature ? e.down.row_of_feature[feature] : feature;
    call.inner[(size_t)pairs[column] * call.inner_stride + to] = __float2half_rn(activate(gate, call.activation) * up);
  }
  if (first == 0 && e.down.rows != e.down.in_features)
    for (int k = threadIdx.x; k < e.down.rows; k += blockDim.x)
      if (e.down_features[k] < 0)
        for (int column = 0; column < count; column++) call.inner[(size_t)pairs[column] * call.inner_stride + k] = __half(0.f);
}

template <int KIND, int ENTRY, int NT, int R>
DEVICE void down_rows(const ExpertCall& call, const ManyRows& block, int first, int begin, int count) {
  const Matrix& a = block.expert.down;
  const int classes = min(CLASSES, a.unit_count);
  const int* pairs = block.pairs + begin;
  expert_sums<KIND, ENTRY, NT, R, 1>(&a, call.inner, call.inner_stride, 0, pairs, count, first, call.span, classes);
  __syncthreads();
  for (int i = threadIdx.x; i < call.span * TILE * count; i += blockDim.x) {
    const int column = i / (call.span * TILE), within = i % (call.span * TILE), feature = first * TILE + within;
    if (feature >= a.out_features) continue;
    const float v = expert_result<NT>(within / TILE, classes, within % TILE, column, a, feature);
    call.parts[(size_t)pairs[column] * call.hidden + feature] = __float2half_rn(v);
  }
}

template <int KIND, int ENTRY, int NT, int R, bool DOWN>
DEVICE void expert_rows(const ExpertCall& call, const ManyRows& block, int first, int begin, int count) {
  if constexpr (DOWN) down_rows<KIND, ENTRY, NT, R>(call, block, first, begin, count);
  else gate_up_rows<KIND, ENTRY, NT, R>(call, block, first, begin, count);
}

template <bool DOWN>
DEVICE void fetch_item(const Expert& e, int first, int span) {
  if constexpr (DOWN) {
    fetch_tiles(e.down, first, span);
  } else {
    fetch_tiles(e.gate, first, span);
    fetch_tiles(e.up, first, span);
  }
}

template <int KIND, int ENTRY, bool DOWN>
DEVICE void many_matmul(const ExpertCall& call) {
  __shared__ Expert held;
  pdl_trigger();
  pdl_wait();
  const int items = *call.item_count, first = blockIdx.x * call.span;
  const int4 item = call.items[blockIdx.y];  // undefined beyond the last one
  if ((int)blockIdx.y >= items) return;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(call.experts + item.x);
  if (threadIdx.x < sizeof(Expert) / 4) reinterpret_cast<uint32_t*>(&held)[threadIdx.x] = __ldg(from + threadIdx.x);
  __syncthreads();
  fetch_item<DOWN>(held, first, call.span);
  const ManyRows block{held, call.order + item.y, item.z};
  for (int begin = 0; begin < item.z; begin += MANY_COLUMNS) {
    const int some = min(item.z - begin, MANY_COLUMNS);
    if (begin) __syncthreads();
    if (some <= FEW_ROWS) expert_rows<KIND, ENTRY, 1, 1, DOWN>(call, block, first, begin, some);
    else expert_rows<KIND, ENTRY, 2, 2, DOWN>(call, block, first, begin, some);
  }
}

#define MANY_MATMUL(part, KIND, kind, ENTRY, DOWN)                                          \
  extern "C" __global__ void __launch_bounds__(256, 2)                                      \
      experts_##part##_##kind##_##ENTRY##_many(const __grid_constant__ ExpertCall call) {   \
    many_matmul<KIND, ENTRY, DOWN>(call);                                                   \
  }
