// Keys and values in pages: where a token's head stands, and eight stored elements as floats (spec/formats.md 5; layout of
// exl_kernels/kv.py). The Hadamard kinds are read as their codes times their scales: attention rotates the query and the
// result instead of every key and value.
#pragma once
#include "common.cuh"

enum Storage { FP16 = 0, FP8 = 1, Q8 = 2, Q4 = 3 };

// One tensor of pages [pages, page_size, heads, stored], with its scales; the same struct as `ops::attention::Store`.
struct Store {
  uint8_t* data;
  __half* scales;  // null for FP16 and FP8
};
// Both, and their sizes; the same struct as `ops::attention::Pages`.
struct Pages {
  Store key, value;
  int pages, page_size, heads, head_dim;
};

DEVICE constexpr int padded(int head_dim, Storage kind) { return kind == FP16 || kind == FP8 ? head_dim : (head_dim + 63) / 64 * 64; }
DEVICE constexpr int stored_bytes(int head_dim, Storage kind) {
  return kind == FP16 ? 2 * head_dim : kind == FP8 ? head_dim : kind == Q8 ? padded(head_dim, kind) : padded(head_dim, kind) / 2;
}

// Elements 8 i .. 8 i + 7 of a head as they are stored: loading and converting are two steps, so that many loads can be in flight.
template <Storage KIND>
struct Stored {
  uint4 words;
  __half scale;

  // `head` is slot * heads + head.
  DEVICE void load(const Store& s, int64_t head, int head_dim, int i) {
    const uint8_t* p = s.data + head * stored_bytes(head_dim, KIND);
    if constexpr (KIND == FP16) {
      words = *reinterpret_cast<const uint4*>(p + 16 * i);
    } else if constexpr (KIND == Q4) {
      words.x = *reinterpret_cast<const uint32_t*>(p + 4 * i);
    } else {
      const uint2 w = *reinterpret_cast<const uint2*>(p + 8 * i);
      words.x = w.x;
      words.y = w.y;
    }
    if constexpr (KIND == Q8 || KIND == Q4) scale = s.scales[head * (padded(head_dim, KIND) / 32) + i / 4];
  }

  // What stands for nothing.
  DEVICE void clear() {
    // The code in the middle of the range and a scale of zero, or the number zero.
    words = make_uint4(0, 0, 0, 0);
    scale = __half(0.f);
  }

  DEVICE void convert(float (&v)[8]) const {
    if constexpr (KIND == FP16 || KIND == FP8) {
      uint32_t halves[4] = {words.x, words.y, words.z, words.w};
      if constexpr (KIND == FP8) {
        // E5M2 is the upper byte of a half.
        halves[0] = __byte_perm(words.x, 0, 0x1404);
        halves[1] = __byte_perm(words.x, 0, 0x3424);
        halves[2] = __byte_perm(words.y, 0, 0x1404);
        halves[3] = __byte_perm(words.y, 0, 0x3424);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&halves[j]));
        v[2 * j] = f.x;
        v[2 * j + 1] = f.y;
      }
    } else {
      const float s = __half2float(scale);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const uint32_t code = KIND == Q8 ? (j < 4 ? words.x : words.y) >> (8 * (j % 4)) & 255 : words.x >> (4 * j) & 15;
        v[j] = static_cast<float>(static_cast<int>(code) - (KIND == Q8 ? 128 : 8)) * s;
      }
    }
  }
};

// The unnormalised Sylvester transform of the even and of the odd elements of a block of 64, element 2 lane in a, 2 lane + 1 in b.
DEVICE void butterflies(float& a, float& b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float x = __shfl_xor_sync(~0u, a, o), y = __shfl_xor_sync(~0u, b, o);
    a = lane & o ? x - a : a + x;
    b = lane & o ? y - b : b + y;
  }
}
