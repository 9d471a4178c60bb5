// The kernels of 3 to 8 rows for EXL2 (a scale entry every 128 or 32 rows), and the kernels that pack their input.
#include "linear/few.cuh"
#include "linear/rows.cuh"

FEW(EXL2, exl2, 128)
FEW(EXL2, exl2, 32)

extern "C" __global__ void __launch_bounds__(ROWS_THREADS, 16) prepare_rows_f16(const __grid_constant__ RowsTask p) { prepare_rows<__half>(p); }
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, 16) prepare_rows_bf16(const __grid_constant__ RowsTask p) { prepare_rows<__nv_bfloat16>(p); }
