//! Quantized matrices as tuples of tensors, for every subject that reads them.

use exl_format::exl2::Exl2Tensors;
use exl_format::gptq::{GptqTensors, Zeros};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::tensor::Tensor;

pub fn two(tensor: &Tensor, what: &str) -> PyResult<[usize; 2]> {
    <[usize; 2]>::try_from(&tensor.shape[..]).map_err(|_| {
        let shape = &tensor.shape;
        PyValueError::new_err(format!(
            "{what} has shape {shape:?}, expected two dimensions"
        ))
    })
}

pub fn zeros(v2: bool) -> Zeros {
    if v2 { Zeros::V2 } else { Zeros::Classic }
}

/// The tensors of an EXL2 matrix: q_weight, q_scale, q_scale_max, q_groups, q_invperm.
#[derive(FromPyObject)]
pub struct Exl2Parts(pub Tensor, pub Tensor, pub Tensor, pub Tensor, pub Tensor);

/// The tensors of a GPTQ matrix: qweight, qzeros, scales, g_idx.
#[derive(FromPyObject)]
pub struct GptqParts(pub Tensor, pub Tensor, pub Tensor, pub Option<Tensor>);

impl Exl2Parts {
    pub fn tensors(&self) -> PyResult<Exl2Tensors<'_>> {
        let Self(q_weight, q_scale, q_scale_max, q_groups, q_invperm) = self;
        Ok(Exl2Tensors {
            q_weight: q_weight.slice("q_weight")?,
            q_weight_shape: two(q_weight, "q_weight")?,
            q_scale: q_scale.slice("q_scale")?,
            q_scale_shape: two(q_scale, "q_scale")?,
            q_scale_max: q_scale_max.slice("q_scale_max")?,
            q_groups: q_groups.slice("q_groups")?,
            q_invperm: q_invperm.slice("q_invperm")?,
        })
    }
}

impl GptqParts {
    pub fn tensors(&self) -> PyResult<GptqTensors<'_>> {
        let Self(qweight, qzeros, scales, g_idx) = self;
        Ok(GptqTensors {
            qweight: qweight.slice("qweight")?,
            qweight_shape: two(qweight, "qweight")?,
            qzeros: qzeros.slice("qzeros")?,
            qzeros_shape: two(qzeros, "qzeros")?,
            scales: scales.slice("scales")?,
            scales_shape: two(scales, "scales")?,
            g_idx: g_idx.as_ref().map(|t| t.slice("g_idx")).transpose()?,
        })
    }
}
