// The end of the kernels of 9 to 128 rows (batch.cuh): adds the quarters of K, applies the epilogue, and stores the results.
//
// Blocks exchange the sums of quarters in a workspace that is all ones between launches. Each of the four blocks has a share of the rows to
// add and store, and writes its sums of the other rows to the workspace. A block polls until no word is `ABSENT`, which no sum can be
// (arithmetic produces only the NaN 0x7fffffff), and then restores the workspace to all ones. So no memory ordering is needed. No block
// waits for a block that may not have started: see `agree`.
#pragma once
#include "common/activate.cuh"
#include "linear/batch_task.cuh"
#include "linear/prepared.cuh"

#if __CUDA_ARCH__ >= 800
// BULK: for batch.cuh, whose blocks have a warp of their own that agrees with other blocks. Blocks of batch_mma.cuh agree before they leave
// their sums, and do not store gated results transposed.
template <int N, bool BULK>
struct BatchFinish : BatchBlock {
  static constexpr int S = N / 2;  // sums a thread
  static constexpr int EIGHTS = N / 8;
  // Whether gated results are stored transposed (prepared.cuh). Not for 32 rows: the loops before `go_on` would lack the registers that it
  // needs.
  static constexpr bool TRANSPOSES = BULK && prepared_transposes(N);
  // Code that launches of more columns do not use would cost them 1 % of a step.
  static constexpr bool SPREADS = BULK && N <= SPREAD_COLUMNS;
  using BatchBlock::BatchBlock;
  DEVICE Place place(int block, int group) const {
    if constexpr (SPREADS) return spread_place(block, group);
    else return even_place(block, group);
  }

  // A thread has float4s of a warp's 16 features and eight rows: (feature, row) = (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
  // If K is not cut, they add up in shared memory that only this warp uses. If one matrix gates another, the two warps with the same tile
  // synchronize and take half of the rows each.
  static constexpr uint32_t ABSENT = ~0u;
  DEVICE static uint4 absent() { return make_uint4(ABSENT, ABSENT, ABSENT, ABSENT); }

  // After the ring's barriers: a barrier that signals the block's number, and the number.
  DEVICE uint32_t numbered() const { return base + p.numbered_at; }
  DEVICE int& number() const { return *reinterpret_cast<int*>(memory + p.numbered_at + 8); }
  // Run by one warp if K is cut. Returns which of the four shares of rows this block adds, one bit each, and ALONE in the block that
  // started last. Blocks count their start. A block that sees all four within a bounded number of polls stays and adds its share. Otherwise
  // it writes all its sums to the workspace and announces that in one atomic step with a last poll. The block that started last then adds
  // that share too, and it alone can rely on the sums of all others.
  static constexpr int ALONE = 16;
  DEVICE void agree() const {
    if (threadIdx.x % 32) return;
    number() = agree(announce());
#if __CUDA_ARCH__ >= 900
    if constexpr (BULK) barrier_arrive(numbered());
#endif
  }
  // Counts the start of this block; returns the count before.
  DEVICE int announce() const { return atomicAdd(p.arrivals + first, 16); }
  DEVICE int agree(int begun) const {
    int* const counter = p.arrivals + first;
    const int mine = 1 << order.first, before = begun + 16 >> 4 & 3;
    auto all_there = [&](int now) { return ((now >> 4) - (begun >> 4) & 0xfff) >= QUARTERS - before; };
    int shares = mine;
    if (before == QUARTERS - 1) {
      shares |= ~begun & 15;
      if (shares != mine) atomicOr(counter, 15);
      shares |= ALONE;
    } else {
      int tries = p.looks;
      while (--tries && !all_there(load_relaxed(counter)));
      if (tries == 0) {
        if (all_there(atomicAnd(counter, ~mine))) atomicOr(counter, mine);
        else shares = 0;
      }
    }
    return shares;
  }
  DEVICE static int load_relaxed(const int* from) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
  }
  DEVICE int agreed() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (BULK) barrier_wait(numbered(), 0);
