// Experts of EXL2 matrices with a scale entry every 128 rows.
#include "moe/experts_product.cuh"

EXPERTS(EXL2, exl2, 128)
