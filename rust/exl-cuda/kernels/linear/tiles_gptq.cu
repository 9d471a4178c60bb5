// The kernels of up to eight rows for GPTQ on cards without bulk copies.
#include "linear/tiles.cuh"

TILES(GPTQ, gptq, 128)
TILES(GPTQ, gptq, 32)
