//! y = (x @ W + bias) * prescale over the tiles of a matrix, on the pool.

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::f16;

use super::activations::{ADJACENT, Int8Block, ROWS, row_block};
use super::exact::{self, Panel};
use super::kernels::{Kernels, Pack};
use super::layout::{BLOCK, TILE};
use super::matrix::{Compute, Floats, NO_FEATURE, QuantMatrix, Storage};
use super::memory::Shared;
use super::simd::Scalar;
use crate::activation::{Activation, activate_here};
use crate::pool;

/// Tasks of a thread in one call: enough that the other threads can finish the work of a delayed thread.
const TASKS_PER_THREAD: usize = 16;

/// Cost of a pass over a tile's weights, in rows, in addition to the rows: tasks of groups with few and with many rows then have equal
/// costs.
const PASS_ROWS: usize = 8;
/// Least number of values of one row that a task packs, in blocks.
const PACKED_BLOCKS: usize = 64;

/// Activations in the order of their matrices' permutations, region by region.
#[derive(Default)]
struct Packed {
    int8: Vec<Int8Block>,
    exact: Vec<[f32; BLOCK]>,
}

thread_local! {
    /// Packed activations of the calling thread, kept between calls.
    static PACKED: RefCell<Packed> = const {
        RefCell::new(Packed { int8: Vec::new(), exact: Vec::new() })
    };
}

/// Outputs of one tile for one row block.
#[repr(align(64))]
struct Outputs([f32; ROWS * TILE]);

impl Outputs {
    /// The first `rows` rows of a buffer, all zero. The other rows are not touched: a whole buffer takes longer to fill than a small tile
    /// to compute.
    fn zeroed(buffer: &mut MaybeUninit<Self>, rows: usize) -> &mut [f32] {
        assert!(rows <= ROWS, "rows of a row block");
        // SAFETY: the buffer holds so many values, which are written here.
        unsafe {
            let start = (&raw mut (*buffer.as_mut_ptr()).0).cast::<f32>();
            start.write_bytes(0, rows * TILE);
            std::slice::from_raw_parts_mut(start, rows * TILE)
        }
    }
}

/// The computation of a group over its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation<'a> {
    /// x @ matrix
    One(&'a QuantMatrix),
    /// activation(x @ gate) * (x @ up)
    Gated {
        gate: &'a QuantMatrix,
        up: &'a QuantMatrix,
        activation: Activation,
        /// `gate.packs_like(up)`, computed once and not in every call.
        packs_alike: bool,
    },
}

impl Operation<'_> {
    /// The matrix that determines the size of the results.
    fn matrix(&self) -> &QuantMatrix {
        match self {
            Self::One(matrix) => matrix,
            Self::Gated { up, .. } => up,
        }
    }
}

/// One of the matmuls that [`multiply`] computes together: of all rows of `x` `[.., K]` or of the rows `rows`, into `out` `[rows, N]`.
pub(crate) struct Group<'a> {
    pub x: &'a [f32],
    pub rows: Option<&'a [u32]>,
    pub operation: Operation<'a>,
    pub out: &'a mut [f32],
    /// An earlier group with the same rows of the same `x`, for a matrix with the same packing.
    pub packed_as: Option<usize>,
}

impl Group<'_> {
    /// # Panics
    /// If lengths do not fit, or a row is not in `x`.
    fn count(&self) -> usize {
        let matrix = self.operation.matrix();
        if let Operation::Gated { gate, .. } = self.operation {
            assert_eq!(gate.in_features, matrix.in_features, "inputs of a gate");
            assert_eq!(gate.out_features, matrix.out_features, "outputs of a gate");
        }
        let held = self.x.len() / matrix.in_features;
        assert_eq!(
            self.x.len(),
            held * matrix.in_features,
            "x must hold rows * K"
        );
        let count = self.rows.map_or(held, <[u32]>::len);
        assert_eq!(
            self.out.len(),
            count * matrix.out_features,
            "out must hold rows * N"
        );
        count
    }
}

/// Rows to be packed for one matrix.
struct Region<'a> {
    matrix: &'a QuantMatrix,
    x: &'a [f32],
    rows: Option<&'a [u32]>,
    count: usize,
    /// Start of the region in the buffer of its kind.
    at: usize,
    /// Blocks that one task packs.
    step: usize,
    first_task: usize,
}

