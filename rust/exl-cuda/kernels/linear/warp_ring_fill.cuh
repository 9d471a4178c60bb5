// The prologue of the warp ring kernel (warp_ring.cuh): tables of units, and activations normalized and packed into shared memory.
//
// Shared memory holds the activations as prepared.cuh packs them, but only for the m rows there are: 64 m bytes for each 32 values of K.
#pragma once
#include <type_traits>

#include "linear/warp_ring_task.cuh"

#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
// Lists of units and the maxima of their entries.
template <int ENTRY>
DEVICE void load_lists(const WarpTask& p, uint8_t* memory) {
#pragma unroll 1
  for (int i = 0; i < p.count; i++) {
    const WarpPart& part = p.part[i];
    const Lists lists(p, part.a);
    Entry* to = reinterpret_cast<Entry*>(memory + part.list_at);
#pragma unroll 1
    for (int u = threadIdx.x; u < lists.units; u += blockDim.x) {
      const uint2 unit = __ldg(part.a.units + u);
      const uint32_t bytes = __ldg(&part.a.units[u + 1].x) - unit.x;
      const uint32_t last = u + CLASSES >= lists.units ? 1u << 31 : 0u;
      to[lists.place(u)] = {unit.x, bytes >> 4 | code_bytes(unit.y) << 16, unit.y, u | last};
    }
    if (!part.a.maxima) continue;
    __half* maxima = reinterpret_cast<__half*>(memory + part.maxima_at);
#pragma unroll 1
    for (int e = threadIdx.x; e < (part.a.rows + ENTRY - 1) / ENTRY; e += blockDim.x) maxima[e] = part.a.maxima[e];
  }
}

// Offset in shared memory of row r of the layout, without the activation row; negative if another phase has it.
DEVICE int place_of(const WarpTask& p, int phase, int r) {
  int slice = r >> 5;
  if (p.phases > 1) {
    if ((r >> 8 & 3) != phase) return -1;
    slice = (r >> 10 << 3) | (slice & 7);
  }
  return slice * p.m * 64 + (r & 31) * 2;
}

// Activations of [m, k] in global memory. The norm adds in the order of kernels/elementwise/norm.cu: group of eight e is added by lane e % 32 of
// warp e / 32 % 8 there. A warp here does the work of one warp and row there after another.
template <class T>
struct RowsFill {
  static constexpr bool SCALED = !std::is_same<T, __half>::value;
  static constexpr int BATCH = 4;
  union Eight {
    uint4 word;
    T v[8];
  };
  const WarpTask& p;
  uint8_t* memory;
  RowValues& rows;
  const int eights, warp, lane, warps;

  DEVICE RowsFill(const WarpTask& p, uint8_t* memory)
      : p(p), memory(memory), rows(*reinterpret_cast<RowValues*>(memory + p.rows_at)), eights(p.k / 8), warp(threadIdx.x / 32),
        lane(threadIdx.x % 32), warps(blockDim.x / 32) {}

