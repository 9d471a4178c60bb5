//! The limits of the kernels that Python plans by.

use exl_cpu::block::CHUNK_ROWS;
use exl_cpu::sampling::MAX_LOGITS;
use exl_cuda::MOST_GRID_ROWS;
use exl_cuda::layout::UNIT_ROWS;
use exl_cuda::ops::elementwise::{self, Activation, exchange};
use exl_cuda::ops::{attention, sampling};
use exl_cuda::rows::{
    BLOCK_ROWS, DECODE_TOKENS, FEW_ROWS, FILLED_ROWS, GEMV_ROWS, MIDDLE_ROWS, PACKED_ROWS,
    STEP_ROWS,
};
use pyo3::prelude::*;

const _: () = assert!(
    sampling::BLOCKS * sampling::BLOCK == MAX_LOGITS,
    "the CPU and a GPU sample from rows of different widths"
);

/// Limits of the kernels: constants of the crates, independent of the machine and of the architectures of the build.
#[pyclass(frozen, get_all, module = "exl_kernels._native")]
#[derive(Debug)]
pub struct KernelLimits {
    /// Most rows of a matmul for which `gemv_ring` is chosen where `gemm_few` fits, too.
    gemv_rows: usize,
    /// Most rows of `gemm_few` and `gemm_direct`, and columns of their packed input.
    few_rows: usize,
    /// Most rows of a call that multiplies packed weights. Up to there a row's result does not depend on the number of rows.
    packed_rows: usize,
    /// Rows below `packed_rows` for which captured steps have a bucket of their own.
    middle_rows: usize,
    /// Most rows of a launch on packed weights, on cards with wgmma, and of a block of a captured step's matmuls.
    block_rows: usize,
    /// Most tokens of a decode step, captured or not, whose results do not depend on other rows.
    step_rows: usize,
    /// Most rows of windows that are filled up to one length, so that one pass takes them.
    filled_rows: usize,
    /// Most blocks of a launch along its second and its third dimension.
    grid_rows: u32,
    /// Rows of K that layouts of weights and packed inputs are padded to.
    unit_rows: usize,
    /// Most tokens of a row in a decode step: the last token and its drafts.
    decode_tokens: usize,
    /// Rows that a fused half of a layer computes at a time on the CPU.
    cpu_chunk_rows: usize,
    /// Widest row that a launch of an elementwise operator packs as the input of a matmul.
    most_packed_width: usize,
    /// Largest head dimension of attention on a GPU; all are multiples of `head_dim_step`.
    most_head_dim: usize,
    head_dim_step: usize,
    /// Widest row of logits: 2^19 weights of 2^44 fit an unsigned 64-bit sum.
    most_logits: usize,
    /// Most candidates that a GPU reports for a row.
    most_reported: usize,
    /// Logits that a block of the sampler shapes; rows in its memory are multiples of it.
    sampling_segment: usize,
    /// Entries of a row of the sampler's maxima and sums.
    sampling_blocks: usize,
    /// Most GPUs that exchange results.
    exchange_gpus: usize,
    /// Most exchanges of a step.
    exchanges: u32,
    /// Marks of each GPU that stores columns into the results of others.
    column_marks: usize,
    /// Names of the activations that kernels of a GPU apply.
    activations: (&'static str, &'static str, &'static str),
}

#[pymethods]
impl KernelLimits {
    /// Return the int32 counters that launches of attention need on a GPU of `sms` SMs if blocks share the keys of tiles.
    #[staticmethod]
    fn attention_counters(sms: usize) -> usize {
        attention::shared_tickets(sms)
    }
}

/// Return the limits of the kernels.
#[pyfunction]
pub fn kernel_limits() -> KernelLimits {
    KernelLimits {
        gemv_rows: GEMV_ROWS,
        few_rows: FEW_ROWS,
        packed_rows: PACKED_ROWS,
        middle_rows: MIDDLE_ROWS,
        most_packed_width: elementwise::select::MOST_PACKED_WIDTH,
        block_rows: BLOCK_ROWS,
        step_rows: STEP_ROWS,
        filled_rows: FILLED_ROWS,
        grid_rows: MOST_GRID_ROWS,
        unit_rows: UNIT_ROWS,
        decode_tokens: DECODE_TOKENS,
        cpu_chunk_rows: CHUNK_ROWS,
        most_head_dim: attention::MAX_DIM,
        head_dim_step: attention::DIM_STEP,
        most_logits: MAX_LOGITS,
        most_reported: sampling::MOST_TOP,
        sampling_segment: sampling::SEGMENT,
        sampling_blocks: sampling::BLOCKS,
        exchange_gpus: exchange::GPUS,
        exchanges: exchange::EXCHANGES,
        column_marks: exchange::COLUMN_BLOCKS,
        activations: Activation::ALL.map(Activation::name).into(),
    }
}
