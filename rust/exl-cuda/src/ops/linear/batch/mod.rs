//! The batch kernel: matmuls of 9 to 128 rows by wgmma or, from sm_80 on, of 9 to 64 rows by `mma.sync`, of up to three matrices over one
//! input.

mod layout;
mod plan;
#[cfg(test)]
mod tests;

use super::ring::Norm;
use super::select::{Epilogue, Refusal, check_alike};
use super::{Half, Matrix, MatrixArgument};
use crate::abi::assert_constants;
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};
use crate::parameters::kernels;
use crate::rows::PACKED_ROWS;
use layout::{packs, prepare};
pub use plan::Tuning;
pub(super) use plan::{COUNTERS, VARIANTS};
use plan::{
    Code, EVEN_COLUMNS, EVEN_GROUPS, MMA_VARIANTS, Plan, Shares, Task, UNCUT_ITEMS, items, plan,
    unit_bytes,
};

/// Most matrices of a launch.
pub const MATRICES: usize = 3;

assert_constants!(batch_task, { BATCH_MATRICES == MATRICES });

/// Operands of a matmul: device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// `[m, in_features]` of `x_type`, F16 or BF16; 0 if another launch has packed F16 rows as [`input`] says.
    pub x: usize,
    /// Whether that launch was a matmul with this one as its [`Next`], which packs the input transposed.
    pub transposed: bool,
    pub x_type: Half,
    /// `[m, sum of out_features]` of `y_type` or, if `apart`, `[m, out_features]` of each matrix in sequence. Unused if results go to the
    /// next matmul.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
    pub apart: bool,
    /// RMS norm of x before the matmul, if [`norms`] permits it.
    pub norm: Option<Norm>,
    /// Number of an activation of x, an F16 input without a norm, if [`activates_input`] permits it.
    pub input_activation: Option<i32>,
    /// A residual like y, of a half type, which is added to it; may be y itself. 0 if there is none.
    pub residual: usize,
    /// Number of the activation of the first of two matrices, which gates the second, if the launch is planned so.
    pub gate: Option<i32>,
}

/// Memory of a matmul in addition to its operands.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// As many bytes as planned, aligned to 128 bytes; begins with the packed input.
    pub scratch: usize,
    /// `[m]` FP32.
    pub multipliers: usize,
    /// Inter-block workspace of as many bytes as planned, aligned to 128 bytes: all ones before and after; used by one launch at a time.
    pub exchange: usize,
}

/// Destination of gated results in F16, packed and transposed as the input of the next matmul. [`input`] gives its columns.
#[derive(Clone, Copy)]
pub struct Next<'a> {
    pub matrix: &'a Matrix,
    pub scratch: usize,
}

/// A planned launch, without the addresses of operands.
#[derive(Clone, Debug)]
pub struct Planned {
    plan: Plan,
    /// The plan for operands that the evenly dealt kernel does not take, if `plan` is one of it.
    whole: Option<Plan>,
}

impl Planned {
    /// The launch of `m` rows of matrices for which [`takes`] holds.
    pub(super) fn new(
        caps: &Capabilities,
        matrices: &[&Matrix],
        m: usize,
        epilogue: Epilogue,
        tuning: Tuning,
    ) -> Result<Self, Refusal> {
        let gated = epilogue.gate && gates(caps, matrices, m);
        let of = |whole| plan(caps, matrices, m, gated, Tuning { whole, ..tuning });
        let plan = of(tuning.whole || epilogue.bf16 || epilogue.residual)?;
        let even = plan.shares.left > 0;
        let whole = even.then(|| of(true)).transpose()?;
        Ok(Self { plan, whole })
    }

    /// The evenly dealt kernel does not read transposed input. It serves logits: half inputs without a residual.
    fn of(&self, op: &Matmul) -> &Plan {
        let whole = op.transposed || op.x_type != Half::F16 || op.residual != 0;
        self.whole.as_ref().filter(|_| whole).unwrap_or(&self.plan)
    }

