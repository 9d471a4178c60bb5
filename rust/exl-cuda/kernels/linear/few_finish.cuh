// The end of the kernel of 3 to 8 rows (few.cuh). It adds the classes, sends the quarters of a cut tile to the block that finishes it,
// applies the epilogue, and stores the results.
#pragma once
#include "common/cluster.cuh"
#include "linear/few_task.cuh"

#if __CUDA_ARCH__ >= 900
// Loads a half of either type, in few instructions.
DEVICE float load_half(const void* y, size_t at, int kind) {
  if (kind == OUT_F32) return static_cast<const float*>(y)[at];
  const uint32_t v = static_cast<const uint16_t*>(y)[at];
  return kind == OUT_BF16 ? __uint_as_float(v << 16) : __half2float(__ushort_as_half(v));
}
DEVICE uint16_t half_bits(float v, int kind) {
  return kind == OUT_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v)) : __half_as_ushort(__float2half_rn(v));
}
DEVICE float rounded_half(float v, int kind) {
  const uint32_t bits = half_bits(v, kind);
  return kind == OUT_F32 ? v : kind == OUT_BF16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
}

// A tile's results. Element e of a lane is (feature, row) = (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1). Rounds where separate
// operators round. Operands in global memory are requested before the sums are present.
template <bool GENERAL>
struct FewOutput {
  const FewTask& p;
  const int token;
  int feature, limit;
  size_t at;
  float bias[2], multiplier[2], prescale;
  float4 residual;
  uint32_t places;  // in the order of `next`: of features g and g + 8 in the halves of a word

  DEVICE FewOutput(const FewTask& p, int matrix, int tile) : p(p), token(2 * (threadIdx.x & 3)) {
    const FewPart& part = p.part[matrix];
    feature = tile * TILE + (threadIdx.x % 32 >> 2);
    limit = part.a.out_features;
    prescale = part.a.prescale;
    at = (size_t)token * p.y_stride + part.y_offset + feature;
    residual = make_float4(0.f, 0.f, 0.f, 0.f);
    places = feature | (feature + 8) << 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      bias[h] = part.a.bias && feature + 8 * h < limit ? part.a.bias[feature + 8 * h] : 0.f;
      multiplier[h] = p.scaled && token + h < p.m ? __ldcg(p.multipliers + token + h) : 1.f;
    }
    if (p.next && p.next_rows)
      places = (feature < limit ? p.next_rows[feature] : 0u) | (feature + 8 < limit ? p.next_rows[feature + 8] : 0u) << 16;
    if (!p.residual) return;
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (exists(e)) (&residual.x)[e] = load_half(p.residual, at + place(e), p.y_kind);
  }
  DEVICE bool exists(int e) const { return token + (e & 1) < p.m && feature + (e >> 1) * 8 < limit; }
  DEVICE size_t place(int e) const { return (size_t)((e & 1) * p.y_stride + (e >> 1) * 8); }
  DEVICE float value(int e, float sum) const { return finish(sum, multiplier[e & 1], bias[e >> 1], prescale); }
  // The activated results: of the first matrix as factors of the second one's, or of all. Missing rows are set to one: they hold stale
  // memory, with which a division may take its slow path.
  DEVICE float4 gates(float4 sum) const {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = exists(e) ? rounded_half(value(e, v[e]), p.y_kind) : 1.f;
    const int kind = GENERAL ? activation_of(p.gate) : p.gate;
    if (kind == SILU) {
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] = activate(v[e], SILU);
      return make_float4(v[0], v[1], v[2], v[3]);
    }
    sum = make_float4(v[0], v[1], v[2], v[3]);
#pragma unroll 1
    for (int e = 0; e < 4; e++) {
      sum.x = activate(sum.x, kind);
      sum = shifted(sum);
    }
    return sum;
  }
  DEVICE void put(int e, float v) const {
    if (p.next) {
      const uint32_t r = e >> 1 ? places >> 16 : places & 0xffff, to = (r >> 5) * 512 + ((token + (e & 1)) * 4 + (r >> 3 & 3)) * 16 + (r & 7) * 2;
      *reinterpret_cast<uint16_t*>(p.next + to) = half_bits(v, OUT_F16);
    }
    if (!p.y) return;
    if (p.y_kind == OUT_F32) static_cast<float*>(p.y)[at + place(e)] = v;
    else static_cast<uint16_t*>(p.y)[at + place(e)] = half_bits(v, p.y_kind);
  }
  DEVICE void store(float4 sum, float4 gate) {
    float v[4] = {sum.x, sum.y, sum.z, sum.w};
    const float g[4] = {gate.x, gate.y, gate.z, gate.w}, r[4] = {residual.x, residual.y, residual.z, residual.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (!activates<GENERAL>(p)) v[e] = value(e, v[e]);
      if (p.gate >= 0) v[e] = g[e] * rounded_half(v[e], p.y_kind);
      if (p.residual) v[e] = r[e] + rounded_half(v[e], p.y_kind);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const bool wanted = exists(e);
      if (wanted) put(e, v[e]);
      v[e] = wanted ? rounded_half(v[e], OUT_F16) : 0.f;
    }
    sum = make_float4(v[0], v[1], v[2], v[3]);
    if (p.next_squares) leave_squares(sum);
  }
  // As `eight_squares`: lanes 4 apart hold neighbouring features.
  DEVICE void leave_squares(float4 v) const {
    float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[e] = __fmul_rn(s[e], s[e]);
#pragma unroll
      for (int o = 4; o < 32; o *= 2) s[e] = __fadd_rn(s[e], __shfl_xor_sync(~0u, s[e], o));
    }
    if (threadIdx.x % 32 >= 4) return;
    float2* to = reinterpret_cast<float2*>(p.next_squares + feature + token);
    if (feature < limit) to[0] = make_float2(s[0], s[1]);
    if (feature + 8 < limit) to[4] = make_float2(s[2], s[3]);
  }
};

