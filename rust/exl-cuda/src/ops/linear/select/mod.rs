//! The table that picks the kernel of a quantized matmul by rows, matrices, card, epilogue and alignment.
//!
//! All kernels give bitwise identical results up to [`PACKED_ROWS`] rows, so the choice only affects speed. Each kernel's module
//! reports what it cannot take as a [`Refusal`]; this module has the order in which kernels are tried. Launches and reports use the same
//! functions: [`plan`] for matrices over one input with an epilogue, [`plan_alone`] for one matrix.

mod call;
mod plan;
#[cfg(test)]
mod tests;

use super::{Matrix, batch, few, ring};
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::launch::CudaError;
use crate::rows::{BLOCK_ROWS, FEW_ROWS, GEMV_ROWS, PACKED_ROWS, STEP_ROWS};

pub(super) use call::check_alike;
pub(crate) use call::check_rows;
pub use call::{Call, Epilogue, Refusal};
pub use plan::{Plan, Planned, Tuning};

/// Whether the rows of a call are batch-invariant: always for few rows, else if the call asks for it.
pub const fn is_invariant(rows: usize, invariant: bool) -> bool {
    rows <= PACKED_ROWS || invariant
}

/// Whether a call needs blocks of rows to be batch-invariant.
const fn needs_blocks(rows: usize, invariant: bool) -> bool {
    rows > PACKED_ROWS && is_invariant(rows, invariant)
}

/// Most rows of a pass, other than a decode step, that run on packed weights and are batch-invariant. `whole_blocks`: of every matrix, one
/// launch takes [`BLOCK_ROWS`] rows ([`Plan::is_whole_block`]); the two blocks of a pass take as long as dequantizing each matrix.
pub const fn pass_rows(whole_blocks: bool) -> usize {
    if whole_blocks { STEP_ROWS } else { PACKED_ROWS }
}

/// Whether a pass of `rows` rows runs on packed weights, batch-invariant, in blocks if need be: a decode step does, so that its tokens do not
/// depend on whether it is captured, and any other pass of up to `packed` rows ([`pass_rows`] of the model).
pub const fn runs_packed(rows: usize, decodes: bool, packed: usize) -> bool {
    rows <= if decodes { STEP_ROWS } else { packed }
}

/// Least bytes of packed weights for which [`Kernel::GemmFew`] saves more than the launch that packs its input takes.
pub const LEAST_PACKED_ALONE: usize = 8 << 20;

/// Kernels of a quantized matmul, and dequantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// A ring of weight stages in shared memory, with the activations next to it; one launch with norm, gate and residual.
    GemvRing,
    /// Activations packed once by an earlier launch or by the previous kernel; weights stream at the speed of one row.
    GemmFew,
    /// [`Kernel::GemmFew`] without bulk copies: weights go from global memory directly into registers, and a norm is a launch of its own.
    GemmDirect,
    /// Warpgroup matrix instructions, or `mma.sync` fed by asynchronous copies, on packed activations.
    GemmBatch,
    /// `mma.sync` on packed activations from global memory, for every card; one matrix, no epilogue.
    GemmTile,
    /// Dequantize the matrix, then cuBLAS.
    GemmLarge,
}

