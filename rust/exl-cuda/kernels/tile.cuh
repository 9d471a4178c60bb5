// The device side of the tile layout (src/layout/mod.rs has its definition and plain twin): taking codes out of words, scales, and
// the product of one unit (16 features x up to 256 rows of K) with up to 8 * NT activation rows.
//
// Everything that adds is written out (fmaf, matrix instructions in a fixed order), so that every kernel that computes a unit's
// product gets the same bits, whatever NT and R are: a row's result does not depend on how many rows are in the call.
#pragma once
#include "common.cuh"

constexpr int TILE = 16, UNIT_ROWS = 256, CLASSES = 8;
enum { EXL2 = 0, GPTQ = 1 };

// One matrix; the same struct as `ops::linear::Matrix`.
struct Matrix {
  const uint8_t* image;
  const uint2* units;  // {offset in the tile, widths}, one more than there are units
  const __half* maxima;  // null for GPTQ
  const uint16_t* row_of_feature;  // null when rows stand in the features' order
  const float* bias;  // null when there is none
  int tiles, unit_count, rows, in_features, out_features;
  uint32_t tile_bytes;
  float prescale;
};

// ---------------------------------------------------------------------------------------------------- memory
struct SharedBytes {
  uint32_t at;
  DEVICE SharedBytes operator+(uint32_t o) const { return {at + o}; }
  DEVICE uint4 get16(uint32_t o) const {
    uint4 v;
    asm("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at + o) : "memory");
    return v;
  }
  DEVICE uint2 get8(uint32_t o) const {
    uint2 v;
    asm("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at + o) : "memory");
    return v;
  }
  DEVICE uint32_t get4(uint32_t o) const {
    uint32_t v;
    asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at + o) : "memory");
    return v;
  }
  DEVICE uint32_t get2(uint32_t o) const {
    uint16_t v;
    asm("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at + o) : "memory");
    return v;
  }
};
// Weights in global memory: read once, so first to be evicted.
struct GlobalBytes {
  const uint8_t* at;
  DEVICE GlobalBytes operator+(uint32_t o) const { return {at + o}; }
  DEVICE uint4 get16(uint32_t o) const { return __ldcs(reinterpret_cast<const uint4*>(at + o)); }
  DEVICE uint2 get8(uint32_t o) const { return __ldcs(reinterpret_cast<const uint2*>(at + o)); }
  DEVICE uint32_t get4(uint32_t o) const { return __ldcs(reinterpret_cast<const uint32_t*>(at + o)); }
  DEVICE uint32_t get2(uint32_t o) const { return __ldcs(reinterpret_cast<const uint16_t*>(at + o)); }
};

// A lane's B words of a chunk.
template <int B, class W>
DEVICE void load_words(uint32_t (&w)[B], W chunk, int lane) {
  constexpr int FOURS = B / 4;
#pragma unroll
  for (int i = 0; i < FOURS; i++) {
    const uint4 v = chunk.get16(i * 512 + lane * 16);
    w[4 * i] = v.x;
    w[4 * i + 1] = v.y;
    w[4 * i + 2] = v.z;
    w[4 * i + 3] = v.w;
  }
  if constexpr ((B & 2) != 0) {
    const uint2 v = chunk.get8(FOURS * 512 + lane * 8);
    w[4 * FOURS] = v.x;
    w[4 * FOURS + 1] = v.y;
  }
  if constexpr ((B & 1) != 0) w[B - 1] = chunk.get4(FOURS * 512 + (B & 2) * 128 + lane * 4);
}

// ---------------------------------------------------------------------------------------------------- codes to halves
DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t set) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(set));
  return r;
}
DEVICE uint32_t sub2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE uint32_t add2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// A code q at bit P of a half whose exponent makes that bit worth one reads 2^(10-P) + q. These are that half's bits, twice.
constexpr uint32_t magic(int p) { return static_cast<uint32_t>((25 - p) << 10) * 0x10001u; }

