//! Division of a batch launch among blocks and their shared memory.

use super::{MATRICES, MOST_ROWS};
use crate::abi::assert_layout;
use crate::capabilities::{Capabilities, Feature};
use crate::layout::{TILE, UNIT_ROWS};
use crate::ops::linear::select::{Refusal, check_rows};
use crate::ops::linear::{Matrix, MatrixArgument};

/// The kernel's variants: columns, and the multiplying warpgroups of a block.
pub const VARIANTS: [(usize, usize); 4] = [(16, 4), (32, 4), (64, 2), (64, 3)];
/// Whether gated results of this number of columns go to the next matmul transposed (`prepared_transposes` of
/// `kernels/linear/prepared.cuh`).
pub fn transposes(columns: usize) -> bool {
    columns != 32
}
/// Parts of K that are added last.
const QUARTERS: usize = 4;
/// Row tiles of an item, which a warpgroup processes at a time.
const ITEM_TILES: usize = 4;
const MOST_SLOTS: usize = 16;
/// Warpgroups of the kernel of `kernels/linear/batch_whole.cuh`.
pub const EVEN_GROUPS: usize = 3;
/// Approximate cost of the exchange between blocks in a launch.
const EXCHANGE_CYCLES: usize = 3000;
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
    pub residual: usize,
    pub into: usize,
    pub into_rows: usize,
    pub parts: [Part; MATRICES],
}

assert_layout!(Task, batch_task::BatchTask, { x, multipliers, sums, arrivals, y, count, items, m, y_kind, y_stride, paired, groups, scaled, slots, resident, stage_stride, unit_room, ring_at, x_at, barriers_at, numbered_at, sums_at, cut, looks, gate, left, residual, into, into_rows, parts as part });

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

/// Columns for `m` rows, and the most warpgroups of a block for them.
pub fn variant(m: usize) -> (usize, usize) {
    let columns = VARIANTS
        .into_iter()
        .map(|(columns, _)| columns)
        .find(|&columns| m <= columns)
        .unwrap_or(MOST_ROWS);
    let of = VARIANTS.into_iter().filter(|&(of, _)| of == columns);
    (columns, of.map(|(_, most)| most).max().unwrap_or(1))
}

/// Warpgroups of the smallest block of `columns` columns that has `groups`: with fewer warpgroups, each has more registers.
fn warpgroups(columns: usize, groups: usize) -> usize {
    VARIANTS
        .into_iter()
        .filter(|&(of, most)| of == columns && groups <= most)
        .map(|(_, most)| most)
        .min()
        .unwrap_or(groups)
}

impl Shares {
    /// The same work with quarters of the items that whole iterations leave over, if that takes fewer cycles. Only for a head, which is one
    /// EXL2 matrix in groups of 128: the kernel is tested for it only.
    fn dealt_evenly(&self, caps: &Capabilities, matrices: &[&Matrix]) -> Option<Self> {
        let [head] = matrices else { return None };
        let form = head.kind == "exl2" && head.entry_rows == 128;
        if !form || self.cut > 1 || self.columns != MOST_ROWS {
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
        matrices: &[&Matrix],
        m: usize,
        gated: bool,
        tuning: Tuning,
    ) -> Self {
        let (columns, most) = variant(m);
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
                columns,
                warpgroups: warpgroups(columns, groups),
                items,
                cut: 1,
                groups,
                blocks: items.div_ceil(groups / 2).min(teams),
                rounds: rounds(groups),
                gated,
                left: 0,
            };
        }
        Self::of_items(caps, items(matrices), m, tuning)
    }
    /// A division into whole items of any matrices.
    fn of_items(caps: &Capabilities, items: usize, m: usize, tuning: Tuning) -> Self {
        let (columns, most) = variant(m);
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
            columns,
            warpgroups: warpgroups(columns, groups),
            items,
            cut,
            groups,
            blocks: cut * items.div_ceil(groups).min(teams),
            rounds: rounds(groups),
            gated: false,
            left: 0,
        }
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
    /// Prefix of a kernel's form in its name.
    pub fn family(&self) -> &'static str {
        if self.left > 0 {
            "batch_whole"
        } else {
            "batch"
        }
    }
}

/// Cycles of a unit of K if `groups` warpgroups multiply 64 columns in parallel, by docs/design/gemm-batch.md.
fn unit_cycles(groups: usize) -> usize {
    659 + 880 * groups
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

/// SMs on which a matmul of one matrix of `features` features has no block.
pub fn left_alone(caps: &Capabilities, m: usize, features: usize) -> usize {
    let shares = Shares::of_items(
        caps,
        features.div_ceil(ITEM_TILES * TILE),
        m,
        Tuning::default(),
    );
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
    if !caps.has(Feature::Wgmma) {
        return Err(Refusal::Needs(Feature::Wgmma));
    }
    check_rows(m, MOST_ROWS)?;
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
    let shares = Shares::new(caps, matrices, m, gated, tuning);
    let even = if tuning.whole || tuning.groups > 0 {
        None
    } else {
        shares.dealt_evenly(caps, matrices)
    };
    // Evenly dealt items need more memory than some forms of matrix leave.
    even.and_then(of)
        .or_else(|| of(shares))
        .ok_or(Refusal::SharedMemory(caps.shared_per_block))
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
        let barriers_at = take((2 * MOST_SLOTS + own) * 8);
        let numbered_at = take(16);
        let sums_at = take(if shares.cut == 1 {
            shares.groups * shares.place() / QUARTERS
        } else {
            0
        });
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
        let resident = match tuning.activations {
            // The evenly dealt kernel has no such form.
            _ if shares.left > 0 => false,
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
        (slots >= 2).then_some(Self {
            resident,
            stage,
            slots,
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
    let ring_at = if ring.resident { at + kept } else { at };
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
            residual: 0,
            into: 0,
            into_rows: 0,
            parts: layout.parts,
        },
        shared: ring_at + ring.slots * ring.stage,
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
