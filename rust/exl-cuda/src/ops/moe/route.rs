//! The experts of each row by a router's logits, after a norm of the row if asked for.
//!
//! [`Router::plan`] decides who chooses: one launch that also norms the rows, one launch after a norm, or the caller, which computes logits
//! and chooses by a softmax or as [`Choice::Sparse`] does.

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
fn select(rows: usize, experts: usize, sparse: bool, caps: &Capabilities) -> Kernel {
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

/// The router of a layer, loaded or not: what its plans depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Router {
    /// Features of a row.
    pub hidden: usize,
    pub experts: usize,
    /// Experts of a row.
    pub chosen: usize,
    /// Experts are chosen as [`Choice::Sparse`] says.
    pub sparse: bool,
    pub quantized: bool,
}

/// A norm that the caller would like the launch to apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    /// Elements of the weight.
    pub features: usize,
    /// A LayerNorm.
    pub layer: bool,
    pub float32: bool,
    /// The weight is aligned to 16 bytes.
    pub aligned: bool,
}

impl NormShape {
    /// An RMS norm as models load it.
    pub const fn rms(features: usize) -> Self {
        Self {
            features,
            layer: false,
            float32: true,
            aligned: true,
        }
    }
}

impl Router {
    /// Why no kernel chooses among the experts, whatever the card and the rows; None where one does.
    pub fn refusal(&self) -> Option<String> {
        let Self {
            hidden,
            experts,
            chosen,
            ..
        } = *self;
        if self.quantized {
            return Some("the router's matrix is quantized".to_owned());
        }
        if !hidden.is_multiple_of(8) || hidden > MOST_HIDDEN {
            return Some(format!(
                "the router takes {hidden} features: expected a multiple of 8, at most {MOST_HIDDEN}"
            ));
        }
        if experts > MOST_EXPERTS || !(1..=experts).contains(&chosen) {
            return Some(format!(
                "{chosen} experts of {experts} cannot be chosen: expected at least one, of at most {MOST_EXPERTS}"
            ));
        }
        None
    }

    /// How `rows` rows are routed, after `norm` if there is one.
    pub fn plan(&self, rows: usize, norm: Option<NormShape>, caps: &Capabilities) -> Plan {
        let kernel = match self.refusal() {
            Some(_) => None,
            None => Some(select(rows, self.experts, self.sparse, caps)),
        };
        Plan {
            router: *self,
            rows,
            kernel,
            norms: kernel.is_some() && norm == Some(NormShape::rms(self.hidden)),
        }
    }
}

/// How a number of rows is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub router: Router,
    pub rows: usize,
    /// None where the caller computes logits and chooses.
    pub kernel: Option<Kernel>,
    /// The launch norms the rows first.
    pub norms: bool,
}

