// The device side of the tile layout, which src/layout/mod.rs defines together with a reference implementation. It turns packed words into
// codes and scales, and multiplies one unit (16 features x up to 256 rows of K) with up to 8 * NT activation rows.
//
// All additions are explicit (fmaf, matrix instructions in a fixed order). So all kernels that compute a unit's matmul give bitwise
// identical results for any NT and R. A row's result does not depend on the number of rows in the call.
//
// Where 128 rows have one scale, they are multiplied with the exact differences of codes and zeros, and their sum is scaled: a few
// multiplications for many rows. A scale for every 32 rows would need four times as many, each after a wait for the tensor cores, so such
// weights are scaled before they are multiplied, which rounds them to the halves that the file's format defines. Units of both kinds occur
// in a matrix whose entries have 32 rows: see ONE_SCALE_A_HALF.
#pragma once
#include <type_traits>

#include "common/abi.cuh"
#include "common/common.cuh"

// Unit u of a tile adds into class u % 16. `sum_classes` defines the order in which classes are added.
constexpr int TILE = 16, UNIT_ROWS = 256, CLASSES = 16;
enum { EXL2 = 0, GPTQ = 1 };

// A unit's widths: four bits for each chunk. Where entries have 32 rows, one more bit says that the entries of each half of the unit (128
// rows) are equal.
constexpr uint32_t ONE_SCALE_A_HALF = 65536;  // 1 << 16
constexpr int WIDTHS_BITS = 17;
constexpr uint32_t WIDTHS_MASK = (1u << WIDTHS_BITS) - 1;

// One matrix; the same struct as `ops::linear::Matrix`.
struct Matrix {
  const uint8_t* image;
  const uint2* units;  // {offset in the tile, widths}, one more than there are units
  const __half* maxima;  // null for GPTQ
  const uint16_t* row_of_feature;  // null if rows are in the features' order
  const float* bias;  // null if there is none
  int tiles, unit_count, rows, in_features, out_features;
  uint32_t tile_bytes;
  float prescale;
};
ABI_SIZE(Matrix, 72); ABI_AT(Matrix, image, 0); ABI_AT(Matrix, units, 8); ABI_AT(Matrix, maxima, 16);
ABI_AT(Matrix, row_of_feature, 24); ABI_AT(Matrix, bias, 32); ABI_AT(Matrix, tiles, 40); ABI_AT(Matrix, unit_count, 44);
ABI_AT(Matrix, rows, 48); ABI_AT(Matrix, in_features, 52); ABI_AT(Matrix, out_features, 56); ABI_AT(Matrix, tile_bytes, 60);
ABI_AT(Matrix, prescale, 64);

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
// Entries' maxima in shared memory.
struct SharedMaxima {
  uint32_t at;
  DEVICE __half operator[](int entry) const { return __ushort_as_half(SharedBytes{at}.get2(entry * 2)); }
};
// Those of entries 2 c and 2 c + 1.
DEVICE uint32_t two_maxima(const SharedMaxima& maxima, int c) { return SharedBytes{maxima.at}.get4(c * 4); }
DEVICE uint32_t two_maxima(const __half* maxima, int c) { return __ldg(reinterpret_cast<const uint32_t*>(maxima) + c); }
// Weights in global memory are read once, so their lines are evicted first.
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

// One half of a word, twice.
DEVICE uint32_t low_twice(uint32_t v) {
  uint32_t r;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(r) : "r"(v));
  return r;
}
DEVICE uint32_t high_twice(uint32_t v) {
  uint32_t r;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(r) : "r"(v));
  return r;
}

// A code q at bit P of a half whose exponent makes that bit worth one reads 2^(10-P) + q. This is the bit pattern of that half without q,
// twice.
constexpr uint32_t magic(int p) { return static_cast<uint32_t>((25 - p) << 10) * 0x10001u; }

