//! Bindings of float matrices on a GPU.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_cuda::Device;
use exl_cuda::ops::linear::Half;
use exl_cuda::ops::linear::float::{self, FloatMatrix, Matmul};
use pyo3::prelude::*;

use super::{expect, target};
use crate::errors::device_error;
use crate::operands::Launch;
use crate::tensor::{DType, Tensor};

/// A float matrix on a GPU: y = (x @ weight^T * scale + bias) * prescale.
#[pyclass(frozen, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct CudaFloat {
    weight: Tensor,
    bias: Option<Tensor>,
    pub matrix: FloatMatrix,
}

#[pymethods]
impl CudaFloat {
    /// weight: float16 [out, in]; bias: float32 [out].
    #[new]
    #[pyo3(signature = (weight, bias, *, scale, prescale))]
    fn new(weight: Tensor, bias: Option<Tensor>, scale: f32, prescale: f32) -> PyResult<Self> {
        expect(
            weight.dtype == DType::F16 && weight.shape.len() == 2 && weight.numel() > 0,
            "weight must be float16 [out, in]",
        )?;
        let (out_features, in_features) = (weight.shape[0], weight.shape[1]);
        if let Some(bias) = &bias {
            expect(
                bias.dtype == DType::F32 && bias.shape == [out_features],
                "bias must be float32 [out]",
            )?;
        }
        let matrix = FloatMatrix {
            weight: weight.ptr,
            bias: bias.as_ref().map_or(0, |bias| bias.ptr),
            in_features,
            out_features,
            scale,
            prescale,
        };
        Ok(Self {
            weight,
            bias,
            matrix,
        })
    }

    /// Bytes of scratch memory of a call with x.
    fn scratch_bytes(&self, py: Python<'_>, x: Tensor) -> PyResult<usize> {
        self.scratch_of(py, &x)
    }

    /// Multiply x [m, in] float16 into out [m, out] float16, bfloat16 or float32. A row's result does not depend on the other rows.
    ///
    /// multipliers: float32 [m], by which sums are multiplied before the bias is added. scratch: uint8 of `scratch_bytes`, if there are any.
    #[pyo3(signature = (x, out, launch, *, multipliers=None, scratch=None))]
    fn matmul(
        &self,
        py: Python<'_>,
        x: Tensor,
        out: Tensor,
        launch: &Launch,
        multipliers: Option<Tensor>,
        scratch: Option<Tensor>,
    ) -> PyResult<()> {
        let FloatMatrix {
            in_features,
            out_features,
            ..
        } = self.matrix;
        let m = x.numel() / in_features;
        expect(
            x.dtype == DType::F16 && x.numel() == m * in_features,
            "x must be float16 [m, in]",
        )?;
        let y_type = match out.dtype {
            DType::F16 => Some(Half::F16),
            DType::BF16 => Some(Half::BF16),
            DType::F32 => Some(Half::F32),
            _ => None,
        };
        let y_type = y_type.filter(|_| out.numel() == m * out_features);
        expect(
            y_type.is_some(),
            "out must be float16, bfloat16 or float32 [m, out]",
        )?;
        expect(
            multipliers
                .as_ref()
                .is_none_or(|given| given.dtype == DType::F32 && given.numel() == m),
            "multipliers must be float32 [m]",
        )?;
        let needed = self.scratch_of(py, &x)?;
        let enough = |given: &Tensor| {
            given.numel() * given.dtype.size() >= needed && given.ptr.is_multiple_of(16)
        };
        expect(
            scratch.as_ref().map_or(needed == 0, enough),
            "scratch must have the stated size, aligned to 16 bytes",
        )?;
        let mut all = vec![("x", &x), ("out", &out), ("weight", &self.weight)];
        let others = [
            ("bias", &self.bias),
            ("multipliers", &multipliers),
            ("scratch", &scratch),
        ];
        all.extend(
            others
                .iter()
                .filter_map(|(name, given)| Some((*name, given.as_ref()?))),
        );
        let to = target(&all, launch)?;
        let op = Matmul {
            x: x.ptr,
            multipliers: multipliers.as_ref().map_or(0, |given| given.ptr),
            y: out.ptr,
            y_type: y_type.unwrap_or(Half::F16),
            m,
            scratch: scratch.as_ref().map_or(0, |given| given.ptr),
        };
        // SAFETY: torch owns the memory and keeps freed blocks for work queued on their stream; sizes were checked.
        py.detach(|| unsafe { float::matmul(to, &self.matrix, &op) })
            .map_err(|error| device_error(py, &error))
    }
}

impl CudaFloat {
    /// The GPU of the weights, or None.
    pub fn device(&self) -> Option<u32> {
        self.weight.cuda
    }

    fn scratch_of(&self, py: Python<'_>, x: &Tensor) -> PyResult<usize> {
        let device = Device::get(x.cuda.unwrap_or_default()).map_err(|e| device_error(py, &e))?;
        let rows = x.numel() / self.matrix.in_features;
        let caps = &device.info.caps;
        Ok(float::scratch_bytes(caps, &self.matrix, rows, x.ptr))
    }
}
