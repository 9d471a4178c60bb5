//! Plan of a launch of the warp ring kernel: the rings, the division of tiles, and the places in shared memory.

use super::super::Matrix;
use super::super::ring::MATRICES;
use super::super::select::{Refusal, check_alike, check_rows};
use super::task::{Part, Task};
use crate::capabilities::{Capabilities, Feature};

/// Warps of a team, each of which has a quarter of K or a class of a quarter.
const TEAM: usize = 4;
/// Most rows of activations.
const MOST_ROWS: usize = 8;
/// Most slots of a warp's ring; the kernel waits for at most two groups of copies fewer.
const MOST_STAGES: usize = 4;
/// Bytes in flight per SM that hide the latency of memory on every card, and the least that a shape without phases must have.
const BYTES_IN_FLIGHT: usize = 33 * 1024;
const LEAST_IN_FLIGHT: usize = 12 * 1024;
/// Shared memory of a card whose SM needs four teams for its share of the bandwidth (A100).
const DATA_CENTER_SHARED: usize = 128 * 1024;
/// Bytes of a unit's activations, a row each.
const X_BYTES: usize = 512;
/// Bytes of an entry of a list, of a row of partial sums, of a row of carried sums, and of `RowValues` in the kernel.
const ENTRY_BYTES: usize = 16;
const RESULT_BYTES: usize = 80;
const CARRY_BYTES: usize = 64;
const ROW_VALUES_BYTES: usize = (8 + 3) * MOST_ROWS * 4;

/// Phases, teams and stages that benchmarks and tests impose; zero keeps the planned value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::ops::linear) struct Shape {
    /// 1: a block has all activations at once; 4: those of one quarter of K after the other.
    pub phases: usize,
    /// Teams of four warps of a block.
    pub teams: usize,
    /// Slots of a warp's ring.
    pub stages: usize,
}

impl Shape {
    /// Whether `asked` allows this shape.
    fn matches(self, asked: Self) -> bool {
        let fits = |asked, own| asked == 0 || asked == own;
        fits(asked.phases, self.phases)
            && fits(asked.teams, self.teams)
            && fits(asked.stages, self.stages)
    }

    fn in_flight(self, unit_bytes: usize) -> usize {
        TEAM * self.teams * (self.stages - 1) * unit_bytes
    }

    /// All shapes, best first. `most_teams`: more would have no tile.
    fn candidates(caps: &Capabilities, most_teams: usize, unit_bytes: usize) -> Vec<Self> {
        let teams = if caps.shared_per_block >= DATA_CENTER_SHARED {
            &[4, 2, 1][..]
        } else {
            &[2, 1]
        };
        let mut all = Vec::new();
        for phases in [1, 4] {
            for &teams in teams.iter().filter(|&&teams| teams <= most_teams.max(1)) {
                let each = TEAM * teams * unit_bytes;
                let wanted = (1 + (BYTES_IN_FLIGHT + each / 2) / each).clamp(2, MOST_STAGES);
                all.extend((2..=wanted).rev().map(|stages| Self {
                    phases,
                    teams,
                    stages,
                }));
            }
        }
        // Stable: the order within both halves remains.
        all.sort_by_key(|shape| shape.in_flight(unit_bytes) < LEAST_IN_FLIGHT);
        all
    }

    /// Every shape that the kernel supports, for tests and benchmarks.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for phases in [1, 4] {
            for teams in [4, 2, 1] {
                all.extend((2..=MOST_STAGES).rev().map(|stages| Self {
                    phases,
                    teams,
                    stages,
                }));
            }
        }
        all
    }
}

/// A planned launch, without addresses.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(in crate::ops::linear) task: Task,
    pub(in crate::ops::linear) shared: usize,
    pub(super) blocks: usize,
}

impl Plan {
    pub(super) fn threads(&self) -> u32 {
        (self.task.teams as u32) * TEAM as u32 * 32
    }
}

/// Consecutive allocation of bytes.
struct Arena(usize);

impl Arena {
    fn take(&mut self, bytes: usize) -> u32 {
        let at = self.0.next_multiple_of(16);
        self.0 = at + bytes;
        at as u32
    }
}

/// The matrices of a launch, and what its plan needs to know of them.
struct Group<'a> {
    matrices: &'a [&'a Matrix],
    gated: bool,
    m: usize,
    packed: bool,
    /// The first matrix with the same order of rows, for each.
    orders: Vec<usize>,
    units: usize,
    /// Tiles, or pairs of tiles if gated.
    items: usize,
    largest_unit: usize,
    mean_unit: usize,
}

