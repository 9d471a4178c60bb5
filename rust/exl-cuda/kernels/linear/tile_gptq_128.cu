// GPTQ matrices with a scale entry every 128 rows: 8, 16 and 32 activation rows a block.
#include "linear/tile.cuh"

TILE_MATMUL(GPTQ, gptq, 128, 1, 1)
TILE_MATMUL(GPTQ, gptq, 128, 2, 2)
TILE_MATMUL(GPTQ, gptq, 128, 4, 2)
