//! From tile words back to codes, scales and weights.

use super::layout::TILE;
use super::matrix::{Scales, Span};
use super::simd::{LANES, Simd};

/// The eight operands of vector `v` (columns 16 v .. 16 v + 16) of a block: four codes, one a byte, in each lane.
///
/// # Safety
/// [`Simd`]'s contract; `block` is valid for `BITS * 32` words.
#[inline(always)]
pub unsafe fn operands<S: Simd, const BITS: u32>(block: *const u32, v: usize) -> [S::I; 8] {
    // SAFETY: word indices stay below BITS.
    unsafe {
        let word = |w: usize| S::load_i(block.add(w * TILE + v * LANES));
        match BITS {
            2 => {
                let mask = S::splat_i(0x0303_0303);
                let w = [word(0), word(1)];
                std::array::from_fn(|i| S::and_i(S::shr_i(w[i / 4], 2 * (i as u32 % 4)), mask))
            }
            3 => {
                let (low, high) = (S::splat_i(0x0303_0303), S::splat_i(0x0404_0404));
                let w = [word(0), word(1)];
                let plane = word(2);
                std::array::from_fn(|i| {
                    let bits = S::and_i(S::shr_i(w[i / 4], 2 * (i as u32 % 4)), low);
                    S::or_i(bits, S::and_i(shift_to::<S>(plane, i as u32, 2), high))
                })
            }
            4 => nibbles::<S>([word(0), word(1), word(2), word(3)]),
            5 => {
                let high = S::splat_i(0x1010_1010);
                let low = nibbles::<S>([word(0), word(1), word(2), word(3)]);
                let plane = word(4);
                std::array::from_fn(|i| {
                    S::or_i(low[i], S::and_i(shift_to::<S>(plane, i as u32, 4), high))
                })
            }
            6 => {
                let high = S::splat_i(0x3030_3030);
                let low = nibbles::<S>([word(0), word(1), word(2), word(3)]);
                let planes = [word(4), word(5)];
                std::array::from_fn(|i| {
                    let bits = shift_to::<S>(planes[i / 4], 2 * (i as u32 % 4), 4);
                    S::or_i(low[i], S::and_i(bits, high))
                })
            }
            _ => std::array::from_fn(word),
        }
    }
}

#[inline(always)]
unsafe fn nibbles<S: Simd>(words: [S::I; 4]) -> [S::I; 8] {
    // SAFETY: Simd's contract.
    unsafe {
        let mask = S::splat_i(0x0f0f_0f0f);
        std::array::from_fn(|i| S::and_i(S::shr_i(words[i / 2], 4 * (i as u32 % 2)), mask))
    }
}

/// Moves bit `from` to bit `to` (other bits land anywhere).
#[inline(always)]
unsafe fn shift_to<S: Simd>(x: S::I, from: u32, to: u32) -> S::I {
    // SAFETY: Simd's contract.
    unsafe {
        if from >= to {
            S::shr_i(x, from - to)
        } else {
            S::shl_i(x, to - from)
        }
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

/// 2^23: a code or-ed into its low bits is 2^23 + code as float32.
const MAGIC: u32 = 0x4b00_0000;

/// 2^23 + zero, what [`weight`] subtracts.
///
/// # Safety
/// [`Simd`]'s contract.
#[inline(always)]
pub unsafe fn magic_zero<S: Simd>(zero: S::I) -> S::F {
    // SAFETY: Simd's contract; zero <= 256, so the sum of integers is the sum of floats.
    unsafe { S::cast_f(S::add_i(zero, S::splat_i(MAGIC))) }
}

/// h16((code - zero) * scale) of byte `j` of an operand (formats.md 2.4.5, 3.2); the difference and the product are exact.
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
