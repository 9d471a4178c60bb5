// Shared by all kernel files: element types, loads of eight elements, dependent launch, sums in fixed order.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

// Programmatic dependent launch. `pdl_trigger` lets the next kernel begin its preparation. `pdl_wait` returns when every predecessor has
// finished and its writes are visible. Each kernel waits before its first access to data that a predecessor may write or read; `down` of
// experts_matmul.cuh reads tables of the launch but one before it earlier. Below sm_90 launches have no such dependency and both
// functions do nothing.
DEVICE void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE float to_float(float v) { return v; }
DEVICE float to_float(__half v) { return __half2float(v); }
DEVICE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <class T>
DEVICE T from_float(float v);
template <>
DEVICE float from_float<float>(float v) {
  return v;
}
template <>
DEVICE __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// Eight elements as FP32. The address is aligned to 8 * sizeof(T).
template <class T>
DEVICE void load8(float (&v)[8], const T* p) {
  union {
    uint4 words[sizeof(T) / 2];
    T items[8];
  } u;
#pragma unroll
  for (int i = 0; i < (int)sizeof(T) / 2; i++) u.words[i] = reinterpret_cast<const uint4*>(p)[i];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = to_float(u.items[i]);
}
template <class T>
DEVICE void store8(T* p, const float (&v)[8]) {
  union {
    uint4 words[sizeof(T) / 2];
    T items[8];
  } u;
#pragma unroll
  for (int i = 0; i < 8; i++) u.items[i] = from_float<T>(v[i]);
#pragma unroll
  for (int i = 0; i < (int)sizeof(T) / 2; i++) reinterpret_cast<uint4*>(p)[i] = u.words[i];
}
template <class T>
DEVICE bool aligned8(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (8 * sizeof(T) < 16 ? 8 * sizeof(T) : 16) == 0;
}

// Sum over a warp, the same order for every lane.
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
// The contribution of eight neighbouring elements to an RMS norm's sum of squares. All kernels use this order, so that the kernel that
// makes a row can leave these sums for the kernel that norms it. Sums by pairs, as lanes that hold one element each would add.
DEVICE float eight_squares(const float (&v)[8]) {
  float s[8];
#pragma unroll
  for (int i = 0; i < 8; i++) s[i] = __fmul_rn(v[i], v[i]);
  return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])), __fadd_rn(__fadd_rn(s[4], s[5]), __fadd_rn(s[6], s[7])));
}
