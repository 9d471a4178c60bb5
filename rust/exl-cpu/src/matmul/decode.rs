//! Unpacking of tile words into codes, scales and weights.

use super::layout::TILE;
use super::matrix::{Scales, Span};
use super::simd::{LANES, Simd};

/// Prefetch distance in words. The work between two loads is too long for the hardware prefetcher to find the stream, so it would lose
/// bandwidth.
const AHEAD: usize = 1024;

/// Prefetch the block that is [`AHEAD`] words after `block`.
///
/// # Safety
/// [`Simd`]'s contract.
#[inline(always)]
pub unsafe fn prefetch<S: Simd, const BITS: u32>(block: *const u32) {
    for line in 0..BITS as usize * TILE / 16 {
        // SAFETY: a prefetch reads nothing that the program can see.
        unsafe { S::prefetch(block.wrapping_add(AHEAD + 16 * line)) }
    }
}

/// The eight operands of vector `v` (columns 16 v .. 16 v + 16) of a block: four codes, one a byte, in each lane.
///
/// # Safety
/// [`Simd`]'s contract; `block` is valid for `BITS * 32` words.
#[inline(always)]
pub unsafe fn operands<S: Simd, const BITS: u32>(block: *const u32, v: usize) -> [S::I; 8] {
    // SAFETY: word indices stay below BITS.
    unsafe {
        let block = block.add(v * LANES);
        let mut out = [S::splat_i(0); 8];
        match BITS {
            2 | 3 => {
                let w = [word::<S>(block, 0), word::<S>(block, 1)];
                let mask = S::splat_i(0x0303_0303);
                for i in 0..8 {
                    out[i] = S::and_i(S::shr_i(w[i / 4], 2 * (i as u32 % 4)), mask);
                }
                if BITS == 3 {
                    let plane = word::<S>(block, 2);
                    for i in 0..8 {
                        out[i] = merge::<S>(out[i], plane, i as u32, 2, 0x0404_0404);
                    }
                }
            }
            4..=6 => {
                let mask = S::splat_i(0x0f0f_0f0f);
                for w in 0..4 {
                    let x = word::<S>(block, w);
                    out[2 * w] = S::and_i(x, mask);
                    out[2 * w + 1] = S::and_i(S::shr_i(x, 4), mask);
                }
                if BITS == 5 {
                    let plane = word::<S>(block, 4);
                    for i in 0..8 {
                        out[i] = merge::<S>(out[i], plane, i as u32, 4, 0x1010_1010);
                    }
                }
                if BITS == 6 {
                    let planes = [word::<S>(block, 4), word::<S>(block, 5)];
                    for i in 0..8 {
                        let from = 2 * (i as u32 % 4);
                        out[i] = merge::<S>(out[i], planes[i / 4], from, 4, 0x3030_3030);
                    }
                }
            }
            _ => {
                for (w, out) in out.iter_mut().enumerate() {
                    *out = word::<S>(block, w);
                }
            }
        }
        out
    }
}

#[inline(always)]
unsafe fn word<S: Simd>(block: *const u32, w: usize) -> S::I {
    // SAFETY: the caller's pointer is valid for this word.
    unsafe { S::load_i(block.add(w * TILE)) }
}

/// Add the field at bit `from` of every byte of `plane` to `codes` at bit `to`, under `mask`.
#[inline(always)]
unsafe fn merge<S: Simd>(codes: S::I, plane: S::I, from: u32, to: u32, mask: u32) -> S::I {
    // SAFETY: Simd's contract. The mask removes bits that the shift brings in from other bytes.
    unsafe {
        let moved = if from >= to {
            S::shr_i(plane, from - to)
        } else {
            S::shl_i(plane, to - from)
        };
        S::or_i(codes, S::and_i(moved, S::splat_i(mask)))
    }
}

/// Scales and zero points of vector `v` of one group in one tile.
///
/// # Safety
/// [`Simd`]'s contract; `tile` and `span` belong to the matrix of `scales`, which has `groups` groups.
#[inline(always)]
pub unsafe fn scale_and_zero<S: Simd, const BITS: u32>(
    scales: &Scales,
    groups: usize,
    tile: usize,
    span: &Span,
    v: usize,
) -> (S::F, S::I) {
    let at = tile * groups + span.group;
    // SAFETY: `at` is below tiles * groups.
    unsafe {
        match scales {
            Scales::Exl2 { codes, tables } => {
                let packed = S::load_u8(codes.as_ptr().add(at * LANES));
                let index = S::shr_i(packed, 4 * v as u32);
                let table = tables.as_ptr().add(span.group).cast::<f32>();
                (S::lookup16(table, index), S::splat_i(1 << (BITS - 1)))
            }
            Scales::Gptq {
                scales,
                zeros,
                zero_offset,
            } => {
                let column = at * TILE + v * LANES;
                let stored = S::load_u8(zeros.as_ptr().add(column));
                (
                    S::load_half(scales.as_ptr().add(column)),
                    S::add_i(stored, S::splat_i(*zero_offset)),
                )
            }
        }
    }
}

/// 2^23: a code or-ed into its low bits is the float32 2^23 + code.
const MAGIC: u32 = 0x4b00_0000;

/// 2^23 + zero, which [`weight`] subtracts.
///
/// # Safety
/// [`Simd`]'s contract.
#[inline(always)]
pub unsafe fn magic_zero<S: Simd>(zero: S::I) -> S::F {
    // SAFETY: Simd's contract; zero <= 256, so the sum of integers is the sum of floats.
    unsafe { S::cast_f(S::add_i(zero, S::splat_i(MAGIC))) }
}

/// h16((code - zero) * scale) of byte `j` of an operand. The difference and the multiplication are exact.
///
/// # Safety
/// [`Simd`]'s contract.
#[inline(always)]
pub unsafe fn weight<S: Simd>(operand: S::I, j: u32, magic_zero: S::F, scale: S::F) -> S::F {
    // SAFETY: Simd's contract.
    unsafe {
        let code = S::and_i(S::shr_i(operand, 8 * j), S::splat_i(0xff));
        let code = S::cast_f(S::or_i(code, S::splat_i(MAGIC)));
        S::round_half(S::mul_f(S::sub_f(code, magic_zero), scale))
    }
}

/// [`weight`] with one instruction less, for uses where the sign of a zero does not matter: `scaled_zero` is zero * scale, which is exact.
///
/// # Safety
/// [`Simd`]'s contract.
#[inline(always)]
pub unsafe fn weight_to_multiply<S: Simd>(
    operand: S::I,
    j: u32,
    scaled_zero: S::F,
    scale: S::F,
) -> S::F {
    // SAFETY: Simd's contract.
    unsafe {
        let code = S::and_i(S::shr_i(operand, 8 * j), S::splat_i(0xff));
        S::round_half(S::fms_f(S::to_f(code), scale, scaled_zero))
    }
}
