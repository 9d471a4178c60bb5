// EXL2 matrices with a scale entry every 128 rows: up to 16, 32 and 64 activation rows.
#include "linear/batch_mma.cuh"

BATCHES_MMA(EXL2, exl2, 128)
