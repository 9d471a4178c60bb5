// Experts of EXL2 matrices with a scale entry every 32 rows.
#include "moe/experts_few.cuh"
#include "moe/experts_many.cuh"

FEW_MATMUL(gate_up, EXL2, exl2, 32, false)
FEW_MATMUL(down, EXL2, exl2, 32, true)
MANY_MATMUL(gate_up, EXL2, exl2, 32, false)
MANY_MATMUL(down, EXL2, exl2, 32, true)
