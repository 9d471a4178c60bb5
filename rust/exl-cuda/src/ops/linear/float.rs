//! Float matrices: y = (x @ W^T * scale + bias) * prescale with W in halves, row by row as in the files.
//!
//! All kernels add in one order, so a row's result depends neither on the number of rows nor on the card's code for more of them.

use super::Half;
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::features::Feature;
use crate::launch::{CudaError, Launch};
use crate::layout::TILE;
use crate::ops::{Target, index32};
use crate::parameters::kernels;
use crate::rows::FEW_ROWS;

/// Parts of K with a sum of their own, each a chain of matrix instructions.
const SLICES: usize = 8;
pub(crate) const THREADS: usize = SLICES * 32;
/// Numbers of K of a stage, of which slices have whole ones.
const STAGE_K: usize = 64;
/// Of a block of `float_tile.cu`.
const TILE_FEATURES: usize = 128;
const TILE_ROWS: [usize; 2] = [32, 64];
const STAGES: usize = 4;
const STAGE_ROW_BYTES: usize = 2 * STAGE_K;
assert_constants!(float, { SLICES == SLICES, FLOAT_THREADS == THREADS, STAGE_K == STAGE_K });
assert_constants!(float_tile, { TILE_FEATURES == TILE_FEATURES, FLOAT_STAGES == STAGES, STAGE_ROW_BYTES == STAGE_ROW_BYTES });

/// Numbers of K from which blocks share it: the launch that adds their sums takes as long as fewer.
const SHARED_K: usize = 1024;

/// `struct FloatCall` of `kernels/linear/float.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Argument {
    weight: usize,
    x: usize,
    multipliers: usize,
    bias: usize,
    y: usize,
    sums: usize,
    m: i32,
    k: i32,
    n: i32,
    slice: i32,
    whole: i32,
    parts: i32,
    y_kind: i32,
    scale: f32,
    prescale: f32,
    padding: i32,
}

assert_layout!(Argument, float::FloatCall, { weight, x, multipliers, bias, y, sums, m, k, n, slice, whole, parts, y_kind, scale, prescale, padding });

/// A matrix on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct FloatMatrix {
    /// `[out_features, in_features]` F16.
    pub weight: usize,
    /// `[out_features]` FP32, or 0.
    pub bias: usize,
    pub in_features: usize,
    pub out_features: usize,
    /// Factor of the weights.
    pub scale: f32,
    pub prescale: f32,
}

/// The kernel of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// So many rows a block, 8 or 16, and so many tiles of 16 features, 1 or with 8 rows 2; for every card and any K.
    Rows { rows: usize, tiles: usize },
    /// So many rows a block, 32 or 64, and 128 features.
    Tile { rows: usize },
    /// The same, and so many blocks share K; a launch adds their sums.
    Parts { rows: usize, parts: usize },
}

impl Kernel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rows {
                rows: FEW_ROWS,
                tiles: 1,
            } => "gemm_float_rows_8",
            Self::Rows { rows: FEW_ROWS, .. } => "gemm_float_rows_2x8",
            Self::Rows { .. } => "gemm_float_rows_16",
            Self::Tile { rows: 32 } => "gemm_float_tile_32",
            Self::Tile { .. } => "gemm_float_tile_64",
            Self::Parts { rows: 32, .. } => "gemm_float_parts_32",
            Self::Parts { .. } => "gemm_float_parts_64",
        }
    }

    const fn rows(self) -> usize {
        match self {
            Self::Rows { rows, .. } | Self::Tile { rows } | Self::Parts { rows, .. } => rows,
        }
    }

    pub(crate) const fn features(self) -> usize {
        match self {
            Self::Rows { tiles, .. } => tiles * TILE,
            Self::Tile { .. } | Self::Parts { .. } => TILE_FEATURES,
        }
    }

    /// Whether a launch may begin while its predecessor drains. Blocks of few rows that did would be spread over the SMs unevenly:
    /// a step of one sequence took 5,627 instead of 4,807 us.
    pub(crate) const fn starts_early(self) -> bool {
        !matches!(self, Self::Rows { .. })
    }

    /// Shared memory of a block for the sums of its slices, which the launch does not ask for.
    pub(crate) const fn static_bytes(self) -> usize {
        match self {
            Self::Rows { rows, tiles } => SLICES * rows * tiles * TILE * size_of::<f32>(),
            Self::Tile { .. } | Self::Parts { .. } => 0,
        }
    }

    const fn parts(self) -> usize {
        match self {
            Self::Rows { .. } | Self::Tile { .. } => 1,
            Self::Parts { parts, .. } => parts,
        }
    }

    pub(crate) const fn shared_bytes(self) -> usize {
        match self {
            Self::Rows { .. } => 0,
            Self::Tile { rows } | Self::Parts { rows, .. } => {
                STAGES * (TILE_FEATURES + rows) * STAGE_ROW_BYTES
            }
        }
    }
}

