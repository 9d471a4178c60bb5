// Attention of many tokens over pages of kind fp16 with heads of over 128 elements, for blocks with less than 128 KiB.
#include "attention/attention_prefill.cuh"

PREFILL_SMALL(fp16, F16, F16, 256, 4)