// Field F = 4 J + R of a lane's words: register R of the A operand of matrix instruction J. R = upper + 2 * second: upper registers hold
// features g + 8 and second ones the next two rows. Its code is at bit BIT of both halves of word WORD, and at bit P after a shift that the
// fields of a word share. `pieces` in src/layout/mod.rs has the same table.
template <int B, int F>
struct Field {
  static constexpr int J = F / 4, R = F % 4, UPPER = R % 2, SECOND = R / 2, SLOT = 2 * J + SECOND;
  static constexpr bool SPARE = B == 3 ? F == 15 : B == 5 ? (F == 11) : B == 6 ? F >= 12 : false;
  static constexpr int WORD = SPARE    ? 0
                              : B == 2 ? J / 2
                              : B == 3 ? (J < 3 ? J : R)
                              : B == 4 ? J
                              : B == 5 ? (J == 3 ? 1 + R : SLOT == 5 ? 0 : SLOT)
                                       : F / 2;
  static constexpr int BIT = B == 2   ? 4 * (J % 2) + 2 * UPPER + 8 * SECOND
                             : B == 3 ? (J < 3 ? 3 * UPPER + 9 * SECOND : 6)
                             : B == 4 ? 4 * UPPER + 8 * SECOND
                             : B == 5 ? (J == 3 || (SLOT == 5 && !UPPER) ? 10 : 5 * UPPER)
                                      : B * UPPER;
  static constexpr int SHIFT = B == 2   ? 8 * SECOND
                               : B == 3 ? (J < 3 ? 9 * SECOND : 0)
                               : B == 4 ? 8 * SECOND
                               : B == 5 ? (BIT == 10 ? 10 : 0)
                                        : BIT;
  static constexpr int P = SPARE && B == 6 ? 0 : BIT - SHIFT;
  static constexpr uint32_t MASK = (((1u << B) - 1) << P) * 0x10001u;

  // A code that is split over several words, at bit P of both halves.
  DEVICE static uint32_t spare(const uint32_t (&w)[B]) {
    uint32_t v = 0;
    if constexpr (B == 6) {
      const uint32_t high = w[4 + (F - 12) / 2] >> (8 + 2 * (F % 2));
      return ((w[F - 12] >> 12) & 0x000f000fu) | (high & 0x00300030u);
    } else {
#pragma unroll
      for (int i = 0; i < B; i++) v |= (w[i] >> (15 - P - i)) & (0x00010001u << (P + i));
    }
    return v;
  }
  // 2^(10-P) + code, in both halves.
  DEVICE static uint32_t biased(const uint32_t (&w)[B]) {
    if constexpr (SPARE) return spare(w) | magic(P);
    else return and_or(w[WORD] >> SHIFT, MASK, magic(P));
  }
};

// code - zero, exact, as two halves. The zero of EXL2 is a constant; GPTQ's is passed as two equal halves.
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
  // (code + 1)^2 of both features, exact.
  DEVICE uint32_t squares(int entry) const {
    const uint32_t byte = static_cast<uint32_t>(codes >> (8 * entry)) & 0xff;
    const uint32_t v = and_or(byte | byte << 12, 0x000f000fu, magic(0));
    const uint32_t c = sub2(v, 0x63fe63feu);  // minus 1023
    return mul2(c, c);
  }
  // h16((code + 1)^2 * maximum) of both features: two half roundings as the format requires.
  DEVICE uint32_t halves(int entry, __half maximum) const { return mul2(squares(entry), __half_as_ushort(maximum) * 0x10001u); }
  // The same of entries 2 c and 2 c + 1, in the halves of a word: x for feature g, y for g + 8.
  template <class M>
  DEVICE uint2 two(int c, const M& maxima) const {
    const uint32_t word = static_cast<uint32_t>(c & 2 ? codes >> 32 : codes), bytes = __byte_perm(word, 0, c & 1 ? 0x4342 : 0x4140);
    const uint32_t both = two_maxima(maxima, c);
    return {mul2(next_square<0>(bytes), both), mul2(next_square<4>(bytes), both)};
  }
  // (code + 1)^2 of the codes at bit P of both halves, exact.
  template <int P>
  DEVICE static uint32_t next_square(uint32_t bytes) {
    constexpr uint32_t BEFORE_ZERO = (P == 0 ? 0x63fe : 0x53e0) * 0x10001u;  // 2^(10 - P) - 1
    const uint32_t c = sub2(and_or(bytes, 0x000f000fu << P, magic(P)), BEFORE_ZERO);
    return mul2(c, c);
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
  template <class M>
  DEVICE uint2 two(int c, const M&) const {
    const uint32_t first = halves(2 * c, __half(0.f)), second = halves(2 * c + 1, __half(0.f));
    return {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)};
  }
};

