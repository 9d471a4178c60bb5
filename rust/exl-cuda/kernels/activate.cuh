// The activations by number, as ops::elementwise counts them.
#pragma once
#include "common.cuh"

enum { SILU = 0, GELU = 1, QUICK_GELU = 2 };

DEVICE float activate(float v, int kind) {
  if (kind == SILU) return v / (1.f + expf(-v));
  if (kind == QUICK_GELU) return v / (1.f + expf(-1.702f * v));
  // GELU, tanh approximation: v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3)))
  return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}
