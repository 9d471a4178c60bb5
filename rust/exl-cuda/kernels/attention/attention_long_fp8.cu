// Attention of one token a sequence over pages of kind fp8, a block a split of keys.
#include "attention/attention_long.cuh"

LONGS(fp8, E5M2, E5M2, 1)
LONGS(fp8, E5M2, E5M2, 2)