impl Kernel {
    pub const ALL: [Self; 6] = [
        Self::GemvRing,
        Self::GemmFew,
        Self::GemmDirect,
        Self::GemmBatch,
        Self::GemmTile,
        Self::GemmLarge,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::GemvRing => "gemv_ring",
            Self::GemmFew => "gemm_few",
            Self::GemmDirect => "gemm_direct",
            Self::GemmBatch => "gemm_batch",
            Self::GemmTile => "gemm_tile",
            Self::GemmLarge => "gemm_large",
        }
    }

    /// Most rows of a launch.
    pub const fn most_rows(self) -> usize {
        match self {
            Self::GemvRing | Self::GemmFew | Self::GemmDirect => FEW_ROWS,
            Self::GemmBatch => BLOCK_ROWS,
            Self::GemmTile => PACKED_ROWS,
            Self::GemmLarge => usize::MAX,
        }
    }

    /// The kernel of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kernel| kernel.name() == name)
    }

    /// Returns why the kernel cannot take this call; `Ok` if it can.
    fn takes(self, caps: &Capabilities, matrices: &[&Matrix], call: Call) -> Result<(), Refusal> {
        let Call { rows, epilogue, .. } = call;
        check_rows(rows, self.most_rows())?;
        if epilogue.adapters.is_some() && self != Self::GemvRing {
            return Err(Refusal::Operands("no adapters"));
        }
        // For more rows, a launch of the LayerNorm that packs the input of a faster kernel repays.
        if epilogue.layer && (self != Self::GemvRing || rows > GEMV_ROWS) {
            return Err(Refusal::Operands("an RMS norm"));
        }
        match self {
            Self::GemvRing => ring::takes(caps, matrices, rows, epilogue)?,
            Self::GemmFew => few::takes(caps, matrices, epilogue.gate)?,
            Self::GemmDirect => {
                few::plan_direct(caps, matrices, rows, epilogue.gate).map(|_| ())?;
            }
            Self::GemmBatch => batch::takes(caps, matrices, rows, epilogue)?,
            Self::GemmTile | Self::GemmLarge if matrices.len() > 1 || epilogue.is_some() => {
                return Err(Refusal::Matrices(
                    "one matrix a launch, without an epilogue",
                ));
            }
            Self::GemmTile | Self::GemmLarge => {}
        }
        let (reads_lines, stores_pairs) = match self {
            Self::GemvRing | Self::GemmFew | Self::GemmDirect => (true, false),
            Self::GemmBatch => (epilogue.norm, epilogue.residual),
            Self::GemmTile | Self::GemmLarge => (false, false),
        };
        if reads_lines && !call.aligned_input {
            return Err(Refusal::Operands("inputs aligned to 16 bytes"));
        }
        if stores_pairs && !call.aligned_output {
            return Err(Refusal::Operands(
                "results aligned to 8 bytes and residuals to 4",
            ));
        }
        Ok(())
    }
}
/// Plan a call of `matrices` over one input, on a card of these capabilities.
///
/// More than [`PACKED_ROWS`] rows dequantize each matrix once or, if rows must be batch-invariant, run in blocks on packed weights:
/// of [`BLOCK_ROWS`] rows where a kernel takes them, else of [`PACKED_ROWS`].
pub fn plan(caps: &Capabilities, matrices: &[&Matrix], call: Call) -> Plan {
    let of = |rows| plan(caps, matrices, Call { rows, ..call });
    if call.rows > BLOCK_ROWS && call.invariant {
        let (mut block, rest) = (of(BLOCK_ROWS), call.rows % BLOCK_ROWS);
        block.joined &= rest == 0 || of(rest).joined;
        return block;
    }
    if !is_invariant(call.rows, call.invariant) {
        let Plan {
            kernel, refused, ..
        } = plan_alone(caps, matrices[0], call);
        let tuning = Tuning::default();
        return Plan::new(caps, matrices, call, (kernel, false), refused, tuning);
    }
    let order = joined_order(caps, matrices, call);
    // Only the ring adds adapters, so only its reason is worth telling.
    let order = match call.epilogue.adapters {
        Some(_) => &[Kernel::GemvRing][..],
        None => &order,
    };
    let (kernel, refused) = first_of(order, caps, matrices, call);
    if let Some(kernel) = kernel {
        return Plan::new(
            caps,
            matrices,
            call,
            (kernel, true),
            refused,
            Tuning::default(),
        );
    }
    if call.rows > PACKED_ROWS {
        return of(PACKED_ROWS);
    }
    let alone = plan_alone(caps, matrices[0], call);
    Plan::new(
        caps,
        matrices,
        call,
        (alone.kernel, false),
        refused,
        Tuning::default(),
    )
}

