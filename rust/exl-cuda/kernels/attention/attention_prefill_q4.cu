// Attention of many tokens over pages of kind q4.
#include "attention/attention_prefill.cuh"

PREFILLS(q4, HADAMARD4, HADAMARD4)
