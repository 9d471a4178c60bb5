//! Packing of codes and scales of a checked matrix in the order of a [`Layout`].

use std::ops::Range;

use exl_format::exl2::Exl2View;
use exl_format::gptq::GptqView;

use super::{CHUNK_ROWS, CHUNKS_PER_UNIT, Layout, Place, TILE, pieces, word_offset};

/// Source data of packing.
pub trait Codes: Sync {
    /// Codes of source row `row`, columns `begin..begin + out.len()`.
    fn columns(&self, row: usize, begin: usize, out: &mut [u8]);
    /// The code of the value zero, for columns beyond N.
    fn neutral(&self, group: usize) -> u8;
    /// Write the scale bytes of an entry (group `group`) for features `n` and `n + 8`, either of which may be beyond N.
    fn scale(&self, group: usize, n: usize, put: &mut dyn FnMut(&[u8]));
}

impl Codes for Exl2View<'_> {
    #[inline(always)]
    fn columns(&self, row: usize, begin: usize, out: &mut [u8]) {
        self.unpack_columns(row, begin, out);
    }

    fn neutral(&self, group: usize) -> u8 {
        self.groups()[group].zero() as u8
    }

    fn scale(&self, group: usize, n: usize, put: &mut dyn FnMut(&[u8])) {
        let code = |n: usize| {
            if n < self.out_features() {
                self.scale_code(group, n)
            } else {
                0
            }
        };
        put(&[(code(n) | code(n + 8) << 4) as u8]);
    }
}

impl Codes for GptqView<'_> {
    #[inline(always)]
    fn columns(&self, row: usize, begin: usize, out: &mut [u8]) {
        self.unpack_columns(row, begin, out);
    }

    fn neutral(&self, _group: usize) -> u8 {
        0
    }

    fn scale(&self, group: usize, n: usize, put: &mut dyn FnMut(&[u8])) {
        let known = |n: usize| n < self.out_features();
        for at in [n, n + 8] {
            let scale = if known(at) {
                self.scale(group, at)
            } else {
                half::f16::ZERO
            };
            put(&scale.to_le_bytes());
        }
        for at in [n, n + 8] {
            let zero = if known(at) { self.zero(group, at) } else { 0 };
            put(&half::f16::from_f32(zero as f32).to_le_bytes());
        }
    }
}

/// The image, shared by threads that write disjoint parts of it.
struct Image {
    start: *mut u8,
    len: usize,
}

// SAFETY: every thread writes its own chunks' and units' bytes only; see `Layout::pack`.
unsafe impl Sync for Image {}

impl Image {
    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(
            at + bytes.len() <= self.len,
            "the plan stays within the image"
        );
        // SAFETY: in bounds by the check above; disjoint by the callers' split over chunks.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }

    fn write_words(&self, at: usize, words: &[u32]) {
        assert!(
            at + size_of_val(words) <= self.len,
            "the plan stays within the image"
        );
        for (i, word) in words.iter().enumerate() {
            // SAFETY: in bounds by the check above; disjoint by the callers' split over chunks.
            unsafe {
                (self.start.add(at + 4 * i).cast::<[u8; 4]>()).write(word.to_le_bytes());
            };
        }
    }
}

impl Layout {
    /// Write the image, `self.bytes()` long, on `threads` threads.
    pub fn pack(&self, codes: &impl Codes, image: &mut [u8], threads: usize) {
        self.pack_tiles(codes, 0..self.tiles(), image, threads);
    }

