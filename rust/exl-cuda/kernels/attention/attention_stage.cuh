// A stage: 64 keys (or values) of one head in shared memory, packed as in the pages. This file copies stages in and multiplies directly
// from the packed form.
//
// In packed keys a lane's operands are contiguous: lane t of four has the t-th quarter of the row's dimensions, and queries are packed to
// match (`query_word`). Half keys keep their natural order. In mma m16n8k16, lane 4 g + t holds rows g and g + 8 of A and C, and column g
// of B.
#pragma once
#include "common/hadamard.cuh"

constexpr int STAGE = 64;  // keys

template <int CODEC>
constexpr bool is_hadamard() { return CODEC >= HADAMARD8; }
// Bytes of eight elements.
template <int CODEC>
constexpr int unit_bytes() { return CODEC == F16 ? 16 : CODEC == HADAMARD4 ? 4 : 8; }
template <int CODEC, int DIM>
constexpr int row_bytes() { return DIM / 8 * unit_bytes<CODEC>(); }
// Bytes between rows of a stage, padded so that the reads below have no bank conflict (two-way for 256 dimensions of 8 bits).
template <int CODEC, int DIM>
constexpr int key_stride() { return row_bytes<CODEC, DIM>() + (row_bytes<CODEC, DIM>() <= 64 ? 0 : 16); }
template <int CODEC, int DIM>
constexpr int value_stride() { return DIM / 8 * unit_bytes<CODEC>() + 16; }
template <int CODEC, int DIM>
constexpr int scale_bytes() { return is_hadamard<CODEC>() ? DIM / 32 * 2 : 0; }
template <int CODEC, int DIM>
constexpr int key_stage_bytes() { return STAGE * (key_stride<CODEC, DIM>() + scale_bytes<CODEC, DIM>()); }
template <int CODEC, int DIM>
constexpr int value_stage_bytes() { return STAGE * (value_stride<CODEC, DIM>() + scale_bytes<CODEC, DIM>()); }
// Place of element e of a query: half `half` of word `word` of lane t of four. Words 2s and 2s + 1 belong to mma s of 16 dimensions.
struct QueryPlace {
  int t, word, half;
};
template <int CODEC, int DIM>
DEVICE QueryPlace query_place(int e) {
  if constexpr (CODEC == F16) return {e % 8 / 2, e / 16 * 2 + e % 16 / 8, e & 1};
  const int t = e / (DIM / 4), i = e % (DIM / 4);
  if constexpr (CODEC == HADAMARD4) return {t, i / 8 * 4 + (i & 3), i >> 2 & 1};
  return {t, i / 2, i & 1};
}
// Dimension of a result: column `c` of tile `n` of eight columns.
DEVICE int result_dim(bool natural, int n, int c) { return natural ? n * 8 + c : (n >> 3) * 64 + c * 8 + (n & 7); }

// Copies BYTES into shared memory asynchronously, or writes zeros if not `present`.
template <int BYTES>
DEVICE void copy_async(void* to, const void* from, bool present) {
#if __CUDA_ARCH__ >= 800
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  const int size = present ? BYTES : 0;
  if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(size) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(size) : "memory");
#else
  for (int i = 0; i < BYTES / 4; i++) reinterpret_cast<uint32_t*>(to)[i] = present ? reinterpret_cast<const uint32_t*>(from)[i] : 0u;
#endif
}
DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING>
DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a2), "r"(a3), "r"(b1));
#endif
}

DEVICE uint32_t as_word(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }
DEVICE __half2 as_half2(uint32_t v) { return *reinterpret_cast<__half2*>(&v); }
// Codes are in the mantissas of halves. Subtracting the bias is exact; multiplying by the scale rounds once.
DEVICE uint32_t scaled(uint32_t word, uint32_t bias, __half2 scale) { return as_word(__hmul2(__hsub2(as_half2(word), as_half2(bias)), scale)); }
template <uint32_t MASK, uint32_t ONE>
DEVICE uint32_t field(uint32_t word) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "n"(MASK), "n"(ONE));
  return out;
}
// Nibbles i and i + 4 of a word as halves, i = 0..3. Halves from 1024 on have steps of 1, halves from 64 on steps of 1/16: a field at bit 4
// needs no shift.
DEVICE void nibble_pairs(uint32_t (&out)[4], uint32_t word, __half2 scale) {
  out[0] = scaled(field<0x000f000fu, 0x64006400u>(word), 0x64086408u, scale);
  out[1] = scaled(field<0x00f000f0u, 0x54005400u>(word), 0x54805480u, scale);
  word >>= 8;
  out[2] = scaled(field<0x000f000fu, 0x64006400u>(word), 0x64086408u, scale);
  out[3] = scaled(field<0x00f000f0u, 0x54005400u>(word), 0x54805480u, scale);
}
// Two bytes of a word (0 and 1, or 2 and 3) as halves.
template <int CODEC, bool UPPER>
DEVICE uint32_t byte_pair(uint32_t word, __half2 scale) {
  if constexpr (CODEC == E5M2) return __byte_perm(word, 0, UPPER ? 0x3424 : 0x1404);
  return scaled(__byte_perm(word, 0x64646464u, UPPER ? 0x4342 : 0x4140), 0x64806480u, scale);
}
DEVICE __half2 zero_half2() { return __half2half2(__ushort_as_half(0)); }

