// Two tiles at a time of experts of GPTQ matrices with a scale entry every 128 rows.
#include "moe/experts_matmul.cuh"

EXPERT_MATMULS_OF_PAIRS(GPTQ, gptq, 128)
