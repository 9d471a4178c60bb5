// The kernels of up to eight rows for EXL2 on cards without bulk copies, and their norm.
#include "linear/direct.cuh"

DIRECT(EXL2, exl2, 128)
DIRECT(EXL2, exl2, 32)

extern "C" __global__ void __launch_bounds__(DIRECT_THREADS) norm_packed(const __grid_constant__ FewTask p) { norm_packed_rows(p); }
