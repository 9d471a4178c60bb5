// Shared by the kernels for one token a sequence (attention_few.cuh, attention_long.cuh, attention_teams.cuh): rotation, fetching, the own
// key and value, the joining of units and splits, and storing. For heads of halves or bfloat16 whose size is DIM or, where S::PADDED, a
// multiple of 16 below DIM. Padded heads have zeros up to DIM in shared memory; pages, operands and results have only their elements.
#pragma once
#include "attention/attention_decode.cuh"
#include "common/pipeline.cuh"

#if __CUDA_ARCH__ >= 800
// Two neighbouring elements from a word.
DEVICE float2 pair_of(uint32_t word, __half) { return __half22float2(*reinterpret_cast<const __half2*>(&word)); }
DEVICE float2 pair_of(uint32_t word, __nv_bfloat16) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word)); }
DEVICE uint32_t word_of(float2 v, __half) { return as_word(__floats2half2_rn(v.x, v.y)); }
DEVICE uint32_t word_of(float2 v, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x, v.y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Elements of a head.
template <class S>
DEVICE int head_dim(const Attention& a) { return S::PADDED ? a.dim : S::DIM; }
// Bytes of a key (or value) of one head in the pages, without scales. Blocks of 64 elements are transformed as a whole.
template <class S, int CODEC>
DEVICE int page_bytes(const Attention& a) { return S::PADDED && !is_hadamard<CODEC>() ? a.dim / 8 * unit_bytes<CODEC>() : row_bytes<CODEC, S::DIM>(); }

// Rotation of a head; lane l holds elements 64 b + 2 l and the next one. The first `a.rotated` elements are rotated: all of them; any even
// number, of neighbours (`a.interleaved`); or a multiple of four, up to 64 unless S::PADDED (ops/attention/single.rs).
template <class S>
struct Rotation {
  using ELEMENT = typename S::Element;
  static constexpr int DIM = S::DIM, BLOCKS = DIM / 64, PAIRS = S::PADDED || BLOCKS > 2 ? 4 : 2;
  static_assert(BLOCKS <= 4 && (!S::PADDED || BLOCKS == 2), "angles of all pairs of a lane");
  float cos[PAIRS], sin[PAIRS];
  bool turns = false;
  DEVICE Rotation(const Attention& a, int token) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++) cos[j] = 1.f, sin[j] = 0.f;
    if (!a.cos || a.rotated == 0) return;
    const int64_t position = a.rope_positions[token];
    turns = position >= 0 && position < a.table_rows;
    if (!turns) return;
    const int lane = threadIdx.x & 31, pairs = a.rotated / 2;
    const float *cosines = a.cos + position * pairs, *sines = a.sin + position * pairs;
    if (a.interleaved) {
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        const int pair = 32 * b + lane;
        if (pair >= pairs) break;
        cos[b] = cosines[pair];
        sin[b] = sines[pair];
      }
    } else if constexpr (S::PADDED) {
      const int half = pairs / 2;  // words, of two elements each, that hold the first elements of pairs
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        const int word = 32 * b + lane;
        if (word >= 2 * half) break;
        const int pair = 2 * (word < half ? word : word - half);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          cos[2 * b + j] = cosines[pair + j];
          sin[2 * b + j] = sines[pair + j];
        }
      }
    } else if (DIM > 64 && a.rotated == DIM) {
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) {
        const int pair = 64 * (j / 2) + 2 * lane + j % 2;
        cos[j] = cosines[pair];
        sin[j] = sines[pair];
      }
    } else {
      const int half = pairs / 2;  // lanes that hold the first elements of pairs
      if (lane >= 2 * half) return;
      const int pair = 2 * (lane < half ? lane : lane - half);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        cos[j] = cosines[pair + j];
        sin[j] = sines[pair + j];
      }
    }
  }
  DEVICE void turn(const Attention& a, Head<DIM>& head) const {
    if (!turns) return;
    if (a.interleaved) {
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) head.pairs[b] = rotate(head.pairs[b].x, head.pairs[b].y, cos[b], sin[b]);
    } else if constexpr (S::PADDED) {
      turn_words(a, head);
    } else if (DIM > 64 && a.rotated == DIM) {
#pragma unroll
      for (int b = 0; b < BLOCKS / 2; b++) {
        const int c = b + BLOCKS / 2;
        const float2 x = rotate(head.pairs[b].x, head.pairs[c].x, cos[2 * b], sin[2 * b]);
        const float2 y = rotate(head.pairs[b].y, head.pairs[c].y, cos[2 * b + 1], sin[2 * b + 1]);
        head.pairs[b] = make_float2(x.x, y.x);
        head.pairs[c] = make_float2(x.y, y.y);
      }
    } else {
      const int lane = threadIdx.x & 31, half = a.rotated / 4;
      const bool upper = lane >= half;
      const int partner = lane >= 2 * half ? lane : upper ? lane - half : lane + half;
      const float2 mine = head.pairs[0];
      const float2 other = make_float2(__shfl_sync(~0u, mine.x, partner), __shfl_sync(~0u, mine.y, partner));
      const float2 x = upper ? rotate(other.x, mine.x, cos[0], sin[0]) : rotate(mine.x, other.x, cos[0], sin[0]);
      const float2 y = upper ? rotate(other.y, mine.y, cos[1], sin[1]) : rotate(mine.y, other.y, cos[1], sin[1]);
      if (lane < 2 * half) head.pairs[0] = upper ? make_float2(x.y, y.y) : make_float2(x.x, y.x);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) head.pairs[b] = pair_of(word_of(head.pairs[b], ELEMENT()), ELEMENT());
  }
  // Rotates two blocks of which any multiple of four elements is rotated: the partner of a word is half as many words away.
  DEVICE void turn_words(const Attention& a, Head<DIM>& head) const {
    const int lane = threadIdx.x & 31, half = a.rotated / 4;
    const auto shifted = [&](float2 pair, int by) {
      return make_float2(__shfl_sync(~0u, pair.x, (lane + by) & 31), __shfl_sync(~0u, pair.y, (lane + by) & 31));
    };
    const float2 later[2] = {shifted(head.pairs[0], half), shifted(head.pairs[1], half)};
    const float2 earlier[2] = {shifted(head.pairs[0], -half), shifted(head.pairs[1], -half)};
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int word = 32 * b + lane;
      const bool upper = word >= half;
      const float2 mine = head.pairs[b];
      const float2 other = upper ? (word - half < 32 ? earlier[0] : earlier[1]) : (word + half < 32 ? later[0] : later[1]);
      const float2 x = upper ? rotate(other.x, mine.x, cos[2 * b], sin[2 * b]) : rotate(mine.x, other.x, cos[2 * b], sin[2 * b]);
      const float2 y = upper ? rotate(other.y, mine.y, cos[2 * b + 1], sin[2 * b + 1]) : rotate(mine.y, other.y, cos[2 * b + 1], sin[2 * b + 1]);
      if (word < 2 * half) head.pairs[b] = upper ? make_float2(x.y, y.y) : make_float2(x.x, y.x);
    }
  }
};

