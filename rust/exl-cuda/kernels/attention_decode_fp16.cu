// Attention of few tokens over pages of kind fp16.
#include "attention_decode.cuh"

DECODES(fp16, F16, F16)
