// Experts of GPTQ matrices with a scale entry every 32 rows.
#include "moe/experts_product.cuh"

EXPERTS(GPTQ, gptq, 32)
