//! The ring kernel: matmuls of few rows, of up to three matrices over one input, with a fused norm prologue and epilogue.

mod plan;

use super::batch::COUNTERS;
use super::select::{Epilogue, Refusal};
use super::{Half, Matrix, lora};
use crate::abi::assert_constants;
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::Target;
use crate::parameters::kernels;
pub use plan::Plan;
use plan::{LAYER, THREADS, plan};

/// Most matrices of a launch.
pub const MATRICES: usize = 3;
/// `gate` of the kernels' parameters without an activation (`kernels/linear/gate.cuh`).
pub(super) const NO_GATE: i32 = -1;

assert_constants!(gate, { NO_GATE == NO_GATE });
assert_constants!(ring_task, { MATRICES == MATRICES });

/// Norm of the input before the matmul: an RMS norm, or a LayerNorm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[in_features]` FP32, aligned to 16 bytes.
    pub weight: usize,
    pub eps: f32,
    /// Added to the weight of an RMS norm.
    pub offset: f32,
    /// Bias of a LayerNorm, stored like the weight, or 0.
    pub bias: usize,
    pub layer: bool,
}

/// Operands of a matmul: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[m, in_features]` of `x_type`, F16 or BF16, aligned to 16 bytes.
    pub x: usize,
    pub x_type: Half,
    /// `[m, sum of out_features]` of `y_type`, or `[m, out_features]` if gated.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
    /// Like y, added to the result; 0 for none.
    pub residual: usize,
    /// Number of the activation (`ops::elementwise`) of the first of two matrices, which then gates the second.
    pub gate: Option<i32>,
    /// Number of the activation of all results; None with a gate.
    pub activation: Option<i32>,
    pub norm: Option<Norm>,
    /// Added to the results before gate and residual, if the plan is for them: of `m` rows of the matrices.
    pub adapters: Option<lora::InMatmul>,
}

impl Matmul {
    /// `gate` of the kernels' parameters (`kernels/linear/gate.cuh`).
    pub(super) fn gate_argument(&self) -> i32 {
        let of_all = self.activation.map(|activation| NO_GATE - 1 - activation);
        self.gate.or(of_all).unwrap_or(NO_GATE)
    }
}

/// The kernels of matrices of `kind`.
pub(super) fn kernels(kind: &str) -> Vec<String> {
    let forms = |entry: u32| {
        [
            format!("gemv_ring_{kind}_{entry}"),
            format!("gemv_ring_{kind}_{entry}_general"),
            format!("gemv_ring_adapted_{kind}_{entry}"),
        ]
    };
    [128, 32].into_iter().flat_map(forms).collect()
}

/// Depth and window of the ring, for benchmarks that override the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    pub slots: i32,
    pub window: i32,
}

/// Bytes of the inter-block workspace of a launch, all ones before and after it; 0 for none.
pub(super) const fn exchange_bytes(matrices: &[&Matrix], rows: usize, epilogue: Epilogue) -> usize {
    if epilogue.adapters.is_some() {
        // The counters of `gemm_batch` keep counting; after them all bytes are ones between launches.
        COUNTERS * 4 + lora::exchange_bytes(rows, matrices.len())
    } else {
        0
    }
}

/// Whether one launch takes `rows` rows of these matrices.
pub(super) fn takes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), Refusal> {
    planned(caps, matrices, rows, epilogue, None).map(|_| ())
}

/// The launch of `rows` rows, without addresses.
pub(super) fn planned(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
    tuning: Option<Tuning>,
) -> Result<Plan, Refusal> {
    plan(caps, matrices, rows, epilogue, tuning)
}

/// Bytes of shared memory of a block, if [`takes`] holds.
#[cfg(test)]
pub(super) fn shared_bytes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
) -> Option<usize> {
    let planned = planned(caps, matrices, rows, epilogue, None).ok()?;
    Some(planned.shared)
}

/// Number of activation rows that one launch for these matrices takes on this GPU; 0 if it cannot run there.
#[cfg(test)]
pub fn rows(caps: &Capabilities, matrices: &[&Matrix], epilogue: Epilogue) -> usize {
    (1..=crate::rows::FEW_ROWS)
        .rev()
        .find(|&m| plan(caps, matrices, m, epilogue, None).is_ok())
        .unwrap_or(0)
}

/// The matmul in one launch, as planned for these matrices, rows and epilogue. Results of `matrices` are side by side in their order.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn launch(
    to: Target,
    matrices: &[&Matrix],
    op: &Matmul,
    plan: &Plan,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let gated = op.gate.is_some();
    let Plan {
        mut task,
        shared,
        deal,
        staging,
    } = plan.clone();
    (task.x, task.x_kind) = (op.x, op.x_type as i32);
    (task.y, task.y_kind) = (op.y, op.y_type as i32);
    task.residual = op.residual;
    task.gate = op.gate_argument();
    if let Some(norm) = op.norm {
        task.norm = norm.weight;
        (task.eps, task.offset) = (norm.eps, norm.offset);
        if norm.layer {
            task.norm_bias = norm.bias;
            task.flags |= LAYER;
        }
    }
    let mut columns = 0;
    for (i, matrix) in matrices.iter().enumerate() {
        task.parts[i].y_offset = if gated { 0 } else { columns };
        columns += matrix.argument.out_features;
    }
    task.y_stride = if gated { columns / 2 } else { columns };
    let (kind, entry) = (matrices[0].kind, matrices[0].entry_rows);
    let form = if task.is_general() { "_general" } else { "" };
    let kernel = match op.adapters {
        Some(_) => format!("gemv_ring_adapted_{kind}_{entry}"),
        None => format!("gemv_ring_{kind}_{entry}{form}"),
    };
    let launch = Launch {
        kernel: &kernel,
        grid: [deal.blocks as u32, 1, 1],
        block: THREADS,
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    if let Some(adapters) = op.adapters {
        let exchange = adapters.exchange + COUNTERS * 4;
        let mut arguments = kernels::GemvRingAdapted {
            p: task,
            a: adapters.argument(staging, exchange)?,
        };
        // SAFETY: the caller guarantees that the addresses are valid.
        return unsafe { launch.run(device, &mut arguments) };
    }
    // SAFETY: as above.
    unsafe { launch.run(device, &mut kernels::GemvRing { p: task }) }
}
