// The activations, numbered as in ops::elementwise.
#pragma once
#include "common/common.cuh"

enum { SILU = 0, GELU = 1, QUICK_GELU = 2 };

DEVICE float activate(float v, int kind) {
  if (kind == SILU) return v / (1.f + expf(-v));
  if (kind == QUICK_GELU) return v / (1.f + expf(-1.702f * v));
  // GELU, tanh approximation: v/2 (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3)))
  return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}

// activate(v, SILU) of a half's value, bitwise identical and without a branch, so that several are in flight at a time. It runs a
// division's own steps, scaled where they would leave the range of normal numbers.
DEVICE float silu_of_half(float v) {
  const float scale = v < -64.f ? 0x1p-64f : 1.f, d = (1.f + expf(-v)) * scale;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  r = fmaf(r, fmaf(-d, r, 1.f), r);
  float q = v * r;
  q = fmaf(fmaf(-d, q, v), r, q);
  q = fmaf(fmaf(-d, q, v), r, q) * scale;
  const float infinity = __int_as_float(0x7f800000);
  return fmaxf(d, fabsf(v)) < infinity ? copysignf(q, v) : v * (d < infinity ? 1.f : 0.f);
}
