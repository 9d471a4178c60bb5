// What racecheck makes of a hand-over through an mbarrier, with every lane arriving (EACH 1) or one for its warp after __syncwarp (EACH 0).
// Both are ordered: __syncwarp orders the warp's writes before the one lane's arrive, which releases them to whoever waits.
//
// usage: nvcc -arch=native -DEACH=0 scripts/gpu/racecheck_mbarrier.cu -o probe && compute-sanitizer --tool racecheck ./probe
#include <cstdint>
#include <cstdio>

#ifndef EACH
#define EACH 0
#endif

__device__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__global__ void hand_over(int* out, int rounds) {
  __shared__ alignas(8) uint64_t ready, taken;
  __shared__ int value[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&ready)), "r"(EACH ? 32 : 1) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&taken)), "r"(EACH ? 32 : 1) : "memory");
  }
  __syncthreads();
  auto arrive = [&](uint64_t* barrier) {
    __syncwarp();
    if (EACH || lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
  };
  auto wait = [&](uint64_t* barrier, int phase) {
    uint32_t done = 0;
    while (!done) {
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
    }
  };
  int sum = 0;
  for (int i = 0; i < rounds; i++) {
    if (threadIdx.x < 32) {
      if (i > 0) wait(&taken, (i - 1) & 1);
      value[lane] = i * 32 + lane;
      arrive(&ready);
    } else {
      wait(&ready, i & 1);
      sum += value[31 - lane];
      arrive(&taken);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

int main() {
  int *out, host[32];
  cudaMalloc(&out, sizeof(host));
  hand_over<<<1, 64>>>(out, 10);
  cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost);
  for (int lane = 0; lane < 32; lane++) {
    if (host[lane] != 10 * (31 - lane) + 32 * 45) return printf("lane %d: %d\n", lane, host[lane]), 1;
  }
  return printf("each lane arrives: %d, sums right\n", EACH), 0;
}
