//! Ways to run the experts of a layer: in shared launches, for few or many rows, dequantized, or one expert after the other.
//!
//! Shared launches give results that are bitwise those of one expert after the other with batch-invariant matmuls.
//! [`super::Experts::new`] reports which experts can share launches on a card.

use crate::rows::{FEW_ROWS, PACKED_ROWS};

/// Average pairs an expert up to which few experts have more than eight.
const FEW_PAIRS: usize = 4;

/// Average rows an expert up to which shared launches are faster than one expert after the other, by measurement.
const SHARED_ROWS: usize = 64;

/// Rows of an expert times its weights up to which shared launches are faster, too.
const SHARED_WORK: usize = 3_000_000_000;

/// Average rows an expert from which dequantizing all experts that rows chose, for cuBLAS, is faster than shared launches, by measurement.
const DEQUANTIZED_ROWS: usize = 64;

/// Ways to run the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Shared launches, eight rows of an expert at a time.
    Few,
    /// Shared launches, more rows of an expert at a time.
    Many,
    /// Some experts at a time are dequantized and multiplied by cuBLAS in one call. A row's result depends on the other rows.
    Dequantized,
    /// One expert after the other, each with the rows that chose it.
    Apart,
}

impl Kernel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Few => "experts_few",
            Self::Many => "experts_many",
            Self::Dequantized => "experts_dequantized",
            Self::Apart => "experts_apart",
        }
    }
}

/// Whether experts are multiplied in groups of eight rows: of `rows` rows with `chosen` of `count` experts each, few experts have more.
pub(super) fn by_eights(count: usize, chosen: usize, rows: usize) -> bool {
    rows <= FEW_ROWS || rows * chosen <= FEW_PAIRS * count
}

/// The way to run `rows` rows that choose `chosen` of `experts` experts of `weights` weights each. With `invariant`, rows do not depend
/// on one another.
pub fn select(
    rows: usize,
    chosen: usize,
    experts: usize,
    weights: usize,
    invariant: bool,
) -> Kernel {
    let pairs = rows * chosen;
    if !invariant && rows > PACKED_ROWS && pairs > experts * DEQUANTIZED_ROWS {
        Kernel::Dequantized
    } else if pairs > experts * SHARED_ROWS.max(SHARED_WORK / weights.max(1)) {
        Kernel::Apart
    } else if by_eights(experts, chosen, rows) {
        Kernel::Few
    } else {
        Kernel::Many
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
        use Kernel::{Dequantized, Few, Many};
        for found in kernels(MIXTRAL, &[1, 16, 17, 64, 256, 257, 2048], false) {
            assert_eq!(
                found,
                [Few, Few, Many, Many, Many, Dequantized, Dequantized]
            );
        }
        for found in kernels(QWEN3_30B_A3B, &[1, 8, 64, 65, 1024, 1025, 2048], false) {
            assert_eq!(found, [Few, Few, Few, Many, Many, Dequantized, Dequantized]);
        }
    }

    #[test]
    fn experts_of_invariant_rows_are_not_dequantized() {
        use Kernel::{Apart, Few, Many};
        for found in kernels(MIXTRAL, &[1, 17, 256, 257, 512], true) {
            assert_eq!(found, [Few, Many, Many, Apart, Apart]);
        }
        for found in kernels(QWEN3_30B_A3B, &[1, 64, 65, 10_160, 10_161], true) {
            assert_eq!(found, [Few, Few, Many, Many, Apart]);
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
        assert_eq!(made(|matrix| matrix.argument.bias = 16), Kernel::Many);
        assert_eq!(made(|matrix| matrix.argument.prescale = 0.5), Kernel::Many);
    }
}
