// The warp ring kernels for GPTQ: a scale entry every 128 or 32 rows.
#include "linear/warp_ring.cuh"

WARP_RING(GPTQ, gptq, 128)
WARP_RING(GPTQ, gptq, 32)