// Whether a unit's weights are scaled before they are multiplied.
template <int ENTRY>
DEVICE bool scales_weights(uint32_t widths) {
  return ENTRY == 32 && !(widths & ONE_SCALE_A_HALF);
}

// The A operand of matrix instruction J of a chunk: differences of codes and zeros or, if SCALED, weights. `scales`: those of the chunk's
// two entries.
template <int KIND, bool SCALED, int B, int J>
DEVICE void operand(uint32_t (&a)[4], const uint32_t (&w)[B], uint2 zeros, uint2 scales) {
  a[0] = centred<KIND, B, 4 * J>(w, zeros.x);
  a[1] = centred<KIND, B, 4 * J + 1>(w, zeros.y);
  a[2] = centred<KIND, B, 4 * J + 2>(w, zeros.x);
  a[3] = centred<KIND, B, 4 * J + 3>(w, zeros.y);
  if constexpr (SCALED) {
    const uint32_t low = J < 2 ? low_twice(scales.x) : high_twice(scales.x), high = J < 2 ? low_twice(scales.y) : high_twice(scales.y);
    a[0] = mul2(a[0], low);
    a[1] = mul2(a[1], high);
    a[2] = mul2(a[2], low);
    a[3] = mul2(a[3], high);
  }
}

DEVICE float2 to_float2(uint32_t halves) { return __half22float2(*reinterpret_cast<const __half2*>(&halves)); }

// ---------------------------------------------------------------------------------------------------- matmul
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

// Bytes of a unit's codes; its scales follow them.
DEVICE uint32_t code_bytes(uint32_t widths) {
  uint32_t bits = 0;
#pragma unroll
  for (int c = 0; c < 4; c++) bits += widths >> (4 * c) & 15;
  return 128 * bits;
}

// Sums of one row tile: element [n][i] is register i of the accumulator of activation rows 8 n .. 8 n + 7.
template <int NT>
using Sums = float[NT][4];

