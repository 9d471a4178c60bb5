// GPTQ matrices with a scale entry every 32 rows: up to 16, 32 and 64 activation rows.
#include "linear/batch_mma.cuh"

BATCHES_MMA(GPTQ, gptq, 32)