// The work of a block.
struct Job {
  const int* pages;
  int token, key_head, rank, to;
  int fresh;  // index of the key that is not in the pages yet, or -1
  DEVICE Job(const Attention& a, int rank) : token(blockIdx.x), key_head(blockIdx.y), rank(rank) {
    const int seq = a.rows[token], position = a.positions[token];
    const bool here = (unsigned)seq < (unsigned)a.batch;
    pages = a.block_table + (here ? seq * a.max_pages : 0);
    to = here ? min(max(position, -1), a.key_limit - 1) + 1 : 0;
    fresh = here && a.new_key && position < to ? position : -1;
  }
};

// The first key of a unit for this head, in rows of pages, and the number of keys.
struct Rows {
  int first, count;
  DEVICE bool has(int row) const { return row < count; }
};
DEVICE int page_of(const Attention& a, int key) {
  const int index = (int)__umulhi((unsigned)key, a.page_inverse);  // the quotient may be one too large if page_size is not a power of two
  return a.page_shift >= 0 ? key >> a.page_shift : index - (index * a.page_size > key);
}
DEVICE Rows rows_of(const Attention& a, const Job& job, int unit, int page) {
  const int key = unit * UNIT, inside = key - page_of(a, key) * a.page_size;
  const bool known = (unsigned)page < (unsigned)a.num_pages;
  return {((known ? page : 0) * a.page_size + inside) * a.heads + job.key_head, known ? job.to - key : 0};
}

