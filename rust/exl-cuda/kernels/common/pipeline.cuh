// Bulk copies into shared memory and the barriers that signal their completion (sm_90 and later).
#pragma once
#include "common/common.cuh"

#if __CUDA_ARCH__ >= 900
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void barrier_init(uint32_t b, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count) : "memory"); }
DEVICE void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
DEVICE void barrier_expect(uint32_t b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(uint32_t b, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(b),
      "r"(phase)
      : "memory");
}
// True in the build for racecheck (scripts/gpu/sanitize.sh). It keeps every synchronization but uses forms that the tool can follow.
#ifdef EXL_EACH_LANE_ARRIVES
constexpr bool RACECHECK = true;
#else
constexpr bool RACECHECK = false;
#endif
// A warp's arrival. One lane arrives after __syncwarp, which orders the reads and writes of the other lanes before it. racecheck counts an
// arrival for its own lane only, so in its build all lanes arrive.
constexpr int WARP_ARRIVALS = RACECHECK ? 32 : 1;
DEVICE void warp_arrives(uint32_t b, int lane) {
  __syncwarp();
  if (WARP_ARRIVALS == 32 || lane == 0) barrier_arrive(b);
}
DEVICE uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE uint64_t evict_last() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEVICE void copy_to_shared(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

DEVICE void store_pair(uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

DEVICE void store_four(uint32_t to, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}

// Position in a ring of barriers: a slot and the phase its barrier is in.
struct Turn {
  int slot = 0;
  uint32_t phase = 0;
  DEVICE void advance(int size) {
    if (++slot == size) {
      slot = 0;
      phase ^= 1;
    }
  }
  DEVICE void skip(int count, int size) {
    for (slot += count; slot >= size; slot -= size) phase ^= 1;
  }
};

// The barrier of the whole block in the build for racecheck: one instruction for all callers. synccheck reports threads that wait at
// different instructions as divergent, though PTX treats them as one barrier.
__device__ __noinline__ void whole_block_barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
// A named barrier among `threads` threads of the block, to wait at or, where others wait, only to arrive at. In the build for racecheck
// both wait, and a barrier of the whole block is barrier 0: the tool loses count of named barriers among threads that synchronized
// elsewhere or have exited.
template <int ID>
DEVICE void bar(int threads) {
  if (RACECHECK && threads == blockDim.x) return whole_block_barrier();
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}
template <int ID>
DEVICE void bar_arrive(int threads) {
  if constexpr (RACECHECK) bar<ID>(threads);
  else asm volatile("bar.arrive %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}
// The end of a block whose warps take different paths. In the build for racecheck they exit together.
DEVICE void all_leave() {
  if constexpr (RACECHECK) whole_block_barrier();
}
#endif
