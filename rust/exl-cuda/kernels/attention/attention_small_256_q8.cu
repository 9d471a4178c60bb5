// Attention of many tokens over pages of kind q8 with heads of over 128 elements, for blocks with less than 128 KiB.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(q8, HADAMARD8, HADAMARD8, 256, 4)
