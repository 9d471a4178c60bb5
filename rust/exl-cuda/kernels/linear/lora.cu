// Low-rank adapters: y = y + (A x) B, where each row has its own adapter or none. Two launches for a matrix, of any ranks.
//
// A row's sums have one order, independent of the other rows. Thread i of a block adds elements 8 i .. 8 i + 7 of every 2,048, then the
// block adds its threads. An output adds its ranks from the first to the last.
#include "common/abi.cuh"
#include "common/block_sum.cuh"

// The adapter of one slot for one matrix [in, out].
struct LoraEntry {
  const __half* a;     // [rank, in]
  const __half* b;     // [rank, out]
  const float* scale;  // [rank]
  const float* bias;   // [out], or null
  int64_t rank;        // 0: no adapter
};
ABI_SIZE(LoraEntry, 40); ABI_AT(LoraEntry, a, 0); ABI_AT(LoraEntry, b, 8); ABI_AT(LoraEntry, scale, 16); ABI_AT(LoraEntry, bias, 24);
ABI_AT(LoraEntry, rank, 32);

// The entry of a row: slot `slots[row]`, or slot 0 for all rows without `slots`; null if the row has no adapter.
DEVICE const LoraEntry* entry_of(const LoraEntry* table, const int* slots, int row) {
  const int slot = slots ? slots[row] : 0;
  return slot < 0 || table[slot].rank == 0 ? nullptr : table + slot;
}

// middle[row, r] = scale[r] * sum_k x[row, k] a[r, k]. A block is one row and rank.
extern "C" __global__ void __launch_bounds__(THREADS) lora_shrink(const __half* x, const LoraEntry* table, const int* slots,
                                                                  float* middle, int in, int most_rank) {
  pdl_trigger();
  const int rank = blockIdx.x, row = blockIdx.y;
  pdl_wait();
  const LoraEntry* entry = entry_of(table, slots, row);
  if (entry == nullptr || rank >= entry->rank) return;
  const __half* a = entry->a + (size_t)rank * in;
  x += (size_t)row * in;
  float sum = 0.f;
  for (int k = threadIdx.x * 8; k < in; k += THREADS * 8) {
    float v[8], w[8];
    load8(v, x + k);
    load8(w, a + k);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(v[i], w[i], sum);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) middle[(size_t)row * most_rank + rank] = sum * entry->scale[rank];
}

// y[row, n] += bias[n] + sum_r middle[row, r] b[r, n]. A thread has two neighbouring outputs.
extern "C" __global__ void __launch_bounds__(THREADS) lora_expand(__half* y, const LoraEntry* table, const int* slots,
                                                                  const float* middle, int out, int most_rank) {
  pdl_trigger();
  const int n = (blockIdx.x * THREADS + threadIdx.x) * 2, row = blockIdx.y;
  pdl_wait();
  const LoraEntry* entry = entry_of(table, slots, row);
  if (entry == nullptr || n >= out) return;
  const __half* b = entry->b + n;
  middle += (size_t)row * most_rank;
  float2 sum = entry->bias ? make_float2(entry->bias[n], entry->bias[n + 1]) : make_float2(0.f, 0.f);
#pragma unroll 8
  for (int r = 0; r < (int)entry->rank; r++) {
    const float2 w = __half22float2(*reinterpret_cast<const __half2*>(b + (size_t)r * out));
    sum.x = fmaf(middle[r], w.x, sum.x);
    sum.y = fmaf(middle[r], w.y, sum.y);
  }
  __half2* at = reinterpret_cast<__half2*>(y + (size_t)row * out + n);
  const float2 old = __half22float2(*at);
  *at = __floats2half2_rn(old.x + sum.x, old.y + sum.y);
}
