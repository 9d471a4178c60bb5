// Attention of one token a sequence over pages of kind fp8.
#include "attention/attention_few.cuh"

FEWS(fp8, E5M2, E5M2)
