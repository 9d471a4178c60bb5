// Attention of few tokens over pages of kind fp16.
#include "attention/attention_decode.cuh"

DECODES(fp16, F16, F16)
