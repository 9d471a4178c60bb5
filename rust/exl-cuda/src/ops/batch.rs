//! The batch kernel: products of 9 to 64 rows on sm_90a, of up to three matrices over one input.

use super::linear::{self, Half, Matrix, MatrixArgument};
use super::ring::Norm;
use super::{Target, index32};
use crate::device::{Device, DeviceInfo};
use crate::images;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::layout::{TILE, UNIT_ROWS};

/// Most rows of the batch kernel.
pub const MOST_ROWS: usize = 64;
/// Most matrices of a launch.
pub const MATRICES: usize = 3;
/// The kernel's variants: columns, and the warpgroups of a block that multiply.
const VARIANTS: [(usize, usize); 4] = [(16, 4), (32, 4), (64, 2), (64, 3)];
/// Parts of K that are added last.
const QUARTERS: usize = 4;
/// Row tiles of an item, what a warpgroup works on at a time.
const ITEM_TILES: usize = 4;
const MOST_SLOTS: usize = 16;
/// Counters at the beginning of the memory in which blocks meet, one for four blocks. As many for all products: they count on, and what is
/// behind them is all ones after every launch, whatever the product.
const COUNTERS: usize = 256;
/// Looks of a block for those that share K with it, some 0.3 us each: blocks begin within a few us of one another.
const LOOKS: i32 = 64;
/// Shared memory of a block, beside the little that is static.
const SHARED_BYTES: usize = 232_448 - 256;
/// From so many items on a block has all of K: sums of quarters then need no meeting of blocks.
const UNCUT_ITEMS: usize = 256;
/// Left free for a block of the kernel that lays out the next input. Gated results go to the next product by themselves.
const LEFT_FREE: usize = 44 * 1024;
const LAYOUT_THREADS: u32 = 128;
/// Blocks of a launch that lays out, about: one a multiprocessor stands beside the product before.
const LAYOUT_BLOCKS: usize = 128;

/// `struct BatchPart` of `kernels/batch.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Part {
    matrix: MatrixArgument,
    y_offset: i32,
    first_item: i32,
    units_at: u32,
    padding: u32,
}

/// `struct BatchTask` of `kernels/batch.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Task {
    x: usize,
    multipliers: usize,
    sums: usize,
    arrivals: usize,
    y: usize,
    count: i32,
    items: i32,
    m: i32,
    y_kind: i32,
    y_stride: i32,
    paired: i32,
    groups: i32,
    scaled: i32,
    slots: i32,
    resident: i32,
    stage_stride: u32,
    unit_room: u32,
    ring_at: u32,
    x_at: u32,
    barriers_at: u32,
    numbered_at: u32,
    sums_at: u32,
    cut: i32,
    looks: i32,
    gate: i32,
    residual: usize,
    into: usize,
    into_rows: usize,
    parts: [Part; MATRICES],
}

/// `struct LayoutTask` of `kernels/batch_rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Preparation {
    x: usize,
    weight: usize,
    out: usize,
    multipliers: usize,
    features: usize,
    layout_rows: i32,
    units: i32,
    k: i32,
    m: i32,
    columns: i32,
    eps: f32,
    offset: f32,
}

/// One product; device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m, in_features]` of `x_type`, F16 or BF16; 0 where another launch has laid F16 rows out as [`input`] says.
    pub x: usize,
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
    /// Of [`meeting_bytes`], aligned to 128 bytes: all ones before and after; of one launch at a time.
    pub meeting: usize,
}

/// Where gated results in F16 go, laid out, as the input of the product that comes next, for which [`input`] knows the columns.
#[derive(Clone, Copy)]
pub struct Next<'a> {
    pub matrix: &'a Matrix,
    pub scratch: usize,
}

/// Choices for benchmarks; zero leaves one to the plan.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    pub slots: usize,
    /// 1: activations travel with the weights; 2: they stay in shared memory.
    pub activations: usize,
    /// 1 or 4: blocks that share K.
    pub cut: usize,
    /// Warpgroups of a block that work.
    pub groups: usize,
    /// How often a block looks whether those have begun that share K with it.
    pub looks: usize,
}

