//! Rotary position embedding, in place.

use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::{Element, Target, index32};
use crate::parameters::kernels;

/// Operands of [`apply`]: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// `[tokens, heads, head_dim]` of `element`, rewritten
    pub x: usize,
    pub element: Element,
    /// `[table_rows, rotated / 2]` FP32 each
    pub cos: usize,
    pub sin: usize,
    /// `[tokens]` int64; a token at a position outside the table is not changed
    pub positions: usize,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rotated: usize,
    pub table_rows: usize,
    pub interleaved: bool,
}

fn name(element: Element) -> String {
    format!("rope_{}", element.suffix())
}

pub(in crate::ops) fn kernels() -> Vec<String> {
    Element::ALL.map(name).to_vec()
}

/// Rotate the first `rotated` dimensions of every head by its token's angle.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn apply(to: Target, op: &Rope) -> Result<(), CudaError> {
    let pairs = op.heads * (op.rotated / 2);
    if op.tokens == 0 || pairs == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let mut arguments = kernels::Rope {
        x: op.x,
        cos: op.cos,
        sin: op.sin,
        positions: op.positions,
        heads: index32("heads", op.heads)?,
        head_dim: index32("head_dim", op.head_dim)?,
        rotated: index32("rotated dimensions", op.rotated)?,
        table_rows: index32("table rows", op.table_rows)?,
        interleaved: i32::from(op.interleaved),
    };
    index32("values per token", op.heads * op.head_dim)?;
    let kernel = name(op.element);
    let launch = Launch {
        kernel: &kernel,
        grid: [index32("tokens", op.tokens)? as u32, 1, 1],
        block: 256.min((pairs as u32).next_multiple_of(32)),
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
