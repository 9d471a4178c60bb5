//! Rotation of queries and keys and storing of keys and values in one launch.

use super::Pages;
use super::select::{Call, Kernel, select};
use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::elementwise::rope::Rope;
use crate::ops::{Target, index32};
use crate::parameters::kernels;

/// Heads of a block, as in the kernel.
const WARPS: usize = 4;
assert_constants!(rope_store, { WARPS == WARPS });

/// `struct Rotation` of `kernels/kv/rope_store.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RotationArgument {
    cos: usize,
    sin: usize,
    positions: usize,
    rotated: i32,
    table_rows: i32,
    interleaved: i32,
    q_stride: i32,
    kv_stride: i32,
}

assert_layout!(RotationArgument, rope_store::Rotation, { cos, sin, positions, rotated, table_rows, interleaved, q_stride, kv_stride });

/// Keys and values of [`rope_store`], and where they go.
#[derive(Clone, Copy, Debug)]
pub struct NewKeys {
    /// `[tokens, pages.heads, head_dim]` of the queries' type; `stride` elements between tokens
    pub key: usize,
    pub value: usize,
    pub stride: usize,
    /// `[tokens]` int64; a slot outside the pages is not stored
    pub slots: usize,
}

pub(in crate::ops) fn kernels() -> Vec<String> {
    Kernel::all().map(Kernel::name).collect()
}

fn call(q: &Rope, q_stride: usize, pages: &Pages, new: &NewKeys) -> Call {
    let aligned = [
        q.x,
        new.key,
        new.value,
        q.cos,
        q.sin,
        pages.data[0],
        pages.data[1],
        2 * q_stride,
        2 * new.stride,
    ];
    Call {
        tokens: q.tokens,
        element: q.element,
        kind: pages.kind,
        head_dim: q.head_dim,
        rotated: q.rotated,
        interleaved: q.interleaved,
        aligned: aligned.iter().all(|address| address.is_multiple_of(16)),
    }
}

/// Rotate q (the operand `x` of `q`, with `q_stride` elements between tokens) and the new keys in place, and encode keys and values into
/// their slots. Bitwise identical to [`crate::ops::elementwise::rope::apply`] for both and [`super::transfer`].
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn rope_store(
    to: Target,
    q: &Rope,
    q_stride: usize,
    pages: &Pages,
    new: &NewKeys,
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
        q_stride: index32("values per token", q_stride)?,
        kv_stride: index32("values per token", new.stride)?,
    };
    let (kernel, _) = select(&call(q, q_stride, pages, new));
    let quarters = (q.heads + 2 * pages.heads).div_ceil(WARPS) as u32;
    let launch = Launch {
        kernel: &kernel.name(),
        grid: [
            index32("tokens", q.tokens)? as u32,
            if kernel == Kernel::Many { 1 } else { quarters },
            1,
        ],
        block: 32 * WARPS as u32,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::RopeStore {
        p: pages.argument()?,
        r: rotation,
        q: q.x,
        k: new.key,
        v: new.value,
        slots: new.slots,
        q_heads: index32("heads", q.heads)?,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
