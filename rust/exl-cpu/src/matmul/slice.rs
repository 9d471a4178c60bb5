//! Parts of a repacked matrix: quarters of its rows and any of its columns.

use std::ops::Range;

use super::layout::{BLOCK, QUARTERS, TILE, quarter_start};
use super::matrix::{Codes, Floats, NO_FEATURE, QuantMatrix, Scales, Section, Storage};
use super::memory::Buffer;

/// Copy `range` of every `len` elements.
fn cut<T: Copy>(data: &Buffer<T>, len: usize, range: Range<usize>) -> Buffer<T> {
    let width = range.len();
    let mut out = Buffer::zeroed(data.len() / len.max(1) * width);
    for (out, data) in out
        .chunks_exact_mut(width.max(1))
        .zip(data.chunks_exact(len.max(1)))
    {
        out.copy_from_slice(&data[range.clone()]);
    }
    out
}

/// Gather columns of `[tile][rows][32]`; the last tile's columns of padding are zero.
fn gather<T: Copy>(data: &Buffer<T>, rows: usize, columns: &[u32]) -> Buffer<T> {
    let mut out = Buffer::zeroed(columns.len().div_ceil(TILE) * rows * TILE);
    for (to, &from) in columns.iter().enumerate() {
        let (from, to) = (place(from as usize, rows), place(to, rows));
        for row in 0..rows {
            out[to + row * TILE] = data[from + row * TILE];
        }
    }
    out
}

/// The place of a column's first row in `[tile][rows][32]`.
fn place(column: usize, rows: usize) -> usize {
    column / TILE * rows * TILE + column % TILE
}

/// Gather columns of `[tile][group][16]`, whose byte l holds column l in its low half and column 16 + l in its high half.
fn gather_nibbles(codes: &Buffer<u8>, groups: usize, columns: &[u32]) -> Buffer<u8> {
    const HALF: usize = TILE / 2;
    let at = |column: usize, group: usize| {
        let byte = (column / TILE * groups + group) * HALF + column % HALF;
        (byte, column % TILE / HALF * 4)
    };
    let mut out = Buffer::zeroed(columns.len().div_ceil(TILE) * groups * HALF);
    for (to, &from) in columns.iter().enumerate() {
        for group in 0..groups {
            let ((byte, shift), (out_byte, out_shift)) = (at(from as usize, group), at(to, group));
            out[out_byte] |= (codes[byte] >> shift & 15) << out_shift;
        }
    }
    out
}

impl QuantMatrix {
    /// The blocks of some quarters of K.
    ///
    /// # Panics
    /// If there are no such quarters.
    fn quarter_blocks(&self, quarters: &Range<usize>) -> Range<usize> {
        assert!(
            quarters.start <= quarters.end && quarters.end <= QUARTERS,
            "K has {QUARTERS} quarters"
        );
        let blocks = self.blocks();
        quarter_start(blocks, quarters.start)..quarter_start(blocks, quarters.end)
    }

    /// The input features of some quarters of K, in the order in which [`QuantMatrix::quarters`] takes them.
    ///
    /// # Panics
    /// If there are no such quarters.
    pub fn quarter_features(&self, quarters: Range<usize>) -> Vec<u32> {
        let blocks = self.quarter_blocks(&quarters);
        let source = &self.source[blocks.start * BLOCK..blocks.end * BLOCK];
        let features = source.iter().filter(|&&feature| feature != NO_FEATURE);
        features.copied().collect()
    }

