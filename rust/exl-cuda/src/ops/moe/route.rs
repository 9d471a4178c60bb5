//! The experts of each row by a router's logits, after a norm of the row if asked for.

use super::MOST_EXPERTS;
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::device::{BLOCK_RESERVED, Device};
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};
use crate::parameters::kernels;

/// Experts of a block.
const ROUTE_EXPERTS: usize = 8;
/// Rows up to which each has blocks of its own, and blocks for each SM if there are more rows: a block then reads its weights once for
/// several rows.
const OWN_ROWS: usize = 64;
const BLOCKS: usize = 5;
/// Rows, and logits, beyond which blocks of many rows are faster, by measurement.
const MANY_ROWS: usize = 144;
const MANY_LOGITS: usize = 8192;
/// Rows, and experts, that a warp of a block of many rows multiplies at a time.
const TILE: usize = 4;
/// Warps of a block.
const WARPS: usize = 8;
/// Shared memory of a block of many rows, which every card has.
const MANY_BYTES: usize = 48 * 1024;
/// Shared memory of a block beside its row and weights.
const STATIC_BYTES: usize = 9 * 1024;
/// Blocks of an SM that have shared memory at once if each row has its own; the rest of the SM's memory caches rows.
const RESIDENT: usize = 2;

assert_constants!(experts, { ROUTE_EXPERTS == ROUTE_EXPERTS, ROUTE_TILE == TILE });
assert_constants!(block_sum, { THREADS == 32 * WARPS });

/// Kernels that choose experts, whose results are bitwise the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// A block has few experts of one row after the other.
    Single,
    /// Blocks of several rows; `across` warps share [`TILE`] of them.
    Many { across: usize },
}

impl Kernel {
    /// As reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "experts_route",
            Self::Many { .. } => "experts_route_many",
        }
    }

    /// The kernel for a router's type of weights.
    fn of(self, bf16: bool) -> String {
        format!("{}_{}", self.name(), if bf16 { "bf16" } else { "f16" })
    }

    /// Rows of a block of many rows.
    const fn rows(across: usize) -> usize {
        TILE * WARPS / across
    }

    /// Bytes of the logits of a block of many rows, which a sparse choice has twice.
    const fn bytes(across: usize, experts: usize, sparse: bool) -> usize {
        4 * Self::rows(across) * experts * if sparse { 2 } else { 1 }
    }
}

pub(super) fn kernels() -> impl Iterator<Item = String> {
    let all = [Kernel::Single, Kernel::Many { across: 1 }];
    all.into_iter()
        .flat_map(|kernel| [false, true].map(|bf16| kernel.of(bf16)))
}

/// The kernel for `rows` rows.
pub fn select(rows: usize, experts: usize, choice: Choice, caps: &Capabilities) -> Kernel {
    let sparse = matches!(choice, Choice::Sparse { .. });
    let fits = |across: &usize| Kernel::bytes(*across, experts, sparse) <= MANY_BYTES;
    let mut ways = [1, 2, 4, 8].into_iter().filter(fits);
    // As few warps as possible share rows, but enough of them that every SM has a block; and no more than have experts of their own.
    let useful = |across: &usize| {
        2 * TILE * across > experts || rows.div_ceil(Kernel::rows(*across)) >= caps.sms
    };
    let many = rows > MANY_ROWS && rows * experts > MANY_LOGITS;
    match ways.clone().find(useful).or_else(|| ways.next_back()) {
        Some(across) if many => Kernel::Many { across },
        _ => Kernel::Single,
    }
}

/// How a row's experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// A softmax over all experts; the most likely are kept, and optionally normalized to sum to 1.
    Softmax { normalize: bool },
    /// The most likely by a softmax over those within a relative distance of 2 * jitter, then the same among the others.
    Sparse { jitter: f32 },
}

/// Operands of [`route`]; device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// `[rows, hidden]` F16, aligned to 16
    pub h: usize,
    /// `[experts, hidden]` F16 or BF16, aligned to 16
    pub weight: usize,
    pub bf16: bool,
    /// `[experts]` FP32 or 0
    pub bias: usize,
    pub prescale: f64,
    /// `[rows, experts]` FP32, scratch
    pub logits: usize,
    /// `[rows]` i32, zero before and after
    pub arrivals: usize,
    /// `[rows, chosen]` i64
    pub ids: usize,
    /// `[rows, chosen]` FP32
    pub weights: usize,
    pub rows: usize,
    /// A multiple of 8, at most [`MOST_HIDDEN`].
    pub hidden: usize,
    pub experts: usize,
    pub chosen: usize,
    pub choice: Choice,
    pub norm: Option<RouteNorm>,
}

/// An RMS norm of `h` before the route.
#[derive(Clone, Copy, Debug)]
pub struct RouteNorm {
    /// `[hidden]` FP32, aligned to 16
    pub weight: usize,
    pub eps: f32,
    pub weight_offset: f32,
    /// `[rows, hidden]` F16, aligned to 16: the normed rows; not `h`
    pub output: usize,
}

/// Most features of a row: halves in the shared memory that every card has, beside the static part.
pub const MOST_HIDDEN: usize = (48 * 1024 - STATIC_BYTES) / 2;