impl Region<'_> {
    fn tasks(&self) -> usize {
        self.count.div_ceil(ROWS) * self.matrix.blocks().div_ceil(self.step)
    }

    fn run(&self, task: usize, int8: Shared<Int8Block>, exact: Shared<[f32; BLOCK]>) {
        let kernels = Kernels::current();
        if self.matrix.is_int8() {
            self.pack(task, int8, kernels.pack_int8);
        } else {
            self.pack(task, exact, kernels.pack_exact);
        }
    }

    fn pack<T: Copy>(&self, task: usize, out: Shared<T>, pack: Pack<T>) {
        let (k, blocks) = (self.matrix.in_features, self.matrix.blocks());
        let steps = blocks.div_ceil(self.step);
        let (first, count) = row_block(task / steps, self.count);
        let from = task % steps * self.step;
        let to = (from + self.step).min(blocks);
        let (x, rows) = match self.rows {
            Some(rows) => (self.x, &rows[first..first + count]),
            None => (&self.x[first * k..], &ADJACENT[..count]),
        };
        let source = &self.matrix.source[from * BLOCK..to * BLOCK];
        // SAFETY: tasks own disjoint blocks; the kernels are those of this processor; `source` holds features of this matrix.
        unsafe {
            let at = self.at + first * blocks + from * count;
            pack(x, k, rows, source, out.slice(at, (to - from) * count));
        }
    }
}

/// The tiles of one group.
struct Job<'a> {
    operation: Operation<'a>,
    count: usize,
    out: Shared<f32>,
    /// Starts of the packed activations of the matrix and of the gate.
    packed: usize,
    packed_gate: usize,
    /// Costs of all earlier tiles, and of one tile of this group.
    first_cost: usize,
    tile_cost: usize,
}

impl Job<'_> {
    /// The tiles that start within `costs`.
    fn tiles_within(&self, costs: &Range<usize>) -> Range<usize> {
        let tile = |cost: usize| {
            let past = cost.saturating_sub(self.first_cost);
            past.div_ceil(self.tile_cost)
                .min(self.operation.matrix().tiles())
        };
        tile(costs.start)..tile(costs.end)
    }

    fn run(&self, packed: &Packed, tiles: Range<usize>, panel: &mut Panel) {
        let kernels = Kernels::current();
        let (mut sums, mut gates) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        for block in 0..self.count.div_ceil(ROWS) {
            let rows = row_block(block, self.count);
            for tile in tiles.clone() {
                let sums = Outputs::zeroed(&mut sums, rows.1);
                match self.operation {
                    Operation::One(matrix) => {
                        matrix.tile(kernels, (packed, self.packed), tile, rows, sums, panel);
                        self.store(tile, rows, sums);
                    }
                    Operation::Gated {
                        gate,
                        up,
                        activation,
                        ..
                    } => {
                        let gates = Outputs::zeroed(&mut gates, rows.1);
                        gate.tile(
                            kernels,
                            (packed, self.packed_gate),
                            tile,
                            rows,
                            gates,
                            panel,
                        );
                        up.tile(kernels, (packed, self.packed), tile, rows, sums, panel);
                        activate_here(activation, gates, sums);
                        self.store(tile, rows, gates);
                    }
                }
            }
        }
    }

    fn store(&self, tile: usize, (first, _): (usize, usize), values: &[f32]) {
        let n = self.operation.matrix().out_features;
        let column = tile * TILE;
        let width = TILE.min(n - column);
        for (row, values) in values.chunks_exact(TILE).enumerate() {
            // SAFETY: tasks own disjoint columns.
            let out = unsafe { self.out.slice((first + row) * n + column, width) };
            // A copy of constant length is inlined.
            match out.as_chunks_mut::<TILE>() {
                ([out], []) => out.copy_from_slice(values),
                _ => out.copy_from_slice(&values[..width]),
            }
        }
    }
}

