//! Products of 3 to 8 rows in two launches: activations into layout order once, then weights at the pace of one row.

use super::Target;
use super::linear::{Half, Matrix, MatrixArgument};
use super::ring::{MATRICES, Product};
use crate::device::{Device, DeviceInfo};
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};

/// Most rows of the kernel.
pub const MOST_ROWS: usize = 8;
/// Row tiles in a stage of the ring.
const GROUP: usize = 8;
/// Columns of two tiles in a round, and sides of a block's classes.
const ITEMS: usize = 4;
const SIDES: usize = 4;
/// Warps that multiply, and two that fetch.
const THREADS: u32 = (ITEMS * SIDES + 2) as u32 * 32;
const ROWS_THREADS: u32 = 128;
/// Classes of units; `sum_classes` in `kernels/tile.cuh`.
const CLASSES: usize = 16;
/// Prepared activations of a unit and eight rows.
const X_BYTES: usize = 4096;
/// Results that are the prepared input of another launch; the number follows those of [`Half`].
const PREPARED: i32 = 3;
/// A partial sum of a tile: 16 features of eight rows.
const PART_BYTES: usize = 512;
/// Bytes in flight per multiprocessor beyond which everything else waits behind weights (spec/kernels-measured.md 6.1).
const BYTES_IN_FLIGHT: usize = 33 * 1024;
/// Bytes of a ring, when they fit: the rest of a multiprocessor is left to the small kernels in between, which then start early.
const RING_BYTES: usize = 125 * 1024;
const MOST_SLOTS: usize = 32;
/// Bytes of activations that may stay in shared memory where K is whole.
const MOST_RESIDENT: usize = 72 * 1024;
/// Left free for a block of the kernel that prepares the next input.
const LEFT_FREE: usize = 10 * 1024;
/// More than half of a multiprocessor's shared memory, so that one block is placed on each (spec/kernels-measured.md 6.2).
const LEAST_SHARED: usize = 116 * 1024;

/// `struct SkinnyPart` of `kernels/skinny.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Part {
    matrix: MatrixArgument,
    stages_at: u32,
    units_at: u32,
    maxima_at: u32,
    x_at: u32,
    copy: i32,
    columns: i32,
    y_offset: i32,
}

/// `struct SkinnyTask` of `kernels/skinny.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Task {
    barriers_at: u32,
    stage_stride: u32,
    unit_room: u32,
    slots: i32,
    window: i32,
    count: i32,
    cut: i32,
    units: i32,
    columns: i32,
    longer: i32,
    gate: i32,
    results_at: u32,
    places_at: u32,
    m: i32,
    y_kind: i32,
    y_stride: i32,
    scaled: i32,
    copies: i32,
    copy_bytes: usize,
    x: usize,
    multipliers: usize,
    sums: usize,
    arrivals: usize,
    y: usize,
    residual: usize,
    row_of_feature: usize,
    parts: [Part; MATRICES],
}

/// `struct RowsTask` of `kernels/rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Preparation {
    x: usize,
    weight: usize,
    out: usize,
    multipliers: usize,
    arrivals: usize,
    more_arrivals: usize,
    copy_bytes: usize,
    features: [usize; MATRICES],
    layout_rows: [i32; MATRICES],
    copies: i32,
    units: i32,
    k: i32,
    m: i32,
    arrivals_count: i32,
    more_arrivals_count: i32,
    eps: f32,
    offset: f32,
}

/// Parts of K (1 or 4), depth and window of the ring, for benchmarks that try others than the planned ones; zero leaves one as planned.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    pub cut: i32,
    pub slots: i32,
    pub window: i32,
}

/// Where the scratch memory's parts begin.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    multipliers: usize,
    arrivals: usize,
    sums: usize,
    bytes: usize,
}

/// A planned launch, its addresses missing.
struct Plan {
    task: Task,
    rows: Preparation,
    shared: usize,
    blocks: usize,
    scratch: Scratch,
}

/// Units in each side of a block's classes, for the part of K with this number.
fn sides(units: usize, cut: usize, rank: usize) -> [usize; SIDES] {
    let leaves = CLASSES / SIDES / cut;
    let class = |leaf: usize| leaf >> 2 | (leaf & 2) << 1 | (leaf & 1) << 3;
    std::array::from_fn(|side| {
        let first = (SIDES * rank + side) * leaves;
        (first..first + leaves)
            .map(|leaf| (units + CLASSES - 1 - class(leaf)) / CLASSES)
            .sum()
    })
}

