//! Low-rank adapters: y = y + (A x) B, with a separate adapter for each row.

pub mod select;

use crate::abi::{assert_constants, assert_layout};
use crate::device::Device;
use crate::fields::{Field, struct_fields};
use crate::launch::{CudaError, Launch};
use crate::ops::elementwise::Activation;
use crate::ops::elementwise::select::check_packed;
use crate::ops::linear::PackedInput;
use crate::ops::{Target, index32};
use crate::parameters::kernels;
use select::{INPUTS, Kernel, OUTPUTS};

/// `struct LoraEntry` of `kernels/linear/adapters.cuh`: the adapter of one slot for one matrix, as device addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LoraEntry {
    /// `[rank, in]` half.
    pub a: usize,
    /// `[rank, out]` half.
    pub b: usize,
    /// `[rank]` FP32.
    pub scale: usize,
    /// `[out]` FP32, or 0.
    pub bias: usize,
    /// 0: this slot does not change the matrix's results.
    pub rank: i64,
}

assert_layout!(LoraEntry, adapters::LoraEntry, { a, b, scale, bias, rank });

/// `struct EpilogueAdapters` of `kernels/linear/adapters.cuh`: the adapters that the epilogue of a matmul adds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct EpilogueAdapters {
    table: usize,
    slots: usize,
    exchange: usize,
    sets: i32,
    looks: i32,
    staged_at: u32,
    tiles: i32,
    slices_at: u32,
    tile_bytes: i32,
}

assert_layout!(EpilogueAdapters, adapters::EpilogueAdapters, { table, slots, exchange, sets, looks, staged_at, tiles, slices_at, tile_bytes });

/// Shared memory of a matmul that adds adapters: where its parts begin, and tiles of 16 features for which there is room, for each row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Staging {
    pub(super) at: u32,
    pub(super) tiles: i32,
    pub(super) slices_at: u32,
    pub(super) tile_bytes: i32,
}

impl Staging {
    /// The shared memory of a block of `tiles` tiles, one of `blocks`, from `at` on, and its end. `inputs`, `rows`, `matrices`: of the matmul;
    /// `rank`: the largest.
    pub(super) fn new(
        at: usize,
        tiles: usize,
        blocks: usize,
        (inputs, rows, matrices): (usize, usize, usize),
        rank: usize,
    ) -> (Self, usize) {
        let at = at.next_multiple_of(16);
        // Two tiles' elements of B of one rank are in different banks for most ranks. After B, results and residuals.
        let tile_bytes = 32 * rank + 32 + 64;
        let slices_at = at + rows * tiles * tile_bytes;
        let slices = (rows * matrices * rank * SUMS).div_ceil(blocks);
        let pieces = inputs.div_ceil(SUMS * PIECE);
        let staging = Self {
            at: at as u32,
            tiles: tiles as i32,
            slices_at: slices_at as u32,
            tile_bytes: tile_bytes as i32,
        };
        (staging, slices_at + slices * pieces * STAGED_PIECE)
    }
}

/// Elements of a piece of a slice, and its bytes of [`Staging`].
const PIECE: usize = 256;
const STAGED_PIECE: usize = 1024;
/// How often a block polls for the sums of others, some milliseconds, before it computes them itself.
const LOOKS: i32 = 8192;
/// Partial sums of a row times a column of A, and words of the workspace before them.
const SUMS: usize = 8;
const EXCHANGE_SUMS: usize = 32;
assert_constants!(adapters, { PIECE == PIECE, STAGED_PIECE == STAGED_PIECE, SUMS == SUMS, EXCHANGE_SUMS == EXCHANGE_SUMS });

/// Bytes of the inter-block workspace of a matmul of `matrices` matrices that adds the adapters of `rows` rows.
pub(super) const fn exchange_bytes(rows: usize, matrices: usize) -> usize {
    4 * (EXCHANGE_SUMS + rows * matrices * select::EPILOGUE_RANKS * SUMS)
}

impl LoraEntry {
    /// Python writes tables of entries, as rows of 64-bit integers.
    pub const FIELDS: [Field; 5] = struct_fields!(LoraEntry, { a, b, scale, bias, rank });
}

