//! RMSNorm and LayerNorm over the last dimension.

use super::select::{Call, Kernel, check_packed, packing_threads, select};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::linear::PackedInput;
use crate::ops::{Element, Target, index32};
use crate::parameters::kernels;

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

pub(in crate::ops) fn kernels() -> Vec<String> {
    Kernel::all(false).into_iter().map(Kernel::name).collect()
}

/// Operands of [`layer_norm_packed`]: device addresses.
#[derive(Clone, Copy, Debug)]
pub struct PackedNorm {
    /// `[rows, width]` F16, at most as many rows as columns, of at most [`super::select::MOST_PACKED_WIDTH`] elements, a multiple of 8;
    /// aligned to 16 bytes like the weights
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
    let addresses = [op.input, op.weight, op.bias];
    check_packed(op.rows, op.width, op.packed.columns, &addresses)?;
    let device = Device::get(to.device)?;
    let (rows, width) = (index32("rows", op.rows)?, index32("width", op.width)?);
    let columns = index32("columns", op.packed.columns)?;
    let (kernel, _) = select(&Call::LayerPacked {
        columns: op.packed.columns,
    });
    let launch = Launch {
        kernel: &kernel.name(),
        grid: [columns as u32, 1, 1],
        block: packing_threads(op.width),
        shared_bytes: 2 * op.width as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::LayerNormPacked {
        x: op.input,
        weight: op.weight,
        bias: op.bias,
        width,
        eps: op.eps,
        out: op.output,
        features: op.packed.features,
        units: op.packed.units,
        rows: op.packed.rows,
        m: rows,
        columns,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
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
        kernel: &select(&Call::RmsParts).0.name(),
        grid: [rows as u32, 2, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::RmsNormParts {
        x: op.x,
        first: op.weights[0],
        second: op.weights[1],
        first_width: first,
        second_width: second,
        stride,
        eps: op.eps,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
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
    let (element, weight) = (op.element, op.weight_element);
    let (kernel, _) = select(&match op.kind {
        Kind::Rms { .. } => Call::Rms { element, weight },
        Kind::Layer { .. } => Call::Layer { element, weight },
    });
    let launch = Launch {
        kernel: &kernel.name(),
        grid: [rows as u32, 1, 1],
        // One shape for any number of rows: a row's sum is always added in the same order.
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    match op.kind {
        Kind::Rms { weight_offset } => {
            let mut arguments = kernels::RmsNorm {
                x: op.input,
                weight: op.weight,
                out: op.output,
                width,
                heads,
                eps: op.eps,
                offset: weight_offset,
            };
            // SAFETY: the caller guarantees that the addresses are valid.
            unsafe { launch.run(device, &mut arguments) }
        }
        Kind::Layer { bias } => {
            let mut arguments = kernels::LayerNorm {
                x: op.input,
                weight: op.weight,
                bias,
                out: op.output,
                width,
                heads,
                eps: op.eps,
            };
            // SAFETY: the caller guarantees that the addresses are valid.
            unsafe { launch.run(device, &mut arguments) }
        }
    }
}