/// Numbers of K of a slice of a matrix of `in_features`.
pub(crate) const fn slice_of(in_features: usize) -> usize {
    in_features.div_ceil(SLICES).next_multiple_of(STAGE_K)
}

const SUM: &str = "gemm_float_sum";

pub(super) fn kernels(file: &str) -> Vec<String> {
    let names: &[&str] = match file {
        "float" => &[
            "gemm_float_rows_8",
            "gemm_float_rows_2x8",
            "gemm_float_rows_16",
            SUM,
        ],
        _ => &[
            "gemm_float_tile_32",
            "gemm_float_tile_64",
            "gemm_float_parts_32",
            "gemm_float_parts_64",
        ],
    };
    names.iter().map(|&name| name.to_owned()).collect()
}

/// Whether lanes may read 16 bytes at a time: rows of a multiple of 16 bytes, each operand aligned to 16.
const fn is_whole(matrix: &FloatMatrix, x: usize) -> bool {
    matrix.in_features.is_multiple_of(8) && matrix.weight.is_multiple_of(16) && x.is_multiple_of(16)
}

/// The kernel for `rows` rows of a matrix of `in_features` and `out_features`; `whole`: lanes may read 16 bytes at a time.
pub fn select(
    caps: &Capabilities,
    rows: usize,
    in_features: usize,
    out_features: usize,
    whole: bool,
) -> Kernel {
    if rows <= FEW_ROWS {
        // Two tiles share loads of rows, where each SM still has a block.
        let pairs = whole && out_features >= 2 * TILE * caps.sms;
        let tiles = if pairs { 2 } else { 1 };
        return Kernel::Rows {
            rows: FEW_ROWS,
            tiles,
        };
    }
    if !whole || !caps.has(Feature::LaneCopies) {
        return Kernel::Rows {
            rows: 2 * FEW_ROWS,
            tiles: 1,
        };
    }
    let [small, large] = TILE_ROWS;
    let tile = if rows <= small { small } else { large };
    let blocks = out_features.div_ceil(TILE_FEATURES) * rows.div_ceil(tile);
    let enough = |&parts: &usize| blocks * parts >= caps.sms;
    match [1, 2, 4, SLICES].into_iter().find(enough) {
        Some(1) => Kernel::Tile { rows: tile },
        _ if in_features < SHARED_K => Kernel::Tile { rows: tile },
        found => Kernel::Parts {
            rows: tile,
            parts: found.unwrap_or(SLICES),
        },
    }
}

/// Operands of a matmul: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[m, in_features]` F16.
    pub x: usize,
    /// `[m]` FP32, by which rows are multiplied before the bias is added; 0 for ones.
    pub multipliers: usize,
    /// `[m, out_features]` of `y_type`.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
    /// [`scratch_bytes`], aligned to 16.
    pub scratch: usize,
}