// The sum of a quarter, the block's number `j`, from the parts of its classes.
DEVICE float4 quarter_sum(uint32_t parts, int j, int quarters) {
  const uint32_t at = parts + j * 512, step = quarters * 512;
  const float4 a = shared_four(at), b = shared_four(at + 2 * step), c = shared_four(at + step), d = shared_four(at + 3 * step);
  return add4(add4(add4(a, b), c), d);
}
DEVICE float4 add_quarters(uint32_t at) {
  return add4(add4(add4(shared_four(at), shared_four(at + 512)), shared_four(at + 1024)), shared_four(at + 1536));
}

// Finishes tiles of which a block has all of K.
template <bool GENERAL>
DEVICE void finish_whole(const FewTask& p, uint32_t base, int finisher) {
  const FewBarriers s(p, base);
  const int lane = threadIdx.x % 32;
  const FewWalk walk(p);
  const uint32_t parts = base + p.results_at + finisher * (MULTIPLIERS * 512) + lane * 16;
  uint32_t phase = 0;
#pragma unroll 1
  for (int round = 0; round < walk.rounds; round++) {
    if (walk.finisher(round) != finisher) continue;
    int matrix, tile;
    walk.find(p, round, 0, matrix, tile);
    const uint32_t gates = base + p.exchange_at + (tile - walk.first) * 512 + lane * 16;  // of a gated tile
    const bool gated = p.gate >= 0;
    FewOutput<GENERAL> output(p, matrix, tile);
    barrier_wait(s.ready + finisher * 8, phase);
    phase ^= 1;
    float4 sum = quarter_sum(parts, 0, 4);
#pragma unroll
    for (int j = 1; j < 4; j++) sum = add4(sum, quarter_sum(parts, j, 4));
    warp_arrives(s.free + finisher * 8, lane);
    const bool first = gated && matrix == 0;
    if (first || activates<GENERAL>(p)) sum = output.gates(sum);
    if (first) {
      const float each[4] = {sum.x, sum.y, sum.z, sum.w};
      store_four(gates, each);
    } else {
      output.store(sum, gated ? shared_four(gates) : sum);
    }
  }
}

// Finishes tiles that the blocks of a cluster share: each block sends its quarters to the block that finishes the tile.
template <bool GENERAL>
DEVICE void finish_cut(const FewTask& p, uint32_t base, int finisher) {
  const FewBarriers s(p, base);
  const Cut c(p);
  const int lane = threadIdx.x % 32, cut = p.cut, quarters = c.quarters(), classes = c.classes();
  const bool gated = p.gate >= 0;
  // Tiles of an item that one block finishes, items of an iteration.
  const int tiles_log = gated, tiles = 1 << tiles_log, items = cut >> tiles_log;
  const FewWalk walk(p);
  const uint32_t parts = base + p.results_at + finisher * (MULTIPLIERS * 512) + lane * 16;
  uint32_t phase = 0;
#pragma unroll 1
  for (int round = finisher; round < walk.rounds; round += FINISHERS) {
    const int item = round * items;  // the first of the iteration
    // The item that this block finishes, if any, has index `own` in the iteration.
    const int own = (c.rank - item) & (cut - 1), mine = (item + own) >> c.log;
    int matrix = 0, tile = 0;
    const bool some = own < items && walk.find(p, round, tiles * own + tiles - 1, matrix, tile);
    FewOutput<GENERAL> output(p, matrix, some ? tile : 1 << 24);  // otherwise past all features
    barrier_wait(s.ready + finisher * 8, phase);
    phase ^= 1;
    // Four quarters in all: this block's quarters of the iteration's tiles.
#pragma unroll 2
    for (int i = 0; i < 4; i++) {
      const int place = i >> (2 - c.log), j = i & (quarters - 1);
      const int number = item + (place >> tiles_log), to = number & (cut - 1), exchange = number >> c.log;
      const uint32_t at = base + p.exchange_at + ((exchange * tiles + (place & (tiles - 1))) * 4 + c.rank * quarters + j) * 512 + lane * 16;
      send(address_of_block(at, to), address_of_block(s.exchange + exchange * 8, to), quarter_sum(parts + place * classes * 512, j, quarters));
    }
    warp_arrives(s.free + finisher * 8, lane);
    if (own >= items) continue;
    const uint32_t at = base + p.exchange_at + mine * tiles * 2048 + lane * 16;
    barrier_wait_cluster(s.exchange + mine * 8, 0);
    float4 gate = make_float4(1.f, 1.f, 1.f, 1.f);
    if (gated) gate = FewOutput<GENERAL>(p, 0, some ? tile : 1 << 24).gates(add_quarters(at));
    float4 sum = add_quarters(at + (tiles - 1) * 2048);
    if (__builtin_expect(activates<GENERAL>(p), 0)) sum = output.gates(sum);
    output.store(sum, gate);
  }
}
#endif
