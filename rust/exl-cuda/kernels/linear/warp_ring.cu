// The warp ring kernels for EXL2: a scale entry every 128 or 32 rows.
#include "linear/warp_ring.cuh"

WARP_RING(EXL2, exl2, 128)
WARP_RING(EXL2, exl2, 32)