#if __CUDA_ARCH__ >= 900
// Copies data that is read once a step, with a policy that evicts it from L2 first. Used for halves only: for some packed pages ptxas 13.0
// emits an illegal instruction for it.
DEVICE void copy_once(void* to, const void* from, bool present, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)), "l"(from), "r"(present ? 16 : 0), "l"(policy)
               : "memory");
}
#else
DEVICE uint64_t evict_first() { return 0; }
DEVICE void copy_once(void* to, const void* from, bool present, uint64_t) { copy_async<16>(to, from, present); }
#endif
// Starts the copies of a unit's keys or values: existing rows other than the fresh one, and zeros for hidden rows and rows past the last. Run
// by THREADS threads.
template <int CODEC, int DIM, int THREADS, int UNROLLED, class R>
DEVICE void fetch(uint8_t* to, int stride, const uint8_t* from, const uint8_t* scales, int heads, R rows, int skip) {
  constexpr int BYTES = row_bytes<CODEC, DIM>(), CHUNKS = BYTES / 16, ROWS = THREADS / CHUNKS, PASSES = STAGE / ROWS;
  const int tid = threadIdx.x % THREADS, row = tid / CHUNKS;
  const uint8_t* source = from + ((int64_t)(rows.first + row * heads) * BYTES + tid % CHUNKS * 16);
  const int64_t step = (int64_t)(heads * BYTES * ROWS);
  uint8_t* mine = to + row * stride + tid % CHUNKS * 16;
  const uint64_t once = evict_first();
#pragma unroll UNROLLED
  for (int i = 0; i < PASSES; i++) {
    const int r = row + i * ROWS;
    if (r != skip) {
      if constexpr (CODEC == F16) copy_once(mine, source, rows.has(r), once);
      else copy_async<16>(mine, source, rows.has(r));
    }
    source += step;
    mine += ROWS * stride;
  }
  if constexpr (is_hadamard<CODEC>()) {
    constexpr int WIDE = DIM / 16;
    for (int r = tid; r < STAGE; r += THREADS)
      if (r != skip) copy_async<WIDE>(to + STAGE * stride + r * WIDE, scales + (int64_t)(rows.first + r * heads) * WIDE, rows.has(r));
  }
}
// The same for padded heads whose codec packs rows of `bytes`: zeros also for the padding. Without a cache hint, for which ptxas 13.0 emits
// illegal instructions in some kernels.
template <int CODEC, int DIM, int THREADS, class R>
DEVICE void fetch_padded(uint8_t* to, int stride, const uint8_t* from, int bytes, int heads, R rows, int skip) {
  constexpr int CHUNKS = row_bytes<CODEC, DIM>() / 16, ROWS = THREADS / CHUNKS;
  const int tid = threadIdx.x % THREADS, chunk = tid % CHUNKS * 16;
#pragma unroll 2
  for (int r = tid / CHUNKS; r < STAGE; r += ROWS)
    if (r != skip) copy_async<16>(to + r * stride + chunk, from + ((int64_t)(rows.first + r * heads) * bytes + chunk), chunk < bytes && rows.has(r));
}
template <class S, int CODEC, class R>
DEVICE void fetch_plane(const Attention& a, uint8_t* to, int stride, const uint8_t* from, const uint8_t* scales, R rows, int skip) {
  if constexpr (S::PADDED && !is_hadamard<CODEC>())
    fetch_padded<CODEC, S::DIM, S::FETCHERS>(to, stride, from, page_bytes<S, CODEC>(a), a.heads, rows, skip);
  else fetch<CODEC, S::DIM, S::FETCHERS, S::UNROLLED>(to, stride, from, scales, a.heads, rows, skip);
}
template <class S, class R>
DEVICE void fetch_keys(const Attention& a, const Job& job, uint8_t* shared, R rows, int unit) {
  fetch_plane<S, S::KC>(a, shared, key_stride<S::KC, S::DIM>(), a.key, reinterpret_cast<const uint8_t*>(a.key_scales), rows,
                        job.fresh - unit * UNIT);
}
template <class S, class R>
DEVICE void fetch_values(const Attention& a, const Job& job, uint8_t* shared, R rows, int unit) {
  fetch_plane<S, S::VC>(a, shared + S::KEY_BYTES, value_stride<S::VC, S::DIM>(), a.value, reinterpret_cast<const uint8_t*>(a.value_scales), rows,
                        job.fresh - unit * UNIT);
}

