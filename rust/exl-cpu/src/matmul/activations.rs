//! Activations packed for the tiles: gathered through the permutation, and quantized for the int8 path.
//!
//! Rows are packed in blocks of [`ROWS`]. Inside a row block the order is `[block of 32 positions][row]`, so a tile reads its blocks as one
//! stream.

use super::layout::BLOCK;
use super::matrix::NO_FEATURE;

/// Rows that share one pass over a tile.
pub const ROWS: usize = 64;

/// 32 activations of one row as int8: x ~ scale * q.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Int8Block {
    pub q: [i8; BLOCK],
    /// max |x| / 127. NaN if a value is not finite, so that the whole output row becomes NaN.
    pub scale: f32,
    /// Sum of `q`.
    pub sum: i32,
}

impl Int8Block {
    pub const ZERO: Self = Self {
        q: [0; BLOCK],
        scale: 0.0,
        sum: 0,
    };
}

/// A block with a smaller maximum counts as zero: its reciprocal would overflow, and it could not affect any output.
const TINY: f32 = 1e-36;

/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, on every processor.
const ROUND: f32 = 12_582_912.0;

/// Quantize 32 values. The rounding is to nearest even of x * (127 / max).
#[inline(always)]
pub fn quantize(x: &[f32; BLOCK]) -> Int8Block {
    let mut largest = 0u32;
    for value in x {
        largest = largest.max(value.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    let mut out = Int8Block::ZERO;
    if !largest.is_finite() {
        out.scale = f32::NAN;
        return out;
    }
    if largest < TINY {
        return out;
    }
    out.scale = largest / 127.0;
    let inverse = 127.0 / largest;
    let mut whole = [0i32; BLOCK];
    for (whole, value) in whole.iter_mut().zip(x) {
        *whole = (value * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
    }
    for (q, whole) in out.q.iter_mut().zip(&whole) {
        *q = *whole as i8;
    }
    out.sum = whole.iter().sum();
    out
}

/// Gather one block of one row.
///
/// # Safety
/// Every entry of `source` is below `x.len()` or [`NO_FEATURE`].
#[inline(always)]
unsafe fn gather(x: &[f32], source: &[u32; BLOCK], out: &mut [f32; BLOCK]) {
    for (value, &feature) in out.iter_mut().zip(source) {
        // Padding exists only in blocks of GPTQ groups and float matrices; the branch is well predicted.
        *value = if feature == NO_FEATURE {
            0.0
        } else {
            // SAFETY: the caller's contract.
            unsafe { *x.get_unchecked(feature as usize) }
        };
    }
}

/// The start of a row block in `[rows of all blocks before][..]`, and its number of rows.
pub fn row_block(index: usize, rows: usize) -> (usize, usize) {
    let first = index * ROWS;
    (first, ROWS.min(rows - first))
}

/// Indices of consecutive rows from the first on, to pack adjacent rows.
pub static ADJACENT: [u32; ROWS] = {
    let mut rows = [0; ROWS];
    let mut row = 0;
    while row < ROWS {
        rows[row] = row as u32;
        row += 1;
    }
    rows
};

/// Pack one row block for the int8 path: the rows `rows` of `x` `[.., k]` into `out` `[blocks][rows]`.
///
/// # Safety
/// Every entry of `source` is below `k` or [`NO_FEATURE`].
#[inline(always)]
pub unsafe fn pack_int8(x: &[f32], k: usize, rows: &[u32], source: &[u32], out: &mut [Int8Block]) {
    let mut values = [0.0; BLOCK];
    for (row, &number) in rows.iter().enumerate() {
        let x = &x[number as usize * k..][..k];
        for (block, source) in source.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: the caller's contract, and a row is `k` long.
            unsafe { gather(x, source, &mut values) };
            out[block * rows.len() + row] = quantize(&values);
        }
    }
}

/// Pack one row block for the exact path: the rows `rows` of `x` `[.., k]` into `out` `[blocks][rows][32]`.
///
/// # Safety
/// As for [`pack_int8`].
#[inline(always)]
pub unsafe fn pack_exact(
    x: &[f32],
    k: usize,
    rows: &[u32],
    source: &[u32],
    out: &mut [[f32; BLOCK]],
) {
    for (row, &number) in rows.iter().enumerate() {
        let x = &x[number as usize * k..][..k];
        for (block, source) in source.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: as above.
            unsafe { gather(x, source, &mut out[block * rows.len() + row]) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_values_are_within_half_a_step() {
        let x: [f32; BLOCK] = std::array::from_fn(|i| ((i * 37 + 11) % 64) as f32 - 31.5);
        let block = quantize(&x);
        for (q, x) in block.q.iter().zip(&x) {
            assert!((*q as f32 * block.scale - x).abs() <= block.scale * 0.5001);
        }
        assert_eq!(block.sum, block.q.iter().map(|&q| q as i32).sum::<i32>());
        assert!(block.q.iter().any(|q| q.unsigned_abs() == 127));
    }

    #[test]
    fn zeros_tiny_values_and_values_that_are_not_finite() {
        assert_eq!(quantize(&[0.0; BLOCK]).scale, 0.0);
        assert_eq!(quantize(&[1e-40; BLOCK]).q, [0; BLOCK]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; BLOCK];
            x[7] = bad;
            assert!(quantize(&x).scale.is_nan());
        }
        let big = quantize(&[f32::MAX; BLOCK]);
        assert_eq!(big.q, [127; BLOCK]);
    }
}
