// Attention of one token a sequence over pages of kind fp16.
#include "attention/attention_few.cuh"

FEWS(fp16, F16, F16)
