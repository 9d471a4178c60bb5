//! Rows of the embedding table.

use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::{Element, Target, index32};
use crate::parameters::kernels;

/// Operands of [`embed`]: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// `[rows, width]` of `element`
    pub table: usize,
    pub element: Element,
    pub rows: usize,
    pub width: usize,
    /// `[tokens]` int64; an id outside the table reads the nearest row
    pub ids: usize,
    pub tokens: usize,
    /// `[tokens, width]` of `output_element`, F16 or F32
    pub output: usize,
    pub output_element: Element,
    pub factor: f32,
}

fn name(element: Element, output: Element) -> String {
    format!("embed_{}_{}", element.suffix(), output.suffix())
}

pub(in crate::ops) fn kernels() -> Vec<String> {
    let outputs = |element| [Element::F16, Element::F32].map(|output| name(element, output));
    Element::ALL.into_iter().flat_map(outputs).collect()
}

/// output = table[ids] * factor, multiplied in FP32 and rounded once.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn embed(to: Target, op: &Embed) -> Result<(), CudaError> {
    if op.tokens == 0 || op.width == 0 || op.rows == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let kernel = name(op.element, op.output_element);
    let launch = Launch {
        kernel: &kernel,
        grid: [index32("tokens", op.tokens)? as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::Embed {
        table: op.table,
        ids: op.ids,
        out: op.output,
        width: index32("width", op.width)?,
        rows: op.rows as i64,
        factor: op.factor,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
