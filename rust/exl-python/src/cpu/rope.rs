//! Bindings of the `rope` subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::rope::{Tables, apply};
use pyo3::prelude::*;

use crate::errors::shape_error;
use crate::tensor::{Tensor, same_shape};

/// Rotate x [T, H, D] in place; cos, sin [S, R/2].
#[pyfunction]
#[pyo3(signature = (x, *, cos, sin, positions, interleaved))]
pub fn apply_rope(
    py: Python<'_>,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> PyResult<()> {
    let (&[_, heads, dim], &[_, half]) = (&x.shape[..], &cos.shape[..]) else {
        return Err(shape_error(
            py,
            "apply_rope: x must be [T, H, D], cos [S, R/2]".into(),
        ));
    };
    same_shape("sin", &sin, &cos.shape)?;
    same_shape("positions", &positions, &x.shape[..1])?;
    let tables = Tables {
        cos: cos.slice("cos")?,
        sin: sin.slice("sin")?,
        half,
        interleaved,
    };
    let (x, positions) = (x.slice_mut("x")?, positions.slice("positions")?);
    py.detach(|| apply(x, heads, dim, tables, positions))
        .map_err(|error| shape_error(py, format!("apply_rope: {error}")))
}
