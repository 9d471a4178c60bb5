//! A call of a quantized matmul, and why a kernel does not take it.

use super::super::lora::select::Sizes;
use super::super::{Matrix, ring};
use super::Kernel;
use crate::features::Feature;
use crate::launch::CudaError;

/// The properties of a quantized matmul call that decide its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub rows: usize,
    pub epilogue: Epilogue,
    /// The input is aligned to 16 bytes.
    pub aligned_input: bool,
    /// Results are aligned to 8 bytes, and a residual to 4.
    pub aligned_output: bool,
    /// A row's result must not depend on the number of rows; for up to [`crate::rows::PACKED_ROWS`] rows it never does.
    pub invariant: bool,
}

impl Call {
    /// A batch-invariant call with aligned operands, as torch allocates them.
    pub const fn aligned(rows: usize, epilogue: Epilogue) -> Self {
        Self {
            rows,
            epilogue,
            aligned_input: true,
            aligned_output: true,
            invariant: true,
        }
    }
}

/// The prologue and epilogue of a launch, as far as they decide which kernel fits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
// Independent properties of a call, not states of one thing.
#[allow(clippy::struct_excessive_bools)]
pub struct Epilogue {
    /// The activation of the first of two matrices gates the second.
    pub gate: bool,
    /// An activation of the results of one matrix.
    pub activation: bool,
    /// A norm of the input.
    pub norm: bool,
    /// The norm is a LayerNorm, not an RMS norm.
    pub layer: bool,
    /// A residual is added.
    pub residual: bool,
    /// Activations are BF16, which are scaled by row.
    pub bf16: bool,
    /// Sizes of the low-rank adapters of each row that are added to the results, before gate and residual.
    pub adapters: Option<Sizes>,
}

impl Epilogue {
    pub(super) fn is_some(self) -> bool {
        self.gate || self.activation || self.norm || self.residual || self.adapters.is_some()
    }
}

/// Why a kernel does not take a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{rows} rows, it takes 1 to {limit}")]
    Rows { rows: usize, limit: usize },
    #[error("it needs {}", .0.describe())]
    Needs(Feature),
    #[error("its buffers do not fit {0} bytes of shared memory a block")]
    SharedMemory(usize),
    #[error(
        "with adapters it has fewer bytes in flight, which costs more than the launches that it saves"
    )]
    Window,
    #[error("it takes {0}")]
    Matrices(&'static str),
    #[error("it takes {0}")]
    Operands(&'static str),
}

impl Refusal {
    /// The error of a launch that requested `kernel` nevertheless.
    pub(crate) fn for_kernel(self, kernel: Kernel) -> CudaError {
        CudaError::Argument {
            what: format!("{} does not take this call", kernel.name()),
            limit: self.to_string(),
        }
    }
}

/// Check that `rows` are 1 to `limit`.
pub(crate) fn check_rows(rows: usize, limit: usize) -> Result<(), Refusal> {
    if (1..=limit).contains(&rows) {
        return Ok(());
    }
    Err(Refusal::Rows { rows, limit })
}

/// Check that matrices can share a launch: a kernel takes their number, form and input size.
///
/// `gate`: the activation of the first of two matrices gates the second.
pub(in crate::ops::linear) fn check_alike(matrices: &[&Matrix], gate: bool) -> Result<(), Refusal> {
    let same = |a: &&Matrix, b: &Matrix| {
        a.kind == b.kind && a.entry_rows == b.entry_rows && a.in_features() == b.in_features()
    };
    match matrices {
        [first, ..] if matrices.len() <= ring::MATRICES => {
            let paired = || matches!(matrices, [a, b] if a.out_features() == b.out_features());
            if !matrices.iter().all(|a| same(a, first)) {
                Err(Refusal::Matrices(
                    "matrices of one format, group size and input size",
                ))
            } else if gate && !paired() {
                Err(Refusal::Matrices(
                    "a gate of two matrices of one output size",
                ))
            } else if !first.in_features().is_multiple_of(8) {
                Err(Refusal::Matrices("input sizes that are multiples of 8"))
            } else {
                Ok(())
            }
        }
        _ => Err(Refusal::Matrices("one to three matrices")),
    }
}
