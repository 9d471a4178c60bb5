// EXL2 matrices with a scale entry every 32 rows: 8, 16 and 32 activation rows a block.
#include "linear/tile.cuh"

TILE_MATMUL(EXL2, exl2, 32, 1, 1)
TILE_MATMUL(EXL2, exl2, 32, 2, 2)
TILE_MATMUL(EXL2, exl2, 32, 4, 2)