template <int NT>
DEVICE void clear(Sums<NT>& s) {
#pragma unroll
  for (int n = 0; n < NT; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
}

// One unit of R row tiles. `x.get(n, k)` returns the eight halves of activation column tile n at row k of the unit.
//
// Half a unit is one chain of matrix instructions in the order of k. If weights are SCALED, its sum is added to `total`, else its sum times
// the scale of these rows. The chain does not begin with `total`, so that a warp does not wait for its other half.
template <int KIND, int ENTRY, int NT, int R, class W, class X, class M = const __half*>
struct UnitMatmul {
  const W (&weights)[R];
  const X& x;
  const M maxima;  // of this unit's entries
  Sums<NT> (&total)[R];
  const int lane;
  UnitScales<KIND, ENTRY, W> scales[R];

  DEVICE static void reset(Sums<NT> (&sums)[R]) {
#pragma unroll
    for (int r = 0; r < R; r++) clear(sums[r]);
  }

  // Adds the sums of half p.
  template <bool SCALED>
  DEVICE void add(int p, const Sums<NT> (&sums)[R]) {
    if constexpr (SCALED) {
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) total[r][n][i] += sums[r][n][i];
    } else {
      flush(p * (UNIT_ROWS / 2 / ENTRY), sums);
    }
  }
  DEVICE void flush(int entry, const Sums<NT> (&sums)[R]) {
    const __half maximum = KIND == EXL2 ? maxima[entry] : __half(0.f);
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float2 scale = to_float2(scales[r].halves(entry, maximum));
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[r][n][i] = fmaf(i / 2 ? scale.y : scale.x, sums[r][n][i], total[r][n][i]);
    }
  }

  template <bool SCALED, int B, int J>
  DEVICE static void instruction(const uint32_t (&w)[B], uint2 zeros, uint2 scales, const uint4 (&xs)[NT], Sums<NT>& sums) {
    uint32_t a[4];
    operand<KIND, SCALED, B, J>(a, w, zeros, scales);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if constexpr (J % 2 == 0) mma(sums[n], a, xs[n].x, xs[n].y);
      else mma(sums[n], a, xs[n].z, xs[n].w);
    }
  }

  // 64 rows at row `64 c` of the unit, codes at byte `offset`.
  template <bool SCALED, int B>
  DEVICE void chunk(int c, uint32_t offset, Sums<NT> (&sums)[R]) {
    uint32_t w[R][B];
#pragma unroll
    for (int r = 0; r < R; r++) load_words<B>(w[r], weights[r] + offset, lane);
    uint2 scale[R] = {};
    if constexpr (SCALED)
#pragma unroll
      for (int r = 0; r < R; r++) scale[r] = scales[r].two(c, maxima);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint4 xs[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) xs[n] = x.get(n, 64 * c + 32 * h);
#pragma unroll
      for (int r = 0; r < R; r++) {
        const uint2 zeros = scales[r].zeros((64 * c + 32 * h) / ENTRY);
        if (h == 0) {
          instruction<SCALED, B, 0>(w[r], zeros, scale[r], xs, sums[r]);
          instruction<SCALED, B, 1>(w[r], zeros, scale[r], xs, sums[r]);
        } else {
          instruction<SCALED, B, 2>(w[r], zeros, scale[r], xs, sums[r]);
          instruction<SCALED, B, 3>(w[r], zeros, scale[r], xs, sums[r]);
        }
      }
    }
  }

  // Half p of the unit, whose chunks have one width.
  template <bool SCALED, int B>
  DEVICE void pair(int p, uint32_t offset) {
    Sums<NT> sums[R];
    reset(sums);
    chunk<SCALED, B>(2 * p, offset, sums);
    chunk<SCALED, B>(2 * p + 1, offset + 128 * B, sums);
    add<SCALED>(p, sums);
  }

  // Four chunks of one width, the most frequent kind of unit.
  template <bool SCALED, int B>
  DEVICE void uniform() {
    // Wide codes from global memory stay in registers from load to use: two entries of them would not fit.
    constexpr bool SHORT = B <= 4 || !std::is_same<W, GlobalBytes>::value;
    constexpr int UNROLL = NT == 1 && R == 1 && SHORT ? 2 : 1;
#pragma unroll UNROLL
    for (int p = 0; p < 2; p++) pair<SCALED, B>(p, 256 * B * p);
  }

  DEVICE void load_scales(uint32_t at) {
#pragma unroll
    for (int r = 0; r < R; r++) scales[r].load(weights[r] + at, lane >> 2);
  }
  template <bool SCALED, int B>
  DEVICE void run_uniform() {
    load_scales(512 * B);
    uniform<SCALED, B>();
  }
  DEVICE void run(uint32_t widths) { run(widths, code_bytes(widths)); }
  // `scales_at`: offset of the scales in the unit.
  DEVICE void run(uint32_t widths, uint32_t scales_at) {
    load_scales(scales_at);
    if constexpr (ENTRY == 32)
      if (scales_weights<ENTRY>(widths)) return run_widths<true>(widths);
    run_widths<false>(ENTRY == 32 ? widths & ~ONE_SCALE_A_HALF : widths);
  }
  template <bool SCALED>
  DEVICE void run_widths(uint32_t widths) {
    switch (widths) {
      case 0x4444: return uniform<SCALED, 4>();
      case 0x3333: return uniform<SCALED, 3>();
      case 0x2222: return uniform<SCALED, 2>();
      case 0x8888: return uniform<SCALED, 8>();
    }
    if constexpr (KIND == EXL2) {
      if (widths == 0x5555) return uniform<SCALED, 5>();
      if (widths == 0x6666) return uniform<SCALED, 6>();
    }
    mixed<SCALED>(widths);
  }
  template <bool SCALED>
  DEVICE void run_mixed(uint32_t widths) {
    load_scales(code_bytes(widths));
    mixed<SCALED>(widths);
  }
  // A unit of several widths, chunk after chunk.
  template <bool SCALED>
  DEVICE void mixed(uint32_t widths) {
    uint32_t offset = 0;
#pragma unroll 1
    for (int p = 0; p < 2 && (widths >> (8 * p) & 15) != 0; p++) {
      Sums<NT> sums[R];
      reset(sums);
#pragma unroll 1
      for (int c = 2 * p; c < 2 * p + 2; c++) {
        const uint32_t b = widths >> (4 * c) & 15;
        switch (b) {
          case 2: chunk<SCALED, 2>(c, offset, sums); break;
          case 3: chunk<SCALED, 3>(c, offset, sums); break;
          case 4: chunk<SCALED, 4>(c, offset, sums); break;
          case 8: chunk<SCALED, 8>(c, offset, sums); break;
        }
        if constexpr (KIND == EXL2) {
          if (b == 5) chunk<SCALED, 5>(c, offset, sums);
          if (b == 6) chunk<SCALED, 6>(c, offset, sums);
        }
        offset += 128 * b;
      }
      add<SCALED>(p, sums);
    }
  }
};

