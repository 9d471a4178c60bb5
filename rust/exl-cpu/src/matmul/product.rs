//! y = (x @ W + bias) * prescale over the tiles of a matrix, on the pool.

use std::cell::RefCell;

use half::f16;

use super::activations::{Int8Block, ROWS, row_block};
use super::exact::{self, Panel};
use super::kernels::Kernels;
use super::layout::{BLOCK, TILE};
use super::matrix::{Compute, Floats, NO_FEATURE, QuantMatrix, Storage};
use super::memory::Shared;
use super::simd::Scalar;
use crate::pool;

/// Tasks a thread gets of one product: enough that a thread held up elsewhere leaves little behind.
const TASKS_PER_THREAD: usize = 16;

/// Activations in the order of one permutation, in the form of one mode.
#[derive(Default)]
struct Packed {
    int8: Vec<Int8Block>,
    exact: Vec<[f32; BLOCK]>,
}

thread_local! {
    /// Packed activations of the calling thread, kept from call to call.
    static PACKED: RefCell<Vec<Packed>> = const { RefCell::new(Vec::new()) };
}

/// Outputs of one tile for one row block.
#[repr(align(64))]
struct Outputs([f32; ROWS * TILE]);

/// One matrix of a joint product.
struct Job<'a> {
    matrix: &'a QuantMatrix,
    out: Shared<f32>,
    /// Which packed activations it takes.
    packed: usize,
    first_tile: usize,
}

