//! Ways to run the experts of a layer: in shared launches, for few or many rows, dequantized, or one expert after the other.
//!
//! Shared launches give results that are bitwise those of one expert after the other with batch-invariant matmuls.
//! [`super::Experts::new`] reports which experts can share launches on a card.

use super::MOST_PAIRS;
use super::plan::ITEM_ROWS;
use crate::rows::{FEW_ROWS, PACKED_ROWS};

/// Average rows an expert up to which shared launches are faster than one expert after the other, by measurement.
const SHARED_ROWS: usize = 64;

/// Rows of an expert times its weights up to which shared launches are faster, too.
const SHARED_WORK: usize = 3_000_000_000;

/// Average rows an expert from which dequantizing all experts that rows chose, for cuBLAS, is faster than shared launches, by measurement.
const DEQUANTIZED_ROWS: usize = 64;

/// Ways to run the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Shared launches, so many rows of an expert at a time.
    By8,
    By16,
    By32,
    /// Some experts at a time are dequantized and multiplied by cuBLAS in one call. A row's result depends on the other rows.
    Dequantized,
    /// One expert after the other, each with the rows that chose it.
    Apart,
}

impl Kernel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::By8 => "experts_by_8",
            Self::By16 => "experts_by_16",
            Self::By32 => "experts_by_32",
            Self::Dequantized => "experts_dequantized",
            Self::Apart => "experts_apart",
        }
    }
}

/// The index in [`ITEM_ROWS`] of the rows of an expert that are multiplied at a time, of the first `sizes`: the least that the average
/// expert needs. An expert with a few more is unpacked twice, which costs less than columns without rows. More than [`MOST_PAIRS`] are
/// several calls.
pub(super) fn item_size(rows: usize, chosen: usize, experts: usize, sizes: usize) -> usize {
    let pairs = rows.min(MOST_PAIRS / chosen.max(1)) * chosen;
    let fits = |&most: &usize| rows <= FEW_ROWS || pairs <= most * experts;
    let size = ITEM_ROWS.iter().position(fits);
    size.unwrap_or(ITEM_ROWS.len() - 1).min(sizes - 1)
}

/// The way to run `rows` rows that choose `chosen` of `experts` experts of `weights` weights each, on a card with room for the
/// first `sizes` of [`ITEM_ROWS`]. With `invariant`, rows do not depend on one another.
pub fn select(
    rows: usize,
    chosen: usize,
    experts: usize,
    weights: usize,
    sizes: usize,
    invariant: bool,
) -> Kernel {
    let pairs = rows * chosen;
    if !invariant && rows > PACKED_ROWS && pairs > experts * DEQUANTIZED_ROWS {
        Kernel::Dequantized
    } else if pairs > experts * SHARED_ROWS.max(SHARED_WORK / weights.max(1)) {
        Kernel::Apart
    } else {
        [Kernel::By8, Kernel::By16, Kernel::By32][item_size(rows, chosen, experts, sizes)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::Experts;
    use super::*;
    use crate::capabilities::CARDS;
    use crate::ops::linear::Matrix;
    use crate::ops::linear::tests::sized;

    /// Experts, hidden features, features of an expert, and experts that a row chooses.
    const MIXTRAL: [usize; 4] = [8, 4096, 14336, 2];
    const QWEN3_30B_A3B: [usize; 4] = [128, 2048, 768, 8];

    fn kernels(
        [experts, hidden, width, chosen]: [usize; 4],
        rows: &[usize],
        invariant: bool,
    ) -> Vec<Vec<Kernel>> {
        let of = |k: usize, n| sized(k / 256, 2064, n);
        let (gate, down): (Matrix, Matrix) = (of(hidden, width), of(width, hidden));
        let all = vec![[&gate, &gate, &down]; experts];
        let of_card = |card: crate::Card| {
            let made = Experts::new(&all, &card.with_own_code()).expect("the card has room");
            let of_rows = |&rows| made.kernel(rows, chosen, invariant);
            rows.iter().map(of_rows).collect()
        };
        CARDS.into_iter().map(of_card).collect()
    }

    #[test]
    fn the_table_of_experts_on_every_card() {
        use Kernel::{By8, By16, By32, Dequantized};
        for found in kernels(MIXTRAL, &[1, 32, 33, 64, 65, 256, 257, 2048], false) {
            assert_eq!(
                found,
                [By8, By8, By16, By16, By32, By32, Dequantized, Dequantized]
            );
        }
        // A call has at most 1,024 pairs: eight an expert here.
        for found in kernels(QWEN3_30B_A3B, &[1, 128, 129, 1024, 1025], false) {
            assert_eq!(found, [By8, By8, By8, By8, Dequantized]);
        }
    }

    #[test]
    fn experts_of_invariant_rows_are_not_dequantized() {
        use Kernel::{Apart, By8, By16, By32};
        for found in kernels(MIXTRAL, &[1, 33, 256, 257, 512], true) {
            assert_eq!(found, [By8, By16, By32, Apart, Apart]);
        }
        for found in kernels(QWEN3_30B_A3B, &[1, 128, 129, 10_160, 10_161], true) {
            assert_eq!(found, [By8, By8, By8, By8, Apart]);
        }
    }

    #[test]
    fn experts_with_a_bias_or_a_factor_are_not_dequantized() {
        let made = |change: fn(&mut Matrix)| {
            let (plain, mut other) = (sized(2, 2064, 512), sized(2, 2064, 512));
            change(&mut other);
            let all = vec![[&plain, &plain, &plain], [&plain, &plain, &other]];
            let card = CARDS[0].with_own_code();
            Experts::new(&all, &card)
                .expect("fits")
                .kernel(200, 1, false)
        };
        assert_eq!(made(|_| ()), Kernel::Dequantized);
        assert_eq!(made(|matrix| matrix.argument.bias = 16), Kernel::By32);
        assert_eq!(made(|matrix| matrix.argument.prescale = 0.5), Kernel::By32);
    }
}
