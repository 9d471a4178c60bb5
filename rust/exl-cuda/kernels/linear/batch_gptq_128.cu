// GPTQ matrices with a scale entry every 128 rows: up to 16, 32, 48, 64, 80, 96 and 128 activation rows.
#include "linear/batch_whole.cuh"

BATCHES(GPTQ, gptq, 128)
