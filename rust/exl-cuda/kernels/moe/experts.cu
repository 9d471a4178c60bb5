// Kernels before and after the matmuls of experts: routing of rows, sorting of pairs by expert, packing of their inputs in the order of K,
// and the weighted sum of the experts' results.
#include "common/block_sum.cuh"
#include "moe/experts.cuh"

// ---------------------------------------------------------------------------------------------------- routing
// The index of the largest of a warp's values; of equal values, the lowest index.
DEVICE void warp_largest(float& value, int& index) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float other = __shfl_xor_sync(~0u, value, o);
    const int at = __shfl_xor_sync(~0u, index, o);
    if (other > value || (other == value && at < index)) {
      value = other;
      index = at;
    }
  }
}

// The largest of values[0 .. count) and its index; chosen ones are negative infinity. Each value is read, and replaced, by one lane alone,
// so no lane waits for another one's.
DEVICE void largest_of(const float* values, int count, int lane, float& value, int& index) {
  value = -INFINITY;
  index = count;
  for (int i = lane; i < count; i += 32)
    if (values[i] > value || index == count) {
      value = values[i];
      index = i;
    }
  warp_largest(value, index);
  // Lanes may disagree if a value is no number; the first lane's index is always that of a value.
  value = __shfl_sync(~0u, value, 0);
  index = __shfl_sync(~0u, index, 0);
}

// One warp: as `choose` below, for at most 32 * EACH experts, whose probabilities stay in registers.
template <int EACH>
DEVICE void choose_held(const float* logits, int count, int chosen, bool normalize, int64_t* ids, float* weights, int lane) {
  float v[EACH], highest = -INFINITY, sum = 0.f, total = 0.f, mine = 0.f;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    v[j] = 32 * j + lane < count ? logits[32 * j + lane] : -INFINITY;
    highest = fmaxf(highest, v[j]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    if (32 * j + lane >= count) continue;
    v[j] = expf(v[j] - highest);
    sum += v[j];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int j = 0; j < EACH; j++)
    if (32 * j + lane < count) v[j] = v[j] / sum;
  for (int c = 0; c < chosen; c++) {
    float p = -INFINITY;
    int index = count;
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (32 * j + lane < count && (v[j] > p || index == count)) {
        p = v[j];
        index = 32 * j + lane;
      }
    warp_largest(p, index);
    total += p;
    if (c % 32 == lane) mine = p;
    if (lane == 0) ids[c] = index;
    if (!normalize && lane == 0) weights[c] = p;
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (32 * j + lane == index) v[j] = -INFINITY;
  }
  if (normalize && lane < chosen) weights[lane] = mine / total;
}

// One warp: softmax over all, then the `chosen` most likely, divided by their sum if `normalize`.
DEVICE void choose(float* v, int count, int chosen, bool normalize, int64_t* ids, float* weights, int lane) {
  float highest;
  int index;
  largest_of(v, count, lane, highest, index);
  float sum = 0.f;
  for (int i = lane; i < count; i += 32) {
    v[i] = expf(v[i] - highest);
    sum += v[i];
  }
  sum = warp_sum(sum);
  for (int i = lane; i < count; i += 32) v[i] = v[i] / sum;
  float total = 0.f;
  for (int c = 0; c < chosen; c++) {
    float p;
    largest_of(v, count, lane, p, index);
    total += p;
    if (lane == 0) {
      ids[c] = index;
      weights[c] = p;
    }
    if (index % 32 == lane) v[index] = -INFINITY;
  }
  if (normalize && lane == 0)
    for (int c = 0; c < chosen; c++) weights[c] = weights[c] / total;
}

