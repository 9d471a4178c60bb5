// EXL2 matrices with a scale entry every 128 rows: up to 16, 32, 48, 64, 80, 96 and 128 activation rows.
#include "linear/batch_whole.cuh"

BATCHES(EXL2, exl2, 128)
BATCH_WHOLE(EXL2, exl2, 128, 64, 3, 128, 160, 32)
