//! Weights in the order that tensor cores read.
//!
//! * A **tile** is 16 output features. The image is tile after tile, all with the same size and inner order.
//! * A **slice** is 32 rows of K of one quantization group, stored with one bit width; `plan::ordered` gives their order. Few matrices have
//!   padding rows, which have no input feature and are multiplied by an activation of zero.
//! * A **chunk** is two slices (64 rows) of a tile: `128 * bits` bytes. A **unit** is up to four chunks (256 rows) and their scales, which
//!   one warp processes at a time.
//! * In a chunk, lane L = 4 g + t holds 16 **fields** of two codes each. Field 4 j + r is register r of matrix instruction j
//!   (m16n8k16, weights as the 16-row operand): feature g, or g + 8 for odd r; rows 32 (j / 2) + 8 t + 4 (j % 2) + 2 (r / 2) and the
//!   next one, in the low and the high 16 bits of the same word. [`pieces`] gives the place of a field's bits.
//! * Words of a lane: first whole groups of four (16 bytes a lane, lane after lane), then a pair, then a single one.
//! * The unit's scales follow the chunks, one **entry** for each `entry_rows` rows; see [`Scales`].
//!
//! The device code that reads this layout is `kernels/linear/tile_layout.cuh`; [`Layout::code`] is its reference implementation.

mod pack;
mod plan;

use crate::abi::assert_constants;
use crate::rows::FEW_ROWS;
use half::f16;

pub use pack::Codes;
pub use plan::{Problem, has_fine_scales};

/// Output features in a tile.
pub const TILE: usize = 16;
/// Activation rows that a matrix instruction multiplies (m16n8k16): its columns.
pub const COLUMN_TILE: usize = 8;
/// Rows of K in a slice, chunk and unit.
pub const SLICE_ROWS: usize = 32;
pub const CHUNK_ROWS: usize = 64;
pub const UNIT_ROWS: usize = 256;
pub const CHUNKS_PER_UNIT: usize = UNIT_ROWS / CHUNK_ROWS;

assert_constants!(tile_layout, {
    TILE == TILE,
    UNIT_ROWS == UNIT_ROWS,
    ONE_SCALE_A_HALF == ONE_SCALE_A_HALF,
    WIDTHS_BITS == WIDTHS_BITS,
});
/// A bit of a unit's widths where entries have 32 rows: the entries of each half of the unit are of one group. Such a unit is multiplied as
/// if entries had 128 rows.
pub const ONE_SCALE_A_HALF: u32 = 1 << 16;
/// Bits of a unit's widths.
pub const WIDTHS_BITS: u32 = 17;

const _: () = assert!(
    FEW_ROWS == COLUMN_TILE,
    "the kernels for few rows multiply one column tile"
);

/// How a unit's scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// EXL2: byte `[g][entry]` = scale code of feature g, and of g + 8 in the high four bits. `maxima` has the entries' maxima.
    Exl2,
    /// GPTQ: eight bytes `[entry][g]` = the halves scale(g), scale(g + 8), zero(g), zero(g + 8).
    Gptq,
}

impl Scales {
    fn bytes_per_entry(self) -> usize {
        match self {
            Self::Exl2 => 8,
            Self::Gptq => 64,
        }
    }
}

/// Up to 256 rows: their offset in a tile and the widths of their chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// First byte within a tile.
    pub offset: u32,
    /// Bits of chunk c in bits `[4 c, 4 c + 4)`; 0 for a missing chunk. Perhaps [`ONE_SCALE_A_HALF`].
    pub widths: u32,
}

impl Unit {
    fn chunk_bits(self) -> impl Iterator<Item = usize> {
        (0..CHUNKS_PER_UNIT).map(move |c| (self.widths >> (4 * c) & 15) as usize)
    }
}

/// Places of all data of one matrix; [`Layout::pack`] writes the codes.
#[derive(Clone, Debug)]
pub struct Layout {
    pub scales: Scales,
    /// Rows of K that share a scale entry: 32 or 128.
    pub entry_rows: usize,
    /// N of the matrix; the last tile may exceed it.
    pub out_features: usize,
    /// K of the matrix.
    pub in_features: usize,
    /// One more than there are units: the last one holds a tile's size and no chunks.
    pub units: Vec<Unit>,
    /// Input feature of each row, -1 for a padding row; the length is a multiple of 64.
    pub features: Vec<i32>,
    /// Row of the source (packed row in EXL2, input feature in GPTQ) of each row, -1 for a padding row.
    source_rows: Vec<i32>,
    /// Quantization group of each entry.
    groups: Vec<u32>,
    /// EXL2: the group maximum of each entry.
    pub maxima: Vec<f16>,
}

impl Layout {
    pub fn tiles(&self) -> usize {
        self.out_features.div_ceil(TILE)
    }

    pub fn tile_bytes(&self) -> usize {
        self.units.last().map_or(0, |end| end.offset as usize)
    }

    /// Size of the packed image.
    pub fn bytes(&self) -> usize {
        self.tiles() * self.tile_bytes()
    }

    /// Rows of K, including padding.
    pub fn rows(&self) -> usize {
        self.features.len()
    }

    /// Row of each input feature: the inverse of `features`.
    pub fn row_of_feature(&self) -> Vec<i32> {
        let mut rows = vec![-1; self.in_features];
        for (row, &feature) in self.features.iter().enumerate() {
            if feature >= 0 {
                rows[feature as usize] = row as i32;
            }
        }
        rows
    }

