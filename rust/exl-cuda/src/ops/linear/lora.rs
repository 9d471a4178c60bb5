//! Low-rank adapters: y = y + (A x) B, with a separate adapter for each row.

use crate::abi::assert_layout;
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};

/// `struct LoraEntry` of `kernels/linear/lora.cu`: the adapter of one slot for one matrix, as device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LoraEntry {
    /// `[rank, in]` half.
    pub a: usize,
    /// `[rank, out]` half.
    pub b: usize,
    /// `[rank]` FP32.
    pub scale: usize,
    /// `[out]` FP32, or 0.
    pub bias: usize,
    /// 0: this slot does not change the matrix's results.
    pub rank: i64,
}

assert_layout!(LoraEntry, lora::LoraEntry, { a, b, scale, bias, rank });

/// Operands of [`add`], as device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Lora {
    /// `[rows, in]` half.
    pub x: usize,
    /// `[rows, out]` half, added to.
    pub y: usize,
    /// [`LoraEntry`]s.
    pub table: usize,
    /// `[rows]` i32: index of the entry; negative: none. 0: the first entry for all rows.
    pub slots: usize,
    /// `[rows, most_rank]` FP32 that no launch in between uses.
    pub middle: usize,
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
    /// The largest rank in the table.
    pub most_rank: usize,
}

pub(super) fn kernels() -> Vec<String> {
    ["lora_shrink", "lora_expand"].map(str::to_owned).to_vec()
}

const THREADS: u32 = 256;

/// Add every row's adapter to its results, in two launches.
///
/// # Safety
/// The addresses, including those in the table, must be device memory of the stated sizes, valid until the stream has passed these
/// launches. Slots must be smaller than the number of entries.
pub unsafe fn add(to: Target, op: &Lora) -> Result<(), CudaError> {
    if op.rows == 0 || op.most_rank == 0 {
        return Ok(());
    }
    if !op.in_features.is_multiple_of(8) || !op.out_features.is_multiple_of(2) {
        return Err(CudaError::Argument {
            what: format!(
                "a matrix of {} inputs and {} outputs",
                op.in_features, op.out_features
            ),
            limit: "adapters take inputs in eights and outputs in pairs".to_owned(),
        });
    }
    let device = Device::get(to.device)?;
    let (inputs, outputs) = (
        index32("in_features", op.in_features)?,
        index32("out_features", op.out_features)?,
    );
    let (rows, most_rank) = (
        index32("rows", op.rows)? as u32,
        index32("rank", op.most_rank)?,
    );
    let launch = |kernel, blocks| Launch {
        kernel,
        grid: [blocks, rows, 1],
        block: THREADS,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut shrink = kernel_arguments![op.x, op.table, op.slots, op.middle, inputs, most_rank];
    let mut expand = kernel_arguments![op.y, op.table, op.slots, op.middle, outputs, most_rank];
    // SAFETY: the order is that of the kernels; the caller guarantees that the addresses are valid.
    unsafe {
        launch("lora_shrink", most_rank as u32).run(device, &mut shrink)?;
        launch("lora_expand", (outputs as u32).div_ceil(2 * THREADS)).run(device, &mut expand)
    }
}
