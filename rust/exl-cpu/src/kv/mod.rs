//! Keys and values of one layer in pages, and the codecs that store them.
//!
//! A plane is `[pages, page_size, heads, row]`; a slot is `page * page_size + offset`. A head of a token is a separate row. Its elements
//! are padded to a multiple of 64 for the Hadamard codecs, so that storing one token changes no other.

mod codec;

pub(crate) use codec::{CodeRow, E5M2Row, HalfRow, RowFormat, decode_row, hadamard_rows};

use crate::isa::Isa;
use crate::pool;
use crate::simd::{dispatch, prefetch};

/// Elements of one Hadamard block.
pub const BLOCK: usize = 64;
/// Elements that share one scale.
pub const RUN: usize = 32;

/// Storage format of one plane (keys or values).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    F16,
    /// FP8: the upper byte of the half, rounded to nearest even, saturating.
    E5M2,
    /// Hadamard codec with 8 bits.
    Hadamard8,
    /// Hadamard codec with 4 bits.
    Hadamard4,
}

impl Codec {
    /// Bytes of one head of one token, without scales.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F16 => 2 * head_dim,
            Self::E5M2 => head_dim,
            Self::Hadamard8 => head_dim.next_multiple_of(BLOCK),
            Self::Hadamard4 => head_dim.next_multiple_of(BLOCK) / 2,
        }
    }

    /// Scales of one head of one token.
    pub fn row_scales(self, head_dim: usize) -> usize {
        if self.is_hadamard() {
            head_dim.next_multiple_of(BLOCK) / RUN
        } else {
            0
        }
    }

    /// Whether rows hold transformed elements.
    pub fn is_hadamard(self) -> bool {
        matches!(self, Self::Hadamard8 | Self::Hadamard4)
    }
}

/// The codecs of (keys, values) for a kind of cache: `fp16`, `fp8`, `q8`, `q6` (8-bit keys, 4-bit values) or `q4`.
pub fn codecs(kind: &str) -> Option<(Codec, Codec)> {
    Some(match kind {
        "fp16" => (Codec::F16, Codec::F16),
        "fp8" => (Codec::E5M2, Codec::E5M2),
        "q8" => (Codec::Hadamard8, Codec::Hadamard8),
        "q6" => (Codec::Hadamard8, Codec::Hadamard4),
        "q4" => (Codec::Hadamard4, Codec::Hadamard4),
        _ => return None,
    })
}

/// Keys or values: memory of `[pages, page_size, heads, row]`, and the scales if the codec has them.
#[derive(Clone, Copy, Debug)]
pub struct Plane {
    codec: Codec,
    data: *const u8,
    scales: *const u16,
    head_dim: usize,
    row_bytes: usize,
    row_scales: usize,
}

// SAFETY: a plane is an address; the contract of `Pages::new` makes its caller responsible for concurrent access.
unsafe impl Send for Plane {}
// SAFETY: as above.
unsafe impl Sync for Plane {}

impl Plane {
    fn new(codec: Codec, head_dim: usize, data: *const u8, scales: *const u16) -> Self {
        Self {
            codec,
            data,
            scales,
            head_dim,
            row_bytes: codec.row_bytes(head_dim),
            row_scales: codec.row_scales(head_dim),
        }
    }

    /// The storage format of rows.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> (*const u8, *const u16) {
        // Callers check slots and block tables, and so rows, against the pages.
        (
            self.data.wrapping_add(row * self.row_bytes),
            self.scales.wrapping_add(row * self.row_scales),
        )
    }

    /// Prefetch the cache lines of a row.
    #[inline(always)]
    pub(crate) fn prefetch(&self, row: usize) {
        let data = self.data.wrapping_add(row * self.row_bytes);
        let mut line = 0;
        while line < self.row_bytes {
            prefetch(data.wrapping_add(line));
            line += 64;
        }
    }
}

/// One layer's pages, as addresses.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_field_names)]
pub struct Pages {
    pub(crate) key: Plane,
    pub(crate) value: Plane,
    pub(crate) num_pages: usize,
    pub(crate) page_size: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
}

