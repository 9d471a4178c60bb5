// Attention of many tokens over pages of kind q6 with heads of up to 128 elements, for Turing.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(q6, HADAMARD8, HADAMARD4, 128, 8)
