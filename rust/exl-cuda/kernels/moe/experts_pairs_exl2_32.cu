// Two tiles at a time of experts of EXL2 matrices with a scale entry every 32 rows.
#include "moe/experts_matmul.cuh"

EXPERT_MATMULS_OF_PAIRS(EXL2, exl2, 32)
