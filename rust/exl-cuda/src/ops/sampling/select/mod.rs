//! The table that picks the kernels of sampling and their launches by the rows' settings, the width of the logits and the card.
//!
//! All ways to sample a row give the same token, so the choice only affects speed. [`row::plan`] decides for each row on the host;
//! [`plan`] makes one list of launches for all rows of a batch. Launches and reports use the same functions.

pub mod row;
#[cfg(test)]
mod tests;

use super::{CAPACITY, SEGMENT};
use crate::capabilities::Capabilities;
use row::Needs;

/// Threads of a block of `sample_wide` and of the kernels that mix two rows.
const WIDE_THREADS: u32 = 512;

/// Kernels of sampling, in the order of their launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Largest logit of each row that is mixed from two, and of its negative row.
    MixMaxima,
    /// Sums of the weights of both rows.
    MixSums,
    /// The mixed row.
    Mix,
    /// Bias, penalties and masks, and the largest logit of each block.
    Shape,
    /// Sum of the weights of each block.
    Sums,
    /// One block a row: cuts and the draw.
    Choose,
    /// Passes over all logits for rows with too many candidates for the choosing block.
    Wide,
}

impl Kernel {
    pub const ALL: [Self; 7] = [
        Self::MixMaxima,
        Self::MixSums,
        Self::Mix,
        Self::Shape,
        Self::Sums,
        Self::Choose,
        Self::Wide,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::MixMaxima => "sample_mix_maxima",
            Self::MixSums => "sample_mix_sums",
            Self::Mix => "sample_mix",
            Self::Shape => "sample_shape",
            Self::Sums => "sample_sums",
            Self::Choose => "sample_choose",
            Self::Wide => "sample_wide",
        }
    }

    /// The file in `kernels/sampling`.
    pub const fn file(self) -> &'static str {
        match self {
            Self::Shape | Self::Sums | Self::Choose => "sampling",
            Self::MixMaxima | Self::MixSums | Self::Mix | Self::Wide => "sampling_wide",
        }
    }
}

/// The properties of a batch of rows that decide its launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    pub rows: usize,
    /// Logits of a row of the workspace.
    pub pitch: usize,
    /// Needs of all rows.
    pub needs: Needs,
    /// The launches copy the inputs of the next step.
    pub copies: bool,
}

/// One launch of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    pub kernel: Kernel,
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(super) shared: u32,
    /// The launch may begin while the one before it ends, if the caller allows it.
    pub(super) overlaps: bool,
}

/// Plan the launches of a batch on a card, in their order; none for a batch without rows.
pub fn plan(caps: &Capabilities, batch: &Batch) -> Vec<Planned> {
    if batch.rows == 0 {
        return Vec::new();
    }
    let Needs { sums, wide, mix } = batch.needs;
    let needed = |kernel: &Kernel| match kernel {
        Kernel::MixMaxima | Kernel::MixSums | Kernel::Mix => mix,
        Kernel::Shape | Kernel::Choose => true,
        Kernel::Sums => sums,
        Kernel::Wide => wide,
    };
    Kernel::ALL
        .into_iter()
        .filter(needed)
        .map(|kernel| planned(caps, batch, kernel))
        .collect()
}

fn planned(caps: &Capabilities, batch: &Batch, kernel: Kernel) -> Planned {
    let (rows, segments) = (batch.rows, batch.pitch.div_ceil(SEGMENT));
    let (grid, threads, shared) = match kernel {
        Kernel::MixMaxima | Kernel::MixSums | Kernel::Mix => ([segments, rows], WIDE_THREADS, 0),
        // One more row of blocks copies the inputs of the next step.
        Kernel::Shape => ([segments, rows + usize::from(batch.copies)], 256, 0),
        Kernel::Sums => ([segments, rows], 256, 0),
        // A little more than the table: with the static variables it exceeds the default limit of shared memory.
        Kernel::Choose => ([rows, 1], 1024, 3 * CAPACITY * size_of::<u64>() + 1024),
        // All blocks wait for one another, so all of them must be resident: two per SM at most.
        Kernel::Wide => (
            [(2 * segments * rows).min(2 * caps.sms), 1],
            WIDE_THREADS,
            0,
        ),
    };
    Planned {
        kernel,
        grid: [grid[0] as u32, grid[1] as u32, 1],
        threads,
        shared: shared as u32,
        // Shaping does not overlap: earlier launches write its inputs and read the inputs that it overwrites.
        overlaps: matches!(kernel, Kernel::Sums | Kernel::Choose | Kernel::Wide),
    }
}
