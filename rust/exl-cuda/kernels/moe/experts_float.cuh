// The matmuls of float experts: gate and up with the activation between them, and down. A block has some features of an item, which is
// some rows of an expert (`ExpertCall`). Blocks past the last item exit at once: only the GPU knows how many items there are.
//
// The order of sums is that of all float matrices: a pair's result is bitwise that of its row alone.
#pragma once
#include "common/activate.cuh"
#include "linear/float.cuh"

// A matrix of an expert. The same struct as `ops::moe::float::Weights`.
struct FloatWeights {
  const __half* weight;  // [features, k]
  const float* bias;     // [features] or null
  float scale, prescale;
};
ABI_SIZE(FloatWeights, 24); ABI_AT(FloatWeights, weight, 0); ABI_AT(FloatWeights, bias, 8); ABI_AT(FloatWeights, scale, 16);
ABI_AT(FloatWeights, prescale, 20);

// One expert: a gated MLP. The same struct as `ops::moe::float::Expert`.
struct FloatExpert {
  FloatWeights gate, up, down;
};
ABI_SIZE(FloatExpert, 72); ABI_AT(FloatExpert, gate, 0); ABI_AT(FloatExpert, up, 24); ABI_AT(FloatExpert, down, 48);

// The same struct as `ops::moe::float::Argument`.
struct FloatExpertCall {
  const FloatExpert* experts;
  const __half* h;  // [rows, hidden]
  // Tables of `ExpertCall`.
  const int* item_counts;
  const int4* items;
  const int* order;
  __half* inner;  // [pairs, inner_stride], in the order of `order`: the input of down
  __half* parts;  // [pairs, hidden]
  int chosen, hidden, width, inner_stride, activation;
  int slice;  // numbers of K of a slice
  int whole;  // rows of weights are multiples of 16 bytes, and aligned to 16
  int padding;
};
ABI_SIZE(FloatExpertCall, 88); ABI_AT(FloatExpertCall, experts, 0); ABI_AT(FloatExpertCall, h, 8);
ABI_AT(FloatExpertCall, item_counts, 16); ABI_AT(FloatExpertCall, items, 24); ABI_AT(FloatExpertCall, order, 32);
ABI_AT(FloatExpertCall, inner, 40); ABI_AT(FloatExpertCall, parts, 48); ABI_AT(FloatExpertCall, chosen, 56);
ABI_AT(FloatExpertCall, hidden, 60); ABI_AT(FloatExpertCall, width, 64); ABI_AT(FloatExpertCall, inner_stride, 68);
ABI_AT(FloatExpertCall, activation, 72); ABI_AT(FloatExpertCall, slice, 76); ABI_AT(FloatExpertCall, whole, 80);
ABI_AT(FloatExpertCall, padding, 84);

// The item of a block, number blockIdx.y, and the operands of its matmul.
template <bool DOWN>
struct FloatItem {
  const FloatExpertCall& call;
  const bool exists;
  const FloatExpert* expert = nullptr;
  int first = 0, rows = 0;  // its pairs in `order`

  DEVICE explicit FloatItem(const FloatExpertCall& call) : call(call), exists((int)blockIdx.y < call.item_counts[0] + call.item_counts[1]) {
    if (!exists) return;
    const int4 item = call.items[blockIdx.y];
    expert = call.experts + item.x;
    first = item.y;
    rows = item.z;
  }
  DEVICE int k() const { return DOWN ? call.width : call.hidden; }
  DEVICE int features() const { return DOWN ? call.hidden : call.width; }
  // A matrix: gate (0) and up (1), or down.
  DEVICE const FloatWeights& matrix(int which) const { return DOWN ? expert->down : which ? expert->up : expert->gate; }
  // The last feature, and the last row, stand for those past them.
  DEVICE const __half* weights(int which, int feature) const { return matrix(which).weight + (size_t)min(feature, features() - 1) * k(); }
  DEVICE const __half* row(int i) const {
    const int at = first + min(i, rows - 1);
    if constexpr (DOWN) return call.inner + (size_t)at * call.inner_stride;
    else return call.h + (size_t)(call.order[at] / call.chosen) * call.hidden;
  }
  DEVICE float result(int which, int feature, float sum) const {
    const FloatWeights& a = matrix(which);
    return rounded(finish(sum, a.scale, a.bias ? a.bias[feature] : 0.f, a.prescale), OUT_F16);
  }
  // Stores a feature of a row by its sums; `up` counts only where there is a gate.
  DEVICE void store(int row, int feature, float sum, float up) const {
    if (row >= rows || feature >= features()) return;
    if constexpr (DOWN) {
      call.parts[(size_t)call.order[first + row] * call.hidden + feature] = __float2half_rn(result(0, feature, sum));
    } else {
      const float v = activate(result(0, feature, sum), call.activation) * result(1, feature, up);
      call.inner[(size_t)(first + row) * call.inner_stride + feature] = __float2half_rn(v);
    }
  }
};
