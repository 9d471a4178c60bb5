// Attention of one token a sequence over pages of kind q8, a block a split of keys.
#include "attention/attention_long.cuh"

LONGS(q8, HADAMARD8, HADAMARD8, 1)
LONGS(q8, HADAMARD8, HADAMARD8, 2)
