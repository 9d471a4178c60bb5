// Sums over a block of 256 threads in one fixed order that all norms share.
#pragma once
#include "common/common.cuh"

constexpr int THREADS = 256;

// Sum over the block: lanes by butterfly, then the eight warps in order.
DEVICE float block_sum(float v) {
  __shared__ float parts[THREADS / 32];
  v = warp_sum(v);
  __syncthreads();  // a second sum must not overwrite what a slow warp still reads of the first sum
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) sum += parts[i];
  return sum;
}
