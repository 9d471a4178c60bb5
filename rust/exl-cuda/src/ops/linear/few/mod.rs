//! Matmuls of few rows: activations are packed once, by a separate launch or by the kernel that makes them. The weights then stream at the
//! speed of one row. One kernel copies weights in bulk, for 3 to 8 rows; the other one, for 1 to 8, loads them directly.

mod plan;
mod shape;
mod task;

use super::ring::Matmul;
use super::select::{Epilogue, Refusal};
use super::{Half, Matrix};
use crate::abi::assert_constants;
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::Target;
use crate::parameters::kernels;
use crate::rows::FEW_ROWS;
pub(super) use plan::plan_direct;
use plan::{DIRECT_THREADS, SQUARES_BYTES, THREADS, copies, plan};
pub use plan::{Plan, Tuning};

const ROWS_THREADS: u32 = 128;
/// Words of 16 bytes of a unit's activations, a row.
const WORDS: usize = 32;

assert_constants!(rows, { ROWS_THREADS == ROWS_THREADS });

/// Source of a matmul's input.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    /// `x` of the matmul, with its norm, packed by a separate launch.
    Rows,
    /// Packed in the scratch memory by the kernel that made it.
    Packed,
    /// Packed like `Packed`, but not normed yet; the sums of squares of each eight features follow it.
    Unnormed {
        /// Weight plus offset of an RMS norm, FP32, in the layout's order: `[units][256]`, aligned to 16 bytes.
        weight: usize,
        eps: f32,
    },
}

/// The next matmul, which receives the results as its packed input.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    pub matrices: &'a [&'a Matrix],
    pub gated: bool,
    /// The next matmul's scratch memory: address and bytes.
    pub scratch: (usize, usize),
    /// The next matmul norms its input, which needs sums of squares.
    pub unnormed: bool,
}

/// The kernels of matrices of `kind`.
pub(super) fn kernels(kind: &str) -> Vec<String> {
    let forms = |entry: u32| ["", "_general"].map(|form| format!("gemm_few_{kind}_{entry}{form}"));
    [128, 32].into_iter().flat_map(forms).collect()
}

/// Whether launches of up to [`FEW_ROWS`] rows take these matrices.
pub(super) fn takes(caps: &Capabilities, matrices: &[&Matrix], gated: bool) -> Result<(), Refusal> {
    let epilogue = (gated, true);
    plan(caps, matrices, FEW_ROWS, epilogue, Tuning::default()).map(|_| ())
}

/// Whether there are launches, but `gemm_direct` reads the weights faster: [`Plan::idles`].
pub(super) fn idles(caps: &Capabilities, matrices: &[&Matrix], gated: bool, norm: bool) -> bool {
    plan(caps, matrices, FEW_ROWS, (gated, norm), Tuning::default())
        .is_ok_and(|plan| plan.idles(caps, matrices))
}

/// The launches of `rows` rows, without addresses.
pub(super) fn planned(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
    tuning: Tuning,
) -> Result<Plan, Refusal> {
    plan(caps, matrices, rows, (epilogue.gate, epilogue.norm), tuning)
}

/// Bytes of shared memory of a block, if [`takes`] holds.
#[cfg(test)]
pub(super) fn shared_bytes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    gated: bool,
) -> Option<usize> {
    plan(caps, matrices, FEW_ROWS, (gated, false), Tuning::default())
        .ok()
        .map(|plan| plan.shared)
}

/// Bytes of scratch memory that [`launch`] needs, for any number of rows and any tuning; a packed input is at its beginning.
pub fn scratch_bytes(caps: &Capabilities, matrices: &[&Matrix], gated: bool) -> usize {
    let epilogue = (gated, true);
    plan(caps, matrices, FEW_ROWS, epilogue, Tuning::default())
        .map_or(0, |plan| plan.scratch_bytes())
}

/// Whether another kernel can pack the input: all matrices read it in one order without padding rows.
pub fn takes_packed(matrices: &[&Matrix]) -> bool {
    copies(matrices).iter().all(|&copy| copy == 0)
        && matrices[0].rows() == matrices[0].in_features()
        && matrices[0].rows() < 1 << 16
}

