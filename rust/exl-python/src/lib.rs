//! The border between Python and the Rust crates: checks arguments, releases the GIL, maps errors. No arithmetic lives here.

use pyo3::prelude::*;

mod tensor;

/// `exl_kernels._native`: private to the `exl_kernels` package.
#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}
