// The kernels that pack activation rows for matmuls of 3 to 8 rows.
#include "linear/rows.cuh"

extern "C" __global__ void __launch_bounds__(ROWS_THREADS, 16) prepare_rows_f16(const __grid_constant__ RowsTask p) { prepare_rows<__half>(p); }
extern "C" __global__ void __launch_bounds__(ROWS_THREADS, 16) prepare_rows_bf16(const __grid_constant__ RowsTask p) { prepare_rows<__nv_bfloat16>(p); }
