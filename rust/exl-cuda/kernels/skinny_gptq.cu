// The kernels of 3 to 8 rows for GPTQ.
#include "skinny.cuh"

SKINNY(GPTQ, gptq, 128)
SKINNY(GPTQ, gptq, 32)
