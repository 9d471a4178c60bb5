//! Division of a launch's items and of K among blocks.

use super::{
    COUNTERS, Code, EVEN_COLUMNS, EVEN_GROUPS, EXCHANGE_CYCLES, ITEM_TILES, NARROW_COLUMNS,
    QUARTERS, STAGED_COLUMNS, Tuning, UNCUT_ITEMS, WIDE_EXCHANGE_CYCLES, items,
};
use crate::capabilities::Capabilities;
use crate::layout::TILE;
use crate::ops::linear::Matrix;

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
    /// Shares of as many items as a block processes at a time, before the shares of the last round, which have `last_items` each at most.
    pub full: usize,
    pub last_items: usize,
    /// Whether the first of two matrices gates the second. An item is then four tiles of both, the work of two warpgroups.
    pub gated: bool,
    /// Number of the last items, of which blocks process a quarter of K each before the whole iterations of the others. `items` includes
    /// them.
    pub left: usize,
}

impl Shares {
    /// The same work with quarters of the items that whole iterations leave over, if that takes fewer cycles. Only for a head, which is one
    /// EXL2 matrix in groups of 128: the kernel is tested for it only.
    pub(super) fn dealt_evenly(&self, caps: &Capabilities, matrices: &[&Matrix]) -> Option<Self> {
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
        let sooner = stages * unit_cycles(EVEN_COLUMNS, EVEN_GROUPS) + EXCHANGE_CYCLES
            < self.rounds * units * unit_cycles(EVEN_COLUMNS, self.groups);
        (left > 0 && fits && self.items >= round && units >= QUARTERS && sooner).then_some(Self {
            warpgroups: EVEN_GROUPS,
            groups: EVEN_GROUPS,
            blocks: teams,
            rounds: self.items / round + 1,
            full: (self.items - left).div_ceil(EVEN_GROUPS),
            last_items: EVEN_GROUPS,
            left,
            ..*self
        })
    }
    /// A division into whole items.
    pub(super) fn new(
        caps: &Capabilities,
        code: Code,
        matrices: &[&Matrix],
        m: usize,
        gated: bool,
        tuning: Tuning,
    ) -> Self {
        let columns = code.columns(m);
        let most = code.most_groups(columns);
        if gated {
            let items = items(matrices) / 2;
            let teams = caps.sms;
            let narrow = code.spreads(columns);
            let deal = |groups: usize| Deal::new(narrow, items, groups / 2, teams);
            let cost = |groups: usize| match code {
                Code::Wgmma if columns == NARROW_COLUMNS => deal(groups).cycles(columns, 2),
                Code::Wgmma => deal(groups).rounds * unit_cycles(columns, groups),
                Code::Mma => deal(groups).rounds,
            };
            let groups = match tuning.groups {
                0 => (2..=most)
                    .step_by(2)
                    .min_by_key(|&groups| cost(groups))
                    .unwrap_or(2),
                forced => forced.min(most).max(2) / 2 * 2,
            };
            let Deal {
                rounds,
                full,
                last_items,
                ..
            } = deal(groups);
            return Self {
                code,
                columns,
                warpgroups: code.warpgroups(columns, groups),
                items,
                cut: 1,
                groups,
                blocks: items.div_ceil(groups / 2).min(teams),
                rounds,
                full,
                last_items,
                gated,
                left: 0,
            };
        }
        let units = matrices[0].argument.unit_count as usize;
        Self::of_items(caps, code, (items(matrices), units), m, tuning)
    }
    /// A division into whole items of any matrices of `units` units of K.
    pub(super) fn of_items(
        caps: &Capabilities,
        code: Code,
        (items, units): (usize, usize),
        m: usize,
        tuning: Tuning,
    ) -> Self {
        let columns = code.columns(m);
        let forced = tuning.cut > 0 && tuning.groups > 0;
        if columns > STAGED_COLUMNS && !forced {
            return Self::fastest(caps, code, (items, units), m, tuning);
        }
        let most = code.most_groups(columns);
        let cut = match tuning.cut {
            0 if items >= UNCUT_ITEMS => 1,
            0 => QUARTERS,
            forced => forced,
        };
        let teams = (caps.sms / cut).clamp(1, COUNTERS);
        let narrow = code.spreads(columns);
        let deal = |groups: usize| Deal::new(narrow, items, groups, teams);
        let cost = |groups: usize| {
            if narrow {
                deal(groups).cycles(columns, 1)
            } else {
                deal(groups).rounds
            }
        };
        let groups = match tuning.groups {
            0 => (1..=most).min_by_key(|&groups| cost(groups)).unwrap_or(1),
            forced => forced.min(most),
        };
        let Deal {
            rounds,
            full,
            last_items,
            ..
        } = deal(groups);
        Self {
            code,
            columns,
            warpgroups: code.warpgroups(columns, groups),
            items,
            cut,
            groups,
            blocks: cut * items.div_ceil(groups).min(teams),
            rounds,
            full,
            last_items,
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
            let unit = wide_unit_cycles(shares.columns, shares.groups);
            shares.rounds * (units.div_ceil(shares.cut) * unit + exchange)
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
    /// Number of all shares.
    pub fn dealt(&self) -> usize {
        let each = if self.gated {
            self.groups / 2
        } else {
            self.groups
        };
        let last = self.items.saturating_sub(self.full * each);
        self.full + last.div_ceil(self.last_items.max(1))
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
    pub(super) fn own_sums(&self) -> usize {
        if self.cut == 1 {
            self.groups * self.place() / QUARTERS
        } else {
            0
        }
    }
    /// Whether half units of activations have a ring of their own (`HALVES` of `kernels/linear/batch.cuh`).
    pub(super) fn halves(&self) -> bool {
        self.code == Code::Wgmma && self.columns > STAGED_COLUMNS
    }
    /// Prefix of a kernel's form in its name.
    pub fn family(&self) -> &'static str {
        match self.code {
            Code::Mma => "gemm_batch_mma",
            Code::Wgmma if self.left > 0 => "gemm_batch_whole",
            Code::Wgmma => "gemm_batch",
        }
    }
    /// Threads of a block: in the code for wgmma, one more warpgroup copies.
    pub fn threads(&self) -> usize {
        128 * (self.warpgroups + usize::from(self.code == Code::Wgmma))
    }
}

/// Division of items among blocks that take `each` of them at a time.
struct Deal {
    each: usize,
    rounds: usize,
    full: usize,
    last_items: usize,
}

impl Deal {
    /// If the launch `spreads`, blocks process fewer items of the last round at a time where that leaves none of them without work.
    fn new(spreads: bool, items: usize, each: usize, teams: usize) -> Self {
        let rounds = items.div_ceil(each).div_ceil(teams).max(1);
        let before = (rounds - 1) * teams;
        let last_items = (items - before * each).div_ceil(teams);
        if !spreads || rounds == 1 || last_items == each {
            return Self {
                each,
                rounds,
                full: items.div_ceil(each),
                last_items: each,
            };
        }
        Self {
            each,
            rounds,
            full: before,
            last_items,
        }
    }

    /// Cycles for a unit of K of all items; `of_item`: warpgroups of an item.
    fn cycles(&self, columns: usize, of_item: usize) -> usize {
        let unit = |items: usize| unit_cycles(columns, of_item * items);
        (self.rounds - 1) * unit(self.each) + unit(self.last_items.min(self.each))
    }
}

/// Cycles of a unit of K if `groups` warpgroups multiply in parallel, by docs/design/gemm-batch.md.
fn unit_cycles(columns: usize, groups: usize) -> usize {
    if columns == NARROW_COLUMNS {
        836 + 452 * groups
    } else {
        659 + 880 * groups
    }
}

/// The same for more columns, with one or two warpgroups: between the measured values of 64 and 128 columns.
fn wide_unit_cycles(columns: usize, groups: usize) -> usize {
    let (narrow, wide) = if groups == 1 {
        (1539, 3300)
    } else {
        (2419, 4000)
    };
    narrow + (wide - narrow) * (columns - STAGED_COLUMNS) / STAGED_COLUMNS
}
