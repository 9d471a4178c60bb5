//! The int8 matmul of one tile.

use super::activations::Int8Block;
use super::decode::{operands, prefetch, scale_and_zero};
use super::layout::TILE;
use super::matrix::{Codes, Span};
use super::simd::{LANES, Simd};

/// Multiply `spans` of one tile and add to `c` `[rows][32]`; `acts` is `[blocks][rows]`.
///
/// Each output is the sum over its blocks, in order, of `int * (column scale * activation scale)`: one rounded multiplication and one fused
/// multiply-add a block. `V` vectors are processed together; their eight operands are decoded once for all rows.
///
/// # Safety
/// [`Simd`]'s contract; `tile` is a tile of `codes`, `spans` are some of theirs, and the pointers are valid for `rows` rows.
#[inline(always)]
pub unsafe fn tile<S: Simd, const V: usize>(
    codes: &Codes,
    spans: &[Span],
    tile: usize,
    acts: *const Int8Block,
    rows: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let words = codes.words.as_ptr().add(tile * codes.tile_words);
        for group in spans {
            match group.bits {
                2 => span::<S, V, 2>(codes, tile, group, words, acts, rows, c),
                3 => span::<S, V, 3>(codes, tile, group, words, acts, rows, c),
                4 => span::<S, V, 4>(codes, tile, group, words, acts, rows, c),
                5 => span::<S, V, 5>(codes, tile, group, words, acts, rows, c),
                6 => span::<S, V, 6>(codes, tile, group, words, acts, rows, c),
                _ => span::<S, V, 8>(codes, tile, group, words, acts, rows, c),
            }
        }
    }
}

#[inline(always)]
unsafe fn span<S: Simd, const V: usize, const BITS: u32>(
    codes: &Codes,
    tile: usize,
    span: &Span,
    words: *const u32,
    acts: *const Int8Block,
    rows: usize,
    c: *mut f32,
) {
    // SAFETY: the caller's; blocks of the span lie in the tile.
    unsafe {
        let mut first = 0;
        while first < TILE / LANES {
            let mut scales = [S::splat_f(0.0); V];
            // The low half of each lane holds -zero as 16 bits; the high half is 0.
            let mut negated_zeros = [S::splat_i(0); V];
            for v in 0..V {
                let (scale, zero) =
                    scale_and_zero::<S, BITS>(&codes.scales, codes.groups, tile, span, first + v);
                scales[v] = scale;
                negated_zeros[v] = S::and_i(S::sub_i(S::splat_i(0), zero), S::splat_i(0xffff));
            }
            for b in 0..span.blocks {
                let block = words.add(span.word + b * BITS as usize * TILE);
                if first == 0 {
                    prefetch::<S, BITS>(block);
                }
                let mut ops = [[S::splat_i(0); 8]; V];
                for v in 0..V {
                    ops[v] = operands::<S, BITS>(block, first + v);
                }
                let acts = acts.add((span.first_block + b) * rows);
                for row in 0..rows {
                    let act = &*acts.add(row);
                    let sum = S::splat_i(act.sum as u32);
                    let act_scale = S::splat_f(act.scale);
                    for v in 0..V {
                        let start = S::dot_i16(S::splat_i(0), negated_zeros[v], sum);
                        let dot = S::dot_u8::<BITS>(start, &ops[v], act.q.as_ptr().cast());
                        let out = c.add(row * TILE + (first + v) * LANES);
                        let product = S::mul_f(scales[v], act_scale);
                        S::store_f(out, S::fma_f(S::to_f(dot), product, S::load_f(out)));
                    }
                }
            }
            first += V;
        }
    }
}
