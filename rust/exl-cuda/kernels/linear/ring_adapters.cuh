// The ring kernel with low-rank adapters: a row's results get (h A) B of its adapter, where h is the input in the order of features.
//
// The rows times A are divided among the blocks: once the input is in shared memory, a few consumer warps of each block multiply a slice of it
// by a column of A each and leave the sums in a workspace, where every block finds all of them before its last tile. The storing warp leaves
// results in shared memory, and after the last tile the consumers add the adapters to all of them at once: one warp issues too few
// instructions to add them tile by tile. Sums have the order of lora.cu.
#pragma once
#include "linear/adapters.cuh"
#include "linear/gate.cuh"
#include "linear/ring_task.cuh"

#if __CUDA_ARCH__ >= 900
// The adapters of a block's rows, in shared memory.
struct KnownAdapters {
  const float* bias[GEMV_ROWS][MATRICES];
  int rank[GEMV_ROWS][MATRICES];                      // 0: none
  float middle[GEMV_ROWS][MATRICES][EPILOGUE_RANKS];  // the row times A times the scale of each rank
};
using Scales = const float*[GEMV_ROWS * MATRICES];
// A row's tile of a block in shared memory: B, the result, the residual.
struct Staged {
  uint8_t *at, *end;
  DEVICE Staged(const EpilogueAdapters& a, uint8_t* memory, int token, int tile)
      : at(memory + a.staged_at + (token * a.tiles + tile) * a.tile_bytes), end(at + a.tile_bytes) {}
  DEVICE __half* b() const { return reinterpret_cast<__half*>(at); }  // [rank, 16]
  DEVICE __half* result() const { return reinterpret_cast<__half*>(end - 64); }
  DEVICE __half* residual() const { return reinterpret_cast<__half*>(end - 32); }
};

struct Adding {
  const Task& p;
  const EpilogueAdapters& a;
  uint8_t* memory;
  KnownAdapters& known;