/// Multiply all groups, bitwise identical to separate calls, with one wait for packed activations and one for results.
///
/// # Panics
/// If lengths do not fit.
pub(crate) fn multiply(groups: &mut [Group<'_>]) {
    PACKED.with_borrow_mut(|packed| {
        let jobs = pack(groups, packed);
        let (tiles, cost) = jobs.iter().fold((0, 0), |(tiles, _), job| {
            let own = job.operation.matrix().tiles();
            (tiles + own, job.first_cost + own * job.tile_cost)
        });
        let tasks = tiles.min(pool::threads() * TASKS_PER_THREAD);
        let packed = &*packed;
        pool::run(tasks, &|task| {
            let costs = task * cost / tasks..(task + 1) * cost / tasks;
            let mut panel = Panel::new();
            let first = jobs.partition_point(|job| job.first_cost <= costs.start) - 1;
            for job in &jobs[first..] {
                if job.first_cost >= costs.end {
                    break;
                }
                job.run(packed, job.tiles_within(&costs), &mut panel);
            }
        });
    });
}

/// Pack the activations of all groups that have rows.
fn pack<'a>(groups: &mut [Group<'a>], packed: &mut Packed) -> Vec<Job<'a>> {
    let mut regions: Vec<Region<'_>> = Vec::new();
    let mut placed: Vec<usize> = Vec::with_capacity(groups.len());
    let mut jobs = Vec::with_capacity(groups.len());
    let (mut int8, mut exact, mut tasks, mut cost) = (0, 0, 0, 0);
    for group in groups {
        let count = group.count();
        let mut place = |matrix: &'a QuantMatrix| {
            let end = if matrix.is_int8() {
                &mut int8
            } else {
                &mut exact
            };
            let blocks = matrix.blocks();
            let in_block = count.clamp(1, ROWS);
            let region = Region {
                matrix,
                x: group.x,
                rows: group.rows,
                count,
                at: *end,
                // One row is not worth several tasks.
                step: if count == 1 {
                    blocks
                } else {
                    (PACKED_BLOCKS / in_block).max(8)
                },
                first_task: tasks,
            };
            *end += count * blocks;
            tasks += region.tasks();
            let at = region.at;
            regions.push(region);
            at
        };
        let (at, gate_at) = match group.operation {
            Operation::One(matrix) => {
                let at = group
                    .packed_as
                    .map_or_else(|| place(matrix), |earlier| placed[earlier]);
                (at, at)
            }
            Operation::Gated {
                gate,
                up,
                packs_alike,
                ..
            } => {
                let at = place(up);
                (at, if packs_alike { at } else { place(gate) })
            }
        };
        placed.push(at);
        if count > 0 {
            let matrix = group.operation.matrix();
            let tile_cost = matrix.blocks() * (count + PASS_ROWS * count.div_ceil(ROWS));
            let tiles = matrix.tiles();
            jobs.push(Job {
                operation: group.operation,
                count,
                out: Shared::new(group.out),
                packed: at,
                packed_gate: gate_at,
                first_cost: cost,
                tile_cost,
            });
            cost += tiles * tile_cost;
        }
    }
    packed
        .int8
        .resize(packed.int8.len().max(int8), Int8Block::ZERO);
    packed
        .exact
        .resize(packed.exact.len().max(exact), [0.0; BLOCK]);
    let (int8, exact) = (
        Shared::new(&mut packed.int8),
        Shared::new(&mut packed.exact),
    );
    pool::run(tasks, &|task| {
        let region = &regions[regions.partition_point(|region| region.first_task <= task) - 1];
        region.run(task - region.first_task, int8, exact);
    });
    jobs
}

/// Multiply `x` `[rows, K]` with several matrices of the same K, each into a separate `[rows, N]`, bitwise identical to separate calls.
/// Activations are packed once if permutations agree.
///
/// # Panics
/// If lengths do not fit.
pub fn matmul_together(matmuls: &mut [(&QuantMatrix, &mut [f32])], x: &[f32], rows: usize) {
    let matrices: Vec<&QuantMatrix> = matmuls.iter().map(|(matrix, _)| *matrix).collect();
    let mut groups: Vec<Group<'_>> = Vec::with_capacity(matmuls.len());
    for (i, (matrix, out)) in matmuls.iter_mut().enumerate() {
        assert_eq!(x.len(), rows * matrix.in_features, "x must hold rows * K");
        groups.push(Group {
            x,
            rows: None,
            operation: Operation::One(matrix),
            out,
            packed_as: matrices[..i].iter().position(|m| m.packs_like(matrix)),
        });
    }
    multiply(&mut groups);
}

impl QuantMatrix {
    /// Multiply `x` `[rows, K]` into `out` `[rows, N]`. A row's result depends only on that row.
    ///
    /// # Panics
    /// If the lengths do not fit `rows`.
    pub fn matmul(&self, x: &[f32], rows: usize, out: &mut [f32]) {
        matmul_together(&mut [(self, out)], x, rows);
    }

    fn is_int8(&self) -> bool {
        self.compute == Compute::Int8 && matches!(self.storage, Storage::Codes(_))
    }

