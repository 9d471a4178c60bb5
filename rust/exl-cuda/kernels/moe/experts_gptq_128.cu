// Experts of GPTQ matrices with a scale entry every 128 rows.
#include "moe/experts_matmul.cuh"

EXPERT_MATMULS(GPTQ, gptq, 128)
