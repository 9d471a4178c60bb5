// Blocks of a cluster send each other results (sm_90 and later). In a launch without clusters these are illegal instructions.
#pragma once
#include "common/common.cuh"

#if __CUDA_ARCH__ >= 900
// All threads of a cluster arrive once. The barrier publishes no data: an arrival with release would wait for all pending writes.
DEVICE void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE uint32_t address_of_block(uint32_t at, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Writes into another block's shared memory and counts on its barrier. Counted data is ready to be read.
DEVICE void send(uint32_t to, uint32_t barrier, float4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(__float_as_int(v.x)),
               "r"(__float_as_int(v.y)), "r"(__float_as_int(v.z)), "r"(__float_as_int(v.w)), "r"(barrier)
               : "memory");
}
DEVICE void barrier_wait_cluster(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(
          barrier),
      "r"(phase)
      : "memory");
}
#endif
