// Attention of one token a sequence over pages of kind q6.
#include "attention/attention_few.cuh"

FEWS(q6, HADAMARD8, HADAMARD4)
