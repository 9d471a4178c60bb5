//! Rotation of queries and keys and storing of keys and values, in one launch.

use super::kv::Pages;
use super::rope::Rope;
use super::{Element, Target, index32};
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};

/// Heads that a block takes, as in the kernel.
const WARPS: usize = 4;

/// `struct Rotation` of `kernels/rope_store.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RotationArgument {
    cos: usize,
    sin: usize,
    positions: usize,
    rotated: i32,
    table_rows: i32,
    interleaved: i32,
}

fn name(element: Element) -> String {
    format!("rope_store_{}", element.suffix())
}

pub(super) fn kernels() -> Vec<String> {
    Element::ALL.map(name).to_vec()
}

/// Rotates q (the operand `x` of `q`) and k `[tokens, pages.heads, head_dim]` in place and encodes k and v into `slots`: what
/// [`super::rope::apply`] twice and [`super::kv::transfer`] do, to the same bits.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn rope_store(
    to: Target,
    q: &Rope,
    pages: &Pages,
    k: usize,
    v: usize,
    slots: usize,
) -> Result<(), CudaError> {
    if q.tokens == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let rotation = RotationArgument {
        cos: q.cos,
        sin: q.sin,
        positions: q.positions,
        rotated: index32("rotated dimensions", q.rotated)?,
        table_rows: index32("table rows", q.table_rows)?,
        interleaved: i32::from(q.interleaved),
    };
    let kernel = name(q.element);
    let launch = Launch {
        kernel: &kernel,
        grid: [
            index32("tokens", q.tokens)? as u32,
            (q.heads + 2 * pages.heads).div_ceil(WARPS) as u32,
            1,
        ],
        block: 32 * WARPS as u32,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let (pages, heads) = (pages.argument()?, index32("heads", q.heads)?);
    let mut arguments = kernel_arguments![pages, rotation, q.x, k, v, slots, heads];
    // SAFETY: the order is that of `rope_store_kernel`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}