/// Bytes of scratch memory of `rows` rows from address `x` on.
pub fn scratch_bytes(caps: &Capabilities, matrix: &FloatMatrix, rows: usize, x: usize) -> usize {
    match kernel_of(caps, matrix, rows, x) {
        Kernel::Parts { .. } => SLICES * rows * matrix.out_features * 4,
        _ => 0,
    }
}

fn kernel_of(caps: &Capabilities, matrix: &FloatMatrix, rows: usize, x: usize) -> Kernel {
    let &FloatMatrix {
        in_features,
        out_features,
        ..
    } = matrix;
    select(caps, rows, in_features, out_features, is_whole(matrix, x))
}

/// The matmul. A row's result is bitwise the same with any other rows.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn matmul(to: Target, matrix: &FloatMatrix, op: &Matmul) -> Result<(), CudaError> {
    if op.m == 0 || matrix.out_features == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let kernel = kernel_of(&device.info.caps, matrix, op.m, op.x);
    let slice = slice_of(matrix.in_features);
    let parts = kernel.parts();
    let argument = Argument {
        weight: matrix.weight,
        x: op.x,
        multipliers: op.multipliers,
        bias: matrix.bias,
        y: op.y,
        sums: op.scratch,
        m: index32("rows", op.m)?,
        k: index32("input features", matrix.in_features)?,
        n: index32("output features", matrix.out_features)?,
        slice: slice as i32,
        whole: i32::from(is_whole(matrix, op.x)),
        parts: parts as i32,
        y_kind: op.y_type as i32,
        scale: matrix.scale,
        prescale: matrix.prescale,
        padding: 0,
    };
    let rows = op.m.div_ceil(kernel.rows()) as u32;
    let features = matrix.out_features.div_ceil(kernel.features()) as u32;
    let grid = match kernel {
        Kernel::Rows { .. } => [features, rows, 1],
        Kernel::Tile { .. } | Kernel::Parts { .. } => [rows, features, parts as u32],
    };
    let launch = Launch {
        kernel: kernel.name(),
        grid,
        block: THREADS as u32,
        shared_bytes: kernel.shared_bytes() as u32,
        stream: to.stream,
        programmatic: to.programmatic && kernel.starts_early(),
    };
    let mut arguments = kernels::GemmFloat { call: argument };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments)? };
    if parts == 1 {
        return Ok(());
    }
    let sum = Launch {
        kernel: SUM,
        grid: [matrix.out_features.div_ceil(THREADS) as u32, op.m as u32, 1],
        shared_bytes: 0,
        programmatic: to.programmatic,
        ..launch
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { sum.run(device, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::CARDS;

    #[test]
    fn the_table_of_float_matrices_on_every_card() {
        for card in CARDS.map(|card| card.with_own_code()) {
            let of = |rows, k, n, whole| select(&card, rows, k, n, whole);
            let few = |rows, tiles| Kernel::Rows { rows, tiles };
            assert_eq!(of(1, 4096, 512, true), few(8, 1));
            assert_eq!(of(1, 4096, 128_256, true), few(8, 2));
            assert_eq!(of(8, 4096, 128_256, false), few(8, 1));
            assert_eq!(of(8, 4096, 128_256, true), few(8, 2));
            assert_eq!(of(64, 4094, 4096, false), few(16, 1));
            let copies = card.has(Feature::LaneCopies);
            let tile = |found| if copies { found } else { few(16, 1) };
            let parts = Kernel::Parts { rows: 32, parts: 8 };
            assert_eq!(of(17, 4096, 512, true), tile(parts));
            assert_eq!(of(17, 512, 1024, true), tile(Kernel::Tile { rows: 32 }));
            let many = of(33, 4096, 128_256, true);
            assert!(!copies || many == Kernel::Tile { rows: 64 });
            for kernel in [many, parts] {
                assert!(!copies || kernel.shared_bytes() <= card.shared_per_block);
            }
        }
    }
}
