//! Bindings of the `moe` subject: the experts of a layer.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use std::sync::Arc;

use exl_cpu::activation::Activation;
use exl_cpu::experts::{self, Choice, Expert, SharedExpert};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpu::linear::Matrix;
use crate::errors::shape_error;
use crate::tensor::Tensor;

/// The gated MLPs of a layer, among which rows choose.
#[pyclass(frozen, name = "Experts", module = "exl_kernels._native")]
pub struct Experts {
    inner: experts::Experts,
}

fn expert(parts: [Py<Matrix>; 3]) -> Expert {
    let [gate, up, down] = parts.map(|part| Arc::clone(&part.get().inner));
    Expert::new(gate, up, down)
}

#[pymethods]
impl Experts {
    /// `experts` and `shared`: gate, up and down.
    #[new]
    #[pyo3(signature = (experts, shared, activation))]
    fn new(
        py: Python<'_>,
        experts: Vec<[Py<Matrix>; 3]>,
        shared: Option<[Py<Matrix>; 3]>,
        activation: &str,
    ) -> PyResult<Self> {
        let activation = Activation::from_name(activation)
            .ok_or_else(|| PyValueError::new_err(format!("unknown activation {activation:?}")))?;
        let experts = experts.into_iter().map(expert).collect();
        let inner = experts::Experts::new(experts, shared.map(expert), activation)
            .map_err(|error| shape_error(py, error.to_string()))?;
        Ok(Self { inner })
    }

    #[getter]
    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    /// out [rows, hidden] = (out, if `add`) + sum of weights * the experts of h (+ the shared expert's result * shared_weights). All
    /// float32, `ids` int64; `ids` and `weights` [rows, chosen]. The shared expert's result is `shared` where given, else that of its own
    /// matrices. `out` does not overlap the other operands.
    #[pyo3(signature = (h, *, ids, weights, out, add=false, shared=None, shared_weights=None))]
    fn run(
        &self,
        py: Python<'_>,
        h: Tensor,
        ids: Tensor,
        weights: Tensor,
        out: Tensor,
        add: bool,
        shared: Option<Tensor>,
        shared_weights: Option<Tensor>,
    ) -> PyResult<()> {
        let shared = match &shared {
            Some(y) => SharedExpert::Given(y.slice("shared")?),
            None if self.inner.has_shared() => SharedExpert::Own,
            None => SharedExpert::Absent,
        };
        let call = Choice {
            h: h.slice("h")?,
            ids: ids.slice("ids")?,
            weights: weights.slice("weights")?,
            chosen: ids.shape.last().copied().unwrap_or(0),
            shared,
            shared_weights: shared_weights
                .as_ref()
                .map(|weights| weights.slice("shared_weights"))
                .transpose()?,
        };
        let out = out.slice_mut("out")?;
        py.detach(|| self.inner.forward(&call, out, add))
            .map_err(|error| shape_error(py, format!("experts: {error}")))
    }
}