fn check_scratch((at, room): (usize, usize), needed: usize) -> Result<(), CudaError> {
    if room >= needed && at.is_multiple_of(128) {
        return Ok(());
    }
    Err(CudaError::Argument {
        what: format!("{room} bytes of scratch memory at {at:#x}"),
        limit: format!("at least {needed}, aligned to 128"),
    })
}

impl Plan {
    /// Packed activations, followed by the rows' multipliers and the sums of squares; the same for any number of rows.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.squares_at() + self.task.units as usize * SQUARES_BYTES
    }

    fn multipliers_at(&self) -> usize {
        self.task.copies as usize * self.task.copy_bytes
    }

    fn squares_at(&self) -> usize {
        self.multipliers_at() + 128
    }

    /// Set the addresses of a call.
    fn bind(&mut self, op: &Matmul, input: Input, scratch: usize) {
        let (multipliers, squares) = (self.multipliers_at(), self.squares_at());
        let (rows, task) = (&mut self.rows, &mut self.task);
        rows.x = op.x;
        rows.out = scratch;
        rows.multipliers = scratch + multipliers;
        if let Some(norm) = op.norm {
            rows.weight = norm.weight;
            (rows.eps, rows.offset) = (norm.eps, norm.offset);
        }
        if let Input::Unnormed { weight, eps } = input {
            (task.norm, task.eps) = (weight, eps);
            task.squares = scratch + squares;
        }
        task.x = scratch;
        task.multipliers = rows.multipliers;
        (task.y, task.y_kind) = (op.y, op.y_type as i32);
        task.residual = op.residual;
        task.gate = op.gate_argument();
        task.scaled = i32::from(op.x_type == Half::BF16);
    }

    /// Set `next` as the destination of the results.
    fn bind_next(&mut self, caps: &Capabilities, next: Next) -> Result<(), CudaError> {
        // Both kernels have one layout of packed inputs.
        let plan = plan_direct(caps, next.matrices, FEW_ROWS, next.gated);
        let fits = takes_packed(next.matrices)
            && next.matrices[0].in_features() == self.task.y_stride as usize
            && (self.task.gate >= 0 || self.task.count == 1);
        let (Ok(plan), true) = (plan, fits) else {
            return Err(CudaError::Argument {
                what: "a matmul chained to another".to_owned(),
                limit: "as many results as inputs, of one matrix or a gated pair, no padding"
                    .to_owned(),
            });
        };
        check_scratch(next.scratch, plan.scratch_bytes())?;
        self.task.next = next.scratch.0;
        self.task.next_rows = next.matrices[0].argument.row_of_feature;
        if next.unnormed {
            self.task.next_squares = next.scratch.0 + plan.squares_at();
        }
        Ok(())
    }

    /// # Safety
    /// As for [`launch`].
    unsafe fn prepare(&self, to: Target, device: &Device, x_type: Half) -> Result<(), CudaError> {
        let kernel = match x_type {
            Half::F16 => "prepare_rows_f16",
            Half::BF16 => "prepare_rows_bf16",
            Half::F32 => {
                return Err(CudaError::Argument {
                    what: "activations in FP32".to_owned(),
                    limit: "F16 or BF16".to_owned(),
                });
            }
        };
        let launch = Launch {
            kernel,
            grid: [
                FEW_ROWS as u32,
                (self.task.units as u32 * 32).div_ceil(ROWS_THREADS),
                1,
            ],
            block: ROWS_THREADS,
            shared_bytes: 2 * self.rows.k as u32,
            stream: to.stream,
            programmatic: to.programmatic,
        };
        let mut arguments = kernels::PrepareRows { p: self.rows };
        // SAFETY: the caller guarantees that the addresses are valid.
        unsafe { launch.run(device, &mut arguments) }
    }

    /// # Safety
    /// As for [`launch`].
    unsafe fn multiply(
        &self,
        to: Target,
        device: &Device,
        matrix: &Matrix,
    ) -> Result<(), CudaError> {
        let form = if self.task.is_general() {
            "_general"
        } else {
            ""
        };
        let kernel = format!("gemm_few_{}_{}{form}", matrix.kind, matrix.entry_rows);
        let launch = Launch {
            kernel: &kernel,
            grid: [self.groups as u32, 1, self.task.cut as u32],
            block: THREADS,
            shared_bytes: self.shared as u32,
            stream: to.stream,
            programmatic: to.programmatic,
        };
        let task = self.task;
        let cluster = if task.cut > 1 { task.cut as u32 } else { 0 };
        let mut arguments = kernels::GemmFew { p: task };
        // SAFETY: the caller guarantees that the addresses are valid.
        unsafe { launch.run_in_clusters(device, cluster, &mut arguments) }
    }

    /// The norm of a packed input, if there is one, then the matmul.
    ///
    /// # Safety
    /// As for [`launch`].
    unsafe fn multiply_direct(
        &self,
        to: Target,
        device: &Device,
        matrix: &Matrix,
    ) -> Result<(), CudaError> {
        let task = self.task;
        let mut arguments = kernels::GemmDirect { p: task };
        let mut run = |kernel: &str, blocks: usize| {
            let launch = Launch {
                kernel,
                grid: [blocks as u32, 1, 1],
                block: DIRECT_THREADS,
                shared_bytes: 0,
                stream: to.stream,
                programmatic: to.programmatic,
            };
            // SAFETY: the caller guarantees that the addresses are valid.
            unsafe { launch.run(device, &mut arguments) }
        };
        if task.norm != 0 {
            let words = task.units as usize * WORDS * task.m as usize;
            run("norm_packed", words.div_ceil(DIRECT_THREADS as usize))?;
        }
        let kernel = format!("gemm_direct_{}_{}", matrix.kind, matrix.entry_rows);
        run(&kernel, self.groups)
    }
}

