//! The exact matmul of one tile: FP32 activations times the exact half weights.
//!
//! Each output sums a block of 32 packed rows in one chain of fused multiply-adds from zero, then adds the block's sum to its total, block
//! after block. One row (decode) is multiplied while unpacking. For more rows, a panel of blocks is unpacked once and multiplied from the
//! cache. Results are bitwise identical.

use std::mem::MaybeUninit;

use super::decode::{magic_zero, operands, prefetch, scale_and_zero, weight, weight_to_multiply};
use super::layout::{BLOCK, TILE};
use super::matrix::{Codes, Floats, Section, Span};
use super::simd::{LANES, Simd};

/// Blocks of a panel.
const PANEL: usize = 4;
const VECTORS: usize = TILE / LANES;

/// Multiply one tile with one row and add to `c` `[32]`; `x` is `[blocks][32]`. `partial` `[32]` is zero before and after the call.
///
/// # Safety
/// [`Simd`]'s contract; `tile` is a tile of `codes`, `sections` are theirs, and the pointers are valid for its blocks.
/// `partial` is not read if there is only one section.
#[inline(always)]
pub unsafe fn tile_one_row<S: Simd>(
    codes: &Codes,
    sections: &[Section],
    tile: usize,
    x: *const f32,
    c: *mut f32,
    partial: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let words = codes.words.as_ptr().add(tile * codes.tile_words);
        for (i, section) in sections.iter().enumerate() {
            let sums = if i == 0 { c } else { partial };
            for span in &codes.spans[section.spans.clone()] {
                match span.bits {
                    2 => span_one_row::<S, 2>(codes, tile, span, words, x, sums),
                    3 => span_one_row::<S, 3>(codes, tile, span, words, x, sums),
                    4 => span_one_row::<S, 4>(codes, tile, span, words, x, sums),
                    5 => span_one_row::<S, 5>(codes, tile, span, words, x, sums),
                    6 => span_one_row::<S, 6>(codes, tile, span, words, x, sums),
                    _ => span_one_row::<S, 8>(codes, tile, span, words, x, sums),
                }
            }
            if i > 0 {
                move_sums::<S>(partial, 1, c);
            }
        }
    }
}

/// Add `partial` `[rows][32]` to `c` and zero it.
///
/// # Safety
/// [`Simd`]'s contract.
#[inline(always)]
unsafe fn move_sums<S: Simd>(partial: *mut f32, rows: usize, c: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        for at in (0..rows * TILE).step_by(LANES) {
            let sum = S::add_f(S::load_f(c.add(at)), S::load_f(partial.add(at)));
            S::store_f(c.add(at), sum);
            S::store_f(partial.add(at), S::splat_f(0.0));
        }
    }
}

#[inline(always)]
unsafe fn span_one_row<S: Simd, const BITS: u32>(
    codes: &Codes,
    tile: usize,
    span: &Span,
    words: *const u32,
    x: *const f32,
    c: *mut f32,
) {
    // SAFETY: the caller's; blocks of the span lie in the tile.
    unsafe {
        let mut scales = [S::splat_f(0.0); VECTORS];
        let mut zeros = scales;
        for v in 0..VECTORS {
            let (scale, zero) =
                scale_and_zero::<S, BITS>(&codes.scales, codes.groups, tile, span, v);
            scales[v] = scale;
            zeros[v] = S::mul_f(S::to_f(zero), scale);
        }
        for b in 0..span.blocks {
            let block = words.add(span.word + b * BITS as usize * TILE);
            let x = x.add((span.first_block + b) * BLOCK);
            prefetch::<S, BITS>(block);
            let mut ops = [[S::splat_i(0); 8]; VECTORS];
            for v in 0..VECTORS {
                ops[v] = operands::<S, BITS>(block, v);
            }
            let mut sums = [S::splat_f(0.0); VECTORS];
            for i in 0..8 {
                for j in 0..4 {
                    let x = S::splat_f(*x.add(4 * i + j));
                    for v in 0..VECTORS {
                        let w = weight_to_multiply::<S>(ops[v][i], j as u32, zeros[v], scales[v]);
                        sums[v] = S::fma_f(w, x, sums[v]);
                    }
                }
            }
            for v in 0..VECTORS {
                let out = c.add(v * LANES);
                S::store_f(out, S::add_f(S::load_f(out), sums[v]));
            }
        }
    }
}