  static DEVICE void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  }
  // The entry of pair `pair` of a row and a matrix, null if it has none.
  DEVICE const LoraEntry* entry(int pair) const {
    const int token = pair / MATRICES, matrix = pair % MATRICES;
    return token < p.m && matrix < p.count ? entry_of(a.table + (size_t)matrix * a.sets, a.slots, token) : nullptr;
  }

  // ---- the consumers, before the input is present
  // Adapters as a warp finds them: lane i holds those of pair i.
  struct Found {
    const __half *a, *b;
    int rank;
    DEVICE Found(const LoraEntry* entry) : a(entry ? entry->a : nullptr), b(entry ? entry->b : nullptr), rank(entry ? (int)entry->rank : 0) {}
    DEVICE int rank_of(int pair) const { return __shfl_sync(~0u, rank, pair); }
    DEVICE static const __half* of(const __half* pointer, int pair) {
      return reinterpret_cast<const __half*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(pointer), pair));
    }
  };
  // Slices of this warp: what a warp of `lora_shrink` has of a row and a column of A, PIECE elements of every SUMS * PIECE. They are dealt to
  // the blocks in turn, and a block's to its warps. Calls f(pair, column, number of the sum, place of the slice in shared memory).
  template <class F>
  DEVICE void each_slice(const Found& found, F f) const {
    const int pieces = (p.part[0].a.in_features + SUMS * PIECE - 1) / (SUMS * PIECE), step = CONSUMERS * gridDim.x;
    int slice = blockIdx.x + threadIdx.x / 32 * gridDim.x, number = threadIdx.x / 32;
#pragma unroll 1
    for (int pair = 0; pair < p.m * MATRICES; pair++) {
      const int slices = found.rank_of(pair) * SUMS;
#pragma unroll 1
      for (; slice < slices; slice += step, number += CONSUMERS)
        f(pair, slice / SUMS, slice % SUMS, a.slices_at + number * pieces * STAGED_PIECE + threadIdx.x % 32 * 16);
      slice -= slices;
    }
  }
  // Calls f(first of eight elements, place in shared memory) for this lane's parts of a slice.
  template <class F>
  DEVICE void each_piece(int sum, uint32_t at, F f) const {
    const int inputs = p.part[0].a.in_features;
#pragma unroll 1
    for (int k = sum * PIECE + threadIdx.x % 32 * 8; k < inputs; k += SUMS * PIECE, at += STAGED_PIECE) f(k, at);
  }
  // Begins to copy this warp's parts of A and B.
  DEVICE void fetch(const Found& found) const {
    const uint32_t base = shared_address(memory);
    const int inputs = p.part[0].a.in_features, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint16_t* const places = p.part[0].a.row_of_feature;
    each_slice(found, [&](int pair, int column, int sum, uint32_t at) {
      const __half* from = Found::of(found.a, pair) + (size_t)column * inputs;
      each_piece(sum, base + at, [&](int k, uint32_t to) {
        copy16(to, from + k);
        if (places) copy16(to + STAGED_PIECE / 2, places + k);
      });
    });
    Walk walk(p);
    const int first = walk.at;
#pragma unroll 1
    for (walk.at += warp; walk.more(); walk.at += CONSUMERS) {
      int matrix, tile;
      const int i = walk.at - first;
      walk.find(p, matrix, tile);
      const int outputs = p.part[matrix].a.out_features, n = tile * TILE + lane % 2 * 8;
#pragma unroll 1
      for (int token = 0; token < p.m; token++) {
        const int rank = found.rank_of(token * MATRICES + matrix);
        const __half* from = Found::of(found.b, token * MATRICES + matrix) + n;
        const uint32_t to = shared_address(Staged(a, memory, token, i).b()) + lane % 2 * 16;
#pragma unroll 1
        for (int r = lane / 2; r < rank && n < outputs; r += 16) copy16(to + r * 32, from + (size_t)r * outputs);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // ---- the consumers, once the input is in shared memory
  DEVICE const __half* row(int token) const { return reinterpret_cast<const __half*>(memory + p.part[0].x_at) + token * p.x_stride; }
  // Multiplies eight elements of a row, in shared memory, by those of a column and adds them. `places`: theirs in the row, unless `ordered`.
  DEVICE static float add_eight(float sum, const __half* row, bool ordered, int k, uint4 column, uint4 places) {
    const uint32_t w[4] = {column.x, column.y, column.z, column.w}, place[4] = {places.x, places.y, places.z, places.w};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int from = ordered ? k + e : place[e / 2] >> 16 * (e % 2) & 0xffff;
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(w[e / 2]));
      sum = fmaf(__half2float(row[from]), e % 2 ? pair.y : pair.x, sum);
    }
    return sum;
  }
  DEVICE float* sums_of(int pair) const {
    return a.exchange + EXCHANGE_SUMS + (pair / MATRICES * p.count + pair % MATRICES) * (EPILOGUE_RANKS * SUMS);
  }
  DEVICE void multiply_slices(const Found& found) const {
    const uint32_t base = shared_address(memory);
    const bool ordered = !p.part[0].a.row_of_feature;
    asm volatile("cp.async.wait_all;" ::: "memory");
    each_slice(found, [&](int pair, int column, int number, uint32_t at) {
      float sum = 0.f;
      each_piece(number, base + at, [&](int k, uint32_t from) {
        const SharedBytes piece{from};
        sum = add_eight(sum, row(pair / MATRICES), ordered, k, piece.get16(0), ordered ? uint4{} : piece.get16(STAGED_PIECE / 2));
      });
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0)
        asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(sums_of(pair) + column * SUMS + number), "f"(sum) : "memory");
    });
  }

  // ---- the storing warp
  // Looks up the adapters.
  DEVICE void find() const {
    __shared__ Scales scale;
    const int lane = threadIdx.x % 32;
    if (lane < GEMV_ROWS * MATRICES) {
      const LoraEntry* found = entry(lane);
      known.bias[lane / MATRICES][lane % MATRICES] = found ? found->bias : nullptr;
      known.rank[lane / MATRICES][lane % MATRICES] = found ? (int)found->rank : 0;
      scale[lane] = found ? found->scale : nullptr;
    }
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < GEMV_ROWS * MATRICES; i++)
      if (lane < known.rank[i / MATRICES][i % MATRICES]) known.middle[i / MATRICES][i % MATRICES][lane] = scale[i][lane];
    __syncwarp();
  }
  // A row times column r of A, by the whole warp, as the blocks compute it in slices.
  DEVICE float multiply_column(int pair, int r) const {
    const uint16_t* const places = p.part[0].a.row_of_feature;
    const __half* const column = entry(pair)->a + (size_t)r * p.part[0].a.in_features;
    float all = 0.f;
#pragma unroll 1
    for (int slice = 0; slice < SUMS; slice++) {
      float sum = 0.f;
      each_piece(slice, 0, [&](int k, uint32_t) {
        sum = add_eight(sum, row(pair / MATRICES), !places, k, *reinterpret_cast<const uint4*>(column + k),
                        places ? *reinterpret_cast<const uint4*>(places + k) : uint4{});
      });
      all += warp_sum(sum);
    }
    return all;
  }
  // Takes the sums of all blocks. Arithmetic produces no word of ones, so no memory ordering is needed. No block waits for one that may not
  // be resident: it computes sums that do not come itself.
  DEVICE void gather() const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int pair = 0; pair < p.m * MATRICES; pair++) {
      const int token = pair / MATRICES, matrix = pair % MATRICES;
      const bool mine = lane < known.rank[token][matrix];
      const float* const from = sums_of(pair) + lane * SUMS;
      uint32_t v[SUMS], most = mine ? ~0u : 0;
#pragma unroll 1
      for (int tries = a.looks; tries && most == ~0u; tries--) {
        most = 0;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4)
          asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[i]), "=r"(v[i + 1]), "=r"(v[i + 2]), "=r"(v[i + 3])
                       : "l"(from + i)
                       : "memory");
#pragma unroll
        for (int i = 0; i < SUMS; i++) most = max(most, v[i]);
      }
      float all = 0.f;
      if (mine && most != ~0u)
#pragma unroll
        for (int i = 0; i < SUMS; i++) all += __uint_as_float(v[i]);
