//! The end of one sub-layer and the beginning of the next: x = x + y, out = rms_norm(x).

use crate::abi::assert_constants;
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::linear::PackedInput;
use crate::ops::{Element, Target, index32};
use crate::rows::FEW_ROWS;

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
    let post = [Element::F16, Element::F32]
        .into_iter()
        .flat_map(|element| {
            [[false, false], [false, true], [true, false], [true, true]]
                .map(|[short, packed]| post_name(element, short, packed))
        });
    Element::ALL.map(name).into_iter().chain(post).collect()
}

fn post_name(element: Element, short: bool, packed: bool) -> String {
    let short = if short { "short_" } else { "" };
    let packed = if packed { "packed_" } else { "" };
    format!("add_{short}post_norm_{packed}{}", element.suffix())
}

/// Longest row that the threads of a block hold in few registers.
const SHORT_WIDTH: usize = SHORT * 8 * 256;
const SHORT: usize = 2;

assert_constants!(residual, { SHORT == SHORT });

impl PostNorm {
    /// Whether rows are short, and all addresses and rows aligned.
    fn is_short(&self) -> bool {
        let addresses = [
            self.x,
            self.y,
            self.post.weight,
            self.norm.weight,
            self.output,
        ];
        self.width <= SHORT_WIDTH
            && self.width.is_multiple_of(8)
            && addresses.iter().all(|at| at.is_multiple_of(16))
    }
}

/// An RMS norm over rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowNorm {
    /// `[width]` FP32; 0: no norm
    pub weight: usize,
    pub eps: f32,
    pub weight_offset: f32,
}

/// Operands of [`add_post_norm`]: device addresses of `[rows, width]`, contiguous.
#[derive(Clone, Copy, Debug)]
pub struct PostNorm {
    /// of `element`, F16 or F32; rewritten
    pub x: usize,
    pub element: Element,
    /// F16
    pub y: usize,
    pub post: RowNorm,
    pub norm: RowNorm,
    /// F16; 0 if there is no `norm`, or `packed`
    pub output: usize,
    /// The normed rows go here, at most [`FEW_ROWS`] of at most [`MOST_PACKED_WIDTH`] elements.
    pub packed: Option<(usize, PackedInput)>,
    pub rows: usize,
    pub width: usize,
}

/// Most elements of a packed row: halves in the shared memory that every card has, without 1 KiB for the sums.
pub const MOST_PACKED_WIDTH: usize = 47 * 1024 / 2;

/// x + post(y) in the type of x, then its norm as halves: each as [`super::norm::norm`] computes it.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn add_post_norm(to: Target, op: &PostNorm) -> Result<(), CudaError> {
    if op.rows == 0 || op.width == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let kernel = post_name(op.element, op.is_short(), op.packed.is_some());
    let rows = index32("rows", op.rows)?;
    let (blocks, shared) = match op.packed {
        None => (op.rows, 0),
        Some(_) if op.rows <= FEW_ROWS && op.width <= MOST_PACKED_WIDTH => (FEW_ROWS, 2 * op.width),
        Some(_) => {
            return Err(CudaError::Argument {
                what: format!("{} packed rows of {} elements", op.rows, op.width),
                limit: format!("{FEW_ROWS} rows of {MOST_PACKED_WIDTH}"),
            });
        }
    };
    let launch = Launch {
        kernel: &kernel,
        grid: [blocks as u32, 1, 1],
        block: 256,
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let width = index32("width", op.width)?;
    if let Some((scratch, input)) = op.packed {
        let mut arguments = kernel_arguments![
            op.x,
            op.y,
            op.post.weight,
            op.post.eps,
            op.post.weight_offset,
            op.norm.weight,
            op.norm.eps,
            op.norm.weight_offset,
            width,
            scratch,
            input.features,
            input.units,
            input.rows,
            rows
        ];
        // SAFETY: the order is that of `add_post_norm_packed` and `add_short_post_norm_packed`; the caller guarantees that the addresses are valid.
        return unsafe { launch.run(device, &mut arguments) };
    }
    let mut arguments = kernel_arguments![
        op.x,
        op.y,
        op.post.weight,
        op.post.eps,
        op.post.weight_offset,
        op.norm.weight,
        op.norm.eps,
        op.norm.weight_offset,
        op.output,
        width
    ];
    // SAFETY: the order is that of `ADD_POST_NORM` and `ADD_SHORT_POST_NORM`; the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// x + y rounded to the type of x, then its norm, as [`super::norm::norm`] computes it.
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
    // SAFETY: the order is that of `add_rms_norm_kernel`; the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
