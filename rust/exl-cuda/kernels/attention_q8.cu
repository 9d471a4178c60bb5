// Attention over pages of kind q8: slots of the ring, and blocks that are to fit a multiprocessor.
#include "attention.cuh"

DECODE(q8, HADAMARD8, HADAMARD8, 64, 4, 4)
DECODE(q8, HADAMARD8, HADAMARD8, 128, 3, 4)
DECODE(q8, HADAMARD8, HADAMARD8, 256, 3, 2)
PREFILL(q8, HADAMARD8, HADAMARD8, 64, 8)
PREFILL(q8, HADAMARD8, HADAMARD8, 128, 8)
PREFILL(q8, HADAMARD8, HADAMARD8, 256, 4)
