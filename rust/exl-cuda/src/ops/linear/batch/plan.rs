//! Division of a batch launch among blocks and their shared memory.

use super::{MATRICES, MOST_ROWS};
use crate::abi::assert_layout;
use crate::capabilities::{Capabilities, Feature};
use crate::layout::{TILE, UNIT_ROWS};
use crate::ops::linear::select::{Refusal, check_rows};
use crate::ops::linear::{Matrix, MatrixArgument};

/// Variants of the kernel for wgmma: columns, and the multiplying warpgroups of a block.
pub const VARIANTS: [(usize, usize); 5] = [(16, 4), (32, 4), (64, 2), (64, 3), (128, 2)];
/// Variants of the kernel for `mma.sync`, with the columns of up to 64 rows; a warpgroup is four warps.
pub const MMA_VARIANTS: [(usize, usize); 3] = [(16, 4), (32, 4), (64, 2)];

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
    fn variants(self) -> &'static [(usize, usize)] {
        match self {
            Self::Wgmma => &VARIANTS,
            Self::Mma => &MMA_VARIANTS,
        }
    }
    /// Whether gated results of this number of columns go to the next matmul transposed (`prepared_transposes` of
    /// `kernels/linear/prepared.cuh`).
    pub fn transposes(self, columns: usize) -> bool {
        self == Self::Wgmma && columns != 32
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
const MOST_SLOTS: usize = 16;
/// Slots of half units of activations at most, if these have a ring of their own.
const MOST_HALF_SLOTS: usize = 4;
/// `await_stage` of `kernels/linear/batch_mma.cuh` has a case for each number from two on.
const MOST_MMA_SLOTS: usize = 4;
/// Columns and warpgroups of the kernel of `kernels/linear/batch_whole.cuh`.
pub const EVEN_COLUMNS: usize = 64;
pub const EVEN_GROUPS: usize = 3;
/// Approximate cost of the exchange between blocks in a launch.
const EXCHANGE_CYCLES: usize = 3000;
/// The same for each warpgroup and round at 128 columns.
const WIDE_EXCHANGE_CYCLES: usize = 9000;
/// Counters at the beginning of the workspace, one for four blocks. All matmuls use the same number, because the counts continue from
/// launch to launch. The memory after the counters is all ones after every launch.
pub const COUNTERS: usize = 256;
/// Polls of a block for the blocks that share K with it. Blocks start within a few polls of one another.
const LOOKS: i32 = 64;
/// Shared memory of a block, beside the small static part.
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
    pub half_slots: i32,
    pub residual: usize,
    pub into: usize,
    pub into_rows: usize,
    pub parts: [Part; MATRICES],
}

assert_layout!(Task, batch_task::BatchTask, { x, multipliers, sums, arrivals, y, count, items, m, y_kind, y_stride, paired, groups, scaled, slots, resident, stage_stride, unit_room, ring_at, x_at, barriers_at, numbered_at, sums_at, cut, looks, gate, left, half_slots, residual, into, into_rows, parts as part });

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

/// Division of a launch's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    pub code: Code,
    pub columns: usize,
    /// Warpgroups of a block's code.
    pub warpgroups: usize,
    pub items: usize,
    /// Blocks that share K.
    pub cut: usize,
    /// Warpgroups of a block that work: items that it processes at a time.
    pub groups: usize,
    pub blocks: usize,
    /// Items of the busiest warpgroup.
    pub rounds: usize,
    /// Whether the first of two matrices gates the second. An item is then four tiles of both, the work of two warpgroups.
    pub gated: bool,
    /// Number of the last items, of which blocks process a quarter of K each before the whole iterations of the others. `items` includes
    /// them.
    pub left: usize,
}

/// Columns for `m` rows.
pub fn columns_of(m: usize) -> usize {
    let all = VARIANTS.map(|(columns, _)| columns);
    all.into_iter()
        .find(|&columns| m <= columns)
        .unwrap_or(MOST_ROWS)
}