/// Bytes handed out one after the other.
struct Arena(usize);

impl Arena {
    fn take(&mut self, bytes: usize) -> u32 {
        let at = self.0.next_multiple_of(128);
        self.0 = at + bytes;
        at as u32
    }
}

/// Places in shared memory behind a ring of so many slots.
struct Places {
    parts: [Part; MATRICES],
    results_at: u32,
    matrices_at: u32,
    barriers_at: u32,
    bytes: usize,
}

fn places(
    matrices: &[&Matrix],
    copies: &[usize],
    stages: usize,
    ring: usize,
    slots: usize,
) -> Places {
    let mut arena = Arena(ring);
    let count = copies.iter().max().map_or(0, |most| most + 1);
    let x_at: Vec<u32> = (0..count).map(|_| arena.take(stages * X_BYTES)).collect();
    let mut column = 0;
    let parts = std::array::from_fn(|i| {
        let matrix = matrices.get(i).unwrap_or(&matrices[0]);
        let known = i < matrices.len();
        let bytes = |b: usize| if known { b * stages } else { 0 };
        let part = Part {
            matrix: matrix.argument,
            stages_at: arena.take(bytes(8)),
            units_at: arena.take(bytes(8)),
            maxima_at: arena.take(bytes(2 * 256 / matrix.entry_rows)),
            x_at: x_at[copies.get(i).copied().unwrap_or(0)],
            copy: copies.get(i).copied().unwrap_or(0) as i32,
            columns: (matrix.argument.tiles + 1) / 2,
            y_offset: column,
        };
        column += matrix.argument.out_features;
        part
    });
    let results_at = arena.take(GROUP * SIDES * PART_BYTES);
    let matrices_at = arena.take(16 * MATRICES);
    let barriers_at = arena.take((2 * slots + 2 * ITEMS + stages) * 8);
    Places {
        parts,
        results_at,
        matrices_at,
        barriers_at,
        bytes: arena.0,
    }
}

/// Which of the prepared copies of x each matrix reads: matrices of one order share one.
fn copies(matrices: &[&Matrix]) -> Vec<usize> {
    let mut found: Vec<usize> = Vec::new();
    for (i, matrix) in matrices.iter().enumerate() {
        let same = matrices[..i]
            .iter()
            .position(|before| before.features_host == matrix.features_host);
        let next = found.iter().max().map_or(0, |most| most + 1);
        found.push(same.map_or(next, |before| found[before]));
    }
    found
}

fn scratch(units: usize, copies: usize, items: usize, cut: usize) -> Scratch {
    let prepared = copies * units * X_BYTES;
    let multipliers = prepared;
    let arrivals = multipliers + 128;
    let sums = (arrivals + 4 * items).next_multiple_of(128);
    let bytes = if cut > 1 {
        sums + items * 2 * cut * PART_BYTES
    } else {
        sums
    };
    Scratch {
        multipliers,
        arrivals,
        sums,
        bytes,
    }
}

fn fits(device: &DeviceInfo, matrices: &[&Matrix], gated: bool) -> bool {
    let Some(first) = matrices.first() else {
        return false;
    };
    let alike = |a: &&Matrix| {
        a.kind == first.kind
            && a.entry_rows == first.entry_rows
            && a.in_features() == first.in_features()
    };
    let gate =
        !gated || (matrices.len() == 2 && first.out_features() == matrices[1].out_features());
    device.hopper_code
        && matrices.len() <= MATRICES
        && matrices.iter().all(alike)
        && gate
        && first.in_features().is_multiple_of(8)
        && 2 * first.in_features() + 1024 <= device.shared_bytes_per_block as usize
}

