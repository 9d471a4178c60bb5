// Attention of many tokens on sm_90a with warpgroup matrix instructions (wgmma). Results are bitwise identical to those of prefill.
//
// A third warpgroup, the feeder, loads queries, their visible ranges, and units of half keys and values; two warpgroups of 64 query rows
// consume them. Blocks are persistent and take one tile after another; the feeder runs ahead into the next tile. Operands are in shared
// memory in the 128-byte swizzle of wgmma: 64 dimensions of 64 rows, 128 bytes a row, the order of its eight chunks depending on the row.
// The next unit's logits are computed while the current unit's weights are.
#pragma once
#include "attention/attention_prefill.cuh"
#include "common/pipeline.cuh"

constexpr int BLOCK_BYTES = UNIT * 128;  // 64 dimensions of 64 rows

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Descriptor of operands that begin at `p`: 1024 bytes between groups of eight rows (`stride`), BLOCK_BYTES between 64 columns (`leading`,
// of values).
DEVICE uint64_t matrix_at(const void* p) {
  const uint64_t at = (uint32_t)__cvta_generic_to_shared(p);
  return (at >> 4 & 0x3fff) | (uint64_t)(BLOCK_BYTES >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}
// Offset of chunk `chunk` of eight dimensions of row `row` of 64.
DEVICE int chunk_at(int row, int chunk) { return chunk / 8 * BLOCK_BYTES + row * 128 + ((chunk ^ row) & 7) * 16; }
DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all matrix instructions. `d`: one of their results, which must not be read before.
template <int N>
DEVICE void wgmma_wait(float (&d)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Makes ordinary and asynchronous copies to shared memory visible to matrix instructions after the next barrier.
DEVICE void show_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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
  static constexpr int KC = F16, VC = F16, DIM = DIM_, WARPS = 8, TILES = DIM / 8, RING = 384 / DIM;
  static constexpr int FEEDER_REGISTERS = 88, CONSUMER_REGISTERS = 208;
  static_assert(FEEDER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * 168, "what the block began with");
  static constexpr int PLANE_BYTES = UNIT * DIM * 2, UNIT_BYTES = 2 * PLANE_BYTES, QUERY_BYTES = 128 * DIM * 2, TOTAL_BYTES = ROWS * DIM * 4;
  // Units; twice a tile's queries; totals; twice the rows' visible ranges, and the tile; barriers. Matches src/ops/attention.
  static constexpr int QUERY_AT = RING * UNIT_BYTES, TOTAL_AT = QUERY_AT + 2 * QUERY_BYTES, SIGHT_AT = TOTAL_AT + WARPS * TOTAL_BYTES;
  static constexpr int ITEM_AT = SIGHT_AT + 2 * 128 * 8, BARRIER_AT = ITEM_AT + 2 * 32, SHARED_BYTES = BARRIER_AT + 8 * (2 * RING + 4);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A run of tokens of a tile and this block's units of it, written by the feeder for the other warpgroups. `count` -1: there are no more.
// `slot`: of the first part to be written, or -1 if the result is stored.
struct Item {
  int begin, count, first, run, end, key_head, head_tile, slot;
};

template <class S>
struct Barriers {
  uint32_t base;
  DEVICE explicit Barriers(const uint8_t* shared) : base(shared_address(shared + S::BARRIER_AT)) {}
  DEVICE uint32_t full(int slot) const { return base + 8 * slot; }
  DEVICE uint32_t empty(int slot) const { return base + 8 * (S::RING + slot); }
  DEVICE uint32_t item_full(int slot) const { return base + 8 * (2 * S::RING + slot); }
  DEVICE uint32_t item_empty(int slot) const { return base + 8 * (2 * S::RING + 2 + slot); }
  DEVICE void init() const {
    for (int i = 0; i < S::RING; i++) barrier_init(full(i), 128), barrier_init(empty(i), S::WARPS * WARP_ARRIVALS);
    for (int i = 0; i < 2; i++) barrier_init(item_full(i), 128), barrier_init(item_empty(i), S::WARPS * WARP_ARRIVALS);
    barriers_visible();
  }
};

// The feeding warpgroup.
template <class S>
struct Feeder {
  const Attention& a;
  uint8_t* shared;
  const Barriers<S> barriers;
  const int thread, lane;
  Turn unit, item;

  DEVICE Feeder(const Attention& a, uint8_t* shared)
      : a(a), shared(shared), barriers(shared), thread(threadIdx.x % 128), lane(threadIdx.x & 31) {}

  DEVICE uint8_t* room() {
    barrier_wait(barriers.empty(unit.slot), unit.phase ^ 1);
    return shared + unit.slot * S::UNIT_BYTES;
  }
  // Makes this thread's writes to the slot visible to matrix instructions.
  DEVICE void filled(int slot) {
    show_to_wgmma();
    barrier_arrive(barriers.full(slot));
  }
  // Half rows: eight lanes a row, four rows at once; lane l < 16 holds the place of the warp's row l.
  DEVICE static int half_row(int i) { return (threadIdx.x % 128) / 32 * 4 + (i & 3) + i / 4 * 16; }
  DEVICE void copy(uint8_t* to, int found) const {
    const int chunk = lane % 8, bytes = a.dim * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = __shfl_sync(~0u, found, 4 * i + lane / 8);
      const int64_t at = (int64_t)max(row, 0) * bytes + chunk * 16;
      uint8_t* mine = to + chunk_at(half_row(4 * i + lane / 8), chunk);
#pragma unroll
      for (int b = 0; b < S::DIM / 64; b++) {
        const bool present = row >= 0 && chunk * 16 + b * 128 < bytes;
        copy_async<16>(mine + b * BLOCK_BYTES, a.key + at + b * 128, present);
        copy_async<16>(mine + b * BLOCK_BYTES + S::PLANE_BYTES, a.value + at + b * 128, present);
      }
    }
    copy_commit();
  }
  DEVICE void feed(const Keys& keys, int head, int begin, int stop) {
    const auto find_half = [&](int index) { return index < stop ? locate(a, keys, head, index * UNIT + half_row(lane & 15)) : -1; };
    int found = find_half(begin), last = -1;
#pragma unroll 1
    for (int index = begin; index < stop; index++) {
      const int next = find_half(index + 1);
      copy(room(), found);
      found = next;
      if (last >= 0) {
        copy_wait<1>();
        filled(last);
      }
      last = unit.slot;
      unit.advance(S::RING);
    }
    copy_wait<0>();
    if (last >= 0) filled(last);
  }
  // Writes the run's queries, their visible ranges, and the index of the run.
  DEVICE void put_item(const Item& it, const Keys& keys) {
    barrier_wait(barriers.item_empty(item.slot), item.phase ^ 1);
    uint8_t* queries = shared + S::QUERY_AT + item.slot * S::QUERY_BYTES + thread / 64 * (S::QUERY_BYTES / 2);
    const int first_row = thread / 32 * 32;
    const bool as_they_are = a.element == 0 && (reinterpret_cast<uintptr_t>(a.q) | (uintptr_t)a.q_stride * 2) % 16 == 0;
    if (as_they_are) {
      constexpr int CHUNKS = S::DIM / 8, AT_ONCE = 32 / CHUNKS;
#pragma unroll 4
      for (int r = lane / CHUNKS; r < 32; r += AT_ONCE) {
        const Place p = place_of(a, first_row + r, it.first, it.end, it.key_head, it.head_tile);
        const int64_t at = (int64_t)max(p.token, 0) * a.q_stride + p.head * a.dim + lane % CHUNKS * 8;
        copy_async<16>(queries + chunk_at((first_row + r) % 64, lane % CHUNKS), static_cast<const __half*>(a.q) + at,
                       p.token >= 0 && lane % CHUNKS * 8 < a.dim);
      }
      copy_commit();
    } else {
#pragma unroll 1
      for (int r = 0; r < 32; r += ROWS)
        load_rows<S>(a, first_row + r, it.first, it.end, it.key_head, it.head_tile, [&](int row, const Head<S::DIM>& head, bool) {
#pragma unroll
          for (int b = 0; b < S::DIM / 64; b++) {
            const float2 x = head.pairs[b];
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const QueryPlace p = query_place<S::KC, S::DIM>(64 * b + 2 * lane + i);
              *reinterpret_cast<__half*>(queries + chunk_at((first_row + r + row) % 64, p.word) + p.t * 4 + p.half * 2) =
                  saturating_half(i ? x.y : x.x);
            }
          }
        });
    }
    const Place p = place_of(a, thread, it.first, it.end, it.key_head, it.head_tile);
    const int position = p.token < it.run || keys.to == 0 ? -1 : a.positions[p.token];
    reinterpret_cast<int2*>(shared + S::SIGHT_AT)[item.slot * 128 + thread] = make_int2(visible_from(a, position), visible_to(a, position));
    copy_wait<0>();
    done(it);
  }
  DEVICE void done(const Item& it) {
    if (thread == 0) reinterpret_cast<Item*>(shared + S::ITEM_AT)[item.slot] = it;
    show_to_wgmma();
    barrier_arrive(barriers.item_full(item.slot));
    item.advance(2);
  }
  DEVICE void run() {
    const int head_tiles = (a.group + a.tile_heads - 1) / a.tile_heads, heads = a.heads * head_tiles, of_tile = heads * a.chunks;
    const int tiles = (a.tokens + a.tile_tokens - 1) / a.tile_tokens, all = tiles * of_tile, blocks = gridDim.x;
    // Later tokens see more keys, so begin with them. The order alternates in direction so that blocks get about equal work.
    for (int round = 0; round * blocks < all; round++) {
      const int index = round * blocks + (round & 1 ? blocks - 1 - (int)blockIdx.x : (int)blockIdx.x);
      if (index >= all) continue;
      const int tile = tiles - 1 - index / of_tile, head = index % heads, key_head = head / head_tiles, chunk = index % of_tile / heads;
      const int first = tile * a.tile_tokens, end = min(first + a.tile_tokens, a.tokens);
      for (int run = first; run < end;) {
        const int next = run_end(a, run, end);
        const Keys keys = run_keys(a, run, next);
        const PromptShare share(a, keys, chunk);
        const int count = max(share.to - share.from, 0);
        if (count || !chunk) {
          put_item({share.from, count, first, run, next, key_head, head - key_head * head_tiles, share.parts ? share.slot : -1}, keys);
          feed(keys, key_head, share.from, share.to);
        }
        run = next;
      }
    }
    barrier_wait(barriers.item_empty(item.slot), item.phase ^ 1);
    done({0, -1, 0, 0, 0, 0, 0, 0});
  }
};

template <class S>
DEVICE void wide_logits(float (&x)[32], const uint8_t* queries, const uint8_t* keys) {
  wgmma_begin();
#pragma unroll
  for (int s = 0; s < S::DIM / 16; s++)
    rows_by_rows(x, matrix_at(queries + s / 4 * BLOCK_BYTES + s % 4 * 32), matrix_at(keys + s / 4 * BLOCK_BYTES + s % 4 * 32), s > 0);
  products_commit();
}

// Unit `index`: turns its logits into weights, computes the next unit's logits meanwhile, then its sums.
template <class S>
DEVICE void wide_unit(const Attention& a, const Visible& seen, int index, float (&logits)[32], const uint8_t* queries, const uint8_t* values,
                      const uint8_t* next_keys, State<S::TILES>& split) {
  wgmma_wait(logits);
  float x[8][4], max_of[2], sum_of[2], kept[2], added[2];
  uint32_t weights[4][4];
  const float scale = a.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < 32; i++) x[i / 4][i % 4] = __fmul_rn(logits[i], scale);
  wide_logits<S>(logits, queries, next_keys);  // unused after the last unit, but a branch would serialize the matrix instructions
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
  wgmma_begin();
#pragma unroll
  for (int s = 0; s < 4; s++) rows_by_columns(part, weights[s], matrix_at(values + s * 2048), s > 0);
  products_commit();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    join_factors(split.max[r], max_of[r], sum_of[r], kept[r], added[r]);
    split.sum[r] = join_value(split.sum[r], kept[r], sum_of[r], added[r]);
  }
  wgmma_wait(part);
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