/// Plan one matrix without an epilogue and without scratch memory that outlives the call. A separate launch packs the input of
/// [`Kernel::GemmFew`], which only large matrices repay where the ring takes them; [`Kernel::GemmDirect`] and [`Kernel::GemmTile`] both need
/// that launch, and the former is faster. Inputs that are not aligned are copied. Of `call`, epilogue and alignment are
/// ignored, except for BF16. Batch-invariant calls of more rows run in blocks, as in [`plan`].
pub fn plan_alone(caps: &Capabilities, matrix: &Matrix, call: Call) -> Plan {
    let epilogue = Epilogue {
        bf16: call.epilogue.bf16,
        ..Epilogue::default()
    };
    let many = needs_blocks(call.rows, call.invariant);
    let block = Call::aligned(call.rows.min(BLOCK_ROWS), epilogue);
    let rows = match Kernel::GemmBatch.takes(caps, &[matrix], block) {
        Ok(()) if many => block.rows,
        Err(_) if many => PACKED_ROWS,
        _ => call.rows,
    };
    let large = rows > GEMV_ROWS && matrix.image_bytes() >= LEAST_PACKED_ALONE;
    // Where the ring of a long input starves, the batch kernel reads the weights faster.
    let idles = |matrix| caps.has(Feature::Wgmma) && few::idles(caps, &[matrix], false, false);
    let few = (large && rows <= FEW_ROWS && !idles(matrix)).then_some(Kernel::GemmFew);
    // Without wgmma, a batch of few rows costs as much as one of sixteen.
    let batch = is_invariant(rows, call.invariant) && (rows > FEW_ROWS || caps.has(Feature::Wgmma));
    let order: Vec<Kernel> = few
        .into_iter()
        .chain([Kernel::GemvRing])
        .chain(batch.then_some(Kernel::GemmBatch))
        .chain([Kernel::GemmDirect, Kernel::GemmTile])
        .collect();
    let call = Call {
        invariant: call.invariant,
        ..Call::aligned(rows, epilogue)
    };
    let (kernel, refused) = first_of(&order, caps, &[matrix], call);
    let kernel = kernel.unwrap_or(Kernel::GemmLarge);
    Plan::new(
        caps,
        &[matrix],
        call,
        (kernel, true),
        refused,
        Tuning::default(),
    )
}

/// Plan a call by `kernel`, for benchmarks and tests that compare kernels; an error if it does not take the call.
pub fn plan_with(
    kernel: Kernel,
    caps: &Capabilities,
    matrices: &[&Matrix],
    call: Call,
    tuning: Tuning,
) -> Result<Plan, CudaError> {
    kernel
        .takes(caps, matrices, call)
        .map_err(|why| why.for_kernel(kernel))?;
    Ok(Plan::new(
        caps,
        matrices,
        call,
        (kernel, true),
        Vec::new(),
        tuning,
    ))
}

/// The first kernel of `order` that takes the call, and why the earlier ones do not.
fn first_of(
    order: &[Kernel],
    caps: &Capabilities,
    matrices: &[&Matrix],
    call: Call,
) -> (Option<Kernel>, Vec<(Kernel, Refusal)>) {
    let mut refused = Vec::new();
    for &kernel in order {
        match kernel.takes(caps, matrices, call) {
            Ok(()) => return (Some(kernel), refused),
            Err(Refusal::Rows { rows, limit }) if rows > limit && limit < PACKED_ROWS => {}
            Err(why) => refused.push((kernel, why)),
        }
    }
    (None, refused)
}

/// Kernels that take an epilogue, fastest first.
fn joined_order(caps: &Capabilities, matrices: &[&Matrix], call: Call) -> [Kernel; 4] {
    use Kernel::{GemmBatch, GemmDirect, GemmFew, GemvRing};
    let Epilogue { gate, norm, .. } = call.epilogue;
    if call.rows <= GEMV_ROWS {
        [GemvRing, GemmFew, GemmDirect, GemmBatch]
    } else if call.rows <= FEW_ROWS && few::idles(caps, matrices, gate, norm) {
        [GemmDirect, GemmFew, GemvRing, GemmBatch]
    } else {
        [GemmFew, GemvRing, GemmDirect, GemmBatch]
    }
}
