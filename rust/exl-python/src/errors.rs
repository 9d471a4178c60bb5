//! The exceptions of `exl_kernels.errors`.

use std::fmt::Display;

use exl_cuda::CudaError;
use pyo3::prelude::*;

/// `exl_kernels.errors.<class>` with this text, or the error that making it raised.
fn raised(py: Python<'_>, class: &str, text: String) -> PyErr {
    let made = py
        .import("exl_kernels.errors")
        .and_then(|module| module.getattr(class)?.call1((text,)));
    match made {
        Ok(instance) => PyErr::from_value(instance),
        Err(broken) => broken,
    }
}

pub fn format_error(py: Python<'_>, error: &dyn Display) -> PyErr {
    raised(py, "FormatError", error.to_string())
}

pub fn shape_error(py: Python<'_>, text: String) -> PyErr {
    raised(py, "ShapeError", text)
}

pub fn unsupported_error(py: Python<'_>, text: String) -> PyErr {
    raised(py, "UnsupportedError", text)
}

pub fn device_error(py: Python<'_>, error: &CudaError) -> PyErr {
    raised(py, "DeviceError", error.to_string())
}
