// A mixture of experts: definitions that its launches share. Only the device knows which experts are chosen: grids have a fixed size, and
// blocks read their work from tables.
//
// A pair is a row with one of its choices, row by row: pair p is choice p % chosen of row p / chosen.
#pragma once
#include "linear/tile_layout.cuh"

// One expert: a gated MLP. The same struct as `ops::moe::ExpertArgument`.
struct Expert {
  Matrix gate, up, down;
  const int *gate_features, *up_features, *down_features;  // input feature of each row of K, -1 for padding
};
ABI_SIZE(Expert, 240); ABI_AT(Expert, gate, 0); ABI_AT(Expert, up, 72); ABI_AT(Expert, down, 144);
ABI_AT(Expert, gate_features, 216); ABI_AT(Expert, up_features, 224); ABI_AT(Expert, down_features, 232);

// Operands of all launches of a layer's experts. The same struct as `ops::moe::CallArgument`.
struct ExpertCall {
  const Expert* experts;
  const int64_t* ids;  // [pairs]
  const float* weights;  // [pairs]
  const __half* h;  // [rows, hidden]
  // Scratch memory. An item is some pairs of an expert, at most `at_once`: {expert, where its pairs begin in `order`, their number, 0}.
  // Items of more than `narrow` pairs come first, then the others, each by expert. The pairs are sorted by expert, each expert's in
  // ascending order.
  int* item_counts;  // [2]: items of more than `narrow` pairs, and the others
  int4* items;
  int* order;
  // Packed inputs of items (`packed_at`), `columns` in all, each item's from `column_of` on.
  __half* x;  // [inputs, columns, x_stride]: in the order of gate's K and, if that of up differs, of up's
  __half* inner;  // [columns, inner_stride]: input of down, in the order of its K
  __half* parts;  // [pairs, hidden]: the result of each pair
  const int* places;  // [pairs]: the row of each pair's result in `parts`; null: its own
  const __half* shared;  // [rows, hidden] of an expert that all rows use; may be null
  const float* shared_weights;  // [rows]; null: ones
  const __half* residual;  // [rows, hidden]; may be null
  __half* out;  // [rows, hidden]; may be `residual`
  // [pairs]: where the item of a pair begins in `order`, and the pair's place in it; null: blocks that pack inputs count for themselves.
  int2* item_of_pair;
  int rows, chosen, pairs, count, hidden, x_stride, inner_stride, inputs, activation;
  int tiles;  // row tiles of the matmul that is launched
  int at_once;  // 8, 16 or 32
  int narrow;  // at_once / 2, and 8 if that is 8
  int columns;
  int unit_bytes;  // room for a unit in shared memory
  int packs;  // 1: the launch packs inputs only, after another one that sorted
  int padding;
};
ABI_SIZE(ExpertCall, 192); ABI_AT(ExpertCall, experts, 0); ABI_AT(ExpertCall, ids, 8); ABI_AT(ExpertCall, weights, 16);
ABI_AT(ExpertCall, h, 24); ABI_AT(ExpertCall, item_counts, 32); ABI_AT(ExpertCall, items, 40); ABI_AT(ExpertCall, order, 48);
ABI_AT(ExpertCall, x, 56); ABI_AT(ExpertCall, inner, 64); ABI_AT(ExpertCall, parts, 72); ABI_AT(ExpertCall, places, 80);
ABI_AT(ExpertCall, shared, 88); ABI_AT(ExpertCall, shared_weights, 96); ABI_AT(ExpertCall, residual, 104); ABI_AT(ExpertCall, out, 112);
ABI_AT(ExpertCall, item_of_pair, 120); ABI_AT(ExpertCall, rows, 128); ABI_AT(ExpertCall, chosen, 132); ABI_AT(ExpertCall, pairs, 136);
ABI_AT(ExpertCall, count, 140); ABI_AT(ExpertCall, hidden, 144); ABI_AT(ExpertCall, x_stride, 148); ABI_AT(ExpertCall, inner_stride, 152);
ABI_AT(ExpertCall, inputs, 156); ABI_AT(ExpertCall, activation, 160); ABI_AT(ExpertCall, tiles, 164); ABI_AT(ExpertCall, at_once, 168);
ABI_AT(ExpertCall, narrow, 172); ABI_AT(ExpertCall, columns, 176); ABI_AT(ExpertCall, unit_bytes, 180); ABI_AT(ExpertCall, packs, 184);
ABI_AT(ExpertCall, padding, 188);

// The first column of an item of an expert whose pairs begin at place `first` of `order`: each expert has room for whole items.
DEVICE size_t column_of(const ExpertCall& call, int64_t expert, int first) { return first + (call.at_once - 1) * expert; }

// Where an item of `at_once` columns has row `k` of K of a column: of each 32 rows of K one column after the other. So eight lanes that
// read 16 bytes each of two columns read one line of the cache; with columns apart they would read two, which was the bound.
DEVICE int packed_at(int at_once, int column, int k) { return (k / 32 * at_once + column) * 32 + k % 32; }

// The most experts, and the most pairs, that one block sorts; and the most pairs that it takes at a time. Calls of more than that pack inputs
// after sorting: a block that does not know the item of its pair reads all pairs.
constexpr int EXPERTS_MOST = 1024, PAIRS_MOST = 16384, PAIRS_AT_A_TIME = 1024;
