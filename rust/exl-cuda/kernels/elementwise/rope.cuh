// The rotation of one pair. All kernels that rotate call it, so that their results are bitwise identical.
#pragma once
#include "common/common.cuh"

DEVICE float2 rotate(float u, float v, float c, float s) {
  return make_float2(__fmaf_rn(u, c, -__fmul_rn(v, s)), __fmaf_rn(v, c, __fmul_rn(u, s)));
}
