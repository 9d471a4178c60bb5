//! From a row of logits to a token: the transform chain in a fixed order of steps, for a batch of rows.
//!
//! A token depends only on logits, settings and random number. All instruction sets, thread counts, batches and the GPU give bitwise
//! identical results (`exl-cuda`, kernels/sampling, follows the same definitions). Three rules ensure this:
//!
//! * Weights are fixed-point: w = e^l by one polynomial of separate multiplications and additions ([`weights::weight`]), cut to
//!   `q = floor(w * 2^44)` in a u64. Sums of q are exact, so the order of summation does not matter. A candidate below 2^-44 of the most
//!   probable one has weight zero. It stays a candidate, and a later temperature may give it weight.
//! * Every cut is a comparison of integers. Orders are total: "descending" is (q descending, logit descending, id ascending). q never
//!   decreases as the logit rises, so up to XTC this is the order of logits.
//! * A draw walks the candidates in ascending order of id, or in descending order if a skew is set, which is defined over that order.
//!
//! Sorting is avoided: a prefix of the descending order is found by its border (histograms and selection).

mod candidates;
mod chain;
pub mod edits;
mod peaks;
mod radix;
mod ranked;
pub mod scalar;
mod shape;
pub mod weights;

use std::cell::RefCell;

use crate::isa::Isa;
use crate::pool;

pub use edits::{Dry, Edit, Penalties};

/// Widest row: sums of 2^19 weights of 2^44 fit a u64.
pub const MAX_LOGITS: usize = 1 << 19;

/// Late temperature, after the truncation stages (step 18).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Late {
    None,
    /// p^(1/T): 1 / T
    Fixed(f32),
    /// T = low + (high - low) * (H / Hmax)^exponent
    Dynamic {
        low: f64,
        high: f64,
        exponent: f64,
    },
}

/// Steps 9 to 22 as numbers; 0 switches a cut off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chain {
    pub greedy: bool,
    /// l = (x - max) * scale, or -(x - max)^2 * scale if `smooth`
    pub scale: f32,
    pub smooth: bool,
    pub top_k: usize,
    pub top_p: f64,
    pub top_a: f64,
    pub min_p: f64,
    pub tfs: f64,
    pub typical: f64,
    /// 2^-mu
    pub mirostat: f64,
    pub late: Late,
    pub xtc_probability: f64,
    pub xtc_threshold: f64,
    /// draw over the descending order
    pub descending: bool,
}

/// Numbers that are added to the logits.
#[derive(Clone, Copy, Debug)]
pub enum Bias<'a> {
    /// of the first ids
    Dense(&'a [f32]),
    /// of the named ids, each once; all others get `rest`
    Sparse {
        ids: &'a [i32],
        values: &'a [f32],
        rest: f32,
    },
}

impl Bias<'_> {
    /// Whether it changes no logit.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Dense(values) => values.is_empty(),
            Self::Sparse { ids, rest, .. } => ids.is_empty() && *rest == 0.0,
        }
    }
}

/// One row: logits and the edits of them.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    pub logits: &'a [f32],
    /// logits of the negative prompt and the scale of the mix
    pub negative: Option<(&'a [f32], f64)>,
    /// ids from here on are padding
    pub size: usize,
    /// penalties and discouraged ids, before the bias; each list in order
    pub before: [&'a [Edit]; 2],
    pub bias: Bias<'a>,
    /// DRY and banned ids
    pub after: [&'a [Edit]; 2],
    /// packed, 1 = allowed; ids beyond it are not
    pub mask: Option<&'a [i32]>,
    /// only these ids
    pub only: Option<&'a [i64]>,
    pub chain: Chain,
    /// packed ids that XTC does not change
    pub xtc_ignored: &'a [i32],
    /// in [0, 1), already skewed
    pub uniform: f64,
    pub top_n: usize,
}

/// A chosen token with its final probability, and the first `top_n` candidates in descending order.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub probability: f64,
    pub top: Vec<(u32, f64)>,
}

/// Reason for a missing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// all ids are excluded
    Empty,
    /// an allowed logit is NaN or +inf; in a mix of two prompts, any logit of either
    NotFinite,
}

thread_local! {
    static SCRATCH: RefCell<chain::Scratch> = RefCell::default();
}

/// Sample every row; the pool's threads divide the rows. Panics on rows beyond [`MAX_LOGITS`].
pub fn sample(rows: &[Row<'_>]) -> Vec<Result<Sampled, Failure>> {
    let isa = Isa::current();
    let one = |row: &Row<'_>| SCRATCH.with_borrow_mut(|scratch| chain::run(isa, row, scratch));
    pool::map(rows.len(), &|i| one(&rows[i]))
}

/// The final candidates of a row in ascending order of id, with their weights in units of 2^-44: a draw chooses from these.
pub fn distribution(row: &Row<'_>) -> Result<Vec<(u32, u64)>, Failure> {
    SCRATCH.with_borrow_mut(|scratch| chain::distribution(Isa::current(), row, scratch))
}

/// The logits of a row's vocabulary after steps 1 to 8; `out` has one element per id.
pub fn shaped(row: &Row<'_>, out: &mut [f32]) {
    let mut scratch = Vec::new();
    out.copy_from_slice(shape::shape(Isa::current(), row, &mut scratch));
}
