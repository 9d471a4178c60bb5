// Joins the splits that `attention_*_decode` left, in order. Grid: tokens, query heads; a thread a dimension.
#include "attention_join.cuh"
#include "attention_stage.cuh"

constexpr int AHEAD = 32;  // splits whose parts are read together

// flags: 1 the columns of results are in natural order, 2 values are transformed
extern "C" __global__ void __launch_bounds__(256) attention_join(const __grid_constant__ Attention a, int flags) {
  __shared__ float row[256];
  pdl_trigger();
  pdl_wait();
  const int token = blockIdx.x, head = blockIdx.y, lane = threadIdx.x & 31, width = blockDim.x;
  const int position = a.positions[token], sequence = a.rows[token];
  const int to = sequence >= 0 && sequence < a.batch ? visible_to(a, position) : 0, from = visible_from(a, position);
  const int begin = from / SPLIT, end = from < to ? min((to + SPLIT - 1) / SPLIT, a.splits) : begin;
  const int64_t base = ((int64_t)token * a.q_heads + head) * a.splits;
  float max = -INFINITY, sum = 0.f, total = 0.f;
  for (int first = begin; first < end; first += AHEAD) {
    float part[AHEAD];
    const float* column = a.parts + (base + first) * width + threadIdx.x;
#pragma unroll
    for (int s = 0; s < AHEAD; s++) part[s] = first + s < end ? __ldcg(column + (int64_t)s * width) : 0.f;
    const float2 state = first + lane < end ? __ldcg(a.states + base + first + lane) : make_float2(-INFINITY, 0.f);
    // Largest of all splits before this lane's.
    float before = state.x;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const float other = __shfl_up_sync(~0u, before, o);
      if (lane >= o) before = fmaxf(before, other);
    }
    const float all = fmaxf(max, __shfl_sync(~0u, before, 31));
    before = __shfl_up_sync(~0u, before, 1);
    before = lane ? fmaxf(max, before) : max;
    float kept, added;
    join_factors(before, state.x, state.y, kept, added);
    max = all;
#pragma unroll
    for (int s = 0; s < AHEAD; s++) {
      const float k = __shfl_sync(~0u, kept, s), n = __shfl_sync(~0u, added, s), w = __shfl_sync(~0u, state.y, s);
      total = join_value(total, k, part[s], n);
      sum = join_value(sum, k, w, n);
    }
  }
  row[result_dim(flags & 1, threadIdx.x >> 3, threadIdx.x & 7)] = total;
  __syncthreads();
  for (int block = threadIdx.x >> 5; block * 64 < a.dim; block += width / 32)
    result_to_out(a, row, block, sum, ((int64_t)token * a.q_heads + head) * a.dim, flags & 2);
}
