//! Float weights in the order that a quantizer reads: packed rows, columns in blocks that fit the first-level cache.

use std::sync::Mutex;

use half::{bf16, f16};

use crate::error::Problem;
use crate::{Executor, bits};

/// Columns of a block.
pub const COLUMNS: usize = 64;
/// Rows moved together, so that a 64 x 64 tile stays in cache while it is transposed.
const TILE: usize = 64;

/// A float weight `[out_features, in_features]`, as torch's `Linear` holds it.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl Weight<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::F16(w) => w.len(),
            Self::BF16(w) => w.len(),
        }
    }

    #[inline(always)]
    fn at(&self, index: usize) -> f32 {
        match self {
            Self::F32(w) => w[index],
            Self::F16(w) => w[index].to_f32(),
            Self::BF16(w) => w[index].to_f32(),
        }
    }
}

/// A weight transposed to `[block][packed row][column of the block]`; columns past `out_features` are zero.
#[derive(Debug)]
pub struct Blocked {
    data: Vec<f32>,
    in_features: usize,
}

impl Blocked {
    /// Transpose `weight` `[out, in]`. Packed row k takes input feature `perm[k]`, or k without `perm`. `columns` >= `out` is the number of
    /// columns of the result.
    ///
    /// Rejects values that are not finite or beyond the half range, which no format of this crate can hold.
    ///
    /// # Panics
    /// If `perm` is not as long as the weight is wide.
    pub fn new(
        weight: Weight<'_>,
        shape: [usize; 2],
        perm: Option<&[u32]>,
        columns: usize,
        run: Executor<'_>,
    ) -> Result<Self, Problem> {
        let [out, k] = shape;
        if shape[0].checked_mul(shape[1]) != Some(weight.len()) {
            return Err(Problem::Length {
                tensor: "weight",
                found: weight.len(),
                shape: shape.to_vec(),
            });
        }
        assert!(perm.is_none_or(|perm| perm.len() == k));
        let blocks = columns.max(out).div_ceil(COLUMNS);
        let mut data = vec![0.0f32; blocks * k * COLUMNS];
        let parts: Vec<_> = data.chunks_mut(k * COLUMNS).map(Mutex::new).collect();
        let bad: Mutex<Option<(usize, usize, f32)>> = Mutex::new(None);
        run(blocks, &|block| {
            let mut part = parts[block].lock().expect("no task panics");
            let first = block * COLUMNS;
            let wrong = transpose(
                weight,
                k,
                perm,
                first..out.min(first + COLUMNS).max(first),
                &mut part,
            );
            if let Some(wrong) = wrong {
                let mut bad = bad.lock().expect("no task panics");
                if bad.is_none_or(|known| (wrong.0, wrong.1) < (known.0, known.1)) {
                    *bad = Some(wrong);
                }
            }
        });
        drop(parts);
        if let Some((row, column, value)) = bad.into_inner().expect("no task panics") {
            return Err(Problem::Weight { row, column, value });
        }
        Ok(Self {
            data,
            in_features: k,
        })
    }

    /// Number of column blocks.
    pub fn blocks(&self) -> usize {
        self.data.len() / (self.in_features * COLUMNS)
    }

    /// Packed rows of one block, `[rows][COLUMNS]`.
    pub fn rows(&self, block: usize, rows: std::ops::Range<usize>) -> &[f32] {
        let base = block * self.in_features;
        &self.data[(base + rows.start) * COLUMNS..(base + rows.end) * COLUMNS]
    }
}

/// Fill one block and return the first value that cannot be quantized, as (output row, input column, value).
fn transpose(
    weight: Weight<'_>,
    k: usize,
    perm: Option<&[u32]>,
    columns: std::ops::Range<usize>,
    part: &mut [f32],
) -> Option<(usize, usize, f32)> {
    let mut bad = None;
    let limit = f16::MAX.to_f32();
    for start in (0..k).step_by(TILE) {
        let end = k.min(start + TILE);
        for (j, n) in columns.clone().enumerate() {
            for row in start..end {
                let feature = perm.map_or(row, |perm| perm[row] as usize);
                let value = weight.at(n * k + feature);
                let fits = value.abs() <= limit; // false for a NaN
                if !fits && bad.is_none_or(|(r, c, _)| (n, feature) < (r, c)) {
                    bad = Some((n, feature, value));
                }
                part[row * COLUMNS + j] = value;
            }
        }
    }
    bad
}

/// Round to the nearest integer, ties to even; exact for |x| < 2^22 and vectorized on every processor.
#[inline(always)]
pub(crate) fn round(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + MAGIC) - MAGIC
}

/// `x` limited to `low..=high`; a NaN becomes `high`.
#[inline(always)]
pub(crate) fn limit(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < high { x } else { high };
    if x > low { x } else { low }
}

/// Largest code as a float.
#[inline(always)]
pub(crate) fn largest(width: u32) -> f32 {
    bits::mask(width) as f32
}