    /// Whether the first of two matrices gates the second within the launch.
    pub(super) fn gated(&self) -> bool {
        self.plan.shares.gated
    }

    /// Bytes of scratch memory: the packed input.
    pub(super) fn scratch_bytes(&self) -> usize {
        packed_bytes(&self.plan.task.parts[0].matrix, self.plan.shares.columns)
    }

    /// Bytes of the workspace of blocks that share K.
    pub(super) fn exchange_bytes(&self) -> usize {
        let plans = [Some(&self.plan), self.whole.as_ref()];
        let sums = plans.into_iter().flatten().map(|plan| plan.shares.sums());
        match sums.max() {
            None | Some(0) => 0,
            Some(bytes) => COUNTERS * 4 + bytes,
        }
    }
}

/// Columns of the packed input of `m` rows.
fn columns(caps: &Capabilities, m: usize) -> usize {
    Code::of(caps).unwrap_or(Code::Mma).columns(m)
}

fn packed_bytes(first: &MatrixArgument, columns: usize) -> usize {
    first.unit_count as usize * unit_bytes(columns)
}

/// Bytes of scratch memory for `m` rows: the packed input.
pub fn scratch_bytes(caps: &Capabilities, matrices: &[&Matrix], m: usize) -> usize {
    let first = matrices.first();
    first.map_or(0, |first| packed_bytes(&first.argument, columns(caps, m)))
}

/// Whether the first of these matrices, for which [`takes`] holds, can gate the second within a launch of `m` rows. Such a block needs room for
/// units of both.
pub fn gates(caps: &Capabilities, matrices: &[&Matrix], m: usize) -> bool {
    matrices.len() == 2
        && matrices[0].out_features() == matrices[1].out_features()
        && items(matrices) >= UNCUT_ITEMS
        && plan(caps, matrices, m, true, Tuning::default()).is_ok()
}

/// Number of columns for which another launch packs the input of `m` rows at the beginning of the scratch memory. None if the layout has
/// padding rows.
pub fn input(caps: &Capabilities, matrices: &[&Matrix], m: usize) -> Option<usize> {
    let first = matrices.first()?;
    (first.rows() == first.in_features()).then(|| columns(caps, m))
}

/// Whether packing can norm the input, whose address is a multiple of 16.
pub fn norms(caps: &Capabilities, matrices: &[&Matrix]) -> bool {
    matrices.iter().all(|matrix| packs(caps, matrix, true))
}

/// Whether packing can apply an activation to the input, whose address is a multiple of 16.
pub fn activates_input(caps: &Capabilities, matrices: &[&Matrix]) -> bool {
    matrices.iter().all(|matrix| packs(caps, matrix, false))
}

/// Whether these matrices can share launches of up to PACKED_ROWS rows, or of `rows` rows if these are more: kernels exist, and the input's
/// order and the form are the same.
fn shares_launch(caps: &Capabilities, matrices: &[&Matrix], rows: usize) -> Result<(), Refusal> {
    alike(matrices)?;
    let columns = Code::of(caps)?.variants().iter();
    columns
        .map(|&(columns, _)| columns)
        .filter(|&columns| columns <= PACKED_ROWS)
        .chain((rows > PACKED_ROWS).then_some(rows))
        .try_for_each(|rows| plan(caps, matrices, rows, false, Tuning::default()).map(|_| ()))
}

/// Whether launches of `rows` rows take these matrices with this epilogue. A gate for which [`gates`] is false is a separate launch.
pub(super) fn takes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), Refusal> {
    check_alike(matrices, epilogue.gate)?;
    shares_launch(caps, matrices, rows)?;
    if epilogue.norm && !norms(caps, matrices) {
        return Err(Refusal::Matrices(
            "norms of rows that fit the shared memory of a block",
        ));
    }
    if epilogue.residual && !stores_pairs(matrices) {
        return Err(Refusal::Matrices("residuals of even output sizes"));
    }
    Ok(())
}

