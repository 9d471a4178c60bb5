//! Repacking from file order into tiles.

use exl_format::bits;
use exl_format::exl2::Exl2View;
use exl_format::gptq::{GptqView, Zeros};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::layout::{BLOCK, TILE, pack_block, row_at};
use super::matrix::{
    Codes, Compute, Floats, NO_FEATURE, QuantMatrix, Scales, Span, Storage, quarters,
};
use super::memory::{Buffer, Shared};
use crate::pool;

/// Tiles that one task repacks: wide enough that it reads the file's rows in pieces of a kilobyte.
const TILES_PER_TASK: usize = 8;

/// Epilogue of a matrix's matmul.
#[derive(Debug, Clone)]
pub struct Epilogue {
    /// `[N]`, added to the result.
    pub bias: Option<Vec<f32>>,
    /// Factor of result and bias.
    pub prescale: f32,
}

/// Cut packed rows into the blocks of consecutive groups of `(bits, rows)`; a group's last block may be partly empty.
fn cut_spans(groups: impl Iterator<Item = (u32, usize)>) -> (Vec<Span>, usize) {
    let (mut first_block, mut word) = (0, 0);
    let spans = groups
        .enumerate()
        .map(|(group, (bits, rows))| {
            let blocks = rows.div_ceil(BLOCK);
            let span = Span {
                bits,
                group,
                first_block,
                blocks,
                word,
            };
            first_block += blocks;
            word += blocks * bits as usize * TILE;
            span
        })
        .collect();
    (spans, word)
}

/// Run `fill(tile, words of the tile)` for all tiles on the pool.
fn fill_tiles<T: Copy + Send>(
    data: &mut Buffer<T>,
    tile_len: usize,
    tiles: usize,
    fill: impl Fn(std::ops::Range<usize>, &mut [T]) + Sync,
) {
    let shared = Shared::new(data);
    pool::run(tiles.div_ceil(TILES_PER_TASK), &|task| {
        let first = task * TILES_PER_TASK;
        let last = (first + TILES_PER_TASK).min(tiles);
        // SAFETY: tasks own disjoint tiles.
        let out = unsafe { shared.slice(first * tile_len, (last - first) * tile_len) };
        fill(first..last, out);
    });
}

/// One block whose 32 rows are in consecutive words of the file; `words` begins at the block's first word row.
#[inline(always)]
fn repack_consecutive(bits: u32, words: &[i32], n: usize, column: usize, out: &mut [u32]) {
    let width = TILE.min(n - column);
    let mut rows = [[0u32; TILE]; 8];
    for (w, row) in rows.iter_mut().enumerate().take(bits as usize) {
        for (lane, &word) in row.iter_mut().zip(&words[w * n + column..][..width]) {
            *lane = word as u32;
        }
    }
    if matches!(bits, 2 | 4 | 8) {
        for (out, row) in out.chunks_exact_mut(TILE).zip(&rows) {
            out.copy_from_slice(row);
        }
        return;
    }
    let mut codes = [[0u8; TILE]; BLOCK];
    let mask = bits::mask(bits);
    for (p, codes) in codes.iter_mut().enumerate() {
        let (word, shift) = bits::position(row_at(bits, p), bits);
        let low = &rows[word];
        if shift + bits > 32 {
            let high = &rows[word + 1];
            for lane in 0..TILE {
                codes[lane] = (((low[lane] >> shift) | (high[lane] << (32 - shift))) & mask) as u8;
            }
        } else {
            for lane in 0..TILE {
                codes[lane] = ((low[lane] >> shift) & mask) as u8;
            }
        }
    }
    pack_block(bits, &codes, out);
}