    /// Whether both matrices take the same packed activations.
    pub(crate) fn packs_like(&self, other: &Self) -> bool {
        self.is_int8() == other.is_int8() && self.source == other.source
    }

    /// One tile's results for `count` rows from `first` on, in `sums` `[count][32]`, which is zero; columns of padding are undefined. The
    /// activations of the matrix start at `at`.
    fn tile(
        &self,
        kernels: &Kernels,
        (packed, at): (&Packed, usize),
        tile: usize,
        (first, count): (usize, usize),
        sums: &mut [f32],
        panel: &mut Panel,
    ) {
        let at = at + first * self.blocks();
        let sections = self.sections.as_slice();
        let mut partial = MaybeUninit::uninit();
        let partial_rows = if sections.len() > 1 { count } else { 0 };
        let partial = Outputs::zeroed(&mut partial, partial_rows).as_mut_ptr();
        let c = sums.as_mut_ptr();
        // SAFETY: the kernels are those of this processor; the activations hold `count` rows of every block; so do `c` and, for several
        // sections, `partial`.
        unsafe {
            match &self.storage {
                Storage::Codes(codes) if self.compute == Compute::Int8 => {
                    let x = packed.int8[at..].as_ptr();
                    (kernels.int8_tile)(codes, sections, tile, x, count, c, partial);
                }
                Storage::Codes(codes) => {
                    let x = packed.exact[at..].as_ptr().cast();
                    if count == 1 {
                        (kernels.exact_one_row)(codes, sections, tile, x, c, partial);
                    } else {
                        (kernels.exact_rows)(codes, sections, tile, x, count, c, partial, panel);
                    }
                }
                Storage::Floats(floats) => {
                    let x = packed.exact[at..].as_ptr().cast();
                    (kernels.floats)(floats, sections, tile, x, count, c, partial, panel);
                }
            }
        }
        self.finish(tile * TILE, sums);
    }

    /// (sums + bias) * prescale
    fn finish(&self, column: usize, sums: &mut [f32]) {
        if let Some(bias) = &self.bias {
            for sums in sums.chunks_exact_mut(TILE) {
                for (sum, bias) in sums.iter_mut().zip(&bias[column..]) {
                    *sum += bias;
                }
            }
        }
        if self.prescale != 1.0 {
            for sum in sums {
                *sum *= self.prescale;
            }
        }
    }

    /// Dequantize W `[K, N]` to half in file order, from the repacked form.
    ///
    /// # Panics
    /// If `out` does not hold K * N elements.
    pub fn dequantize_into(&self, out: &mut [f16]) {
        let n = self.out_features;
        assert_eq!(out.len(), self.in_features * n, "out must hold K * N");
        let shared = Shared::new(out);
        pool::run(self.tiles(), &|tile| {
            let width = TILE.min(n - tile * TILE);
            let mut block = [0.0f32; BLOCK * TILE];
            let write = |index: usize, block: &[f32]| {
                let source = &self.source[index * BLOCK..][..BLOCK];
                for (values, &feature) in block.chunks_exact(TILE).zip(source) {
                    if feature != NO_FEATURE {
                        // SAFETY: tasks own disjoint columns.
                        let out =
                            unsafe { shared.slice(feature as usize * n + tile * TILE, width) };
                        for (out, &value) in out.iter_mut().zip(values) {
                            *out = f16::from_f32(value);
                        }
                    }
                }
            };
            match &self.storage {
                Storage::Codes(codes) => {
                    for span in &codes.spans {
                        for b in 0..span.blocks {
                            // SAFETY: plain Rust; `block` holds 1024 floats.
                            unsafe {
                                exact::decode_block::<Scalar>(
                                    codes,
                                    tile,
                                    span,
                                    b,
                                    block.as_mut_ptr(),
                                );
                            }
                            write(span.first_block + b, &block);
                        }
                    }
                }
                Storage::Floats(floats) => {
                    for index in 0..self.blocks() {
                        let at = (tile * self.blocks() + index) * BLOCK * TILE;
                        widen(floats, at, &mut block);
                        write(index, &block);
                    }
                }
            }
        });
    }
}

fn widen(floats: &Floats, at: usize, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = match floats {
            Floats::F16(data) => f16::from_bits(data[at + i]).to_f32(),
            Floats::BF16(data) => half::bf16::from_bits(data[at + i]).to_f32(),
            Floats::F32(data) => data[at + i],
        };
    }
}
