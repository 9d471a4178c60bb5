//! Division of a ring launch among blocks and their shared memory.

#[cfg(test)]
mod tests;

use super::{MATRICES, Tuning};
use crate::abi::{assert_constants, assert_layout};
use crate::capabilities::Capabilities;
use crate::features::Feature;
use crate::layout::TILE;
use crate::ops::linear::lora::Staging;
use crate::ops::linear::lora::select::{Sizes, takes_in_matmul};
use crate::ops::linear::select::{Epilogue, Refusal, check_alike, check_rows};
use crate::ops::linear::{Matrix, MatrixArgument};
use crate::rows::{FEW_ROWS, GEMV_ROWS};

/// Most stages of eight units in a tile.
const MOST_STAGES: usize = 32;
const RESULT_BUFFERS: usize = 4;
/// Bytes in flight per SM; beyond this, queued weights delay all other memory traffic.
const BYTES_IN_FLIGHT: usize = 33 * 1024;
/// Bytes of a ring if they fit: enough to cover the transition between kernels.
const RING_BYTES: usize = 130 * 1024;
/// Stages of a ring beyond the window. A warp that has consumed stage i - 3 and now waits for stage i must not find its slot's barrier in
/// the phase before the last: the test of its parity would then succeed too early. When stage i - 3 has been issued, all stages up to
/// `i - 3 - window` have arrived. So `window + 3` slots are enough: a warp skips two stages at most, from one tile to the next. One more slot is
/// kept if tiles of one stage are mixed with longer ones ([`spare_slots`]), which another division of classes needed.
const SPARE_SLOTS: usize = 3;
/// More than half of an SM's shared memory, so that one block is placed on each SM.
const LEAST_SHARED: usize = 116 * 1024;
/// Bytes of the kernel's static arrays, without and with adapters.
const STATIC: usize = 1024;
const STATIC_ADAPTED: usize = 2048;
pub(super) const THREADS: u32 = 576;
/// Bits of `Task::flags`: a warp keeps its class over tiles; a layout has rows without a feature; one row of halves without a norm, in one
/// order. FILLS is the first of the bits that name matrices with separate orders of rows.
const KEEP: i32 = 1;
const PADDED: i32 = 2;
const ROW: i32 = 4;
/// The norm is a LayerNorm.
pub(super) const LAYER: i32 = 8;
const FILLS: usize = 8;

assert_constants!(ring_task, { MOST_STAGES == MOST_STAGES, RESULT_BUFFERS == RESULT_BUFFERS });
assert_constants!(ring_task, { RING_STATIC == STATIC, RING_STATIC_ADAPTED == STATIC_ADAPTED });
assert_constants!(ring_task, { KEEP == KEEP, PADDED == PADDED, ROW == ROW, LAYER == LAYER, FILLS == FILLS });
/// Longest row that the kernel's 512 threads hold at once.
const ROW_FEATURES: usize = LONG_ROW * 8 * 512;
const LONG_ROW: usize = 5;
/// Longest of these that the kernel's usual form takes.
const SHORT_ROW_FEATURES: usize = 4 * 8 * 512;
/// Longest row that 256 threads hold at once, as a norm's sum needs.
const NORMED_ROW_FEATURES: usize = 4 * 8 * 256;
const _: () = assert!(
    NORMED_ROW_FEATURES == 8_192 && SHORT_ROW_FEATURES == 16_384,
    "the numbers in the sentences"
);

assert_constants!(ring_fill, { LONG_ROW == LONG_ROW });

/// `struct Part` of `kernels/linear/ring_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) matrix: MatrixArgument,
    pub(super) units_at: u32,
    pub(super) maxima_at: u32,
    pub(super) x_at: u32,
    pub(super) stages: i32,
    pub(super) order: i32,
    pub(super) y_offset: i32,
}

assert_layout!(Part, ring_task::Part, { matrix as a, units_at, maxima_at, x_at, stages, order, y_offset });

