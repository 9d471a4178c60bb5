//! The table that picks the kernels of adapters by rows, ranks, packed input and gate, where the matmul does not add them itself: its plan
//! says so ([`crate::ops::linear::select::Epilogue::adapters`]).
//!
//! A row's result has one order of sums in all of them. Launches and reports use the same functions.

use crate::abi::assert_constants;
use crate::ops::elementwise::select::MOST_PACKED_WIDTH;
use crate::ops::linear::ring::MATRICES;
use crate::ops::linear::select::{Refusal as MatmulRefusal, is_invariant};
use crate::rows::PACKED_ROWS;

/// Kernels of adapters: those that multiply by A (`Shrink`) and those that multiply by B and add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// One matrix, a rank a block.
    Shrink,
    Expand,
    /// The matrices of a joined matmul, one rank a block.
    ShrinkGroup1,
    /// The same, four ranks a block.
    ShrinkGroup4,
    /// The same, and the rows packed as the input of the matmul.
    ShrinkPacking,
    ExpandGroup,
    /// The same, and the gate of the results.
    ExpandGated,
}

impl Kernel {
    pub const ALL: [Self; 7] = [
        Self::Shrink,
        Self::Expand,
        Self::ShrinkGroup1,
        Self::ShrinkGroup4,
        Self::ShrinkPacking,
        Self::ExpandGroup,
        Self::ExpandGated,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Shrink => "lora_shrink",
            Self::Expand => "lora_expand",
            Self::ShrinkGroup1 => "lora_shrink_group_1",
            Self::ShrinkGroup4 => "lora_shrink_group_4",
            Self::ShrinkPacking => "lora_shrink_packing",
            Self::ExpandGroup => "lora_expand_group",
            Self::ExpandGated => "lora_expand_gated",
        }
    }
}

/// Why the kernels do not take adapters, which torch then multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("adapters are added by kernels to at most {0} rows")]
    Rows(usize),
    #[error("adapters are added by kernels to {0}")]
    Shapes(&'static str),
}

/// Check that the kernels add the adapters of `rows` rows, which are asked to be batch-invariant or not.
///
/// The arithmetic of a row that is batch-invariant must not depend on the number of rows, so such rows always take the kernels; for others
/// torch is faster.
pub const fn takes_rows(rows: usize, invariant: bool) -> Result<(), Refusal> {
    if is_invariant(rows, invariant) {
        return Ok(());
    }
    Err(Refusal::Rows(PACKED_ROWS))
}

/// Whether the launch that multiplies `rows` rows by A may pack them as the input of a matmul
/// ([`crate::ops::linear::select::Plan::columns_for_adapters`]).
pub const fn packs_input(rows: usize, in_features: usize) -> bool {
    rows <= PACKED_ROWS && in_features <= MOST_PACKED_WIDTH
}

/// Check that the kernels add adapters to matrices over one input, with `widths` outputs each.
pub fn takes_shapes(in_features: usize, widths: &[usize]) -> Result<(), Refusal> {
    for (takes, what) in [
        (
            (1..=MATRICES).contains(&widths.len()),
            "one to three matrices",
        ),
        (
            in_features.is_multiple_of(INPUTS),
            "inputs that are a multiple of 8",
        ),
        (
            widths.iter().all(|width| width.is_multiple_of(OUTPUTS)),
            "an even number of outputs",
        ),
    ] {
        if !takes {
            return Err(Refusal::Shapes(what));
        }
    }
    Ok(())
}

/// Most ranks of adapters that a matmul adds itself.
pub(super) const EPILOGUE_RANKS: usize = 32;
assert_constants!(adapters, { EPILOGUE_RANKS == EPILOGUE_RANKS });

/// Sizes of the adapters of a matmul's rows: most adapters of a row, and the largest rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub levels: usize,
    pub most_rank: usize,
}

/// Check that a matmul may add adapters of these sizes itself, instead of launches before and after it. Its plan also asks for rows,
/// matrices and the rest of the epilogue ([`crate::ops::linear::select::Epilogue::adapters`]).
pub const fn takes_in_matmul(sizes: Sizes) -> Result<(), MatmulRefusal> {
    if sizes.levels == 1 && sizes.most_rank <= EPILOGUE_RANKS {
        return Ok(());
    }
    Err(MatmulRefusal::Operands(
        "one adapter a row, of up to 32 ranks",
    ))
}
const _: () = assert!(EPILOGUE_RANKS == 32, "the number in the sentence");

/// Inputs that a lane reads at once, and outputs that it writes.
pub(super) const INPUTS: usize = 8;
pub(super) const OUTPUTS: usize = 2;
const _: () = assert!(INPUTS == 8 && OUTPUTS == 2, "the numbers in the sentences");