/// Errors of [`store`] and [`load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    #[error("slot {slot} outside -1 (skip) to {last}")]
    Slot { slot: i64, last: usize },
    #[error("{what}: {got} elements, expected {expected}")]
    Length {
        what: &'static str,
        got: usize,
        expected: usize,
    },
}

impl Pages {
    /// Pages in memory that the caller owns. `scales` are null for codecs without scales.
    ///
    /// # Safety
    /// `data` and `scales` of both planes hold `num_pages * page_size * heads` rows of `Codec::row_bytes` bytes and `Codec::row_scales`
    /// halves. They stay valid while this value is used. They are written only through [`store`], by one caller at a time, and not while
    /// [`load`] or attention read the same slots.
    pub unsafe fn new(
        (key, value): (Codec, Codec),
        data: (*mut u8, *mut u8),
        scales: (*mut u16, *mut u16),
        [num_pages, page_size, heads, head_dim]: [usize; 4],
    ) -> Self {
        Self {
            key: Plane::new(key, head_dim, data.0, scales.0),
            value: Plane::new(value, head_dim, data.1, scales.1),
            num_pages,
            page_size,
            heads,
            head_dim,
        }
    }

    /// Key/value heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Tokens that the pages hold.
    pub fn tokens(&self) -> usize {
        self.num_pages * self.page_size
    }

    fn check(&self, slots: &[i64], lengths: [(&'static str, usize); 2]) -> Result<(), KvError> {
        let expected = slots.len() * self.heads * self.head_dim;
        for (what, got) in lengths {
            if got != expected {
                return Err(KvError::Length {
                    what,
                    got,
                    expected,
                });
            }
        }
        match slots.iter().find(|&&s| s < -1 || s >= self.tokens() as i64) {
            Some(&slot) => Err(KvError::Slot {
                slot,
                last: self.tokens().saturating_sub(1),
            }),
            None => Ok(()),
        }
    }
}

/// Encode `k` and `v` [tokens, heads, head_dim] into `slots`, one a token; -1 skips the token. Slots must differ.
pub fn store(pages: &Pages, k: &[f32], v: &[f32], slots: &[i64]) -> Result<(), KvError> {
    pages.check(slots, [("k", k.len()), ("v", v.len())])?;
    let isa = Isa::current();
    for_tokens(pages, slots.len(), &|t| {
        if slots[t] >= 0 {
            let width = pages.heads * pages.head_dim;
            for (plane, x) in [(&pages.key, k), (&pages.value, v)] {
                let x = &x[t * width..(t + 1) * width];
                let first_row = slots[t] as usize * pages.heads;
                dispatch(
                    isa,
                    codec::EncodeToken {
                        plane,
                        first_row,
                        x,
                    },
                );
            }
        }
    });
    Ok(())
}

/// Decode `slots` into `k` and `v` [tokens, heads, head_dim] with the codec's roundings to half; slot -1 gives zeros.
pub fn load(pages: &Pages, slots: &[i64], k: &mut [f32], v: &mut [f32]) -> Result<(), KvError> {
    pages.check(slots, [("k", k.len()), ("v", v.len())])?;
    let isa = Isa::current();
    let (k, v) = (k.as_mut_ptr() as usize, v.as_mut_ptr() as usize);
    for_tokens(pages, slots.len(), &|t| {
        let width = pages.heads * pages.head_dim;
        for (plane, out) in [(&pages.key, k), (&pages.value, v)] {
            // SAFETY: `check` compared the lengths; token `t` belongs to one task.
            let out =
                unsafe { std::slice::from_raw_parts_mut((out as *mut f32).add(t * width), width) };
            if slots[t] < 0 {
                out.fill(0.0);
            } else {
                let first_row = slots[t] as usize * pages.heads;
                dispatch(
                    isa,
                    codec::DecodeToken {
                        plane,
                        first_row,
                        out,
                    },
                );
            }
        }
    });
    Ok(())
}

fn for_tokens(pages: &Pages, tokens: usize, task: &(dyn Fn(usize) + Sync)) {
    const PARALLEL_FROM: usize = 1 << 14;
    let per_task = (PARALLEL_FROM / (pages.heads * pages.head_dim)).max(1);
    pool::run(tokens.div_ceil(per_task), &|i| {
        (i * per_task..((i + 1) * per_task).min(tokens)).for_each(task);
    });
}