/// `struct Task` of `kernels/linear/ring_task.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) barriers_at: u32,
    pub(super) stage_stride: u32,
    pub(super) slots: i32,
    pub(super) window: i32,
    pub(super) count: i32,
    pub(super) tiles: i32,
    pub(super) longer: i32,
    pub(super) gate: i32,
    pub(super) results_at: u32,
    pub(super) multipliers_at: u32,
    pub(super) x_stride: u32,
    pub(super) gates_at: u32,
    pub(super) flags: i32,
    pub(super) m: i32,
    pub(super) columns: i32,
    pub(super) x_kind: i32,
    pub(super) y_kind: i32,
    pub(super) y_stride: i32,
    pub(super) eps: f32,
    pub(super) offset: f32,
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) residual: usize,
    pub(super) norm: usize,
    pub(super) norm_bias: usize,
    pub(super) parts: [Part; MATRICES],
    pub(super) stage_begin: [[u32; MOST_STAGES + 1]; MATRICES],
}

impl Task {
    /// Whether only the general form of the kernel does this: a LayerNorm of the input, or a long row.
    pub(super) fn is_general(&self) -> bool {
        let long = self.parts[0].matrix.in_features as usize > SHORT_ROW_FEATURES;
        self.flags & LAYER != 0 || (self.flags & ROW != 0 && long)
    }
}

assert_layout!(Task, ring_task::Task, { barriers_at, stage_stride, slots, window, count, tiles, longer, gate, results_at, multipliers_at, x_stride, gates_at, flags, m, columns, x_kind, y_kind, y_stride, eps, offset, x, y, residual, norm, norm_bias, parts as part, stage_begin });

/// Places of a launch's data in shared memory.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) task: Task,
    pub(super) shared: usize,
    pub(super) deal: Deal,
    /// How adapters are staged.
    pub(super) staging: Staging,
}

/// Division of tiles (pairs of tiles if gated) among blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deal {
    pub(super) blocks: usize,
    /// Tiles of every block.
    pub(super) tiles: usize,
    /// Number of blocks with one more.
    pub(super) longer: usize,
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

/// Fewest tiles of a block for which looking up a warp's unit once is faster.
const KEPT_TILES: usize = 4;

/// Whether a warp keeps its unit over tiles.
fn keeps(matrices: &[&Matrix], deal: Deal, gated: bool) -> bool {
    let each = if gated { 2 } else { 1 };
    each * deal.tiles >= KEPT_TILES
        && matrices
            .iter()
            .all(|a| (9..=16).contains(&a.argument.unit_count))
}

/// `Task::flags`. `alone`: one row of halves without a norm.
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

/// Consecutive allocation of bytes.
struct Arena(usize);

impl Arena {
    fn take(&mut self, bytes: usize) -> u32 {
        let at = self.0.next_multiple_of(16);
        self.0 = at + bytes;
        at as u32
    }
}

/// Slots of a ring beyond the window, for matrices with these numbers of stages.
fn spare_slots(mut stages: impl Iterator<Item = usize> + Clone) -> usize {
    SPARE_SLOTS + usize::from(stages.clone().any(|s| s == 1) && stages.any(|s| s > 1))
}

/// Reject calls that the kernel does not support.
fn check(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    epilogue: Epilogue,
) -> Result<(), Refusal> {
    if !caps.has(Feature::BulkCopy) {
        return Err(Refusal::Needs(Feature::BulkCopy));
    }
    check_rows(m, FEW_ROWS)?;
    check_alike(matrices, epilogue.gate)?;
    if let Some(sizes) = epilogue.adapters {
        check_adapters(matrices, m, epilogue, sizes)?;
    }
    // The kernel's 512 threads hold a whole row if they need its sum or maximum first.
    let widest = match epilogue {
        Epilogue { norm: true, .. } => NORMED_ROW_FEATURES,
        Epilogue { bf16: true, .. } => SHORT_ROW_FEATURES,
        _ => usize::MAX,
    };
    if matrices[0].in_features() > widest {
        return Err(Refusal::Matrices(
            "inputs of up to 8,192 features with a norm, 16,384 in BF16",
        ));
    }
    Ok(())
}

