//! Bindings of the `activation` subject.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cpu::activation::{Activation, activate_raw};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::tensor::{Tensor, same_shape};

/// out = activation(x) [* up]; out may be x or up.
#[pyfunction]
#[pyo3(signature = (kind, x, *, up, out))]
pub fn activate(
    py: Python<'_>,
    kind: &str,
    x: Tensor,
    up: Option<Tensor>,
    out: Tensor,
) -> PyResult<()> {
    let kind = Activation::from_name(kind)
        .ok_or_else(|| PyValueError::new_err(format!("unknown activation {kind:?}")))?;
    same_shape("out", &out, &x.shape)?;
    let from = x.slice::<f32>("x")?.as_ptr() as usize;
    let to = out.slice_mut::<f32>("out")?.as_mut_ptr() as usize;
    let factor = match &up {
        Some(up) => {
            same_shape("up", up, &x.shape)?;
            Some(up.slice::<f32>("up")?.as_ptr() as usize)
        }
        None => None,
    };
    let len = x.numel();
    py.detach(|| {
        // SAFETY: all tensors hold `len` floats; the Python side passes the same tensor or another one as output.
        unsafe {
            activate_raw(
                kind,
                from as *const f32,
                factor.map(|p| p as *const f32),
                len,
                to as *mut f32,
            );
        }
    });
    Ok(())
}
