// Attention of many tokens over pages of kind fp8 with heads of over 128 elements, for blocks with less than 128 KiB.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(fp8, E5M2, E5M2, 256, 4)
