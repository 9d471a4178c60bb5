// Attention of many tokens over pages of kind fp8.
#include "attention/attention_prefill.cuh"

PREFILLS(fp8, E5M2, E5M2)
