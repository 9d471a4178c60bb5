// Attention over fp16 pages: head dimensions to 64, 128 and 256; up to 8 query heads a block.
#include "attention.cuh"

ATTEND(FP16, FP16, fp16)
