// Attention over q4 pages: head dimensions to 64, 128 and 256; up to 8 query heads a block.
#include "attention.cuh"

ATTEND(Q4, Q4, q4)
