// Attention of few tokens over pages of kind q4.
#include "attention/attention_decode.cuh"

DECODES(q4, HADAMARD4, HADAMARD4)