// One warp: the most likely expert, weighted by a softmax over those within a relative distance of 2 * jitter, then the same among the
// others. `v` loses the chosen ones, `all` does not.
DEVICE void choose_sparse(float* v, const float* all, int count, int chosen, float jitter, int64_t* ids, float* weights, int lane) {
  for (int c = 0; c < chosen; c++) {
    float highest, sum = 0.f;
    int index;
    largest_of(v, count, lane, highest, index);
    for (int i = lane; i < count; i += 32) {
      const bool far = (highest - all[i]) / fmaxf(fabsf(all[i]), highest) > 2.f * jitter;
      if (!far) sum += expf(v[i] - highest);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      ids[c] = index;
      weights[c] = 1.f / sum;
    }
    if (index % 32 == lane) v[index] = -INFINITY;
  }
}

// Operands of a route. The same struct as `ops::moe::RouteArgument`.
struct RouteCall {
  const __half* h;     // [rows, hidden]
  const void* weight;  // [experts, hidden] halves of either type
  const float* bias;   // [experts]; may be null
  double prescale;
  float* logits;  // [rows, experts]
  int* arrivals;  // [rows], zero before and after
  int64_t* ids;   // [rows, chosen]
  float* weights;
  const float* norm;  // weight of an RMS norm of h before the route, or null
  __half* normed;     // [rows, hidden]: then the normed rows
  float eps, offset;  // of the norm
  int rows, hidden, experts, chosen, normalize;
  float jitter;  // negative: a softmax over all
  int staged;    // whether a block's weights fit its shared memory
  int across;    // of many rows: warps that share rows
};
ABI_SIZE(RouteCall, 120); ABI_AT(RouteCall, h, 0); ABI_AT(RouteCall, weight, 8); ABI_AT(RouteCall, bias, 16); ABI_AT(RouteCall, prescale, 24);
ABI_AT(RouteCall, logits, 32); ABI_AT(RouteCall, arrivals, 40); ABI_AT(RouteCall, ids, 48); ABI_AT(RouteCall, weights, 56);
ABI_AT(RouteCall, norm, 64); ABI_AT(RouteCall, normed, 72); ABI_AT(RouteCall, eps, 80); ABI_AT(RouteCall, offset, 84);
ABI_AT(RouteCall, rows, 88); ABI_AT(RouteCall, hidden, 92); ABI_AT(RouteCall, experts, 96); ABI_AT(RouteCall, chosen, 100);
ABI_AT(RouteCall, normalize, 104); ABI_AT(RouteCall, jitter, 108); ABI_AT(RouteCall, staged, 112);
ABI_AT(RouteCall, across, 116);

// One warp: the experts of a row and their weights by its logits `v`, which are lost; `all`: a copy of them for the sparse choice.
DEVICE void choose_of_row(const RouteCall& call, int row, float* v, const float* all, int lane) {
  int64_t* const ids = call.ids + (size_t)row * call.chosen;
  float* const weights = call.weights + (size_t)row * call.chosen;
  const bool normalize = call.normalize != 0;
  if (call.jitter >= 0.f) choose_sparse(v, all, call.experts, call.chosen, call.jitter, ids, weights, lane);
  else if (call.experts <= 128 && call.chosen <= 32) choose_held<4>(v, call.experts, call.chosen, normalize, ids, weights, lane);
  else choose(v, call.experts, call.chosen, normalize, ids, weights, lane);
}

// A logit of a sum over features.
DEVICE float logit_of(const RouteCall& call, int expert, double sum) {
  return (float)((sum + (call.bias ? (double)call.bias[expert] : 0.)) * call.prescale);
}

// Experts of a block, one a warp.
constexpr int ROUTE_EXPERTS = 8;

