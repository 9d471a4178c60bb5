// Attention of one token a sequence over pages of kind q8.
#include "attention/attention_few.cuh"

FEWS(q8, HADAMARD8, HADAMARD8)