impl Shares {
    /// The same work with quarters of the items that whole iterations leave over, if that takes fewer cycles. Only for a head, which is one
    /// EXL2 matrix in groups of 128: the kernel is tested for it only.
    fn dealt_evenly(&self, caps: &Capabilities, matrices: &[&Matrix]) -> Option<Self> {
        let [head] = matrices else { return None };
        let form = head.kind == "exl2" && head.entry_rows == 128;
        if !form || self.code != Code::Wgmma || self.cut > 1 || self.columns != EVEN_COLUMNS {
            return None;
        }
        let units = head.argument.unit_count as usize;
        let teams = caps.sms;
        let round = EVEN_GROUPS * teams;
        let left = self.items % round;
        // Blocks with quarters come in groups of four; a warpgroup has one quarter at most.
        let fits = left * QUARTERS <= EVEN_GROUPS * (teams / QUARTERS * QUARTERS);
        let stages = self.items / round * units + units.div_ceil(QUARTERS);
        let sooner = stages * unit_cycles(EVEN_GROUPS) + EXCHANGE_CYCLES
            < self.rounds * units * unit_cycles(self.groups);
        (left > 0 && fits && self.items >= round && units >= QUARTERS && sooner).then_some(Self {
            warpgroups: EVEN_GROUPS,
            groups: EVEN_GROUPS,
            blocks: teams,
            rounds: self.items / round + 1,
            left,
            ..*self
        })
    }
    /// A division into whole items.
    fn new(
        caps: &Capabilities,
        code: Code,
        matrices: &[&Matrix],
        m: usize,
        gated: bool,
        tuning: Tuning,
    ) -> Self {
        let columns = columns_of(m);
        let most = code.most_groups(columns);
        if gated {
            let items = items(matrices) / 2;
            let teams = caps.sms;
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
                code,
                columns,
                warpgroups: code.warpgroups(columns, groups),
                items,
                cut: 1,
                groups,
                blocks: items.div_ceil(groups / 2).min(teams),
                rounds: rounds(groups),
                gated,
                left: 0,
            };
        }
        let units = matrices[0].argument.unit_count as usize;
        Self::of_items(caps, code, (items(matrices), units), m, tuning)
    }
    /// A division into whole items of any matrices of `units` units of K.
    fn of_items(
        caps: &Capabilities,
        code: Code,
        (items, units): (usize, usize),
        m: usize,
        tuning: Tuning,
    ) -> Self {
        let columns = columns_of(m);
        let forced = tuning.cut > 0 && tuning.groups > 0;
        if columns > EVEN_COLUMNS && !forced {
            return Self::fastest(caps, code, (items, units), m, tuning);
        }
        let most = code.most_groups(columns);
        let cut = match tuning.cut {
            0 if items >= UNCUT_ITEMS => 1,
            0 => QUARTERS,
            forced => forced,
        };
        let teams = (caps.sms / cut).clamp(1, COUNTERS);
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
            code,
            columns,
            warpgroups: code.warpgroups(columns, groups),
            items,
            cut,
            groups,
            blocks: cut * items.div_ceil(groups).min(teams),
            rounds: rounds(groups),
            gated: false,
            left: 0,
        }
    }
    /// The division of fewest cycles, for more than 64 columns, by docs/design/gemm-batch.md.
    fn fastest(
        caps: &Capabilities,
        code: Code,
        (items, units): (usize, usize),
        m: usize,
        tuning: Tuning,
    ) -> Self {
        let cycles = |shares: &Self| {
            let exchange = if shares.cut == 1 {
                0
            } else {
                WIDE_EXCHANGE_CYCLES * shares.groups
            };
            shares.rounds
                * (units.div_ceil(shares.cut) * wide_unit_cycles(shares.groups) + exchange)
        };
        let of = |cut, groups| {
            let tuning = Tuning {
                cut,
                groups,
                ..tuning
            };
            Self::of_items(caps, code, (items, units), m, tuning)
        };
        let choices = |forced, all: [usize; 2]| if forced > 0 { [forced; 2] } else { all };
        choices(tuning.cut, [QUARTERS, 1])
            .into_iter()
            .flat_map(|cut| choices(tuning.groups, [2, 1]).map(|groups| of(cut, groups)))
            .min_by_key(cycles)
            .unwrap_or_else(|| of(1, 1))
    }
    /// Bytes of the sums of an item's quarters.
    pub fn place(&self) -> usize {
        QUARTERS * ITEM_TILES * TILE * self.columns * 4
    }
    /// Bytes of the sums that blocks exchange.
    pub fn sums(&self) -> usize {
        let items = if self.cut == 1 { self.left } else { self.items };
        items * self.place()
    }
    /// Bytes of a block's sums in shared memory, if it processes all of K.
    fn own_sums(&self) -> usize {
        if self.cut == 1 {
            self.groups * self.place() / QUARTERS
        } else {
            0
        }
    }
    /// Whether half units of activations have a ring of their own (`HALVES` of `kernels/linear/batch.cuh`).
    fn halves(&self) -> bool {
        self.code == Code::Wgmma && self.columns > EVEN_COLUMNS
    }
    /// Prefix of a kernel's form in its name.
    pub fn family(&self) -> &'static str {
        match self.code {
            Code::Mma => "mma",
            Code::Wgmma if self.left > 0 => "batch_whole",
            Code::Wgmma => "batch",
        }
    }
    /// Threads of a block: in the code for wgmma, one more warpgroup copies.
    pub fn threads(&self) -> usize {
        128 * (self.warpgroups + usize::from(self.code == Code::Wgmma))
    }
}

