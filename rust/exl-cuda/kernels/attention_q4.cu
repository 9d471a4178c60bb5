// Attention over pages of kind q4: slots of the ring, and blocks that are to fit a multiprocessor.
#include "attention.cuh"

DECODE(q4, HADAMARD4, HADAMARD4, 64, 4, 4)
DECODE(q4, HADAMARD4, HADAMARD4, 128, 4, 4)
DECODE(q4, HADAMARD4, HADAMARD4, 256, 4, 2)
PREFILL(q4, HADAMARD4, HADAMARD4, 64, 8)
PREFILL(q4, HADAMARD4, HADAMARD4, 128, 8)
PREFILL(q4, HADAMARD4, HADAMARD4, 256, 4)