/// Multiplies `x` `[rows, K]` with several matrices of the same K in one go, each into its own `[rows, N]`: the same bits as one
/// product after the other, with one wait instead of several, and activations packed once where permutations agree.
///
/// # Panics
/// If lengths do not fit.
pub fn matmul_together(products: &mut [(&QuantMatrix, &mut [f32])], x: &[f32], rows: usize) {
    for (matrix, out) in products.iter() {
        assert_eq!(x.len(), rows * matrix.in_features, "x must hold rows * K");
        assert_eq!(
            out.len(),
            rows * matrix.out_features,
            "out must hold rows * N"
        );
    }
    if rows == 0 {
        return;
    }
    PACKED.with_borrow_mut(|buffers| {
        let (mut jobs, mut packers, mut tiles): (Vec<Job<'_>>, Vec<&QuantMatrix>, _) =
            (Vec::new(), Vec::new(), 0);
        for (matrix, out) in products.iter_mut() {
            let packed = packers
                .iter()
                .position(|m| m.packs_like(matrix))
                .unwrap_or_else(|| {
                    packers.push(matrix);
                    packers.len() - 1
                });
            jobs.push(Job {
                matrix,
                out: Shared::new(out),
                packed,
                first_tile: tiles,
            });
            tiles += matrix.tiles();
        }
        buffers.resize_with(buffers.len().max(packers.len()), Packed::default);
        for (matrix, buffer) in packers.iter().zip(buffers.iter_mut()) {
            matrix.pack_activations(x, rows, buffer);
        }
        let tasks = tiles.min(pool::threads() * TASKS_PER_THREAD);
        pool::run(tasks, &|task| {
            let range = task * tiles / tasks..(task + 1) * tiles / tasks;
            run_tiles(&jobs, buffers, range, rows);
        });
    });
}

/// The tiles `range` of all jobs' tiles, for all rows.
fn run_tiles(jobs: &[Job<'_>], packed: &[Packed], range: std::ops::Range<usize>, rows: usize) {
    let kernels = Kernels::current();
    let mut sums = Outputs([0.0; ROWS * TILE]);
    let mut panel = Panel::new();
    for block in 0..rows.div_ceil(ROWS) {
        let (first, count) = row_block(block, rows);
        let sums = &mut sums.0[..count * TILE];
        for t in range.clone() {
            let job = &jobs[jobs.partition_point(|job| job.first_tile <= t) - 1];
            let (matrix, tile) = (job.matrix, t - job.first_tile);
            sums.fill(0.0);
            matrix.tile_product(
                kernels,
                &packed[job.packed],
                tile,
                (first, count),
                sums,
                &mut panel,
            );
            let column = tile * TILE;
            let width = TILE.min(matrix.out_features - column);
            for (row, sums) in sums.chunks_exact(TILE).enumerate() {
                let at = (first + row) * matrix.out_features + column;
                // SAFETY: tasks own disjoint columns.
                matrix.finish(column, &sums[..width], unsafe { job.out.slice(at, width) });
            }
        }
    }
}

impl QuantMatrix {
    /// Multiplies `x` `[rows, K]` into `out` `[rows, N]`. A row's result depends on that row alone.
    ///
    /// # Panics
    /// If the lengths do not fit `rows`.
    pub fn matmul(&self, x: &[f32], rows: usize, out: &mut [f32]) {
        matmul_together(&mut [(self, out)], x, rows);
    }

    fn is_int8(&self) -> bool {
        self.compute == Compute::Int8 && matches!(self.storage, Storage::Codes(_))
    }

    fn packs_like(&self, other: &Self) -> bool {
        self.is_int8() == other.is_int8() && self.source == other.source
    }

    fn pack_activations(&self, x: &[f32], rows: usize, out: &mut Packed) {
        let kernels = Kernels::current();
        if self.is_int8() {
            self.pack(x, rows, Int8Block::ZERO, &mut out.int8, kernels.pack_int8);
        } else {
            self.pack(x, rows, [0.0; BLOCK], &mut out.exact, kernels.pack_exact);
        }
    }

    /// Brings `x` into block order: `[row block][block][row]`.
    fn pack<T: Copy + Send>(
        &self,
        x: &[f32],
        rows: usize,
        zero: T,
        out: &mut Vec<T>,
        pack: unsafe fn(&[f32], usize, &[u32], &mut [T]),
    ) {
        let (k, blocks) = (self.in_features, self.blocks());
        out.resize(rows * blocks, zero);
        // A task packs these blocks of one row block; one row is not worth a task of its own.
        let step = if rows == 1 { blocks } else { 8 };
        let steps = blocks.div_ceil(step);
        let shared = Shared::new(out);
        pool::run(rows.div_ceil(ROWS) * steps, &|task| {
            let (first, count) = row_block(task / steps, rows);
            let from = task % steps * step;
            let to = (from + step).min(blocks);
            let x = &x[first * k..][..count * k];
            let source = &self.source[from * BLOCK..to * BLOCK];
            // SAFETY: tasks own disjoint blocks; the kernels are those of this processor; `source` holds features of this matrix.
            unsafe {
                let out = shared.slice((first * blocks) + from * count, (to - from) * count);
                pack(x, k, source, out);
            }
        });
    }

    /// Adds one tile's product for `count` rows from `first` on to `sums`.
    fn tile_product(
        &self,
        kernels: &Kernels,
        packed: &Packed,
        tile: usize,
        (first, count): (usize, usize),
        sums: &mut [f32],
        panel: &mut Panel,
    ) {
        let at = first * self.blocks();
        let c = sums.as_mut_ptr();
        // SAFETY: the kernels are those of this processor; the activations hold `count` rows of every block.
        unsafe {
            match &self.storage {
                Storage::Codes(codes) if self.compute == Compute::Int8 => {
                    (kernels.int8_tile)(codes, tile, packed.int8[at..].as_ptr(), count, c);
                }
                Storage::Codes(codes) => {
                    let x = packed.exact[at..].as_ptr().cast();
                    if count == 1 {
                        (kernels.exact_one_row)(codes, tile, x, c);
                    } else {
                        (kernels.exact_rows)(codes, tile, x, count, c, panel);
                    }
                }
                Storage::Floats(floats) => {
                    let x = packed.exact[at..].as_ptr().cast();
                    (kernels.floats)(floats, self.blocks(), tile, x, count, c, panel);
                }
            }
        }
    }

    fn finish(&self, column: usize, sums: &[f32], out: &mut [f32]) {
        match &self.bias {
            Some(bias) => {
                for ((out, sum), bias) in out.iter_mut().zip(sums).zip(&bias[column..]) {
                    *out = (sum + bias) * self.prescale;
                }
            }
            None => {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = sum * self.prescale;
                }
            }
        }
    }

    /// W `[K, N]` in half, file order, from the repacked form.
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
