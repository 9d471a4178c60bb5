// Row limits that kernels share with the launchers. Rust defines them (src/rows.rs), and its build passes them to nvcc (build/nvcc.rs).
#pragma once

constexpr int GEMV_ROWS = EXL_GEMV_ROWS;  // most rows of a matmul that adds adapters to its results
constexpr int FEW_ROWS = EXL_FEW_ROWS;    // most rows of a matmul of few rows, and columns of its packed input (linear/rows.cuh)
