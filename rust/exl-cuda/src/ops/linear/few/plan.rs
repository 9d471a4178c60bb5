//! Plan of a launch of the kernel of 3 to 8 rows: the cut of K, the division of tiles, and the places in shared memory.

use super::super::Matrix;
use super::super::ring::MATRICES;
use super::super::select::{Refusal, check_alike, check_rows};
use super::shape::{CLASSES, FINISHERS, Shape};
pub(super) use super::task::{LISTED, Part, Preparation, Task};
use crate::abi::assert_constants;
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::layout::{ONE_SCALE_A_HALF, WIDTHS_BITS};
use crate::rows::FEW_ROWS;

/// Threads of a block of `kernels/linear/direct.cuh`.
pub(super) const DIRECT_THREADS: u32 = 256;
/// Warps that multiply, one that streams weights, and finishing warps.
pub(super) const THREADS: u32 = (16 + 1 + FINISHERS as u32) * 32;
/// Steps of a warp's class from one iteration to the next, best first: an odd one gives every warp all classes. Even ones divide the units
/// of a tile evenly enough if each class has a few.
const CLASS_STEPS: [usize; CLASSES] = [5, 1, 3, 7, 9, 11, 13, 15, 2, 4, 6, 8, 10, 12, 14, 0];
const LEAST_OF_CLASS: usize = 3;
/// Consecutive iterations in which a warp keeps its class: if all units of a matrix have one width each, and if not. A unit of several
/// widths takes longer, so its warp would fall behind the ring.
const STAY: i32 = 8;
const STAY_MIXED: i32 = 2;
/// Sums of squares of a unit: of each eight features of eight rows.
pub(super) const SQUARES_BYTES: usize = 32 * 8 * 4;
/// Packed activations of a unit and eight rows.
const X_BYTES: usize = 4096;
assert_constants!(few_task, { FINISHERS == FINISHERS, X_BYTES == X_BYTES });
assert_constants!(tile_layout, { CLASSES == CLASSES });
/// A partial sum of a tile: 16 features of eight rows.
const PART_BYTES: usize = 512;
/// Bytes in flight per SM; beyond this, queued weights delay all other memory traffic. With fewer than the second number, memory idles.
const BYTES_IN_FLIGHT: usize = 33 * 1024;
const LEAST_IN_FLIGHT: usize = 21 * 1024;
/// Units of K of inputs whose activations leave a ring little room.
const LONG_UNITS: usize = 32;
/// Bytes of a ring if they fit. The rest of an SM is left to the small kernels in between, which then start early.
const RING_BYTES: usize = 95 * 1024;
/// The kernel's static arrays.
const STATIC_BYTES: usize = 512;
/// More than half of an SM's shared memory, so that one block is placed on each SM.
const LEAST_SHARED: usize = 116 * 1024;

/// Parts of K (1, 2 or 4), slots and window of the ring, passes over the tiles (1 or 2), for benchmarks and tests that override the plan;
/// zero keeps the planned value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub cut: i32,
    pub slots: i32,
    pub window: i32,
    pub passes: i32,
}

/// A planned launch, without addresses.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) task: Task,
    pub(super) rows: Preparation,
    pub(super) shared: usize,
    /// Blocks of `gemm_direct`, or in the grid's first dimension of `gemm_few`.
    pub(super) groups: usize,
}

/// Consecutive allocation of bytes.
struct Arena(usize);

impl Arena {
    fn take(&mut self, bytes: usize) -> u32 {
        let at = self.0.next_multiple_of(128);
        self.0 = at + bytes;
        at as u32
    }
}

