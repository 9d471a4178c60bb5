// Experts of GPTQ matrices with a scale entry every 128 rows.
#include "moe/experts_few.cuh"
#include "moe/experts_many.cuh"

FEW_MATMUL(gate_up, GPTQ, gptq, 128, false)
FEW_MATMUL(down, GPTQ, gptq, 128, true)
MANY_MATMUL(gate_up, GPTQ, gptq, 128, false)
MANY_MATMUL(down, GPTQ, gptq, 128, true)
