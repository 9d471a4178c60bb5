// Attention of one token a sequence over pages of kind q4.
#include "attention/attention_few.cuh"

FEWS(q4, HADAMARD4, HADAMARD4)
