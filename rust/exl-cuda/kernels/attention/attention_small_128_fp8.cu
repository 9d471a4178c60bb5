// Attention of many tokens over pages of kind fp8 with heads of up to 128 elements, for Turing.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(fp8, E5M2, E5M2, 128, 8)
