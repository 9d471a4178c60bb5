// Attention of one token a sequence over pages of kind q6, a block a split of keys.
#include "attention/attention_long.cuh"

LONGS(q6, HADAMARD8, HADAMARD4, 1)
LONGS(q6, HADAMARD8, HADAMARD4, 2)