/// Plans both launches for `m` rows; None where the kernels cannot take them: other hardware, matrices of different kinds, no room.
fn plan(
    device: &DeviceInfo,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> Option<Plan> {
    if !(1..=MOST_ROWS).contains(&m) || !fits(device, matrices, gated) {
        return None;
    }
    let units = matrices.iter().map(|a| a.unit_offsets.len() - 1).max()?;
    let tiles: usize = matrices.iter().map(|a| a.argument.tiles as usize).sum();
    // Where there are many tiles, a block can have all of K: no sums to be handed over. Otherwise parts of K even the load out.
    let whole = copies(matrices).iter().max()? * units * X_BYTES + units * X_BYTES <= MOST_RESIDENT;
    let many = tiles >= 8 * device.multiprocessors as usize;
    let cuts: &[usize] = match tuning.cut {
        1 => &[1],
        0 if whole && many => &[1, 4],
        _ => &[4],
    };
    cuts.iter()
        .find_map(|&cut| plan_cut(device, matrices, m, gated, cut, tuning))
}

fn plan_cut(
    device: &DeviceInfo,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    cut: usize,
    tuning: Tuning,
) -> Option<Plan> {
    let space = (device.shared_bytes_per_block as usize).checked_sub(LEFT_FREE)?;
    let count = |a: &Matrix| a.unit_offsets.len() - 1;
    let units = matrices.iter().map(|a| count(a)).max()?;
    let room = matrices
        .iter()
        .flat_map(|a| a.unit_offsets.windows(2).map(|w| (w[1] - w[0]) as usize))
        .max()?;
    let bytes: usize = matrices
        .iter()
        .map(|a| a.argument.tile_bytes as usize)
        .sum();
    let mean = (GROUP * bytes / matrices.iter().map(|a| count(a)).sum::<usize>().max(1)).max(1);
    let stride = (GROUP * room).next_multiple_of(128);
    let longest = (0..cut).flat_map(|rank| sides(units, cut, rank)).max()?;
    let stages = SIDES * longest;
    // A warp steps from stage to stage by SIDES and must not meet a slot's barrier in the phase before the last (`ring.rs` has the
    // reasoning).
    let spare = SIDES;
    let copies = copies(matrices);
    let wanted = match tuning.slots {
        0 => (RING_BYTES / stride).clamp(spare + 1, MOST_SLOTS),
        slots => (slots as usize).clamp(spare + 1, MOST_SLOTS),
    };
    let (slots, places) = (spare + 1..=wanted)
        .rev()
        .map(|slots| {
            (
                slots,
                places(matrices, &copies, stages, slots * stride, slots),
            )
        })
        .find(|(_, places)| places.bytes <= space)?;
    let window = match tuning.window {
        0 => (BYTES_IN_FLIGHT + mean / 2) / mean,
        window => window as usize,
    };
    let halves = |a: &&Matrix| (a.argument.tiles as usize).div_ceil(2);
    let items: usize = if gated {
        matrices[0].argument.tiles as usize
    } else {
        matrices.iter().map(halves).sum()
    };
    let runs = items.min(device.multiprocessors as usize / cut).max(1);
    let copy_count = copies.iter().max()? + 1;
    let scratch = scratch(units, copy_count, items, cut);
    let argument = |i: usize| matrices.get(i).map(|a| a.argument);
    let columns: i32 = (0..MATRICES)
        .filter_map(argument)
        .map(|a| a.out_features)
        .sum();
    let mut task = Task {
        barriers_at: places.barriers_at,
        stage_stride: stride as u32,
        unit_room: room as u32,
        slots: slots as i32,
        window: window.clamp(1, slots - spare) as i32,
        count: matrices.len() as i32,
        cut: cut as i32,
        units: units as i32,
        columns: (items / runs) as i32,
        longer: (items % runs) as i32,
        gate: -1,
        results_at: places.results_at,
        places_at: places.matrices_at,
        m: m as i32,
        y_kind: 0,
        y_stride: if gated { columns / 2 } else { columns },
        scaled: 0,
        copies: copy_count as i32,
        copy_bytes: units * X_BYTES,
        x: 0,
        multipliers: 0,
        sums: 0,
        arrivals: 0,
        y: 0,
        residual: 0,
        row_of_feature: 0,
        parts: places.parts,
    };
    if gated {
        task.parts[1].y_offset = 0;
    }
    let mut rows = Preparation {
        x: 0,
        weight: 0,
        out: 0,
        multipliers: 0,
        arrivals: 0,
        more_arrivals: 0,
        copy_bytes: units * X_BYTES,
        features: [0; MATRICES],
        layout_rows: [0; MATRICES],
        copies: copy_count as i32,
        units: units as i32,
        k: matrices[0].argument.in_features,
        m: m as i32,
        arrivals_count: if cut > 1 { items as i32 } else { 0 },
        more_arrivals_count: 0,
        eps: 0.0,
        offset: 0.0,
    };
    for (matrix, &copy) in matrices.iter().zip(&copies) {
        rows.features[copy] = matrix.features;
        rows.layout_rows[copy] = matrix.argument.rows;
    }
    Some(Plan {
        task,
        rows,
        shared: places.bytes.max(LEAST_SHARED.min(space)),
        blocks: runs * cut,
        scratch,
    })
}

/// How many activation rows a product of these matrices takes on this GPU; 0 when it cannot run there.
pub fn rows(device: &DeviceInfo, matrices: &[&Matrix], gated: bool) -> usize {
    match plan(device, matrices, MOST_ROWS, gated, Tuning::default()) {
        Some(_) => MOST_ROWS,
        None => 0,
    }
}

/// Bytes of scratch memory that [`launch`] needs, whatever the number of rows.
pub fn scratch_bytes(
    device: &DeviceInfo,
    matrices: &[&Matrix],
    gated: bool,
    tuning: Tuning,
) -> usize {
    plan(device, matrices, MOST_ROWS, gated, tuning).map_or(0, |plan| plan.scratch.bytes)
}

/// Bytes of scratch memory that [`launch_pair`] needs; None where the second product cannot take over the first's results.
pub fn pair_bytes(
    device: &DeviceInfo,
    first: (&[&Matrix], bool),
    second: &[&Matrix],
) -> Option<usize> {
    let one = plan(device, first.0, MOST_ROWS, first.1, Tuning::default())?;
    let two = plan(device, second, MOST_ROWS, false, Tuning::default())?;
    // The first writes every row of the second's layout, and nothing between them.
    let whole = second.len() == 1 && second[0].rows() == second[0].in_features();
    let fits = one.task.y_stride == two.rows.k && (first.1 || first.0.len() == 1);
    (whole && fits && second[0].rows() < 1 << 16)
        .then(|| one.scratch.bytes.next_multiple_of(128) + two.scratch.bytes)
}

fn planned(
    device: &DeviceInfo,
    matrices: &[&Matrix],
    op: &Product,
    tuning: Tuning,
) -> Result<Plan, CudaError> {
    plan(device, matrices, op.m, op.gate.is_some(), tuning).ok_or_else(|| CudaError::Argument {
        what: format!("{} rows for the kernel of few rows", op.m),
        limit: format!("1 to {MOST_ROWS}, of matrices that can share a launch"),
    })
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
    /// The addresses of a call.
    fn bind(&mut self, op: &Product, scratch: usize) {
        let (rows, task, at) = (&mut self.rows, &mut self.task, self.scratch);
        rows.x = op.x;
        rows.out = scratch;
        rows.multipliers = scratch + at.multipliers;
        rows.arrivals = scratch + at.arrivals;
        if let Some(norm) = op.norm {
            rows.weight = norm.weight;
            (rows.eps, rows.offset) = (norm.eps, norm.offset);
        }
        task.x = scratch;
        task.multipliers = rows.multipliers;
        task.arrivals = rows.arrivals;
        task.sums = scratch + at.sums;
        (task.y, task.y_kind) = (op.y, op.y_type as i32);
        task.residual = op.residual;
        task.gate = op.gate.unwrap_or(-1);
        task.scaled = i32::from(op.x_type == Half::BF16);
    }

    /// # Safety
    /// As [`launch`].
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
                MOST_ROWS as u32,
                (self.task.units as u32 * 32).div_ceil(ROWS_THREADS),
                1,
            ],
            block: ROWS_THREADS,
            shared_bytes: 2 * self.rows.k as u32,
            stream: to.stream,
            programmatic: to.programmatic,
        };
        let rows = self.rows;
        let mut arguments = kernel_arguments![rows];
        // SAFETY: the struct is the kernel's; validity is the caller's promise.
        unsafe { launch.run(device, &mut arguments) }
    }

    /// # Safety
    /// As [`launch`].
    unsafe fn multiply(
        &self,
        to: Target,
        device: &Device,
        matrix: &Matrix,
    ) -> Result<(), CudaError> {
        let kernel = format!("skinny_{}_{}", matrix.kind, matrix.entry_rows);
        let launch = Launch {
            kernel: &kernel,
            grid: [self.blocks as u32, 1, 1],
            block: THREADS,
            shared_bytes: self.shared as u32,
            stream: to.stream,
            programmatic: to.programmatic,
        };
        let task = self.task;
        let mut arguments = kernel_arguments![task];
        // SAFETY: the struct is the kernel's; validity is the caller's promise.
        unsafe { launch.run(device, &mut arguments) }
    }
}

