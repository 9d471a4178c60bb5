// Attention over pages of kind q6: slots of the ring, and blocks that are to fit a multiprocessor.
#include "attention.cuh"

DECODE(q6, HADAMARD8, HADAMARD4, 64, 4, 4)
DECODE(q6, HADAMARD8, HADAMARD4, 128, 3, 4)
DECODE(q6, HADAMARD8, HADAMARD4, 256, 3, 2)
PREFILL(q6, HADAMARD8, HADAMARD4, 64, 8)
PREFILL(q6, HADAMARD8, HADAMARD4, 128, 8)
PREFILL(q6, HADAMARD8, HADAMARD4, 256, 4)
