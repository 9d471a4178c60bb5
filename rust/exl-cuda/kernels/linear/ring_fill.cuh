// The set-up of the ring kernel (ring.cuh) before its first matrix instruction: tables of units, and activations packed into the layout.
#pragma once
#include <type_traits>

#include "linear/ring_task.cuh"

#if __CUDA_ARCH__ >= 900
// Loads unit tables, the maxima of entries and the places of a matrix's data into shared memory, by one warp.
template <int ENTRY>
DEVICE void load_constants(const Task& p, uint8_t* memory, uint4* places) {
  const int lane = threadIdx.x % 32;
  const uint32_t base = shared_address(memory);
#pragma unroll 1
  for (int i = 0; i < p.count; i++) {
    const Part& part = p.part[i];
    const int units = part.a.unit_count, entries = part.a.maxima ? (part.a.rows + ENTRY - 1) / ENTRY : 0;
    uint2* to = reinterpret_cast<uint2*>(memory + part.units_at);
    __half* maxima = reinterpret_cast<__half*>(memory + part.maxima_at);
#pragma unroll 1
    for (int e = lane; e < max(units, entries); e += 128) {
      uint2 unit[4];
      uint32_t stage[4];
      __half maximum[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = e + 32 * j;
        if (at < units) {
          unit[j] = __ldg(part.a.units + at);
          stage[j] = __ldg(&part.a.units[at & ~7].x);
        }
        if (at < entries) maximum[j] = part.a.maxima[at];
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = e + 32 * j;
        if (at < units) to[at] = make_uint2(unit[j].x - stage[j], unit[j].y);
        if (at < entries) maxima[at] = maximum[j];
      }
    }
    if (lane == 0) places[i] = make_uint4(base + part.x_at, base + part.units_at, base + part.maxima_at, units);
  }
}

// Clears the rows of the layout that hold no feature.
DEVICE void clear_padding(const Task& p, uint8_t* memory) {
  constexpr int THREADS = CONSUMERS * 32;
#pragma unroll 1
  for (int fills = p.flags >> FILLS; fills; fills &= fills - 1) {
    uint32_t* to = reinterpret_cast<uint32_t*>(memory + p.part[__ffs(fills) - 1].x_at);
    for (int e = threadIdx.x; e < p.m * static_cast<int>(p.x_stride) / 2; e += THREADS) to[e] = 0;
  }
  bar<4>(THREADS);
}

// Packs activations into the layout as halves, with 512 threads. The norm adds in the order of kernels/elementwise/norm.cu and so uses 256
// threads a row. The host guarantees that a norm and BF16 rows fit one batch. A load from global memory has the latency of L2, so a batch's
// loads are issued together. They are processed by a loop over BATCH groups of eight elements, whose registers rotate.
// LAYERED: the norm is a LayerNorm.
template <class T, int BATCH, bool LAYERED>
struct Fill {
  static constexpr bool SCALED = !std::is_same<T, __half>::value;
  static constexpr int THREADS = CONSUMERS * 32;
  static constexpr bool EARLY = BATCH == 2;  // registers for the norm's weights
  static_assert(BATCH == 2 || BATCH == 4, "its logarithm is half of it");
  union Eight {
    uint4 word;
    T v[8];
  };
  const Task& p;
  uint8_t* memory;
  float (*parts)[2][CONSUMERS];
  int k, eights, log, team, mine, rank, held;
  Eight in[BATCH];
  uint4 rows[BATCH];
  float4 weights[BATCH][2];

