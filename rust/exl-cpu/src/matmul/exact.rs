//! The exact product of one tile: FP32 activations times the exact half weights.
//!
//! Each output sums a panel of 128 packed rows in one chain of fused multiply-adds from zero, then adds the panel's sum to its
//! total. One row (decode) multiplies as it unpacks; more rows unpack a panel once and multiply from the cache. Same bits.

use super::decode::{magic_zero, operands, scale_and_zero, weight};
use super::layout::{BLOCK, TILE};
use super::matrix::{Codes, Floats, Span};
use super::simd::{LANES, Simd};

/// Blocks of a panel.
const PANEL: usize = 4;
const VECTORS: usize = TILE / LANES;

/// One tile's product with one row, added to `c` `[32]`; `x` is `[blocks][32]`.
///
/// # Safety
/// [`Simd`]'s contract; `tile` is a tile of `codes` and the pointers are valid for its blocks.
#[inline(always)]
pub unsafe fn tile_one_row<S: Simd>(codes: &Codes, tile: usize, x: *const f32, c: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let words = codes.words.as_ptr().add(tile * codes.tile_words);
        let mut sums = [S::splat_f(0.0); VECTORS];
        let mut total: [S::F; VECTORS] = std::array::from_fn(|v| S::load_f(c.add(v * LANES)));
        for span in &codes.spans {
            let (sums, total) = (&mut sums, &mut total);
            match span.bits {
                2 => span_one_row::<S, 2>(codes, tile, span, words, x, sums, total),
                3 => span_one_row::<S, 3>(codes, tile, span, words, x, sums, total),
                4 => span_one_row::<S, 4>(codes, tile, span, words, x, sums, total),
                5 => span_one_row::<S, 5>(codes, tile, span, words, x, sums, total),
                6 => span_one_row::<S, 6>(codes, tile, span, words, x, sums, total),
                _ => span_one_row::<S, 8>(codes, tile, span, words, x, sums, total),
            }
        }
        // Adds the last, unfinished panel; after a finished one the sums are zero and the addition changes nothing.
        for v in 0..VECTORS {
            S::store_f(c.add(v * LANES), S::add_f(total[v], sums[v]));
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
    sums: &mut [S::F; VECTORS],
    total: &mut [S::F; VECTORS],
) {
    // SAFETY: the caller's; blocks of the span lie in the tile.
    unsafe {
        let scale_zero: [(S::F, S::F); VECTORS] = std::array::from_fn(|v| {
            let (scale, zero) =
                scale_and_zero::<S, BITS>(&codes.scales, codes.groups, tile, span, v);
            (scale, magic_zero::<S>(zero))
        });
        for b in 0..span.blocks {
            let block = words.add(span.word + b * BITS as usize * TILE);
            let x = x.add((span.first_block + b) * BLOCK);
            let ops: [[S::I; 8]; VECTORS] = std::array::from_fn(|v| operands::<S, BITS>(block, v));
            for i in 0..8 {
                for j in 0..4 {
                    let x = S::splat_f(*x.add(4 * i + j));
                    for v in 0..VECTORS {
                        let (scale, zero) = scale_zero[v];
                        let w = weight::<S>(ops[v][i], j as u32, zero, scale);
                        sums[v] = S::fma_f(w, x, sums[v]);
                    }
                }
            }
            if (span.first_block + b) % PANEL == PANEL - 1 {
                for v in 0..VECTORS {
                    total[v] = S::add_f(total[v], sums[v]);
                    sums[v] = S::splat_f(0.0);
                }
            }
        }
    }
}

/// A panel's weights, `[128][32]`.
#[repr(align(64))]
pub struct Panel([f32; PANEL * BLOCK * TILE]);

impl Panel {
    pub fn new() -> Self {
        Self([0.0; PANEL * BLOCK * TILE])
    }
}

/// One tile's product with `rows` rows, added to `c` `[rows][32]`; `x` is `[blocks][rows][32]`. `R` rows and `V` vectors make a
/// register block.
///
/// # Safety
/// As for [`tile_one_row`], for `rows` rows.
#[inline(always)]
pub unsafe fn tile_rows<S: Simd, const R: usize, const V: usize>(
    codes: &Codes,
    tile: usize,
    x: *const f32,
    rows: usize,
    c: *mut f32,
    panel: &mut Panel,
) {
    // SAFETY: the caller's.
    unsafe {
        let out = panel.0.as_mut_ptr();
        let mut filled = 0;
        let mut first_block = 0;
        for span in &codes.spans {
            for b in 0..span.blocks {
                decode_block::<S>(codes, tile, span, b, out.add(filled * BLOCK * TILE));
                filled += 1;
                if filled == PANEL {
                    panel_rows::<S, R, V>(out, filled, x.add(first_block * rows * BLOCK), rows, c);
                    first_block += filled;
                    filled = 0;
                }
            }
        }
        if filled > 0 {
            panel_rows::<S, R, V>(out, filled, x.add(first_block * rows * BLOCK), rows, c);
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

/// Unquantized: one tile's product with `rows` rows, added to `c` `[rows][32]`; `x` is `[blocks][rows][32]`.
///
/// # Safety
/// As for [`tile_rows`].
#[inline(always)]
pub unsafe fn tile_floats<S: Simd, const R: usize, const V: usize>(
    floats: &Floats,
    blocks: usize,
    tile: usize,
    x: *const f32,
    rows: usize,
    c: *mut f32,
    panel: &mut Panel,
) {
    // SAFETY: the caller's.
    unsafe {
        let out = panel.0.as_mut_ptr();
        let mut block = 0;
        while block < blocks {
            let count = PANEL.min(blocks - block);
            let x = x.add(block * rows * BLOCK);
            let at = (tile * blocks + block) * BLOCK * TILE;
            match floats {
                Floats::F32(data) => {
                    panel_rows::<S, R, V>(data.as_ptr().add(at), count, x, rows, c);
                }
                Floats::F16(data) => {
                    for i in (0..count * BLOCK * TILE).step_by(LANES) {
                        S::store_f(out.add(i), S::load_half(data.as_ptr().add(at + i)));
                    }
                    panel_rows::<S, R, V>(out, count, x, rows, c);
                }
                Floats::BF16(data) => {
                    for i in (0..count * BLOCK * TILE).step_by(LANES) {
                        S::store_f(out.add(i), S::load_bf16(data.as_ptr().add(at + i)));
                    }
                    panel_rows::<S, R, V>(out, count, x, rows, c);
                }
            }
            block += count;
        }
    }
}

/// Multiplies a decoded panel of `blocks` blocks with all rows.
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
            register_block::<S, R, V>(weights, blocks, x, rows, row, c);
            row += R;
        }
        while row + 4 <= rows {
            register_block::<S, 4, V>(weights, blocks, x, rows, row, c);
            row += 4;
        }
        while row < rows {
            register_block::<S, 1, V>(weights, blocks, x, rows, row, c);
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn register_block<S: Simd, const R: usize, const V: usize>(
    weights: *const f32,
    blocks: usize,
    x: *const f32,
    rows: usize,
    row: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut first = 0;
        while first < VECTORS {
            let mut sums = [[S::splat_f(0.0); V]; R];
            for block in 0..blocks {
                let x = x.add((block * rows + row) * BLOCK);
                let weights = weights.add(block * BLOCK * TILE + first * LANES);
                for k in 0..BLOCK {
                    let w: [S::F; V] =
                        std::array::from_fn(|v| S::load_f(weights.add(k * TILE + v * LANES)));
                    for r in 0..R {
                        let x = S::splat_f(*x.add(r * BLOCK + k));
                        for v in 0..V {
                            sums[r][v] = S::fma_f(w[v], x, sums[r][v]);
                        }
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    let out = c.add((row + r) * TILE + (first + v) * LANES);
                    S::store_f(out, S::add_f(S::load_f(out), sums[r][v]));
                }
            }
            first += V;
        }
    }
}
