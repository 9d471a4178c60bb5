// A matrix of several experts, chosen by the host, dequantized to halves: for prompts, whose rows of an expert repay that.
#include "linear/dequantize.cuh"
#include "moe/experts.cuh"

// out [experts, in_features, out_features]; part 0 is gate, 1 up, 2 down. A block takes 64 rows of eight tiles of expert
// numbers[blockIdx.z]; experts have different numbers of rows, which include padding.
template <int KIND, int ENTRY>
DEVICE void dequantize_expert(const Expert* experts, const int64_t* numbers, int part, __half* out) {
  const Expert& expert = experts[numbers[blockIdx.z]];
  const Matrix& of = part == 0 ? expert.gate : part == 1 ? expert.up : expert.down;
  const Matrix a = of;
  if ((int)blockIdx.x * 64 >= a.rows) return;
  const int* features = part == 0 ? expert.gate_features : part == 1 ? expert.up_features : expert.down_features;
  dequantize<KIND, ENTRY>(a, features, out + (size_t)blockIdx.z * a.in_features * a.out_features);
}

#define DEQUANTIZE(KIND, kind, ENTRY)                                                     \
  extern "C" __global__ void __launch_bounds__(256) experts_dequantize_##kind##_##ENTRY(  \
      const Expert* experts, const int64_t* numbers, int part, __half* out) {             \
    dequantize_expert<KIND, ENTRY>(experts, numbers, part, out);                          \
  }
DEQUANTIZE(EXL2, exl2, 128)
DEQUANTIZE(EXL2, exl2, 32)
DEQUANTIZE(GPTQ, gptq, 128)
DEQUANTIZE(GPTQ, gptq, 32)
