// Whether a plain load behind griddepcontrol.wait sees what the kernel before wrote, where L1 may hold older lines.
//
// usage: nvcc -arch=sm_90a -o wait scripts/gpu/programmatic_wait.cu && ./wait
#include <cstdio>
#include <cuda_runtime.h>
constexpr int N = 16384;  // ints, 64 KB: stays in L1
__device__ int touch(const int* p) { int v; asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__global__ void producer(int* x, int value, int* arrived, int* sink) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int sum = 0;
  for (int i = threadIdx.x; i < N; i += blockDim.x) sum += touch(x + i);  // every line into this SM's L1
  if (sum == 12345) *sink = sum;
  __syncthreads();
  if (threadIdx.x == 0) { __threadfence(); atomicAdd(arrived, 1); while (atomicAdd(arrived, 0) % gridDim.x != 0) {} }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int w = 0; w < 20; w++) __nanosleep(500);  // the next kernel is there
  const int per = N / gridDim.x;
  for (int i = threadIdx.x; i < per; i += blockDim.x) x[(blockIdx.x * 7 + 3) % gridDim.x * per + i] = value;
}
template <int EARLY>
__global__ void consumer(const int* x, int value, int* stale, int* early, int* sink) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int sum = 0, wrong = 0;
  if (EARLY) for (int i = threadIdx.x; i < N / gridDim.x * gridDim.x; i += blockDim.x) { int v = touch(x + i); sum += v; if (v != value) atomicAdd(early, 1); }
  if (sum == 12345) *sink = sum;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = threadIdx.x; i < N / gridDim.x * gridDim.x; i += blockDim.x) wrong += touch(x + i) != value;
  if (wrong) atomicAdd(stale, wrong);
}
template <int EARLY>
void go(int blocks, const char* name) {
  int *x, *c; cudaMalloc(&x, N * 4); cudaMalloc(&c, 64); cudaMemset(x, 0, N * 4); cudaMemset(c, 0, 64);
  cudaStream_t s; cudaStreamCreate(&s);
  for (int round = 1; round <= 2000; round++) {
    cudaLaunchAttribute a{}; a.id = cudaLaunchAttributeProgrammaticStreamSerialization; a.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t cfg{}; cfg.gridDim = blocks; cfg.blockDim = 256; cfg.stream = s; cfg.attrs = &a; cfg.numAttrs = 1;
    cudaLaunchKernelEx(&cfg, producer, x, round, c, c + 3);
    cudaLaunchKernelEx(&cfg, consumer<EARLY>, (const int*)x, round, c + 1, c + 2, c + 3);
  }
  cudaError_t e = cudaStreamSynchronize(s);
  int h[4]; cudaMemcpy(h, c, 16, cudaMemcpyDeviceToHost);
  printf("%s: %s, stale after the wait %d, old before it %d (of %lld loads)\n", name, cudaGetErrorString(e), h[1], h[2], 2000ll * blocks * N);
}
int main() { go<0>(128, "waits, then loads"); go<1>(128, "loads, waits, loads again"); }