  DEVICE Fill(const Task& p, uint8_t* memory, float (*parts)[2][CONSUMERS]) : p(p), memory(memory), parts(parts) {
    const int tid = threadIdx.x;
    k = p.part[0].a.in_features;
    eights = k / 8;
    log = p.norm ? 8 : 9;
    team = 1 << log;
    mine = tid >> log;
    rank = tid & (team - 1);
    held = 0;
  }
  DEVICE void turn(uint4 (&v)[BATCH]) {
    const uint4 first = v[0];
#pragma unroll
    for (int j = 1; j < BATCH; j++) v[j - 1] = v[j];
    v[BATCH - 1] = first;
  }
  DEVICE void turn(Eight (&v)[BATCH]) { turn(reinterpret_cast<uint4(&)[BATCH]>(v)); }
  // Calls f(number of the group of eight) for each group of a batch with its elements in in[0], and `next` after each place of the batch.
  template <class F, class N>
  DEVICE void each(int batch, F f, N next) {
#pragma unroll 1
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      if (i < eights) f(i);
      turn(in);
      next();
    }
  }
  template <class F>
  DEVICE void each(int batch, F f) {
    each(batch, f, [] {});
  }
  DEVICE void load_rows(const Matrix& a, int batch) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      rows[j] = make_uint4(0, 0, 0, 0);
      if (i < eights) rows[j] = __ldg(reinterpret_cast<const uint4*>(a.row_of_feature) + i);
    }
  }
  // Work that does not depend on the predecessor.
  DEVICE void early() {
    // Registers that are not written on all paths would count as live from the start.
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      rows[j] = make_uint4(0, 0, 0, 0);
      weights[j][0] = weights[j][1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (p.part[0].a.row_of_feature) load_rows(p.part[0].a, 0);
    if constexpr (LAYERED || !EARLY) {
      if (p.norm)
#pragma unroll 1
        for (int i = rank; i < eights; i += team) {
          if (!EARLY) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm + 2 * i));
          if (LAYERED && p.norm_bias) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.norm_bias + 2 * i));
        }
    }
    if (EARLY && p.norm) {
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const int i = rank + j * team;
        if (i < eights) {
          weights[j][0] = __ldg(p.norm + 2 * i);
          weights[j][1] = __ldg(p.norm + 2 * i + 1);
        }
      }
    }
  }
  // Loads from L2, where the predecessor wrote the data: a line is used once. A plain load after pdl_wait sees the data as well, by the PTX
  // definition of the wait; only `__ldg` might not.
  DEVICE void load(const T* x, int batch) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const int i = rank + (batch * BATCH + j) * team;
      in[j].word = make_uint4(0, 0, 0, 0);
      if (i < eights) in[j].word = __ldcg(reinterpret_cast<const uint4*>(x) + i);
    }
  }
  // In the build for racecheck both teams use one barrier: the tool loses count of teams that synchronize separately
  // (racecheck_mbarrier.cu).
  DEVICE void synchronize() {
    if (team == THREADS || RACECHECK) bar<4>(THREADS);
    else if (mine == 0) bar<2>(256);
    else bar<3>(256);
  }
  // The sum over a team's threads, passed through `through`.
  DEVICE float team_sum(float sum, float* through) {
    sum = warp_sum(sum);
    if (rank % 32 == 0) through[threadIdx.x / 32] = sum;
    synchronize();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; w++) sum += through[8 * mine + w];
    return sum;
  }
  DEVICE void normalise(int turn_) {
    float mean = 0.f, sum = 0.f;
    if constexpr (LAYERED) {
      each(0, [&](int) {
        float v[8];
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = to_float(in[0].v[e]);
        mean += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
      });
      mean = team_sum(mean, parts[1][turn_]) / (float)k;
    }
    each(0, [&](int) {
      float v[8];
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = LAYERED ? to_float(in[0].v[e]) - mean : to_float(in[0].v[e]);
      sum += eight_squares(v);
    });
    const float scale = 1.f / sqrtf(team_sum(sum, parts[0][turn_]) / (float)k + p.eps);
    auto apply = [&](int i) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4 a = EARLY ? weights[0][h] : __ldg(p.norm + 2 * i + h);
        const float w[4] = {a.x, a.y, a.z, a.w};
        if constexpr (LAYERED) {
          const float4 c = p.norm_bias ? __ldg(p.norm_bias + 2 * i + h) : make_float4(0.f, 0.f, 0.f, 0.f);
          const float bias[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
          for (int e = 0; e < 4; e++)
            in[0].v[4 * h + e] = from_float<T>(fmaf((to_float(in[0].v[4 * h + e]) - mean) * scale, w[e], bias[e]));
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++)
            in[0].v[4 * h + e] = from_float<T>(to_float(in[0].v[4 * h + e]) * scale * (w[e] + p.offset));
        }
      }
    };
    each(0, apply, [&] {
      if (!EARLY) return;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4 first = weights[0][h];
        weights[0][h] = weights[1][h];
        weights[1][h] = first;
      }
    });
  }
  // The factor that brings a BF16 row into the range of halves.
  DEVICE float factor(int turn_) {
    float largest = 0.f;
    each(0, [&](int) {
#pragma unroll
      for (int e = 0; e < 8; e++) largest = fmaxf(largest, fabsf(to_float(in[0].v[e])));
    });
#pragma unroll
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
    if (rank % 32 == 0) parts[1][turn_][threadIdx.x / 32] = largest;
    synchronize();
    for (int w = 0; w < team / 32; w++) largest = fmaxf(largest, parts[1][turn_][8 * mine + w]);
    return row_factor(largest);
  }
  // Writes a batch of a row in the order of matrix `i`.
  DEVICE void write(int i, int token, int batch, float factor) {
    const Part& part = p.part[i];
    __half* to = reinterpret_cast<__half*>(memory + part.x_at) + token * p.x_stride;
    const bool ordered = !part.a.row_of_feature;
    auto put = [&](int at) {
      union {
        uint4 word;
        __half v[8];
      } out;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        if constexpr (SCALED) out.v[e] = __float2half_rn(to_float(in[0].v[e]) * factor);
        else out.v[e] = in[0].v[e];
      }
      if (ordered) {
        reinterpret_cast<uint4*>(to)[at] = out.word;
      } else {
        union {
          uint4 word;
          uint16_t v[8];
        } row;
        row.word = rows[0];
#pragma unroll
        for (int e = 0; e < 8; e++)
          to[row.v[e]] = out.v[e];
      }
    };
    each(batch, put, [&] { turn(rows); });
  }
  DEVICE void run() {
    early();
    pdl_wait();
    const int batches = SCALED || p.norm ? 1 : (eights + BATCH * team - 1) >> (log + BATCH / 2);
    int turn_ = 0;
#pragma unroll 1
    for (int token = mine; token < p.m; token += THREADS >> log, turn_ ^= 1) {
      const T* x = static_cast<const T*>(p.x) + (size_t)token * k;
#pragma unroll 1
      for (int b = 0; b < batches; b++) {
        load(x, b);
        if (p.norm) normalise(turn_);
        const float f = SCALED ? factor(turn_) : 1.f;
        if (rank == 0) reinterpret_cast<float*>(memory + p.multipliers_at)[token] = 1.f / f;
#pragma unroll 1
        for (int fills = p.flags >> FILLS; fills; fills &= fills - 1) {
          const int i = __ffs(fills) - 1;
          if (p.part[i].a.row_of_feature && (batches > 1 || held != i)) {
            load_rows(p.part[i].a, b);
            held = i;
          }
          write(i, token, b, f);
        }
      }
    }
    if (RACECHECK && mine == 1 && p.m % 2 == 1)
      for (int i = 0; i < 1 + SCALED + LAYERED; i++) synchronize();  // as often as the first team
  }
};

