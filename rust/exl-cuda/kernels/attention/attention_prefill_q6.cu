// Attention of many tokens over pages of kind q6.
#include "attention/attention_prefill.cuh"

PREFILLS(q6, HADAMARD8, HADAMARD4)
