//! Checked launches, one file a subject. A door takes addresses and sizes and never reads device memory.

pub mod attention;
pub mod batch;
pub mod elementwise;
pub mod embedding;
pub mod few;
pub mod kv;
pub mod linear;
pub mod norm;
pub mod probe;
pub mod residual;
pub mod ring;
pub mod rope;
pub mod rope_store;
pub mod sampling;
pub mod select;

use crate::launch::CudaError;

/// Element type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F16,
    BF16,
    F32,
}

impl Element {
    pub const ALL: [Self; 3] = [Self::F16, Self::BF16, Self::F32];

    /// As the kernels' names say it.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// Where a launch goes: GPU index, its stream, and whether to ask for programmatic dependent launch.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub device: u32,
    pub stream: usize,
    pub programmatic: bool,
}

/// Kernels to resolve in the image of `file`; the names are the doors' own.
pub(crate) fn kernels_of(file: &str) -> Vec<String> {
    match file {
        "probe" => probe::kernels(),
        "norm" => norm::kernels(),
        "residual" => residual::kernels(),
        "rope" => rope::kernels(),
        "rope_store" => rope_store::kernels(),
        "embedding" => embedding::kernels(),
        "elementwise" => elementwise::kernels(),
        "kv" => kv::kernels(),
        "sampling" => sampling::kernels(),
        _ if file.starts_with("attention_") => attention::kernels(file),
        _ => linear::kernels(file),
    }
}

pub(crate) fn index32(what: &str, value: usize) -> Result<i32, CudaError> {
    i32::try_from(value).map_err(|_| CudaError::Argument {
        what: format!("{what} = {value}"),
        limit: format!("at most {}", i32::MAX),
    })
}
