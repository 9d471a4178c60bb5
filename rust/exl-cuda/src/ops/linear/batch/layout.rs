//! The launch that packs a matmul's input: rows of x in the order of the weights, with the norm.

use super::plan::{Code, LEFT_FREE, SHARED_BYTES, Shares, left_alone};
use super::{Matmul, Room};
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::layout::UNIT_ROWS;
use crate::ops::Target;
use crate::ops::linear::select::Kernel;
use crate::ops::linear::{self, Half, Matrix};
use crate::parameters::kernels;
use crate::rows::BLOCK_ROWS;

const LAYOUT_THREADS: u32 = 128;
assert_constants!(batch_rows, { LAYOUT_THREADS == LAYOUT_THREADS });
/// Approximate number of blocks of a packing launch alongside a matmul by wgmma. On SMs without one, blocks of the next matmul start early and
/// have weights in flight when packing ends (docs/design/gemm-batch.md).
const LAYOUT_BLOCKS: usize = 64;
/// Least number of blocks that share a row, if it is long enough: with a whole row a block has too much shared memory to fit there.
const LEAST_SHARES: usize = 2;
/// Units of K for which each thread of a block packs one group of eight values.
const LEAST_UNITS: usize = LAYOUT_THREADS as usize * 8 / UNIT_ROWS;

/// Placeholder blocks of a packing launch for each SM that the previous matmul leaves free, if these SMs are few. Many more placeholder
/// blocks would leave no room for packing blocks alongside the matmul. With twenty or more free SMs they are useless
/// (docs/design/gemm-batch.md, "Placeholder blocks").
const IDLE_BLOCKS: usize = 4;
const FEW_ALONE: usize = 8;

/// `struct LayoutTask` of `kernels/linear/batch_rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Preparation {
    x: usize,
    weight: usize,
    out: usize,
    multipliers: usize,
    features: usize,
    layout_rows: i32,
    units: i32,
    k: i32,
    m: i32,
    columns: i32,
    share: i32,
    idle: i32,
    eps: f32,
    offset: f32,
    activation: i32,
}

assert_layout!(Preparation, batch_rows::LayoutTask, { x, weight, out, multipliers, features, layout_rows as rows, units, k, m, columns, share, idle, eps, offset, activation });

/// Division of a row among blocks of a packing launch.
struct Division {
    /// Units of K of a block, and blocks of a row.
    share: usize,
    blocks: usize,
    /// Bytes of shared memory of a block: the row, the norm's weights, and its features in the layout.
    shared: usize,
}

impl Division {
    fn new(matrix: &Matrix, columns: usize, norm: bool, code: Code) -> Self {
        let units = matrix.argument.unit_count as usize;
        let of_feature = if norm { 2 + 4 } else { 2 };
        let shared = |share: usize| 16 + matrix.in_features() * of_feature + share * UNIT_ROWS * 4;
        let most = units.div_ceil(LEAST_UNITS);
        let least = match code {
            Code::Wgmma => (LAYOUT_BLOCKS / columns).max(LEAST_SHARES).min(most),
            Code::Mma => most,
        };
        // More blocks if their memory then fits alongside the matmul.
        let share = (least..=most)
            .map(|blocks| units.div_ceil(blocks))
            .find(|&share| shared(share) <= LEFT_FREE)
            .unwrap_or_else(|| units.div_ceil(least));
        Self {
            share,
            blocks: units.div_ceil(share),
            shared: shared(share),
        }
    }
}

/// Placeholder blocks before those that pack and norm `m` rows of `features` features. The rows are usually the residual of a layer, to
/// which the previous matmul has added as many results.
fn idle_blocks(caps: &Capabilities, m: usize, features: usize) -> usize {
    match left_alone(caps, m, features) {
        few @ ..=FEW_ALONE => IDLE_BLOCKS * few,
        _ => 0,
    }
}

pub(super) fn packs(caps: &Capabilities, matrix: &Matrix, norm: bool) -> bool {
    let most = SHARED_BYTES.min(caps.shared_per_block);
    matrix.in_features().is_multiple_of(8)
        && Division::new(matrix, BLOCK_ROWS, norm, Code::Wgmma).shared <= most
}