/// Operands of [`launch`] and [`launch_direct`].
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Results of the matrices are side by side in their order.
    pub matrices: &'a [&'a Matrix],
    /// `y` may be 0 if only `next` needs the results.
    pub op: &'a Matmul,
    pub input: Input,
    /// Address, aligned to 128, and bytes, at least [`scratch_bytes`]; no other launch may use the memory meanwhile.
    pub scratch: (usize, usize),
    pub next: Option<Next<'a>>,
}

/// The matmul by `gemm_few`, as planned for its matrices and rows: one launch if its input is packed, else two. Bitwise identical to `ring`.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn launch(to: Target, call: &Call, planned: &Plan) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    // SAFETY: this function's contract.
    unsafe { bound(to, device, call, planned)?.multiply(to, device, call.matrices[0]) }
}

/// The matmul by `gemm_direct`, as [`launch`]; a norm of a packed input is one more launch. `planned` is of [`plan_direct`].
///
/// # Safety
/// As for [`launch`].
pub unsafe fn launch_direct(to: Target, call: &Call, planned: &Plan) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    // SAFETY: this function's contract.
    unsafe { bound(to, device, call, planned)?.multiply_direct(to, device, call.matrices[0]) }
}

/// The plan with the call's addresses. Its input is packed, by a launch if no other kernel did.
///
/// # Safety
/// As for [`launch`].
unsafe fn bound(
    to: Target,
    device: &Device,
    call: &Call,
    planned: &Plan,
) -> Result<Plan, CudaError> {
    let &Call {
        op,
        input,
        scratch,
        next,
        ..
    } = call;
    let mut plan = planned.clone();
    check_scratch(scratch, plan.scratch_bytes())?;
    let prepared = !matches!(input, Input::Rows);
    let halves = op.x_type == Half::F16 && (op.y == 0 || op.y_type == Half::F16);
    if (prepared && (op.x_type != Half::F16 || plan.task.copies != 1))
        || (next.is_some() && !halves)
    {
        return Err(CudaError::Argument {
            what: "an input that another kernel packs".to_owned(),
            limit: "F16, in one order".to_owned(),
        });
    }
    if plan.task.first_stages < plan.task.stages && matches!(input, Input::Unnormed { .. }) {
        return Err(CudaError::Argument {
            what: "a norm of an input that is packed before it".to_owned(),
            limit: "a plan with a norm".to_owned(),
        });
    }
    plan.bind(op, input, scratch.0);
    if let Some(next) = next {
        plan.bind_next(&device.info.caps, next)?;
    }
    if !prepared {
        // SAFETY: this function's contract.
        unsafe { plan.prepare(to, device, op.x_type)? };
    }
    Ok(plan)
}
