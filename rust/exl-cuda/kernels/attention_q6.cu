// Attention over q6 pages: head dimensions to 64, 128 and 256; up to 8 query heads a block.
#include "attention.cuh"

ATTEND(Q8, Q4, q6)
