//! Division of a batch launch among blocks and their shared memory.

mod shares;

use super::MATRICES;
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::layout::{TILE, UNIT_ROWS};
use crate::ops::linear::select::{Refusal, check_rows};
use crate::ops::linear::{Matrix, MatrixArgument};
use crate::rows::{BLOCK_ROWS, MIDDLE_ROWS, PACKED_ROWS};
pub use shares::Shares;

/// Columns of kernels for fewer rows than [`MIDDLE_ROWS`].
const FEWEST_COLUMNS: usize = 16;
/// Up to this number of columns, the last round is spread over all blocks, and divisions of matrices without a gate take the fewest cycles.
const NARROW_COLUMNS: usize = 32;
/// Columns of kernels for more rows than [`PACKED_ROWS`] and fewer than [`BLOCK_ROWS`].
const WIDE_COLUMNS: usize = 80;
const WIDER_COLUMNS: usize = 96;

/// Variants of the kernel for wgmma: columns, and the multiplying warpgroups of a block.
pub const VARIANTS: [(usize, usize); 8] = [
    (FEWEST_COLUMNS, 4),
    (NARROW_COLUMNS, 4),
    (MIDDLE_ROWS, 3),
    (PACKED_ROWS, 2),
    (PACKED_ROWS, EVEN_GROUPS),
    (WIDE_COLUMNS, 2),
    (WIDER_COLUMNS, 2),
    (BLOCK_ROWS, 2),
];
/// Variants of the kernel for `mma.sync`, of up to [`PACKED_ROWS`] columns; a warpgroup is four warps.
pub const MMA_VARIANTS: [(usize, usize); 3] =
    [(FEWEST_COLUMNS, 4), (NARROW_COLUMNS, 4), (PACKED_ROWS, 2)];

/// The code of the kernel, by the features of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `kernels/linear/batch.cuh`.
    Wgmma,
    /// `kernels/linear/batch_mma.cuh`.
    Mma,
}

impl Code {
    pub fn of(caps: &Capabilities) -> Result<Self, Refusal> {
        if caps.has(Feature::Wgmma) {
            Ok(Self::Wgmma)
        } else if caps.has(Feature::MmaPipeline) {
            Ok(Self::Mma)
        } else {
            Err(Refusal::Needs(Feature::MmaPipeline))
        }
    }
    pub(super) fn variants(self) -> &'static [(usize, usize)] {
        match self {
            Self::Wgmma => &VARIANTS,
            Self::Mma => &MMA_VARIANTS,
        }
    }
    /// Columns of the kernel for `m` rows; those for the most rows if these are too many.
    pub fn columns(self, m: usize) -> usize {
        let all = self.variants().iter().map(|&(columns, _)| columns);
        all.clone()
            .find(|&columns| m <= columns)
            .or(all.max())
            .unwrap_or(m)
    }
    /// Whether gated results of this number of columns go to the next matmul transposed (`prepared_transposes` of
    /// `kernels/linear/prepared.cuh`).
    pub fn transposes(self, columns: usize) -> bool {
        self == Self::Wgmma && columns != UNTRANSPOSED
    }
    /// The most warpgroups of a block of `columns` columns.
    fn most_groups(self, columns: usize) -> usize {
        let of = self.variants().iter().filter(|&&(of, _)| of == columns);
        of.map(|&(_, most)| most).max().unwrap_or(1)
    }
    /// Warpgroups of the smallest block of `columns` columns that has `groups`: with fewer warpgroups, each has more registers.
    fn warpgroups(self, columns: usize, groups: usize) -> usize {
        self.variants()
            .iter()
            .filter(|&&(of, most)| of == columns && groups <= most)
            .map(|&(_, most)| most)
            .min()
            .unwrap_or(groups)
    }
    /// Most rows of a launch.
    fn most_rows(self) -> usize {
        let columns = self.variants().iter().map(|&(columns, _)| columns);
        columns.max().unwrap_or(1)
    }
    /// Whether blocks may process fewer items at a time in the last round. Code for `mma.sync` multiplies with all of its warps in any case,
    /// and the code for it costs launches of more columns more than it saves.
    fn spreads(self, columns: usize) -> bool {
        self == Self::Wgmma && columns <= NARROW_COLUMNS
    }
    /// Stages of the ring at most.
    fn most_slots(self) -> usize {
        match self {
            Self::Wgmma => MOST_SLOTS,
            Self::Mma => MOST_MMA_SLOTS,
        }
    }
}
/// Parts of K that are added last.
const QUARTERS: usize = 4;
/// Row tiles of an item, which a warpgroup processes at a time.
const ITEM_TILES: usize = 4;
/// Up to this number of columns, the stages of the ring hold activations and weights; more have a ring of half units.
const STAGED_COLUMNS: usize = PACKED_ROWS;
assert_constants!(batch_task, { QUARTERS == QUARTERS, ITEM_TILES == ITEM_TILES, SPREAD_COLUMNS == NARROW_COLUMNS, STAGED_COLUMNS == STAGED_COLUMNS });
/// Columns of which results for the next matmul keep the order of its input.
const UNTRANSPOSED: usize = NARROW_COLUMNS;
assert_constants!(prepared, { UNTRANSPOSED == UNTRANSPOSED });
const MOST_SLOTS: usize = 16;
/// Slots of half units of activations at most, if these have a ring of their own.
const MOST_HALF_SLOTS: usize = 4;
/// `await_stage` of `kernels/linear/batch_mma.cuh` has a case for each number from two on.
const MOST_MMA_SLOTS: usize = 4;
/// Columns and warpgroups of the kernel of `kernels/linear/batch_whole.cuh`.
pub const EVEN_COLUMNS: usize = PACKED_ROWS;
pub const EVEN_GROUPS: usize = 3;
/// Approximate cost of the exchange between blocks in a launch.
const EXCHANGE_CYCLES: usize = 3000;
/// The same for each warpgroup and round at more than 64 columns.
const WIDE_EXCHANGE_CYCLES: usize = 3400;
/// Counters at the beginning of the workspace, one for four blocks. All matmuls use the same number, because the counts continue from
/// launch to launch. The memory after the counters is all ones after every launch.
pub const COUNTERS: usize = 256;
/// Polls of a block for the blocks that share K with it. Blocks start within a few polls of one another.
const LOOKS: i32 = 64;
/// Shared memory of a block, without the small static part.
pub const SHARED_BYTES: usize = 232_448 - 256;
/// From this number of items on, a block processes all of K: then no exchange of sums is needed.
pub const UNCUT_ITEMS: usize = 256;
/// Bytes left free for a block of the kernel that packs the next input. Gated results go to the next matmul without that kernel.
pub const LEFT_FREE: usize = 44 * 1024;

