//! y = (x @ W + bias) * prescale over the tiles of a matrix, on the pool.

use std::cell::RefCell;

use half::f16;

use super::activations::{Int8Block, ROWS, row_block};
use super::exact::{self, Panel};
use super::kernels::Kernels;
use super::layout::{BLOCK, TILE};
use super::matrix::{Codes, Compute, Floats, NO_FEATURE, QuantMatrix, Storage};
use super::memory::Shared;
use super::simd::Scalar;
use crate::pool;

/// Tasks a thread gets of one product: enough that a thread held up elsewhere leaves little behind.
const TASKS_PER_THREAD: usize = 4;

thread_local! {
    /// Packed activations of the calling thread, kept from call to call.
    static INT8: RefCell<Vec<Int8Block>> = const { RefCell::new(Vec::new()) };
    static EXACT: RefCell<Vec<[f32; BLOCK]>> = const { RefCell::new(Vec::new()) };
}

/// Outputs of one tile for one row block.
#[repr(align(64))]
struct Outputs([f32; ROWS * TILE]);

impl QuantMatrix {
    /// Multiplies `x` `[rows, K]` into `out` `[rows, N]`. A row's result depends on that row alone.
    ///
    /// # Panics
    /// If the lengths do not fit `rows`.
    pub fn matmul(&self, x: &[f32], rows: usize, out: &mut [f32]) {
        assert_eq!(x.len(), rows * self.in_features, "x must hold rows * K");
        assert_eq!(
            out.len(),
            rows * self.out_features,
            "out must hold rows * N"
        );
        if rows == 0 || self.out_features == 0 {
            return;
        }
        match &self.storage {
            Storage::Codes(codes) if self.compute == Compute::Int8 => {
                self.matmul_int8(codes, x, rows, out);
            }
            storage => self.matmul_exact(storage, x, rows, out),
        }
    }

    fn matmul_int8(&self, codes: &Codes, x: &[f32], rows: usize, out: &mut [f32]) {
        let kernels = Kernels::current();
        INT8.with_borrow_mut(|acts| {
            self.pack(x, rows, Int8Block::ZERO, acts, kernels.pack_int8);
            self.run_tiles(rows, out, |tile, first, count, c, _| {
                let acts = acts[first * self.blocks()..].as_ptr();
                // SAFETY: the kernels are those of this processor; `acts` holds `count` rows of every block.
                unsafe { (kernels.int8_tile)(codes, tile, acts, count, c.as_mut_ptr()) }
            });
        });
    }

    fn matmul_exact(&self, storage: &Storage, x: &[f32], rows: usize, out: &mut [f32]) {
        let kernels = Kernels::current();
        EXACT.with_borrow_mut(|acts| {
            self.pack(x, rows, [0.0; BLOCK], acts, kernels.pack_exact);
            self.run_tiles(rows, out, |tile, first, count, c, panel| {
                let x = acts[first * self.blocks()..].as_ptr().cast::<f32>();
                let c = c.as_mut_ptr();
                // SAFETY: as above.
                unsafe {
                    match storage {
                        Storage::Codes(codes) if count == 1 => {
                            (kernels.exact_one_row)(codes, tile, x, c);
                        }
                        Storage::Codes(codes) => {
                            (kernels.exact_rows)(codes, tile, x, count, c, panel);
                        }
                        Storage::Floats(floats) => {
                            (kernels.floats)(floats, self.blocks(), tile, x, count, c, panel);
                        }
                    }
                }
            });
        });
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
            // SAFETY: tasks own disjoint blocks; the kernels are those of this processor.
            unsafe {
                let out = shared.slice((first * blocks) + from * count, (to - from) * count);
                pack(x, k, source, out);
            }
        });
    }

    /// Calls `tile(tile, first row, rows, sums, scratch)` for every tile and row block, then writes bias, prescale and result.
    fn run_tiles(
        &self,
        rows: usize,
        out: &mut [f32],
        tile: impl Fn(usize, usize, usize, &mut [f32], &mut Panel) + Sync,
    ) {
        let tiles = self.tiles();
        let tasks = tiles.min(pool::threads() * TASKS_PER_THREAD);
        let shared = Shared::new(out);
        pool::run(tasks, &|task| {
            let mut sums = Outputs([0.0; ROWS * TILE]);
            let mut panel = Panel::new();
            for block in 0..rows.div_ceil(ROWS) {
                let (first, count) = row_block(block, rows);
                for t in task * tiles / tasks..(task + 1) * tiles / tasks {
                    let sums = &mut sums.0[..count * TILE];
                    sums.fill(0.0);
                    tile(t, first, count, sums, &mut panel);
                    let column = t * TILE;
                    let width = TILE.min(self.out_features - column);
                    for (row, sums) in sums.chunks_exact(TILE).enumerate() {
                        let at = (first + row) * self.out_features + column;
                        // SAFETY: tasks own disjoint columns.
                        self.finish(column, &sums[..width], unsafe { shared.slice(at, width) });
                    }
                }
            }
        });
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
