// Attention of many tokens over pages of kind q8.
#include "attention/attention_prefill.cuh"

PREFILLS(q8, HADAMARD8, HADAMARD8)