    /// The rows of some quarters of K, without bias and prescale. The input has the features of
    /// [`QuantMatrix::quarter_features`]. The sums of single quarters, added in order, are those of the whole matrix.
    ///
    /// # Panics
    /// If there are no such quarters, or they have no blocks.
    #[must_use]
    pub fn quarters(&self, quarters: Range<usize>) -> Self {
        let blocks = self.quarter_blocks(&quarters);
        assert!(!blocks.is_empty(), "quarters without rows");
        let features = self.quarter_features(quarters);
        let mut number = vec![NO_FEATURE; self.in_features];
        for (i, &feature) in features.iter().enumerate() {
            number[feature as usize] = i as u32;
        }
        let source = self.source[blocks.start * BLOCK..blocks.end * BLOCK]
            .iter()
            .map(|&feature| match feature {
                NO_FEATURE => NO_FEATURE,
                feature => number[feature as usize],
            })
            .collect();
        let kept: Vec<Section> = self
            .sections
            .iter()
            .filter(|section| blocks.contains(&section.blocks.start))
            .cloned()
            .collect();
        let spans =
            kept.first().map_or(0, |s| s.spans.start)..kept.last().map_or(0, |s| s.spans.end);
        let sections = kept
            .iter()
            .map(|section| Section {
                blocks: section.blocks.start - blocks.start..section.blocks.end - blocks.start,
                spans: section.spans.start - spans.start..section.spans.end - spans.start,
            })
            .collect();
        let storage = match &self.storage {
            Storage::Codes(codes) => Storage::Codes(codes.cut(spans, blocks.start)),
            Storage::Floats(floats) => {
                let (len, range) = (
                    self.blocks() * BLOCK * TILE,
                    blocks.start * BLOCK * TILE..blocks.end * BLOCK * TILE,
                );
                Storage::Floats(match floats {
                    Floats::F16(data) => Floats::F16(cut(data, len, range)),
                    Floats::BF16(data) => Floats::BF16(cut(data, len, range)),
                    Floats::F32(data) => Floats::F32(cut(data, len, range)),
                })
            }
        };
        Self {
            in_features: features.len(),
            out_features: self.out_features,
            source,
            storage,
            sections,
            bias: None,
            prescale: 1.0,
            compute: self.compute,
            bits_per_weight: self.bits_per_weight,
        }
    }

    /// The given columns, in this order.
    ///
    /// # Panics
    /// If there are none, or one is not in the matrix.
    #[must_use]
    pub fn columns(&self, columns: &[u32]) -> Self {
        assert!(!columns.is_empty(), "a matrix without columns");
        assert!(
            columns.iter().all(|&c| (c as usize) < self.out_features),
            "a column outside of the matrix"
        );
        let storage = match &self.storage {
            Storage::Codes(codes) => Storage::Codes(codes.gather(columns)),
            Storage::Floats(floats) => {
                let rows = self.source.len();
                Storage::Floats(match floats {
                    Floats::F16(data) => Floats::F16(gather(data, rows, columns)),
                    Floats::BF16(data) => Floats::BF16(gather(data, rows, columns)),
                    Floats::F32(data) => Floats::F32(gather(data, rows, columns)),
                })
            }
        };
        let bias = self.bias.as_ref();
        Self {
            in_features: self.in_features,
            out_features: columns.len(),
            source: self.source.clone(),
            storage,
            sections: self.sections.clone(),
            bias: bias.map(|bias| columns.iter().map(|&c| bias[c as usize]).collect()),
            prescale: self.prescale,
            compute: self.compute,
            bits_per_weight: self.bits_per_weight,
        }
    }
}

impl Codes {
    /// These spans of every tile; they begin with block `first_block`.
    fn cut(&self, spans: Range<usize>, first_block: usize) -> Self {
        let spans = &self.spans[spans];
        let (first, last) = (spans[0], spans[spans.len() - 1]);
        let words = first.word..last.word + last.blocks * last.bits as usize * TILE;
        let groups = first.group..last.group + 1;
        let tile_words = words.len();
        let scaled = |width: usize| groups.start * width..groups.end * width;
        let scales = match &self.scales {
            Scales::Exl2 { codes, tables } => Scales::Exl2 {
                codes: cut(codes, self.groups * TILE / 2, scaled(TILE / 2)),
                tables: cut(tables, self.groups, groups.clone()),
            },
            Scales::Gptq {
                scales,
                zeros,
                zero_offset,
            } => Scales::Gptq {
                scales: cut(scales, self.groups * TILE, scaled(TILE)),
                zeros: cut(zeros, self.groups * TILE, scaled(TILE)),
                zero_offset: *zero_offset,
            },
        };
        let mut moved = spans.to_vec();
        for span in &mut moved {
            span.first_block -= first_block;
            span.word -= words.start;
            span.group -= groups.start;
        }
        Self {
            spans: moved,
            groups: groups.len(),
            tile_words,
            words: cut(&self.words, self.tile_words, words),
            scales,
        }
    }

    /// The given columns of every row.
    fn gather(&self, columns: &[u32]) -> Self {
        let groups = self.groups;
        let scales = match &self.scales {
            Scales::Exl2 { codes, tables } => Scales::Exl2 {
                codes: gather_nibbles(codes, groups, columns),
                tables: cut(tables, groups, 0..groups),
            },
            Scales::Gptq {
                scales,
                zeros,
                zero_offset,
            } => Scales::Gptq {
                scales: gather(scales, groups, columns),
                zeros: gather(zeros, groups, columns),
                zero_offset: *zero_offset,
            },
        };
        Self {
            spans: self.spans.clone(),
            groups,
            tile_words: self.tile_words,
            words: gather(&self.words, self.tile_words / TILE, columns),
            scales,
        }
    }
}
