//! The launch that chooses the experts of each row by a router's logits, after a norm of the row if its plan ([`super::select::route`]) says
//! so.

use super::select::route::{Kernel, Plan, STATIC_BYTES, WARPS};
use crate::abi::assert_layout;
use crate::device::{BLOCK_RESERVED, Device};
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};
use crate::parameters::kernels;

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
        staged: i32::from(op.plan.staged),
        across: match kernel {
            Kernel::Single => 1,
            Kernel::Many { across } => across as i32,
        },
    };
    let launch = Launch {
        kernel: &kernel.of(op.bf16),
        grid: [op.plan.grid[0] as u32, op.plan.grid[1] as u32, 1],
        block: 32 * WARPS as u32,
        shared_bytes: op.plan.shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::ExpertsRoute { call: argument };
    let block = op.plan.shared + STATIC_BYTES + BLOCK_RESERVED;
    let shared = op.plan.resident.map(|blocks| blocks * block);
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run_with_shared(device, shared, &mut arguments) }
}
