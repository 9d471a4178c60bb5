//! The packing rule of both formats: codes are a little-endian bit stream over 32-bit words.
//!
//! Along the columns of a matrix of words (`q_weight`, `qweight`), the stream of column n is words `[0][n], [1][n], ...`. Along a row
//! (`q_scale`, `qzeros`), it is the row's words from left to right.

/// Place of the first bit of code `index` of a stream: word and bit.
#[inline(always)]
pub fn position(index: usize, bits: u32) -> (usize, u32) {
    let bit = index * bits as usize;
    (bit >> 5, (bit & 31) as u32)
}

/// The largest code.
#[inline(always)]
pub fn mask(bits: u32) -> u32 {
    (1 << bits) - 1
}

/// Code of row `row` and column `column` in words `[rows, n]`.
#[inline(always)]
pub fn column_code(words: &[i32], n: usize, row: usize, column: usize, bits: u32) -> u32 {
    let (word, shift) = position(row, bits);
    let low = words[word * n + column] as u32 >> shift;
    let code = if shift + bits > 32 {
        low | (words[(word + 1) * n + column] as u32) << (32 - shift)
    } else {
        low
    };
    code & mask(bits)
}

/// Codes of row `row` in words `[rows, n]`, all columns.
pub fn unpack_row(words: &[i32], row: usize, bits: u32, out: &mut [u8]) {
    unpack_columns(words, out.len(), row, bits, 0, out);
}

/// Codes of row `row` in words `[rows, n]`, columns `begin..begin + out.len()`.
#[inline(always)] // compiled for the instruction set of its caller
pub fn unpack_columns(
    words: &[i32],
    n: usize,
    row: usize,
    bits: u32,
    begin: usize,
    out: &mut [u8],
) {
    let (word, shift) = position(row, bits);
    let mask = mask(bits) as u8;
    let low = &words[word * n + begin..][..out.len()];
    if shift + bits > 32 {
        let high = &words[(word + 1) * n + begin..][..out.len()];
        for ((code, &l), &h) in out.iter_mut().zip(low).zip(high) {
            *code = ((l as u32 >> shift) | ((h as u32) << (32 - shift))) as u8 & mask;
        }
    } else {
        for (code, &l) in out.iter_mut().zip(low) {
            *code = (l as u32 >> shift) as u8 & mask;
        }
    }
}

/// Put the codes of row `row` into words `[rows, n]` that are zero there. Codes must fit `bits`.
pub fn pack_row(codes: &[u8], row: usize, bits: u32, words: &mut [i32]) {
    let n = codes.len();
    let (word, shift) = position(row, bits);
    let mask = mask(bits);
    for (w, &code) in words[word * n..][..n].iter_mut().zip(codes) {
        *w |= ((code as u32 & mask) << shift) as i32;
    }
    if shift + bits > 32 {
        for (w, &code) in words[(word + 1) * n..][..n].iter_mut().zip(codes) {
            *w |= ((code as u32 & mask) >> (32 - shift)) as i32;
        }
    }
}

/// Code `index` of a stream that runs along one row of words.
#[inline(always)]
pub fn stream_code(words: &[i32], index: usize, bits: u32) -> u32 {
    column_code(words, 1, index, 0, bits)
}

/// Put `codes` into the zeroed words of one row.
pub fn pack_stream(codes: &[u8], bits: u32, words: &mut [i32]) {
    for (index, code) in codes.iter().enumerate() {
        pack_row(std::slice::from_ref(code), index, bits, words);
    }
}
