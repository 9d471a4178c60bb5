// Attention of few tokens over pages of kind q8.
#include "attention/attention_decode.cuh"

DECODES(q8, HADAMARD8, HADAMARD8)
