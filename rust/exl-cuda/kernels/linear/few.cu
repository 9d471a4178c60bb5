// The kernels of 3 to 8 rows for EXL2: a scale entry every 128 or 32 rows.
#include "linear/few.cuh"

FEW(EXL2, exl2, 128)
FEW(EXL2, exl2, 32)