// Brings a row into shared memory, normed in the order of sums of elementwise/norm.cu if there is a norm.
DEVICE void route_row(const RouteCall& call, int row, __half* to) {
  const __half* x = call.h + (size_t)row * call.hidden;
  float scale = 1.f;
  if (call.norm) {
    float sum = 0.f;
#pragma unroll 1
    for (int k = threadIdx.x * 8; k < call.hidden; k += THREADS * 8) {
      float v[8];
      load8(v, x + k);
      sum += eight_squares(v);
    }
    scale = 1.f / sqrtf(block_sum(sum) / (float)call.hidden + call.eps);
  }
#pragma unroll 1
  for (int k = threadIdx.x * 8; k < call.hidden; k += THREADS * 8) {
    float v[8], w[8];
    load8(v, x + k);
    if (call.norm) {
      load8(w, call.norm + k);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = v[i] * scale * (w[i] + call.offset);
      if (blockIdx.x == 0) store8(call.normed + (size_t)row * call.hidden + k, v);
    }
    store8(to + k, v);
  }
  __syncthreads();
}

// Logits (h @ weight^T + bias) * prescale, summed in FP64 and rounded once; the last block of a row chooses. A warp has one expert, whose
// weights no launch writes: they are fetched while the launch before ends. Code is short, because a step runs it once.
template <class T>
DEVICE void route(const RouteCall& call) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ float values[2][EXPERTS_MOST];
  __shared__ bool last;
  pdl_trigger();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = blockIdx.x * ROUTE_EXPERTS + warp, hidden = call.hidden;
  __half* const own = reinterpret_cast<__half*>(memory);
  const T* w = static_cast<const T*>(call.weight) + (size_t)expert * hidden;
  if (call.staged && expert < call.experts) {
    T* const held = reinterpret_cast<T*>(own + hidden) + (size_t)warp * hidden;
#pragma unroll 4
    for (int k = lane * 8; k < hidden; k += 256) *reinterpret_cast<uint4*>(held + k) = __ldg(reinterpret_cast<const uint4*>(w + k));
    w = held;
  }
  if (call.norm)
    for (int k = threadIdx.x * 32; k < hidden; k += THREADS * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(call.norm + k));
  pdl_wait();
#pragma unroll 1
  for (int row = blockIdx.y; row < call.rows; row += gridDim.y) {
    float* const logits = call.logits + (size_t)row * call.experts;
    route_row(call, row, own);
    if (expert < call.experts) {
      double sums[4] = {0., 0., 0., 0.};
#pragma unroll 2
      for (int k = lane * 8; k < hidden; k += 256) {
        float a[8], b[8];
        load8(a, own + k);
        load8(b, w + k);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          // Multiplying halves in FP32 is exact, so one number is converted instead of two.
          if constexpr (std::is_same<T, __half>::value) sums[i % 4] += (double)__fmul_rn(a[i], b[i]);
          else sums[i % 4] = fma((double)a[i], (double)b[i], sums[i % 4]);
        }
      }
      double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll 1
      for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
      if (lane == 0) logits[expert] = logit_of(call, expert, sum);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(call.arrivals + row, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) continue;
    __threadfence();
    for (int i = threadIdx.x; i < call.experts; i += blockDim.x) values[0][i] = values[1][i] = __ldcg(logits + i);
    if (threadIdx.x == 0) call.arrivals[row] = 0;
    __syncthreads();
    if (warp == 0) choose_of_row(call, row, values[0], values[1], lane);
    __syncthreads();
  }
}

// Rows, and experts, that a warp multiplies at a time in blocks of many rows.
constexpr int ROUTE_TILE = 4;

// One warp: norms a row in the order of sums of `route_row`: lane l does the work of that block's threads l, 32 + l, 64 + l, ...
DEVICE void norm_row(const RouteCall& call, int row, int lane) {
  const __half* x = call.h + (size_t)row * call.hidden;
  float parts[THREADS / 32], sum = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) {
    float part = 0.f;
    for (int k = (w * 32 + lane) * 8; k < call.hidden; k += THREADS * 8) {
      float v[8];
      load8(v, x + k);
      part += eight_squares(v);
    }
    parts[w] = warp_sum(part);
  }
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) sum += parts[w];
  const float scale = 1.f / sqrtf(sum / (float)call.hidden + call.eps);
