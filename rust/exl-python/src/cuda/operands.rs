//! What the products of quantized matrices on a GPU check of their operands alike.

use exl_cuda::ops::linear::Half;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::cuda::expect;
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

/// Scratch memory of a product whose activations are laid out first.
pub struct Scratch {
    pub bytes: usize,
    /// Of its address.
    pub alignment: usize,
    /// Each has a multiplier.
    pub rows: usize,
}

impl Scratch {
    /// `memory` must be uint8, `multipliers` float32.
    pub fn check(&self, memory: &Tensor, multipliers: &Tensor) -> PyResult<()> {
        let fits = memory.dtype == DType::U8
            && memory.numel() >= self.bytes
            && memory.ptr.is_multiple_of(self.alignment)
            && multipliers.dtype == DType::F32
            && multipliers.numel() >= self.rows;
        expect(fits, "scratch tensors are too small")
    }
}
