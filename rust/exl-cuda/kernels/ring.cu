// The ring kernels for EXL2: a scale entry every 128 or 32 rows, one matrix or up to three.
#include "ring.cuh"

RING(EXL2, exl2, 128)
RING(EXL2, exl2, 32)
