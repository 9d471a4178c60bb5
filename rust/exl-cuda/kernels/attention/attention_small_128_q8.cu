// Attention of many tokens over pages of kind q8 with heads of up to 128 elements, for Turing.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(q8, HADAMARD8, HADAMARD8, 128, 8)