/// How a launch's work is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shares {
    columns: usize,
    /// Warpgroups of a block's code.
    warpgroups: usize,
    items: usize,
    /// Blocks that share K.
    cut: usize,
    /// Warpgroups of a block that work: items that it has at a time.
    groups: usize,
    blocks: usize,
    /// Items of the busiest warpgroup.
    rounds: usize,
    /// Whether the first of two matrices gates the second; then an item is four tiles of both, the work of two warpgroups.
    gated: bool,
}

/// Columns for `m` rows, and the most warpgroups that a block can have then.
fn variant(m: usize) -> (usize, usize) {
    let columns = VARIANTS
        .into_iter()
        .map(|(columns, _)| columns)
        .find(|&columns| m <= columns)
        .unwrap_or(MOST_ROWS);
    let of = VARIANTS.into_iter().filter(|&(of, _)| of == columns);
    (columns, of.map(|(_, most)| most).max().unwrap_or(1))
}

/// Warpgroups of the smallest block of so many columns that has `groups`: the fewer there are, the more registers each has.
fn warpgroups(columns: usize, groups: usize) -> usize {
    VARIANTS
        .into_iter()
        .filter(|&(of, most)| of == columns && groups <= most)
        .map(|(_, most)| most)
        .min()
        .unwrap_or(groups)
}

impl Shares {
    fn new(
        device: &DeviceInfo,
        matrices: &[&Matrix],
        m: usize,
        gated: bool,
        tuning: Tuning,
    ) -> Self {
        let (columns, most) = variant(m);
        if gated {
            let items = items(matrices) / 2;
            let teams = device.multiprocessors as usize;
            let rounds = |groups: usize| items.div_ceil(groups / 2).div_ceil(teams);
            let fewest = (2..=most).step_by(2).map(rounds).min().unwrap_or(1);
            let groups = match tuning.groups {
                0 => (2..=most)
                    .step_by(2)
                    .find(|&groups| rounds(groups) == fewest)
                    .unwrap_or(2),
                forced => forced.min(most).max(2) / 2 * 2,
            };
            return Self {
                columns,
                warpgroups: warpgroups(columns, groups),
                items,
                cut: 1,
                groups,
                blocks: items.div_ceil(groups / 2).min(teams),
                rounds: rounds(groups),
                gated,
            };
        }
        let items = items(matrices);
        let cut = match tuning.cut {
            0 if items >= UNCUT_ITEMS => 1,
            0 => QUARTERS,
            forced => forced,
        };
        let teams = (device.multiprocessors as usize / cut).clamp(1, COUNTERS);
        let rounds = |groups: usize| items.div_ceil(groups).div_ceil(teams);
        let groups = match tuning.groups {
            0 => {
                let fewest = (1..=most).map(rounds).min().unwrap_or(1);
                (1..=most)
                    .find(|&groups| rounds(groups) == fewest)
                    .unwrap_or(1)
            }
            forced => forced.min(most),
        };
        Self {
            columns,
            warpgroups: warpgroups(columns, groups),
            items,
            cut,
            groups,
            blocks: cut * items.div_ceil(groups).min(teams),
            rounds: rounds(groups),
            gated,
        }
    }
    /// Bytes of the sums of an item's quarters.
    fn place(&self) -> usize {
        QUARTERS * ITEM_TILES * TILE * self.columns * 4
    }
}

struct Plan {
    task: Task,
    shared: usize,
    shares: Shares,
}

/// Bytes of one unit of prepared activations.
fn unit_bytes(columns: usize) -> usize {
    columns * 2 * UNIT_ROWS
}

/// Bytes of a unit in a block's table, the maxima of its entries included.
fn unit_row(entry_rows: usize) -> usize {
    if entry_rows == 128 { 16 } else { 32 }
}

/// Items of a launch.
fn items(matrices: &[&Matrix]) -> usize {
    matrices
        .iter()
        .map(|matrix| (matrix.argument.tiles as usize).div_ceil(ITEM_TILES))
        .sum()
}

/// Bytes of scratch memory for `m` rows: the input as it is laid out.
pub fn scratch_bytes(matrices: &[&Matrix], m: usize) -> usize {
    let units = matrices
        .first()
        .map_or(0, |first| first.argument.unit_count as usize);
    units * unit_bytes(variant(m).0)
}