    /// Whether each row is the input feature of the same index: activations then need no reordering.
    pub fn is_ordered(&self) -> bool {
        self.features.len() == self.in_features
            && self
                .features
                .iter()
                .enumerate()
                .all(|(row, &feature)| feature == row as i32)
    }

    fn entries_per_unit(&self) -> usize {
        UNIT_ROWS / self.entry_rows
    }

    /// First byte of a chunk within a tile, and its bits.
    fn chunk(&self, chunk: usize) -> (usize, usize) {
        let unit = self.units[chunk / CHUNKS_PER_UNIT];
        let before: usize = unit.chunk_bits().take(chunk % CHUNKS_PER_UNIT).sum();
        let bits = unit.chunk_bits().nth(chunk % CHUNKS_PER_UNIT).unwrap_or(0);
        (unit.offset as usize + 128 * before, bits)
    }

    /// First byte of a unit's scales within a tile.
    fn scales_offset(&self, unit: usize) -> usize {
        self.units[unit].offset as usize + 128 * self.units[unit].chunk_bits().sum::<usize>()
    }

    /// The code at `row` (of this layout) and feature `n`, read from `image`: the reference implementation of the device code.
    pub fn code(&self, image: &[u8], row: usize, n: usize) -> u32 {
        let (offset, bits) = self.chunk(row / CHUNK_ROWS);
        let at = Place::of(row % CHUNK_ROWS, n % TILE);
        let start = n / TILE * self.tile_bytes() + offset;
        let words: Vec<u32> = (0..bits)
            .map(|w| {
                let byte = start + word_offset(bits, at.lane, w);
                u32::from_le_bytes([
                    image[byte],
                    image[byte + 1],
                    image[byte + 2],
                    image[byte + 3],
                ])
            })
            .collect();
        pieces(bits, at.field)
            .map(|p| (words[p.word] >> (p.bit + 16 * at.half) & ((1 << p.count) - 1)) << p.shift)
            .sum()
    }
}

/// Place of a code in a chunk: lane, field and half of the word.
#[derive(Clone, Copy, Debug)]
struct Place {
    lane: usize,
    field: usize,
    half: usize,
}

impl Place {
    fn of(row: usize, feature: usize) -> Self {
        let (slice, within) = (row / 32, row % 32);
        let (t, within) = (within / 8, within % 8);
        let instruction = 2 * slice + within / 4;
        let register = 2 * (within % 4 / 2) + feature / 8;
        Self {
            lane: 4 * (feature % 8) + t,
            field: 4 * instruction + register,
            half: within % 2,
        }
    }
}

/// A run of a code's bits: `count` bits from `shift` on, stored at `bit` of the 16-bit halves of word `word`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub word: usize,
    pub bit: usize,
    pub count: usize,
    pub shift: usize,
}

/// Places of the bits of `field` (0..16) in a lane's `bits` words. Field 4 J + R is register R of matrix instruction J. The fields of one
/// instruction that belong to the same feature are at the same bit, or at bits that one shift of a word brings there (see `Field` in
/// `kernels/linear/tile_layout.cuh`). Codes that do not fit into the halves of the words are split over the spare top bits of these words.
pub fn pieces(bits: usize, field: usize) -> impl Iterator<Item = Piece> {
    let (instruction, register) = (field / 4, field % 4);
    let (upper, second) = (register % 2, register / 2);
    let slot = 2 * instruction + second;
    let whole = |word: usize, bit: usize| {
        vec![Piece {
            word,
            bit,
            count: bits,
            shift: 0,
        }]
    };
    let spare = |i: usize| Piece {
        word: i,
        bit: 15,
        count: 1,
        shift: i,
    };
    let list: Vec<Piece> = match bits {
        2 => whole(
            instruction / 2,
            4 * (instruction % 2) + 2 * upper + 8 * second,
        ),
        3 if field == 15 => (0..bits).map(spare).collect(),
        3 if instruction < 3 => whole(instruction, 3 * upper + 9 * second),
        3 => whole(register, 6),
        4 => whole(instruction, 4 * upper + 8 * second),
        5 if field == 11 => (0..bits).map(spare).collect(),
        5 if instruction == 3 => whole(1 + register, 10),
        5 if slot == 5 => whole(0, 10),
        5 => whole(slot, 5 * upper),
        6 if field >= 12 => vec![
            Piece {
                word: field - 12,
                bit: 12,
                count: 4,
                shift: 0,
            },
            Piece {
                word: 4 + (field - 12) / 2,
                bit: 12 + 2 * (field % 2),
                count: 2,
                shift: 4,
            },
        ],
        _ => whole(field / 2, bits * upper),
    };
    list.into_iter()
}

/// Byte of word `word` of lane `lane` in a chunk.
fn word_offset(bits: usize, lane: usize, word: usize) -> usize {
    let fours = bits / 4;
    if word < 4 * fours {
        return word / 4 * 512 + lane * 16 + word % 4 * 4;
    }
    let pair = bits & 2;
    let rest = word - 4 * fours;
    if rest < pair {
        return fours * 512 + lane * 8 + rest * 4;
    }
    fours * 512 + pair * 128 + lane * 4
}

#[cfg(test)]
mod tests;
