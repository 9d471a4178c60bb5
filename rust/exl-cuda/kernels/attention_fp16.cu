// Attention over pages of kind fp16: slots of the ring, and blocks that are to fit a multiprocessor.
#include "attention.cuh"

DECODE(fp16, F16, F16, 64, 4, 4)
DECODE(fp16, F16, F16, 128, 2, 4)
DECODE(fp16, F16, F16, 256, 2, 2)
PREFILL(fp16, F16, F16, 64, 8)
PREFILL(fp16, F16, F16, 128, 8)
PREFILL(fp16, F16, F16, 256, 4)
