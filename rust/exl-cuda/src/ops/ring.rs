//! The ring kernel: products of few rows, of up to three matrices over one input, with what stands around them in a layer.

use super::Target;
use super::linear::{Half, Matrix, MatrixArgument};
use super::select::{Epilogue, Kernel, Refusal, check_alike, check_rows};
use crate::abi::assert_layout;
use crate::capabilities::{Capabilities, Feature};
use crate::device::Device;
use crate::kernel_arguments;
use crate::launch::{CudaError, Launch};
use crate::layout::TILE;

/// Most rows of the ring kernel.
pub const MOST_ROWS: usize = 8;
/// Most matrices of a launch.
pub const MATRICES: usize = 3;
/// Most stages of eight units in a tile.
const MOST_STAGES: usize = 32;
const RESULT_BUFFERS: usize = 4;
/// Bytes in flight per multiprocessor beyond which everything else waits behind weights (spec/kernels-measured.md 6.1).
const BYTES_IN_FLIGHT: usize = 33 * 1024;
/// Bytes a ring holds when they fit: enough to ride out a hand-over between kernels.
const RING_BYTES: usize = 130 * 1024;
/// Stages of a ring beyond the window. A warp that has consumed stage i - 3 and now waits for stage i must not meet its slot's barrier in
/// the phase before the last: then the test of its parity succeeds at once. That stage i - 3 has been issued says that all up to
/// i - 3 - window have landed, so `window + 3` slots are enough: a warp passes over two stages at most, from one tile to the next. One
/// more is kept where tiles of one stage stand beside longer ones ([`spare_slots`]), which classes dealt out otherwise needed.
const SPARE_SLOTS: usize = 3;
/// More than half of a multiprocessor's shared memory, so that one block is placed on each (spec/kernels-measured.md 6.2).
const LEAST_SHARED: usize = 116 * 1024;
const THREADS: u32 = 576;
/// Of `Task::flags`: a warp keeps its class over tiles; a layout has rows in which no feature stands; one row of halves as it is, in one
/// order; the first bit of those that name matrices with an order of rows of their own.
const KEEP: i32 = 1;
const PADDED: i32 = 2;
const ROW: i32 = 4;
const FILLS: usize = 8;
/// Longest row that the 512 threads of the kernel hold at once.
const ROW_FEATURES: usize = 4 * 8 * 512;

/// `struct Part` of `kernels/ring_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Part {
    matrix: MatrixArgument,
    units_at: u32,
    maxima_at: u32,
    x_at: u32,
    stages: i32,
    order: i32,
    y_offset: i32,
}

assert_layout!(Part, ring_task::Part, { matrix as a, units_at, maxima_at, x_at, stages, order, y_offset });

/// `struct Task` of `kernels/ring_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Task {
    barriers_at: u32,
    stage_stride: u32,
    slots: i32,
    window: i32,
    count: i32,
    tiles: i32,
    longer: i32,
    gate: i32,
    results_at: u32,
    multipliers_at: u32,
    x_stride: u32,
    gates_at: u32,
    flags: i32,
    m: i32,
    columns: i32,
    x_kind: i32,
    y_kind: i32,
    y_stride: i32,
    eps: f32,
    offset: f32,
    x: usize,
    y: usize,
    residual: usize,
    norm: usize,
    parts: [Part; MATRICES],
    stage_begin: [[u32; MOST_STAGES + 1]; MATRICES],
}

assert_layout!(Task, ring_task::Task, { barriers_at, stage_stride, slots, window, count, tiles, longer, gate, results_at, multipliers_at, x_stride, gates_at, flags, m, columns, x_kind, y_kind, y_stride, eps, offset, x, y, residual, norm, parts as part, stage_begin });

/// RMS norm of the input before the product.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// `[in_features]` FP32, aligned to 16 bytes.
    pub weight: usize,
    pub eps: f32,
    pub offset: f32,
}

/// One product; device addresses, row-major and contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m, in_features]` of `x_type`, F16 or BF16, aligned to 16 bytes.
    pub x: usize,
    pub x_type: Half,
    /// `[m, sum of out_features]` of `y_type`, or `[m, out_features]` when gated.
    pub y: usize,
    pub y_type: Half,
    pub m: usize,
    /// Like y, added to the result; 0 for none.
    pub residual: usize,
    /// Number of the activation (`ops::elementwise`) of the first of two matrices, which then gates the second.
    pub gate: Option<i32>,
    pub norm: Option<Norm>,
}

/// Depth and window of the ring, for benchmarks that try others than the planned ones.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    pub slots: i32,
    pub window: i32,
}

