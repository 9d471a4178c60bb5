// Activations, alone or gating a second operand: out = f(gate) * up, in FP32, rounded once.
#include "common/activate.cuh"

template <class T>
DEVICE void activation_kernel(const T* gate, const T* up, T* out, int64_t count, int kind) {
  pdl_trigger();
  const bool wide = aligned8(gate) && aligned8(out) && (!up || aligned8(up));
  pdl_wait();
  const int64_t stride = (int64_t)gridDim.x * blockDim.x * 8;
  for (int64_t k = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8; k < count; k += stride) {
    if (wide && k + 8 <= count) {
      float g[8], u[8];
      load8(g, gate + k);
      if (up) load8(u, up + k);
#pragma unroll
      for (int i = 0; i < 8; i++) g[i] = activate(g[i], kind) * (up ? u[i] : 1.f);
      store8(out + k, g);
    } else {
      for (int64_t i = k; i < min(k + 8, count); i++)
        out[i] = from_float<T>(activate(to_float(gate[i]), kind) * (up ? to_float(up[i]) : 1.f));
    }
  }
}

// x = cap * tanh(x / cap), in place.
extern "C" __global__ void __launch_bounds__(256) softcap_f32(float* x, int64_t count, float cap) {
  pdl_trigger();
  pdl_wait();
  const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const int64_t stride = (int64_t)gridDim.x * blockDim.x * 4;
  for (int64_t k = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4; k < count; k += stride) {
    float v[4];
    const bool whole = wide && k + 4 <= count;
    if (whole) *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(x + k);
    else
      for (int i = 0; i < 4; i++) v[i] = k + i < count ? x[k + i] : 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __fmul_rn(tanhf(__fdiv_rn(v[i], cap)), cap);
    if (whole) *reinterpret_cast<float4*>(x + k) = *reinterpret_cast<const float4*>(v);
    else
      for (int i = 0; i < 4 && k + i < count; i++) x[k + i] = v[i];
  }
}

#define ACTIVATION(T, t)                                                                                       \
  extern "C" __global__ void __launch_bounds__(256) activation_##t(const T* gate, const T* up, T* out,         \
                                                                   int64_t count, int kind) {                  \
    activation_kernel(gate, up, out, count, kind);                                                             \
  }
ACTIVATION(__half, f16)
ACTIVATION(__nv_bfloat16, bf16)
ACTIVATION(float, f32)
