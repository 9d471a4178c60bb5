//! Blocks and shared memory of the matmuls of experts.

use super::super::linear::Matrix;
use crate::abi::assert_constants;
use crate::device::BLOCK_RESERVED;

assert_constants!(experts_matmul, { EXPERT_BLOCKS == BLOCKS[0], EXPERT_BLOCKS_OF_32 == BLOCKS[2], EXPERT_WARPS == WARPS, EXPERT_SLOTS == SLOTS, SLOT_BARRIER_BYTES == BARRIER_BYTES, COLUMN_FLOATS == COLUMN_FLOATS });

/// Rows of an item: the kernels are compiled for each.
pub(super) const ITEM_ROWS: [usize; 3] = [8, 16, 32];
/// Blocks of each kernel that the registers of an SM hold.
pub(super) const BLOCKS: [usize; 3] = [4, 4, 3];
/// Warps of a block of a matmul, and floats of a column of a warp's sums.
const WARPS: usize = 4;
const COLUMN_FLOATS: usize = 20;
/// Units in the shared memory of a warp, and bytes of the barrier of each.
const SLOTS: usize = 2;
const BARRIER_BYTES: usize = 8;

/// Sizes that a launch of the matrices of all experts must hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matmul {
    pub name: &'static str,
    matrices: usize,
    pub tiles: usize,
    /// Room for the largest unit.
    pub slot_bytes: usize,
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
        }
    }

    /// Shared memory of a block of items of `rows` rows: slots with their barriers, and the warps' sums, in two buffers if there are eight.
    pub const fn block_bytes(&self, rows: usize) -> usize {
        let columns = if rows > ITEM_ROWS[0] { rows } else { 2 * rows };
        let sums = 4 * self.matrices * WARPS * columns * COLUMN_FLOATS;
        WARPS * SLOTS * (self.slot_bytes + BARRIER_BYTES) + sums
    }

    /// The launch for `items` items of up to [`ITEM_ROWS`]`[size]` rows: as many blocks as are resident at once, or fewer if there are fewer
    /// tiles.
    pub fn launch(&self, items: usize, size: usize, [sms, shared]: [usize; 2]) -> Plan {
        let bytes = self.block_bytes(ITEM_ROWS[size]);
        let resident = ((shared + BLOCK_RESERVED) / (bytes + BLOCK_RESERVED)).min(BLOCKS[size]);
        Plan {
            blocks: (sms * resident).min(items * self.tiles) as u32,
            threads: 32 * WARPS as u32,
            shared: bytes,
            of_sm: BLOCKS[size] * (bytes + BLOCK_RESERVED),
        }
    }
}

/// A launch of a matmul: its blocks, their threads and shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub blocks: u32,
    pub threads: u32,
    pub shared: usize,
    /// Shared memory of an SM. The rest of its memory is left to the L1 cache, through which rows are read.
    pub of_sm: usize,
}
