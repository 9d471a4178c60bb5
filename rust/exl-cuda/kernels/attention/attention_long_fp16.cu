// Attention of one token a sequence over pages of kind fp16, a block a split of keys.
#include "attention/attention_long.cuh"

LONGS(fp16, F16, F16, 1)
