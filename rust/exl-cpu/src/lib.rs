//! CPU kernels and their thread pool.