/// Cycles of a unit of K if `groups` warpgroups multiply 64 columns in parallel, by docs/design/gemm-batch.md.
fn unit_cycles(groups: usize) -> usize {
    659 + 880 * groups
}

/// The same for 128 columns, measured with one and two warpgroups.
fn wide_unit_cycles(groups: usize) -> usize {
    1400 + 1300 * groups
}

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
    /// A ring of weights and one of half units of activations: three or four of these beside three stages of weights, or fewer of both.
    fn of_halves(space: usize, weights: usize, shares: &Shares, tuning: Tuning) -> Option<Self> {
        let half = unit_bytes(shares.columns) / 2;
        let slots_beside = |halves: usize| space.saturating_sub(halves * half) / weights;
        let (halves, _) = [(4, 3), (3, 3), (4, 2), (3, 2), (2, 2)]
            .into_iter()
            .find(|&(halves, least)| slots_beside(halves) >= least)?;
        let most = slots_beside(halves).min(shares.code.most_slots());
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
mod tests {
    use super::*;
    use crate::capabilities::tests::hopper;
    use crate::ops::linear::tests::matrix;

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
        let mut head = matrix(16, 3088);
        head.argument.tiles = 8016;
        head.argument.out_features = 128_256;
        let logits = shares_of(64, &[&head]);
        assert_eq!((logits.items, logits.cut, logits.groups), (2004, 1, 3));
        assert_eq!((logits.rounds, logits.blocks), (6, 132));
        assert_eq!((logits.columns, logits.warpgroups), (64, 3));
        assert_eq!((logits.left, logits.family()), (24, "batch_whole"));
        assert_eq!(logits.sums(), 24 * 65536);
        let pair = shares_of(64, &[&up, &up]);
        assert_eq!((pair.items, pair.cut, pair.groups), (448, 1, 2));
        assert_eq!((pair.left, pair.family()), (0, "batch"));
        let gated = plan(&hopper(), &[&up, &up], 64, true, Tuning::default()).expect("fits");
        assert_eq!((gated.shares.left, gated.shares.groups), (0, 2));
        assert_eq!(shares_of(32, &[&up, &up]).left, 0);
        let alone = shares_of(32, &[&o]);
        assert_eq!((alone.items, alone.cut, alone.groups), (64, 4, 2));
        assert_eq!((alone.rounds, alone.blocks), (1, 128));
        assert_eq!(shares_of(16, &[&o]).columns, 16);
    }

    #[test]
    fn the_division_of_128_columns_takes_fewest_cycles() {
        let shares_of = |units, tiles, count: usize| {
            let mut made = matrix(units, 2064);
            made.argument.tiles = tiles;
            let matrices = [&made, &made];
            let found = plan(&hopper(), &matrices[..count], 128, false, Tuning::default());
            let shares = found.expect("fits").shares;
            (shares.cut, shares.groups, shares.blocks, shares.rounds)
        };
        assert_eq!(shares_of(16, 384, 1), (1, 1, 96, 1), "q, k, v");
        assert_eq!(shares_of(16, 256, 1), (4, 2, 128, 1), "o");
        assert_eq!(shares_of(16, 896, 1), (1, 2, 112, 1), "up");
        assert_eq!(shares_of(16, 896, 2), (1, 2, 132, 2), "gate and up");
        assert_eq!(shares_of(56, 256, 1), (4, 2, 128, 1), "down");
        assert_eq!(shares_of(16, 8016, 1), (1, 2, 132, 8), "head");
    }

    #[test]
    fn sms_that_the_matmuls_of_a_layer_leave_free() {
        let left = |m, features| left_alone(&hopper(), m, features);
        for m in [9, 16, 17, 32, 33, 64] {
            for made in [matrix(16, 2064), matrix(56, 2064)] {
                let found = plan(&hopper(), &[&made], m, false, Tuning::default()).expect("fits");
                assert_eq!(left(m, made.out_features()), 132 - found.shares.blocks);
            }
            // Whole groups of four, unless blocks process all of K.
            assert!((64..16384).step_by(64).all(|n| left(m, n) % QUARTERS == 0));
            assert_eq!((left(m, 16384), left(m, 16896)), (4, 0));
        }
        assert_eq!((left(64, 4096), left(64, 5120)), (4, 24));
        assert_eq!((left(64, 2048), left(64, 64)), (4, 128));
    }

    /// The matrix of the test of leftover items in tests/kernels/test_cuda_linear.py, which the sanitizer runs for this kernel.
    #[test]
    fn the_matrix_of_a_test_has_leftover_items() {
        let mut made = matrix(8, 2064);
        made.argument.out_features = 64 * 400 + 24;
        made.argument.tiles = (made.argument.out_features + 15) / 16;
        for m in [33, 64] {
            let found = plan(&hopper(), &[&made], m, false, Tuning::default()).expect("fits");
            let shares = found.shares;
            assert_eq!(
                (shares.items, shares.blocks, shares.left),
                (401, 132, 5),
                "{m}"
            );
            assert_eq!(shares.family(), "batch_whole");
        }
    }

    #[test]
    fn activations_of_128_columns_have_a_ring_of_their_own() {
        for (units, bytes, gated, slots) in [
            (16, 2064, true, (4, 3)),
            (16, 4112, true, (2, 3)),
            (16, 2064, false, (3, 4)),
            (56, 2576, false, (4, 3)),
        ] {
            let mut made = matrix(units, bytes);
            made.argument.tiles = if gated { 896 } else { 256 };
            let matrices = [&made, &made];
            let count = if gated { 2 } else { 1 };
            let found =
                plan(&hopper(), &matrices[..count], 128, gated, Tuning::default()).expect("fits");
            let task = found.task;
            assert_eq!((task.slots, task.half_slots), slots, "{bytes} {gated}");
            assert_eq!(task.resident, 0);
            let ring = task.x_at as usize + task.half_slots as usize * unit_bytes(128) / 2;
            assert_eq!(task.ring_at as usize, ring);
        }
    }

    #[test]
    fn a_plan_fits_the_shared_memory() {
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
}