#pragma unroll 2
  for (int k = lane * 8; k < call.hidden; k += 256) {
    float v[8], w[8];
    load8(v, x + k);
    load8(w, call.norm + k);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] * scale * (w[i] + call.offset);
    store8(call.normed + (size_t)row * call.hidden + k, v);
  }
}

// Adds up each of a warp's 16 sums as `route` does, by a butterfly of which each lane keeps one half of the sums after the other:
// returns sum number lane / 2.
DEVICE double scattered_sums(double (&v)[ROUTE_TILE * ROUTE_TILE], int lane) {
#pragma unroll
  for (int level = 0; level < 4; level++) {
    const int o = 16 >> level, n = 8 >> level;
    const bool upper = lane & o;
#pragma unroll
    for (int j = 0; j < n; j++) {
      const double low = v[j], high = v[j + n], given = __shfl_xor_sync(~0u, upper ? low : high, o);
      v[j] = (upper ? high : low) + given;
    }
  }
  return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}

// As `route`, bitwise identical, for many rows. A block has all experts of some rows; `across` warps share ROUTE_TILE of these. Converting
// to FP64 is the bound, so a number is converted once for ROUTE_TILE multiplications.
template <class T>
DEVICE void route_many(const RouteCall& call) {
  extern __shared__ __align__(16) uint8_t memory[];
  pdl_trigger();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, hidden = call.hidden, across = call.across;
  const int held = ROUTE_TILE * (THREADS / 32 / across), first = blockIdx.x * held, rows = min(held, call.rows - first);
  float* const logits = reinterpret_cast<float*>(memory);  // [held, experts], twice for a sparse choice
  float* const copies = call.jitter >= 0.f ? logits + held * call.experts : logits;
  pdl_wait();
  if (call.norm) {
    for (int row = warp; row < rows; row += THREADS / 32) norm_row(call, first + row, lane);
    __syncthreads();
  }
  // Not __ldg: this block may have written them.
  const __half* const h = (call.norm ? call.normed : call.h) + (size_t)first * hidden;
  const int own = warp / across * ROUTE_TILE;
  for (int expert = warp % across * ROUTE_TILE; own < rows && expert < call.experts; expert += across * ROUTE_TILE) {
    const __half* x[ROUTE_TILE];
    const T* w[ROUTE_TILE];
#pragma unroll
    for (int i = 0; i < ROUTE_TILE; i++) {
      x[i] = h + (size_t)min(own + i, rows - 1) * hidden;
      w[i] = static_cast<const T*>(call.weight) + (size_t)min(expert + i, call.experts - 1) * hidden;
    }
    double sums[ROUTE_TILE * ROUTE_TILE][4] = {};
#pragma unroll 1
    for (int k = lane * 8; k < hidden; k += 256) {
      uint4 a[ROUTE_TILE], b[ROUTE_TILE];
#pragma unroll
      for (int i = 0; i < ROUTE_TILE; i++) {
        a[i] = *reinterpret_cast<const uint4*>(x[i] + k);
        b[i] = __ldg(reinterpret_cast<const uint4*>(w[i] + k));
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
        double some[ROUTE_TILE], others[ROUTE_TILE];
#pragma unroll
        for (int i = 0; i < ROUTE_TILE; i++) {
          some[i] = (double)(float)reinterpret_cast<const __half*>(&a[i])[j];
          others[i] = (double)(float)reinterpret_cast<const T*>(&b[i])[j];
        }
#pragma unroll
        for (int i = 0; i < ROUTE_TILE * ROUTE_TILE; i++)
          sums[i][j % 4] = fma(some[i / ROUTE_TILE], others[i % ROUTE_TILE], sums[i][j % 4]);
      }
    }
    double whole[ROUTE_TILE * ROUTE_TILE];
#pragma unroll
    for (int i = 0; i < ROUTE_TILE * ROUTE_TILE; i++) whole[i] = (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
    const double sum = scattered_sums(whole, lane);
    const int row = own + lane / 2 / ROUTE_TILE, of = expert + lane / 2 % ROUTE_TILE;
    if (lane % 2 == 0 && of < call.experts) {
      const float logit = logit_of(call, of, sum);
      logits[row * call.experts + of] = copies[row * call.experts + of] = logit;
    }
  }
  __syncthreads();
  for (int row = warp; row < rows; row += THREADS / 32)
    choose_of_row(call, first + row, logits + row * call.experts, copies + row * call.experts, lane);
}

#define ROUTE(T, t)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) experts_route_##t(const __grid_constant__ RouteCall call) { route<T>(call); } \
  extern "C" __global__ void __launch_bounds__(256) experts_route_many_##t(const __grid_constant__ RouteCall call) { route_many<T>(call); }
ROUTE(__half, f16)
ROUTE(__nv_bfloat16, bf16)

// ---------------------------------------------------------------------------------------------------- pairs by expert
// Inclusive sum over a block of 256 threads.
DEVICE uint64_t block_scan(uint64_t v, uint64_t* warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const uint64_t below = __shfl_up_sync(~0u, v, o);
    if (lane >= o) v += below;
  }
  if (lane == 31) warps[warp] = v;
  __syncthreads();
  for (int w = 0; w < warp; w++) v += warps[w];
  return v;
}