impl Plan {
    /// As reports name it.
    pub const fn name(&self) -> &'static str {
        match self.kernel {
            Some(kernel) => kernel.name(),
            None if self.router.sparse => "sparse_mixture",
            None => "topk",
        }
    }

    /// Rows of `logits` and `arrivals` of a launch.
    pub const fn scratch_rows(&self) -> usize {
        match self.kernel {
            Some(Kernel::Single) => self.rows,
            Some(Kernel::Many { .. }) | None => 0,
        }
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
    /// `[Plan::scratch_rows, experts]` FP32, scratch
    pub logits: usize,
    /// `[Plan::scratch_rows]` i32, zero before and after
    pub arrivals: usize,
    /// `[rows, chosen]` i64
    pub ids: usize,
    /// `[rows, chosen]` FP32
    pub weights: usize,
    pub plan: Plan,
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
    let Plan { router, rows, .. } = op.plan;
    if rows == 0 {
        return Ok(());
    }
    let Some(kernel) = op.plan.kernel else {
        return Err(CudaError::Argument {
            what: router.refusal().unwrap_or_default(),
            limit: "a plan with a kernel".to_owned(),
        });
    };
    let device = Device::get(to.device)?;
    let caps = &device.info.caps;
    let row_bytes = 2 * router.hidden;
    let all_bytes = (1 + ROUTE_EXPERTS) * row_bytes;
    let staged = all_bytes + STATIC_BYTES <= caps.shared_per_block;
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
        rows: index32("rows", rows)?,
        hidden: router.hidden as i32,
        experts: router.experts as i32,
        chosen: router.chosen as i32,
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
            let blocks = router.experts.div_ceil(ROUTE_EXPERTS);
            let rows = match rows {
                few if few <= OWN_ROWS => few,
                more => more.min((BLOCKS * caps.sms).div_ceil(blocks)),
            };
            let bytes = if staged { all_bytes } else { row_bytes };
            ([blocks, rows], bytes)
        }
        Kernel::Many { across } => (
            [rows.div_ceil(Kernel::rows(across)), 1],
            Kernel::bytes(across, router.experts, router.sparse),
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
    let shared = (rows <= OWN_ROWS).then_some(RESIDENT * block);
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run_with_shared(device, shared, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::CARDS;

    fn router(experts: usize, sparse: bool) -> Router {
        Router {
            hidden: 2048,
            experts,
            chosen: 2,
            sparse,
            quantized: false,
        }
    }

    fn found(card: usize, rows: usize, experts: usize, sparse: bool) -> Kernel {
        let caps = CARDS[card].with_own_code();
        let plan = router(experts, sparse).plan(rows, None, &caps);
        plan.kernel.expect("a kernel routes floats")
    }

    #[test]
    fn many_rows_take_blocks_of_several() {
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
                let kernel = found(card, rows, experts, false);
                assert_eq!(kernel != Kernel::Single, many, "{rows} {experts}");
            }
        }
    }

    #[test]
    fn all_sms_have_blocks_or_all_warps_other_experts() {
        for card in 0..CARDS.len() {
            let sms = CARDS[card].with_own_code().sms;
            for sparse in [false, true] {
                for (rows, experts) in [(145, 128), (700, 60), (5000, 8), (5000, 2), (145, 1024)] {
                    let Kernel::Many { across } = found(card, rows, experts, sparse) else {
                        panic!("{rows} rows of {experts} experts");
                    };
                    assert!(Kernel::bytes(across, experts, sparse) <= MANY_BYTES);
                    let blocks = rows.div_ceil(Kernel::rows(across));
                    assert!(across == 8 || 2 * TILE * across > experts || blocks >= sms);
                }
            }
        }
    }

    #[test]
    fn the_table_of_routers_on_every_card() {
        for caps in CARDS.map(|card| card.with_own_code()) {
            let rms = Some(NormShape::rms(2048));
            let plan = router(8, false).plan(1, rms, &caps);
            assert!(plan.norms && plan.kernel == Some(Kernel::Single));
            for other in [
                NormShape::rms(2056),
                NormShape {
                    layer: true,
                    ..NormShape::rms(2048)
                },
                NormShape {
                    float32: false,
                    ..NormShape::rms(2048)
                },
                NormShape {
                    aligned: false,
                    ..NormShape::rms(2048)
                },
            ] {
                let plan = router(8, false).plan(1, Some(other), &caps);
                assert!(
                    !plan.norms && plan.kernel == Some(Kernel::Single),
                    "{other:?}"
                );
            }
            for (sparse, name) in [(false, "topk"), (true, "sparse_mixture")] {
                let made = router(8, sparse);
                for refused in [
                    Router {
                        hidden: 2052,
                        ..made
                    },
                    Router {
                        hidden: MOST_HIDDEN + 8,
                        ..made
                    },
                    Router {
                        experts: MOST_EXPERTS + 1,
                        ..made
                    },
                    Router { chosen: 9, ..made },
                    Router { chosen: 0, ..made },
                    Router {
                        quantized: true,
                        ..made
                    },
                ] {
                    let plan = refused.plan(1, rms, &caps);
                    assert_eq!(
                        (plan.name(), plan.norms, plan.scratch_rows()),
                        (name, false, 0),
                        "{refused:?}"
                    );
                }
            }
        }
    }
}