  DEVICE uint4 load(int row, int i) const { return __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + (size_t)row * p.k) + i); }
  DEVICE void normalize(Eight& x, int row, int i) const {
    if (!p.norm) return;
    float w[8];
    load8(w, p.norm + 8 * i);
    const float scale = rows.scale[row];
#pragma unroll
    for (int e = 0; e < 8; e++) x.v[e] = from_float<T>(to_float(x.v[e]) * scale * (w[e] + p.offset));
  }
  // Calls f(value so far, group of eight of a row) over the groups of each warp of norm.cu; then `join` over its lanes.
  template <class F, class J>
  DEVICE void each_warp_there(F f, J join) {
#pragma unroll 1
    for (int job = warp; job < p.m * 8; job += warps) {
      const int row = job / 8;
      float v = 0.f;
#pragma unroll 2
      for (int i = job % 8 * 32 + lane; i < eights; i += 256) {
        Eight x;
        x.word = load(row, i);
        v = f(v, x, row, i);
      }
      v = join(v);
      if (lane == 0) rows.parts[row][job % 8] = v;
    }
    __syncthreads();
  }
  // Scales of the norm, and the factors that bring BF16 rows into the range of halves.
  DEVICE void measure() {
    const int row = threadIdx.x;
    if (p.norm) {
      each_warp_there(
          [](float v, const Eight& x, int, int) {
            float u[8];
#pragma unroll
            for (int e = 0; e < 8; e++) u[e] = to_float(x.v[e]);
            return v + eight_squares(u);
          },
          [](float v) { return warp_sum(v); });
      if (row < p.m) {
        float all = 0.f;
#pragma unroll
        for (int w = 0; w < 8; w++) all += rows.parts[row][w];
        rows.scale[row] = 1.f / sqrtf(all / (float)p.k + p.eps);
      }
      __syncthreads();
    }
    if constexpr (SCALED) {
      each_warp_there(
          [this](float v, Eight& x, int row, int i) {
            normalize(x, row, i);
#pragma unroll
            for (int e = 0; e < 8; e++) v = fmaxf(v, fabsf(to_float(x.v[e])));
            return v;
          },
          [](float v) {
#pragma unroll
            for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
            return v;
          });
    }
    if (row < p.m) {
      float factor = 1.f;
      if constexpr (SCALED) {
        float largest = 0.f;
#pragma unroll
        for (int w = 0; w < 8; w++) largest = fmaxf(largest, rows.parts[row][w]);
        factor = row_factor(largest);
      }
      rows.factor[row] = factor;
      rows.multiplier[row] = 1.f / factor;
    }
    __syncthreads();
  }
  // Writes eight values of a row at their places in the order of a matrix.
  DEVICE void write(const WarpPart& part, int phase, int row, int i, const Eight& x, uint4 places) const {
    union {
      uint4 word;
      __half v[8];
    } out;
    const float factor = rows.factor[row];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if constexpr (SCALED) out.v[e] = __float2half_rn(to_float(x.v[e]) * factor);
      else out.v[e] = x.v[e];
    }
    uint8_t* to = memory + part.x_at + row * 64;
    if (!part.a.row_of_feature) {
      const int at = place_of(p, phase, 8 * i);
      if (at >= 0) *reinterpret_cast<uint4*>(to + at) = out.word;
      return;
    }
    const uint32_t r[4] = {places.x, places.y, places.z, places.w};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int at = place_of(p, phase, r[e / 2] >> (e % 2 * 16) & 0xffff);
      if (at >= 0) *reinterpret_cast<__half*>(to + at) = out.v[e];
    }
  }
  DEVICE void run(int phase) {
    if (phase == 0) measure();
#pragma unroll 1
    for (int row = 0; row < p.m; row++) {
#pragma unroll 1
      for (int first = threadIdx.x; first < eights; first += BATCH * blockDim.x) {
        Eight in[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
          const int i = first + j * blockDim.x;
          in[j].word = i < eights ? load(row, i) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
          const int i = first + j * blockDim.x;
          if (i >= eights) break;
          normalize(in[j], row, i);
#pragma unroll 1
          for (int n = 0; n < p.count; n++) {
            const WarpPart& part = p.part[n];
            if (part.order != n) continue;
            uint4 places = make_uint4(0, 0, 0, 0);
            if (part.a.row_of_feature) places = __ldg(reinterpret_cast<const uint4*>(part.a.row_of_feature) + i);
            write(part, phase, row, i, in[j], places);
          }
        }
      }
    }
  }
};

// Activations that an earlier launch has packed (few_task.cuh), with their norm if the sums of squares come with them.
struct PackedFill {
  static constexpr int BATCH = 4;
  const WarpTask& p;
  uint8_t* memory;
  RowValues& rows;
  const int warp, lane, warps;

  DEVICE PackedFill(const WarpTask& p, uint8_t* memory)
      : p(p), memory(memory), rows(*reinterpret_cast<RowValues*>(memory + p.rows_at)), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
        warps(blockDim.x / 32) {}