/// Pack the rows of x into the scratch memory.
///
/// # Safety
/// As for [`launch`].
pub(super) unsafe fn prepare(
    to: Target,
    device: &Device,
    first: &Matrix,
    op: &Matmul,
    room: Room,
    shares: &Shares,
) -> Result<(), CudaError> {
    let Room {
        scratch,
        multipliers,
        ..
    } = room;
    let norm = op.norm;
    let by_kernel = packs(&device.info.caps, first, norm.is_some())
        && op.x.is_multiple_of(16)
        && op.x_type != Half::F32;
    if by_kernel {
        let preparation = Preparation {
            x: op.x,
            weight: norm.map_or(0, |norm| norm.weight),
            out: scratch,
            multipliers,
            features: first.features,
            layout_rows: first.argument.rows,
            units: first.argument.unit_count,
            k: first.argument.in_features,
            m: op.m as i32,
            columns: shares.columns as i32,
            share: 0,
            idle: 0,
            eps: norm.map_or(0.0, |norm| norm.eps),
            offset: norm.map_or(0.0, |norm| norm.offset),
            activation: op.input_activation.unwrap_or(-1),
        };
        // SAFETY: this function's contract.
        return unsafe { pack(to, device, first, op.x_type, preparation) };
    }
    let alone = linear::Matmul {
        x: op.x,
        x_type: op.x_type,
        y: op.y,
        y_type: op.y_type,
        m: op.m,
    };
    // SAFETY: this function's contract.
    unsafe { linear::prepare(to, first, &alone, scratch, multipliers, shares.columns) }
}

/// # Safety
/// As for [`launch`].
unsafe fn pack(
    to: Target,
    device: &Device,
    matrix: &Matrix,
    x_type: Half,
    mut preparation: Preparation,
) -> Result<(), CudaError> {
    let columns = preparation.columns as usize;
    let norm = preparation.weight != 0;
    let caps = &device.info.caps;
    let code = Code::of(caps).map_err(|why| why.for_kernel(Kernel::GemmBatch))?;
    let Division {
        share,
        blocks,
        shared,
    } = Division::new(matrix, columns, norm, code);
    let overlaps = to.programmatic && code == Code::Wgmma;
    let idle = if norm && overlaps && shared <= LEFT_FREE {
        idle_blocks(caps, preparation.m as usize, matrix.in_features())
    } else {
        0
    };
    (preparation.share, preparation.idle) = (share as i32, idle as i32);
    let launch = Launch {
        kernel: match x_type {
            Half::BF16 => "pack_rows_bf16",
            _ if preparation.activation >= 0 => "pack_activated_rows_f16",
            _ => "pack_rows_f16",
        },
        grid: [(idle + columns) as u32, blocks as u32, 1],
        block: LAYOUT_THREADS,
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::Pack { p: preparation };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::super::plan::VARIANTS;
    use super::*;
    use crate::capabilities::tests::hopper;
    use crate::ops::linear::tests::matrix;

    #[test]
    fn blocks_of_a_row_share_its_units() {
        let of = |features: usize, columns, norm, code| {
            let made = matrix(features / UNIT_ROWS, 2064);
            let found = Division::new(&made, columns, norm, code);
            let units = features / UNIT_ROWS;
            assert!(found.share * found.blocks >= units, "{features}");
            assert!(found.share * (found.blocks - 1) < units, "{features}");
            (found.share, found.blocks)
        };
        for (features, columns, norm, code, expected) in [
            (4096, 16, true, Code::Wgmma, (4, 4)),
            (4096, 32, true, Code::Wgmma, (8, 2)),
            (4096, 64, true, Code::Wgmma, (8, 2)),
            (4096, 128, true, Code::Wgmma, (8, 2)),
            (4096, 64, true, Code::Mma, (4, 4)),
            (6144, 128, true, Code::Wgmma, (6, 4)),
            (14336, 64, false, Code::Wgmma, (14, 4)),
            (256, 16, true, Code::Wgmma, (1, 1)),
            (768, 128, true, Code::Mma, (3, 1)),
        ] {
            let found = of(features, columns, norm, code);
            assert_eq!(found, expected, "{features} {columns}");
        }
    }

    #[test]
    fn placeholder_blocks_if_few_sms_are_free() {
        for features in [2048, 4096, 6144] {
            let layer = matrix(features / UNIT_ROWS, 2064);
            for (columns, _) in VARIANTS {
                let division = Division::new(&layer, columns, true, Code::Wgmma);
                assert!(division.shared <= LEFT_FREE, "{features} {columns}");
            }
            let idle = [16, 32, 40, 64].map(|m| idle_blocks(&hopper(), m, features));
            assert_eq!(idle, [16; 4], "{features}");
        }
        assert_eq!(
            [512, 1024, 3584, 5120].map(|k| idle_blocks(&hopper(), 64, k)),
            [0; 4]
        );
    }
}
