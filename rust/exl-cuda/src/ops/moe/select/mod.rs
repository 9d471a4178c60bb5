//! The tables of mixtures: of routers in [`route`], and here ways to run the experts of a layer: in shared launches, for few or many rows, dequantized, or one expert after the other.
//!
//! Shared launches give results that are bitwise those of one expert after the other with batch-invariant matmuls.
//! [`super::Experts::new`] reports which experts can share launches on a card.

pub mod route;

use super::plan::Form;
use super::scratch::rows_at_once;
use crate::rows::FEW_ROWS;

/// Average rows an expert up to which shared launches are faster than one expert after the other, by measurement.
const SHARED_ROWS: usize = 64;

/// Rows of an expert times its weights up to which shared launches are faster, too.
const SHARED_WORK: usize = 3_000_000_000;

/// Average rows an expert from which cuBLAS with all experts dequantized that rows chose is faster than shared launches, by measurement.
const DEQUANTIZED_ROWS: usize = 64;

/// Rows of a float expert times its weights from which, beyond [`DEQUANTIZED_ROWS`], cuBLAS is faster than shared launches, by measurement on an
/// H200: a matmul of less is bound by the host, which launches three for each expert.
const SORTED_WORK: usize = 10_000_000_000;

/// Rows of a dequantized expert that cost cuBLAS no more than fewer.
pub(super) const FREE_ROWS: usize = 64;

/// Ways to run the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Shared launches.
    Shared(Form),
    /// Some experts at a time are dequantized and multiplied by cuBLAS in one call. A row's result depends on the other rows.
    Dequantized,
    /// Rows are sorted by expert, and cuBLAS multiplies those of one expert after the other. A row's result depends on the other rows.
    Sorted,
    /// One expert after the other, each with the rows that chose it.
    Apart,
}

impl Kernel {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shared(form) => match form {
                Form::By8 => "experts_by_8",
                Form::By16 => "experts_by_16",
                Form::By32 => "experts_by_32",
                Form::By64 => "experts_by_64",
                Form::PairsBy8 => "experts_by_2x8",
                Form::PairsBy16 => "experts_by_2x16",
            },
            Self::Dequantized => "experts_dequantized",
            Self::Sorted => "experts_sorted",
            Self::Apart => "experts_apart",
        }
    }

    /// Whether one call for all experts is faster than one expert after the other.
    pub const fn shares(self) -> bool {
        !matches!(self, Self::Apart)
    }

    pub const fn dequantizes(self) -> bool {
        matches!(self, Self::Dequantized)
    }

    pub const fn sorts(self) -> bool {
        matches!(self, Self::Sorted)
    }
}

/// Average rows of an expert up to which items have room for 8 rows, and for 16, by measurement on an H200. An expert with a few more than an item has
/// room for is unpacked twice, which costs less than columns without rows.
const ROWS_BY_8: usize = 5;
const ROWS_BY_16: usize = 16;
/// The second where two tiles share a load of rows.
const ROWS_BY_PAIRS_OF_16: usize = 32;

/// Average rows of a float expert up to which items have room for 8, 16 and 32 rows, by measurement on an H200. Of experts of at most
/// FLOAT_SMALL weights items of 32 rows are the fastest from one row on.
const FLOAT_ROWS_BY_8: usize = 5;
const FLOAT_ROWS_BY_16: usize = 8;
const FLOAT_ROWS_BY_32: usize = 28;
const FLOAT_SMALL: usize = 16_000_000;

/// Average rows of an expert, and features of a row, from which two tiles at a time are faster, by measurement on an H200: less than that is read
/// quickly.
const PAIRED_AVERAGE: usize = 1;
const PAIRED_HIDDEN: usize = 2_560;

/// The shape of a call: `rows` rows, each of which chooses `chosen` of `experts` experts of `hidden` inputs.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub rows: usize,
    pub chosen: usize,
    pub experts: usize,
    pub hidden: usize,
    /// Features between gate, up and down.
    pub width: usize,
}

impl Call {
    /// Weights of an expert.
    const fn weights(self) -> usize {
        3 * self.hidden * self.width
    }
}

