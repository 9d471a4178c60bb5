//! CPU kernels and their thread pool.
//!
//! All kernels give bitwise identical results for the same inputs at any thread count: work is split over outputs only, and each output is
//! reduced in one fixed order.
//!
//! The operators other than [`matmul`] take and fill slices of float32 and run on the [`pool`]. Fused layers call them: [`norm::normalize`],
//! [`rope::apply`], [`kv::store`], [`attention::paged_attention`], [`activation::activate_in_place`]. [`kv::Pages`] has the places of a
//! layer's keys and values.

pub mod activation;
pub mod attention;
pub mod block;
pub mod experts;
pub mod isa;
pub mod kv;
pub mod matmul;
pub mod norm;
pub mod pool;
pub mod roof;
pub mod rope;
pub mod sampling;
mod simd;