/// Reject calls with adapters that the kernel does not add.
fn check_adapters(
    matrices: &[&Matrix],
    m: usize,
    epilogue: Epilogue,
    sizes: Sizes,
) -> Result<(), Refusal> {
    takes_in_matmul(sizes)?;
    check_rows(m, GEMV_ROWS)?;
    // B is copied eight features at a time.
    if !matrices.iter().all(|a| a.out_features().is_multiple_of(8)) {
        return Err(Refusal::Matrices("outputs in eights"));
    }
    let long = matrices[0].in_features() > SHORT_ROW_FEATURES;
    if epilogue.layer || epilogue.activation || epilogue.bf16 || long {
        return Err(Refusal::Operands(
            "adapters of halves of up to 16,384 features, with an RMS norm, a gate or a residual",
        ));
    }
    Ok(())
}

/// The stages of a launch's tiles.
struct Stages {
    begin: [[u32; MOST_STAGES + 1]; MATRICES],
    /// Bytes of a slot of the ring, and average bytes of a stage.
    stride: usize,
    mean: usize,
    /// Slots beyond the window.
    spare: usize,
}

impl Stages {
    fn new(matrices: &[&Matrix]) -> Result<Self, Refusal> {
        let mut begin = [[0; MOST_STAGES + 1]; MATRICES];
        let (mut largest, mut bytes, mut count) = (0, 0, 0);
        for (to, matrix) in begin.iter_mut().zip(matrices) {
            *to =
                stages(matrix).ok_or(Refusal::Matrices("tiles of up to 256 units of 256 rows"))?;
            let sizes = to.windows(2).map(|p| p[1].saturating_sub(p[0]) as usize);
            largest = largest.max(sizes.max().unwrap_or(0));
            bytes += matrix.argument.tile_bytes as usize;
            count += matrix.argument.unit_count as usize;
        }
        let numbers = matrices
            .iter()
            .map(|a| (a.unit_offsets.len() - 1).div_ceil(8));
        Ok(Self {
            begin,
            stride: largest.next_multiple_of(128),
            mean: (8 * bytes / count.max(1)).max(1),
            spare: spare_slots(numbers),
        })
    }
}

/// Places of data in shared memory, after a ring of `slots` slots.
struct Layout {
    parts: [Part; MATRICES],
    results_at: u32,
    multipliers_at: u32,
    gates_at: u32,
    barriers_at: u32,
    bytes: usize,
}