// Three counts in a word: pairs, narrow items and other items, each at most as many as the pairs.
constexpr int NARROW_SHIFT = 21, WIDE_SHIFT = 42, COUNT_MASK = (1 << NARROW_SHIFT) - 1;
static_assert(PAIRS_MOST <= COUNT_MASK);
DEVICE uint64_t three_counts(int pairs, int narrow, int wide) {
  return (uint64_t)pairs | (uint64_t)narrow << NARROW_SHIFT | (uint64_t)wide << WIDE_SHIFT;
}

// One warp: appends at most PAIRS_AT_A_TIME pairs from `first` on, whose experts are `ids`, to those of their experts, in ascending order, 32
// at a time. An expert's pairs begin at `begins` and end at `places` so far.
DEVICE void order_pairs(const ExpertCall& call, const short* ids, const int* begins, int* places, int first) {
  const int tid = threadIdx.x, count = min(call.pairs - first, PAIRS_AT_A_TIME);
  for (int begin = 0; begin < count; begin += 32) {
    const int p = begin + tid, id = p < count ? ids[p] : -1;
    const unsigned same = __match_any_sync(~0u, id), before = same & ((1u << tid) - 1);
    const int place = id < 0 ? 0 : places[id];
    __syncwarp();
    if (id >= 0) {
      const int at = place + __popc(before);
      call.order[at] = first + p;
      if (call.item_of_pair) {
        const int in_item = at - begins[id] & call.at_once - 1;
        call.item_of_pair[first + p] = make_int2(at - in_item, in_item);
      }
      if (before == 0) places[id] = place + __popc(same);
    }
    __syncwarp();
  }
}

// One block: the tables of `ExpertCall`. Counts are integer sums, so the order of their atomic additions does not matter.
DEVICE void sort_pairs(const ExpertCall& call) {
  constexpr int EACH = EXPERTS_MOST / 256;
  __shared__ __align__(16) short ids[PAIRS_AT_A_TIME];
  __shared__ int begins[EXPERTS_MOST], places[EXPERTS_MOST];  // places: pairs of each expert, then where its next pair goes
  __shared__ uint64_t warps[8];
  const int tid = threadIdx.x, pairs = call.pairs;
  const auto id_of = [&](int pair) {
    const int64_t id = call.ids[pair];
    return id >= 0 && id < call.count ? (short)id : (short)-1;
  };
  for (int i = tid; i < EXPERTS_MOST; i += 256) places[i] = 0;
  __syncthreads();
  for (int p = tid; p < pairs; p += 256) {
    const short id = id_of(p);
    if (p < PAIRS_AT_A_TIME) ids[p] = id;
    if (id >= 0) atomicAdd(&places[id], 1);
  }
  __syncthreads();
  int counts[EACH];
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    counts[i] = places[tid * EACH + i];
    const int rest = counts[i] % call.at_once;
    const bool narrow = call.narrow == call.at_once;
    const int whole = counts[i] / call.at_once;
    sum += three_counts(counts[i], (rest > 0 && rest <= call.narrow) + (narrow ? whole : 0), (rest > call.narrow) + (narrow ? 0 : whole));
  }
  const uint64_t before = block_scan(sum, warps) - sum;
  uint64_t all = 0;
