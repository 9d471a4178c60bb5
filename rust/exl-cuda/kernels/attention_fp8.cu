// Attention over fp8 pages: head dimensions to 64, 128 and 256; up to 8 query heads a block.
#include "attention.cuh"

ATTEND(FP8, FP8, fp8)