/// Where a launch's data are in shared memory.
struct Plan {
    task: Task,
    shared: usize,
    deal: Deal,
}

/// Tiles, or pairs of them when gated, as blocks have them.
#[derive(Clone, Copy, Debug)]
struct Deal {
    blocks: usize,
    /// Of every block.
    tiles: usize,
    /// How many blocks have one more.
    longer: usize,
}

impl Deal {
    fn new(caps: &Capabilities, matrices: &[&Matrix], gated: bool) -> Self {
        let tiles: usize = matrices.iter().map(|a| a.argument.tiles as usize).sum();
        let tiles = if gated { tiles / 2 } else { tiles };
        let blocks = tiles.clamp(1, caps.sms);
        Self {
            blocks,
            tiles: tiles / blocks,
            longer: tiles % blocks,
        }
    }

    fn most(self) -> usize {
        self.tiles + usize::from(self.longer > 0)
    }
}

/// Fewest tiles of a block for which finding a warp's unit once pays.
const KEPT_TILES: usize = 4;

/// Whether a warp keeps its unit over tiles.
fn keeps(matrices: &[&Matrix], deal: Deal, gated: bool) -> bool {
    let each = if gated { 2 } else { 1 };
    each * deal.tiles >= KEPT_TILES
        && matrices
            .iter()
            .all(|a| (9..=16).contains(&a.argument.unit_count))
}

/// `Task::flags`. `alone`: one row of halves, not normed.
fn flags(parts: &[Part], keep: bool, alone: bool) -> i32 {
    let row = alone
        && parts
            .iter()
            .all(|p| p.order == 0 && p.matrix.in_features as usize <= ROW_FEATURES);
    let mut flags = if keep { KEEP } else { 0 };
    if row {
        flags |= ROW;
    }
    for (i, part) in parts.iter().enumerate() {
        if part.order == i as i32 {
            flags |= 1 << (FILLS + i);
            flags |= i32::from(part.matrix.rows != part.matrix.in_features) * PADDED;
        }
    }
    flags
}

fn stages(matrix: &Matrix) -> Option<[u32; MOST_STAGES + 1]> {
    let units = &matrix.unit_offsets;
    let count = (units.len() - 1).div_ceil(8);
    let mut begin = [0; MOST_STAGES + 1];
    if count > MOST_STAGES {
        return None;
    }
    for (stage, to) in begin.iter_mut().enumerate().take(count + 1) {
        *to = units[(8 * stage).min(units.len() - 1)];
    }
    Some(begin)
}

/// Bytes handed out one after the other.
struct Arena(usize);

impl Arena {
    fn take(&mut self, bytes: usize) -> u32 {
        let at = self.0.next_multiple_of(16);
        self.0 = at + bytes;
        at as u32
    }
}

/// Slots that a ring has beyond the window, for matrices of these numbers of stages.
fn spare_slots(mut stages: impl Iterator<Item = usize> + Clone) -> usize {
    SPARE_SLOTS + usize::from(stages.clone().any(|s| s == 1) && stages.any(|s| s > 1))
}

/// Whether one launch takes `rows` rows of these matrices.
pub(super) fn takes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
) -> Result<(), Refusal> {
    plan(caps, matrices, rows, epilogue, None).map(|_| ())
}

/// Bytes of shared memory of a block, where [`takes`] agrees.
#[cfg(test)]
pub(super) fn shared_bytes(
    caps: &Capabilities,
    matrices: &[&Matrix],
    rows: usize,
    epilogue: Epilogue,
) -> Option<usize> {
    plan(caps, matrices, rows, epilogue, None)
        .ok()
        .map(|plan| plan.shared)
}

