//! The border between Python and the Rust crates: checks arguments, releases the GIL, maps errors. No arithmetic lives here.

use pyo3::prelude::*;

mod activation;
mod attention;
mod block;
mod cuda;
mod cuda_attention;
mod cuda_fused;
mod cuda_matrix;
mod cuda_operands;
mod cuda_ring;
mod cuda_sampling;
mod cuda_select;
mod errors;
mod format;
mod kv;
mod linear;
mod matrix_parts;
mod norm;
mod rope;
mod sampling;
mod tensor;
mod threads;

/// `exl_kernels._native`: private to the `exl_kernels` package.
#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    format::register(m)?;
    threads::register(m)?;
    linear::register(m)?;
    norm::register(m)?;
    rope::register(m)?;
    activation::register(m)?;
    kv::register(m)?;
    attention::register(m)?;
    block::register(m)?;
    sampling::register(m)?;
    cuda::register(m)?;
    cuda_matrix::register(m)?;
    cuda_ring::register(m)?;
    cuda_sampling::register(m)?;
    cuda_select::register(m)?;
    cuda_attention::register(m)?;
    cuda_fused::register(m)?;
    Ok(())
}
