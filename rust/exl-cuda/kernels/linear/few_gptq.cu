// The kernels of 3 to 8 rows for GPTQ.
#include "linear/few.cuh"

FEW(GPTQ, gptq, 128)
FEW(GPTQ, gptq, 32)