/// The packed copy of x that each matrix reads: matrices of one order share a copy.
pub(super) fn copies(matrices: &[&Matrix]) -> Vec<usize> {
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

/// Whether a unit of the matrix has several widths. A last unit without rows in all its quarters counts.
fn mixes_widths(matrix: &Matrix) -> bool {
    let mixed = |&widths: &u32| {
        let widths = widths & !ONE_SCALE_A_HALF;
        widths & 0xf != 0 && widths != (widths & 0xf) * 0x1111
    };
    matrix.unit_widths.iter().any(mixed)
}

/// Bits of a unit's offset in the list of units; its widths have the others.
const OFFSET_BITS: u32 = u32::BITS - WIDTHS_BITS;

/// The units of all matrices with the end of each, {offset / 16, widths} in a word, and the index of each matrix's first unit. None if
/// there is no room for all units.
fn listed(matrices: &[&Matrix]) -> ([u32; LISTED], [i32; MATRICES]) {
    let (mut list, mut begin, mut at) = ([0; LISTED], [-1; MATRICES], 0);
    for (matrix, begin) in matrices.iter().zip(&mut begin) {
        *begin = at as i32;
        for (&offset, &widths) in matrix.unit_offsets.iter().zip(&matrix.unit_widths) {
            if at == LISTED
                || offset % 16 != 0
                || offset >> 4 >> OFFSET_BITS != 0
                || widths >> WIDTHS_BITS != 0
            {
                return ([0; LISTED], [-1; MATRICES]);
            }
            list[at] = offset >> 4 | widths << OFFSET_BITS;
            at += 1;
        }
    }
    (list, begin)
}

/// Plan both launches for `m` rows; an error says why the kernels cannot take them.
pub(super) fn plan(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    (gated, norm): (bool, bool),
    tuning: Tuning,
) -> Result<Plan, Refusal> {
    if !caps.has(Feature::BulkCopy) {
        return Err(Refusal::Needs(Feature::BulkCopy));
    }
    check_rows(m, FEW_ROWS)?;
    check_alike(matrices, gated)?;
    let full = Refusal::SharedMemory(caps.shared_per_block);
    // A block of the packing launch holds one row.
    if 2 * matrices[0].in_features() + 1024 > caps.shared_per_block {
        return Err(full);
    }
    let most = |count: fn(&Matrix) -> usize| matrices.iter().map(|a| count(a)).max().unwrap_or(0);
    let units = most(|a| a.unit_offsets.len() - 1);
    let plans = Shape::ALL
        .into_iter()
        .filter(|shape| tuning.cut == 0 || shape.cut == tuning.cut as usize)
        .filter(|shape| tuning.passes == 0 || shape.passes == tuning.passes as usize)
        .filter(|shape| shape.cut == 1 || caps.has(Feature::Clusters))
        .filter(|shape| {
            let deal = Deal::new(caps, matrices, gated, shape.cut);
            shape.fits(units, gated, norm, deal.rounds)
        })
        .filter_map(|shape| plan_shape(caps, matrices, m, gated, shape, tuning));
    let mut best: Option<(usize, Plan)> = None;
    for plan in plans {
        let in_flight = plan.in_flight(matrices);
        if in_flight >= LEAST_IN_FLIGHT {
            return Ok(plan);
        }
        if best.as_ref().is_none_or(|(most, _)| *most < in_flight) {
            best = Some((in_flight, plan));
        }
    }
    let best = best.map(|(_, plan)| plan);
    // Without clusters, shapes that share K between blocks are left out.
    let missing = (!caps.has(Feature::Clusters)).then_some(Refusal::Needs(Feature::Clusters));
    best.ok_or(missing.unwrap_or(full))
}

/// The iterations of groups of `cut` blocks: one tile each or, if gated, a pair of tiles.
struct Deal {
    tiles: usize,
    /// The unit of division among groups: iterations, or pairs of iterations if one block has both tiles of a pair.
    pairs: usize,
    groups: usize,
    rounds: usize,
    /// Sums that a block receives from the others of its group.
    exchanges: usize,
    /// Partial sums of an exchange buffer.
    tiles_each: usize,
    /// Gates that a block keeps until it has their partners.
    gates: usize,
}

impl Deal {
    fn new(caps: &Capabilities, matrices: &[&Matrix], gated: bool, cut: usize) -> Self {
        let alternating = gated && cut == 1;
        let tiles: usize = matrices.iter().map(|a| a.argument.tiles as usize).sum();
        let pairs = tiles.div_ceil(if alternating { 2 } else { cut });
        let groups = pairs.min(caps.sms / cut).max(1);
        let rounds = pairs.div_ceil(groups) * if alternating { 2 } else { 1 };
        let (items, tiles_each) = if gated { (cut / 2, 2) } else { (cut, 1) };
        let exchanges = if cut > 1 {
            (rounds * items).div_ceil(cut)
        } else {
            0
        };
        let gates = if alternating { rounds / 2 } else { 0 };
        Self {
            tiles,
            pairs,
            groups,
            rounds,
            exchanges,
            tiles_each,
            gates,
        }
    }
}

/// Places in shared memory of everything but the ring and the barriers, from the end of the ring on.
struct Layout {
    parts: [Part; MATRICES],
    results_at: u32,
    exchange_at: u32,
    places_at: u32,
    bytes: usize,
}

impl Layout {
    /// `held`: units of a tile whose activations a block holds at a time; `copies`: the packed copy of x that each matrix reads.
    fn new(
        matrices: &[&Matrix],
        copies: &[usize],
        held: usize,
        (stages, shape): (usize, Shape),
        begin: [i32; MATRICES],
        deal: &Deal,
    ) -> Option<Self> {
        let mut arena = Arena(0);
        let copy_count = copies.iter().max()? + 1;
        let own = stages << shape.stage_log;
        let x_at: Vec<u32> = (0..copy_count)
            .map(|_| arena.take(held * X_BYTES))
            .collect();
        let mut column = 0;
        let parts = std::array::from_fn(|i| {
            let matrix = matrices.get(i).unwrap_or(&matrices[0]);
            let bytes = |b: usize| if i < matrices.len() { b } else { 0 };
            let copy = copies.get(i).copied().unwrap_or(0);
            let part = Part {
                matrix: matrix.argument,
                pieces_at: arena.take(bytes(2 * stages * 16)),
                units_at: arena.take(bytes(8 * own)),
                maxima_at: arena.take(bytes(2 * 256 / matrix.entry_rows * own)),
                x_at: x_at[copy],
                copy: copy as i32,
                y_offset: column,
                listed: begin[i],
            };
            column += matrix.argument.out_features;
            part
        });
        let results_at = arena.take(FINISHERS.min(deal.rounds) * CLASSES * PART_BYTES);
        // Gates of a block's tiles share this memory.
        let exchange_at =
            arena.take((deal.exchanges * deal.tiles_each * 4).max(deal.gates) * PART_BYTES);
        let places_at = arena.take(16 * MATRICES);
        Some(Self {
            parts,
            results_at,
            exchange_at,
            places_at,
            bytes: arena.0,
        })
    }

    /// All places moved after a ring of `ring` bytes, which comes first so that its slots are aligned.
    fn after(mut self, ring: usize) -> Self {
        let by = ring as u32;
        for part in &mut self.parts {
            part.pieces_at += by;
            part.units_at += by;
            part.maxima_at += by;
            part.x_at += by;
        }
        self.results_at += by;
        self.exchange_at += by;
        self.places_at += by;
        self
    }
}

/// Slots of the ring, and those of them that are in flight.
struct Ring {
    slots: usize,
    window: usize,
    /// Shared memory of a block, including the ring.
    total: usize,
}

impl Ring {
    /// The largest ring of slots of `stride` bytes, at least one more than `spare`, that leaves room for the rest; `mean`: bytes of a
    /// stage.
    fn largest(
        stride: usize,
        mean: usize,
        spare: usize,
        total: impl Fn(usize) -> usize,
        space: usize,
        tuning: Tuning,
    ) -> Option<Self> {
        let wanted = match tuning.slots {
            0 => RING_BYTES / stride.max(1),
            slots => slots as usize,
        }
        .max(spare + 1);
        let slots = (spare + 1..=wanted)
            .rev()
            .find(|&slots| total(slots) <= space)?;
        let window = match tuning.window {
            0 => (BYTES_IN_FLIGHT + mean / 2) / mean,
            window => window as usize,
        };
        Some(Self {
            slots,
            window: window.clamp(1, slots - spare),
            total: total(slots),
        })
    }
}

/// The packing launch, without addresses.
fn preparation(matrices: &[&Matrix], copies: &[usize], units: usize, m: usize) -> Preparation {
    let mut rows = Preparation {
        x: 0,
        weight: 0,
        out: 0,
        multipliers: 0,
        copy_bytes: units * X_BYTES,
        features: [0; MATRICES],
        layout_rows: [0; MATRICES],
        copies: copies.iter().max().map_or(0, |most| most + 1) as i32,
        units: units as i32,
        k: matrices[0].argument.in_features,
        m: m as i32,
        eps: 0.0,
        offset: 0.0,
    };
    for (matrix, &copy) in matrices.iter().zip(copies) {
        rows.features[copy] = matrix.features;
        rows.layout_rows[copy] = matrix.argument.rows;
    }
    rows
}

/// Plan the launches of the kernel without bulk copies, which runs on every card.
pub(in crate::ops::linear) fn plan_direct(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
) -> Result<Plan, Refusal> {
    check_rows(m, FEW_ROWS)?;
    check_alike(matrices, gated)?;
    // A block of the packing launch holds one row.
    if 2 * matrices[0].in_features() + 1024 > caps.shared_per_block {
        return Err(Refusal::SharedMemory(caps.shared_per_block));
    }
    let copies = copies(matrices);
    let units = |a: &Matrix| a.argument.unit_count as usize;
    let most = matrices.iter().map(|a| units(a)).max().unwrap_or(0);
    let rows = preparation(matrices, &copies, most, m);
    let mut columns = 0;
    let parts = std::array::from_fn(|i| {
        let matrix = matrices.get(i).unwrap_or(&matrices[0]);
        let y_offset = if gated { 0 } else { columns };
        columns += matrix.argument.out_features;
        Part {
            matrix: matrix.argument,
            pieces_at: 0,
            units_at: 0,
            maxima_at: 0,
            x_at: 0,
            copy: copies.get(i).copied().unwrap_or(0) as i32,
            y_offset,
            listed: -1,
        }
    });
    let columns: i32 = matrices.iter().map(|a| a.argument.out_features).sum();
    let tiles: usize = matrices.iter().map(|a| a.argument.tiles as usize).sum();
    let task = Task {
        count: matrices.len() as i32,
        units: most as i32,
        tiles: tiles as i32,
        m: m as i32,
        y_stride: if gated { columns / 2 } else { columns },
        copies: rows.copies,
        copy_bytes: rows.copy_bytes,
        k: rows.k,
        ..Task::without_operands(&parts)
    };
    Ok(Plan {
        task,
        rows,
        shared: 0,
        groups: if gated { tiles / 2 } else { tiles },
    })
}

/// The plan of a shape with the class step that allows the most bytes in flight.
fn plan_shape(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    shape: Shape,
    tuning: Tuning,
) -> Option<Plan> {
    let mut best: Option<Plan> = None;
    let of_class = matrices[0].unit_offsets.len() / CLASSES;
    for class_step in CLASS_STEPS {
        if class_step % 2 == 0 && of_class < LEAST_OF_CLASS {
            break;
        }
        let Some(plan) = plan_cut(caps, matrices, m, gated, (shape, class_step), tuning) else {
            continue;
        };
        let enough =
            plan.in_flight(matrices) >= LEAST_IN_FLIGHT || shape.stays(plan.task.units as usize);
        if best
            .as_ref()
            .is_none_or(|best| best.task.window < plan.task.window)
        {
            best = Some(plan);
        }
        if enough {
            break;
        }
    }
    best
}

impl Plan {
    /// Whether memory idles: four blocks share K, and clusters of four do not run at the same time, or too few bytes are in flight in addition to the
    /// activations of a long input. Shorter inputs, whose weights are just too wide, were not compared with `gemm_direct`.
    pub(super) fn idles(&self, caps: &Capabilities, matrices: &[&Matrix]) -> bool {
        let long = self.task.units as usize >= LONG_UNITS;
        let starved = long && self.in_flight(matrices) < LEAST_IN_FLIGHT;
        caps.has(Feature::Clusters) && (self.task.cut == 4 || starved)
    }

    /// Fewest bytes in flight while a block streams a run of equal tiles.
    fn in_flight(&self, matrices: &[&Matrix]) -> usize {
        let task = &self.task;
        let shape = Shape::new(task.cut as usize, task.stage_log as usize, 1);
        let least = |offsets: &[u32]| {
            let bytes = shape.stage_bytes(offsets, task.stages as usize);
            let window = |first: usize| {
                let stages = (first..first + task.window as usize).map(|i| bytes[i % bytes.len()]);
                stages.sum::<usize>()
            };
            (0..bytes.len()).map(window).min().unwrap_or(0)
        };
        let all = matrices.iter().map(|a| least(&a.unit_offsets));
        all.min().unwrap_or(0)
    }
}

fn plan_cut(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    (shape, class_step): (Shape, usize),
    tuning: Tuning,
) -> Option<Plan> {
    let space = (caps.shared_per_block).checked_sub(STATIC_BYTES)?;
    let cut = shape.cut;
    let count = |a: &Matrix| a.unit_offsets.len() - 1;
    let units = matrices.iter().map(|a| count(a)).max()?;
    let stages = shape.stages(units);
    let room = matrices.iter().map(|a| shape.room(&a.unit_offsets)).max()?;
    let stride = cut * room.next_multiple_of(128);
    let bytes: usize = matrices
        .iter()
        .map(|a| a.argument.tile_bytes as usize)
        .sum();
    let mean = (bytes / (stages * matrices.len())).max(1);
    let deal = Deal::new(caps, matrices, gated, cut);
    let copies = copies(matrices);
    let (units_listed, begin) = listed(matrices);
    let first_stages = shape.first_stages(stages);
    let held = first_stages.max(stages - first_stages) << shape.stage_log;
    let layout = Layout::new(matrices, &copies, held, (stages, shape), begin, &deal)?;
    let rest = layout.bytes.next_multiple_of(128);
    let total = |slots: usize| {
        slots * stride + rest + (2 * slots + 2 * FINISHERS + 1 + stages + deal.exchanges) * 8
    };
    let spare = shape.spare_slots(stages, class_step);
    let ring = Ring::largest(stride, mean, spare, total, space, tuning)?;
    let ring_bytes = ring.slots * stride;
    let mut layout = layout.after(ring_bytes);
    if gated {
        layout.parts[1].y_offset = 0;
    }
    let columns: i32 = matrices.iter().map(|a| a.argument.out_features).sum();
    let rows = preparation(matrices, &copies, units, m);
    let task = Task {
        barriers_at: (ring_bytes + rest) as u32,
        stage_stride: stride as u32,
        slots: ring.slots as i32,
        window: ring.window as i32,
        count: matrices.len() as i32,
        cut: cut as i32,
        units: units as i32,
        stages: stages as i32,
        stage_log: shape.stage_log as i32,
        rounds: (deal.pairs / deal.groups) as i32,
        longer: (deal.pairs % deal.groups) as i32,
        tiles: deal.tiles as i32,
        results_at: layout.results_at,
        places_at: layout.places_at,
        exchange_at: layout.exchange_at,
        exchanges: deal.exchanges as i32,
        m: m as i32,
        y_stride: if gated { columns / 2 } else { columns },
        copies: rows.copies,
        class_step: class_step as i32,
        stay: if matrices.iter().any(|a| mixes_widths(a)) {
            STAY_MIXED
        } else {
            STAY
        },
        first_stages: first_stages as i32,
        copy_bytes: rows.copy_bytes,
        k: rows.k,
        units_listed,
        ..Task::without_operands(&layout.parts)
    };
    Some(Plan {
        task,
        rows,
        shared: ring.total.max(LEAST_SHARED.min(space)),
        groups: deal.groups,
    })
}

#[cfg(test)]
mod tests;