// Field F (of 16) of a lane's words, shifted so that its code stands at bit P of both halves.
template <int B, int F>
struct Field {
  static constexpr int PER_WORD = 16 / B;
  static constexpr bool SPARE = (B == 3 || B == 5) ? F == 15 : B == 6 ? F >= 12 : false;
  static constexpr int PLACE = F % PER_WORD;
  // Places whose top bit is at most 9 need no shift; the others come down by a shift that one word's fields share.
  static constexpr int UNSHIFTED = B == 2 ? 4 : B == 3 ? 3 : B == 4 ? 2 : B == 5 ? 2 : 1;
  static constexpr bool SHIFTED = !SPARE && PLACE >= UNSHIFTED;
  static constexpr int P = SPARE ? 0 : B * (SHIFTED ? PLACE - UNSHIFTED : PLACE);

  DEVICE static uint32_t shifted(const uint32_t (&w)[B]) {
    if constexpr (!SPARE) {
      return SHIFTED ? w[F / PER_WORD] >> (B * UNSHIFTED) : w[F / PER_WORD];
    } else if constexpr (B == 6) {
      const uint32_t high = w[4 + (F - 12) / 2] >> (8 + 2 * (F % 2));
      return ((w[F - 12] >> 12) & 0x000f000fu) | (high & 0x00300030u);
    } else {
      uint32_t v = 0;
#pragma unroll
      for (int i = 0; i < B; i++) v |= (w[i] >> (15 - i)) & (0x00010001u << i);
      return v;
    }
  }
  // 2^(10-P) + code, in both halves.
  DEVICE static uint32_t biased(const uint32_t (&w)[B]) {
    constexpr uint32_t mask = (((1u << B) - 1) << P) * 0x10001u;
    return and_or(shifted(w), mask, magic(P));
  }
};

// code - zero, exact, as two halves. EXL2's zero is a constant; GPTQ's is given as two equal halves.
template <int KIND, int B, int F>
DEVICE uint32_t centred(const uint32_t (&w)[B], uint32_t zero) {
  using T = Field<B, F>;
  if constexpr (KIND == EXL2) {
    constexpr uint32_t bias = magic(T::P) + static_cast<uint32_t>((1 << (B - 1)) << T::P) * 0x10001u;
    return sub2(T::biased(w), bias);
  } else {
    return sub2(T::biased(w), add2(magic(T::P), zero));
  }
}

// ---------------------------------------------------------------------------------------------------- scales
// The scale entries of a unit for features g and g + 8.
template <int KIND, int ENTRY, class W>
struct UnitScales;

template <int ENTRY, class W>
struct UnitScales<EXL2, ENTRY, W> {
  uint64_t codes;  // byte [entry]: code of g, code of g + 8 above it
  DEVICE void load(W scales, int g) {
    if constexpr (ENTRY == 128) {
      codes = scales.get2(g * 2);
    } else {
      const uint2 v = scales.get8(g * 8);
      codes = v.x | static_cast<uint64_t>(v.y) << 32;
    }
  }
  DEVICE uint2 zeros(int) const { return {0, 0}; }
  // h16((code + 1)^2 * maximum) of both features: two half roundings as the format demands; the square is exact.
  DEVICE uint32_t halves(int entry, __half maximum) const {
    const uint32_t byte = static_cast<uint32_t>(codes >> (8 * entry)) & 0xff;
    const uint32_t v = and_or(byte | byte << 12, 0x000f000fu, magic(0));
    const uint32_t c = sub2(v, 0x63fe63feu);  // minus 1023
    return mul2(mul2(c, c), __half_as_ushort(maximum) * 0x10001u);
  }
};