// A lane's quarter of a packed key, as operands of the mma of 16 dimensions each. `scales`: those of the key.
template <int CODEC, int DIM>
DEVICE void key_words(uint32_t (&out)[DIM / 8], const uint8_t* row, const __half* scales) {
  constexpr int BYTES = row_bytes<CODEC, DIM>() / 4, WORDS = BYTES / 4, RUN = CODEC == HADAMARD4 ? 4 : 8;  // words in a run of 32
  const int t = threadIdx.x & 3;
  uint32_t words[WORDS];
  if constexpr (BYTES == 8) *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(row + t * 8);
  else
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) reinterpret_cast<uint4*>(words)[i] = *reinterpret_cast<const uint4*>(row + t * BYTES + 16 * i);
#pragma unroll
  for (int first = 0; first < WORDS; first += RUN) {
    __half2 scale = zero_half2();
    if constexpr (is_hadamard<CODEC>()) scale = __half2half2(scales[(t * WORDS + first) / RUN]);
#pragma unroll
    for (int i = first; i < first + RUN && i < WORDS; i++) {
      if constexpr (CODEC == HADAMARD4) nibble_pairs(reinterpret_cast<uint32_t(&)[4]>(out[4 * i]), words[i], scale);
      else out[2 * i] = byte_pair<CODEC, false>(words[i], scale), out[2 * i + 1] = byte_pair<CODEC, true>(words[i], scale);
    }
  }
}
template <bool TRANSPOSED>
DEVICE void load_matrices(uint32_t (&r)[4], const void* at) {
  const uint32_t from = (uint32_t)__cvta_generic_to_shared(at);
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

// For prefill: logits[n] = queries x keys 8n..8n+7 of the stage. `queries`: words of this lane's rows g and g + 8, four at a time, in
// registers, or in shared memory at `rows` if the head is too large for registers.
template <int CODEC, int DIM, bool REGISTERS>
DEVICE void stage_logits(float (&logits)[8][4], const uint8_t* stage, const uint4 (*queries)[2], const uint4* rows) {
  constexpr int STRIDE = key_stride<CODEC, DIM>();
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int n = 0; n < 8; n++) {
    logits[n][0] = logits[n][1] = logits[n][2] = logits[n][3] = 0.f;
    uint32_t words[CODEC == F16 ? 4 : DIM / 8];
    if constexpr (CODEC != F16)
      key_words<CODEC, DIM>(words, stage + (8 * n + g) * STRIDE,
                            reinterpret_cast<const __half*>(stage + STAGE * STRIDE) + (8 * n + g) * (DIM / 32));
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) {
      uint32_t* k = CODEC == F16 ? words : words + 4 * j;
      if constexpr (CODEC == F16)
        load_matrices<false>(reinterpret_cast<uint32_t(&)[4]>(*k), stage + (8 * n + (lane & 7)) * STRIDE + j * 64 + (lane >> 3) * 16);
      const uint4 low = REGISTERS ? queries[j][0] : rows[j * 64 + lane], high = REGISTERS ? queries[j][1] : rows[j * 64 + 32 + lane];
      mma(logits[n], low.x, high.x, low.y, high.y, k[0], k[1]);
      mma(logits[n], low.z, high.z, low.w, high.w, k[2], k[3]);
    }
  }
}

template <int DIM, int TILES>
DEVICE void stage_values_f16(float (&sums)[TILES][4], const uint8_t* stage, int first, const uint32_t (&weights)[4][4]) {
  constexpr int STRIDE = value_stride<F16, DIM>();
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const uint8_t* at = stage + (16 * s + (lane >> 3 & 1) * 8 + (lane & 7)) * STRIDE + (first + (lane >> 4)) * 16;
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
      uint32_t b[4];
      load_matrices<true>(b, at + n * 16);
      mma(sums[n], weights[s][0], weights[s][1], weights[s][2], weights[s][3], b[0], b[1]);
      mma(sums[n + 1], weights[s][0], weights[s][1], weights[s][2], weights[s][3], b[2], b[3]);
    }
  }
}