impl Layout {
    /// `columns`: rows of a result; `gates`: tiles whose gates are kept; rows of x have `x_stride` halves.
    fn new(
        matrices: &[&Matrix],
        slots: usize,
        stride: usize,
        (m, columns, gates): (usize, usize, usize),
        x_stride: usize,
    ) -> Self {
        let mut arena = Arena(slots * stride);
        let mut parts: [Part; MATRICES] = std::array::from_fn(|i| Part {
            matrix: matrices.get(i).unwrap_or(&matrices[0]).argument,
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
        let gates_at = arena.take(gates * columns * 64);
        // As `Barriers` in the kernel: those of slots in groups of four.
        let barriers_at = arena.take((2 * slots.next_multiple_of(4) + 2 * RESULT_BUFFERS) * 8);
        Self {
            parts,
            results_at,
            multipliers_at,
            gates_at,
            barriers_at,
            bytes: arena.0,
        }
    }
}

/// Bytes of a block's shared memory that the kernel's static arrays have.
const fn static_bytes(epilogue: Epilogue) -> usize {
    if epilogue.adapters.is_some() {
        STATIC_ADAPTED
    } else {
        STATIC
    }
}

/// The window of the launch without adapters. One with them that has fewer bytes in flight costs more than the launches that it saves.
fn window_of_bare(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    epilogue: Epilogue,
    tuning: Option<Tuning>,
) -> Result<i32, Refusal> {
    let adapters = None;
    let bare = Epilogue {
        adapters,
        ..epilogue
    };
    Ok(plan(caps, matrices, m, bare, tuning)?.task.window)
}

/// Plan a launch for `m` rows; an error says why the kernel cannot take it.
pub(super) fn plan(
    caps: &Capabilities,
    matrices: &[&Matrix],
    m: usize,
    epilogue: Epilogue,
    tuning: Option<Tuning>,
) -> Result<Plan, Refusal> {
    check(caps, matrices, m, epilogue)?;
    let full = Refusal::SharedMemory(caps.shared_per_block);
    let space = caps.shared_per_block.checked_sub(static_bytes(epilogue));
    let space = space.ok_or(full)?;
    let Stages {
        begin,
        stride,
        mean,
        spare,
    } = Stages::new(matrices)?;
    let deal = Deal::new(caps, matrices, epilogue.gate);
    let keep = keeps(matrices, deal, epilogue.gate);
    let gates = match (epilogue.gate, keep) {
        (false, _) => 0,
        (true, false) => 1,
        (true, true) => deal.most(),
    };
    // 64 bytes past a multiple of 128: eight rows' loads have no bank conflicts.
    let x_stride = matrices.iter().map(|a| a.rows()).max().unwrap_or(0) + 32;
    let columns = m.next_multiple_of(2);
    let wanted = RING_BYTES.div_ceil(mean).clamp(5, 24);
    let forced = tuning.filter(|t| (1..=t.slots - spare as i32).contains(&t.window));
    let candidates = match forced {
        Some(t) => t.slots as usize..=t.slots as usize,
        None => 1 + spare..=wanted,
    };
    let layout_of =
        |slots: usize| Layout::new(matrices, slots, stride, (m, columns, gates), x_stride);
    // The end of a block's shared memory whose layout ends at `bytes`, with the part for adapters.
    let staged = |bytes: usize| {
        let Some(sizes) = epilogue.adapters else {
            return (Staging::default(), bytes);
        };
        let tiles = deal.most() * if epilogue.gate { 2 } else { 1 };
        let of_matmul = (matrices[0].in_features(), m, matrices.len());
        Staging::new(bytes, tiles, deal.blocks, of_matmul, sizes.most_rank)
    };
    let (slots, layout) = candidates
        .rev()
        .map(|slots| (slots, layout_of(slots)))
        .find(|(_, layout)| staged(layout.bytes).1 <= space)
        .ok_or(full)?;
    let (staging, bytes) = staged(layout.bytes);
    let window = forced.map_or(((BYTES_IN_FLIGHT + mean / 2) / mean) as i32, |t| t.window);
    let window = window.clamp(1, (slots - spare) as i32);
    if epilogue.adapters.is_some() && window < window_of_bare(caps, matrices, m, epilogue, tuning)?
    {
        return Err(Refusal::Window);
    }
    let alone = m == 1 && !epilogue.norm && !epilogue.bf16;
    let task = Task {
        x: 0,
        y: 0,
        residual: 0,
        norm: 0,
        norm_bias: 0,
        flags: flags(&layout.parts[..matrices.len()], keep, alone),
        parts: layout.parts,
        stage_begin: begin,
        results_at: layout.results_at,
        barriers_at: layout.barriers_at,
        multipliers_at: layout.multipliers_at,
        stage_stride: stride as u32,
        x_stride: x_stride as u32,
        gates_at: layout.gates_at,
        count: matrices.len() as i32,
        tiles: deal.tiles as i32,
        longer: deal.longer as i32,
        m: m as i32,
        columns: columns as i32,
        slots: slots as i32,
        window,
        gate: -1,
        x_kind: 0,
        y_kind: 0,
        y_stride: 0,
        eps: 0.0,
        offset: 0.0,
    };
    Ok(Plan {
        task,
        shared: bytes.max(LEAST_SHARED.min(space)),
        deal,
        staging,
    })
}
