//! RMSNorm over the last dimension.

use super::{Element, Target, index32};
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};

/// Operands of [`rms_norm`]: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
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
    pub weight_offset: f32,
}

fn name(element: Element, weight: Element) -> String {
    format!("rms_norm_{}_{}", element.suffix(), weight.suffix())
}

pub(super) fn kernels() -> Vec<String> {
    let weights = |e| Element::ALL.map(|w| name(e, w));
    Element::ALL.into_iter().flat_map(weights).collect()
}

/// out = x / sqrt(mean(x^2) + eps) * (weight + offset), in FP32, rounded once.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn rms_norm(to: Target, op: &RmsNorm) -> Result<(), CudaError> {
    if op.rows == 0 || op.width == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let (rows, width, heads) = (index32("rows", op.rows)?, index32("width", op.width)?, index32("heads", op.heads)?);
    let kernel = name(op.element, op.weight_element);
    let launch = Launch {
        kernel: &kernel,
        grid: [rows as u32, 1, 1],
        // One shape whatever the row count: a row's sum is always added in the same order.
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![op.input, op.weight, op.output, width, heads, op.eps, op.weight_offset];
    // SAFETY: the order is that of `rms_norm_kernel`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}
