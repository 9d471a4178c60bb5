// Float matrices and more rows: weights and rows go through shared memory (sm_80 and later).
#include "linear/float.cuh"

constexpr int TILE_FEATURES = 128, FLOAT_STAGES = 4, STAGE_ROW_BYTES = 128;
static_assert(STAGE_ROW_BYTES == 2 * STAGE_K);

#if __CUDA_ARCH__ >= 800
// A block has TILE_FEATURES features and ROWS rows, and all slices or some of them. A warp multiplies FT tiles of eight features by two of
// 16 rows.
//
// A stage in shared memory holds STAGE_K numbers of each feature and of each row, 128 bytes.
template <int ROWS, bool PARTS>
struct FloatTile {
  static constexpr int RT = 2, GROUPS = ROWS / (16 * RT), FT = TILE_FEATURES / 8 * GROUPS / (FLOAT_THREADS / 32);
  static constexpr int STAGE = (TILE_FEATURES + ROWS) * STAGE_ROW_BYTES, CHUNKS = STAGE_K / CHUNK_K;
  static constexpr int COPIES = TILE_FEATURES * 8 / FLOAT_THREADS, ROW_COPIES = ROWS * 8 / FLOAT_THREADS;
  const FloatCall& call;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, sixteen = threadIdx.x % 8;
  const int own_features = threadIdx.x / 32 / GROUPS * (8 * FT), own_rows = threadIdx.x / 32 % GROUPS * (16 * RT);
  const int first_row = blockIdx.x * ROWS, first = blockIdx.y * TILE_FEATURES;
  const uint32_t memory;
  int slice, last, begin, end;
  const __half *weights[COPIES], *rows[ROW_COPIES];
  float sums[RT][FT][4], total[RT][FT][4];

  DEVICE FloatTile(const FloatCall& call, uint8_t* shared) : call(call), memory(static_cast<uint32_t>(__cvta_generic_to_shared(shared))) {
    const int own = PARTS ? SLICES / call.parts : SLICES;
    slice = PARTS ? blockIdx.z * own : 0;
    last = slice + own;
    begin = min(slice * call.slice, call.k);
    end = min(last * call.slice, call.k);
#pragma unroll
    for (int i = 0; i < COPIES; i++) weights[i] = call.weight + (size_t)min(first + row_of(i), call.n - 1) * call.k + sixteen * 8;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) rows[i] = call.x + (size_t)min(first_row + row_of(i), call.m - 1) * call.k + sixteen * 8;
    each([&](int r, int f, int e) { sums[r][f][e] = total[r][f][e] = 0.f; });
  }
  DEVICE static int row_of(int i) { return threadIdx.x / 8 + i * (FLOAT_THREADS / 8); }
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
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to + place(line + row_of(i), sixteen)),
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
      for (int f = 0; f < FT; f++) w[f] = from.get16(place(own_features + 8 * f + g, 4 * c + t));
#pragma unroll
      for (int r = 0; r < RT; r++) {
        const uint4 low = from.get16(place(TILE_FEATURES + own_rows + 16 * r + g, 4 * c + t));
        const uint4 high = from.get16(place(TILE_FEATURES + own_rows + 16 * r + 8 + g, 4 * c + t));
        const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        multiply_chunk(sums[r], a, w);
      }
    }
  }
  DEVICE int row_at(int r, int e) const { return first_row + own_rows + 16 * r + e / 2 * 8 + g; }
  DEVICE int feature_at(int f, int e) const { return first + own_features + 8 * f + 2 * t + e % 2; }
  // Leaves the sums of a slice.
  DEVICE void leave() {
    each([&](int r, int f, int e) {
      if constexpr (PARTS) {
        const int row = row_at(r, e), feature = feature_at(f, e);
        if (row < call.m && feature < call.n) call.sums[((size_t)slice * call.m + row) * call.n + feature] = sums[r][f][e];
      } else {
        total[r][f][e] += sums[r][f][e];
      }
      sums[r][f][e] = 0.f;
    });
    slice++;
  }
  DEVICE void run() {
    const int stages = (end - begin + STAGE_K - 1) / STAGE_K, of_slice = call.slice / STAGE_K;
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
    if constexpr (PARTS) {
      while (slice < last) leave();  // slices of a small K without numbers
    } else {
      each([&](int r, int f, int e) {
        const int row = row_at(r, e), feature = feature_at(f, e);
        if (row < call.m && feature < call.n) store(call, row, feature, total[r][f][e]);
      });
    }
  }
};
template <int ROWS, bool PARTS>
DEVICE void float_tile(const FloatCall& call) {
  extern __shared__ __align__(128) uint8_t float_memory[];
  pdl_trigger();
  FloatTile<ROWS, PARTS>(call, float_memory).run();
}
#else
template <int ROWS, bool PARTS>
DEVICE void float_tile(const FloatCall&) {
  __trap();  // the host starts these kernels from sm_80 on only
}
#endif
#define FLOAT_TILE(NAME, ROWS, PARTS)                                                                           \
  extern "C" __global__ void __launch_bounds__(FLOAT_THREADS, 2) NAME(const __grid_constant__ FloatCall call) { \
    float_tile<ROWS, PARTS>(call);                                                                              \
  }
FLOAT_TILE(gemm_float_tile_32, 32, false)
FLOAT_TILE(gemm_float_tile_64, 64, false)
FLOAT_TILE(gemm_float_parts_32, 32, true)
FLOAT_TILE(gemm_float_parts_64, 64, true)
