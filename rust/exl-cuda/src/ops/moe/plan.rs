//! Blocks and shared memory of the matmuls of experts.

use super::super::linear::Matrix;
use crate::abi::assert_constants;
use crate::device::BLOCK_RESERVED;
use crate::rows::FEW_ROWS;

assert_constants!(experts_matmul, { EXPERT_BLOCKS == BLOCKS, EXPERT_BLOCKS_OF_MANY == BLOCKS_OF_MANY, EXPERT_MANY_RESULTS == MANY_RESULTS, EXPERT_WARPS == WARPS, EXPERT_SLOTS == SLOTS, SLOT_BARRIER_BYTES == BARRIER_BYTES, COLUMN_FLOATS == COLUMN_FLOATS });

/// Blocks that the registers of an SM hold; the second of kernels whose rows times tiles are at least [`MANY_RESULTS`].
pub(super) const BLOCKS: usize = 4;
const BLOCKS_OF_MANY: usize = 3;
const MANY_RESULTS: usize = 32;

/// Rows of an item, and tiles that a block multiplies with one load of them: the kernels are compiled for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    By8,
    By16,
    By32,
    By64,
    PairsBy8,
    PairsBy16,
}

impl Form {
    /// Those of quantized experts.
    pub const QUANTIZED: [Self; 5] = [
        Self::By8,
        Self::By16,
        Self::By32,
        Self::PairsBy8,
        Self::PairsBy16,
    ];

    /// Those of float experts.
    pub const FLOAT: [Self; 4] = [Self::By8, Self::By16, Self::By32, Self::By64];

    /// The end of a kernel's name.
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::By8 => "8",
            Self::By16 => "16",
            Self::By32 => "32",
            Self::By64 => "64",
            Self::PairsBy8 => "2x8",
            Self::PairsBy16 => "2x16",
        }
    }

    pub const fn rows(self) -> usize {
        match self {
            Self::By8 | Self::PairsBy8 => FEW_ROWS,
            Self::By16 | Self::PairsBy16 => 16,
            Self::By32 => 32,
            Self::By64 => 64,
        }
    }

    /// Rows up to which an item is multiplied at half the width, or at the only one.
    pub const fn narrow(self) -> usize {
        match self.rows() {
            FEW_ROWS => FEW_ROWS,
            rows => rows / 2,
        }
    }

    pub const fn tiles(self) -> usize {
        match self {
            Self::By8 | Self::By16 | Self::By32 | Self::By64 => 1,
            Self::PairsBy8 | Self::PairsBy16 => 2,
        }
    }

    const fn blocks(self) -> usize {
        if self.rows() * self.tiles() < MANY_RESULTS {
            BLOCKS
        } else {
            BLOCKS_OF_MANY
        }
    }
}

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
    pub unit_bytes: usize,
}

impl Matmul {
    pub fn new(name: &'static str, matrices: usize, all: &[&Matrix]) -> Self {
        let units = all.iter().flat_map(|m| m.unit_offsets.windows(2));
        let largest = units.map(|at| (at[1] - at[0]) as usize).max().unwrap_or(0);
        Self {
            name,
            matrices,
            tiles: all.first().map_or(0, |m| m.argument.tiles as usize),
            unit_bytes: largest.next_multiple_of(16),
        }
    }

    /// Shared memory of a block: slots with their barriers, and the warps' sums, in two buffers if there are [`FEW_ROWS`] rows of a tile.
    pub const fn block_bytes(&self, form: Form) -> usize {
        let columns = match form.rows() * form.tiles() {
            FEW_ROWS => 2 * FEW_ROWS,
            more => more,
        };
        let sums = 4 * self.matrices * WARPS * columns * COLUMN_FLOATS;
        WARPS * SLOTS * (form.tiles() * self.unit_bytes + BARRIER_BYTES) + sums
    }

    /// Blocks of an SM at once, with `shared` bytes for one block alone.
    const fn resident(&self, form: Form, shared: usize) -> usize {
        let room = (shared + BLOCK_RESERVED) / (self.block_bytes(form) + BLOCK_RESERVED);
        if room < form.blocks() {
            room
        } else {
            form.blocks()
        }
    }

    /// Whether a card's shared memory is enough: for a block, and if it has two tiles, for as many as the registers hold.
    pub const fn fits(&self, form: Form, shared: usize) -> bool {
        self.resident(form, shared) >= if form.tiles() == 1 { 1 } else { form.blocks() }
    }

    /// The launch for `items` items: as many blocks as are resident at once, or fewer if there are fewer tiles.
    pub fn launch(&self, items: usize, form: Form, [sms, shared]: [usize; 2]) -> Plan {
        let bytes = self.block_bytes(form);
        let resident = self.resident(form, shared);
        Plan {
            blocks: (sms * resident).min(items * self.tiles) as u32,
            threads: 32 * WARPS as u32,
            shared: bytes,
            of_sm: form.blocks() * (bytes + BLOCK_RESERVED),
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