  // In the order of norm.cu, as `RowsFill`.
  DEVICE void measure() {
    const int row = threadIdx.x;
    if (p.norm) {
#pragma unroll 1
      for (int there = warp; there < 8; there += warps) {
        float sum[8] = {};
#pragma unroll 1
        for (int e = there * 32 + lane; e < p.k / 8; e += 256) {
          const float4* from = reinterpret_cast<const float4*>(p.squares + e * 8);
          const float4 low = __ldcg(from), high = __ldcg(from + 1);
          const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
          for (int r = 0; r < 8; r++) sum[r] += v[r];
        }
#pragma unroll
        for (int r = 0; r < 8; r++) {
          sum[r] = warp_sum(sum[r]);
          if (lane == 0) rows.parts[r][there] = sum[r];
        }
      }
      __syncthreads();
    }
    if (row < p.m) {
      float all = 0.f;
      if (p.norm)
#pragma unroll
        for (int w = 0; w < 8; w++) all += rows.parts[row][w];
      rows.scale[row] = p.norm ? 1.f / sqrtf(all / (float)p.k + p.eps) : 1.f;
      rows.multiplier[row] = p.scaled ? __ldcg(p.multipliers + row) : 1.f;
    }
    __syncthreads();
  }
  DEVICE uint4 normalize(uint4 word, int value, float by) const {
    union {
      uint4 word;
      __half2 v[4];
    } eight;
    eight.word = word;
    float w[8];
    load8(w, p.norm + value);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 v = __half22float2(eight.v[e]);
      eight.v[e] = __floats2half2_rn(v.x * by * w[2 * e], v.y * by * w[2 * e + 1]);
    }
    return eight.word;
  }
  DEVICE void run(int phase) {
    if (phase == 0) measure();
    // Lane 4 c + t has values 8 t .. 8 t + 7 of row c of a slice.
    if (lane >= 4 * p.m) return;
    const int slices = p.phases == 1 ? 8 * p.units : 8 * ((p.units - phase + 3) >> 2);
    const float by = rows.scale[lane / 4];
    auto slice_of = [&](int s) { return p.phases == 1 ? s : (s >> 3 << 5) | phase << 3 | (s & 7); };
#pragma unroll 1
    for (int n = 0; n < p.count; n++) {
      const WarpPart& part = p.part[n];
      if (part.order != n) continue;
      const uint8_t* from = static_cast<const uint8_t*>(p.x) + part.copy * p.copy_bytes + lane * 16;
      uint8_t* to = memory + part.x_at + lane * 16;
#pragma unroll 1
      for (int first = warp; first < slices; first += BATCH * warps) {
        uint4 in[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
          const int s = first + j * warps;
          if (s < slices) in[j] = __ldcg(reinterpret_cast<const uint4*>(from + (size_t)slice_of(s) * PACKED_SLICE));
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
          const int s = first + j * warps;
          if (s >= slices) break;
          if (p.norm) in[j] = normalize(in[j], slice_of(s) * 32 + lane % 4 * 8, by);
          *reinterpret_cast<uint4*>(to + s * p.m * 64) = in[j];
        }
      }
    }
  }
};

// Clears the activations where rows of a layout hold no feature.
DEVICE void clear_activations(const WarpTask& p, uint8_t* memory) {
  const int slices = p.phases == 1 ? 8 * p.units : 8 * ((p.units + 3) >> 2);
#pragma unroll 1
  for (int n = 0; n < p.count; n++) {
    if (p.part[n].order != n) continue;
    uint4* to = reinterpret_cast<uint4*>(memory + p.part[n].x_at);
    for (int i = threadIdx.x; i < slices * p.m * 4; i += blockDim.x) to[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();
}

// Fills the activations of a phase. The caller synchronizes the block before and after.
DEVICE void fill_activations(const WarpTask& p, uint8_t* memory, int phase) {
  if (p.packed) {
    PackedFill(p, memory).run(phase);
    return;
  }
  if (p.padded) clear_activations(p, memory);
  if (p.x_kind == OUT_F16) RowsFill<__half>(p, memory).run(phase);
  else RowsFill<__nv_bfloat16>(p, memory).run(phase);
}
#endif