#endif
    return __shfl_sync(~0u, number(), 0);
  }
  // N / 8 groups of eight rows are dealt in shares of SHARE groups, of which the last may have fewer; of 16 rows, two blocks have one group
  // each.
  static constexpr int SHARE = (EIGHTS + QUARTERS - 1) / QUARTERS;
  DEVICE static void leave_sums(float4* to, const float (&sums)[S], int but) {
#pragma unroll
    for (int q = 0; q < EIGHTS; q++)
      if (!(but >> q / SHARE & 1))
        asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + q * 32), "f"(sums[4 * q]), "f"(sums[4 * q + 1]),
                     "f"(sums[4 * q + 2]), "f"(sums[4 * q + 3])
                     : "memory");
  }
  // Keeps this warp's sums beside those of the quarters before, in the block's memory.
  DEVICE float4* own_sums() const { return reinterpret_cast<float4*>(memory + p.sums_at) + threadIdx.x / 32 * (EIGHTS * 32) + threadIdx.x % 32; }
  DEVICE float4* keep(bool begun, const float (&sums)[S]) const {
    float4* const to = own_sums();
#pragma unroll
    for (int q = 0; q < EIGHTS; q++) {
      const float4 before = begun ? to[q * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
      to[q * 32] = make_float4(before.x + sums[4 * q], before.y + sums[4 * q + 1], before.z + sums[4 * q + 2], before.w + sums[4 * q + 3]);
    }
    return to;
  }
  DEVICE void leave(int block, int quarter, float (&sums)[S]) const {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const Place here = place(block, group);
    if (!here.some) return;
    float4* to;
    if (p.cut == 1) {
      to = keep(BULK && quarter > 0, sums);
      if (quarter < QUARTERS - 1) return;
      if (TRANSPOSES && p.into) return;
    } else {
      float4* const places = p.sums + (size_t)(here.item * ITEM_TILES + warp) * (QUARTERS * EIGHTS * 32) + lane;
      to = places + quarter * (EIGHTS * 32);
      const int shares = agreed();
      const bool halves = p.paired && p.y_kind == OUT_F16 && !p.scaled;
      if (halves || !(shares & ALONE)) {
        leave_sums(to, sums, halves ? shares : 0);
        if (halves) add_halves(places, here, quarter, shares, sums);
        return;
      }
      add_all(places, quarter, sums);
#pragma unroll
      for (int q = 0; q < EIGHTS; q++) to[q * 32] = make_float4(sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]);
    }
    if (gated()) {
      const int half = p.groups / 2, mine = group >= half, pair = group - (mine ? half : 0), between = half * 4 * EIGHTS * 32;
      synchronize(pair);
      store_gated(to - lane - mine * between, between, (here.tile + warp) * TILE + 2 * (lane >> 3), mine);
      // The memory that was read here is written again in the next iteration.
      synchronize(pair);
    } else {
      store_item(here, to);
      if (p.cut > 1)
#pragma unroll
        for (int q = 0; q < EIGHTS; q++) reinterpret_cast<uint4*>(to)[q * 32] = absent();
    }
  }
  // Stores a warp's sums; this lane's are at `to`.
  DEVICE void store_item(const Place& here, const float4* to) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    __syncwarp();
    store_sums(to - lane, p.part[here.matrix], (here.tile + warp) * TILE + 2 * (lane >> 3));
    __syncwarp();
  }

  // Takes the sums of the other quarters for some groups of eight rows once they are present, and restores the workspace. `places`: this
  // lane's places of the first quarter.
  DEVICE static void take(uint4 (&v)[SHARE][QUARTERS - 1], float4* places, int quarter, int first) {
    uint4* const from = reinterpret_cast<uint4*>(places) + first * 32;
    uint4* const others[QUARTERS - 1] = {from + (quarter <= 0) * (EIGHTS * 32), from + (1 + (quarter <= 1)) * (EIGHTS * 32),
                                         from + (2 + (quarter <= 2)) * (EIGHTS * 32)};
    uint32_t largest;
    do {
      largest = 0;
#pragma unroll
      for (int q = 0; q < SHARE && (EIGHTS % QUARTERS == 0 || first + q < EIGHTS); q++)
#pragma unroll
        for (int k = 0; k < QUARTERS - 1; k++)
          asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[q][k].x), "=r"(v[q][k].y), "=r"(v[q][k].z), "=r"(v[q][k].w)
                       : "l"(others[k] + q * 32)
                       : "memory");
