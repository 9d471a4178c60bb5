//! CPU kernels and their thread pool.
//!
//! Every kernel gives the same bits for the same inputs at any thread count: work is split over outputs only, and each output is
//! reduced in one fixed order.

pub mod activation;
pub mod attention;
pub mod block;
pub mod isa;
pub mod kv;
pub mod matmul;
pub mod norm;
pub mod pool;
pub mod roof;
pub mod rope;
mod simd;
