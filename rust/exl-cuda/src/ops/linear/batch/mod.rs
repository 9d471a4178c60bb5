//! The batch kernel: products of 9 to 64 rows on sm_90a, of up to three matrices over one input.

mod layout;
mod plan;

use super::ring::Norm;
use super::select::{Epilogue, Kernel, MOST_PACKED_ROWS, Refusal, check_alike};
use super::{Half, Matrix};
use crate::capabilities::Capabilities;
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::ops::{Target, index32};
use layout::{lays_out, prepare};
pub use plan::Tuning;
use plan::{
    COUNTERS, EVEN_GROUPS, Plan, Shares, Task, UNCUT_ITEMS, VARIANTS, items, plan, turns,
    unit_bytes, variant,
};

/// Most rows of the batch kernel.
pub const MOST_ROWS: usize = MOST_PACKED_ROWS;
/// Most matrices of a launch.
pub const MATRICES: usize = 3;
/// One product; device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m, in_features]` of `x_type`, F16 or BF16; 0 where another launch has laid F16 rows out as [`input`] says.
    pub x: usize,
    /// Whether that launch was a product's that had this one as its [`Next`].
    pub turned: bool,
    pub x_type: Half,
    /// `[m, sum of out_features]` of `y_type`, or, `apart`, a matrix's `[m, out_features]` after the other's; unused where results go on.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
    pub apart: bool,
    /// RMS norm of x before the product, where [`norms`] says so.
    pub norm: Option<Norm>,
    /// Like y, of a half type, and added to it; may be y itself. 0 when there is none.
    pub residual: usize,
    /// Number of the activation of the first of two matrices that gates the second, where [`gates`] says so.
    pub gate: Option<i32>,
}

/// Memory of a product beside its operands.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Of [`scratch_bytes`], aligned to 128 bytes; begins with the input as it is laid out.
    pub scratch: usize,
    /// `[m]` FP32.
    pub multipliers: usize,
    /// Of [`exchange_bytes`], aligned to 128 bytes: all ones before and after; of one launch at a time.
    pub exchange: usize,
}

/// Where gated results in F16 go, laid out and `turned`, as the input of the product that comes next, for which [`input`] knows the columns.
#[derive(Clone, Copy)]
pub struct Next<'a> {
    pub matrix: &'a Matrix,
    pub scratch: usize,
}

/// Bytes of scratch memory for `m` rows: the input as it is laid out.
pub fn scratch_bytes(matrices: &[&Matrix], m: usize) -> usize {
    let units = matrices
        .first()
        .map_or(0, |first| first.argument.unit_count as usize);
    units * unit_bytes(variant(m).0)
}

/// Bytes of the workspace of blocks that share K, for `m` rows.
pub fn exchange_bytes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> usize {
    let Ok(Plan { shares, .. }) = plan(caps, matrices, m, gated, tuning) else {
        return 0;
    };
    match shares.sums() {
        0 => 0,
        bytes => COUNTERS * 4 + bytes,
    }
}

/// Whether the first of these matrices, which [`takes`] agrees to, can gate the second within a launch.
pub fn gates(matrices: &[&Matrix]) -> bool {
    matrices.len() == 2
        && matrices[0].out_features() == matrices[1].out_features()
        && items(matrices) >= UNCUT_ITEMS
}

/// For how many columns another launch lays out the input of `m` rows at the beginning of the scratch memory. None where the layout has rows
/// that are no features.
pub fn input(matrices: &[&Matrix], m: usize) -> Option<usize> {
    let first = matrices.first()?;
    (first.rows() == first.in_features()).then(|| variant(m).0)
}

/// Whether the input, at an address that is a multiple of 16, can be normed on its way into layout order.
pub fn norms(caps: &Capabilities, matrices: &[&Matrix]) -> bool {
    matrices.iter().all(|matrix| lays_out(caps, matrix, true))
}

/// Whether these matrices can share launches of every number of rows: the kernels are there, the input's order and the form are the same.
fn shares_launch(caps: &Capabilities, matrices: &[&Matrix]) -> Result<(), Refusal> {
    alike(matrices)?;
    let planned =
        |columns, gated| plan(caps, matrices, columns, gated, Tuning::default()).map(|_| ());
    for (columns, _) in VARIANTS {
        planned(columns, false)?;
        if gates(matrices) {
            planned(columns, true)?;
        }
    }
    Ok(())
}