    /// Write these tiles of the image, `self.tile_bytes()` each, on `threads` threads.
    pub fn pack_tiles(
        &self,
        codes: &impl Codes,
        tiles: Range<usize>,
        image: &mut [u8],
        threads: usize,
    ) {
        assert!(
            tiles.end <= self.tiles() && image.len() == tiles.len() * self.tile_bytes(),
            "the image has the size the plan says"
        );
        let shared = Image {
            start: image.as_mut_ptr(),
            len: image.len(),
        };
        let chunks = self.rows() / CHUNK_ROWS;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let work = || {
            let mut codes_of_block = vec![0u8; CHUNK_ROWS * BLOCK_COLUMNS];
            loop {
                let chunk = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if chunk >= chunks {
                    break;
                }
                self.pack_chunk(codes, chunk, &tiles, &mut codes_of_block, &shared);
                if chunk.is_multiple_of(CHUNKS_PER_UNIT) {
                    self.pack_scales(codes, chunk / CHUNKS_PER_UNIT, &tiles, &shared);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.clamp(1, chunks.max(1)) {
                scope.spawn(work);
            }
            work();
        });
    }

    /// Codes of 64 rows of `tiles`, in blocks of columns. `buffer` holds a block unpacked, `[64][BLOCK_COLUMNS]`.
    fn pack_chunk(
        &self,
        codes: &impl Codes,
        chunk: usize,
        tiles: &Range<usize>,
        buffer: &mut [u8],
        image: &Image,
    ) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has these instructions.
            return unsafe { self.pack_chunk_avx2(codes, chunk, tiles, buffer, image) };
        }
        self.pack_chunk_of(codes, chunk, tiles, buffer, image);
    }

    /// `pack_chunk_of`, compiled for AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn pack_chunk_avx2(
        &self,
        codes: &impl Codes,
        chunk: usize,
        tiles: &Range<usize>,
        buffer: &mut [u8],
        image: &Image,
    ) {
        self.pack_chunk_of(codes, chunk, tiles, buffer, image);
    }

    #[inline(always)]
    fn pack_chunk_of(
        &self,
        codes: &impl Codes,
        chunk: usize,
        tiles: &Range<usize>,
        buffer: &mut [u8],
        image: &Image,
    ) {
        let group = self.groups[chunk * CHUNK_ROWS / self.entry_rows] as usize;
        let neutral = codes.neutral(group);
        let (offset, bits) = self.chunk(chunk);
        let plan = Scatter::new(bits);
        let mut words = [0u32; LANES * MOST_BITS];
        let last = tiles.end * TILE;
        for begin in (tiles.start * TILE..last).step_by(BLOCK_COLUMNS) {
            let stored = self.out_features.saturating_sub(begin).min(BLOCK_COLUMNS);
            for row in 0..CHUNK_ROWS {
                let at = row * BLOCK_COLUMNS;
                let source = self.source_rows[chunk * CHUNK_ROWS + row];
                if source < 0 && row > 0 {
                    // A padding row has the weights of the row before, which are finite, and is multiplied by zero.
                    buffer.copy_within(at - BLOCK_COLUMNS..at, at);
                    continue;
                }
                let (known, rest) = buffer[at..at + BLOCK_COLUMNS].split_at_mut(stored);
                rest.fill(neutral);
                codes.columns(source as usize, begin, known);
                // Codes that are stored with more bits than they have.
                let group = self.groups[(chunk * CHUNK_ROWS + row) / self.entry_rows] as usize;
                let more = neutral - codes.neutral(group);
                if more != 0 {
                    for code in known.iter_mut() {
                        *code += more;
                    }
                }
            }
            for column in (begin..(begin + BLOCK_COLUMNS).min(last)).step_by(TILE) {
                plan.pack(buffer, column - begin, &mut words);
                let start = (column / TILE - tiles.start) * self.tile_bytes();
                image.write_words(start + offset, &words[..LANES * bits]);
            }
        }
    }

    fn pack_scales(&self, codes: &impl Codes, unit: usize, tiles: &Range<usize>, image: &Image) {
        let per_unit = self.entries_per_unit();
        for tile in tiles.clone() {
            let start = (tile - tiles.start) * self.tile_bytes() + self.scales_offset(unit);
            for entry in 0..per_unit {
                // The last entries of a unit that is not full have no groups; their bytes are never used.
                let Some(&group) = self.groups.get(unit * per_unit + entry) else {
                    continue;
                };
                for g in 0..8 {
                    let index = match self.scales {
                        super::Scales::Exl2 => g * per_unit + entry,
                        super::Scales::Gptq => (entry * 8 + g) * 8,
                    };
                    let mut at = start + index;
                    codes.scale(group as usize, tile * TILE + g, &mut |bytes| {
                        image.write(at, bytes);
                        at += bytes.len();
                    });
                }
            }
        }
    }
}

const LANES: usize = 32;
/// Features, and as many neighbouring lanes, that are packed together.
const FEATURES: usize = 8;
const MOST_BITS: usize = 8;
/// Columns that are unpacked at a time: a block of 64 rows stays in the cache.
const BLOCK_COLUMNS: usize = 512;

/// The place of each code in the words of a tile's chunk, computed once a chunk.
struct Scatter {
    steps: Vec<Step>,
    /// Place of each word of lane 0 in the chunk, and the distance to that of the next lane, in words.
    places: Vec<(usize, usize)>,
}

struct Step {
    /// Row and feature for lane 0; lane L adds its offset.
    row: usize,
    feature: usize,
    word: usize,
    bit: usize,
    mask: u32,
    shift: usize,
}

impl Scatter {
    fn new(bits: usize) -> Self {
        let mut steps = Vec::new();
        for row in (0..CHUNK_ROWS).filter(|row| row % 32 < 8) {
            for feature in [0, 8] {
                let at = Place::of(row, feature);
                steps.extend(pieces(bits, at.field).map(|p| Step {
                    row,
                    feature,
                    word: p.word,
                    bit: p.bit + 16 * at.half,
                    mask: (1 << p.count) - 1,
                    shift: p.shift,
                }));
            }
        }
        let place = |lane, word| word_offset(bits, lane, word) / 4;
        let places = (0..bits)
            .map(|word| (place(0, word), place(1, word) - place(0, word)))
            .collect();
        Self { steps, places }
    }

    /// Pack the tile of 16 columns from `column` on of `codes`, `[64][BLOCK_COLUMNS]`, in the order of a chunk.
    #[inline(always)]
    fn pack(&self, codes: &[u8], column: usize, chunk: &mut [u32; LANES * MOST_BITS]) {
        for t in 0..LANES / FEATURES {
            // Lanes 4 g + t: their codes are neighbours.
            let mut words = [[0u32; FEATURES]; MOST_BITS];
            for step in &self.steps {
                let at = (step.row + 8 * t) * BLOCK_COLUMNS + column + step.feature;
                let codes: &[u8; FEATURES] = codes[at..].first_chunk().expect("inside the block");
                let words = &mut words[step.word % MOST_BITS];
                for (word, &code) in words.iter_mut().zip(codes) {
                    *word |= (u32::from(code) >> step.shift & step.mask) << step.bit;
                }
            }
            for (&(place, stride), words) in self.places.iter().zip(&words) {
                for (g, &word) in words.iter().enumerate() {
                    chunk[place + (4 * g + t) * stride] = word;
                }
            }
        }
    }
}
