// Experts of GPTQ matrices with a scale entry every 32 rows.
#include "moe/experts_few.cuh"
#include "moe/experts_many.cuh"

FEW_MATMUL(gate_up, GPTQ, gptq, 32, false)
FEW_MATMUL(down, GPTQ, gptq, 32, true)
MANY_MATMUL(gate_up, GPTQ, gptq, 32, false)
MANY_MATMUL(down, GPTQ, gptq, 32, true)