/// How shared launches multiply, one of the `forms` of the card. More than [`super::MOST_PAIRS`] pairs are several calls.
pub(super) fn form(call: Call, forms: &[Form]) -> Form {
    let pairs = rows_at_once(call.rows, call.chosen) * call.chosen;
    let at_most = |average: usize| pairs <= average * call.experts;
    let paired = call.hidden >= PAIRED_HIDDEN && pairs >= PAIRED_AVERAGE * call.experts;
    let found = if call.rows <= FEW_ROWS || at_most(ROWS_BY_8) {
        [Form::PairsBy8, Form::By8]
    } else if at_most(ROWS_BY_16) {
        [Form::PairsBy16, Form::By16]
    } else if at_most(ROWS_BY_PAIRS_OF_16) {
        [Form::PairsBy16, Form::By32]
    } else {
        [Form::By32, Form::By32]
    };
    let [pair, single] = found;
    if paired && forms.contains(&pair) {
        return pair;
    }
    // A card with less memory takes the most rows that fit.
    let fitting = forms.iter().rev();
    let mut fitting = fitting.filter(|form| form.tiles() == 1 && form.rows() <= single.rows());
    fitting.next().copied().unwrap_or(forms[0])
}

/// Most rows of an item of shared launches of so many rows, on a card with or without memory and kernels for any form.
pub(super) fn most_rows(call: Call) -> usize {
    let single: Vec<Form> = Form::QUANTIZED
        .into_iter()
        .filter(|f| f.tiles() == 1)
        .collect();
    let of = |forms: &[Form]| form(call, forms).rows();
    of(&Form::QUANTIZED).max(of(&single))
}

/// As [`form`], for float experts.
pub(super) fn float_form(call: Call, forms: &[Form]) -> Form {
    let pairs = rows_at_once(call.rows, call.chosen) * call.chosen;
    let at_most = |average: usize| pairs <= average * call.experts;
    let (by_8, by_16) = if call.weights() <= FLOAT_SMALL {
        (pairs < call.experts, false)
    } else {
        (at_most(FLOAT_ROWS_BY_8), at_most(FLOAT_ROWS_BY_16))
    };
    let found = if call.rows <= FEW_ROWS || by_8 {
        Form::By8
    } else if by_16 {
        Form::By16
    } else if at_most(FLOAT_ROWS_BY_32) {
        Form::By32
    } else {
        Form::By64
    };
    // A card, or weights, without wide forms.
    if forms.contains(&found) {
        found
    } else {
        Form::By16
    }
}

/// The way to run a call by quantized experts, which multiply as `form` in shared launches. `dequantizes`: whether rows may depend on one another, and
/// dequantized matrices are all that the experts need.
pub fn select(call: Call, form: Form, dequantizes: bool) -> Kernel {
    let pairs = call.rows * call.chosen;
    if dequantizes && pairs > call.experts * DEQUANTIZED_ROWS {
        Kernel::Dequantized
    } else if pairs > call.experts * SHARED_ROWS.max(SHARED_WORK / call.weights().max(1)) {
        Kernel::Apart
    } else {
        Kernel::Shared(form)
    }
}

