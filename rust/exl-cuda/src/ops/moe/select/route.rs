//! Who chooses the experts of each row: one launch that also norms the rows, one launch after a norm, or the caller, which computes logits
//! and chooses by a softmax or as [`super::super::route::Choice::Sparse`] does.

use super::super::MOST_EXPERTS;
use crate::abi::assert_constants;
use crate::capabilities::Capabilities;

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
pub(in super::super) const WARPS: usize = 8;
/// Shared memory of a block of many rows, which every card has.
const MANY_BYTES: usize = 48 * 1024;
/// Shared memory of a block without its row and weights.
pub(in super::super) const STATIC_BYTES: usize = 9 * 1024;
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
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "experts_route",
            Self::Many { .. } => "experts_route_many",
        }
    }

    /// The kernel for a router's type of weights.
    pub(in super::super) fn of(self, bf16: bool) -> String {
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

/// Most features of a row: halves in the shared memory that every card has, without the static part.
pub const MOST_HIDDEN: usize = (48 * 1024 - STATIC_BYTES) / 2;

/// Names of the functions of all kernels.
pub(in super::super) fn kernels() -> impl Iterator<Item = String> {
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
    /// Experts are chosen as [`super::super::route::Choice::Sparse`] says.
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
        let row_bytes = 2 * self.hidden;
        let all_bytes = (1 + ROUTE_EXPERTS) * row_bytes;
        let staged = all_bytes + STATIC_BYTES <= caps.shared_per_block;
        let (grid, shared) = match kernel {
            None => ([0, 0], 0),
            Some(Kernel::Single) => {
                let blocks = self.experts.div_ceil(ROUTE_EXPERTS);
                let of_rows = match rows {
                    few if few <= OWN_ROWS => few,
                    more => more.min((BLOCKS * caps.sms).div_ceil(blocks)),
                };
                (
                    [blocks, of_rows],
                    if staged { all_bytes } else { row_bytes },
                )
            }
            Some(Kernel::Many { across }) => (
                [rows.div_ceil(Kernel::rows(across)), 1],
                Kernel::bytes(across, self.experts, self.sparse),
            ),
        };
        Plan {
            router: *self,
            rows,
            kernel,
            norms: kernel.is_some() && norm == Some(NormShape::rms(self.hidden)),
            grid,
            shared,
            staged,
            resident: (rows <= OWN_ROWS).then_some(RESIDENT),
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
    /// Blocks of the launch: those of a row of blocks, and such rows.
    pub(in super::super) grid: [usize; 2],
    /// Bytes of shared memory of a block.
    pub(in super::super) shared: usize,
    /// A block that has one row after the other keeps its weights in shared memory.
    pub(in super::super) staged: bool,
    /// Blocks for which an SM reserves shared memory; None leaves that to the driver.
    pub(in super::super) resident: Option<usize>,
}

impl Plan {
    /// Name in reports.
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
