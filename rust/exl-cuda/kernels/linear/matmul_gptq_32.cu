// GPTQ matrices with a scale entry every 32 rows: 8, 16 and 32 activation rows a block.
#include "linear/matmul.cuh"

MATMUL(GPTQ, gptq, 32, 1, 1)
MATMUL(GPTQ, gptq, 32, 2, 2)
MATMUL(GPTQ, gptq, 32, 4, 2)
