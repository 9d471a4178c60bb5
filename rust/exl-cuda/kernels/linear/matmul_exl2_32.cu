// EXL2 matrices with a scale entry every 32 rows: 8, 16 and 32 activation rows a block.
#include "linear/matmul.cuh"

MATMUL(EXL2, exl2, 32, 1, 1)
MATMUL(EXL2, exl2, 32, 2, 2)
MATMUL(EXL2, exl2, 32, 4, 2)