/// Plans a launch for `m` rows; an error says why the kernel cannot take it.
fn plan(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    epilogue: Epilogue,
    tuning: Option<Tuning>,
) -> Result<Plan, Refusal> {
    if !caps.has(Feature::BulkCopy) {
        return Err(Refusal::Needs(Feature::BulkCopy));
    }
    check_rows(m, MOST_ROWS)?;
    let gated = epilogue.gate;
    check_alike(matrices, gated)?;
    let first = matrices[0];
    // The kernel's 512 threads hold a whole row where they need its sum or maximum first.
    let widest = match epilogue {
        Epilogue { norm: true, .. } => 8192,
        Epilogue { bf16: true, .. } => 16384,
        _ => usize::MAX,
    };
    if first.in_features() > widest {
        return Err(Refusal::Matrices(
            "inputs of up to 8,192 features with a norm, 16,384 in BF16",
        ));
    }
    let full = Refusal::SharedMemory(caps.shared_per_block);
    // 1 KB for the kernel's static arrays.
    let space = caps.shared_per_block.checked_sub(1024).ok_or(full)?;
    let mut begin = [[0; MOST_STAGES + 1]; MATRICES];
    let (mut largest, mut bytes, mut count) = (0, 0, 0);
    for (to, matrix) in begin.iter_mut().zip(matrices) {
        *to = stages(matrix).ok_or(Refusal::Matrices("tiles of up to 256 units of 256 rows"))?;
        let sizes = to.windows(2).map(|p| p[1].saturating_sub(p[0]) as usize);
        largest = largest.max(sizes.max().unwrap_or(0));
        bytes += matrix.argument.tile_bytes as usize;
        count += matrix.argument.unit_count as usize;
    }
    let deal = Deal::new(caps, matrices, gated);
    let keep = keeps(matrices, deal, gated);
    let mean = (8 * bytes / count.max(1)).max(1);
    let stride = largest.next_multiple_of(128);
    let rows = matrices.iter().map(|a| a.rows()).max().unwrap_or(0);
    let columns = m.next_multiple_of(2);
    let wanted = RING_BYTES.div_ceil(mean).clamp(5, 24);
    let spare = spare_slots(
        matrices
            .iter()
            .map(|a| (a.unit_offsets.len() - 1).div_ceil(8)),
    );
    let forced = tuning.filter(|t| (1..=t.slots - spare as i32).contains(&t.window));
    let candidates = match forced {
        Some(t) => t.slots as usize..=t.slots as usize,
        None => 1 + spare..=wanted,
    };
    for slots in candidates.rev() {
        let mut arena = Arena(slots * stride);
        // 64 bytes past a multiple of 128: eight rows' loads meet no bank twice.
        let x_stride = rows + 32;
        let mut parts: [Part; MATRICES] = std::array::from_fn(|i| Part {
            matrix: matrices.get(i).unwrap_or(&first).argument,
            units_at: 0,
            maxima_at: 0,
            x_at: 0,
            stages: 0,
            order: 0,
            y_offset: 0,
        });
        for (i, matrix) in matrices.iter().enumerate() {
            let same = matrices[..i]
                .iter()
                .position(|before| before.features_host == matrix.features_host);
            let units = matrix.argument.unit_count as usize;
            let x_at = match same {
                Some(before) => parts[before].x_at,
                None => arena.take(m * x_stride * 2),
            };
            let part = &mut parts[i];
            part.order = same.unwrap_or(i) as i32;
            part.x_at = x_at;
            part.stages = units.div_ceil(8) as i32;
            part.units_at = arena.take(8 * units);
            part.maxima_at = arena.take(2 * matrix.rows().div_ceil(matrix.entry_rows));
        }
        let results_at = arena.take(RESULT_BUFFERS * 16 * TILE * columns * 4);
        let multipliers_at = arena.take(32);
        let pairs = match (gated, keep) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => deal.most(),
        };
        let gates_at = arena.take(pairs * columns * 64);
        // As `Barriers` has them: those of slots in groups of four.
        let barriers_at = arena.take((2 * slots.next_multiple_of(4) + 2 * RESULT_BUFFERS) * 8);
        if arena.0 > space {
            continue;
        }
        let window = forced.map_or(((BYTES_IN_FLIGHT + mean / 2) / mean) as i32, |t| t.window);
        let alone = m == 1 && !epilogue.norm && !epilogue.bf16;
        let task = Task {
            x: 0,
            y: 0,
            residual: 0,
            norm: 0,
            flags: flags(&parts[..matrices.len()], keep, alone),
            parts,
            stage_begin: begin,
            results_at,
            barriers_at,
            multipliers_at,
            stage_stride: stride as u32,
            x_stride: x_stride as u32,
            gates_at,
            count: matrices.len() as i32,
            tiles: deal.tiles as i32,
            longer: deal.longer as i32,
            m: m as i32,
            columns: columns as i32,
            slots: slots as i32,
            window: window.clamp(1, (slots - spare) as i32),
            gate: -1,
            x_kind: 0,
            y_kind: 0,
            y_stride: 0,
            eps: 0.0,
            offset: 0.0,
        };
        return Ok(Plan {
            task,
            shared: arena.0.max(LEAST_SHARED.min(space)),
            deal,
        });
    }
    Err(full)
}

/// How many activation rows one launch for these matrices takes on this GPU; 0 when it cannot run there.
pub fn rows(caps: &Capabilities, matrices: &[&Matrix], epilogue: Epilogue) -> usize {
    (1..=MOST_ROWS)
        .rev()
        .find(|&m| plan(caps, matrices, m, epilogue, None).is_ok())
        .unwrap_or(0)
}

