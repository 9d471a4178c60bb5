// Reports of racecheck on hand-overs through mbarriers, of the forms that our kernels use, and of races planted in them.
//
// A warp's writes are ordered before the one lane's arrival by __syncwarp, and that arrival releases them to whoever waits. racecheck
// takes an arrival for its own lane alone. So it is given kernels in which every lane arrives (EXL_EACH_LANE_ARRIVES), otherwise the same.
//
// usage: nvcc -arch=native -o probe scripts/gpu/racecheck_mbarrier.cu; compute-sanitizer --tool racecheck ./probe FORM
#include <cstdint>
#include <cstdio>
#include <cstdlib>

enum Form { ELECTED, EACH, BULK, BULK_EACH, ELECTED_RACE, EACH_RACE, BULK_RACE, NO_SYNCWARP, NAMED, READY_EACH, TAKEN_EACH, FORMS };

__device__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// Bounded, so that a planted race ends.
__device__ void wait(uint64_t* barrier, int phase) {
  uint32_t done = 0;
#pragma unroll 1
  for (int i = 0; !done && i < 100000; i++) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
  }
}

// The first warp hands 32 integers a round to the second, one slot for all rounds: either written by its lanes or copied by the bulk
// copy engine for its first lane.
template <int FORM>
__global__ void hand_over(const int* in, int* out, int rounds) {
  constexpr bool BULKY = FORM == BULK || FORM == BULK_EACH || FORM == BULK_RACE;
  constexpr bool ALL = FORM == EACH || FORM == BULK_EACH || FORM == EACH_RACE;
  constexpr bool ALL_READY = (ALL && !BULKY) || FORM == READY_EACH, ALL_TAKEN = ALL || FORM == TAKEN_EACH;
  constexpr bool RACE = FORM == ELECTED_RACE || FORM == EACH_RACE || FORM == BULK_RACE;
  __shared__ alignas(8) uint64_t ready, taken;
  __shared__ alignas(128) int value[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&ready)), "r"(ALL_READY ? 32 : 1) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&taken)), "r"(ALL_TAKEN ? 32 : 1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  auto arrive = [&](uint64_t* barrier, bool all) {
    if (FORM == NAMED) asm volatile("bar.sync %0, 32;" ::"r"(1 + (int)threadIdx.x / 32) : "memory");
    else if (FORM != NO_SYNCWARP) __syncwarp();
    if (all || lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
  };
  int sum = 0;
#pragma unroll 1
  for (int i = 0; i < rounds; i++) {
    if (threadIdx.x < 32) {
      if (BULKY && lane != 0) continue;
      if (i > 0 && !RACE) wait(&taken, (i - 1) & 1);
      if constexpr (BULKY) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&ready)), "r"(128) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(value)),
                     "l"(in + i * 32), "r"(128), "r"(address(&ready)) : "memory");
        if (RACE) wait(&ready, i & 1);
      } else {
        value[lane] = in[i * 32 + lane];
        arrive(&ready, ALL_READY);
      }
    } else {
      if (!RACE || BULKY) wait(&ready, i & 1);
      sum += value[31 - lane];
      arrive(&taken, ALL_TAKEN);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

// Two teams that meet among themselves, one of them more often, and then all together: right, and right with barrier 0 at the end.
// With ARRIVED the last warp only arrives and is gone.
template <int LAST, bool ARRIVED>
__global__ void teams(int* out) {
  __shared__ int value[128];
  const int team = threadIdx.x / 64;
  for (int i = team; i < 5; i += 2) asm volatile("bar.sync %0, 64;" ::"r"(2 + team) : "memory");
  value[threadIdx.x] = threadIdx.x;
  if (ARRIVED && threadIdx.x >= 96) {
    asm volatile("bar.arrive 1, 128;" ::: "memory");
    return;
  }
  if (LAST == 0) asm volatile("bar.sync 0;" ::: "memory");
  else asm volatile("bar.sync 1, 128;" ::: "memory");
  out[threadIdx.x] = value[127 - threadIdx.x];
}

template <int LAST, bool ARRIVED>
int run_teams() {
  int* out;
  cudaMalloc(&out, 512);
  teams<LAST, ARRIVED><<<4, 128>>>(out);
  return cudaDeviceSynchronize() == cudaSuccess ? printf("teams, barrier %d, arrived %d\n", LAST, ARRIVED), 0 : 2;
}

// A part of the block meets among itself three times, and then all meet: from different places in the code, and one warp is gone at once
// where GONE is set.
template <bool GONE>
__global__ void part_then_all(int* out) {
  __shared__ int value[128];
  value[threadIdx.x] = threadIdx.x;
  if (threadIdx.x >= 96) {
    asm volatile("bar.sync 0;" ::: "memory");
    if (GONE) return;
  } else {
    for (int i = 0; i < 3; i++) asm volatile("bar.sync 4, 96;" ::: "memory");
    asm volatile("bar.sync 0;" ::: "memory");
  }
  out[threadIdx.x] = value[127 - threadIdx.x];
}

// A warpgroup gives registers away and another takes them.
__global__ void __launch_bounds__(256, 1) registers(int* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ int value[256];
  if (threadIdx.x / 128 == 1) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    value[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync 0;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    value[threadIdx.x] = threadIdx.x;
    asm volatile("bar.sync 0;" ::: "memory");
    out[threadIdx.x] = value[255 - threadIdx.x];
  }
#endif
}

// Barriers of the whole block and nothing else, in blocks as large as the ring kernel's; after the first, every warp on its own takes its
// time, as much as its number says where APART is set.
template <bool APART>
__global__ void __launch_bounds__(576, 1) whole_blocks(int* out) {
  extern __shared__ int value[];
  value[threadIdx.x] = threadIdx.x;
  __syncthreads();
  if (APART) __nanosleep(threadIdx.x / 32 * 200);
  const int v = value[575 - threadIdx.x];
  if (blockIdx.x == 0) out[threadIdx.x] = v;
}

// A copy of no bytes, which fills with zeros, from memory that nobody has written: for initcheck.
__global__ void copies_nothing(int* out) {
  __shared__ alignas(16) int value[128];
  const int size = 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(value + 4 * threadIdx.x)), "l"(out + 512 + 4 * threadIdx.x),
               "r"(size) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (blockIdx.x == 0) out[threadIdx.x] = value[4 * threadIdx.x];
}