// COUNT (2, 4 or 8) neighbouring elements of two keys at `a` and `b`: word i holds element i of both, times the `scale` of each.
template <int CODEC, int COUNT>
DEVICE void value_pairs(uint32_t (&out)[COUNT], const uint8_t* a, const uint8_t* b, __half2 scale) {
  if constexpr (CODEC == HADAMARD4) {
    if constexpr (COUNT == 2) {
      const uint32_t both = *a | *b << 16;
      out[0] = scaled(field<0x000f000fu, 0x64006400u>(both), 0x64086408u, scale);
      out[1] = scaled(field<0x00f000f0u, 0x54005400u>(both), 0x54805480u, scale);
    } else if constexpr (COUNT == 4) {
      nibble_pairs(out, *reinterpret_cast<const uint16_t*>(a) | *reinterpret_cast<const uint16_t*>(b) << 16, scale);
    } else {
      const uint32_t x = *reinterpret_cast<const uint32_t*>(a), y = *reinterpret_cast<const uint32_t*>(b);
      nibble_pairs(reinterpret_cast<uint32_t(&)[4]>(out[0]), __byte_perm(x, y, 0x5410), scale);
      nibble_pairs(reinterpret_cast<uint32_t(&)[4]>(out[4]), __byte_perm(x, y, 0x7632), scale);
    }
  } else if constexpr (COUNT == 2) {
    const uint32_t both = __byte_perm(*reinterpret_cast<const uint16_t*>(a), *reinterpret_cast<const uint16_t*>(b), 0x5140);
    out[0] = byte_pair<CODEC, false>(both, scale);
    out[1] = byte_pair<CODEC, true>(both, scale);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
      const uint32_t x = reinterpret_cast<const uint32_t*>(a)[i], y = reinterpret_cast<const uint32_t*>(b)[i];
      const uint32_t low = __byte_perm(x, y, 0x5140), high = __byte_perm(x, y, 0x7362);
      out[4 * i] = byte_pair<CODEC, false>(low, scale);
      out[4 * i + 1] = byte_pair<CODEC, true>(low, scale);
      out[4 * i + 2] = byte_pair<CODEC, false>(high, scale);
      out[4 * i + 3] = byte_pair<CODEC, true>(high, scale);
    }
  }
}
// Scales of run `run` of keys `key` and `key + 1`.
template <int CODEC, int DIM>
DEVICE __half2 value_scale(const uint8_t* stage, int key, int run) {
  if constexpr (!is_hadamard<CODEC>()) return zero_half2();
  const __half* scales = reinterpret_cast<const __half*>(stage + STAGE * value_stride<CODEC, DIM>()) + key * (DIM / 32) + run;
  return __halves2half2(scales[0], scales[DIM / 32]);
}

template <int CODEC, int DIM, int TILES>
DEVICE void stage_values_packed(float (&sums)[TILES][4], const uint8_t* stage, int first, const uint32_t (&weights)[4][4]) {
  constexpr int STRIDE = value_stride<CODEC, DIM>(), UNIT_BYTES = unit_bytes<CODEC>();
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const int key = 16 * s + 2 * t;
#pragma unroll
    for (int n = 0; n < TILES; n += 8) {
      const int unit = first + n + g;
      const uint8_t* at = stage + key * STRIDE + unit * UNIT_BYTES;
      uint32_t one[8], two[8];
      value_pairs<CODEC>(one, at, at + STRIDE, value_scale<CODEC, DIM>(stage, key, unit / 4));
      value_pairs<CODEC>(two, at + 8 * STRIDE, at + 9 * STRIDE, value_scale<CODEC, DIM>(stage, key + 8, unit / 4));
#pragma unroll
      for (int i = 0; i < 8; i++) mma(sums[n + i], weights[s][0], weights[s][1], weights[s][2], weights[s][3], one[i], two[i]);
    }
  }
}

// For prefill: sums[n] += weights x columns of tile first + n of the stage's values; weights[s]: operand A of keys 16s..16s+15.
template <int CODEC, int DIM, int TILES>
DEVICE void stage_values(float (&sums)[TILES][4], const uint8_t* stage, int first, const uint32_t (&weights)[4][4]) {
  if constexpr (CODEC == F16) stage_values_f16<DIM>(sums, stage, first, weights);
  else stage_values_packed<CODEC, DIM>(sums, stage, first, weights);
}
