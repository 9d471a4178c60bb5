//! Bindings of the CPU operators, one file a subject.

pub mod activation;
pub mod attention;
pub mod block;
pub mod kv;
pub mod linear;
pub mod moe;
pub mod norm;
pub mod rope;
pub mod sampling;
pub mod threads;
