// The ring kernels: EXL2 and GPTQ, a scale entry every 128 or 32 rows.
#include "ring.cuh"

RING(EXL2, exl2, 128)
RING(EXL2, exl2, 32)
RING(GPTQ, gptq, 128)
RING(GPTQ, gptq, 32)