/// One block whose rows may be anywhere in the file; `rows[r]` is the file row of block row r.
#[inline(always)]
fn repack_scattered(
    bits: u32,
    words: &[i32],
    n: usize,
    rows: &[Option<u32>],
    column: usize,
    out: &mut [u32],
) {
    let width = TILE.min(n - column);
    let mask = bits::mask(bits);
    let mut codes = [[0u8; TILE]; BLOCK];
    for (p, codes) in codes.iter_mut().enumerate() {
        let Some(Some(row)) = rows.get(row_at(bits, p)) else {
            continue;
        };
        let (word, shift) = bits::position(*row as usize, bits);
        let low = &words[word * n + column..][..width];
        if shift + bits > 32 {
            let high = &words[(word + 1) * n + column..][..width];
            for ((code, &low), &high) in codes.iter_mut().zip(low).zip(high) {
                *code = (((low as u32 >> shift) | ((high as u32) << (32 - shift))) & mask) as u8;
            }
        } else {
            for (code, &low) in codes.iter_mut().zip(low) {
                *code = ((low as u32 >> shift) & mask) as u8;
            }
        }
    }
    pack_block(bits, &codes, out);
}

#[inline(always)]
fn fill_exl2(
    view: &Exl2View<'_>,
    spans: &[Span],
    tile_words: usize,
    tiles: std::ops::Range<usize>,
    out: &mut [u32],
) {
    let n = view.out_features();
    for span in spans {
        let words = view.group_words(span.group);
        let bits = span.bits as usize;
        for b in 0..span.blocks {
            let words = &words[b * bits * n..];
            for (tile, out) in tiles.clone().zip(out.chunks_exact_mut(tile_words)) {
                let out = &mut out[span.word + b * bits * TILE..][..bits * TILE];
                repack_consecutive(span.bits, words, n, tile * TILE, out);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn fill_exl2_avx2(
    view: &Exl2View<'_>,
    spans: &[Span],
    tile_words: usize,
    tiles: std::ops::Range<usize>,
    out: &mut [u32],
) {
    fill_exl2(view, spans, tile_words, tiles, out);
}

fn exl2_scales(view: &Exl2View<'_>, tiles: usize) -> Scales {
    let groups = view.groups().len();
    let mut tables = Buffer::<[f32; 16]>::zeroed(groups);
    for (g, table) in tables.iter_mut().enumerate() {
        // h16((code + 1)^2 * smax); the multiplication is exact in float32.
        let smax = view.smax(g).to_f32();
        *table = std::array::from_fn(|code| {
            f16::from_f32(((code + 1) * (code + 1)) as f32 * smax).to_f32()
        });
    }
    let mut codes = Buffer::<u8>::zeroed(tiles * groups * TILE / 2);
    let n = view.out_features();
    fill_tiles(&mut codes, groups * TILE / 2, tiles, |tiles, out| {
        for (tile, out) in tiles.zip(out.chunks_exact_mut(groups * TILE / 2)) {
            for (g, out) in out.chunks_exact_mut(TILE / 2).enumerate() {
                let code = |column: usize| match tile * TILE + column {
                    column if column < n => view.scale_code(g, column) as u8,
                    _ => 0,
                };
                for (l, byte) in out.iter_mut().enumerate() {
                    *byte = code(l) | code(l + TILE / 2) << 4;
                }
            }
        }
    });
    Scales::Exl2 { codes, tables }
}

impl QuantMatrix {
    /// Repack an EXL2 matrix.
    pub fn from_exl2(view: &Exl2View<'_>, epilogue: Epilogue, compute: Compute) -> Self {
        let (k, n) = (view.in_features(), view.out_features());
        let tiles = n.div_ceil(TILE);
        let (spans, tile_words) = cut_spans(view.groups().iter().map(|g| (g.bits, g.rows.len())));
        let mut words = Buffer::<u32>::zeroed(tiles * tile_words);
        fill_tiles(&mut words, tile_words, tiles, |tiles, out| {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: just detected.
                unsafe { fill_exl2_avx2(view, &spans, tile_words, tiles, out) };
                return;
            }
            fill_exl2(view, &spans, tile_words, tiles, out);
        });
        let perm = view.perm();
        let source = view
            .groups()
            .iter()
            .flat_map(|g| g.rows.clone().map(|row| (g.bits, row)))
            .map(|(bits, row)| perm[row - row % BLOCK + row_at(bits, row % BLOCK)])
            .collect();
        let groups = view.groups().len();
        let bits = view.words().len() * 32 + groups * (48 + 4 * n) + 32 * k;
        let (sections, spans) = quarters(k.div_ceil(BLOCK), &spans);
        Self {
            in_features: k,
            out_features: n,
            source,
            storage: Storage::Codes(Codes {
                spans,
                groups,
                tile_words,
                words,
                scales: exl2_scales(view, tiles),
            }),
            sections,
            bias: epilogue.bias,
            prescale: epilogue.prescale,
            compute,
            bits_per_weight: bits as f64 / (k * n) as f64,
        }
    }

    /// Repack a GPTQ matrix: rows sorted by group (stably), each group padded to whole blocks.
    pub fn from_gptq(
        view: &GptqView<'_>,
        zeros: Zeros,
        epilogue: Epilogue,
        compute: Compute,
    ) -> Self {
        let (k, n, bits) = (view.in_features(), view.out_features(), view.bits());
        let (tiles, groups) = (n.div_ceil(TILE), view.num_groups());
        let mut members = vec![Vec::new(); groups];
        for (row, &group) in view.group_of().iter().enumerate() {
            members[group as usize].push(row as u32);
        }
        let (spans, tile_words) = cut_spans(members.iter().map(|rows| (bits, rows.len())));
        let mut rows: Vec<Option<u32>> = Vec::new();
        for members in &members {
            rows.extend(members.iter().map(|&row| Some(row)));
            rows.resize(rows.len().next_multiple_of(BLOCK), None);
        }
        let mut words = Buffer::<u32>::zeroed(tiles * tile_words);
        let block_words = bits as usize * TILE;
        fill_tiles(&mut words, tile_words, tiles, |tiles, out| {
            for (block, rows) in rows.chunks_exact(BLOCK).enumerate() {
                let first = rows[0].unwrap_or(0) as usize;
                let whole = first.is_multiple_of(BLOCK)
                    && rows
                        .iter()
                        .zip(first..)
                        .all(|(&row, i)| row == Some(i as u32));
                let file = &view.words()[first * bits as usize / 32 * n..];
                for (tile, out) in tiles.clone().zip(out.chunks_exact_mut(tile_words)) {
                    let out = &mut out[block * block_words..][..block_words];
                    if whole {
                        repack_consecutive(bits, file, n, tile * TILE, out);
                    } else {
                        repack_scattered(bits, view.words(), n, rows, tile * TILE, out);
                    }
                }
            }
        });
        let source = (0..rows.len())
            .map(|p| rows[p - p % BLOCK + row_at(bits, p % BLOCK)].unwrap_or(NO_FEATURE))
            .collect();
        let (sections, spans) = quarters(rows.len() / BLOCK, &spans);
        let stored = view.words().len() * 32
            + groups * n * (16 + bits as usize)
            + if view.group_of().is_sorted() {
                0
            } else {
                32 * k
            };
        Self {
            in_features: k,
            out_features: n,
            source,
            storage: Storage::Codes(Codes {
                spans,
                groups,
                tile_words,
                words,
                scales: gptq_scales(view, zeros, tiles),
            }),
            sections,
            bias: epilogue.bias,
            prescale: epilogue.prescale,
            compute,
            bits_per_weight: stored as f64 / (k * n) as f64,
        }
    }

    /// Repack an unquantized `[n, k]` matrix; its matmul is always [`Compute::Exact`].
    pub fn from_f16(data: &[f16], k: usize, epilogue: Epilogue) -> Self {
        let floats = Floats::F16(transpose(data.reinterpret_cast(), k));
        Self::from_floats(floats, data.len() / k, k, 16.0, epilogue)
    }

    /// Like [`QuantMatrix::from_f16`], for bfloat16.
    pub fn from_bf16(data: &[bf16], k: usize, epilogue: Epilogue) -> Self {
        let floats = Floats::BF16(transpose(data.reinterpret_cast(), k));
        Self::from_floats(floats, data.len() / k, k, 16.0, epilogue)
    }

    /// Like [`QuantMatrix::from_f16`], for float32.
    pub fn from_f32(data: &[f32], k: usize, epilogue: Epilogue) -> Self {
        let floats = Floats::F32(transpose(data, k));
        Self::from_floats(floats, data.len() / k, k, 32.0, epilogue)
    }

    fn from_floats(floats: Floats, n: usize, k: usize, bits: f64, epilogue: Epilogue) -> Self {
        let positions = k.next_multiple_of(BLOCK);
        let source = (0..positions)
            .map(|p| if p < k { p as u32 } else { NO_FEATURE })
            .collect();
        let (sections, _) = quarters(positions / BLOCK, &[]);
        Self {
            in_features: k,
            out_features: n,
            source,
            storage: Storage::Floats(floats),
            sections,
            bias: epilogue.bias,
            prescale: epilogue.prescale,
            compute: Compute::Exact,
            bits_per_weight: bits,
        }
    }
}

fn gptq_scales(view: &GptqView<'_>, zeros: Zeros, tiles: usize) -> Scales {
    let (n, groups) = (view.out_features(), view.num_groups());
    let zero_offset = u32::from(zeros == Zeros::Classic);
    let mut scales = Buffer::<u16>::zeroed(tiles * groups * TILE);
    fill_tiles(&mut scales, groups * TILE, tiles, |tiles, out| {
        for (tile, out) in tiles.zip(out.chunks_exact_mut(groups * TILE)) {
            for (g, out) in out.chunks_exact_mut(TILE).enumerate() {
                for (scale, value) in out.iter_mut().zip(&view.scale_row(g)[tile * TILE..]) {
                    *scale = value.to_bits();
                }
            }
        }
    });
    let mut stored = Buffer::<u8>::zeroed(tiles * groups * TILE);
    fill_tiles(&mut stored, groups * TILE, tiles, |tiles, out| {
        for (tile, out) in tiles.zip(out.chunks_exact_mut(groups * TILE)) {
            for (g, out) in out.chunks_exact_mut(TILE).enumerate() {
                for (zero, column) in out.iter_mut().zip(tile * TILE..n) {
                    *zero = (view.zero(g, column) - zero_offset) as u8;
                }
            }
        }
    });
    Scales::Gptq {
        scales,
        zeros: stored,
        zero_offset,
    }
}

/// Transpose `[n, k]` to tiles `[tile][k padded][32]`; padding is zero.
fn transpose<T: Copy + Default + Send + Sync>(data: &[T], k: usize) -> Buffer<T> {
    let n = data.len() / k;
    let tile_len = k.next_multiple_of(BLOCK) * TILE;
    let tiles = n.div_ceil(TILE);
    let mut out = Buffer::zeroed(tiles * tile_len);
    fill_tiles(&mut out, tile_len, tiles, |tiles, out| {
        for (tile, out) in tiles.zip(out.chunks_exact_mut(tile_len)) {
            let columns = &data[tile * TILE * k..n.min((tile + 1) * TILE) * k];
            for first in (0..k).step_by(BLOCK) {
                let count = BLOCK.min(k - first);
                let mut block = [[T::default(); TILE]; BLOCK];
                for (c, column) in columns.chunks_exact(k).enumerate() {
                    for (row, &value) in block.iter_mut().zip(&column[first..][..count]) {
                        row[c] = value;
                    }
                }
                for (row, out) in block
                    .iter()
                    .take(count)
                    .zip(out[first * TILE..].chunks_exact_mut(TILE))
                {
                    out.copy_from_slice(row);
                }
            }
        }
    });
    out
}