#pragma unroll 1
      for (uint32_t missing = __ballot_sync(~0u, most == ~0u); missing; missing &= missing - 1) {
        const int r = __ffs(missing) - 1;
        const float sum = multiply_column(pair, r);
        if (lane == r) all = sum;
      }
      if (mine) known.middle[token][matrix][lane] *= all;
    }
  }
  // The last block that has read the sums restores the workspace.
  DEVICE void restore() const {
    const int lane = threadIdx.x % 32;
    int* const counter = reinterpret_cast<int*>(a.exchange);  // -1 between launches
    __syncwarp();
    int before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(counter, 1);
      __threadfence();
    }
    if (__shfl_sync(~0u, before, 0) != (int)gridDim.x - 2) return;
    uint4* const sums = reinterpret_cast<uint4*>(a.exchange + EXCHANGE_SUMS);
#pragma unroll 1
    for (int i = lane; i < p.m * p.count * EPILOGUE_RANKS * SUMS / 4; i += 32) sums[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    if (lane == 0) *counter = -1;
  }
  // Brings the residuals of the block's results to shared memory.
  DEVICE void load_residuals() const {
    const int lane = threadIdx.x % 32, token = lane / 16;
    if (p.residual == nullptr || token >= p.m) return;
    int i = 0;
#pragma unroll 1
    for (Walk walk(p); walk.more(); walk.at++, i++) {
      int matrix, tile;
      walk.find(p, matrix, tile);
      const int n = tile * TILE + lane % 16;
      if (n < p.part[matrix].a.out_features)
        Staged(a, memory, token, i).residual()[lane % 16] =
            static_cast<const __half*>(p.residual)[(size_t)token * p.y_stride + p.part[matrix].y_offset + n];
    }
  }
  // Leaves the results in shared memory.
  DEVICE void store(const Barriers& s) const {
    const int lane = threadIdx.x % 32, feature = lane % 16, token = min(lane / 16, p.m - 1);
    load_residuals();
    Turn result;
    int i = 0;
#pragma unroll 1
    for (Walk walk(p); walk.more(); i++) {
      int matrix, tile;
      walk.find(p, matrix, tile);
      walk.at++;
      if (!walk.more()) gather();
      const Part& part = p.part[matrix];
      const int n = tile * TILE + feature;
      const float bias = part.a.bias && n < part.a.out_features ? part.a.bias[n] : 0.f, prescale = part.a.prescale;
      const float* const parts = reinterpret_cast<const float*>(memory + p.results_at) + (result.slot * CLASSES * TILE + feature) * p.columns + token;
      barrier_wait(s.ready + result.slot * 8, result.phase);
      const float multiplier = reinterpret_cast<const float*>(memory + p.multipliers_at)[token];
      const float sum = sum_classes([&](int c) { return parts[c * TILE * p.columns]; });
      Staged(a, memory, token, i).result()[feature] = __float2half_rn(finish(sum, multiplier, bias, prescale));
      warp_arrives(s.free + result.slot * 8, lane);
      result.advance(RESULT_BUFFERS);
    }
    bar_arrive<6>(CONSUMERS * 32 + 32);
    restore();
  }

  // ---- the consumers, after the last tile
  // A result plus the adapter of its row, rounded, in the order of `lora_expand_group`. `i`: number of the block's tile; n: the matrix's output.
  DEVICE float adapted(int token, int matrix, int i, int n) const {
    const Staged staged(a, memory, token, i);
    const float v = __half2float(staged.result()[n % TILE]);
    const int rank = known.rank[token][matrix];
    if (rank == 0) return v;
    const __half* const b = staged.b() + n % TILE;
    float sum = known.bias[token][matrix] ? known.bias[token][matrix][n] : 0.f;
#pragma unroll 8
    for (int r = 0; r < rank; r++) sum = fmaf(known.middle[token][matrix][r], __half2float(b[r * TILE]), sum);
    return rounded(v + sum, OUT_F16);
  }
  // Adds the adapters to the block's results, then the residual or the gate.
  DEVICE void add() const {
    const bool gated = p.gate >= 0, keep = p.flags & KEEP;
    Walk walk(p);
    const int first = walk.at, outputs = (gated ? walk.half : walk.end - first) * TILE;
#pragma unroll 1
    for (int at = threadIdx.x; at < p.m * outputs; at += CONSUMERS * 32) {
      const int token = at >= outputs, q = (at - token * outputs) / TILE, i = gated && !keep ? 2 * q : q;
      int matrix, tile;
      walk.at = first + i;
      walk.find(p, matrix, tile);
      const Part& part = p.part[matrix];
      const int n = tile * TILE + at % TILE;
      if (n >= part.a.out_features) continue;
      float v = adapted(token, matrix, i, n);
      if (gated) v = activate(v, p.gate) * adapted(token, 1, keep ? i + walk.half : i + 1, n);
      if (p.residual) v += __half2float(Staged(a, memory, token, i).residual()[n % TILE]);
      store_result(p.y, (size_t)token * p.y_stride + part.y_offset + n, OUT_F16, v);
    }
  }
};
#endif