template <int ENTRY, class W>
struct UnitScales<GPTQ, ENTRY, W> {
  W scales;
  int g;
  DEVICE void load(W at, int row) {
    scales = at;
    g = row;
  }
  DEVICE uint2 zeros(int entry) const {
    const uint32_t z = scales.get4((entry * 8 + g) * 8 + 4);
    return {__byte_perm(z, z, 0x1010), __byte_perm(z, z, 0x3232)};
  }
  DEVICE uint32_t halves(int entry, __half) const { return scales.get4((entry * 8 + g) * 8); }
};

DEVICE float2 to_float2(uint32_t halves) { return __half22float2(*reinterpret_cast<const __half2*>(&halves)); }

// ---------------------------------------------------------------------------------------------------- products
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Sums of one row tile: element [n][i] is register i of the accumulator of activation rows 8 n .. 8 n + 7.
template <int NT>
using Sums = float[NT][4];

template <int NT>
DEVICE void clear(Sums<NT>& s) {
#pragma unroll
  for (int n = 0; n < NT; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
}
template <int NT>
DEVICE void add_scaled(Sums<NT>& total, const Sums<NT>& a, const Sums<NT>& b, float2 scale) {
#pragma unroll
  for (int n = 0; n < NT; n++) {
    total[n][0] = fmaf(scale.x, __fadd_rn(a[n][0], b[n][0]), total[n][0]);
    total[n][1] = fmaf(scale.x, __fadd_rn(a[n][1], b[n][1]), total[n][1]);
    total[n][2] = fmaf(scale.y, __fadd_rn(a[n][2], b[n][2]), total[n][2]);
    total[n][3] = fmaf(scale.y, __fadd_rn(a[n][3], b[n][3]), total[n][3]);
  }
}

// Sums of even and of odd matrix instructions: two short chains of dependent instructions instead of a long one.
template <int NT>
struct TwoSums {
  Sums<NT> even, odd;
  DEVICE void reset() {
    clear(even);
    clear(odd);
  }
};

// Matrix instruction J of a chunk: weights of four fields, activations of every column tile.
template <int KIND, int B, int NT, int J>
DEVICE void instruction(const uint32_t (&w)[B], uint2 zeros, const uint4 (&x)[NT], TwoSums<NT>& sums) {
  uint32_t a[4] = {centred<KIND, B, 4 * J>(w, zeros.x), centred<KIND, B, 4 * J + 1>(w, zeros.y),
                   centred<KIND, B, 4 * J + 2>(w, zeros.x), centred<KIND, B, 4 * J + 3>(w, zeros.y)};
#pragma unroll
  for (int n = 0; n < NT; n++) {
    if constexpr (J % 2 == 0) mma(sums.even[n], a, x[n].x, x[n].y);
    else mma(sums.odd[n], a, x[n].z, x[n].w);
  }
}

// One unit of R row tiles. X gives the eight halves of activation column tile n at a row of the unit.
template <int KIND, int ENTRY, int NT, int R, class W, class X>
struct UnitProduct {
  const W (&weights)[R];
  const X& x;
  const __half* maxima;  // of this unit's entries
  Sums<NT> (&total)[R];
  const int lane;
  UnitScales<KIND, ENTRY, W> scales[R];

  DEVICE void flush(int entry, const TwoSums<NT> (&sums)[R]) {
    const __half maximum = KIND == EXL2 ? maxima[entry] : __half(0.f);
#pragma unroll
    for (int r = 0; r < R; r++) add_scaled(total[r], sums[r].even, sums[r].odd, to_float2(scales[r].halves(entry, maximum)));
  }

  // 64 rows at row `64 c` of the unit, codes at byte `offset`. `first`/`last`: an entry of 128 rows begins / ends here.
  template <int B>
  DEVICE void chunk(int c, uint32_t offset, bool first, bool last, TwoSums<NT> (&sums)[R]) {
    uint32_t w[R][B];
#pragma unroll
    for (int r = 0; r < R; r++) load_words<B>(w[r], weights[r] + offset, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = 64 * c + 32 * h, entry = row / ENTRY;
      if (ENTRY == 32 || (h == 0 && first)) {
#pragma unroll
        for (int r = 0; r < R; r++) sums[r].reset();
      }
      uint4 xs[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) xs[n] = x.get(n, row);
#pragma unroll
      for (int r = 0; r < R; r++) {
        const uint2 zeros = scales[r].zeros(entry);
        if (h == 0) {
          instruction<KIND, B, NT, 0>(w[r], zeros, xs, sums[r]);
          instruction<KIND, B, NT, 1>(w[r], zeros, xs, sums[r]);
        } else {
          instruction<KIND, B, NT, 2>(w[r], zeros, xs, sums[r]);
          instruction<KIND, B, NT, 3>(w[r], zeros, xs, sums[r]);
        }
      }
      if (ENTRY == 32 || (h == 1 && last)) flush(entry, sums);
    }
  }

  // Four chunks of one width: the usual unit.
  template <int B>
  DEVICE void uniform() {
    TwoSums<NT> sums[R];
    constexpr int UNROLL = B == 4 && NT == 1 ? 2 : 1;
#pragma unroll UNROLL
    for (int pair = 0; pair < 2; pair++) {
      chunk<B>(2 * pair, 256 * B * pair, true, false, sums);
      chunk<B>(2 * pair + 1, 256 * B * pair + 128 * B, false, true, sums);
    }
  }

  template <int B>
  DEVICE void single(int c, uint32_t offset) {
    TwoSums<NT> sums[R];
    chunk<B>(c, offset, true, true, sums);
  }

  DEVICE void run(uint32_t widths) {
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) bits += widths >> (4 * c) & 15;
#pragma unroll
    for (int r = 0; r < R; r++) scales[r].load(weights[r] + 128 * bits, lane >> 2);
    switch (widths) {
      case 0x4444: return uniform<4>();
      case 0x3333: return uniform<3>();
      case 0x2222: return uniform<2>();
      case 0x8888: return uniform<8>();
    }
    if constexpr (KIND == EXL2) {
      if (widths == 0x5555) return uniform<5>();
      if (widths == 0x6666) return uniform<6>();
    }
    uint32_t offset = 0;
#pragma unroll 1
    for (int c = 0; c < 4; c++) {
      const uint32_t b = widths >> (4 * c) & 15;
      switch (b) {
        case 2: single<2>(c, offset); break;
        case 3: single<3>(c, offset); break;
        case 4: single<4>(c, offset); break;
        case 8: single<8>(c, offset); break;
      }
      if constexpr (KIND == EXL2) {
        if (b == 5) single<5>(c, offset);
        if (b == 6) single<6>(c, offset);
      }
      offset += 128 * b;
    }
  }
};

// ---------------------------------------------------------------------------------------------------- activations and results
// BF16 activations are carried as halves times a power of two of their row: exact down to 2^-39 of the row's largest value.
// `largest` is a row's largest magnitude; the answer is the factor, whose inverse is exact too.
DEVICE float row_factor(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 255) - 127;
  if (largest == 0.f || exponent == 128) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(min(14 - exponent, 120) + 127) << 23);
}

enum { OUT_F16 = 0, OUT_BF16 = 1, OUT_F32 = 2 };
DEVICE void store_result(void* y, size_t at, int kind, float v) {
  if (kind == OUT_F16) static_cast<__half*>(y)[at] = __float2half_rn(v);
  else if (kind == OUT_BF16) static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(v);
  else static_cast<float*>(y)[at] = v;
}
// (sum / row factor + bias) * prescale; `parts` are the eight class sums, `stride` apart, added in class order.
DEVICE float finish(const float* parts, int stride, float multiplier, const Matrix& a, int n) {
  float sum = parts[0];
#pragma unroll
  for (int c = 1; c < CLASSES; c++) sum += parts[c * stride];
  return fmaf(sum, multiplier, a.bias ? a.bias[n] : 0.f) * a.prescale;
}
