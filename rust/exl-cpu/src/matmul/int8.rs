//! The int8 matmul of one tile.

use super::activations::Int8Block;
use super::decode::{operands, prefetch, scale_and_zero};
use super::layout::TILE;
use super::matrix::{Codes, Section, Span};
use super::simd::{LANES, Simd};

/// Multiply one tile and add to `c` `[rows][32]`; `acts` is `[blocks][rows]`. `partial` `[rows][32]` is zero before and after the call.
///
/// A section's sum is over its blocks, in order, of `int * (column scale * activation scale)`: one rounded multiplication and one fused
/// multiply-add a block. `V` vectors are processed together; their eight operands are decoded once for all rows.
///
/// # Safety
/// [`Simd`]'s contract; `tile` is a tile of `codes`, `sections` are theirs, and the pointers are valid for `rows` rows.
/// `partial` is not read if there is only one section.
#[inline(always)]
pub unsafe fn tile<S: Simd, const V: usize>(
    codes: &Codes,
    sections: &[Section],
    tile: usize,
    acts: *const Int8Block,
    rows: usize,
    c: *mut f32,
    partial: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let words = codes.words.as_ptr().add(tile * codes.tile_words);
        for (i, section) in sections.iter().enumerate() {
            let sums = if i == 0 { c } else { partial };
            for place in section.spans.clone() {
                let group = codes.spans.get_unchecked(place);
                let end = i > 0 && place + 1 == section.spans.end;
                match group.bits {
                    2 => span::<S, V, 2>(codes, tile, group, words, acts, rows, sums, c, end),
                    3 => span::<S, V, 3>(codes, tile, group, words, acts, rows, sums, c, end),
                    4 => span::<S, V, 4>(codes, tile, group, words, acts, rows, sums, c, end),
                    5 => span::<S, V, 5>(codes, tile, group, words, acts, rows, sums, c, end),
                    6 => span::<S, V, 6>(codes, tile, group, words, acts, rows, sums, c, end),
                    _ => span::<S, V, 8>(codes, tile, group, words, acts, rows, sums, c, end),
                }
            }
        }
    }
}

/// Add a span to `sums`; if it is the `end` of a section after the first, its last block moves them to `c`.
#[allow(clippy::too_many_arguments)] // operands of an inner loop, each in a register
#[inline(always)]
unsafe fn span<S: Simd, const V: usize, const BITS: u32>(
    codes: &Codes,
    tile: usize,
    span: &Span,
    words: *const u32,
    acts: *const Int8Block,
    rows: usize,
    sums: *mut f32,
    c: *mut f32,
    end: bool,
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
                let zeros = &negated_zeros;
                let (sums, c) = (sums.add(first * LANES), c.add(first * LANES));
                if end && b + 1 == span.blocks {
                    block_rows::<S, V, BITS, true>(&ops, &scales, zeros, acts, rows, sums, c);
                } else {
                    block_rows::<S, V, BITS, false>(&ops, &scales, zeros, acts, rows, sums, c);
                }
            }
            first += V;
        }
    }
}

/// Add one block of all rows to `sums`; `END` adds the result to `c` instead and zeroes `sums`.
#[inline(always)]
unsafe fn block_rows<S: Simd, const V: usize, const BITS: u32, const END: bool>(
    ops: &[[S::I; 8]; V],
    scales: &[S::F; V],
    negated_zeros: &[S::I; V],
    acts: *const Int8Block,
    rows: usize,
    sums: *mut f32,
    c: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        for row in 0..rows {
            let act = &*acts.add(row);
            let sum = S::splat_i(act.sum as u32);
            let act_scale = S::splat_f(act.scale);
            for v in 0..V {
                let start = S::dot_i16(S::splat_i(0), negated_zeros[v], sum);
                let dot = S::dot_u8::<BITS>(start, &ops[v], act.q.as_ptr().cast());
                let at = row * TILE + v * LANES;
                let product = S::mul_f(scales[v], act_scale);
                let total = S::fma_f(S::to_f(dot), product, S::load_f(sums.add(at)));
                if END {
                    S::store_f(c.add(at), S::add_f(S::load_f(c.add(at)), total));
                    S::store_f(sums.add(at), S::splat_f(0.0));
                } else {
                    S::store_f(sums.add(at), total);
                }
            }
        }
    }
}