const _: () = {
    let mut i = 0;
    while i < LoraEntry::FIELDS.len() {
        assert!(
            LoraEntry::FIELDS[i].size == 8,
            "a field is no 64-bit integer"
        );
        i += 1;
    }
};

/// Operands of [`add`], as device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Lora {
    /// `[rows, in]` half.
    pub x: usize,
    /// `[rows, out]` half, added to.
    pub y: usize,
    /// [`LoraEntry`]s.
    pub table: usize,
    /// `[rows]` i32: index of the entry; negative: none. 0: the first entry for all rows.
    pub slots: usize,
    /// `[rows, most_rank]` FP32 that no launch in between uses.
    pub middle: usize,
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
    /// The largest rank in the table.
    pub most_rank: usize,
}

pub(super) fn kernels() -> Vec<String> {
    Kernel::ALL.map(|kernel| kernel.name().to_owned()).to_vec()
}

const THREADS: u32 = 256;
const EXPAND_THREADS: u32 = 128;
assert_constants!(lora, { EXPAND_THREADS == EXPAND_THREADS });

/// Add every row's adapter to its results, in two launches.
///
/// # Safety
/// The addresses, including those in the table, must be device memory of the stated sizes, valid until the stream has passed these
/// launches. Slots must be smaller than the number of entries.
pub unsafe fn add(to: Target, op: &Lora) -> Result<(), CudaError> {
    if op.rows == 0 || op.most_rank == 0 {
        return Ok(());
    }
    if !op.in_features.is_multiple_of(INPUTS) || !op.out_features.is_multiple_of(OUTPUTS) {
        return Err(CudaError::Argument {
            what: format!(
                "a matrix of {} inputs and {} outputs",
                op.in_features, op.out_features
            ),
            limit: "adapters take inputs in eights and outputs in pairs".to_owned(),
        });
    }
    let device = Device::get(to.device)?;
    let (inputs, outputs) = (
        index32("in_features", op.in_features)?,
        index32("out_features", op.out_features)?,
    );
    let (rows, most_rank) = (
        index32("rows", op.rows)? as u32,
        index32("rank", op.most_rank)?,
    );
    let launch = |kernel: Kernel, blocks| Launch {
        kernel: kernel.name(),
        grid: [blocks, rows, 1],
        block: THREADS,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let (first, second) = select::alone();
    let mut shrink = kernels::LoraShrink {
        x: op.x,
        table: op.table,
        slots: op.slots,
        middle: op.middle,
        r#in: inputs,
        most_rank,
    };
    let mut expand = kernels::LoraExpand {
        y: op.y,
        table: op.table,
        slots: op.slots,
        middle: op.middle,
        out: outputs,
        most_rank,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe {
        launch(first, most_rank as u32).run(device, &mut shrink)?;
        launch(second, (outputs as u32).div_ceil(2 * THREADS)).run(device, &mut expand)
    }
}

/// The adapters of the rows of a pass for one to three matrices over one input. The device addresses, including those in the table, were
/// written before the first of the launches that may overlap: the kernels read them before they wait.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    /// [`LoraEntry`]s `[levels, matrices, sets]`: the first adapters of each set, then the next ones.
    pub table: usize,
    /// `[rows]` i32: the set of each row; negative: none. 0: the first set for all rows.
    pub slots: usize,
    pub rows: usize,
    pub sets: usize,
    pub matrices: usize,
    pub levels: usize,
}

/// The adapters of [`shrink`] and [`expand`].
#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub entries: Entries,
    /// `[rows, levels * matrices * most_rank]` FP32.
    pub middle: usize,
    /// The largest rank in the table.
    pub most_rank: usize,
}

/// The adapters that a matmul adds itself, of sizes that [`select::takes_in_matmul`] accepts.
#[derive(Clone, Copy, Debug)]
pub struct InMatmul {
    pub entries: Entries,
    /// Inter-block workspace of the plan's size.
    pub exchange: usize,
    /// How often a block polls for the results of others before it computes them itself; None: some milliseconds long.
    pub looks: Option<i32>,
}