/// `struct BatchPart` of `kernels/linear/batch_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub matrix: MatrixArgument,
    pub y_offset: i32,
    pub first_item: i32,
    pub units_at: u32,
    pub padding: u32,
}

assert_layout!(Part, batch_task::BatchPart, { matrix as a, y_offset, first_item, units_at, padding });

/// `struct BatchTask` of `kernels/linear/batch_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Task {
    pub x: usize,
    pub multipliers: usize,
    pub sums: usize,
    pub arrivals: usize,
    pub y: usize,
    pub count: i32,
    pub items: i32,
    pub m: i32,
    pub y_kind: i32,
    pub y_stride: i32,
    pub paired: i32,
    pub groups: i32,
    pub scaled: i32,
    pub slots: i32,
    pub resident: i32,
    pub stage_stride: u32,
    pub unit_room: u32,
    pub ring_at: u32,
    pub x_at: u32,
    pub barriers_at: u32,
    pub numbered_at: u32,
    pub sums_at: u32,
    pub cut: i32,
    pub looks: i32,
    pub gate: i32,
    pub left: i32,
    pub shares: i32,
    pub full: i32,
    pub last_items: i32,
    pub half_slots: i32,
    pub residual: usize,
    pub into: usize,
    pub into_rows: usize,
    pub parts: [Part; MATRICES],
}

assert_layout!(Task, batch_task::BatchTask, { x, multipliers, sums, arrivals, y, count, items, m, y_kind, y_stride, paired, groups, scaled, slots, resident, stage_stride, unit_room, ring_at, x_at, barriers_at, numbered_at, sums_at, cut, looks, gate, left, shares, full, last_items, half_slots, residual, into, into_rows, parts as part });

impl Task {
    /// Whether the task is of `m` rows and of these matrices.
    pub fn is_of(&self, matrices: &[&Matrix], m: usize) -> bool {
        let mut pairs = self.parts.iter().zip(matrices);
        self.m as usize == m
            && self.count as usize == matrices.len()
            && pairs.all(|(part, matrix)| part.matrix.image == matrix.argument.image)
    }
}

