// Low-rank adapters as kernels read them: a table of entries, and the entry of each row.
#pragma once
#include "common/abi.cuh"
#include "common/common.cuh"
#include "common/row_limits.cuh"

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

// The adapters that a matmul of one or two rows adds to the results of one to three matrices.
struct EpilogueAdapters {
  const LoraEntry* table;  // [matrices, sets]
  const int* slots;        // [rows]: the set of each row, negative for none; null: the first set for all rows
  float* exchange;         // all ones between launches: a counter of blocks (so -1), and from EXCHANGE_SUMS on [rows, matrices, EPILOGUE_RANKS, SUMS]
  int sets;
  int looks;           // how often a block polls for the sums of others before it computes them itself
  uint32_t staged_at;  // shared memory for `tiles` tiles of each row (`Staged` in ring_adapters.cuh)
  int tiles;           // most tiles of a block
  uint32_t slices_at;  // shared memory for slices of columns of A
  int tile_bytes;      // of a tile of 16 features of a row: B of the largest rank, the result, the residual
};
ABI_SIZE(EpilogueAdapters, 48); ABI_AT(EpilogueAdapters, table, 0); ABI_AT(EpilogueAdapters, slots, 8); ABI_AT(EpilogueAdapters, exchange, 16);
ABI_AT(EpilogueAdapters, sets, 24); ABI_AT(EpilogueAdapters, looks, 28); ABI_AT(EpilogueAdapters, staged_at, 32); ABI_AT(EpilogueAdapters, tiles, 36);
ABI_AT(EpilogueAdapters, slices_at, 40); ABI_AT(EpilogueAdapters, tile_bytes, 44);

// Most ranks of such a matmul, which has up to GEMV_ROWS rows. SUMS: partial sums of a row times a column of A, those of the warps of `lora_shrink`'s block.
constexpr int EPILOGUE_RANKS = 32, SUMS = 8, EXCHANGE_SUMS = 32;
// Elements of a piece of a slice, and bytes of it in shared memory: of A, and places in the input.
constexpr int PIECE = 256, STAGED_PIECE = 1024;
