//! The tensors of quantized matrices, for every subject that reads or fills them.

use exl_format::FormatError;
use exl_format::exl2::Exl2Tensors;
use exl_format::gptq::{GptqTensors, GptqView, Zeros};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::by_name::read_by_name;
use crate::tensor::Tensor;

pub fn two(tensor: &Tensor, what: &str) -> PyResult<[usize; 2]> {
    <[usize; 2]>::try_from(&tensor.shape[..]).map_err(|_| {
        let shape = &tensor.shape;
        PyValueError::new_err(format!(
            "{what} has shape {shape:?}, expected two dimensions"
        ))
    })
}

read_by_name! { "exl_kernels.formats":
    #[allow(clippy::struct_field_names)] // as files name them
    /// The tensors of an EXL2 matrix.
    pub struct Exl2Parts of "Exl2Parts" {
        pub q_weight: Tensor,
        pub q_scale: Tensor,
        pub q_scale_max: Tensor,
        pub q_groups: Tensor,
        pub q_invperm: Tensor,
    }
    /// The tensors of a GPTQ matrix.
    pub struct GptqParts of "GptqParts" {
        pub qweight: Tensor,
        pub qzeros: Tensor,
        pub scales: Tensor,
        pub g_idx: Option<Tensor>,
    }
    /// The codes of an EXL2 matrix before they are packed.
    pub struct Exl2Codes of "Exl2Codes" {
        /// [K, N]
        pub codes: Tensor,
        /// [G, N]
        pub scale_codes: Tensor,
        pub q_scale_max: Tensor,
        /// (bits, rows) of each group.
        pub groups: Vec<(u32, usize)>,
    }
    /// The properties of a GPTQ matrix that its tensors do not tell.
    pub struct GptqFormat of "GptqFormat" {
        pub bits: u32,
        /// Zero points are stored as they are, not minus one.
        v2: bool,
        /// Rows of a group; None: inferred from the number of groups.
        pub group_size: Option<usize>,
    }
}

impl Exl2Parts {
    pub fn tensors(&self) -> PyResult<Exl2Tensors<'_>> {
        Ok(Exl2Tensors {
            q_weight: self.q_weight.slice("q_weight")?,
            q_weight_shape: two(&self.q_weight, "q_weight")?,
            q_scale: self.q_scale.slice("q_scale")?,
            q_scale_shape: two(&self.q_scale, "q_scale")?,
            q_scale_max: self.q_scale_max.slice("q_scale_max")?,
            q_groups: self.q_groups.slice("q_groups")?,
            q_invperm: self.q_invperm.slice("q_invperm")?,
        })
    }
}

impl GptqParts {
    pub fn tensors(&self) -> PyResult<GptqTensors<'_>> {
        Ok(GptqTensors {
            qweight: self.qweight.slice("qweight")?,
            qweight_shape: two(&self.qweight, "qweight")?,
            qzeros: self.qzeros.slice("qzeros")?,
            qzeros_shape: two(&self.qzeros, "qzeros")?,
            scales: self.scales.slice("scales")?,
            scales_shape: two(&self.scales, "scales")?,
            g_idx: self.g_idx.as_ref().map(|t| t.slice("g_idx")).transpose()?,
        })
    }
}

impl GptqFormat {
    pub fn zeros(&self) -> Zeros {
        if self.v2 { Zeros::V2 } else { Zeros::Classic }
    }

    /// The checked matrix of `tensors`.
    pub fn view<'a>(
        &self,
        name: &'a str,
        tensors: GptqTensors<'a>,
    ) -> Result<GptqView<'a>, FormatError> {
        GptqView::new(name, tensors, self.bits, self.zeros(), self.group_size)
    }
}
