// Attention of many tokens on sm_90a: prefill's arithmetic, to the bit, with the matrix instructions of a warpgroup.
//
// A block has two warpgroups of 64 query rows and shares units of half keys and values. Operands lie in shared memory as core matrices of
// 8 rows x 16 bytes: chunk c of eight dimensions of row r at 1024 c + 16 r. While a unit's weights are made, the next one's logits are.
#pragma once
#include "attention_prefill.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE uint64_t matrix_at(const void* p, int leading, int stride) {
  const uint64_t at = (uint32_t)__cvta_generic_to_shared(p);
  return (at >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32;
}
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all products; `d`: a result of theirs, not to be read before.
template <int N>
DEVICE void products_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Ordinary and asynchronous copies to shared memory become visible to products after the next barrier.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// d (64 x 64) = a b^T (+ d if `add`), 16 dimensions.
DEVICE void rows_by_rows(float (&d)[32], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"((int)add));
}
// d (64 x 64 or 128) = a b (+ d if `add`), 16 rows of b.
DEVICE void rows_by_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
DEVICE void rows_by_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
#endif

template <int DIM_>
struct Wide {
  static constexpr int KC = F16, VC = F16, DIM = DIM_, WARPS = 8, TILES = DIM / 8, RING = 4;
  static constexpr int PLANE_BYTES = UNIT * DIM * 2, UNIT_BYTES = 2 * PLANE_BYTES, QUERY_BYTES = 128 * DIM * 2, TOTAL_BYTES = ROWS * DIM * 4;
  static constexpr int SHARED_BYTES = RING * UNIT_BYTES + QUERY_BYTES + WARPS * TOTAL_BYTES;  // as in ops/attention.rs
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Units on their way: a lane has one key and every fourth of its chunks.
template <class S>
struct WideRing {
  const Attention& a;
  const Keys& keys;
  uint8_t* units;
  int head, first, count, issued = 0, row;

  DEVICE WideRing(const Attention& a, const Keys& keys, uint8_t* units, int head, int first, int count)
      : a(a), keys(keys), units(units), head(head), first(first), count(count) {
    row = find(0);
#pragma unroll 1
    for (int i = 0; i < S::RING - 1; i++) issue();
  }
  DEVICE int own_key() const { return (threadIdx.x >> 5) * 8 + threadIdx.x % 8; }
  DEVICE int find(int unit) const { return unit < count ? locate(a, keys, head, (first + unit) * UNIT + own_key()) : -1; }
  DEVICE const uint8_t* unit(int index) const { return units + index % S::RING * S::UNIT_BYTES; }
  DEVICE void issue() {
    if (issued < count) {
      const int chunk = threadIdx.x / 8 % 4, bytes = a.dim * 2;
      const int64_t at = (int64_t)max(row, 0) * bytes + chunk * 16;
      uint8_t* to = units + issued % S::RING * S::UNIT_BYTES + chunk * 16 * UNIT + own_key() * 16;
#pragma unroll
      for (int i = 0; i < S::DIM / 32; i++) {
        const bool present = row >= 0 && chunk * 16 + i * 64 < bytes;
        copy_async<16>(to + i * 64 * UNIT, a.key + at + i * 64, present);
        copy_async<16>(to + i * 64 * UNIT + S::PLANE_BYTES, a.value + at + i * 64, present);
      }
      row = find(issued + 1);
    }
    copy_commit();
    issued++;
  }
};

template <class S>
DEVICE void wide_logits(float (&x)[32], const uint8_t* queries, const uint8_t* keys) {
  products_begin();
#pragma unroll
  for (int s = 0; s < S::DIM / 16; s++)
    rows_by_rows(x, matrix_at(queries + s * 32 * UNIT, 16 * UNIT, 128), matrix_at(keys + s * 32 * UNIT, 16 * UNIT, 128), s > 0);
  products_commit();
}

// Unit `index`: logits to weights, the next unit's logits meanwhile, sums.
template <class S>
DEVICE void wide_unit(const Attention& a, WideRing<S>& ring, const Visible& seen, int index, float (&logits)[32], const uint8_t* queries,
                      State<S::TILES>& split) {
  copy_wait<S::RING - 3>();
  show_to_products();
  __syncthreads();  // the next unit is there, and nobody needs the one before this any more
  ring.issue();
  products_wait(logits);
  const int u = index - ring.first;
  float x[8][4], max_of[2], sum_of[2], kept[2], added[2];
  uint32_t weights[4][4];
  const float scale = a.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < 32; i++) x[i / 4][i % 4] = __fmul_rn(logits[i], scale);
  wide_logits<S>(logits, queries, ring.unit(u + 1));  // after the last unit: of no use, but a branch would serialize the products
  const int first_key = index * UNIT, t = threadIdx.x & 3;
  const bool all = first_key >= max(seen.from[0], seen.from[1]) && first_key + UNIT <= min(seen.to[0], seen.to[1]);
  if (!all)
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int key = first_key + i / 4 * 8 + 2 * t + (i & 1), r = i >> 1 & 1;
      if (key < seen.from[r] || key >= seen.to[r]) x[i / 4][i % 4] = -INFINITY;
    }
  unit_softmax(x, weights, max_of, sum_of);
  float part[S::DIM / 2];
  products_begin();
#pragma unroll
  for (int s = 0; s < 4; s++)
    rows_by_columns(part, weights[s], matrix_at(ring.unit(u) + S::PLANE_BYTES + s * 256, 128, 16 * UNIT), s > 0);
  products_commit();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    join_factors(split.max[r], max_of[r], sum_of[r], kept[r], added[r]);
    split.sum[r] = join_value(split.sum[r], kept[r], sum_of[r], added[r]);
  }
  products_wait(part);
  if (__all_sync(~0u, kept[0] == 1.f && kept[1] == 1.f)) {
#pragma unroll
    for (int n = 0; n < S::TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) split.acc[n][e] = __fmaf_rn(part[4 * n + e], added[e >> 1], split.acc[n][e]);
    return;
  }
