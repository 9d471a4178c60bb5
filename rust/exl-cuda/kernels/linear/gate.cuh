// The `gate` of the parameters of matmuls of up to eight rows: the activation of the first of two matrices, which gates the second; NO_GATE;
// or, below that, the activation of all results, as NO_GATE - 1 - activation.
#pragma once
#include "common/activate.cuh"

constexpr int NO_GATE = -1;
DEVICE int activation_of(int gate) { return gate >= 0 ? gate : NO_GATE - 1 - gate; }