impl<'a> Group<'a> {
    fn new(matrices: &'a [&'a Matrix], m: usize, gated: bool, packed: bool) -> Self {
        let order = |i: usize| {
            let own = &matrices[i].features_host;
            matrices[..i]
                .iter()
                .position(|a| &a.features_host == own)
                .unwrap_or(i)
        };
        let sizes = || {
            matrices.iter().flat_map(|a| {
                a.unit_offsets
                    .windows(2)
                    .map(|pair| (pair[1] - pair[0]) as usize)
            })
        };
        let tiles: usize = matrices.iter().map(|a| a.argument.tiles as usize).sum();
        Self {
            matrices,
            gated,
            m,
            packed,
            orders: (0..matrices.len()).map(order).collect(),
            units: (matrices.iter().map(|a| a.argument.unit_count as usize))
                .max()
                .unwrap_or(0),
            items: if gated { tiles / 2 } else { tiles },
            largest_unit: sizes().max().unwrap_or(16),
            mean_unit: (sizes().sum::<usize>() / sizes().count().max(1)).max(16),
        }
    }

    /// Which packed copy of x a matrix reads: copies are numbered in the order of the first matrices that read them.
    fn copy(&self, i: usize) -> usize {
        (0..self.orders[i])
            .filter(|&before| self.orders[before] == before)
            .count()
    }

    fn parts(&self, arena: &mut Arena, phases: usize) -> [Part; MATRICES] {
        let local = if phases == 1 {
            self.units
        } else {
            self.units.div_ceil(4)
        };
        let mut x_at = [0; MATRICES];
        let mut column = 0;
        std::array::from_fn(|i| {
            let Some(matrix) = self.matrices.get(i) else {
                return Part {
                    matrix: self.matrices[0].argument,
                    list_at: 0,
                    maxima_at: 0,
                    x_at: 0,
                    order: 0,
                    copy: 0,
                    y_offset: 0,
                };
            };
            let (units, order) = (matrix.argument.unit_count as usize, self.orders[i]);
            if order == i {
                x_at[i] = arena.take(local * X_BYTES * self.m);
            }
            let entries = match phases {
                1 => TEAM * units.div_ceil(4),
                _ => 4 * TEAM * units.div_ceil(16),
            };
            let y_offset = if self.gated { 0 } else { column };
            column += matrix.argument.out_features;
            Part {
                matrix: matrix.argument,
                list_at: arena.take(entries * ENTRY_BYTES),
                maxima_at: arena.take(2 * matrix.rows().div_ceil(matrix.entry_rows)),
                x_at: x_at[order],
                order: order as i32,
                copy: self.copy(i) as i32,
                y_offset,
            }
        })
    }

    /// The launch of this shape with `blocks` blocks.
    fn launch(&self, shape: Shape, blocks: usize) -> Plan {
        let Shape {
            phases,
            teams,
            stages,
        } = shape;
        let mut arena = Arena(0);
        let parts = self.parts(&mut arena, phases);
        let slot = self.largest_unit.next_multiple_of(16);
        let rings_at = arena.take(TEAM * teams * stages * slot);
        let results_at = arena.take(2 * TEAM * teams * self.m * RESULT_BYTES);
        let most = self.items.div_ceil(blocks) * if self.gated { 2 } else { 1 };
        let carries = if phases > 1 { most } else { 0 };
        let carries_at = arena.take(carries * self.m * CARRY_BYTES);
        let rows_at = arena.take(ROW_VALUES_BYTES);
        let columns: i32 = (self.matrices.iter())
            .map(|a| a.argument.out_features)
            .sum();
        let padded = (self.matrices.iter()).any(|a| a.argument.rows != a.argument.in_features);
        Plan {
            task: Task {
                rings_at,
                slot_bytes: slot as u32,
                stages: stages as i32,
                teams: teams as i32,
                phases: phases as i32,
                count: self.matrices.len() as i32,
                tiles: (self.items / blocks) as i32,
                longer: (self.items % blocks) as i32,
                results_at,
                carries_at,
                rows_at,
                m: self.m as i32,
                k: self.matrices[0].argument.in_features,
                units: self.units as i32,
                padded: i32::from(padded),
                packed: i32::from(self.packed),
                y_stride: if self.gated { columns / 2 } else { columns },
                copy_bytes: self.units * X_BYTES * MOST_ROWS,
                ..Task::without_operands(&parts)
            },
            shared: arena.0,
            blocks,
        }
    }
}

