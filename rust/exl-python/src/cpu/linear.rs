//! Bindings of the `linear` subject: repacked matrices and their matmuls.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use std::ops::Range;
use std::sync::Arc;

use exl_cpu::matmul::layout::QUARTERS;
use exl_cpu::matmul::{Compute, Epilogue, QuantMatrix};
use exl_format::exl2::Exl2View;
use half::{bf16, f16};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::format_error;
use crate::matrix_parts::{Exl2Parts, GptqFormat, GptqParts, two};
use crate::tensor::{DType, Tensor};

fn epilogue(bias: Option<&Tensor>, prescale: f32) -> PyResult<Epilogue> {
    let bias = bias.map(|t| Ok::<_, PyErr>(t.slice::<f32>("bias")?.to_vec()));
    Ok(Epilogue {
        bias: bias.transpose()?,
        prescale,
    })
}

fn quarters(first: usize, last: usize) -> PyResult<Range<usize>> {
    if first >= last || last > QUARTERS {
        return Err(PyValueError::new_err(format!(
            "quarters [{first}, {last}) of K; expected a range within 0 to {QUARTERS} that is not empty"
        )));
    }
    Ok(first..last)
}

fn compute(exact: bool) -> Compute {
    if exact { Compute::Exact } else { Compute::Int8 }
}

/// A matrix in the kernels' layout.
#[pyclass(frozen, name = "Matrix", module = "exl_kernels._native")]
pub struct Matrix {
    pub inner: Arc<QuantMatrix>,
}

#[pymethods]
impl Matrix {
    #[staticmethod]
    #[pyo3(signature = (name, parts, *, bias, prescale, exact))]
    fn from_exl2(
        py: Python<'_>,
        name: &str,
        parts: Exl2Parts,
        bias: Option<Tensor>,
        prescale: f32,
        exact: bool,
    ) -> PyResult<Self> {
        let tensors = parts.tensors()?;
        let epilogue = epilogue(bias.as_ref(), prescale)?;
        let view = Exl2View::new(name, tensors).map_err(|e| format_error(py, &e))?;
        let inner = py.detach(|| QuantMatrix::from_exl2(&view, epilogue, compute(exact)));
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    #[staticmethod]
    #[pyo3(signature = (name, parts, format, *, bias, prescale, exact))]
    fn from_gptq(
        py: Python<'_>,
        name: &str,
        parts: GptqParts,
        format: GptqFormat,
        bias: Option<Tensor>,
        prescale: f32,
        exact: bool,
    ) -> PyResult<Self> {
        let tensors = parts.tensors()?;
        let epilogue = epilogue(bias.as_ref(), prescale)?;
        let view = format
            .view(name, tensors)
            .map_err(|e| format_error(py, &e))?;
        let zeros = format.zeros();
        let inner = py.detach(|| QuantMatrix::from_gptq(&view, zeros, epilogue, compute(exact)));
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// `weight` [out, in].
    #[staticmethod]
    fn from_float(
        py: Python<'_>,
        weight: Tensor,
        bias: Option<Tensor>,
        prescale: f32,
    ) -> PyResult<Self> {
        let epilogue = epilogue(bias.as_ref(), prescale)?;
        let k = two(&weight, "weight")?[1];
        let inner = match weight.dtype {
            DType::F32 => {
                let data = weight.slice::<f32>("weight")?;
                py.detach(|| QuantMatrix::from_f32(data, k, epilogue))
            }
            DType::F16 => {
                let data = weight.slice::<f16>("weight")?;
                py.detach(|| QuantMatrix::from_f16(data, k, epilogue))
            }
            _ => {
                let data = weight.slice::<bf16>("weight")?;
                py.detach(|| QuantMatrix::from_bf16(data, k, epilogue))
            }
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    #[getter]
    fn in_features(&self) -> usize {
        self.inner.in_features()
    }

    #[getter]
    fn out_features(&self) -> usize {
        self.inner.out_features()
    }

    #[getter]
    fn bits_per_weight(&self) -> f64 {
        self.inner.bits_per_weight()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.inner.bytes()
    }

    /// Multiply `x` [.., K] with the matrix into `out` [.., N]; both float32. Raises ValueError if the lengths do not fit.
    fn matmul(&self, py: Python<'_>, x: Tensor, out: Tensor) -> PyResult<()> {
        let (k, n) = (self.inner.in_features(), self.inner.out_features());
        let (x, out) = (x.slice::<f32>("x")?, out.slice_mut::<f32>("out")?);
        let rows = x.len() / k;
        if x.len() != rows * k || out.len() != rows * n {
            return Err(PyValueError::new_err(format!(
                "x holds {} values and out {}; expected rows * {k} and rows * {n}",
                x.len(),
                out.len()
            )));
        }
        py.detach(|| self.inner.matmul(x, rows, out));
        Ok(())
    }

    /// The input features of quarters [first, last) of K, in the order in which `quarters` takes them.
    fn quarter_features(&self, first: usize, last: usize) -> PyResult<Vec<u32>> {
        Ok(self.inner.quarter_features(quarters(first, last)?))
    }

    /// The rows of quarters [first, last) of K, without bias and prescale. Raises ValueError if they have no rows.
    fn quarters(&self, py: Python<'_>, first: usize, last: usize) -> PyResult<Self> {
        let quarters = quarters(first, last)?;
        if self.inner.quarter_features(quarters.clone()).is_empty() {
            return Err(PyValueError::new_err("these quarters have no rows"));
        }
        let inner = py.detach(|| self.inner.quarters(quarters));
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The given columns, in this order. Raises ValueError for columns that the matrix does not have.
    fn columns(&self, py: Python<'_>, columns: Vec<u32>) -> PyResult<Self> {
        let n = self.inner.out_features();
        if columns.is_empty() || columns.iter().any(|&column| column as usize >= n) {
            return Err(PyValueError::new_err(format!(
                "columns must name at least one of the {n} columns, and no others"
            )));
        }
        let inner = py.detach(|| self.inner.columns(&columns));
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Write W [K, N] float16 into `out`.
    fn dequantize(&self, py: Python<'_>, out: Tensor) -> PyResult<()> {
        let expected = self.inner.in_features() * self.inner.out_features();
        let out = out.slice_mut::<f16>("out")?;
        if out.len() != expected {
            return Err(PyValueError::new_err(format!(
                "out must hold {expected} values"
            )));
        }
        py.detach(|| self.inner.dequantize_into(out));
        Ok(())
    }
}
