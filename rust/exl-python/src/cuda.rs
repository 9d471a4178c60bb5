//! Bindings of the `cuda` subject.

use pyo3::prelude::*;

/// Adds this subject's functions and classes to the module.
#[allow(clippy::unnecessary_wraps)]
pub fn register(_m: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
