// The ring kernels for GPTQ: a scale entry every 128 or 32 rows.
#include "linear/ring.cuh"

RING(GPTQ, gptq, 128, __maxnreg__(RING_REGISTERS))
RING(GPTQ, gptq, 32, __maxnreg__(RING_REGISTERS))