/// Whether launches of up to [`MOST_ROWS`] rows take these matrices with this epilogue. A gate that [`gates`] leaves out is a launch of its own.
pub(super) fn takes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    epilogue: Epilogue,
) -> Result<(), Refusal> {
    check_alike(matrices, epilogue.gate)?;
    shares_launch(caps, matrices)?;
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

/// Bytes of shared memory of a block, where [`takes`] agrees.
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
        gate && gates(matrices),
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

/// Refuses what the kernel has no code for; the first thing that it finds, by name.
fn check(
    caps: &Capabilities,
    matrices: &[&Matrix],
    op: &Product,
    next: Option<&Next<'_>>,
) -> Result<(), CudaError> {
    let laid_out = op.x == 0;
    let demands = [
        (
            op.gate.is_none() || gates(matrices),
            "a gate",
            "large matrices of one size",
        ),
        (
            op.norm.is_none() || norms(caps, matrices) && op.x.is_multiple_of(16),
            "a norm",
            "rows of whole 16 bytes",
        ),
        (
            op.residual == 0
                || stores_pairs(matrices)
                    && op.y.is_multiple_of(8)
                    && op.residual.is_multiple_of(4)
                    && op.y_type != Half::F32,
            "a residual",
            "of halves, in pairs",
        ),
        (
            !op.turned || laid_out,
            "a turned input",
            "laid out by the product before, without an x of its own",
        ),
        (
            !laid_out || op.norm.is_none() && op.x_type == Half::F16,
            "an input that is laid out already",
            "F16, no norm",
        ),
        (
            next.is_none_or(|next| {
                op.gate.is_some()
                    && stores_pairs(matrices)
                    && input(&[next.matrix], op.m).is_some()
                    && next.matrix.in_features() == matrices[0].out_features()
                    && op.x_type == Half::F16
                    && op.y_type == Half::F16
            }),
            "a following product",
            "of gated results in F16, an even number, as many as it has features, which have no rows between them",
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

/// Where results go, and what is added to them.
fn set_operands(
    task: &mut Task,
    matrices: &[&Matrix],
    op: &Product,
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
    // Two results are stored at once, of four bytes each at most.
    let pairs = op.y.is_multiple_of(8) && task.y_stride % 2 == 0;
    task.paired = i32::from(pairs && stores_pairs(matrices));
    Ok(())
}

/// The product in two launches, activations into layout order and the rest. Results stand beside each other in the order of `matrices`, or go
/// to the product that comes next. Same bits as `ring`.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn launch(
    to: Target,
    matrices: &[&Matrix],
    op: &Product,
    room: Room,
    next: Option<Next<'_>>,
    tuning: Tuning,
) -> Result<(), CudaError> {
    if op.m == 0 {
        return Ok(());
    }
    let device = Device::get(to.device)?;
    // The kernel that deals out evenly reads no turned input, and is there for logits: halves in, nothing added.
    let tuning = Tuning {
        whole: tuning.whole || op.turned || op.x_type != Half::F16 || op.residual != 0,
        ..tuning
    };
    let Plan {
        mut task,
        shared,
        shares,
    } = alike(matrices)
        .and_then(|()| plan(&device.info.caps, matrices, op.m, op.gate.is_some(), tuning))
        .map_err(|why| why.for_kernel(Kernel::GemmBatch))?;
    let first = matrices[0];
    let Room {
        scratch,
        multipliers,
        exchange,
    } = room;
    check(&device.info.caps, matrices, op, next.as_ref())?;
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
        suffix(op.turned && turns(shares.columns))
    );
    let launch = Launch {
        kernel: &kernel,
        grid: [shares.blocks as u32, 1, 1],
        block: 128 * (shares.warpgroups as u32 + 1),
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![task];
    // SAFETY: the order is that of `batch_matmul`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

/// Of the kernels for a turned input.
fn suffix(turned: bool) -> &'static str {
    if turned { "_turned" } else { "" }
}

/// Kernels in the image of `batch_<form>`.
pub(super) fn kernels(form: &str) -> Vec<String> {
    VARIANTS
        .into_iter()
        .flat_map(|(columns, warpgroups)| {
            let kinds = if turns(columns) {
                &[false, true][..]
            } else {
                &[false]
            };
            kinds.iter().map(move |&turned| {
                format!("batch_{form}_{columns}x{warpgroups}{}", suffix(turned))
            })
        })
        .chain(
            (form == "exl2_128").then(|| format!("batch_whole_{form}_{MOST_ROWS}x{EVEN_GROUPS}")),
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::tests::hopper;
    use crate::ops::linear::tests::matrix;

    const PLAIN: Product = Product {
        x: 4096,
        turned: false,
        x_type: Half::F16,
        y: 8192,
        y_type: Half::F16,
        m: 64,
        apart: false,
        norm: None,
        residual: 0,
        gate: None,
    };
    const NORM: Option<Norm> = Some(Norm {
        weight: 16,
        eps: 1e-5,
        offset: 0.0,
    });

    fn refusal(op: Product, next: Option<&Matrix>) -> String {
        let matrix = matrix(16, 2064);
        let next = next.map(|matrix| Next { matrix, scratch: 0 });
        check(&hopper(), &[&matrix], &op, next.as_ref())
            .map_or_else(|e| e.to_string(), |()| String::new())
    }

    #[test]
    fn what_the_kernel_has_no_code_for_is_refused_by_name() {
        let laid_out = Product { x: 0, ..PLAIN };
        let turned = Product {
            turned: true,
            ..PLAIN
        };
        for op in [
            PLAIN,
            laid_out,
            Product { x: 0, ..turned },
            Product {
                norm: NORM,
                ..PLAIN
            },
            Product {
                residual: 8192,
                ..PLAIN
            },
        ] {
            assert_eq!(refusal(op, None), "", "{op:?}");
        }
        let named = [
            (turned, "a turned input"),
            (
                Product {
                    gate: Some(0),
                    ..PLAIN
                },
                "a gate",
            ),
            (
                Product {
                    norm: NORM,
                    x: 4104,
                    ..PLAIN
                },
                "a norm",
            ),
            (
                Product {
                    norm: NORM,
                    ..laid_out
                },
                "an input that is laid out already",
            ),
            (
                Product {
                    x_type: Half::BF16,
                    ..laid_out
                },
                "an input that is laid out already",
            ),
            (
                Product {
                    residual: 2,
                    ..PLAIN
                },
                "a residual",
            ),
            (
                Product {
                    residual: 8192,
                    y_type: Half::F32,
                    ..PLAIN
                },
                "a residual",
            ),
        ];
        for (op, name) in named {
            let text = refusal(op, None);
            assert!(
                text.starts_with(&format!("{name} for the batch kernel: ")),
                "{text}"
            );
        }
        let following = matrix(16, 2064);
        assert!(refusal(PLAIN, Some(&following)).starts_with("a following product "));
    }
}
