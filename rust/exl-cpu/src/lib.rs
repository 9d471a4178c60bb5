//! CPU kernels and their thread pool.
//!
//! Every kernel gives the same bits for the same inputs at any thread count: work is split over outputs only, and each output is
//! reduced in one fixed order.
//!
//! The operators beside [`matmul`] take and fill slices of float32, run on the [`pool`] by themselves, and are what a fused layer
//! calls in turn: [`norm::normalize`], [`rope::apply`], [`kv::store`], [`attention::paged_attention`],
//! [`activation::activate_in_place`]. [`kv::Pages`] says where a layer's keys and values lie.

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