// Joins the last split with the total (null: there is none), in the split's registers.
template <class S>
DEVICE void join_last(const float4* total, float (&max)[2], float (&sum)[2], State<S::TILES>& split) {
  const int lane = threadIdx.x & 31;
  float kept[2], added[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    join_factors(max[r], split.max[r], split.sum[r], kept[r], added[r]);
    sum[r] = join_value(sum[r], kept[r], split.sum[r], added[r]);
  }
#pragma unroll
  for (int n = 0; n < S::TILES; n++) {
    const float4 v = total ? total[n * 32 + lane] : make_float4(0.f, 0.f, 0.f, 0.f);
    split.acc[n][0] = join_value(v.x, kept[0], split.acc[n][0], added[0]);
    split.acc[n][1] = join_value(v.y, kept[0], split.acc[n][1], added[0]);
    split.acc[n][2] = join_value(v.z, kept[1], split.acc[n][2], added[1]);
    split.acc[n][3] = join_value(v.w, kept[1], split.acc[n][3], added[1]);
  }
}

// Stores results to `out`, or packed for a matmul, from the registers.
template <class S>
DEVICE void wide_result(const Attention& a, const float (&sum)[2], const State<S::TILES>& split, const Place (&mine)[2]) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float inverse = inverse_of(sum[r]);
    const int64_t at = ((int64_t)mine[r].token * a.q_heads + mine[r].head) * a.dim;
