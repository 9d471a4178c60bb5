// A stage: 64 keys (or values) of one head in shared memory, as packed in the pages. Copying them in, and multiplying with them
// straight from the packed form.
//
// Dimensions are permuted so that a thread's matrix operands lie side by side in a packed row; queries (and results) are permuted to
// match. mma m16n8k16: lane = 4 g + t holds rows g and g + 8 of A and C, column g of B.
#pragma once
#include "hadamard.cuh"

constexpr int STAGE = 64;  // keys

template <int CODEC>
constexpr bool is_hadamard() { return CODEC >= HADAMARD8; }
// Bytes of eight elements.
template <int CODEC>
constexpr int unit_bytes() { return CODEC == F16 ? 16 : CODEC == HADAMARD4 ? 4 : 8; }
// Bytes between rows of a stage, padded so that the reads below meet no bank twice.
template <int CODEC, int DIM>
constexpr int key_stride() { return (DIM / 8 + 4) * unit_bytes<CODEC>(); }
template <int CODEC, int DIM>
constexpr int value_stride() { return DIM / 8 * unit_bytes<CODEC>() + 16; }
template <int CODEC, int DIM>
constexpr int scale_bytes() { return is_hadamard<CODEC>() ? DIM / 32 * 2 : 0; }
template <int CODEC, int DIM>
constexpr int key_stage_bytes() { return STAGE * (key_stride<CODEC, DIM>() + scale_bytes<CODEC, DIM>()); }
template <int CODEC, int DIM>
constexpr int value_stage_bytes() { return STAGE * (value_stride<CODEC, DIM>() + scale_bytes<CODEC, DIM>()); }
// Place of query element i (0..7) of a group of eight in the order that the packed keys come out in.
template <int CODEC>
DEVICE int key_order(int i) { return CODEC == HADAMARD4 ? (i & 3) * 2 + (i >> 2) : i; }
// Dimension of a result: column `c` of tile `n` of eight.
DEVICE int result_dim(bool natural, int n, int c) { return natural ? n * 8 + c : (n >> 3) * 64 + c * 8 + (n & 7); }

// Copies BYTES into shared memory behind the thread's back, or zeros where there is nothing to copy.
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