#pragma unroll
      for (int q = 0; q < SHARE && (EIGHTS % QUARTERS == 0 || first + q < EIGHTS); q++)
#pragma unroll
        for (int k = 0; k < QUARTERS - 1; k++) largest = max(largest, max(max(v[q][k].x, v[q][k].y), max(v[q][k].z, v[q][k].w)));
    } while (__any_sync(~0u, largest == ABSENT));
#pragma unroll
    for (int q = 0; q < SHARE && (EIGHTS % QUARTERS == 0 || first + q < EIGHTS); q++)
#pragma unroll
      for (int k = 0; k < QUARTERS - 1; k++) others[k][q * 32] = absent();
  }
  DEVICE static void add_all(float4* places, int quarter, float (&sums)[S]) {
#pragma unroll
    for (int first = 0; first < EIGHTS; first += SHARE) {
      uint4 v[SHARE][QUARTERS - 1];
      take(v, places, quarter, first);
#pragma unroll
      for (int q = 0; q < SHARE && (EIGHTS % QUARTERS == 0 || first + q < EIGHTS); q++) add_four(sums, 4 * (first + q), quarter, v[q]);
    }
  }
  // Adds this block's shares; results are pairs of halves.
  DEVICE void add_halves(float4* places, const Place& here, int quarter, int shares, float (&sums)[S]) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, odd = lane >> 2 & 1, token = 2 * (lane & 3) + odd;
    const BatchPart& part = p.part[here.matrix];
    const int n = (here.tile + warp) * TILE + (lane >> 3) * 2, stride = p.y_stride / 2;
    float bias[4];
    bias_of(bias, part, n);