// ---------------------------------------------------------------------------------------------------- activations and results
// BF16 activations are carried as halves times a power of two of their row: exact down to 2^-39 of the row's largest value. `largest` is a
// row's largest magnitude. Returns the factor, whose inverse is exact too.
DEVICE float row_factor(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 255) - 127;
  if (largest == 0.f || exponent == 128) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(min(14 - exponent, 120) + 127) << 23);
}
// For a row that a block of WARPS warps holds. `most`: the largest magnitude of this thread's elements; `largest`: memory for the warps'
// maxima.
template <int WARPS>
DEVICE float block_row_factor(int tid, float most, float (&largest)[WARPS]) {
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  if (tid % 32 == 0) largest[tid / 32] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) most = fmaxf(most, largest[w]);
  return row_factor(most);
}

enum { OUT_F16 = 0, OUT_BF16 = 1, OUT_F32 = 2 };
DEVICE void store_result(void* y, size_t at, int kind, float v) {
  if (kind == OUT_F16) static_cast<__half*>(y)[at] = __float2half_rn(v);
  else if (kind == OUT_BF16) static_cast<__nv_bfloat16*>(y)[at] = __float2bfloat16_rn(v);
  else static_cast<float*>(y)[at] = v;
}
DEVICE float rounded(float v, int kind) {
  return kind == OUT_F16 ? __half2float(__float2half_rn(v)) : kind == OUT_BF16 ? __bfloat162float(__float2bfloat16_rn(v)) : v;
}
DEVICE float load_result(const void* y, size_t at, int kind) {
  return kind == OUT_F16    ? __half2float(static_cast<const __half*>(y)[at])
         : kind == OUT_BF16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(y)[at])
                            : static_cast<const float*>(y)[at];
}
// Adds the sums of classes in their one order: `part(c)` is the sum of class c. Quarters of K (classes equal modulo 4) add up separately
// first, so that a kernel can cut K in four and walk it with two sums beside a class's.
template <class F>
DEVICE float sum_classes(F part) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float quarter = ((part(j) + part(j + 8)) + part(j + 4)) + part(j + 12);
    sum = j == 0 ? quarter : sum + quarter;
  }
  return sum;
}
// (sum / row factor + bias) * prescale.
DEVICE float finish(float sum, float multiplier, float bias, float prescale) {
  return fmaf(sum, multiplier, bias) * prescale;
}
