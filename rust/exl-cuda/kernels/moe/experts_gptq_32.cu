// Experts of GPTQ matrices with a scale entry every 32 rows.
#include "moe/experts_matmul.cuh"

EXPERT_MATMULS(GPTQ, gptq, 32)
