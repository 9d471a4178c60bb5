//! CUDA kernels, driver loading and launching.
