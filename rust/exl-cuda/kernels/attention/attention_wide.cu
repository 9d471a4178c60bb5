// Attention of many tokens over pages of halves with the warpgroup matrix instructions of sm_90a.
#include "attention/attention_wide.cuh"

WIDE(64)
WIDE(128)