/// Plan a launch for `m` rows; an error says why the kernel cannot take it. `packed`: x is packed by an earlier launch.
pub(in crate::ops::linear) fn plan(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    gated: bool,
    packed: bool,
    asked: Shape,
) -> Result<Plan, Refusal> {
    if !caps.has(Feature::WarpRing) {
        return Err(Refusal::Needs(Feature::WarpRing));
    }
    check_rows(m, MOST_ROWS)?;
    check_alike(matrices, gated)?;
    let group = Group::new(matrices, m, gated, packed);
    let blocks = group.items.clamp(1, caps.sms.max(1));
    let shapes = if asked == Shape::default() {
        Shape::candidates(caps, group.items.div_ceil(blocks), group.mean_unit)
    } else {
        Shape::all()
    };
    shapes
        .into_iter()
        .filter(|shape| shape.matches(asked))
        .flat_map(|shape| {
            // More blocks than SMs leave each fewer sums to carry from phase to phase.
            let most = if shape.phases > 1 { 16 } else { 1 };
            (0..5)
                .map(|log| 1 << log)
                .filter(move |&waves| waves <= most)
                .map(move |waves| (shape, waves))
        })
        .map(|(shape, waves)| group.launch(shape, group.items.clamp(1, blocks * waves)))
        .find(|plan| plan.shared <= caps.shared_per_block)
        .ok_or(Refusal::SharedMemory(caps.shared_per_block))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::capabilities::tests::{RELEASE, card};
    use crate::ops::linear::tests::{matrix, sized};

    /// A card with the experimental kernels selected.
    fn ampere(name: &str) -> Capabilities {
        card(name, RELEASE).with_warp_ring(true)
    }

    fn shape(plan: &Plan) -> (i32, i32, i32) {
        (plan.task.phases, plan.task.teams, plan.task.stages)
    }

    fn planned(caps: &Capabilities, matrices: &[&Matrix], m: usize, gated: bool) -> Plan {
        plan(caps, matrices, m, gated, m > 2, Shape::default()).expect("fits")
    }

    #[test]
    fn the_shapes_of_a_layer_of_an_8b_llama() {
        let (of, caps) = (|units, n| sized(units, 2064, n), ampere("3090"));
        let (o, down, up) = (of(16, 4096), of(56, 4096), of(16, 14336));
        assert_eq!(shape(&planned(&caps, &[&o], 1, false)), (1, 2, 3));
        assert_eq!(shape(&planned(&caps, &[&up, &up], 1, true)), (1, 2, 3));
        assert_eq!(shape(&planned(&caps, &[&down], 1, false)), (1, 2, 3));
        assert_eq!(shape(&planned(&caps, &[&down], 2, false)), (1, 2, 2));
        assert_eq!(shape(&planned(&caps, &[&up, &up], 8, true)), (1, 1, 3));
        assert_eq!(shape(&planned(&caps, &[&down], 8, false)).0, 4);
        let a100 = ampere("A100");
        assert_eq!(shape(&planned(&a100, &[&up, &up], 1, true)), (1, 4, 2));
        assert_eq!(shape(&planned(&a100, &[&up, &up], 8, true)), (1, 4, 2));
    }

    #[test]
    fn cards_without_the_switch_or_with_newer_code_refuse() {
        let made = matrix(16, 2064);
        for caps in [
            card("3090", RELEASE),
            card("H100", RELEASE).with_warp_ring(true),
            ampere("2080 Ti"),
            ampere("5090"),
        ] {
            let found = plan(&caps, &[&made], 1, false, false, Shape::default());
            assert_eq!(found.err(), Some(Refusal::Needs(Feature::WarpRing)));
        }
    }

    #[test]
    fn a_sum_that_is_carried_over_phases_has_a_place() {
        // The head on the smallest card: 287 tiles a block of 28 SMs do not fit with eight rows.
        let head = sized(56, 3088, 128_256);
        let found = planned(&ampere("3060"), &[&head], 8, false);
        assert_eq!(found.task.phases, 4);
        assert!(found.blocks > 28 && found.shared <= 99 * 1024);
        let most = 8016usize.div_ceil(found.blocks) as u32;
        assert!(found.task.carries_at + most * 8 * 64 <= found.task.rows_at);
    }

    proptest! {
        /// Every planned launch fits its card, gives each tile to one block, and keeps its buffers apart.
        #[test]
        fn a_plan_fits_its_card(
            name in proptest::sample::select(vec!["3060", "3090", "4090", "A100", "L4", "L40S"]),
            units in 1usize..200,
            bytes in proptest::sample::select(vec![1040u32, 1552, 2064, 2576, 3088, 4112, 4608]),
            outs in proptest::collection::vec(1usize..400, 1..4),
            m in 1usize..=8,
            own_order in any::<bool>(),
        ) {
            let caps = ampere(name);
            let mut made: Vec<Matrix> = outs.iter().map(|n| sized(units, bytes, 16 * n)).collect();
            if own_order {
                made[0].features_host.reverse();
            }
            let all: Vec<&Matrix> = made.iter().collect();
            let gated = all.len() == 2 && outs[0] == outs[1];
            if let Ok(found) = plan(&caps, &all, m, gated, m > 2, Shape::default()) {
                let task = found.task;
                prop_assert!(found.shared <= caps.shared_per_block);
                let items = if gated { outs[0] } else { outs.iter().sum() };
                prop_assert_eq!(task.tiles as usize * found.blocks + task.longer as usize, items);
                prop_assert!(task.tiles > 0 && (task.longer as usize) < found.blocks);
                let ring = task.teams * 4 * task.stages * task.slot_bytes as i32;
                prop_assert!(task.slot_bytes >= bytes);
                prop_assert!(task.rings_at as i32 + ring <= task.results_at as i32);
                let orders = if own_order && all.len() > 1 { 2 } else { 1 };
                let mut places: Vec<u32> = task.parts[..all.len()].iter().map(|p| p.x_at).collect();
                places.dedup();
                prop_assert_eq!(places.len(), orders);
            } else {
                // Only long rows do not fit: a quarter of K of all orders beside the smallest rings.
                prop_assert!(units.div_ceil(4) * 512 * m * 2 + 8 * bytes as usize + 30_000 > caps.shared_per_block);
            }
        }
    }
}