/// Choices for benchmarks; zero leaves one to the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub slots: usize,
    /// 1: activations travel with the weights; 2: they stay in shared memory.
    pub activations: usize,
    /// 1 or 4: blocks that share K.
    pub cut: usize,
    /// Warpgroups of a block that work.
    pub groups: usize,
    /// Number of polls of a block for the blocks that share K with it.
    pub looks: usize,
    /// Blocks process only whole items.
    pub whole: bool,
}

/// A planned launch, without the addresses of operands.
#[derive(Clone, Debug)]
pub struct Plan {
    pub task: Task,
    pub shared: usize,
    pub shares: Shares,
}

/// Bytes of one unit of packed activations.
pub fn unit_bytes(columns: usize) -> usize {
    columns * 2 * UNIT_ROWS
}

/// Bytes of a unit in a block's table, including the maxima of its entries.
fn unit_row(entry_rows: usize) -> usize {
    if entry_rows == 128 { 16 } else { 32 }
}

/// SMs on which a matmul by wgmma of one matrix of `features` input and output features has no block.
pub fn left_alone(caps: &Capabilities, m: usize, features: usize) -> usize {
    let items = features.div_ceil(ITEM_TILES * TILE);
    let units = features.div_ceil(UNIT_ROWS);
    let shares = Shares::of_items(caps, Code::Wgmma, (items, units), m, Tuning::default());
    caps.sms.saturating_sub(shares.blocks)
}

/// Items of a launch.
pub fn items(matrices: &[&Matrix]) -> usize {
    matrices
        .iter()
        .map(|matrix| (matrix.argument.tiles as usize).div_ceil(ITEM_TILES))
        .sum()
}

