// Attention of one token a sequence over pages of kind q4, a block a split of keys.
#include "attention/attention_long.cuh"

LONGS(q4, HADAMARD4, HADAMARD4, 1)
LONGS(q4, HADAMARD4, HADAMARD4, 2)
