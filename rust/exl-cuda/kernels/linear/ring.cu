// The ring kernels for EXL2: a scale entry every 128 or 32 rows.
#include "linear/ring.cuh"

RING(EXL2, exl2, 128, __maxnreg__(RING_REGISTERS))
RING(EXL2, exl2, 32, __maxnreg__(RING_REGISTERS))