#pragma unroll
    for (int n = 0; n < S::TILES; n++) {
      const float x = split.acc[n][2 * r], y = split.acc[n][2 * r + 1];
      const int e = 8 * n + 2 * t;
      if (e >= a.dim || mine[r].token < 0) continue;
      const float even = __fmul_rn(x, inverse), odd = __fmul_rn(y, inverse);
      if (a.ordered) {
        const __half2 pair = __floats2half2_rn(even, odd);
        store_ordered(a, mine[r].token, ordered_rows(a, mine[r].head * a.dim + e), *reinterpret_cast<const uint32_t*>(&pair));
      } else {
        store_pair(a, at + e, even, odd);
      }
    }
  }
}

template <class S>
DEVICE void consume(const Attention& a, uint8_t* shared) {
  const int warp = warp_index(), lane = threadIdx.x & 31, first_row = warp * ROWS + (lane >> 2);
  const Barriers<S> barriers(shared);
  float4* total = reinterpret_cast<float4*>(shared + S::TOTAL_AT + warp * S::TOTAL_BYTES);
  Turn unit, item;
  for (;;) {
    barrier_wait(barriers.item_full(item.slot), item.phase);
    const Item& it = reinterpret_cast<const Item*>(shared + S::ITEM_AT)[item.slot];
    if (it.count < 0) break;
    const int begin = it.begin, stop = begin + it.count, first_part = it.slot;
    const uint8_t* queries = shared + S::QUERY_AT + item.slot * S::QUERY_BYTES + warp / 4 * (S::QUERY_BYTES / 2);
    const int2* sight = reinterpret_cast<const int2*>(shared + S::SIGHT_AT) + item.slot * 128 + first_row;
    const Visible seen = {{sight[0].x, sight[8].x}, {sight[0].y, sight[8].y}};
    const auto place = [&](int r) {
      Place p = place_of(a, first_row + 8 * r, it.first, it.end, it.key_head, it.head_tile);
      if (p.token < it.run) p.token = -1;
      return p;
    };
    float4* part = nullptr;
    if (first_part >= 0) {
      const int head_tiles = (a.group + a.tile_heads - 1) / a.tile_heads;
      part = part_at<S>(a, (it.first / a.tile_tokens * a.heads + it.key_head) * head_tiles + it.head_tile, warp, first_part);
    }
    float max_of[2] = {-INFINITY, -INFINITY}, sum_of[2] = {0.f, 0.f};
    bool joined = false;
    State<S::TILES> split;
    split.clear();
    const auto put_part = [&](const float (&max)[2], const float (&sum)[2]) {
      const bool live[2] = {place(0).token >= 0, place(1).token >= 0};
      write_part(part, max, sum, split.acc, live);
      part += (S::TILES + 1) * 32;
    };
    if (begin < stop) barrier_wait(barriers.full(unit.slot), unit.phase);
    float logits[32];
    wide_logits<S>(logits, queries, shared + unit.slot * S::UNIT_BYTES);
#pragma unroll 1
    for (int index = begin; index < stop; index++) {
      const int slot = unit.slot;
      unit.advance(S::RING);
      if (index + 1 < stop) barrier_wait(barriers.full(unit.slot), unit.phase);
      wide_unit<S>(a, seen, index, logits, queries, shared + slot * S::UNIT_BYTES + S::PLANE_BYTES, shared + unit.slot * S::UNIT_BYTES, split);
      warp_arrives(barriers.empty(slot), lane);
      if ((index + 1) % SPLIT_UNITS == 0 && index + 1 < stop) {
        if (first_part > 0) {
          put_part(split.max, split.sum);
        } else {
          if (!joined)
#pragma unroll
            for (int n = 0; n < S::TILES; n++) total[n * 32 + lane] = make_float4(0.f, 0.f, 0.f, 0.f);
          joined = true;
          join_split(total + lane, 32, max_of, sum_of, split);
        }
        split.clear();
      }
    }
    wgmma_wait(logits);
    if (first_part > 0) {
      put_part(split.max, split.sum);
    } else {
      join_last<S>(joined ? total : nullptr, max_of, sum_of, split);
      if (first_part == 0) put_part(max_of, sum_of);
    }
    const Place mine[2] = {place(0), place(1)};
    warp_arrives(barriers.item_empty(item.slot), lane);
    item.advance(2);
    if (first_part < 0) wide_result<S>(a, sum_of, split, mine);
  }
}
#endif

// Grid: as many blocks as are resident at once. No softcap, no key mask.
template <class S>
DEVICE void attention_wide(const Attention& a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t shared[];
  if (threadIdx.x == 0) Barriers<S>(shared).init();
  __syncthreads();
  pdl_trigger();
  pdl_wait();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FEEDER_REGISTERS));
    Feeder<S>(a, shared).run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    consume<S>(a, shared);
  }
#else
  __trap();  // the host starts this kernel on sm_90a only
#endif
}

#define WIDE(DIM)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(384, 1) attention_fp16_##DIM##_wide(const __grid_constant__ Attention a) { \
    attention_wide<Wide<DIM>>(a);                                                                                        \
  }