#pragma unroll
    for (int first = 0; first < EIGHTS; first += SHARE) {
      if (!(shares >> first / SHARE & 1)) continue;
      const size_t at = place_of(part, n, 8 * first + token) / 2;
      __half2* const y = static_cast<__half2*>(p.y) + at;
      const __half2* const from = static_cast<const __half2*>(p.residual) + at;
      uint4 v[SHARE][QUARTERS - 1];
      __half2 residual[SHARE][2];
#pragma unroll
      for (int q = 0; q < SHARE && (EIGHTS % QUARTERS == 0 || first + q < EIGHTS); q++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const bool some = p.residual && 8 * (first + q) + token < p.m && n + 8 * h < part.a.out_features;
          residual[q][h] = some ? __ldcg(from + 8 * q * stride + 4 * h) : __half2(__half(0.f), __half(0.f));
        }
      take(v, places, quarter, first);
#pragma unroll
      for (int q = 0; q < SHARE && (EIGHTS % QUARTERS == 0 || first + q < EIGHTS); q++) {
        const int i = 4 * (first + q);
        add_four(sums, i, quarter, v[q]);
        const float4 r = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        // Lanes of neighbouring features exchange: one gets both of row 2 t, the other both of row 2 t + 1.
        const float low = __shfl_xor_sync(~0u, odd ? r.x : r.y, 4), high = __shfl_xor_sync(~0u, odd ? r.z : r.w, 4);
        if (8 * (first + q) + token >= p.m) continue;
        store_halves(y + 8 * q * stride, residual[q][0], part, n, odd ? make_float2(low, r.y) : make_float2(r.x, low), bias);
        store_halves(y + 8 * q * stride + 4, residual[q][1], part, n + 8, odd ? make_float2(high, r.w) : make_float2(r.z, high), bias + 2);
      }
    }
  }
  DEVICE void store_halves(__half2* y, __half2 residual, const BatchPart& part, int n, float2 v, const float* bias) const {
    if (n >= part.a.out_features) return;
    __half2 result = __floats2half2_rn(finish(v.x, 1.f, bias[0], part.a.prescale), finish(v.y, 1.f, bias[1], part.a.prescale));
    if (p.residual) {
      const float2 a = __half22float2(result), b = __half22float2(residual);
      result = __floats2half2_rn(a.x + b.x, a.y + b.y);
    }
    *y = result;
  }
  // Adds a quarter's own sums and the other three, in the order of quarters.
  DEVICE static float added(float own, int quarter, uint32_t a, uint32_t b, uint32_t c) {
    const float second = __uint_as_float(b), third = __uint_as_float(c);
    return ((__uint_as_float(a) + (quarter < 2 ? own : second)) + (quarter < 2 ? second : quarter == 2 ? own : third)) + (quarter < 3 ? third : own);
  }
  DEVICE static void add_four(float (&sums)[S], int i, int quarter, const uint4 (&v)[QUARTERS - 1]) {
    sums[i] = added(sums[i], quarter, v[0].x, v[1].x, v[2].x);
    sums[i + 1] = added(sums[i + 1], quarter, v[0].y, v[1].y, v[2].y);
    sums[i + 2] = added(sums[i + 2], quarter, v[0].z, v[1].z, v[2].z);
    sums[i + 3] = added(sums[i + 3], quarter, v[0].w, v[1].w, v[2].w);
  }
  // Barrier of the warpgroups of two gated items.
  DEVICE static void synchronize(int pair) { asm volatile("bar.sync %0, 256;" ::"r"(2 + pair) : "memory"); }

  // A thread adds and stores features n, n + 1, n + 8 and n + 9 of two rows at a time: `odd` selects one of each pair of groups of eight
  // rows.
  DEVICE static const float4* of_pair(const float4* places, int lane) { return places + (lane >> 2 & 1) * 32 + 8 * (lane >> 3) + (lane & 3); }
  DEVICE static void bias_of(float (&bias)[4], const BatchPart& part, int n) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int feature = n + i / 2 * 8 + i % 2;
      bias[i] = part.a.bias && feature < part.a.out_features ? part.a.bias[feature] : 0.f;
    }
  }
  DEVICE void store_sums(const float4* places, const BatchPart& part, int n) const {
    const int lane = threadIdx.x % 32, t = lane & 3, odd = lane >> 2 & 1;
    const float4* from = of_pair(places, lane);
    float bias[4];
    bias_of(bias, part, n);
    if (N >= 64 && p.paired && p.y_kind == OUT_F32 && !p.scaled && !p.residual) {
      // Logits: many results and little work for each, so no branch for each.
      const int token = 8 * odd + 2 * t, limit = part.a.out_features, stride = p.y_stride / 2;
      float2* to = static_cast<float2*>(p.y) + place_of(part, n, token) / 2;
#pragma unroll 2
      for (int q = 0; q < EIGHTS; q += 2, from += 64, to += 16 * stride) {
        const float4 low = from[0], high = from[4];
        store_floats(to, n < limit && token + 8 * q < p.m, low.x, high.x, bias, part.a.prescale);
        store_floats(to + stride, n < limit && token + 8 * q + 1 < p.m, low.y, high.y, bias, part.a.prescale);
        store_floats(to + 4, n + 8 < limit && token + 8 * q < p.m, low.z, high.z, bias + 2, part.a.prescale);
        store_floats(to + stride + 4, n + 8 < limit && token + 8 * q + 1 < p.m, low.w, high.w, bias + 2, part.a.prescale);
      }
      return;
    }
    constexpr int PAIRS = EIGHTS % 4 ? 1 : 2;
#pragma unroll 1
    for (int q = 0; q < EIGHTS; q += 2 * PAIRS, from += PAIRS * 64) {
      uint32_t residual[PAIRS][4];
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        if (p.residual)
#pragma unroll
          for (int k = 0; k < 4; k++) residual[i][k] = residual_of(part, n + k / 2 * 8, 8 * (q + 2 * i + odd) + 2 * t + k % 2);
      }
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const float4 low = from[i * 64], high = from[i * 64 + 4];
        const int token = 8 * (q + 2 * i + odd) + 2 * t;
        store_pair_of(part, n, token, low.x, high.x, bias, residual[i][0]);
        store_pair_of(part, n, token + 1, low.y, high.y, bias, residual[i][1]);
        store_pair_of(part, n + 8, token, low.z, high.z, bias + 2, residual[i][2]);
        store_pair_of(part, n + 8, token + 1, low.w, high.w, bias + 2, residual[i][3]);
      }
    }
  }
  DEVICE static void store_floats(float2* to, bool some, float a, float b, const float* bias, float prescale) {
    if (some) *to = make_float2(finish(a, 1.f, bias[0], prescale), finish(b, 1.f, bias[1], prescale));
  }
  // `between`: distance from a gate's sums to the sums that it gates. Handles rows 16 i .. 16 i + 15 for i with the parity of `mine`.
  DEVICE void store_gated(const float4* places, int between, int n, int mine) const {
    const int lane = threadIdx.x % 32, t = lane & 3, odd = lane >> 2 & 1;
    const uint32_t rows[2] = {rows_into(n), rows_into(n + 8)};
    const float4* from = of_pair(places, lane) + mine * 64;
    float bias[2][4];
    bias_of(bias[0], p.part[0], n);
    bias_of(bias[1], p.part[1], n);
#pragma unroll 1
    for (int q = 2 * mine; q < EIGHTS; q += 4, from += 128) {
      float4 low = from[0], high = from[4], up_low = from[between], up_high = from[between + 4];
      const int token = 8 * (q + odd) + 2 * t;
#pragma unroll 1
      for (int k = 0; k < 4; k++) {
        const int row = token + (k & 1), feature = n + (k >> 1) * 8;
        store_gated_pair(feature, row, k >> 1 ? rows[1] : rows[0], make_float2(low.x, high.x), make_float2(up_low.x, up_high.x), k >> 1 ? make_float4(bias[0][2], bias[0][3], bias[1][2], bias[1][3]) : make_float4(bias[0][0], bias[0][1], bias[1][0], bias[1][1]));
        low = shifted(low), high = shifted(high), up_low = shifted(up_low), up_high = shifted(up_high);
      }
    }
  }
  DEVICE static float4 shifted(float4 v) { return make_float4(v.y, v.z, v.w, v.x); }
  // The sums of features n and n + 1 of the gate and of the other matrix; biases likewise.
  DEVICE void store_gated_pair(int n, int token, uint32_t rows, float2 gate, float2 up, float4 bias) const {
    const bool onward = !TRANSPOSES && p.into;
    const int limit = p.part[0].a.out_features;
    if (token >= (onward ? N : p.m) || n >= limit) return;
    const float multiplier = p.scaled ? __ldcg(p.multipliers + token) : 1.f;
    const float g = p.part[0].a.prescale, u = p.part[1].a.prescale;
    const float a = one_gated(finish(gate.x, multiplier, bias.x, g), finish(up.x, multiplier, bias.z, u));
    const float b = one_gated(finish(gate.y, multiplier, bias.y, g), finish(up.y, multiplier, bias.w, u));
    if (onward) {
      const bool some = token < p.m;
      *reinterpret_cast<__half*>(p.into + prepared_place(rows & 0xffff, token, N)) = __float2half_rn(some ? a : 0.f);
      *reinterpret_cast<__half*>(p.into + prepared_place(rows >> 16, token, N)) = __float2half_rn(some ? b : 0.f);
    } else {
      store_two(p.part[0], n, token, a, b);
    }
  }
  // Rows of features n and n + 1 in the input layout of the next matmul.
  DEVICE uint32_t rows_into(int n) const {
    if (TRANSPOSES || !p.into || n >= p.part[0].a.out_features) return 0;
    return p.into_rows ? __ldg(reinterpret_cast<const uint32_t*>(p.into_rows + n)) : n * 0x10001u + 0x10000u;
  }
  // Stores gated results as halves in the input layout of the next matmul. A thread has two neighbouring rows of features n and n + 8, and
  // a feature's rows are contiguous there.
  DEVICE void go_on(int block) const {
    int thread;
    // Keeps the compiler from hoisting this above the loops, where registers are scarce.
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const Place here = place(block, group);
    if (!here.some) return;
    const int half = p.groups / 2, mine = group >= half, pair = group - (mine ? half : 0), between = half * 4 * EIGHTS * 32;
    const int n = (here.tile + warp) * TILE + (lane >> 2), limit = p.part[0].a.out_features;
    const float4* const gate = reinterpret_cast<float4*>(memory + p.sums_at) + (pair * 4 + warp) * (EIGHTS * 32) + lane;
    uint8_t* into[2];
    float bias[2][2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int feature = min(n + 8 * h, limit - 1);
      into[h] = p.into + prepared_transposed(p.into_rows ? __ldg(p.into_rows + feature) : feature, N) + (lane & 3) * 4;
#pragma unroll
      for (int i = 0; i < 2; i++) bias[i][h] = p.part[i].a.bias ? p.part[i].a.bias[feature] : 0.f;
    }
    synchronize(pair);
    if (p.gate == SILU) store_onward<true>(gate, gate + between, into, bias, n, mine);
    else store_onward<false>(gate, gate + between, into, bias, n, mine);
    // The memory that was read here is written again in the next iteration.
    synchronize(pair);
  }
  template <bool SILUS>
  DEVICE void store_onward(const float4* gates, const float4* ups, uint8_t* const (&into)[2], const float (&bias)[2][2], int n, int mine) const {
    const int token = 2 * (threadIdx.x & 3), limit = p.part[0].a.out_features;
    const float scales[2] = {p.part[0].a.prescale, p.part[1].a.prescale};
#pragma unroll 1
    for (int q = mine; q < EIGHTS; q += 2) {
      const float4 gate = gates[q * 32], up = ups[q * 32];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float v[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float g = finish(h ? i ? gate.w : gate.z : i ? gate.y : gate.x, 1.f, bias[0][h], scales[0]);
          const float u = finish(h ? i ? up.w : up.z : i ? up.y : up.x, 1.f, bias[1][h], scales[1]);
          const float rounded = __half2float(__float2half_rn(g));
          const float activated = SILUS ? silu_of_half(rounded) : activate(rounded, p.gate);
          v[i] = 8 * q + token + i < p.m ? activated * __half2float(__float2half_rn(u)) : 0.f;
        }
        if (n + 8 * h < limit) *reinterpret_cast<__half2*>(into[h] + q * 128) = __floats2half2_rn(v[0], v[1]);
      }
    }
  }
  DEVICE float one_gated(float gate, float up) const { return activate(rounded(gate, p.y_kind), p.gate) * rounded(up, p.y_kind); }

  DEVICE size_t place_of(const BatchPart& part, int n, int token) const { return (size_t)token * p.y_stride + part.y_offset + n; }
  // Two halves of the residual. With a residual, results are halves that are stored in pairs.
  DEVICE uint32_t residual_of(const BatchPart& part, int n, int token) const {
    if (token >= p.m || n >= part.a.out_features) return 0;
    return __ldcg(static_cast<const uint32_t*>(p.residual) + place_of(part, n, token) / 2);
  }
  DEVICE void store_pair_of(const BatchPart& part, int n, int token, float a, float b, const float* bias, uint32_t residual) const {
    if (token >= p.m || n >= part.a.out_features) return;
    const float multiplier = p.scaled ? __ldcg(p.multipliers + token) : 1.f;
    a = finish(a, multiplier, bias[0], part.a.prescale);
    b = finish(b, multiplier, bias[1], part.a.prescale);
    if (p.residual) {
      const bool bf16 = p.y_kind == OUT_BF16;
      const __half2 halves = *reinterpret_cast<__half2*>(&residual);
      a = rounded(a, p.y_kind) + (bf16 ? __uint_as_float(residual << 16) : __low2float(halves));
      b = rounded(b, p.y_kind) + (bf16 ? __uint_as_float(residual & 0xffff0000u) : __high2float(halves));
    }
    store_two(part, n, token, a, b);
  }
  DEVICE void store_two(const BatchPart& part, int n, int token, float a, float b) const {
    const size_t at = place_of(part, n, token);
    if (p.paired) {
      if (p.y_kind == OUT_F16) static_cast<__half2*>(p.y)[at / 2] = __floats2half2_rn(a, b);
      else if (p.y_kind == OUT_BF16) static_cast<__nv_bfloat162*>(p.y)[at / 2] = __floats2bfloat162_rn(a, b);
      else static_cast<float2*>(p.y)[at / 2] = make_float2(a, b);
    } else {
      store_result(p.y, at, p.y_kind, a);
      if (n + 1 < part.a.out_features) store_result(p.y, at + 1, p.y_kind, b);
    }
  }
};
#endif
