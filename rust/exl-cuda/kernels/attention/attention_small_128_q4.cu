// Attention of many tokens over pages of kind q4 with heads of up to 128 elements, for Turing.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(q4, HADAMARD4, HADAMARD4, 128, 8)