#pragma unroll
  for (int w = 0; w < 8; w++) all += warps[w];
  int at = before & COUNT_MASK, wide = before >> WIDE_SHIFT;
  int narrow = (all >> WIDE_SHIFT) + (before >> NARROW_SHIFT & COUNT_MASK);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    begins[tid * EACH + i] = places[tid * EACH + i] = at;
    for (int some; counts[i] > 0; counts[i] -= some, at += some) {
      some = min(counts[i], call.at_once);
      call.items[some > call.narrow ? wide++ : narrow++] = make_int4(tid * EACH + i, at, some, 0);
    }
  }
  if (tid == 0) {
    call.item_counts[0] = all >> WIDE_SHIFT;
    call.item_counts[1] = all >> NARROW_SHIFT & COUNT_MASK;
  }
  __syncthreads();
  for (int first = 0; first < pairs; first += PAIRS_AT_A_TIME) {
    if (first > 0) {
      __syncthreads();
      for (int p = first + tid; p < min(pairs, first + PAIRS_AT_A_TIME); p += 256) ids[p - first] = id_of(p);
      __syncthreads();
    }
    if (tid < 32) order_pairs(call, ids, begins, places, first);
  }
}

// Where the item of a pair begins in `order`, and the pair's place in it. Each warp counts by itself.
struct ItemOfPair {
  int first, place;
  DEVICE ItemOfPair(const ExpertCall& call, int pair, int64_t id) {
    if (call.item_of_pair) {
      const int2 item = call.item_of_pair[pair];
      first = item.x;
      place = item.y;
      return;
    }
    int lower = 0, before = 0;
    for (int p = 0; p < call.pairs; p += 32) {
      const int own = p + threadIdx.x % 32;
      const int64_t other = own < call.pairs ? call.ids[own] : -1;
      lower += __popc(__ballot_sync(~0u, other >= 0 && other < id));
      before += __popc(__ballot_sync(~0u, other == id && own < pair));
    }
    place = before & (call.at_once - 1);
    first = lower + before - place;
  }
};

// Pairs of features that a thread packs at once: the loads of all of them are under way together.
constexpr int PACKED_TOGETHER = 8;

// The first block sorts, unless the launch only packs; each other block packs the input of one pair.
extern "C" __global__ void __launch_bounds__(256) experts_arrange(const __grid_constant__ ExpertCall call) {
  pdl_trigger();
  pdl_wait();
  const int block = blockIdx.x + call.packs;
  if (block == 0) return sort_pairs(call);
  const int pair = (block - 1) % call.pairs, which = (block - 1) / call.pairs;
  const int64_t id = call.ids[pair];
  if (id < 0 || id >= call.count) return;
  const Expert& expert = call.experts[id];
  const int* features = which == 0 ? expert.gate_features : expert.up_features;
  const int rows = which == 0 ? expert.gate.rows : expert.up.rows;
  const __half* from = call.h + (size_t)(pair / call.chosen) * call.hidden;
  const ItemOfPair item(call, pair, id);
  __half* to = call.x + (which * (size_t)call.columns + column_of(call, id, item.first)) * call.x_stride;
#pragma unroll 1
  for (int first = threadIdx.x; first < rows / 2; first += 256 * PACKED_TOGETHER) {
    int2 at[PACKED_TOGETHER];
    __half2 both[PACKED_TOGETHER];
#pragma unroll
    for (int i = 0; i < PACKED_TOGETHER; i++) {
      const int k = first + 256 * i;
      at[i] = k < rows / 2 ? __ldg(reinterpret_cast<const int2*>(features) + k) : make_int2(-1, -1);
    }
#pragma unroll
    for (int i = 0; i < PACKED_TOGETHER; i++)
      both[i] = __halves2half2(at[i].x < 0 ? __half(0.f) : from[at[i].x], at[i].y < 0 ? __half(0.f) : from[at[i].y]);
#pragma unroll
    for (int i = 0; i < PACKED_TOGETHER; i++) {
      const int k = first + 256 * i;
      if (k < rows / 2) *reinterpret_cast<__half2*>(to + packed_at(call.at_once, item.place, 2 * k)) = both[i];
    }
  }
}