// Packs one row of halves that needs no norm and has one order, with no work between the end of the previous launch and the loads. A loop
// over the loaded values rotates their registers: unrolled code would be cold and cost more than the moves. A thread has BATCH groups of
// eight elements.
template <int BATCH>
DEVICE void fill_row(const Task& p, uint8_t* memory) {
  constexpr int THREADS = CONSUMERS * 32;
  const Part& part = p.part[0];
  const int tid = threadIdx.x, eights = part.a.in_features / 8;
  const uint4* order = reinterpret_cast<const uint4*>(part.a.row_of_feature) + tid;
  const uint4* x = static_cast<const uint4*>(p.x) + tid;
  const bool ordered = !part.a.row_of_feature;
  uint4 rows[BATCH], in[BATCH];
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    rows[j] = in[j] = make_uint4(0, 0, 0, 0);
    if (!ordered && tid + j * THREADS < eights) rows[j] = __ldg(order + j * THREADS);
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(memory + part.x_at);
  if (tid == 0) *reinterpret_cast<float*>(memory + p.multipliers_at) = 1.f;
  pdl_wait();
#pragma unroll
  for (int j = 0; j < BATCH; j++)
    if (tid + j * THREADS < eights) in[j] = __ldcg(x + j * THREADS);
#pragma unroll 1
  for (int i = tid; i < eights; i += THREADS) {
    if (ordered) {
      reinterpret_cast<uint4*>(to)[i] = in[0];
    } else {
      const uint32_t r[4] = {rows[0].x, rows[0].y, rows[0].z, rows[0].w}, v[4] = {in[0].x, in[0].y, in[0].z, in[0].w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        to[r[e] & 0xffff] = v[e];
        to[r[e] >> 16] = v[e] >> 16;
      }
    }
#pragma unroll
    for (int j = 1; j < BATCH; j++) {
      rows[j - 1] = rows[j];
      in[j - 1] = in[j];
    }
  }
}

constexpr int LONG_ROW = 5;  // groups of eight elements that a thread holds at most

using TeamParts = float[2][2][CONSUMERS];
// GENERAL: the input has a LayerNorm, or is a row that is longer than four groups of eight elements a thread. A kernel of its own has this
// code: where the input has neither, fetching instructions around it costs more than 1 % of a step of one row.
template <bool GENERAL>
DEVICE void fill_shared(const Task& p, uint8_t* memory) {
  __shared__ TeamParts parts;
  if (p.flags & PADDED) clear_padding(p, memory);
  if (p.flags & ROW) return fill_row<GENERAL ? LONG_ROW : 4>(p, memory);
  const bool small = p.part[0].a.in_features <= 16 * (p.norm ? 256 : CONSUMERS * 32);
  if (p.x_kind == OUT_F16) {
    if (small) Fill<__half, 2, GENERAL>(p, memory, parts).run();
    else Fill<__half, 4, GENERAL>(p, memory, parts).run();
  } else {
    if (small) Fill<__nv_bfloat16, 2, GENERAL>(p, memory, parts).run();
    else Fill<__nv_bfloat16, 4, GENERAL>(p, memory, parts).run();
  }
}
#endif