// Offset of a key (or value) in a stage: its row and its scales.
template <int CODEC, int DIM, int STRIDE>
DEVICE int row_of(int key) { return key * STRIDE; }
template <int CODEC, int DIM, int STRIDE>
DEVICE int scales_of(int key) { return STAGE * STRIDE + key * scale_bytes<CODEC, DIM>(); }
template <int CODEC, int DIM, int STRIDE>
DEVICE void bring_home(uint8_t* stage, const uint8_t* aside, int key) {
  constexpr int WORDS = row_bytes<CODEC, DIM>() / 4, SCALES = scale_bytes<CODEC, DIM>() / 4;
  const int lane = threadIdx.x & 31;
  uint8_t *row = stage + row_of<CODEC, DIM, STRIDE>(key), *scales = stage + scales_of<CODEC, DIM, STRIDE>(key);
#pragma unroll 1
  for (int i = lane; i < WORDS; i += 32) reinterpret_cast<uint32_t*>(row)[i] = reinterpret_cast<const uint32_t*>(aside)[i];
  if (lane < SCALES) reinterpret_cast<uint32_t*>(scales)[lane] = reinterpret_cast<const uint32_t*>(aside)[WORDS + lane];
}

// Rounds as the cache does. A value that came from a half, or was rounded to one, already fits.
DEVICE uint32_t saturated(float2 v, __half) { return as_word(__floats2half2_rn(v.x, v.y)); }
DEVICE uint32_t saturated(float2 v, __nv_bfloat16) { return as_word(__halves2half2(saturating_half(v.x), saturating_half(v.y))); }

// Writes a query as halves in the order that the matmuls read.
template <class ELEMENT, int CODEC, int DIM>
DEVICE void put_pairs(uint32_t* words, int stride, Head<DIM>& head) {
  if constexpr (is_hadamard<CODEC>()) {
    head.template put_query<CODEC>(words, stride, true);
  } else {
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) {
      const QueryPlace p = query_place<CODEC, DIM>(64 * b + 2 * (threadIdx.x & 31));
      words[p.word / 4 * stride + p.t * 4 + p.word % 4] = saturated(head.pairs[b], ELEMENT());
    }
  }
}

// Encodes the token's own key or value into shared memory and, if there is a slot, into the pages.
template <class S, int CODEC>
DEVICE void encode_own(const Attention& a, int plane, const Head<S::DIM>& head, uint8_t* row, uint8_t* scales, int64_t slot, int key_head) {
  constexpr int DIM = S::DIM;
  const int lane = threadIdx.x & 31, bytes = page_bytes<S, CODEC>(a);
  const int64_t at = slot * a.heads + key_head;
  const bool stores = slot >= 0 && slot < (int64_t)a.num_pages * a.page_size;
  uint8_t* out = const_cast<uint8_t*>(plane ? a.value : a.key) + at * bytes;
  if constexpr (CODEC == F16) {
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) {
      const uint32_t pair = saturated(head.pairs[b], typename S::Element());
      reinterpret_cast<uint32_t*>(row)[32 * b + lane] = pair;
      if (stores && (!S::PADDED || 64 * b + 2 * lane < a.dim)) reinterpret_cast<uint32_t*>(out)[32 * b + lane] = pair;
    }
  } else {
    Pages p;
    p.data[0] = row;
    p.scales[0] = reinterpret_cast<__half*>(scales);
    p.codec[0] = CODEC;
    p.heads = 1, p.dim = DIM, p.blocks = DIM / 64;
#pragma unroll
    for (int b = 0; b < DIM / 64; b++) encode(p, 0, 0, b, head.pairs[b].x, head.pairs[b].y);
    __syncwarp();
    if (!stores) return;
    for (int i = lane; i < bytes / 4; i += 32) reinterpret_cast<uint32_t*>(out)[i] = reinterpret_cast<const uint32_t*>(row)[i];
    if (is_hadamard<CODEC>() && lane < DIM / 64)
      reinterpret_cast<uint32_t*>(const_cast<__half*>(plane ? a.value_scales : a.key_scales))[at * (DIM / 64) + lane] =
          reinterpret_cast<const uint32_t*>(scales)[lane];
  }
}

