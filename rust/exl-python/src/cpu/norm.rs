//! Bindings of the `norm` subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::norm::{Norm, normalize_raw};
use pyo3::prelude::*;

use crate::tensor::{Tensor, same_shape};
use pyo3::exceptions::PyValueError;

/// Normalize x [.., D] into out (which may be x); weight float32 [D] or [H, D], the last dimensions of x's shape.
#[pyfunction]
#[pyo3(signature = (x, *, weight, offset, eps, out))]
pub fn rms_norm(
    py: Python<'_>,
    x: Tensor,
    weight: Tensor,
    offset: f32,
    eps: f32,
    out: Tensor,
) -> PyResult<()> {
    let norm = Norm::Rms {
        weight: weight.slice("weight")?,
        offset,
    };
    run(py, norm, &x, &weight, eps, &out)
}

/// Like `rms_norm`, with mean and bias.
#[pyfunction]
#[pyo3(signature = (x, *, weight, bias, eps, out))]
pub fn layer_norm(
    py: Python<'_>,
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f32,
    out: Tensor,
) -> PyResult<()> {
    let norm = Norm::Layer {
        weight: weight.slice("weight")?,
        bias: bias.as_ref().map(|b| b.slice("bias")).transpose()?,
    };
    if let Some(bias) = &bias {
        same_shape("bias", bias, &weight.shape)?;
    }
    run(py, norm, &x, &weight, eps, &out)
}

fn run(
    py: Python<'_>,
    norm: Norm<'_>,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> PyResult<()> {
    same_shape("out", out, &x.shape)?;
    if !matches!(weight.shape.len(), 1 | 2)
        || !x.shape.ends_with(&weight.shape)
        || weight.numel() == 0
    {
        return Err(PyValueError::new_err(
            "weight must be the last one or two dimensions of x",
        ));
    }
    let dim = weight.shape[weight.shape.len() - 1];
    let (from, to) = (
        x.slice::<f32>("x")?.as_ptr() as usize,
        out.slice_mut::<f32>("out")?.as_mut_ptr() as usize,
    );
    let len = x.numel();
    py.detach(|| {
        // SAFETY: both tensors hold `len` floats; the Python side passes the same tensor or another one.
        unsafe { normalize_raw(norm, from as *const f32, len, dim, eps, to as *mut f32) }
    });
    Ok(())
}
