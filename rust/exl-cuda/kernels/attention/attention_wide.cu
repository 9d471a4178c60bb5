// Attention of many tokens over half pages with the matrix instructions of sm_90a.
#include "attention/attention_wide.cuh"

WIDE(64)
WIDE(128)