/// Columns that a block of [`Kernel::ShrinkPacking`] takes at most.
const MOST_COLUMNS: usize = 32;
assert_constants!(lora, { MOST_COLUMNS == MOST_COLUMNS });
/// Blocks of [`Kernel::ShrinkPacking`] that a launch aims at: two for each SM of a large card.
const PACKING_BLOCKS: usize = 264;
/// Blocks of one rank each up to which a launch takes one rank a block; beyond, four.
const MOST_SINGLE: usize = 512;

/// The launch that multiplies by A: its kernel, and the ranks that a block takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shrink {
    pub kernel: Kernel,
    pub ranks: usize,
    /// The calls that [`Kernel::ShrinkPacking`], which saves the launch that packs, takes; None if it takes this one.
    pub refused: Option<&'static str>,
}

/// The launch that multiplies `rows` rows by the A of adapters with `columns` ranks of all matrices and levels. `packed`: columns of the
/// input of the matmul, if it can be packed.
pub fn shrink(rows: usize, columns: usize, packed: Option<usize>) -> Shrink {
    if let Some(rows) = packed {
        let parts = PACKING_BLOCKS.div_ceil(rows).min(columns);
        return Shrink {
            kernel: Kernel::ShrinkPacking,
            ranks: columns.div_ceil(parts).min(MOST_COLUMNS),
            refused: None,
        };
    }
    let (kernel, ranks) = if rows * columns <= MOST_SINGLE {
        (Kernel::ShrinkGroup1, 1)
    } else {
        (Kernel::ShrinkGroup4, 4)
    };
    Shrink {
        kernel,
        ranks,
        refused: Some("matmuls whose input another launch may pack"),
    }
}

/// The kernels of the adapters of one matrix whose matmul is not joined, in their order.
pub const fn alone() -> (Kernel, Kernel) {
    (Kernel::Shrink, Kernel::Expand)
}

/// The kernel that multiplies by the B of adapters and adds to the results, which may have a gate.
pub const fn expand(gated: bool) -> Kernel {
    if gated {
        Kernel::ExpandGated
    } else {
        Kernel::ExpandGroup
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_rows_and_ranks() {
        // Ranks of q, k and v together, or of gate and up.
        for (rows, columns, ranks) in [
            (1, 3 * 16, 1),
            (8, 3 * 16, 1),
            (10, 3 * 16, 1),
            (11, 3 * 16, 4),
            (1, 512, 1),
            (1, 513, 4),
            (64, 2 * 8, 4),
        ] {
            let found = shrink(rows, columns, None);
            assert_eq!(found.ranks, ranks, "{rows} {columns}");
            assert_eq!(
                found.kernel.name(),
                format!("lora_shrink_group_{ranks}"),
                "{rows} {columns}"
            );
            assert!(found.refused.is_some());
        }
    }

    #[test]
    fn kernels_add_the_adapters_of_invariant_rows_and_pack_few() {
        for (rows, invariant, takes) in [
            (PACKED_ROWS, false, true),
            (PACKED_ROWS + 1, false, false),
            (PACKED_ROWS + 1, true, true),
        ] {
            assert_eq!(
                takes_rows(rows, invariant).is_ok(),
                takes,
                "{rows} {invariant}"
            );
        }
        assert!(packs_input(PACKED_ROWS, MOST_PACKED_WIDTH));
        assert!(!packs_input(PACKED_ROWS + 1, 8));
        assert!(!packs_input(1, MOST_PACKED_WIDTH + 8));
    }

    #[test]
    fn shapes_that_kernels_take() {
        for (in_features, widths, says) in [
            (64, &[2, 4, 6][..], None),
            (64, &[], Some("one to three")),
            (64, &[2; 4], Some("one to three")),
            (68, &[2], Some("multiple of 8")),
            (64, &[2, 3], Some("even number")),
        ] {
            let why = takes_shapes(in_features, widths)
                .err()
                .map(|why| why.to_string());
            let agrees = match (&why, says) {
                (Some(why), Some(says)) => why.contains(says),
                (why, says) => why.is_none() && says.is_none(),
            };
            assert!(agrees, "{in_features} {widths:?}: {why:?}");
        }
    }

    #[test]
    fn a_block_that_packs_takes_more_ranks_of_more_rows() {
        for (packed, columns, ranks) in [
            (8, 3 * 16, 2),
            (32, 3 * 16, 6),
            (64, 3 * 16, 10),
            (128, 3 * 64, 32),
            (16, 1, 1),
        ] {
            for rows in [1, packed] {
                let expected = Shrink {
                    kernel: Kernel::ShrinkPacking,
                    ranks,
                    refused: None,
                };
                assert_eq!(shrink(rows, columns, Some(packed)), expected);
            }
        }
    }

    #[test]
    fn a_gate_is_part_of_the_last_launch() {
        assert_eq!(
            [false, true].map(expand),
            [Kernel::ExpandGroup, Kernel::ExpandGated]
        );
    }

    #[test]
    fn names_differ() {
        let mut names = Kernel::ALL.map(Kernel::name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Kernel::ALL.len());
    }
}