// Source of an item that a warp prepares: the own value and the own key (`before` 2: the block has them), then queries; null past the end.
template <class S>
DEVICE const unsigned* source_of(const Attention& a, const Job& job, int item, int before) {
  const int column = item - before, dim = head_dim<S>(a);
  if (column >= a.group) return nullptr;
  const void* from = column >= 0 ? a.q : column == -1 ? a.new_key : a.new_value;
  const int at = column >= 0 ? job.token * a.q_stride + (job.key_head * a.group + column) * dim : job.token * a.new_stride + job.key_head * dim;
  return static_cast<const unsigned*>(from) + at / 2 + (threadIdx.x & 31);
}

template <class S>
DEVICE void load_items(const Attention& a, uint32_t (&raw)[2][S::BLOCKS], const unsigned* first, const unsigned* second) {
#pragma unroll
  for (int b = 0; b < S::BLOCKS; b++) {
    raw[0][b] = raw[1][b] = 0;
    if (S::PADDED && 64 * b + 2 * (static_cast<int>(threadIdx.x) & 31) >= a.dim) break;
    if (first) raw[0][b] = __ldcg(first + 32 * b);
    if (second) raw[1][b] = __ldcg(second + 32 * b);
  }
}

// Whether the weights of the norms of q and k are read where they are used: those of heads of 256 have no room in shared memory.
template <class S>
constexpr bool NORMS_STAY = S::DIM > 128 || S::PADDED;

// Loads the weights of the norms of q and k, two floats a thread. They are requested before the keys and stored before the block's barrier,
// in the memory of the weights of the first unit's values.
template <class S>
DEVICE float2 load_norms(const Attention& a) {
  const int at = 2 * threadIdx.x;
  if (NORMS_STAY<S> || !a.q_norm || at >= 2 * S::DIM) return make_float2(0.f, 0.f);
  return __ldg(reinterpret_cast<const float2*>(at < S::DIM ? a.q_norm + at : a.k_norm + at - S::DIM));
}
template <class S>
DEVICE void put_norms(const Attention& a, uint8_t* shared, float2 weights) {
  static_assert(NORMS_STAY<S> || 2 * S::DIM * 4 <= 4 * S::NT * 256, "norms of q and k fit the place of a unit's weights");
  static_assert(NORMS_STAY<S> || S::DIM <= S::THREADS, "two floats a thread");
  if (!NORMS_STAY<S> && a.q_norm && threadIdx.x < S::DIM) reinterpret_cast<float2*>(shared + S::WEIGHTS_AT)[threadIdx.x] = weights;
}
// The weight of the norm of queries or of the own key.
template <class S>
DEVICE const float* norm_weight(const Attention& a, const uint8_t* shared, bool query) {
  if constexpr (NORMS_STAY<S>) return query ? a.q_norm : a.k_norm;
  else return reinterpret_cast<const float*>(shared + S::WEIGHTS_AT) + (query ? 0 : S::DIM);
}

