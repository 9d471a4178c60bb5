//! The tile layout: the in-memory form of a quantized matrix.
//!
//! A *tile* is 32 columns over all rows; a *block* is 32 rows of a tile, all of one width. A block of width b is b words a column, with
//! words of one index side by side (`[b][32]`). So a tile is one contiguous stream of as many bits as the file has.
//!
//! Inside a block the codes are in *operand order*: position p = 4 i + j is byte j of operand i, the 32-bit lane of a byte-wise dot
//! product. Codes of 2, 4 and 8 bits keep the file's words. Codes of 3, 5 and 6 bits are cut into planes (3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2),
//! so that shifts and masks alone make operands.

/// Columns of a tile.
pub const TILE: usize = 32;
/// Rows of a block.
pub const BLOCK: usize = 32;
/// Consecutive parts of K that are summed separately: K can be cut between them without changing a result.
pub const QUARTERS: usize = 4;

/// The first of `blocks` blocks that is in quarter `quarter`; the number of blocks for [`QUARTERS`].
pub const fn quarter_start(blocks: usize, quarter: usize) -> usize {
    blocks * quarter / QUARTERS
}

/// The row of a block at operand position `p` (0..32).
pub const fn row_at(bits: u32, p: usize) -> usize {
    let (i, j) = (p / 4, p % 4);
    match bits {
        // Operand 4 v + t of a word v of sixteen 2-bit fields: bits 8 j + 2 t.
        2 => 16 * (i / 4) + 4 * j + i % 4,
        // Operand 2 w + h of a word w of eight nibbles: bits 8 j + 4 h.
        4 => 8 * (i / 2) + 2 * j + i % 2,
        _ => p,
    }
}

/// The planes of a width from low bits to high: (bits of the plane, its shift inside the code).
pub const fn planes(bits: u32) -> &'static [(u32, u32)] {
    match bits {
        2 => &[(2, 0)],
        3 => &[(2, 0), (1, 2)],
        4 => &[(4, 0)],
        5 => &[(4, 0), (1, 4)],
        6 => &[(4, 0), (2, 4)],
        _ => &[(8, 0)],
    }
}

/// Pack one block from codes in operand order, `codes[p][column]`.
///
/// A plane of q-bit fields holds operand i in word i / (8 / q), field i % (8 / q) of every byte.
#[inline(always)]
pub fn pack_block(bits: u32, codes: &[[u8; TILE]; BLOCK], out: &mut [u32]) {
    let mut base = 0;
    for &(width, shift) in planes(bits) {
        let per_byte = 8 / width as usize;
        let mask = (1u32 << width) - 1;
        for word in 0..width as usize {
            let mut lanes = [0u32; TILE];
            for field in 0..per_byte {
                for j in 0..4 {
                    let codes = &codes[4 * (word * per_byte + field) + j];
                    let at = 8 * j as u32 + width * field as u32;
                    for (lane, &code) in lanes.iter_mut().zip(codes) {
                        *lane |= ((code as u32 >> shift) & mask) << at;
                    }
                }
            }
            out[(base + word) * TILE..][..TILE].copy_from_slice(&lanes);
        }
        base += width as usize;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operand_order_is_a_permutation() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let mut rows: Vec<usize> = (0..BLOCK).map(|p| row_at(bits, p)).collect();
            rows.sort_unstable();
            assert_eq!(rows, (0..BLOCK).collect::<Vec<_>>(), "{bits} bits");
        }
    }

    /// This property allows 2-, 4- and 8-bit words to be copied unchanged.
    #[test]
    fn whole_byte_fractions_keep_the_file_words() {
        for bits in [2u32, 4, 8] {
            let code =
                |row: usize, column: usize| ((row * 7 + column * 3 + 1) & ((1 << bits) - 1)) as u8;
            let codes = std::array::from_fn(|p| std::array::from_fn(|c| code(row_at(bits, p), c)));
            let mut packed = vec![0; bits as usize * TILE];
            pack_block(bits, &codes, &mut packed);
            for column in 0..TILE {
                for row in 0..BLOCK {
                    let bit = row * bits as usize;
                    let word = packed[(bit / 32) * TILE + column];
                    assert_eq!(
                        (word >> (bit % 32)) as u8 & (((1u32 << bits) - 1) as u8),
                        code(row, column)
                    );
                }
            }
        }
    }
}
