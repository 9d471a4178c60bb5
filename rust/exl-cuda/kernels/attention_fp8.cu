// Attention over pages of kind fp8: slots of the ring, and blocks that are to fit a multiprocessor.
#include "attention.cuh"

DECODE(fp8, E5M2, E5M2, 64, 4, 4)
DECODE(fp8, E5M2, E5M2, 128, 3, 4)
DECODE(fp8, E5M2, E5M2, 256, 3, 2)
PREFILL(fp8, E5M2, E5M2, 64, 8)
PREFILL(fp8, E5M2, E5M2, 128, 8)
PREFILL(fp8, E5M2, E5M2, 256, 4)