/// `struct RouteCall` of `kernels/moe/experts.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct RouteArgument {
    h: usize,
    weight: usize,
    bias: usize,
    prescale: f64,
    logits: usize,
    arrivals: usize,
    ids: usize,
    weights: usize,
    norm: usize,
    normed: usize,
    eps: f32,
    offset: f32,
    rows: i32,
    hidden: i32,
    experts: i32,
    chosen: i32,
    normalize: i32,
    jitter: f32,
    staged: i32,
    across: i32,
}

assert_layout!(RouteArgument, experts::RouteCall, { h, weight, bias, prescale, logits, arrivals, ids, weights, norm, normed, eps, offset, rows, hidden, experts, chosen, normalize, jitter, staged, across });

/// The experts of each row, most likely first; of equally likely ones the lower index first. Logits are summed in FP64.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn route(to: Target, op: &Route) -> Result<(), CudaError> {
    if op.rows == 0 {
        return Ok(());
    }
    if !(1..=MOST_EXPERTS).contains(&op.experts)
        || !(1..=op.experts).contains(&op.chosen)
        || op.hidden > MOST_HIDDEN
    {
        return Err(CudaError::Argument {
            what: format!(
                "{} of {} experts by {} features",
                op.chosen, op.experts, op.hidden
            ),
            limit: format!(
                "at most {MOST_EXPERTS}, of which at least one is chosen, and {MOST_HIDDEN} features"
            ),
        });
    }
    let device = Device::get(to.device)?;
    let caps = &device.info.caps;
    let row_bytes = 2 * op.hidden;
    let all_bytes = (1 + ROUTE_EXPERTS) * row_bytes;
    let staged = all_bytes + STATIC_BYTES <= caps.shared_per_block;
    let kernel = select(op.rows, op.experts, op.choice, caps);
    let (normalize, jitter) = match op.choice {
        Choice::Softmax { normalize } => (i32::from(normalize), -1.0),
        Choice::Sparse { jitter } => (0, jitter),
    };
    let norm = op.norm.unwrap_or(RouteNorm {
        weight: 0,
        eps: 0.0,
        weight_offset: 0.0,
        output: 0,
    });
    let argument = RouteArgument {
        h: op.h,
        weight: op.weight,
        bias: op.bias,
        prescale: op.prescale,
        logits: op.logits,
        arrivals: op.arrivals,
        ids: op.ids,
        weights: op.weights,
        norm: norm.weight,
        normed: norm.output,
        eps: norm.eps,
        offset: norm.weight_offset,
        rows: index32("rows", op.rows)?,
        hidden: op.hidden as i32,
        experts: op.experts as i32,
        chosen: op.chosen as i32,
        normalize,
        jitter,
        staged: i32::from(staged),
        across: match kernel {
            Kernel::Single => 1,
            Kernel::Many { across } => across as i32,
        },
    };
    let (grid, shared_bytes) = match kernel {
        Kernel::Single => {
            let blocks = op.experts.div_ceil(ROUTE_EXPERTS);
            let rows = match op.rows {
                few if few <= OWN_ROWS => few,
                more => more.min((BLOCKS * caps.sms).div_ceil(blocks)),
            };
            let bytes = if staged { all_bytes } else { row_bytes };
            ([blocks, rows], bytes)
        }
        Kernel::Many { across } => (
            [op.rows.div_ceil(Kernel::rows(across)), 1],
            Kernel::bytes(across, op.experts, jitter >= 0.0),
        ),
    };
    let launch = Launch {
        kernel: &kernel.of(op.bf16),
        grid: [grid[0] as u32, grid[1] as u32, 1],
        block: 32 * WARPS as u32,
        shared_bytes: shared_bytes as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::ExpertsRoute { call: argument };
    let block = shared_bytes + STATIC_BYTES + BLOCK_RESERVED;
    let shared = (op.rows <= OWN_ROWS).then_some(RESIDENT * block);
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run_with_shared(device, shared, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::CARDS;

    fn found(card: usize, rows: usize, experts: usize, choice: Choice) -> Kernel {
        select(rows, experts, choice, &CARDS[card].with_own_code())
    }

    #[test]
    fn many_rows_take_blocks_of_several() {
        let choice = Choice::Softmax { normalize: true };
        for card in 0..CARDS.len() {
            for (rows, experts, many) in [
                (1, 128, false),
                (144, 128, false),
                (145, 128, true),
                (145, 56, false),
                (1024, 8, false),
                (1025, 8, true),
                (200, 1024, true),
            ] {
                let kernel = found(card, rows, experts, choice);
                assert_eq!(kernel != Kernel::Single, many, "{rows} {experts}");
            }
        }
    }

    #[test]
    fn all_sms_have_blocks_or_all_warps_other_experts() {
        for card in 0..CARDS.len() {
            let sms = CARDS[card].with_own_code().sms;
            for choice in [
                Choice::Softmax { normalize: false },
                Choice::Sparse { jitter: 0.1 },
            ] {
                for (rows, experts) in [(145, 128), (700, 60), (5000, 8), (5000, 2), (145, 1024)] {
                    let Kernel::Many { across } = found(card, rows, experts, choice) else {
                        panic!("{rows} rows of {experts} experts");
                    };
                    let sparse = matches!(choice, Choice::Sparse { .. });
                    assert!(Kernel::bytes(across, experts, sparse) <= MANY_BYTES);
                    let blocks = rows.div_ceil(Kernel::rows(across));
                    assert!(across == 8 || 2 * TILE * across > experts || blocks >= sms);
                }
            }
        }
    }
}
