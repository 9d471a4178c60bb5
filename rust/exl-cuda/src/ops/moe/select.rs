//! Ways to run the experts of a layer: in shared launches, for few or many rows, or one expert after the other.
//!
//! All ways give bitwise identical results. [`super::Experts::new`] reports which experts can share launches on a card.

/// Largest number of rows for which no expert has more than eight.
pub(super) const FEW_ROWS: usize = 8;

/// Average pairs an expert up to which few experts have more than eight.
const FEW_PAIRS: usize = 4;

/// Average rows an expert up to which shared launches are faster than one expert after the other, by measurement.
const SHARED_ROWS: usize = 64;

/// Rows of an expert times its weights up to which shared launches are faster, too.
const SHARED_WORK: usize = 3_000_000_000;

/// Ways to run the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Shared launches, eight rows of an expert at a time.
    Few,
    /// Shared launches, more rows of an expert at a time.
    Many,
    /// One expert after the other, each with the rows that chose it.
    Apart,
}

impl Kernel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Few => "experts_few",
            Self::Many => "experts_many",
            Self::Apart => "experts_apart",
        }
    }
}

/// Whether experts are multiplied in groups of eight rows: of `rows` rows with `chosen` of `count` experts each, few experts have more.
pub(super) fn by_eights(count: usize, chosen: usize, rows: usize) -> bool {
    rows <= FEW_ROWS || rows * chosen <= FEW_PAIRS * count
}

/// The way to run `rows` rows that choose `chosen` of `experts` experts of `weights` weights each.
pub fn select(rows: usize, chosen: usize, experts: usize, weights: usize) -> Kernel {
    if rows * chosen > experts * SHARED_ROWS.max(SHARED_WORK / weights.max(1)) {
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

    fn kernels([experts, hidden, width, chosen]: [usize; 4], rows: &[usize]) -> Vec<Vec<Kernel>> {
        let of = |k: usize, n| sized(k / 256, 2064, n);
        let (gate, down): (Matrix, Matrix) = (of(hidden, width), of(width, hidden));
        let all = vec![[&gate, &gate, &down]; experts];
        let of_card = |card: crate::Card| {
            let made = Experts::new(&all, &card.with_own_code()).expect("the card has room");
            rows.iter().map(|&rows| made.kernel(rows, chosen)).collect()
        };
        CARDS.into_iter().map(of_card).collect()
    }

    #[test]
    fn the_table_of_experts_on_every_card() {
        use Kernel::{Apart, Few, Many};
        for found in kernels(MIXTRAL, &[1, 16, 17, 32, 64, 256, 257, 512]) {
            assert_eq!(found, [Few, Few, Many, Many, Many, Many, Apart, Apart]);
        }
        for found in kernels(QWEN3_30B_A3B, &[1, 8, 64, 65, 512, 10_160, 10_161]) {
            assert_eq!(found, [Few, Few, Few, Many, Many, Many, Apart]);
        }
    }
}