/// The product in two launches, for up to [`rows`] rows. Results stand beside each other in the order of `matrices`. Same bits as
/// `ops::ring`.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch; scratch is an address,
/// aligned to 128, and bytes, at least [`scratch_bytes`]; it is used by no other launch meanwhile.
pub unsafe fn launch(
    to: Target,
    matrices: &[&Matrix],
    op: &Product,
    scratch: (usize, usize),
    tuning: Tuning,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let mut plan = planned(&device.info, matrices, op, tuning)?;
    check_scratch(scratch, plan.scratch.bytes)?;
    plan.bind(op, scratch.0);
    // SAFETY: this function's contract.
    unsafe {
        plan.prepare(to, device, op.x_type)?;
        plan.multiply(to, device, matrices[0])
    }
}

/// Two products in three launches: the second's input are the first's results, of F16, whose `y` is not used.
///
/// # Safety
/// As [`launch`], with [`pair_bytes`] of scratch memory.
pub unsafe fn launch_pair(
    to: Target,
    first: (&[&Matrix], &Product),
    second: (&[&Matrix], &Product),
    scratch: (usize, usize),
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let gated = first.1.gate.is_some();
    let needed = pair_bytes(&device.info, (first.0, gated), second.0);
    let halves = first.1.x_type == Half::F16 && first.1.y_type == Half::F16;
    let (Some(needed), true) = (needed, halves) else {
        return Err(CudaError::Argument {
            what: "two products in a row".to_owned(),
            limit: "F16 between them, as many results as inputs, no padding".to_owned(),
        });
    };
    check_scratch(scratch, needed)?;
    let mut one = planned(&device.info, first.0, first.1, Tuning::default())?;
    let mut two = planned(&device.info, second.0, second.1, Tuning::default())?;
    one.bind(first.1, scratch.0);
    two.bind(
        second.1,
        scratch.0 + one.scratch.bytes.next_multiple_of(128),
    );
    one.task.y = two.task.x;
    one.task.y_kind = PREPARED;
    one.task.row_of_feature = second.0[0].argument.row_of_feature;
    one.rows.more_arrivals = two.rows.arrivals;
    one.rows.more_arrivals_count = two.rows.arrivals_count;
    // SAFETY: this function's contract.
    unsafe {
        one.prepare(to, device, first.1.x_type)?;
        one.multiply(to, device, first.0[0])?;
        two.multiply(to, device, second.0[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear::tests::{hopper, matrix};

    #[test]
    fn sides_hold_every_unit_once() {
        for units in [1, 5, 9, 16, 17, 56, 255] {
            for cut in [1, 4] {
                let all: usize = (0..cut).flat_map(|rank| sides(units, cut, rank)).sum();
                assert_eq!(all, units);
            }
        }
        assert_eq!(sides(56, 4, 0), [4, 3, 4, 3]);
        assert_eq!(sides(16, 1, 0), [4, 4, 4, 4]);
    }

    #[test]
    fn a_plan_never_asks_for_more_than_there_is() {
        for (units, bytes) in [
            (1, 1040),
            (16, 4112),
            (16, 2064),
            (56, 2064),
            (56, 4112),
            (255, 4160),
        ] {
            let made = matrix(units, bytes);
            for together in [vec![&made], vec![&made, &made, &made]] {
                for cut in [0, 1, 4] {
                    let tuning = Tuning {
                        cut,
                        ..Tuning::default()
                    };
                    let Some(plan) = plan(&hopper(), &together, 8, false, tuning) else {
                        continue;
                    };
                    assert!((LEAST_SHARED..=232_448).contains(&plan.shared));
                    assert!(plan.blocks <= 132 && plan.task.window >= 1);
                    assert_eq!(plan.task.copies, 1);
                    let items = plan.task.columns as usize * (plan.blocks / plan.task.cut as usize);
                    assert_eq!(items + plan.task.longer as usize, 128 * together.len());
                    assert!(plan.task.slots > plan.task.window);
                }
            }
        }
        assert_eq!(rows(&hopper(), &[&matrix(16, 2064)], false), 8);
        let ampere = DeviceInfo {
            compute_capability: (8, 6),
            hopper_code: false,
            ..hopper()
        };
        assert_eq!(rows(&ampere, &[&matrix(16, 2064)], false), 0);
    }

    #[test]
    fn structs_have_the_sizes_the_kernels_expect() {
        assert_eq!(std::mem::size_of::<Part>(), 72 + 7 * 4 + 4);
        assert_eq!(std::mem::size_of::<Task>(), 18 * 4 + 8 * 8 + 3 * 104);
        assert_eq!(
            std::mem::size_of::<Preparation>(),
            10 * 8 + 3 * 4 + 8 * 4 + 4
        );
    }
}
