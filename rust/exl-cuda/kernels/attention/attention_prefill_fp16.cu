// Attention of many tokens over pages of kind fp16.
#include "attention/attention_prefill.cuh"

PREFILLS(fp16, F16, F16)
