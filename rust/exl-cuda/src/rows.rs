//! Limits of rows that several kernels, launchers or Python share, each with its only definition.
//!
//! The build script includes this file and passes the limits that CUDA sources need to nvcc (`kernels/common/row_limits.cuh`). Python asks
//! for all of them (`exl_kernels.selection`). Thresholds that one family of kernels has measured are in its `select`.
//! `scripts/check_tree.py` refuses a second definition, and a number in their place.

/// Largest number of rows for which `gemv_ring` is faster than `gemm_few`, by measurement, and which it takes with adapters.
pub const GEMV_ROWS: usize = 2;

/// Most rows of `gemv_ring`, `gemm_few` and `gemm_direct`, columns of the packed input of the last two, and rows of an expert that are
/// multiplied at a time in the kernels for few: one column tile of a matrix instruction.
pub const FEW_ROWS: usize = 8;

/// Most rows of a call that run on packed weights unless rows must be batch-invariant; for more it is cheaper to dequantize once.
pub const PACKED_ROWS: usize = 64;

/// Rows between 32 and [`PACKED_ROWS`] for which `gemm_batch` on cards with wgmma has kernels, and captured steps have a bucket.
pub const MIDDLE_ROWS: usize = 48;

/// Most rows of a launch on packed weights: of `gemm_batch` on cards with wgmma. Captured steps of more rows run in blocks.
pub const BLOCK_ROWS: usize = 128;

/// Most tokens of a decode step, captured or not, whose results do not depend on other rows.
pub const STEP_ROWS: usize = 256;

/// Most rows that fill windows up to one length for each pass that this saves: a pass takes no longer with so many more, since a pass of its
/// own reads all weights.
pub const FILLED_ROWS: usize = 32;

/// Most tokens of a row in a decode step: the last token and its drafts. Attention reads rows of more tokens as prompts.
pub const DECODE_TOKENS: usize = 16;

const _: () = assert!(
    GEMV_ROWS < FEW_ROWS
        && FEW_ROWS < PACKED_ROWS
        && PACKED_ROWS / 2 < MIDDLE_ROWS
        && MIDDLE_ROWS < PACKED_ROWS
        && BLOCK_ROWS.is_multiple_of(PACKED_ROWS)
        && STEP_ROWS.is_multiple_of(BLOCK_ROWS),
    "whole blocks make up a step, and whole launches a block"
);