/// Bytes of shared memory of a block, if [`takes`] holds.
#[cfg(test)]
pub(super) fn shared_bytes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    gate: bool,
) -> Option<usize> {
    plan(
        caps,
        matrices,
        rows,
        gate && gates(caps, matrices, rows),
        Tuning::default(),
    )
    .ok()
    .map(|plan| plan.shared)
}

fn alike(matrices: &[&Matrix]) -> Result<(), Refusal> {
    let same = |a: &&Matrix, b: &Matrix| {
        a.kind == b.kind && a.entry_rows == b.entry_rows && a.features_host == b.features_host
    };
    match matrices {
        [first, ..] if matrices.len() <= MATRICES => {
            let all = matrices.iter().all(|matrix| same(matrix, first));
            let why = Refusal::Matrices("matrices of one format, group size and input permutation");
            if all { Ok(()) } else { Err(why) }
        }
        _ => Err(Refusal::Matrices("one to three matrices")),
    }
}

/// Whether results of all matrices can be stored in pairs.
pub(super) fn stores_pairs(matrices: &[&Matrix]) -> bool {
    matrices.iter().all(|matrix| even(matrix))
}

fn even(matrix: &Matrix) -> bool {
    matrix.argument.out_features % 2 == 0
}

/// Reject calls that the kernel does not support, or that were planned otherwise (`gated`). The error names the first unsupported property.
fn check(
    caps: &Capabilities,
    matrices: &[&Matrix],
    op: &Matmul,
    gated: bool,
    next: Option<&Next<'_>>,
) -> Result<(), CudaError> {
    let packed = op.x == 0;
    let demands = [
        (
            op.gate.is_some() == gated,
            "a gate",
            "two large matrices of equal size",
        ),
        (
            op.norm.is_none_or(|norm| {
                norms(caps, matrices) && (op.x | norm.weight).is_multiple_of(16)
            }),
            "a norm",
            "rows of multiples of 16 bytes, aligned to 16 like the weights",
        ),
        (
            op.input_activation.is_none()
                || activates_input(caps, matrices)
                    && op.norm.is_none()
                    && op.x_type == Half::F16
                    && op.x != 0
                    && op.x.is_multiple_of(16),
            "an activation of the input",
            "F16 rows of multiples of 16 bytes, aligned to 16, without a norm",
        ),
        (
            op.residual == 0
                || stores_pairs(matrices)
                    && op.y.is_multiple_of(8)
                    && op.residual.is_multiple_of(4)
                    && op.y_type != Half::F32,
            "a residual",
            "of half types, stored in pairs",
        ),
        (
            !op.transposed || packed,
            "a transposed input",
            "packed by the previous matmul, without x",
        ),
        (
            !packed || op.norm.is_none() && op.x_type == Half::F16,
            "a packed input",
            "F16, no norm",
        ),
        (
            next.is_none_or(|next| {
                op.gate.is_some()
                    && stores_pairs(matrices)
                    && input(caps, &[next.matrix], op.m).is_some()
                    && next.matrix.in_features() == matrices[0].out_features()
                    && op.x_type == Half::F16
                    && op.y_type == Half::F16
            }),
            "a next matmul",
            "of gated F16 results, an even number, as many as its features, without padding rows",
        ),
    ];
    match demands.iter().find(|(met, ..)| !met) {
        None => Ok(()),
        Some((_, what, limit)) => Err(CudaError::Argument {
            what: format!("{what} for the batch kernel"),
            limit: (*limit).to_owned(),
        }),
    }
}

