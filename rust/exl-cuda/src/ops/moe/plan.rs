//! Blocks and shared memory of the matmuls of experts.

use super::super::linear::Matrix;
use crate::abi::assert_constants;
use crate::device::BLOCK_RESERVED;
use crate::layout::TILE;
use crate::rows::FEW_ROWS;

assert_constants!(experts_many, { MANY_COLUMNS == MANY_COLUMNS });
assert_constants!(experts_few, { EXPERT_BLOCKS == RESIDENT, EXPERT_WARPS == WARPS, EXPERT_SLOTS == SLOTS, SLOT_BARRIER_BYTES == BARRIER_BYTES, COLUMN_FLOATS == COLUMN_FLOATS });

/// Rows of an expert that are multiplied at a time if there are more than [`FEW_ROWS`].
const MANY_COLUMNS: usize = 16;
/// Warps of a block of a matmul, and floats of a column of a warp's sums.
const WARPS: usize = 4;
const COLUMN_FLOATS: usize = 20;
/// Units in the shared memory of a warp, and bytes of the barrier of each.
const SLOTS: usize = 2;
const BARRIER_BYTES: usize = 8;
/// Blocks of a matmul of few rows and of one of many rows that the registers of an SM hold.
pub(super) const RESIDENT: usize = 4;
const MANY_RESIDENT: usize = 2;
/// Many rows: target number of tasks for the warps of a block, row tiles of a block, and classes of units of K.
const TASKS: usize = 16;
pub(super) const SPANS: [usize; 2] = [2, 8];
const CLASSES: usize = 16;

/// Sizes that a launch of the matrices of all experts must hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matmul {
    pub name: &'static str,
    matrices: usize,
    pub tiles: usize,
    /// Room for the largest unit.
    pub slot_bytes: usize,
    /// Most sums of a row tile of a matrix.
    classes: usize,
}

impl Matmul {
    pub fn new(name: &'static str, matrices: usize, all: &[&Matrix]) -> Self {
        let units = all.iter().flat_map(|m| m.unit_offsets.windows(2));
        let largest = units.map(|at| (at[1] - at[0]) as usize).max().unwrap_or(0);
        Self {
            name,
            matrices,
            tiles: all.first().map_or(0, |m| m.argument.tiles as usize),
            slot_bytes: largest.next_multiple_of(16),
            classes: all
                .iter()
                .map(|m| m.argument.unit_count as usize)
                .max()
                .unwrap_or(0)
                .min(CLASSES),
        }
    }

    /// Shared memory of a block of few rows: slots with their barriers, and two buffers of the warps' sums.
    pub const fn few_bytes(&self) -> usize {
        let sums = 4 * 2 * self.matrices * WARPS * FEW_ROWS * COLUMN_FLOATS;
        WARPS * SLOTS * (self.slot_bytes + BARRIER_BYTES) + sums
    }

    /// Blocks for few rows: as many as are resident at once, or fewer if there are fewer tiles.
    pub fn few_blocks(&self, items: usize, [sms, shared]: [usize; 2]) -> usize {
        let block = self.few_bytes() + BLOCK_RESERVED;
        let resident = ((shared + BLOCK_RESERVED) / block).min(RESIDENT);
        (sms * resident).min(items * self.tiles)
    }

    /// Shared memory of a block of many rows: the sums of its tasks.
    pub const fn many_bytes(&self, span: usize) -> usize {
        4 * self.matrices * span * self.classes * TILE * MANY_COLUMNS
    }

    /// Row tiles of a block of many rows: tasks for every warp, and blocks for every SM.
    fn span(&self, items: usize, [sms, shared]: [usize; 2]) -> usize {
        let [mut span, most] = SPANS;
        while self.matrices * self.classes * span < TASKS
            && 2 * span <= most
            && self.many_bytes(2 * span) <= shared / 3
            && items * self.tiles.div_ceil(2 * span) >= sms
        {
            span *= 2;
        }
        span
    }

    /// The launch for `items`, each of at most [`FEW_ROWS`] pairs of an expert.
    pub fn few_rows(&self, items: usize, card: [usize; 2]) -> Plan {
        Plan {
            grid: [self.few_blocks(items, card) as u32, 1, 1],
            threads: 32 * WARPS as u32,
            shared: self.few_bytes(),
            resident: RESIDENT,
            span: 1,
        }
    }

    /// The launch for all rows of up to `experts` experts.
    pub fn many_rows(&self, experts: usize, card: [usize; 2]) -> Plan {
        let span = self.span(experts, card);
        Plan {
            grid: [self.tiles.div_ceil(span) as u32, experts as u32, 1],
            threads: 256,
            shared: self.many_bytes(span),
            resident: MANY_RESIDENT,
            span,
        }
    }
}

/// A launch of a matmul: its blocks, their threads and shared memory, and how many an SM holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared: usize,
    resident: usize,
    /// Row tiles of a block of many rows.
    pub span: usize,
}

impl Plan {
    /// Shared memory of an SM. The rest of its memory is left to the L1 cache, through which rows are read.
    pub const fn of_sm(&self) -> usize {
        self.resident * (self.shared + BLOCK_RESERVED)
    }
}