int launch(const char* name, void (*kernel)(int*), int threads, int blocks = 4, int shared = 0) {
  int* out;
  cudaMalloc(&out, 4096);
  if (shared) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  kernel<<<blocks, threads, shared>>>(out);
  const cudaError_t error = cudaDeviceSynchronize();
  printf("%s: %s\n", name, cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 2;
}

template <int FORM>
int run() {
  constexpr int ROUNDS = 10;
  int *in, *out, host[32], values[ROUNDS * 32];
  for (int i = 0; i < ROUNDS * 32; i++) values[i] = i;
  cudaMalloc(&in, sizeof(values));
  cudaMalloc(&out, sizeof(host));
  cudaMemcpy(in, values, sizeof(values), cudaMemcpyHostToDevice);
  hand_over<FORM><<<1, 64>>>(in, out, ROUNDS);
  if (cudaMemcpy(host, out, sizeof(host), cudaMemcpyDeviceToHost) != cudaSuccess) return printf("form %d: failed\n", FORM), 2;
  bool right = true;
  for (int lane = 0; lane < 32; lane++) right &= host[lane] == ROUNDS * (31 - lane) + 32 * ROUNDS * (ROUNDS - 1) / 2;
  printf("form %d: sums %s\n", FORM, right ? "right" : "wrong");
  return 0;
}

int main(int count, char** words) {
  int (*runs[])() = {run<ELECTED>, run<EACH>, run<BULK>, run<BULK_EACH>, run<ELECTED_RACE>, run<EACH_RACE>, run<BULK_RACE>, run<NO_SYNCWARP>,
                   run<NAMED>, run<READY_EACH>, run<TAKEN_EACH>,
                   run_teams<0, false>, run_teams<1, false>, run_teams<1, true>,
                   [] { return launch("a part, then all", part_then_all<false>, 128); },
                   [] { return launch("a part, then all, a warp gone", part_then_all<true>, 128); },
                   [] { return launch("registers given away", registers, 256); },
                   [] { return launch("whole blocks", whole_blocks<false>, 576, 132, 200 * 1024); },
                   [] { return launch("whole blocks, warps apart", whole_blocks<true>, 576, 132, 200 * 1024); },
                   [] { return launch("whole small blocks, warps apart", whole_blocks<true>, 576, 8, 4096); },
                   [] { return launch("a copy of nothing", copies_nothing, 32, 1); }};
  const int form = count > 1 ? atoi(words[1]) : 0;
  return form < 0 || form >= static_cast<int>(sizeof(runs) / sizeof(runs[0])) ? 3 : runs[form]();
}
