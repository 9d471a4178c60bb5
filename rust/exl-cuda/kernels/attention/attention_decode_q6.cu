// Attention of few tokens over pages of kind q6.
#include "attention/attention_decode.cuh"

DECODES(q6, HADAMARD8, HADAMARD4)