#pragma unroll
  for (int n = 0; n < S::TILES; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) split.acc[n][e] = join_value(split.acc[n][e], kept[e >> 1], part[4 * n + e], added[e >> 1]);
}

// The last split joins the total (null: there is none) and goes to `out` from the registers.
template <class S>
DEVICE void wide_result(const Attention& a, const float4* total, float (&max)[2], float (&sum)[2], const State<S::TILES>& split, const Place (&mine)[2]) {
  const int lane = threadIdx.x & 31;
  float kept[2], added[2], inverse[2];
  int64_t at[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    join_factors(max[r], split.max[r], split.sum[r], kept[r], added[r]);
    inverse[r] = inverse_of(join_value(sum[r], kept[r], split.sum[r], added[r]));
    at[r] = ((int64_t)mine[r].token * a.q_heads + mine[r].head) * a.dim;
  }
#pragma unroll
  for (int n = 0; n < S::TILES; n++) {
    const float4 v = total ? total[n * 32 + lane] : make_float4(0.f, 0.f, 0.f, 0.f);
    const float x = join_value(v.x, kept[0], split.acc[n][0], added[0]), y = join_value(v.y, kept[0], split.acc[n][1], added[0]);
    const float z = join_value(v.z, kept[1], split.acc[n][2], added[1]), w = join_value(v.w, kept[1], split.acc[n][3], added[1]);
    const int e = 8 * n + 2 * (lane & 3);
    if (e >= a.dim) break;
    if (mine[0].token >= 0) store_pair(a, at[0] + e, __fmul_rn(x, inverse[0]), __fmul_rn(y, inverse[0]));
    if (mine[1].token >= 0) store_pair(a, at[1] + e, __fmul_rn(z, inverse[1]), __fmul_rn(w, inverse[1]));
  }
}

// One run of tokens of a tile against all its keys.
template <class S>
DEVICE void wide_run(const Attention& a, uint8_t* shared, int first, int run, int end, int key_head, int head_tile) {
  const Keys keys = run_keys(a, run, end);
  const int begin = keys.from / UNIT, stop = (keys.to + UNIT - 1) / UNIT, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint8_t* queries = shared + S::RING * S::UNIT_BYTES + warp / 4 * (S::QUERY_BYTES / 2);
  float4* total = reinterpret_cast<float4*>(shared + S::RING * S::UNIT_BYTES + S::QUERY_BYTES + warp * S::TOTAL_BYTES);
  WideRing<S> ring(a, keys, shared, key_head, begin, max(stop - begin, 0));
  load_rows<S>(a, warp * ROWS, first, end, key_head, head_tile, [&](int row, Head<S::DIM>& head, bool) {
#pragma unroll
    for (int b = 0; b < S::DIM / 64; b++)
      *reinterpret_cast<__half2*>(queries + (8 * b + lane / 4) * 16 * UNIT + (warp % 4 * ROWS + row) * 16 + lane % 4 * 4) =
          __halves2half2(saturating_half(head.pairs[b].x), saturating_half(head.pairs[b].y));
  });
  Place mine[2];
  Visible seen;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    mine[r] = place_of(a, warp * ROWS + (lane >> 2) + 8 * r, first, end, key_head, head_tile);
    if (mine[r].token < run) mine[r].token = -1;
    const int position = mine[r].token < 0 || keys.to == 0 ? -1 : a.positions[mine[r].token];
    seen.from[r] = visible_from(a, position);
    seen.to[r] = visible_to(a, position);
  }
  float max_of[2] = {-INFINITY, -INFINITY}, sum_of[2] = {0.f, 0.f};
  bool joined = false;
  State<S::TILES> split;
  split.clear();
  copy_wait<S::RING - 2>();
  show_to_products();
  __syncthreads();
  float logits[32];
  wide_logits<S>(logits, queries, ring.unit(0));
#pragma unroll 1
  for (int index = begin; index < stop; index++) {
    wide_unit<S>(a, ring, seen, index, logits, queries, split);
    if ((index + 1) % SPLIT_UNITS == 0 && index + 1 < stop) {
      if (!joined)
#pragma unroll
        for (int n = 0; n < S::TILES; n++) total[n * 32 + lane] = make_float4(0.f, 0.f, 0.f, 0.f);
      joined = true;
      join_split(total, max_of, sum_of, split);
      split.clear();
    }
  }
  products_wait(logits);
  wide_result<S>(a, joined ? total : nullptr, max_of, sum_of, split, mine);
  copy_wait<0>();
  __syncthreads();
}
#endif

// Grid: as prefill's. No softcap, no key mask.
template <class S>
DEVICE void attention_wide(const Attention& a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) uint8_t shared[];
  pdl_trigger();
  pdl_wait();
  const int head_tiles = (a.group + a.tile_heads - 1) / a.tile_heads;
  // Later tokens see more keys: begin with them.
  const int tile = gridDim.x - 1 - blockIdx.x, first = tile * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
  for (int run = first; run < end;) {
    const int next = run_end(a, run, end);
    wide_run<S>(a, shared, first, run, next, blockIdx.y / head_tiles, blockIdx.y % head_tiles);
    run = next;
  }
#else
  __trap();  // the host starts this kernel on sm_90a only
#endif
}

#define WIDE(DIM)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(256, 1) attention_fp16_##DIM##_wide(const __grid_constant__ Attention a) { \
    attention_wide<Wide<DIM>>(a);                                                                                        \
  }
