//! The end of one sub-layer and the beginning of the next: x = x + y, out = rms_norm(x).

use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::{Element, Target, index32};

/// Operands of [`add_rms_norm`]: device addresses of `[rows, width]` of `element`, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct AddNorm {
    /// rewritten
    pub x: usize,
    pub y: usize,
    /// `[width]` FP32
    pub weight: usize,
    pub output: usize,
    pub element: Element,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
    pub weight_offset: f32,
}

fn name(element: Element) -> String {
    format!("add_rms_norm_{}", element.suffix())
}

pub(in crate::ops) fn kernels() -> Vec<String> {
    Element::ALL.map(name).to_vec()
}

/// x + y rounded to its type, then the norm of that, as [`super::norm::norm`] computes it.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn add_rms_norm(to: Target, op: &AddNorm) -> Result<(), CudaError> {
    if op.rows == 0 || op.width == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let kernel = name(op.element);
    let launch = Launch {
        kernel: &kernel,
        grid: [index32("rows", op.rows)? as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let width = index32("width", op.width)?;
    let mut arguments = kernel_arguments![
        op.x,
        op.y,
        op.weight,
        op.output,
        width,
        op.eps,
        op.weight_offset
    ];
    // SAFETY: the order is that of `add_rms_norm_kernel`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}
