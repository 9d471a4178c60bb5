// Elements of rows that the norms keep in registers.
#pragma once
#include "common/common.cuh"

// Eight elements of a row. Halves stay halves, so that a block needs few registers: it is then resident beside a block of a matmul and starts
// as soon as that one ends.
template <class T>
struct Eight {
  union {
    uint4 words[sizeof(T) / 2];
    T items[8];
  };
  DEVICE void load(const T* row, int k, int width, bool wide) {
    if (wide) {
#pragma unroll
      for (int i = 0; i < (int)sizeof(T) / 2; i++) words[i] = reinterpret_cast<const uint4*>(row + k)[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) items[i] = k + i < width ? row[k + i] : from_float<T>(0.f);
    }
  }
  DEVICE float sum() const {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = to_float(items[i]);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
  // Squares of the deviations of the elements before `left`.
  DEVICE float squares(float mean, int left) const {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = i < left ? to_float(items[i]) - mean : 0.f;
    return eight_squares(v);
  }
};