pub fn plan(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> Result<Plan, Refusal> {
    let code = Code::of(caps)?;
    check_rows(m, code.most_rows())?;
    let found = match code {
        Code::Wgmma => plan_wgmma(caps, matrices, m, gated, tuning),
        Code::Mma => plan_mma(caps, matrices, m, gated, tuning),
    };
    found.ok_or(Refusal::SharedMemory(caps.shared_per_block))
}

fn plan_wgmma(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> Option<Plan> {
    let space = SHARED_BYTES.min(caps.shared_per_block);
    let of = |shares: Shares| {
        let left_free = if shares.cut == 1 {
            0
        } else {
            LEFT_FREE.min(space)
        };
        plan_within(space - left_free, matrices, m, shares, tuning)
            .or_else(|| plan_within(space, matrices, m, shares, tuning))
    };
    let shares = Shares::new(caps, Code::Wgmma, matrices, m, gated, tuning);
    let even = if tuning.whole || tuning.groups > 0 {
        None
    } else {
        shares.dealt_evenly(caps, matrices)
    };
    // Evenly dealt items need more memory than some forms of matrix leave.
    even.and_then(of).or_else(|| of(shares))
}

/// As many warpgroups a block as fit with two stages.
fn plan_mma(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    tuning: Tuning,
) -> Option<Plan> {
    let of = |groups| {
        Shares::new(
            caps,
            Code::Mma,
            matrices,
            m,
            gated,
            Tuning { groups, ..tuning },
        )
    };
    let most = of(tuning.groups).groups;
    let step = if gated { 2 } else { 1 };
    (step..=most)
        .rev()
        .step_by(step)
        .find_map(|groups| plan_within(caps.shared_per_block, matrices, m, of(groups), tuning))
}

/// Places in a block's shared memory that do not depend on the ring.
struct Layout {
    parts: [Part; MATRICES],
    barriers_at: u32,
    numbered_at: u32,
    sums_at: u32,
    bytes: usize,
}

impl Layout {
    /// `own`: units of K of a block.
    fn new(matrices: &[&Matrix], own: usize, shares: &Shares) -> Self {
        let first = matrices[0];
        let mut at = 0;
        let mut take = |bytes: usize| {
            let start = at;
            at = (at + bytes).next_multiple_of(128);
            start as u32
        };
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
        let bulk = shares.code == Code::Wgmma;
        let barriers_at = take(if bulk {
            (2 * MOST_SLOTS + own.max(2 * MOST_HALF_SLOTS)) * 8
        } else {
            0
        });
        let numbered_at = take(16);
        // With `mma.sync` the sums take the place of the ring, which is empty then.
        let sums_at = take(if bulk { shares.own_sums() } else { 0 });
        Self {
            parts,
            barriers_at,
            numbered_at,
            sums_at,
            bytes: at,
        }
    }
}

/// The ring of weights, and whether activations stay in shared memory or travel with the weights.
struct Ring {
    resident: bool,
    stage: usize,
    slots: usize,
    /// Slots of half units of activations, if these have a ring of their own.
    half_slots: usize,
}

impl Ring {
    /// A ring in `space` bytes; `kept`: bytes of all activations of a block. None if not even two slots fit.
    fn new(
        space: usize,
        unit_room: usize,
        kept: usize,
        shares: &Shares,
        tuning: Tuning,
    ) -> Option<Self> {
        let x_bytes = unit_bytes(shares.columns);
        let weights = (shares.groups * ITEM_TILES * unit_room).next_multiple_of(128);
        if shares.halves() {
            return Self::of_halves(space, weights, shares, tuning);
        }
        let resident = match tuning.activations {
            // These kernels have no such form.
            _ if shares.left > 0 || shares.code == Code::Mma => false,
            0 => shares.rounds > 1 && space.saturating_sub(kept) / weights >= 2,
            1 => false,
            _ => true,
        };
        let (stage, room) = if resident {
            (weights, space.checked_sub(kept)?)
        } else {
            ((weights + x_bytes).next_multiple_of(128), space)
        };
        let most = (room / stage).min(shares.code.most_slots());
        let slots = match tuning.slots {
            0 => most,
            forced => forced.min(most),
        };
        (slots >= 2).then_some(Self {
            resident,
            stage,
            slots,
            half_slots: 0,
        })
    }
    /// A ring of weights and one of half units of activations: three or four of these with three stages of weights, or fewer of both.
    fn of_halves(space: usize, weights: usize, shares: &Shares, tuning: Tuning) -> Option<Self> {
        let half = unit_bytes(shares.columns) / 2;
        let slots_with = |halves: usize| space.saturating_sub(halves * half) / weights;
        let (halves, _) = [(4, 3), (3, 3), (4, 2), (3, 2), (2, 2)]
            .into_iter()
            .find(|&(halves, least)| slots_with(halves) >= least)?;
        let most = slots_with(halves).min(shares.code.most_slots());
        let slots = match tuning.slots {
            0 => most,
            forced => forced.min(most),
        };
        (slots >= 2).then_some(Self {
            resident: false,
            stage: weights,
            slots,
            half_slots: halves,
        })
    }
}

fn plan_within(
    shared: usize,
    matrices: &[&Matrix],
    m: usize,
    shares: Shares,
    tuning: Tuning,
) -> Option<Plan> {
    let units = matrices.first()?.argument.unit_count as usize;
    let own = units.div_ceil(shares.cut);
    let unit_room = matrices
        .iter()
        .flat_map(|matrix| matrix.unit_offsets.windows(2).map(|p| p[1] - p[0]))
        .max()?;
    let layout = Layout::new(matrices, own, &shares);
    let at = layout.bytes;
    let kept = own * unit_bytes(shares.columns);
    let space = shared.checked_sub(at)?;
    let ring = Ring::new(space, unit_room as usize, kept, &shares, tuning)?;
    let ring_at = if ring.resident {
        at + kept
    } else {
        at + ring.half_slots * unit_bytes(shares.columns) / 2
    };
    let sums = match shares.code {
        Code::Wgmma => 0,
        Code::Mma => shares.own_sums(),
    };
    let ring_bytes = (ring.slots * ring.stage).max(sums);
    if ring_at + ring_bytes > shared {
        return None;
    }
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
            slots: ring.slots as i32,
            resident: i32::from(ring.resident),
            stage_stride: ring.stage as u32,
            unit_room,
            ring_at: ring_at as u32,
            x_at: at as u32,
            barriers_at: layout.barriers_at,
            numbered_at: layout.numbered_at,
            sums_at: layout.sums_at,
            cut: shares.cut as i32,
            looks: if tuning.looks == 0 {
                LOOKS
            } else {
                tuning.looks as i32
            },
            gate: -1,
            left: shares.left as i32,
            shares: shares.dealt() as i32,
            full: shares.full as i32,
            last_items: shares.last_items as i32,
            half_slots: ring.half_slots as i32,
            residual: 0,
            into: 0,
            into_rows: 0,
            parts: layout.parts,
        },
        shared: ring_at + ring_bytes,
        shares,
    })
}

#[cfg(test)]
mod tests;