// Prepares queries, and the own key and value if this block has them (`own`). `home`: offset in shared memory of the unit that takes them, or
// -1: stored aside, for a later unit. Data of the previous launch is never read through the SM's L1 cache, which may hold older lines.
// `raw`: the warp's first two items.
template <class S>
DEVICE void prepare_items(const Attention& a, const Job& job, const Rotation<S>& rotation, uint8_t* shared, bool own,
                        int home, int64_t slot, uint32_t (&raw)[2][S::BLOCKS]) {
  using Element = typename S::Element;
  const int warp = warp_index(), warps = S::warps(), before = own ? 2 : 0, items = before + a.group;
  uint32_t* queries = reinterpret_cast<uint32_t*>(shared + S::QUERIES_AT);
#pragma unroll 1
  for (int base = warp; base < items; base += 2 * warps) {
    if (base != warp) load_items<S>(a, raw, source_of<S>(a, job, base, before), source_of<S>(a, job, base + warps, before));
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const int column = base + i * warps - before;
      if (column >= a.group) break;
      Head<S::DIM> head;
#pragma unroll
      for (int b = 0; b < S::BLOCKS; b++) {
        head.pairs[b] = pair_of(raw[0][b], Element());
        raw[0][b] = raw[1][b];
      }
      if (column >= -1) {
        // Unlikely: its code lies behind that of the models without these norms, which a launch runs once and cold.
        if (__builtin_expect(a.q_norm != nullptr, 0)) {
          head.norm(head_dim<S>(a), a.norm_eps, norm_weight<S>(a, shared, column >= 0));
#pragma unroll
          for (int b = 0; b < S::BLOCKS; b++) head.pairs[b] = pair_of(word_of(head.pairs[b], Element()), Element());
        }
        rotation.turn(a, head);
      }
      if (column >= 0) {
        put_pairs<Element, S::KC, S::DIM>(queries + column * 16, S::COLUMNS * 16, head);
        continue;
      }
      constexpr int KS = key_stride<S::KC, S::DIM>(), VS = value_stride<S::VC, S::DIM>(), VALUE_AT = S::OWN_AT + packed_bytes<S::KC, S::DIM>();
      const int key = job.fresh % UNIT, plane = -1 - column;
      int row = plane ? VALUE_AT : S::OWN_AT;
      int scales = row + (plane ? row_bytes<S::VC, S::DIM>() : row_bytes<S::KC, S::DIM>());
      if (home >= 0) {
        row = home + (plane ? S::KEY_BYTES + row_of<S::VC, S::DIM, VS>(key) : row_of<S::KC, S::DIM, KS>(key));
        scales = home + (plane ? S::KEY_BYTES + scales_of<S::VC, S::DIM, VS>(key) : scales_of<S::KC, S::DIM, KS>(key));
      }
      if (S::KC == S::VC || !plane) encode_own<S, S::KC>(a, plane, head, shared + row, shared + scales, slot, job.key_head);
      else encode_own<S, S::VC>(a, plane, head, shared + row, shared + scales, slot, job.key_head);
    }
  }
}

// 64 dimensions of a row, two a lane, and the row's largest logit and sum of weights.
struct Pair {
  float2 sums = make_float2(0.f, 0.f);
  float max = -INFINITY, sum = 0.f;
  DEVICE void join(float2 part, float part_sum, float kept, float added) {
    sums.x = join_value(sums.x, kept, part.x, added);
    sums.y = join_value(sums.y, kept, part.y, added);
    sum = join_value(sum, kept, part_sum, added);
  }
  DEVICE void join(const Pair& part) {
    float kept, added;
    join_factors(max, part.max, part.sum, kept, added);
    join(part.sums, part.sum, kept, added);
  }
};

// Joins parts of 64 dimensions of a row in order: the units of a split, or splits of the workspace, at most MOST of `count`. Missing parts
// are zeros that change nothing, not even the sign of a zero. There is no branch for them, because the compiler would then serialize the
// loads, each with the latency of L2.
//
// In one or two ROUNDS of one code: a launch runs its code for the first time, so its size can cost more than a loop.
template <int MOST, int ROUNDS, class F, class G>
DEVICE void join_in_order(Pair& pair, int count, F sums_of, G state_of) {
  const int lane = threadIdx.x & 31;
  float2 sums[MOST], state = make_float2(-INFINITY, 0.f);
#pragma unroll
  for (int k = 0; k < MOST; k++) {
    sums[k] = make_float2(-0.f, -0.f);
    if (k < count) sums[k] = sums_of(k);
  }
  if (lane < min(count, MOST)) state = state_of(lane);
  // One part a lane: the largest logit of all earlier parts, and the part's factors.
  float most = state.x, kept, added;
#pragma unroll
  for (int o = 1; o < MOST; o *= 2) {
    const float other = __shfl_up_sync(~0u, most, o);
    if (lane >= o) most = fmaxf(most, other);
  }
  most = fmaxf(most, pair.max);
  float earlier = __shfl_up_sync(~0u, most, 1);
  if (lane == 0) earlier = pair.max;
  join_factors(earlier, state.x, state.y, kept, added);
  pair.max = __shfl_sync(~0u, most, MOST - 1);
#pragma unroll 1
  for (int from = 0; from < MOST; from += MOST / ROUNDS) {
#pragma unroll
    for (int k = 0; k < MOST / ROUNDS; k++) {
      const int part = from + k;
      pair.join(sums[k], __shfl_sync(~0u, state.y, part), __shfl_sync(~0u, kept, part), __shfl_sync(~0u, added, part));
      if constexpr (ROUNDS == 2) sums[k] = sums[k + MOST / 2];
    }
  }
}

