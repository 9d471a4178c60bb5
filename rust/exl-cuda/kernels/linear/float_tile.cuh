// The tile of a block that multiplies many rows by float weights: both go through shared memory (sm_80 and later).
#pragma once
#include "linear/float.cuh"

constexpr int TILE_FEATURES = 128, FLOAT_STAGES = 4, STAGE_ROW_BYTES = 128;
static_assert(STAGE_ROW_BYTES == 2 * STAGE_K);

#if __CUDA_ARCH__ >= 800
// TILE_FEATURES lines of weights and ROWS rows, of K from `begin` to `end`. A warp multiplies FT tiles of eight lines by two of 16 rows.
//
// A stage in shared memory holds STAGE_K numbers of each line and of each row, 128 bytes.
template <int ROWS>
struct FloatTile {
  static constexpr int RT = 2, GROUPS = ROWS / (16 * RT), FT = TILE_FEATURES / 8 * GROUPS / (FLOAT_THREADS / 32);
  static constexpr int STAGE = (TILE_FEATURES + ROWS) * STAGE_ROW_BYTES, CHUNKS = STAGE_K / CHUNK_K;
  static constexpr int COPIES = TILE_FEATURES * 8 / FLOAT_THREADS, ROW_COPIES = ROWS * 8 / FLOAT_THREADS;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, sixteen = threadIdx.x % 8;
  const int own_lines = threadIdx.x / 32 / GROUPS * (8 * FT), own_rows = threadIdx.x / 32 % GROUPS * (16 * RT);
  const uint32_t memory;
  const int begin, end;
  const __half *weights[COPIES], *rows[ROW_COPIES];
  float sums[RT][FT][4];

  // weight(line), row(i): where a line of weights, and a row, begin in memory.
  template <class Weight, class Row>
  DEVICE FloatTile(uint8_t* shared, int begin, int end, Weight weight, Row row)
      : memory(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), begin(begin), end(end) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) weights[i] = weight(line_of(i)) + sixteen * 8;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) rows[i] = row(line_of(i)) + sixteen * 8;
    each([&](int r, int f, int e) { sums[r][f][e] = 0.f; });
  }
  // The line, or row, of a thread's i-th copy.
  DEVICE static int line_of(int i) { return threadIdx.x / 8 + i * (FLOAT_THREADS / 8); }
  // Where a stage has 16 bytes of a line: eight lanes that read four of one line and four of the next use different banks.
  DEVICE static uint32_t place(int line, int sixteen) { return line * STAGE_ROW_BYTES + (sixteen ^ (line & 1) << 2) * 16; }
  template <class F>
  DEVICE static void each(F use) {
#pragma unroll
    for (int r = 0; r < RT; r++)
#pragma unroll
      for (int f = 0; f < FT; f++)
#pragma unroll
        for (int e = 0; e < 4; e++) use(r, f, e);
  }
  // Copies 16 bytes of each of N lines of a stage, zeros from the end of K on.
  template <int N>
  DEVICE void copy(const __half* const (&from)[N], int stage, int line) const {
    const int k = begin + stage * STAGE_K;
    if (k >= end) return;
    const bool some = k + sixteen * 8 < end;
    const uint32_t to = memory + stage % FLOAT_STAGES * STAGE;
#pragma unroll
    for (int i = 0; i < N; i++)
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to + place(line + line_of(i), sixteen)),
                   "l"(from[i] + (some ? k : begin - sixteen * 8)), "r"(some ? 16 : 0)
                   : "memory");
  }
  DEVICE void copy_weights(int stage) const { copy(weights, stage, 0); }
  DEVICE void copy_rows(int stage) const {
    copy(rows, stage, TILE_FEATURES);
    // An empty group, too, so that all waits count alike.
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  DEVICE void multiply(int stage) {
    const SharedBytes from{memory + stage % FLOAT_STAGES * STAGE};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint4 w[FT];
#pragma unroll
      for (int f = 0; f < FT; f++) w[f] = from.get16(place(own_lines + 8 * f + g, 4 * c + t));
#pragma unroll
      for (int r = 0; r < RT; r++) {
        const uint4 low = from.get16(place(TILE_FEATURES + own_rows + 16 * r + g, 4 * c + t));
        const uint4 high = from.get16(place(TILE_FEATURES + own_rows + 16 * r + 8 + g, 4 * c + t));
        const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        multiply_chunk(sums[r], a, w);
      }
    }
  }
  // The row and the line of a lane's sum.
  DEVICE int row_at(int r, int e) const { return own_rows + 16 * r + e / 2 * 8 + g; }
  DEVICE int line_at(int f, int e) const { return own_lines + 8 * f + 2 * t + e % 2; }
  // Multiplies; `leave` takes `sums` of each slice of `of_slice` stages, and of the last one, which may be shorter, and clears them.
  template <class Leave>
  DEVICE void run(int of_slice, Leave leave) {
    const int stages = (end - begin + STAGE_K - 1) / STAGE_K;
#pragma unroll 1
    for (int s = 0; s < FLOAT_STAGES - 1; s++) copy_weights(s);
    pdl_wait();
#pragma unroll 1
    for (int s = 0; s < FLOAT_STAGES - 1; s++) copy_rows(s);
    int left = of_slice;
#pragma unroll 1
    for (int s = 0; s < stages; s++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(FLOAT_STAGES - 2) : "memory");
      __syncthreads();
      copy_weights(s + FLOAT_STAGES - 1);
      copy_rows(s + FLOAT_STAGES - 1);
      multiply(s);
      if (--left == 0) {
        leave();
        left = of_slice;
      }
    }
    if (left < of_slice) leave();
  }
};
#endif
