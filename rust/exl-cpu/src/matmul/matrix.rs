//! The repacked matrix and its parts.

use std::ops::Range;

use super::layout::{BLOCK, QUARTERS, TILE, quarter_start};
use super::memory::Buffer;

/// The arithmetic of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// FP32 activations times the exact half weights, FP32 accumulation: the oracle.
    Exact,
    /// Activations in int8 with one FP32 scale per 32 values, exact integer dot products, FP32 accumulation of the blocks.
    Int8,
}

/// One group's blocks in a tile, or those of them that are in one [`Section`].
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub bits: u32,
    pub group: usize,
    pub first_block: usize,
    pub blocks: usize,
    /// First word in the tile.
    pub word: usize,
}

/// Consecutive blocks of K that are summed from zero. The first section is summed in the outputs; a later one is summed in a buffer
/// `partial`, which is added to the outputs at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    pub blocks: Range<usize>,
    /// Their spans; empty for floats.
    pub spans: Range<usize>,
}

/// The quarters of K that are not empty, and `spans` cut at their borders.
pub fn quarters(blocks: usize, spans: &[Span]) -> (Vec<Section>, Vec<Span>) {
    let (mut sections, mut cut) = (Vec::new(), Vec::new());
    for quarter in 0..QUARTERS {
        let (first, last) = (
            quarter_start(blocks, quarter),
            quarter_start(blocks, quarter + 1),
        );
        let before = cut.len();
        for span in spans {
            let begin = span.first_block.max(first);
            let end = (span.first_block + span.blocks).min(last);
            if begin < end {
                let skipped = begin - span.first_block;
                cut.push(Span {
                    first_block: begin,
                    blocks: end - begin,
                    word: span.word + skipped * span.bits as usize * TILE,
                    ..*span
                });
            }
        }
        if first < last {
            sections.push(Section {
                blocks: first..last,
                spans: before..cut.len(),
            });
        }
    }
    (sections, cut)
}

/// Scales (and zero points) of the groups, tile by tile.
#[derive(Debug)]
pub enum Scales {
    /// 4-bit codes `[tile][group][16]` (byte l: column l low, column 16 + l high) into a table of exact half scales per group.
    Exl2 {
        codes: Buffer<u8>,
        tables: Buffer<[f32; 16]>,
    },
    /// Half scales `[tile][group][32]`, stored zero points likewise; zero point = stored + `zero_offset`.
    Gptq {
        scales: Buffer<u16>,
        zeros: Buffer<u8>,
        zero_offset: u32,
    },
}

impl Scales {
    pub fn bytes(&self) -> usize {
        match self {
            Self::Exl2 { codes, tables } => codes.bytes() + tables.bytes(),
            Self::Gptq { scales, zeros, .. } => scales.bytes() + zeros.bytes(),
        }
    }
}

/// Quantized codes in tiles.
#[derive(Debug)]
pub struct Codes {
    pub spans: Vec<Span>,
    pub groups: usize,
    pub tile_words: usize,
    pub words: Buffer<u32>,
    pub scales: Scales,
}

/// Unquantized weights in tiles, `[tile][row][32]`.
#[derive(Debug)]
pub enum Floats {
    /// f16 bits.
    F16(Buffer<u16>),
    /// bfloat16 bits.
    BF16(Buffer<u16>),
    F32(Buffer<f32>),
}

impl Floats {
    pub fn bytes(&self) -> usize {
        match self {
            Self::F16(data) | Self::BF16(data) => data.bytes(),
            Self::F32(data) => data.bytes(),
        }
    }
}

/// The weights of a matrix.
#[derive(Debug)]
pub enum Storage {
    Codes(Codes),
    Floats(Floats),
}

/// y = (x @ W + bias) * prescale, W `[K, N]`.
#[derive(Debug)]
pub struct QuantMatrix {
    pub(super) in_features: usize,
    pub(super) out_features: usize,
    /// Input feature at each packed position, [`NO_FEATURE`] for padding; the length is a multiple of 32.
    pub(super) source: Vec<u32>,
    pub(super) storage: Storage,
    /// All blocks in order; at least one section.
    pub(super) sections: Vec<Section>,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) prescale: f32,
    pub(super) compute: Compute,
    pub(super) bits_per_weight: f64,
}

/// A packed position that holds no feature.
pub const NO_FEATURE: u32 = u32::MAX;

impl QuantMatrix {
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bits of the stored form (codes, scales, groups, permutation) per weight of the file.
    pub fn bits_per_weight(&self) -> f64 {
        self.bits_per_weight
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        let weights = match &self.storage {
            Storage::Codes(codes) => codes.words.bytes() + codes.scales.bytes(),
            Storage::Floats(floats) => floats.bytes(),
        };
        weights + 4 * self.source.len() + 4 * self.bias.as_ref().map_or(0, Vec::len)
    }

    pub fn compute(&self) -> Compute {
        self.compute
    }

    /// Tiles of 32 columns; the last one may be partly padding.
    pub fn tiles(&self) -> usize {
        self.out_features.div_ceil(TILE)
    }

    /// Blocks of 32 packed rows.
    pub fn blocks(&self) -> usize {
        self.source.len() / BLOCK
    }
}
