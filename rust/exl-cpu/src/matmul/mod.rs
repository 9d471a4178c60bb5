//! Quantized matmuls: EXL2, GPTQ and float weights, for one row or many.
//!
//! A matrix is repacked once into tiles ([`layout`]) and kept in as many bits as its file has. A row's result depends only on that row: not
//! on the other rows of the call, the number of threads, or the instruction set.

mod activations;
mod decode;
mod exact;
mod int8;
mod kernels;
pub mod layout;
mod matrix;
mod memory;
mod multiply;
mod repack;
mod simd;
mod slice;

pub use matrix::{Compute, QuantMatrix};
pub(crate) use memory::Shared;
pub use multiply::matmul_together;
pub(crate) use multiply::{Group, Operation, multiply};
pub use repack::Epilogue;
