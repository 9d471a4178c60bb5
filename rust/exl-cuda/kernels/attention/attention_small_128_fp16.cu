// Attention of many tokens over pages of kind fp16 with heads of up to 128 elements, for Turing.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(fp16, F16, F16, 128, 8)
