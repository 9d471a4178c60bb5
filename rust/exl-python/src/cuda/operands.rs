//! Dtypes of operands of quantized matmuls on a GPU.

use exl_cuda::ops::linear::Half;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::tensor::{DType, Tensor};

/// The activation type of `tensor`, named `what` in errors.
pub fn kind(tensor: &Tensor, what: &str) -> PyResult<Half> {
    match tensor.dtype {
        DType::F16 => Ok(Half::F16),
        DType::BF16 => Ok(Half::BF16),
        DType::F32 => Ok(Half::F32),
        other => Err(PyTypeError::new_err(format!("{what}: dtype {other:?}"))),
    }
}