// ---------------------------------------------------------------------------------------------------- the weighted sum
// out = residual + half(sum over choices of part * weight in their order + shared * its weight). Two columns a thread.
extern "C" __global__ void __launch_bounds__(256) experts_combine(const __grid_constant__ ExpertCall call) {
  pdl_trigger();
  const int row = blockIdx.y, n = (blockIdx.x * 256 + threadIdx.x) * 2;
  pdl_wait();
  if (n >= call.hidden) return;
  const int first = row * call.chosen;
  const float* weights = call.weights + first;
  float2 sum;
  for (int c = 0; c < call.chosen; c++) {
    const int place = call.places ? call.places[first + c] : first + c;
    const float2 part = __half22float2(*reinterpret_cast<const __half2*>(call.parts + (size_t)place * call.hidden + n));
    const float x = __fmul_rn(part.x, weights[c]), y = __fmul_rn(part.y, weights[c]);
    sum = c == 0 ? make_float2(x, y) : make_float2(__fadd_rn(sum.x, x), __fadd_rn(sum.y, y));
  }
  const size_t at = (size_t)row * call.hidden + n;
  if (call.shared) {
    const float2 part = __half22float2(*reinterpret_cast<const __half2*>(call.shared + at));
    const float weight = call.shared_weights ? call.shared_weights[row] : 1.f;
    sum = make_float2(__fadd_rn(sum.x, __fmul_rn(part.x, weight)), __fadd_rn(sum.y, __fmul_rn(part.y, weight)));
  }
  __half2 y = __floats2half2_rn(sum.x, sum.y);
  if (call.residual) {
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(call.residual + at)), v = __half22float2(y);
    y = __floats2half2_rn(x.x + v.x, x.y + v.y);
  }
  *reinterpret_cast<__half2*>(call.out + at) = y;
}

// ---------------------------------------------------------------------------------------------------- padded rows of dequantized experts
// An expert whose rows go side by side to padded rows `first` and the following `rows`.
struct PaddedExpert {
  int expert, first, rows;
};
ABI_SIZE(PaddedExpert, 12); ABI_AT(PaddedExpert, expert, 0); ABI_AT(PaddedExpert, first, 4); ABI_AT(PaddedExpert, rows, 8);

// The row of each padded row (0 for padding), and the padded row of each pair. `order`: pairs sorted by expert; those of expert e begin at
// begins[e]. A block has an expert.
extern "C" __global__ void __launch_bounds__(256) experts_pad(const PaddedExpert* experts, const int64_t* order, const int64_t* begins,
                                                              int chosen, int* rows, int* places) {
  const PaddedExpert e = experts[blockIdx.x];
  const int64_t begin = begins[e.expert], count = begins[e.expert + 1] - begin;
  for (int i = threadIdx.x; i < e.rows; i += 256) {
    const bool some = i < count;
    const int pair = some ? (int)order[begin + i] : 0;
    rows[e.first + i] = pair / chosen;
    if (some) places[pair] = e.first + i;
  }
}