// Copies this warp's KEYS rows of a stage. `row`: of lane i, the page row of the warp's key i % KEYS, or -1 for zeros.
template <int CODEC, int DIM, int KEYS>
DEVICE void copy_rows(uint8_t* stage, int stride, int first_key, const uint8_t* data, const __half* scales, int row, int dim) {
  constexpr int CHUNK = CODEC == F16 || CODEC == HADAMARD8 || CODEC == HADAMARD4 ? 16 : 8;
  constexpr int CHUNKS = DIM / 8 * unit_bytes<CODEC>() / CHUNK, TOTAL = KEYS * CHUNKS;
  const int lane = threadIdx.x & 31, row_bytes = (is_hadamard<CODEC>() ? (dim + 63) / 64 * 8 : dim / 8) * unit_bytes<CODEC>();
#pragma unroll
  for (int i = 0; i < (TOTAL + 31) / 32; i++) {
    const int item = i * 32 + lane, key = item / CHUNKS, at = item % CHUNKS * CHUNK;
    const int source = __shfl_sync(~0u, row, key % KEYS);
    const bool present = source >= 0 && at < row_bytes;
    if (TOTAL % 32 == 0 || item < TOTAL)
      copy_async<CHUNK>(stage + (first_key + key) * stride + at, data + (present ? (int64_t)source * row_bytes + at : 0), present);
  }
  if constexpr (is_hadamard<CODEC>()) {
    constexpr int WORDS = DIM / 64;  // two scales each
    const int words = (dim + 63) / 64;
    uint8_t* to = stage + STAGE * stride;
#pragma unroll
    for (int i = 0; i < (KEYS * WORDS + 31) / 32; i++) {
      const int item = i * 32 + lane, key = item / WORDS, word = item % WORDS;
      const int source = __shfl_sync(~0u, row, key % KEYS);
      const bool present = source >= 0 && word < words;
      if (KEYS * WORDS % 32 == 0 || item < KEYS * WORDS)
        copy_async<4>(to + ((first_key + key) * WORDS + word) * 4, scales + (present ? ((int64_t)source * words + word) * 2 : 0), present);
    }
  }
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
// Codes stand in the mantissas of halves of 1024 (0x6400 | code); less 1024 + m they are exact, times the scale rounded once.
template <int CODEC>
DEVICE uint32_t scaled(uint32_t word, __half2 scale) {
  const uint32_t centre = CODEC == HADAMARD8 ? 0x64806480u : 0x64086408u;
  return as_word(__hmul2(__hsub2(as_half2(word), as_half2(centre)), scale));
}
DEVICE uint32_t nibbles(uint32_t word, int i) {
  uint32_t out;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x64006400, 0xea;" : "=r"(out) : "r"(word >> (4 * i)));
  return out;
}
constexpr uint32_t MAGIC = 0x64646464u;

// Eight elements of a key, in `key_order`.
template <int CODEC>
DEVICE uint4 key_unit(const uint8_t* at, __half2 scale) {
  if constexpr (CODEC == F16) return *reinterpret_cast<const uint4*>(at);
  if constexpr (CODEC == E5M2) {
    const uint2 w = *reinterpret_cast<const uint2*>(at);
    return make_uint4(__byte_perm(w.x, 0, 0x1404), __byte_perm(w.x, 0, 0x3424), __byte_perm(w.y, 0, 0x1404), __byte_perm(w.y, 0, 0x3424));
  }
  if constexpr (CODEC == HADAMARD8) {
    const uint2 w = *reinterpret_cast<const uint2*>(at);
    return make_uint4(scaled<CODEC>(__byte_perm(w.x, MAGIC, 0x4140), scale), scaled<CODEC>(__byte_perm(w.x, MAGIC, 0x4342), scale),
                      scaled<CODEC>(__byte_perm(w.y, MAGIC, 0x4140), scale), scaled<CODEC>(__byte_perm(w.y, MAGIC, 0x4342), scale));
  }
  const uint32_t w = *reinterpret_cast<const uint32_t*>(at);
  return make_uint4(scaled<CODEC>(nibbles(w, 0), scale), scaled<CODEC>(nibbles(w, 1), scale), scaled<CODEC>(nibbles(w, 2), scale),
                    scaled<CODEC>(nibbles(w, 3), scale));
}

// logits[n] = queries x keys first + 8n..8n+7 of the stage. `queries`: this lane's rows g and g + 8, 16 bytes for each 32
// dimensions, in registers, or in shared memory at `rows` where the head is too large for that.
template <int CODEC, int DIM, bool REGISTERS, int TILES>
DEVICE void stage_logits(float (&logits)[TILES][4], const uint8_t* stage, int first, const uint4 (*queries)[2], const uint8_t* rows) {
  constexpr int STRIDE = key_stride<CODEC, DIM>(), QUERY = 2 * DIM + 64;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint8_t* at = stage + (first + g) * STRIDE + t * unit_bytes<CODEC>();
  const __half* scales = reinterpret_cast<const __half*>(stage + STAGE * STRIDE) + (first + g) * (DIM / 32);
#pragma unroll
  for (int n = 0; n < TILES; n++) logits[n][0] = logits[n][1] = logits[n][2] = logits[n][3] = 0.f;
#pragma unroll
  for (int j = 0; j < DIM / 32; j++) {
    uint4 low, high;
    if constexpr (REGISTERS) {
      low = queries[j][0];
      high = queries[j][1];
    } else {
      low = *reinterpret_cast<const uint4*>(rows + g * QUERY + (4 * j + t) * 16);
      high = *reinterpret_cast<const uint4*>(rows + (g + 8) * QUERY + (4 * j + t) * 16);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      __half2 scale = __half2half2(__ushort_as_half(0));
      if constexpr (is_hadamard<CODEC>()) scale = __half2half2(scales[8 * n * (DIM / 32) + j]);
      const uint4 k = key_unit<CODEC>(at + 8 * n * STRIDE + 4 * j * unit_bytes<CODEC>(), scale);
      mma(logits[n], low.x, high.x, low.y, high.y, k.x, k.y);
      mma(logits[n], low.z, high.z, low.w, high.w, k.z, k.w);
    }
  }
}

// sums[n] += weights x columns of tile first + n of the stage's values; weights[s]: operand A of keys 16s..16s+15.
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
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                   : "r"((uint32_t)__cvta_generic_to_shared(at + n * 16))
                   : "memory");
      mma(sums[n], weights[s][0], weights[s][1], weights[s][2], weights[s][3], b[0], b[1]);
      mma(sums[n + 1], weights[s][0], weights[s][1], weights[s][2], weights[s][3], b[2], b[3]);
    }
  }
}