/// A panel's weights, `[128][32]`.
#[repr(align(64))]
pub struct Panel([MaybeUninit<f32>; PANEL * BLOCK * TILE]);

impl Panel {
    pub fn new() -> Self {
        Self([MaybeUninit::uninit(); PANEL * BLOCK * TILE])
    }
}

/// Multiply one tile with `rows` rows and add to `c` `[rows][32]`; `x` is `[blocks][rows][32]`. `R` rows and `V` vectors make a register
/// block. `partial` as for [`tile_one_row`], with `rows` rows.
///
/// # Safety
/// As for [`tile_one_row`], for `rows` rows.
#[allow(clippy::too_many_arguments)] // operands of an inner loop, each in a register
#[inline(always)]
pub unsafe fn tile_rows<S: Simd, const R: usize, const V: usize>(
    codes: &Codes,
    sections: &[Section],
    tile: usize,
    x: *const f32,
    rows: usize,
    c: *mut f32,
    partial: *mut f32,
    panel: &mut Panel,
) {
    // SAFETY: the caller's.
    unsafe {
        let out = panel.0.as_mut_ptr().cast::<f32>();
        for (i, section) in sections.iter().enumerate() {
            let sums = if i == 0 { c } else { partial };
            let (mut filled, mut first_block) = (0, section.blocks.start);
            for span in &codes.spans[section.spans.clone()] {
                for b in 0..span.blocks {
                    decode_block::<S>(codes, tile, span, b, out.add(filled * BLOCK * TILE));
                    filled += 1;
                    if filled == PANEL {
                        let x = x.add(first_block * rows * BLOCK);
                        panel_rows::<S, R, V>(out, filled, x, rows, sums);
                        first_block += filled;
                        filled = 0;
                    }
                }
            }
            if filled > 0 {
                let x = x.add(first_block * rows * BLOCK);
                panel_rows::<S, R, V>(out, filled, x, rows, sums);
            }
            if i > 0 {
                move_sums::<S>(partial, rows, c);
            }
        }
    }
}

/// Weights of block `b` of a span, `[32 positions][32 columns]`, exact halves as float32.
///
/// # Safety
/// As for [`tile_one_row`]; `out` is valid for 1024 floats.
#[inline(always)]
pub unsafe fn decode_block<S: Simd>(
    codes: &Codes,
    tile: usize,
    span: &Span,
    b: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        match span.bits {
            2 => decode_width::<S, 2>(codes, tile, span, b, out),
            3 => decode_width::<S, 3>(codes, tile, span, b, out),
            4 => decode_width::<S, 4>(codes, tile, span, b, out),
            5 => decode_width::<S, 5>(codes, tile, span, b, out),
            6 => decode_width::<S, 6>(codes, tile, span, b, out),
            _ => decode_width::<S, 8>(codes, tile, span, b, out),
        }
    }
}

#[inline(always)]
unsafe fn decode_width<S: Simd, const BITS: u32>(
    codes: &Codes,
    tile: usize,
    span: &Span,
    b: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let words = codes.words.as_ptr().add(tile * codes.tile_words);
        let block = words.add(span.word + b * BITS as usize * TILE);
        prefetch::<S, BITS>(block);
        for v in 0..VECTORS {
            let (scale, zero) =
                scale_and_zero::<S, BITS>(&codes.scales, codes.groups, tile, span, v);
            let zero = magic_zero::<S>(zero);
            let ops = operands::<S, BITS>(block, v);
            for i in 0..8 {
                for j in 0..4 {
                    let w = weight::<S>(ops[i], j as u32, zero, scale);
                    S::store_f(out.add((4 * i + j) * TILE + v * LANES), w);
                }
            }
        }
    }
}

