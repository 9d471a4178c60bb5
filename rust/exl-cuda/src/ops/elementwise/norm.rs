//! RMSNorm and LayerNorm over the last dimension.

use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::elementwise::residual::MOST_PACKED_WIDTH;
use crate::ops::linear::PackedInput;
use crate::ops::{Element, Target, index32};
use crate::rows::FEW_ROWS;

/// The kind of norm, with its specific parameters.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// out = x / sqrt(mean(x^2) + eps) * (weight + offset)
    Rms { weight_offset: f32 },
    /// out = (x - mean) / sqrt(var + eps) * weight + bias; the bias has the form of the weight, or address 0 for none
    Layer { bias: usize },
}

/// Operands of [`norm`]: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[rows, width]` of `element`
    pub input: usize,
    pub element: Element,
    /// `[heads, width]` of `weight_element`; row `r` of the input uses weight row `r % heads`
    pub weight: usize,
    pub weight_element: Element,
    pub heads: usize,
    /// `[rows, width]` of `element`; may be the input
    pub output: usize,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
    pub kind: Kind,
}

fn name(prefix: &str, element: Element, weight: Element) -> String {
    format!("{prefix}_norm_{}_{}", element.suffix(), weight.suffix())
}

pub(in crate::ops) fn kernels() -> Vec<String> {
    let mut all = Vec::new();
    for element in Element::ALL {
        for weight in Element::ALL {
            all.extend([name("rms", element, weight), name("layer", element, weight)]);
        }
    }
    all.extend([PackedKernel::Few, PackedKernel::Batch].map(|kernel| kernel.name().to_owned()));
    all.push("rms_norm_parts".to_owned());
    all
}

/// Kernels of [`layer_norm_packed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PackedKernel {
    /// Packs for `gemm_few` and `gemm_direct`.
    Few,
    /// Packs for `gemm_batch`.
    Batch,
}

impl PackedKernel {
    const fn name(self) -> &'static str {
        match self {
            Self::Few => "layer_norm_packed",
            Self::Batch => "layer_norm_packed_for_batch",
        }
    }

    /// The kernel for an input of so many columns, on any card.
    const fn select(columns: usize) -> Self {
        if columns == FEW_ROWS {
            Self::Few
        } else {
            Self::Batch
        }
    }
}

/// Operands of [`layer_norm_packed`]: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct PackedNorm {
    /// `[rows, width]` F16, at most as many rows as columns, of at most [`MOST_PACKED_WIDTH`] elements
    pub input: usize,
    /// `[width]` FP32; the bias may be 0 for none
    pub weight: usize,
    pub bias: usize,
    pub output: usize,
    pub packed: PackedInput,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
}

/// LayerNorm as [`norm`] computes it, packed as the input of a matmul.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn layer_norm_packed(to: Target, op: &PackedNorm) -> Result<(), CudaError> {
    if op.rows > op.packed.columns || op.width > MOST_PACKED_WIDTH {
        return Err(CudaError::Argument {
            what: format!("{} packed rows of {} elements", op.rows, op.width),
            limit: format!("{} rows of {MOST_PACKED_WIDTH}", op.packed.columns),
        });
    }
    let device = Device::get(to.device)?;
    let (rows, width) = (index32("rows", op.rows)?, index32("width", op.width)?);
    let columns = index32("columns", op.packed.columns)?;
    let kernel = PackedKernel::select(op.packed.columns);
    let launch = Launch {
        kernel: kernel.name(),
        grid: [columns as u32, 1, 1],
        block: 256,
        shared_bytes: 2 * op.width as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    if kernel == PackedKernel::Few {
        let mut arguments = kernel_arguments![
            op.input,
            op.weight,
            op.bias,
            width,
            op.eps,
            op.output,
            op.packed.features,
            op.packed.units,
            op.packed.rows,
            rows
        ];
        // SAFETY: the order is that of `layer_norm_packed`; the caller guarantees that the addresses are valid.
        return unsafe { launch.run(device, &mut arguments) };
    }
    let mut arguments = kernel_arguments![
        op.input,
        op.weight,
        op.bias,
        width,
        op.eps,
        op.output,
        op.packed.features,
        op.packed.units,
        op.packed.rows,
        rows,
        columns
    ];
    // SAFETY: the order is that of `layer_norm_packed_for_batch`; the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// Operands of [`norm_parts`]: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct PartNorms {
    /// `[rows, stride]` F16; a row begins with the two parts, which are rewritten.
    pub x: usize,
    pub stride: usize,
    /// `[width]` FP32 of each part.
    pub weights: [usize; 2],
    pub widths: [usize; 2],
    pub rows: usize,
    pub eps: f32,
}

/// The RMS norms of two parts of each row, each as [`norm`] computes it.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn norm_parts(to: Target, op: &PartNorms) -> Result<(), CudaError> {
    if op.rows == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let rows = index32("rows", op.rows)?;
    let (first, second) = (
        index32("width", op.widths[0])?,
        index32("width", op.widths[1])?,
    );
    let stride = index32("stride", op.stride)?;
    let launch = Launch {
        kernel: "rms_norm_parts",
        grid: [rows as u32, 2, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![
        op.x,
        op.weights[0],
        op.weights[1],
        first,
        second,
        stride,
        op.eps
    ];
    // SAFETY: the order is that of `rms_norm_parts`; the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// Normalize every row in FP32 and round once.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn norm(to: Target, op: &Norm) -> Result<(), CudaError> {
    if op.rows == 0 || op.width == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let (rows, width, heads) = (
        index32("rows", op.rows)?,
        index32("width", op.width)?,
        index32("heads", op.heads)?,
    );
    let prefix = if matches!(op.kind, Kind::Rms { .. }) {
        "rms"
    } else {
        "layer"
    };
    let kernel = name(prefix, op.element, op.weight_element);
    let launch = Launch {
        kernel: &kernel,
        grid: [rows as u32, 1, 1],
        // One shape for any number of rows: a row's sum is always added in the same order.
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    match op.kind {
        Kind::Rms { weight_offset } => {
            let mut arguments = kernel_arguments![
                op.input,
                op.weight,
                op.output,
                width,
                heads,
                op.eps,
                weight_offset
            ];
            // SAFETY: the order is that of `rms_norm_kernel`; the caller guarantees that the addresses are valid.
            unsafe { launch.run(device, &mut arguments) }
        }
        Kind::Layer { bias } => {
            let mut arguments =
                kernel_arguments![op.input, op.weight, bias, op.output, width, heads, op.eps];
            // SAFETY: the order is that of `layer_norm_kernel`; the caller guarantees that the addresses are valid.
            unsafe { launch.run(device, &mut arguments) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::ORDERED_COLUMNS;

    #[test]
    fn inputs_of_eight_columns_are_packed_for_few_rows() {
        let found = ORDERED_COLUMNS.map(|columns| (columns, PackedKernel::select(columns)));
        for (columns, kernel) in found {
            assert_eq!(
                kernel == PackedKernel::Few,
                columns == FEW_ROWS,
                "{columns}"
            );
            assert!(kernels().contains(&kernel.name().to_owned()));
        }
    }
}