impl InMatmul {
    /// The kernel's argument. The workspace begins at `exchange`.
    pub(super) fn argument(
        &self,
        staging: Staging,
        exchange: usize,
    ) -> Result<EpilogueAdapters, CudaError> {
        Ok(EpilogueAdapters {
            table: self.entries.table,
            slots: self.entries.slots,
            exchange,
            sets: index32("sets", self.entries.sets)?,
            looks: self.looks.unwrap_or(LOOKS),
            staged_at: staging.at,
            tiles: staging.tiles,
            slices_at: staging.slices_at,
            tile_bytes: staging.tile_bytes,
        })
    }
}

/// The input of [`shrink`], as device addresses.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// `[rows, in]` half, aligned to 16 bytes.
    pub x: usize,
    pub in_features: usize,
    /// FP32 `[in]` of an RMS norm that is applied first, aligned to 16 bytes; 0 for none.
    pub weight: usize,
    pub eps: f32,
    pub offset: f32,
    /// `[rows, in]` half: the normed rows; 0 without a norm, or with `packed`.
    pub normed: usize,
    /// Address and layout of the input of a matmul, which gets the rows, normed if there is a norm: at most as many rows as it has columns,
    /// of at most [`crate::ops::elementwise::select::MOST_PACKED_WIDTH`] elements.
    pub packed: Option<(usize, PackedInput)>,
}

/// `struct PackingShrink` of `kernels/linear/lora.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PackingShrink {
    x: usize,
    weight: usize,
    table: usize,
    slots: usize,
    middle: usize,
    packed: usize,
    features: usize,
    inputs: i32,
    rows: i32,
    sets: i32,
    most_rank: i32,
    columns: i32,
    ranks: i32,
    share: i32,
    pack_columns: i32,
    units: i32,
    layout_rows: i32,
    eps: f32,
    offset: f32,
}

assert_layout!(PackingShrink, lora::PackingShrink, {
    x, weight, table, slots, middle, packed, features, inputs, rows, sets, most_rank, columns, ranks, share, pack_columns, units, layout_rows,
    eps, offset,
});

/// The results that [`expand`] adds to, as device addresses of halves, aligned to 4 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Results {
    /// `[rows, width]`, the outputs of all matrices side by side.
    pub y: usize,
    /// `[rows, width]`, or half as wide with `gate`; may be `y` or `residual` without it.
    pub out: usize,
    /// `[rows, width]`, added last; 0 for none.
    pub residual: usize,
    /// Outputs of the matrices, even; 0 for absent ones.
    pub widths: [usize; 3],
    /// With two matrices: the activation of the first, by which the second is multiplied.
    pub gate: Option<Activation>,
}

/// Compute `middle`, every row times the A of its adapters, in one launch.
///
/// # Safety
/// The addresses, including those in the table, must be device memory of the stated sizes, valid until the stream has passed this launch.
/// Slots must be smaller than the number of sets.
pub unsafe fn shrink(to: Target, group: &Group, input: &Input) -> Result<(), CudaError> {
    let columns = group.entries.levels * group.entries.matrices * group.most_rank;
    if group.entries.rows == 0 || columns == 0 {
        return Ok(());
    }
    if !input.in_features.is_multiple_of(INPUTS) {
        return Err(CudaError::Argument {
            what: format!("matrices of {} inputs", input.in_features),
            limit: "adapters take inputs in eights".to_owned(),
        });
    }
    let packed = input.packed.map(|(_, layout)| layout.columns);
    let planned = select::shrink(group.entries.rows, columns, packed);
    if let Some((address, layout)) = input.packed {
        // SAFETY: this function's contract.
        return unsafe { shrink_and_pack(to, group, input, columns, planned, address, layout) };
    }
    let device = Device::get(to.device)?;
    let (inputs, sets) = (
        index32("in_features", input.in_features)?,
        index32("sets", group.entries.sets)?,
    );
    let (rows, most_rank, columns) = (
        index32("rows", group.entries.rows)? as u32,
        index32("rank", group.most_rank)?,
        index32("columns", columns)?,
    );
    let launch = Launch {
        kernel: planned.kernel.name(),
        grid: [(columns as u32).div_ceil(planned.ranks as u32), rows, 1],
        block: THREADS,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::LoraShrinkGroup {
        x: input.x,
        weight: input.weight,
        normed: input.normed,
        table: group.entries.table,
        slots: group.entries.slots,
        middle: group.middle,
        r#in: inputs,
        sets,
        most_rank,
        columns,
        eps: input.eps,
        offset: input.offset,
    };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(device, &mut arguments) }
}

