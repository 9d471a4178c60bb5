//! Packing of codes and scales of a checked matrix in the order of a [`Layout`].

use exl_format::exl2::Exl2View;
use exl_format::gptq::GptqView;

use super::{CHUNK_ROWS, CHUNKS_PER_UNIT, Layout, Place, TILE, pieces, word_offset};

/// Source data of packing.
pub trait Codes: Sync {
    /// Codes of source row `row`, all N columns.
    fn row(&self, row: usize, out: &mut [u8]);
    /// The code of the value zero, for columns beyond N.
    fn neutral(&self, group: usize) -> u8;
    /// Write the scale bytes of an entry (group `group`) for features `n` and `n + 8`, either of which may be beyond N.
    fn scale(&self, group: usize, n: usize, put: &mut dyn FnMut(&[u8]));
}

impl Codes for Exl2View<'_> {
    fn row(&self, row: usize, out: &mut [u8]) {
        self.unpack_row(row, out);
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
    fn row(&self, row: usize, out: &mut [u8]) {
        self.unpack_row(row, out);
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
}

impl Layout {
    /// Write the image, `self.bytes()` long, on `threads` threads.
    pub fn pack(&self, codes: &impl Codes, image: &mut [u8], threads: usize) {
        assert_eq!(
            image.len(),
            self.bytes(),
            "the image has the size the plan says"
        );
        let shared = Image {
            start: image.as_mut_ptr(),
            len: image.len(),
        };
        let chunks = self.rows() / CHUNK_ROWS;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let work = || {
            let mut buffer = vec![0u8; CHUNK_ROWS * self.tiles() * TILE];
            loop {
                let chunk = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if chunk >= chunks {
                    break;
                }
                self.pack_chunk(codes, chunk, &mut buffer, &shared);
                if chunk.is_multiple_of(CHUNKS_PER_UNIT) {
                    self.pack_scales(codes, chunk / CHUNKS_PER_UNIT, &shared);
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

    /// Codes of 64 rows, every tile. `buffer` holds them unpacked, `[64][tiles * 16]`.
    fn pack_chunk(&self, codes: &impl Codes, chunk: usize, buffer: &mut [u8], image: &Image) {
        let width = self.tiles() * TILE;
        let group = self.groups[chunk * CHUNK_ROWS / self.entry_rows] as usize;
        for (row, out) in buffer.chunks_mut(width).enumerate() {
            out.fill(codes.neutral(group));
            let source = self.source_rows[chunk * CHUNK_ROWS + row];
            if source >= 0 {
                codes.row(source as usize, &mut out[..self.out_features]);
            }
        }
        let (offset, bits) = self.chunk(chunk);
        let plan = Scatter::new(bits);
        for tile in 0..self.tiles() {
            let start = tile * self.tile_bytes() + offset;
            for lane in 0..32 {
                let words = plan.words(buffer, width, tile * TILE, lane);
                for (w, word) in words[..bits].iter().enumerate() {
                    image.write(start + word_offset(bits, lane, w), &word.to_le_bytes());
                }
            }
        }
    }

    fn pack_scales(&self, codes: &impl Codes, unit: usize, image: &Image) {
        let per_unit = self.entries_per_unit();
        for tile in 0..self.tiles() {
            let start = tile * self.tile_bytes() + self.scales_offset(unit);
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

/// The place of each code in a lane's words, computed once a chunk.
struct Scatter {
    steps: Vec<Step>,
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
        Self { steps }
    }

    fn words(&self, codes: &[u8], width: usize, column: usize, lane: usize) -> [u32; 8] {
        let mut words = [0u32; 8];
        let base = lane % 4 * 8 * width + column + lane / 4;
        for step in &self.steps {
            let code = u32::from(codes[base + step.row * width + step.feature]);
            words[step.word] |= (code >> step.shift & step.mask) << step.bit;
        }
        words
    }
}