// Four neighbouring elements of two keys, the pair of each in one register. `upper`: of the unit's eight, the last four.
template <int CODEC>
struct Pairs {
  uint32_t words[2];
  __half2 scale;
  DEVICE Pairs(const uint8_t* a, const uint8_t* b, bool upper, __half2 scale) : scale(scale) {
    if constexpr (CODEC == HADAMARD4) {
      const uint32_t x = *reinterpret_cast<const uint32_t*>(a), y = *reinterpret_cast<const uint32_t*>(b);
      words[0] = __byte_perm(x, y, upper ? 0x7632 : 0x5410);
    } else {
      const uint32_t x = reinterpret_cast<const uint32_t*>(a)[upper], y = reinterpret_cast<const uint32_t*>(b)[upper];
      words[0] = __byte_perm(x, y, 0x5140);
      words[1] = __byte_perm(x, y, 0x7362);
    }
  }
  DEVICE uint32_t get(int i) const {
    if constexpr (CODEC == HADAMARD4) return scaled<CODEC>(nibbles(words[0], i), scale);
    const uint32_t word = i & 2 ? words[1] : words[0];
    if constexpr (CODEC == HADAMARD8) return scaled<CODEC>(__byte_perm(word, MAGIC, i & 1 ? 0x4342 : 0x4140), scale);
    else return __byte_perm(word, 0, i & 1 ? 0x3424 : 0x1404);
  }
};

template <int CODEC, int DIM, int TILES>
DEVICE void stage_values_packed(float (&sums)[TILES][4], const uint8_t* stage, int first, const uint32_t (&weights)[4][4]) {
  constexpr int STRIDE = value_stride<CODEC, DIM>(), UNIT = unit_bytes<CODEC>(), RUNS = DIM / 32, STEP = TILES < 4 ? TILES : 4;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const __half* scales = reinterpret_cast<const __half*>(stage + STAGE * STRIDE);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    const int key = 16 * s + 2 * t;
#pragma unroll
    for (int n = 0; n < TILES; n += STEP) {
      const int tile = first + n, h = tile >> 3;
      const bool upper = tile & 4;
      const uint8_t* at = stage + key * STRIDE + (g + 8 * h) * UNIT;
      __half2 low = __half2half2(__ushort_as_half(0)), high = low;
      if constexpr (is_hadamard<CODEC>()) {
        const __half* run = scales + key * RUNS + 2 * h + (g >> 2);
        low = __halves2half2(run[0], run[RUNS]);
        high = __halves2half2(run[8 * RUNS], run[9 * RUNS]);
      }
      const Pairs<CODEC> one(at, at + STRIDE, upper, low), two(at + 8 * STRIDE, at + 9 * STRIDE, upper, high);
#pragma unroll
      for (int i = 0; i < STEP; i++) {
        const int element = STEP == 4 ? i : (tile & 3) + i;
        mma(sums[n + i], weights[s][0], weights[s][1], weights[s][2], weights[s][3], one.get(element), two.get(element));
      }
    }
  }
}

template <int CODEC, int DIM, int TILES>
DEVICE void stage_values(float (&sums)[TILES][4], const uint8_t* stage, int first, const uint32_t (&weights)[4][4]) {
  if constexpr (CODEC == F16) stage_values_f16<DIM>(sums, stage, first, weights);
  else stage_values_packed<CODEC, DIM>(sums, stage, first, weights);
}