/// Bytes in which blocks that share K meet, for `m` rows.
pub fn meeting_bytes(
    device: &DeviceInfo,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> usize {
    let shares = Shares::new(device, matrices, m, gated, tuning);
    if shares.cut == 1 {
        0
    } else {
        COUNTERS * 4 + shares.items * shares.place()
    }
}

/// Whether the first of these matrices, which [`fits`] takes, can gate the second within a launch.
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
pub fn norms(device: &DeviceInfo, matrices: &[&Matrix]) -> bool {
    matrices.iter().all(|matrix| lays_out(device, matrix, true))
}

/// Blocks that share a row in a launch that lays out, and their shared memory: the row, the norm's weights, the features of a share.
fn layout_shape(matrix: &Matrix, columns: usize, norm: bool) -> (usize, usize) {
    let eights = matrix.argument.unit_count as usize * UNIT_ROWS / 8;
    let blocks = (LAYOUT_BLOCKS / columns).clamp(1, eights.div_ceil(LAYOUT_THREADS as usize));
    let units = (eights.div_ceil(blocks) * 8).div_ceil(UNIT_ROWS) + 1;
    let row = if norm { 2 + 4 } else { 2 } * matrix.in_features();
    (blocks, row + 4 * UNIT_ROWS * units)
}

fn lays_out(device: &DeviceInfo, matrix: &Matrix, norm: bool) -> bool {
    let most = SHARED_BYTES.min(device.shared_bytes_per_block as usize);
    matrix.in_features().is_multiple_of(8) && layout_shape(matrix, MOST_ROWS, norm).1 <= most
}

/// Whether these matrices can share a launch on this GPU: the kernels are there, the input's order and the form are the same.
pub fn fits(device: &DeviceInfo, matrices: &[&Matrix]) -> bool {
    let fits = |columns, gated| plan(device, matrices, columns, gated, Tuning::default()).is_some();
    let planned = |(columns, _)| fits(columns, false) && (!gates(matrices) || fits(columns, true));
    device.compute_capability == (9, 0)
        && images::ARCHS.contains(&"90a")
        && alike(matrices)
        && VARIANTS.into_iter().all(planned)
}

fn alike(matrices: &[&Matrix]) -> bool {
    let Some(first) = matrices.first() else {
        return false;
    };
    let same = |matrix: &&Matrix| {
        matrix.kind == first.kind
            && matrix.entry_rows == first.entry_rows
            && matrix.features_host == first.features_host
    };
    matrices.len() <= MATRICES && matrices.iter().all(same)
}

fn plan(
    device: &DeviceInfo,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> Option<Plan> {
    let space = SHARED_BYTES.min(device.shared_bytes_per_block as usize);
    let within = |shared| plan_within(shared, device, matrices, m, gated, tuning);
    let left_free = if Shares::new(device, matrices, m, gated, tuning).cut == 1 {
        0
    } else {
        LEFT_FREE.min(space)
    };
    within(space - left_free).or_else(|| within(space))
}

fn plan_within(
    shared: usize,
    device: &DeviceInfo,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> Option<Plan> {
    let first = *matrices.first()?;
    let shares = Shares::new(device, matrices, m, gated, tuning);
    let x_bytes = unit_bytes(shares.columns);
    let units = first.argument.unit_count as usize;
    let own = units.div_ceil(shares.cut);
    let mut at = 0;
    let mut take = |bytes: usize| {
        let start = at;
        at = (at + bytes).next_multiple_of(128);
        start as u32
    };
    let unit_room = matrices
        .iter()
        .flat_map(|matrix| matrix.unit_offsets.windows(2).map(|p| p[1] - p[0]))
        .max()?;
    let mut first_item = 0;
    let parts: [Part; MATRICES] = std::array::from_fn(|i| {
        let Some(matrix) = matrices.get(i) else {
            return Part {
                matrix: first.argument,
                y_offset: 0,
                first_item: i32::MAX,
                units_at: 0,
                padding: 0,
            };
        };
        let part = Part {
            matrix: matrix.argument,
            y_offset: 0,
            first_item,
            units_at: take(own * unit_row(first.entry_rows)),
            padding: 0,
        };
        first_item += (matrix.argument.tiles as usize).div_ceil(ITEM_TILES) as i32;
        part
    });
    let barriers_at = take((2 * MOST_SLOTS + own) * 8);
    let numbered_at = take(16);
    let sums_at = take(if shares.cut == 1 {
        shares.groups * shares.place() / QUARTERS
    } else {
        0
    });
    let space = shared.checked_sub(at)?;
    let weights = (shares.groups * ITEM_TILES * unit_room as usize).next_multiple_of(128);
    let kept = own * x_bytes;
    let resident = match tuning.activations {
        0 => shares.rounds > 1 && space.saturating_sub(kept) / weights >= 2,
        1 => false,
        _ => true,
    };
    let (stage, room) = if resident {
        (weights, space.checked_sub(kept)?)
    } else {
        ((weights + x_bytes).next_multiple_of(128), space)
    };
    let slots = match tuning.slots {
        0 => (room / stage).min(MOST_SLOTS),
        forced => forced.min(room / stage).min(MOST_SLOTS),
    };
    if slots < 2 {
        return None;
    }
    let x_at = at;
    let ring_at = if resident { at + kept } else { at };
    Some(Plan {
        task: Task {
            x: 0,
            multipliers: 0,
            sums: 0,
            arrivals: 0,
            y: 0,
            count: matrices.len() as i32,
            items: shares.items as i32,
            m: m as i32,
            y_kind: 0,
            y_stride: 0,
            paired: 0,
            groups: shares.groups as i32,
            scaled: 0,
            slots: slots as i32,
            resident: i32::from(resident),
            stage_stride: stage as u32,
            unit_room,
            ring_at: ring_at as u32,
            x_at: x_at as u32,
            barriers_at,
            numbered_at,
            sums_at,
            cut: shares.cut as i32,
            looks: if tuning.looks == 0 {
                LOOKS
            } else {
                tuning.looks as i32
            },
            gate: -1,
            residual: 0,
            into: 0,
            into_rows: 0,
            parts,
        },
        shared: ring_at + slots * stage,
        shares,
    })
}

/// The product in two launches, activations into layout order and the rest. Results stand beside each other in the order of `matrices`, or go
/// to the product that comes next. Same bits as `ops::ring`.
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
    let planned = (op.m <= MOST_ROWS && alike(matrices))
        .then(|| plan(&device.info, matrices, op.m, op.gate.is_some(), tuning))
        .flatten();
    let Some(Plan {
        mut task,
        shared,
        shares,
    }) = planned
    else {
        return Err(CudaError::Argument {
            what: format!("{} rows for the batch kernel", op.m),
            limit: format!("up to {MOST_ROWS}, of matrices alike in form and order of rows"),
        });
    };
    let first = matrices[0];
    let Room {
        scratch,
        multipliers,
        meeting,
    } = room;
    let even = |matrix: &&Matrix| matrix.argument.out_features % 2 == 0;
    let refused = op.gate.is_some() && !gates(matrices)
        || op.norm.is_some() && !(norms(&device.info, matrices) && op.x.is_multiple_of(16))
        || op.residual != 0
            && !(matrices.iter().all(even)
                && op.y.is_multiple_of(8)
                && op.residual.is_multiple_of(4)
                && op.y_type != Half::F32);
    let onward = next.is_none_or(|next| {
        op.gate.is_some()
            && matrices.iter().all(even)
            && input(&[next.matrix], op.m).is_some()
            && next.matrix.in_features() == first.out_features()
            && op.x_type == Half::F16
            && op.y_type == Half::F16
    });
    if refused || !onward {
        return Err(CudaError::Argument {
            what: "a norm, gate, residual or following product for the batch kernel".to_owned(),
            limit: "norm: rows of whole 16 bytes; gate: large matrices of one size; residual: halves in pairs; following: of gated F16"
                .to_owned(),
        });
    }
    if op.x == 0 {
        if op.norm.is_some() || op.x_type != Half::F16 {
            return Err(CudaError::Argument {
                what: "an input that is laid out already".to_owned(),
                limit: "F16, no norm".to_owned(),
            });
        }
    } else if lays_out(&device.info, first, op.norm.is_some())
        && op.x.is_multiple_of(16)
        && op.x_type != Half::F32
    {
        let norm = op.norm;
        let preparation = Preparation {
            x: op.x,
            weight: norm.map_or(0, |norm| norm.weight),
            out: scratch,
            multipliers,
            features: first.features,
            layout_rows: first.argument.rows,
            units: first.argument.unit_count,
            k: first.argument.in_features,
            m: task.m,
            columns: shares.columns as i32,
            eps: norm.map_or(0.0, |norm| norm.eps),
            offset: norm.map_or(0.0, |norm| norm.offset),
        };
        // SAFETY: this function's contract.
        unsafe { lay_out(to, device, first, op.x_type, preparation)? };
    } else {
        let alone = linear::Product {
            x: op.x,
            x_type: op.x_type,
            y: op.y,
            y_type: op.y_type,
            m: op.m,
        };
        // SAFETY: this function's contract.
        unsafe { linear::prepare(to, first, &alone, scratch, multipliers, shares.columns)? };
    }
    (task.x, task.multipliers) = (scratch, multipliers);
    (task.arrivals, task.sums) = if shares.cut == 1 {
        (0, 0)
    } else {
        (meeting, meeting + COUNTERS * 4)
    };
    if let Some(next) = next {
        (task.into, task.into_rows) = (next.scratch, next.matrix.argument.row_of_feature);
    }
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
    task.paired =
        i32::from(op.y.is_multiple_of(8) && task.y_stride % 2 == 0 && matrices.iter().all(even));
    let kernel = format!(
        "batch_{}_{}_{}x{}",
        first.kind, first.entry_rows, shares.columns, shares.warpgroups
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

/// # Safety
/// As [`launch`].
unsafe fn lay_out(
    to: Target,
    device: &Device,
    matrix: &Matrix,
    x_type: Half,
    preparation: Preparation,
) -> Result<(), CudaError> {
    let columns = preparation.columns as usize;
    let (blocks, shared) = layout_shape(matrix, columns, preparation.weight != 0);
    let launch = Launch {
        kernel: if x_type == Half::BF16 {
            "lay_out_bf16"
        } else {
            "lay_out_f16"
        },
        grid: [columns as u32, blocks as u32, 1],
        block: LAYOUT_THREADS,
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![preparation];
    // SAFETY: the struct is the kernel's; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

/// Kernels in the image of `batch_<form>`.
pub(super) fn kernels(form: &str) -> Vec<String> {
    VARIANTS
        .map(|(columns, warpgroups)| format!("batch_{form}_{columns}x{warpgroups}"))
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear::tests::{hopper, matrix};

    #[test]
    fn the_plan_of_an_8b_layer_at_four_bits() {
        let mut up = matrix(16, 2064);
        up.argument.tiles = 896;
        up.argument.out_features = 14336;
        let o = matrix(16, 2064);
        let shares_of = |m, matrices: &[&Matrix]| {
            plan(&hopper(), matrices, m, false, Tuning::default())
                .expect("fits")
                .shares
        };
        let pair = shares_of(64, &[&up, &up]);
        assert_eq!((pair.items, pair.cut, pair.groups), (448, 1, 2));
        assert_eq!((pair.rounds, pair.blocks), (2, 132));
        assert_eq!((pair.columns, pair.warpgroups), (64, 2));
        let alone = shares_of(32, &[&o]);
        assert_eq!((alone.items, alone.cut, alone.groups), (64, 4, 2));
        assert_eq!((alone.rounds, alone.blocks), (1, 128));
        assert_eq!(shares_of(16, &[&o]).columns, 16);
    }

    #[test]
    fn a_plan_never_asks_for_more_than_there_is() {
        for (units, bytes) in [
            (1, 1040),
            (3, 4112),
            (16, 4112),
            (56, 2064),
            (56, 4112),
            (255, 4160),
        ] {
            let made = matrix(units, bytes);
            for m in 1..=MOST_ROWS {
                for together in [vec![&made], vec![&made, &made], vec![&made; 3]] {
                    let plan = plan(&hopper(), &together, m, false, Tuning::default())
                        .expect("two stages fit at eight bits");
                    assert!(plan.shared <= 232_192, "{units} {bytes} {m}");
                    assert!(plan.shares.blocks <= 132 && plan.shares.groups <= 4);
                    assert!((plan.task.barriers_at as usize) < plan.shared);
                }
            }
        }
    }

    #[test]
    fn the_task_has_the_size_the_kernel_expects() {
        assert_eq!(std::mem::size_of::<Part>(), 72 + 4 * 4);
        assert_eq!(std::mem::size_of::<Task>(), 5 * 8 + 20 * 4 + 3 * 8 + 3 * 88);
    }
}