/// Unquantized: multiply one tile with `rows` rows and add to `c` `[rows][32]`; `x` is `[blocks][rows][32]`. `partial` as for
/// [`tile_rows`].
///
/// # Safety
/// As for [`tile_rows`].
#[allow(clippy::too_many_arguments)] // operands of an inner loop, each in a register
#[inline(always)]
pub unsafe fn tile_floats<S: Simd, const R: usize, const V: usize>(
    floats: &Floats,
    sections: &[Section],
    tile: usize,
    x: *const f32,
    rows: usize,
    c: *mut f32,
    partial: *mut f32,
    panel: &mut Panel,
) {
    // SAFETY: the caller's.
    unsafe {
        let out = panel.0.as_mut_ptr().cast::<f32>();
        let blocks = sections.last().map_or(0, |section| section.blocks.end);
        for (i, section) in sections.iter().enumerate() {
            let sums = if i == 0 { c } else { partial };
            for block in section.blocks.clone().step_by(PANEL) {
                let count = PANEL.min(section.blocks.end - block);
                let x = x.add(block * rows * BLOCK);
                let at = (tile * blocks + block) * BLOCK * TILE;
                let weights = match floats {
                    Floats::F32(data) => data.as_ptr().add(at),
                    Floats::F16(data) => {
                        for i in (0..count * BLOCK * TILE).step_by(LANES) {
                            S::store_f(out.add(i), S::load_half(data.as_ptr().add(at + i)));
                        }
                        out.cast_const()
                    }
                    Floats::BF16(data) => {
                        for i in (0..count * BLOCK * TILE).step_by(LANES) {
                            S::store_f(out.add(i), S::load_bf16(data.as_ptr().add(at + i)));
                        }
                        out.cast_const()
                    }
                };
                panel_rows::<S, R, V>(weights, count, x, rows, sums);
            }
            if i > 0 {
                move_sums::<S>(partial, rows, c);
            }
        }
    }
}

/// Multiply a decoded panel of `blocks` blocks with all rows.
///
/// A register block is R rows and B blocks deep: few rows need several blocks in parallel to keep the multipliers busy.
#[inline(always)]
unsafe fn panel_rows<S: Simd, const R: usize, const V: usize>(
    weights: *const f32,
    blocks: usize,
    x: *const f32,
    rows: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut row = 0;
        while row + R <= rows {
            depth::<S, R, V, 1>(weights, blocks, x, rows, row, c);
            row += R;
        }
        while row + 4 <= rows {
            depth::<S, 4, V, 2>(weights, blocks, x, rows, row, c);
            row += 4;
        }
        if row + 2 <= rows {
            depth::<S, 2, V, 2>(weights, blocks, x, rows, row, c);
            row += 2;
        }
        if row < rows {
            depth::<S, 1, V, 4>(weights, blocks, x, rows, row, c);
        }
    }
}

#[inline(always)]
unsafe fn depth<S: Simd, const R: usize, const V: usize, const B: usize>(
    weights: *const f32,
    blocks: usize,
    x: *const f32,
    rows: usize,
    row: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut block = 0;
        while block + B <= blocks {
            register_block::<S, R, V, B>(weights, block, x, rows, row, c);
            block += B;
        }
        // Panels of small matrices end at their sections and are short.
        while B > 2 && block + 2 <= blocks {
            register_block::<S, R, V, 2>(weights, block, x, rows, row, c);
            block += 2;
        }
        while block < blocks {
            register_block::<S, R, V, 1>(weights, block, x, rows, row, c);
            block += 1;
        }
    }
}

#[inline(always)]
unsafe fn register_block<S: Simd, const R: usize, const V: usize, const B: usize>(
    weights: *const f32,
    block: usize,
    x: *const f32,
    rows: usize,
    row: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut first = 0;
        while first < VECTORS {
            let mut sums = [[[S::splat_f(0.0); V]; R]; B];
            for k in 0..BLOCK {
                for b in 0..B {
                    let mut w = [S::splat_f(0.0); V];
                    for v in 0..V {
                        let at = ((block + b) * BLOCK + k) * TILE + (first + v) * LANES;
                        w[v] = S::load_f(weights.add(at));
                    }
                    for r in 0..R {
                        let x = S::splat_f(*x.add(((block + b) * rows + row + r) * BLOCK + k));
                        for v in 0..V {
                            sums[b][r][v] = S::fma_f(w[v], x, sums[b][r][v]);
                        }
                    }
                }
            }
            for b in 0..B {
                for r in 0..R {
                    for v in 0..V {
                        let out = c.add((row + r) * TILE + (first + v) * LANES);
                        S::store_f(out, S::add_f(S::load_f(out), sums[b][r][v]));
                    }
                }
            }
            first += V;
        }
    }
}
