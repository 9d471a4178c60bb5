//! The end of one sub-layer and the beginning of the next: x = x + y, out = rms_norm(x).

use super::select::{Call, Kernel, check_packed, packing_threads, select};
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::linear::PackedInput;
use crate::ops::{Element, Target, index32};
use crate::parameters::kernels;

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

pub(in crate::ops) fn kernels() -> Vec<String> {
    Kernel::all(true).into_iter().map(Kernel::name).collect()
}

impl PostNorm {
    const fn addresses(&self) -> [usize; 5] {
        [
            self.x,
            self.y,
            self.post.weight,
            self.norm.weight,
            self.output,
        ]
    }

    fn call(&self) -> Call {
        Call::AddPost {
            element: self.element,
            width: self.width,
            columns: self.packed.map(|(_, input)| input.columns),
            aligned: self.addresses().iter().all(|at| at.is_multiple_of(16)),
        }
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
    /// The normed rows go here, at most as many as columns, of at most [`super::select::MOST_PACKED_WIDTH`] elements, a multiple of 8.
    /// All operands are then aligned to 16 bytes.
    pub packed: Option<(usize, PackedInput)>,
    pub rows: usize,
    pub width: usize,
}

/// x + post(y) in the type of x, then its norm as halves: each as [`super::norm::norm`] computes it.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn add_post_norm(to: Target, op: &PostNorm) -> Result<(), CudaError> {
    if op.rows == 0 || op.width == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let (kernel, _) = select(&op.call());
    let rows = index32("rows", op.rows)?;
    let blocks = op.packed.map_or(op.rows, |(_, input)| input.columns);
    let launch = Launch {
        kernel: &kernel.name(),
        grid: [index32("blocks", blocks)? as u32, 1, 1],
        block: op.packed.map_or(256, |_| packing_threads(op.width)),
        shared_bytes: op.packed.map_or(0, |_| 2 * op.width as u32),
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let width = index32("width", op.width)?;
    if let Some((scratch, input)) = op.packed {
        check_packed(op.rows, op.width, input.columns, &op.addresses())?;
        let columns = index32("columns", input.columns)?;
        let mut arguments = kernels::AddPostNormPacked {
            x: op.x,
            y: op.y,
            post: op.post.weight,
            post_eps: op.post.eps,
            post_offset: op.post.weight_offset,
            weight: op.norm.weight,
            eps: op.norm.eps,
            offset: op.norm.weight_offset,
            width,
            out: scratch,
            features: input.features,
            units: input.units,
            rows: input.rows,
            m: rows,
            columns,
        };
        // SAFETY: the caller guarantees that the addresses are valid.
        return unsafe { launch.run(device, &mut arguments) };
    }
    let mut arguments = kernels::Add {
        x: op.x,
        y: op.y,
        post: op.post.weight,
        post_eps: op.post.eps,
        post_offset: op.post.weight_offset,
        weight: op.norm.weight,
        eps: op.norm.eps,
        offset: op.norm.weight_offset,
        out: op.output,
        width,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
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
    let (kernel, _) = select(&Call::AddRms {
        element: op.element,
    });
    let launch = Launch {
        kernel: &kernel.name(),
        grid: [index32("rows", op.rows)? as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let width = index32("width", op.width)?;
    let mut arguments = kernels::AddRmsNorm {
        x: op.x,
        y: op.y,
        weight: op.weight,
        out: op.output,
        width,
        eps: op.eps,
        offset: op.weight_offset,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}
