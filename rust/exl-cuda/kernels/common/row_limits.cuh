// Row limits that kernels share with the launchers. Rust defines them (src/rows.rs) and compares these values when it is compiled.
#pragma once

constexpr int FEW_ROWS = 8;  // most rows of a matmul of few rows, and columns of its packed input (linear/rows.cuh)