/// [`shrink`] that packs its input at `packed`.
///
/// # Safety
/// As for [`shrink`].
unsafe fn shrink_and_pack(
    to: Target,
    group: &Group,
    input: &Input,
    columns: usize,
    planned: select::Shrink,
    packed: usize,
    layout: PackedInput,
) -> Result<(), CudaError> {
    check_packed(group.entries.rows, input.in_features, layout.columns, &[])?;
    let ranks = planned.ranks;
    let parts = index32("blocks of a row", columns.div_ceil(ranks))?;
    let task = PackingShrink {
        x: input.x,
        weight: input.weight,
        table: group.entries.table,
        slots: group.entries.slots,
        middle: group.middle,
        packed,
        features: layout.features,
        inputs: index32("in_features", input.in_features)?,
        rows: index32("rows", group.entries.rows)?,
        sets: index32("sets", group.entries.sets)?,
        most_rank: index32("rank", group.most_rank)?,
        columns: index32("columns", columns)?,
        ranks: index32("ranks of a block", ranks)?,
        share: (32 * layout.units + parts - 1) / parts,
        pack_columns: index32("columns", layout.columns)?,
        units: layout.units,
        layout_rows: layout.rows,
        eps: input.eps,
        offset: input.offset,
    };
    let launch = Launch {
        kernel: planned.kernel.name(),
        grid: [parts as u32, task.pack_columns as u32, 1],
        block: THREADS,
        shared_bytes: 2 * task.inputs as u32,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    let mut arguments = kernels::LoraShrinkPacking { p: task };
    // SAFETY: the caller guarantees that the addresses are valid.
    unsafe { launch.run(Device::get(to.device)?, &mut arguments) }
}

/// Add the adapters to the results of the matrices by the `middle` of [`shrink`], then the residual or the gate, in one launch.
///
/// # Safety
/// As for [`shrink`].
pub unsafe fn expand(to: Target, group: &Group, results: &Results) -> Result<(), CudaError> {
    if group.entries.rows == 0 || group.most_rank == 0 {
        return Ok(());
    }
    let [first, second, third] = results.widths;
    let pairs = results
        .widths
        .iter()
        .all(|width| width.is_multiple_of(OUTPUTS));
    let gates = results.gate.is_none() || (first == second && third == 0);
    if !pairs || !gates {
        return Err(CudaError::Argument {
            what: format!("matrices of {first}, {second} and {third} outputs"),
            limit: "adapters take outputs in pairs, and a gate two matrices of one size".to_owned(),
        });
    }
    let device = Device::get(to.device)?;
    let width = index32("out_features", first + second + third)?;
    let (begin, last) = (
        index32("out_features", first)?,
        index32("out_features", first + second)?,
    );
    let (rows, most_rank, sets) = (
        index32("rows", group.entries.rows)? as u32,
        index32("rank", group.most_rank)?,
        index32("sets", group.entries.sets)?,
    );
    let (matrices, levels) = (
        index32("matrices", group.entries.matrices)?,
        index32("levels", group.entries.levels)?,
    );
    let launch = |columns: i32| Launch {
        kernel: select::expand(results.gate.is_some()).name(),
        grid: [(columns as u32).div_ceil(2 * EXPAND_THREADS), rows, 1],
        block: EXPAND_THREADS,
        shared_bytes: 0,
        stream: to.stream,
        programmatic: to.programmatic,
    };
    if let Some(gate) = results.gate {
        let mut arguments = kernels::LoraExpandGated {
            y: results.y,
            out: results.out,
            table: group.entries.table,
            slots: group.entries.slots,
            middle: group.middle,
            width: begin,
            sets,
            most_rank,
            levels,
            kind: gate as i32,
        };
        // SAFETY: the caller guarantees that the addresses are valid.
        return unsafe { launch(begin).run(device, &mut arguments) };
    }
    let mut arguments = kernels::LoraExpandGroup {
        y: results.y,
        residual: results.residual,
        out: results.out,
        table: group.entries.table,
        slots: group.entries.slots,
        middle: group.middle,
        width,
        second: begin,
        third: last,
        sets,
        most_rank,
        matrices,
        levels,
    };
    // SAFETY: as above.
    unsafe { launch(width).run(device, &mut arguments) }
}
