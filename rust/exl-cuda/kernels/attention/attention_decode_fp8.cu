// Attention of few tokens over pages of kind fp8.
#include "attention/attention_decode.cuh"

DECODES(fp8, E5M2, E5M2)