/// As [`select`], for float experts; `mixes`: rows may depend on one another.
pub fn select_float(call: Call, form: Form, mixes: bool) -> Kernel {
    let rows = DEQUANTIZED_ROWS.max(SORTED_WORK / call.weights().max(1));
    if mixes && call.rows * call.chosen > call.experts * rows {
        Kernel::Sorted
    } else {
        Kernel::Shared(form)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Experts;
    use super::Form::{By8, By16, By32, By64, PairsBy8, PairsBy16};
    use super::*;
    use crate::capabilities::CARDS;
    use crate::features::Feature;
    use crate::ops::linear::Matrix;
    use crate::ops::linear::float::FloatMatrix;
    use crate::ops::linear::tests::sized;

    /// Less than a row an expert, one, up to five, 16 and 32, more, and from where experts are dequantized.
    const ROWS: [usize; 8] = [3, 4, 20, 21, 128, 129, 257, 2048];

    /// Experts, hidden features, features of an expert, and experts that a row chooses.
    const MIXTRAL: [usize; 4] = [8, 4096, 14336, 2];
    const QWEN3_30B_A3B: [usize; 4] = [128, 2048, 768, 8];

    /// Shared memory of a block of which an SM holds as many blocks of two tiles as registers allow.
    const LARGE: usize = 200_000;

    /// The kernels of each card, and whether it runs kernels of pairs.
    fn kernels(
        [experts, hidden, width, chosen]: [usize; 4],
        rows: &[usize],
        invariant: bool,
    ) -> Vec<(Vec<Kernel>, bool)> {
        let of = |k: usize, n| sized(k / 256, 2064, n);
        let (gate, down): (Matrix, Matrix) = (of(hidden, width), of(width, hidden));
        let all = vec![[&gate, &gate, &down]; experts];
        let of_card = |card: crate::Card| {
            let card = card.with_own_code();
            let made = Experts::new(&all, &card).expect("the card has room");
            let of_rows = |&rows| made.kernel(rows, chosen, invariant);
            (
                rows.iter().map(of_rows).collect(),
                card.has(Feature::BulkCopy) && card.shared_per_block > LARGE,
            )
        };
        CARDS.into_iter().map(of_card).collect()
    }

    #[test]
    fn the_table_of_experts_on_every_card() {
        for (found, pairs) in kernels(MIXTRAL, &ROWS, false) {
            let of_pairs =
                [By8, PairsBy8, PairsBy8, PairsBy16, PairsBy16, By32].map(Kernel::Shared);
            let others = [By8, By8, By8, By16, By32, By32].map(Kernel::Shared);
            assert_eq!(found[..6], if pairs { of_pairs } else { others });
            assert_eq!(found[6..], [Kernel::Dequantized; 2]);
        }
        for (found, _) in kernels(QWEN3_30B_A3B, &[1, 80, 81, 1024, 1025], false) {
            assert_eq!(found[..4], [By8, By8, By16, By32].map(Kernel::Shared));
            assert_eq!(found[4], Kernel::Dequantized);
        }
    }

    #[test]
    fn experts_of_invariant_rows_are_not_dequantized() {
        for (found, _) in kernels(MIXTRAL, &[1, 256, 257, 512], true) {
            assert_eq!(found[..2], [By8, By32].map(Kernel::Shared));
            assert_eq!(found[2..], [Kernel::Apart; 2]);
        }
        for (found, _) in kernels(QWEN3_30B_A3B, &[1, 80, 129, 10_160, 10_161], true) {
            assert_eq!(found[..4], [By8, By8, By16, By32].map(Kernel::Shared));
            assert_eq!(found[4], Kernel::Apart);
        }
    }

    #[test]
    fn the_table_of_float_experts_on_every_card() {
        let experts = |card: &crate::Capabilities, [count, hidden, width, _]: [usize; 4]| {
            let matrix = |in_features, out_features| FloatMatrix {
                weight: 4096,
                bias: 16,
                in_features,
                out_features,
                scale: 0.125,
                prescale: 0.5,
            };
            let (up, down) = (matrix(hidden, width), matrix(width, hidden));
            Experts::of_float(&vec![[&up, &up, &down]; count], card).expect("the card has room")
        };
        for card in CARDS.map(|card| card.with_own_code()) {
            let [by_32, by_64] = if card.has(Feature::LaneCopies) {
                [By32, By64]
            } else {
                [By16; 2]
            };
            let mixtral = experts(&card, MIXTRAL);
            let of = |rows| mixtral.kernel(rows, 2, false);
            assert_eq!([1, 8, 20].map(of), [By8; 3].map(Kernel::Shared));
            assert_eq!([21, 32].map(of), [By16; 2].map(Kernel::Shared));
            assert_eq!([33, 112].map(of), [by_32; 2].map(Kernel::Shared));
            assert_eq!([113, 256].map(of), [by_64; 2].map(Kernel::Shared));
            assert_eq!(of(257), Kernel::Sorted);
            assert_eq!(mixtral.kernel(257, 2, true), Kernel::Shared(by_64));
            // Small experts, whose matmuls are sorted only where each has much work.
            let qwen = experts(&card, QWEN3_30B_A3B);
            let of = |rows| qwen.kernel(rows, 8, false);
            let few = [By8, By8, by_32, by_32].map(Kernel::Shared);
            assert_eq!([1, 15, 16, 448].map(of), few);
            assert_eq!([449, 33_904].map(of), [by_64; 2].map(Kernel::Shared));
            assert_eq!(of(33_905), Kernel::Sorted);
            assert_eq!(rows_at_once(33_904, 8), 2048);
            assert_eq!(qwen.kernel(33_905, 8, true), Kernel::Shared(by_64));
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
        let shared = Kernel::Shared(By32);
        assert_eq!(made(|_| ()), Kernel::Dequantized);
        assert_eq!(made(|matrix| matrix.argument.bias = 16), shared);
        assert_eq!(made(|matrix| matrix.argument.prescale = 0.5), shared);
    }
}