/// The product in one launch, for up to [`rows`] rows. Results stand beside each other in the order of `matrices`.
///
/// # Safety
/// The addresses must be device memory of the stated sizes, valid until the stream has passed this launch.
pub unsafe fn launch(
    to: Target,
    matrices: &[&Matrix],
    op: &Product,
    tuning: Option<Tuning>,
) -> Result<(), CudaError> {
    let device = Device::get(to.device)?;
    let epilogue = Epilogue {
        gate: op.gate.is_some(),
        norm: op.norm.is_some(),
        residual: op.residual != 0,
        bf16: op.x_type == Half::BF16,
    };
    let gated = epilogue.gate;
    let Plan {
        mut task,
        shared,
        deal,
    } = plan(&device.info.caps, matrices, op.m, epilogue, tuning)
        .map_err(|why| why.for_kernel(Kernel::GemvRing))?;
    (task.x, task.x_kind) = (op.x, op.x_type as i32);
    (task.y, task.y_kind) = (op.y, op.y_type as i32);
    task.residual = op.residual;
    task.gate = op.gate.unwrap_or(-1);
    if let Some(norm) = op.norm {
        task.norm = norm.weight;
        (task.eps, task.offset) = (norm.eps, norm.offset);
    }
    let mut columns = 0;
    for (i, matrix) in matrices.iter().enumerate() {
        task.parts[i].y_offset = if gated { 0 } else { columns };
        columns += matrix.argument.out_features;
    }
    task.y_stride = if gated { columns / 2 } else { columns };
    let (kind, entry) = (matrices[0].kind, matrices[0].entry_rows);
    let kernel = format!("ring_{kind}_{entry}");
    let launch = Launch {
        kernel: &kernel,
        grid: [deal.blocks as u32, 1, 1],
        block: THREADS,
        shared_bytes: shared as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernel_arguments![task];
    // SAFETY: the order is that of `ring_matmul`; validity is the caller's promise.
    unsafe { launch.run(device, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::tests::{RELEASE, card, hopper};
    use crate::ops::linear::tests::matrix;

    const GATED: Epilogue = Epilogue {
        gate: true,
        norm: false,
        residual: false,
        bf16: false,
    };

    #[test]
    fn the_ring_of_four_bits_is_the_measured_one() {
        let made = matrix(16, 2064);
        let plan = plan(&hopper(), &[&made], 1, Epilogue::default(), None).expect("fits");
        assert_eq!((plan.task.slots, plan.task.window), (9, 2));
        assert!((LEAST_SHARED..232_448 - 1024).contains(&plan.shared));
        assert_eq!(rows(&hopper(), &[&made], Epilogue::default()), 8);
        assert_eq!(plan.task.stage_begin[0][..3], [0, 8 * 2064, 16 * 2064]);
    }

    #[test]
    fn a_ring_never_asks_for_more_than_there_is() {
        for (units, bytes) in [(1, 1040), (16, 4112), (56, 2064), (56, 4112), (255, 4160)] {
            let made = matrix(units, bytes);
            for m in 1..=8 {
                for together in [vec![&made], vec![&made, &made, &made]] {
                    if let Ok(plan) = plan(&hopper(), &together, m, Epilogue::default(), None) {
                        let task = plan.task;
                        assert!(plan.shared <= 232_448 - 1024);
                        assert!((1..=task.slots - SPARE_SLOTS as i32).contains(&task.window));
                        assert!(task.parts.iter().all(|p| p.order == 0), "one copy");
                        assert_eq!(task.flags >> FILLS, 1, "one copy");
                    }
                }
            }
        }
        assert_eq!(
            rows(&hopper(), &[&matrix(255, 4160)], Epilogue::default()),
            0
        );
        let ampere = card("3090", RELEASE);
        assert_eq!(rows(&ampere, &[&matrix(16, 2064)], Epilogue::default()), 0);
    }

    #[test]
    fn a_long_tile_at_four_rows_leaves_slots_beyond_the_window() {
        // 7 stages, the first of wide units: what hung with a window of two of its four slots.
        let mut made = matrix(56, 2064);
        for (u, offset) in made.unit_offsets.iter_mut().enumerate() {
            *offset += 512 * u.min(7) as u32;
        }
        made.argument.tile_bytes += 7 * 512;
        let plan = plan(&hopper(), &[&made], 4, Epilogue::default(), None).expect("fits");
        assert_eq!((plan.task.slots, plan.task.window), (4, 1));
    }

    #[test]
    fn only_blocks_of_many_tiles_keep_a_warp_s_unit() {
        let planned = |matrix: &Matrix, count: usize, gated| {
            let epilogue = Epilogue {
                gate: gated,
                ..Epilogue::default()
            };
            plan(&hopper(), &vec![matrix; count], 1, epilogue, None).expect("fits")
        };
        let sized = |units, out_features: i32| {
            let mut made = matrix(units, 2064);
            made.argument.out_features = out_features;
            made.argument.tiles = out_features / 16;
            made
        };
        let gate_up = planned(&sized(16, 14336), 2, true);
        assert_eq!(gate_up.task.flags & KEEP, KEEP);
        assert_eq!((gate_up.deal.blocks, gate_up.deal.tiles), (132, 6));
        assert_eq!(gate_up.deal.longer, 896 - 132 * 6);
        // Two columns of 16 features of seven pairs stand between this and what follows.
        let task = gate_up.task;
        assert!(task.gates_at + 7 * 2 * 64 <= task.barriers_at);
        let keeps = |units, out_features| {
            planned(&sized(units, out_features), 1, false).task.flags & KEEP == KEEP
        };
        assert!(keeps(9, 128_256));
        assert!(!keeps(16, 4096), "two tiles");
        assert!(!keeps(8, 128_256));
        assert!(!keeps(17, 128_256));
    }

    /// A warp's class in the tile after one of so many stages, as `kernels/ring.cuh` deals classes out.
    fn next_class(class: usize, stages: usize) -> usize {
        match (stages % 2, class) {
            (0, _) => (class + 5) % 16,
            (_, ..8) => class + 8,
            _ => (class + 5) % 8,
        }
    }

    /// Most stages that lie between two that a warp consumes, over tiles of these lengths. `stay`: tiles in a row of one class.
    fn longest_step(lengths: &[usize], stay: usize) -> usize {
        let mut longest = 0;
        for warp in 0..16 {
            let (mut class, mut first, mut last) = (warp, 0, None);
            for (tile, &stages) in lengths.iter().enumerate() {
                for stage in (class / 8..stages).step_by(2) {
                    longest = longest.max(last.map_or(0, |last| first + stage - last));
                    last = Some(first + stage);
                }
                first += stages;
                if (tile + 1) % stay == 0 {
                    class = next_class(class, stages);
                }
            }
        }
        longest
    }

    #[test]
    fn no_warp_steps_further_than_the_spare_slots_allow() {
        for stay in 1..=8 {
            assert!(longest_step(&[2; 64], stay) <= SPARE_SLOTS);
        }
        for stages in 1..=MOST_STAGES {
            let longest = longest_step(&vec![stages; 64], 1);
            assert!(longest == 2 || stages % 2 == 0 && longest == 3, "{stages}");
        }
        for a in 1..=MOST_STAGES {
            for b in [a, a + 1, a + 2] {
                for turn in 0..40usize {
                    let mixed = |i: usize| if (i * i + turn * i) % 7 < 3 { a } else { b };
                    let lengths: Vec<usize> = (0..64).map(mixed).collect();
                    assert!(
                        longest_step(&lengths, 1) <= spare_slots([a, b].into_iter()),
                        "{a} {b}"
                    );
                }
            }
        }
    }

    #[test]
    fn units_are_shared_out_evenly_over_tiles() {
        // Units of the busiest warp: `down` of 8B; 5,120 features, of which three tiles are not even; 7,168.
        for (units, tiles, most) in [
            (56, 2, 7),
            (56, 16, 56),
            (20, 3, 5),
            (20, 16, 20),
            (28, 16, 28),
        ] {
            let mut classes: Vec<usize> = (0..16).collect();
            let mut done = [0; 16];
            for _ in 0..tiles {
                for (warp, class) in classes.iter_mut().enumerate() {
                    done[warp] += (units - *class as i32 + 15) / 16;
                    *class = next_class(*class, (units as usize).div_ceil(8));
                }
                let mut sorted = classes.clone();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..16), "every class has a warp");
            }
            assert_eq!(done.into_iter().max(), Some(most), "{units} {tiles}");
        }
    }

    #[test]
    fn a_gate_needs_two_matrices_of_one_size() {
        let (a, mut b) = (matrix(16, 2064), matrix(16, 2064));
        assert_eq!(rows(&hopper(), &[&a, &b], GATED), 8);
        b.argument.out_features -= 16;
        assert_eq!(rows(&hopper(), &[&a, &b], GATED), 0);
        assert_eq!(rows(&hopper(), &[&a], GATED), 0);
    }
}