/// Set the operands of results and of the residual.
fn set_operands(
    task: &mut Task,
    matrices: &[&Matrix],
    op: &Matmul,
    shares: &Shares,
) -> Result<(), CudaError> {
    let first = matrices[0];
    (task.gate, task.residual) = (op.gate.unwrap_or(-1), op.residual);
    (task.y, task.y_kind) = (op.y, op.y_type as i32);
    task.scaled = i32::from(op.x_type == Half::BF16);
    let mut before = 0;
    for (part, matrix) in task.parts.iter_mut().zip(matrices) {
        if shares.gated {
            before = 0;
        }
        part.y_offset = before;
        before += matrix.argument.out_features * if op.apart { task.m } else { 1 };
    }
    index32("elements of y", before as usize)?;
    task.y_stride = if op.apart {
        first.argument.out_features
    } else {
        before
    };
    // Two results are stored together, of four bytes each at most.
    let pairs = op.y.is_multiple_of(8) && task.y_stride % 2 == 0;
    task.paired = i32::from(pairs && stores_pairs(matrices));
    Ok(())
}

/// The matmul in two launches: packing of activations, then the multiplication. Results of `matrices` are side by side in their order, or
/// go to the next matmul. Bitwise identical to `ring`.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn launch(
    to: Target,
    matrices: &[&Matrix],
    op: &Matmul,
    room: Room,
    next: Option<Next<'_>>,
    planned: &Planned,
) -> Result<(), CudaError> {
    if op.m == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    let &Plan {
        mut task,
        shared,
        shares,
    } = planned.of(op);
    if !task.is_of(matrices, op.m) {
        return Err(CudaError::Argument {
            what: "a plan of other matrices or rows".to_owned(),
            limit: "the matrices and rows that it was made for".to_owned(),
        });
    }
    let first = matrices[0];
    let Room {
        scratch,
        multipliers,
        exchange,
    } = room;
    check(&device.info.caps, matrices, op, shares.gated, next.as_ref())?;
    if op.x != 0 {
        // SAFETY: this function's contract.
        unsafe { prepare(to, device, first, op, room, &shares)? };
    }
    (task.x, task.multipliers) = (scratch, multipliers);
    (task.arrivals, task.sums) = if shares.sums() == 0 {
        (0, 0)
    } else {
        (exchange, exchange + COUNTERS * 4)
    };
    if let Some(next) = next {
        (task.into, task.into_rows) = (next.scratch, next.matrix.argument.row_of_feature);
    }
    set_operands(&mut task, matrices, op, &shares)?;
    let kernel = format!(
        "{}_{}_{}_{}x{}{}",
        shares.family(),
        first.kind,
        first.entry_rows,
        shares.columns,
        shares.warpgroups,
        suffix(op.transposed && shares.code.transposes(shares.columns))
    );
    let launch = Launch {
        kernel: &kernel,
        grid: [shares.blocks as u32, 1, 1],
        block: shares.threads() as u32,
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut kernels::GemmBatch { p: task }) }
}

/// Name suffix of the kernels for a transposed input.
fn suffix(transposed: bool) -> &'static str {
    if transposed { "_transposed" } else { "" }
}

/// Kernels in the image of `batch_<form>`.
pub(super) fn kernels(form: &str) -> Vec<String> {
    VARIANTS
        .into_iter()
        .flat_map(|(columns, warpgroups)| {
            let kinds = if Code::Wgmma.transposes(columns) {
                &[false, true][..]
            } else {
                &[false]
            };
            kinds.iter().map(move |&transposed| {
                format!(
                    "gemm_batch_{form}_{columns}x{warpgroups}{}",
                    suffix(transposed)
                )
            })
        })
        .chain(
            (form == "exl2_128")
                .then(|| format!("gemm_batch_whole_{form}_{EVEN_COLUMNS}x{EVEN_GROUPS}")),
        )
        .collect()
}

/// Kernels in the image of `batch_mma_<form>`.
pub(super) fn mma_kernels(form: &str) -> Vec<String> {
    MMA_VARIANTS
        .map(|(columns, warpgroups)| format!("gemm_batch_mma_{form}_{columns}x{warpgroups}"))
        .to_vec()
}
