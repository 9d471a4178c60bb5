// The kernels of up to eight rows for GPTQ on cards without bulk copies.
#include "linear/direct.cuh"

DIRECT(GPTQ, gptq, 128)
DIRECT(GPTQ, gptq, 32)