// Writes a split to the workspace. The last block to arrive joins all splits: it returns true, with the total in `pair`.
template <class S>
DEVICE bool join_splits(const Attention& a, Pair& pair, int row, int block, int split, int splits) {
  constexpr int MOST = S::JOINED;
  const int lane = threadIdx.x & 31, group = blockIdx.x * gridDim.y + blockIdx.y, stride = a.group * S::ROW;
  float* parts = a.parts + (int64_t)group * a.part_slots * stride + row * S::ROW;
  float* mine = parts + split * stride;
  __stcg(reinterpret_cast<float2*>(mine + block * 64 + 2 * lane), pair.sums);
  // All blocks of a row have the same state: those that share one of its two places write equal values.
  const int state_at = S::DIM + 2 * (block % 2);
  if (lane == 0) __stcg(reinterpret_cast<float2*>(mine + state_at), make_float2(pair.max, pair.sum));
  __syncwarp();
  int before = 0;
  unsigned* ticket = a.tickets + (group * a.group + row) * S::BLOCKS + block;
  if (lane == 0) {
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    if (before == splits - 1) *ticket = 0;
  }
  __syncwarp();  // makes lane 0's acquire hold for all lanes
  if (__shfl_sync(~0u, before, 0) != splits - 1) return false;
  pair = Pair();
#pragma unroll 1
  for (int from = 0; from < splits; from += MOST) {
    const float* at = parts + from * stride;
    join_in_order<MOST, S::JOIN_ROUNDS>(
        pair, splits - from,
        [&](int k) { return __ldcg(reinterpret_cast<const float2*>(at + k * stride + block * 64 + 2 * lane)); },
        [&](int k) { return __ldcg(reinterpret_cast<const float2*>(at + k * stride + state_at)); });
  }
  return true;
}

// A lane's first result of an item of a padded head among all results of a token; -1 past the end of the head.
template <class S>
DEVICE int padded_feature(const Attention& a, const Job& job, int item) {
  const int e = item % S::BLOCKS * 64 + 2 * (threadIdx.x & 31);
  return e < a.dim ? (job.key_head * a.group + item / S::BLOCKS) * a.dim + e : -1;
}

// Stores 64 dimensions of a result row, transformed back if values are. `places`: their rows in the input order of a matmul, if known.
// OWN_COLUMN: not the zeros of columns past the tokens.
template <class S, bool OWN_COLUMN = false>
DEVICE void store_item(const Attention& a, const Job& job, const Pair& pair, int item, const uint32_t* places) {
  const int at = job.key_head * a.group * S::BLOCKS + item, lane = threadIdx.x & 31;
  float even = pair.sums.x, odd = pair.sums.y;
  if (is_hadamard<S::VC>()) {
    butterflies<false>(even, odd);
    even *= 1.f / 32.f;
    odd *= 1.f / 32.f;
  }
  const float inverse = inverse_of(pair.sum);
  const uint32_t word = word_of(make_float2(__fmul_rn(even, inverse), __fmul_rn(odd, inverse)), typename S::Element());
  int feature = 64 * at + 2 * lane;
  if constexpr (S::PADDED) {
    feature = padded_feature<S>(a, job, item);
    if (feature < 0) return;
  }
  if (a.ordered) {
    copy_wait<0>();
    store_ordered<OWN_COLUMN>(a, job.token, places ? *places : ordered_rows(a, feature), word);
  } else if constexpr (S::PADDED) {
    static_cast<uint32_t*>(a.out)[(job.token * a.q_heads * a.dim + feature) / 2] = word;
  } else {
    static_cast<uint32_t*>(a.out)[(job.token * a.q_heads * S::BLOCKS + at) * 32 + lane] = word;
  }
}
#endif
