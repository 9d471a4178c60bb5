//! Round-to-nearest GPTQ quantization.

use std::sync::Mutex;

use half::f16;

use super::{GptqTensors, WIDTHS, Zeros};
use crate::error::Problem;
use crate::source::{Blocked, COLUMNS, Weight, largest, limit, round};
use crate::{Executor, bits};

/// Owned tensors of one GPTQ matrix, in file layout.
#[derive(Debug, Clone, PartialEq)]
pub struct GptqMatrix {
    pub out_features: usize,
    pub qweight: Vec<i32>,
    pub qzeros: Vec<i32>,
    pub scales: Vec<f16>,
    pub g_idx: Vec<i32>,
}

impl GptqMatrix {
    /// The tensors in the form that a view takes.
    pub fn tensors(&self) -> GptqTensors<'_> {
        let n = self.out_features;
        let groups = self.scales.len() / n;
        GptqTensors {
            qweight: &self.qweight,
            qweight_shape: [self.qweight.len() / n, n],
            qzeros: &self.qzeros,
            qzeros_shape: [groups, self.qzeros.len() / groups],
            scales: &self.scales,
            scales_shape: [groups, n],
            g_idx: Some(&self.g_idx),
        }
    }
}

/// Settings of a new GPTQ matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// 2, 3, 4 or 8.
    pub bits: u32,
    /// Rows of a group; the last group may be short.
    pub group_size: usize,
    /// The zero point is fixed at the middle code.
    pub symmetric: bool,
    pub zeros: Zeros,
}

/// Quantize `weight` `[out, in]`. With `perm` (act-order), the rows `perm[0..group_size]` make group 0 and so on; without it, groups are
/// consecutive rows. Rows keep their places in both cases.
///
/// The result does not depend on `run`.
pub fn quantize(
    weight: Weight<'_>,
    shape: [usize; 2],
    settings: Settings,
    perm: Option<&[u32]>,
    run: Executor<'_>,
) -> Result<GptqMatrix, Problem> {
    let [n, k] = shape;
    check(shape, settings)?;
    let g_idx = group_of_rows(k, settings.group_size, perm)?;
    let groups = k.div_ceil(settings.group_size);
    let source = Blocked::new(weight, shape, None, n, run)?;
    let ranges = ranges(&source, &g_idx, groups, run);

    let mut matrix = GptqMatrix {
        out_features: n,
        qweight: vec![0; k * settings.bits as usize / 32 * n],
        qzeros: vec![0; groups * n * settings.bits as usize / 32],
        scales: vec![f16::ZERO; groups * n],
        g_idx,
    };
    let mut points = vec![0.0f32; groups * n];
    for (i, point) in points.iter_mut().enumerate() {
        let (g, column) = (i / n, i % n);
        let at = ((column / COLUMNS) * groups + g) * COLUMNS + column % COLUMNS;
        (matrix.scales[i], *point) = scale_and_zero(ranges[at], settings);
    }
    store_zeros(&mut matrix, &points, settings);
    store_codes(&mut matrix, &source, &points, settings.bits, run);
    Ok(matrix)
}

fn check([n, k]: [usize; 2], settings: Settings) -> Result<(), Problem> {
    if !WIDTHS.contains(&settings.bits) {
        return Err(Problem::Bits {
            format: "GPTQ",
            bits: settings.bits,
            known: "2, 3, 4, 8",
        });
    }
    for (what, value) in [("in_features", k), ("out_features", n)] {
        if value == 0 || !value.is_multiple_of(32) {
            return Err(Problem::Multiple {
                what,
                value,
                multiple: 32,
                remedy: "leave this matrix in half precision",
            });
        }
    }
    if settings.group_size == 0 {
        return Err(Problem::GroupSize {
            group_size: 0,
            k,
            found: 0,
            groups: 1,
        });
    }
    Ok(())
}

fn group_of_rows(k: usize, group_size: usize, perm: Option<&[u32]>) -> Result<Vec<i32>, Problem> {
    let Some(perm) = perm else {
        return Ok((0..k).map(|row| (row / group_size) as i32).collect());
    };
    let inverse = crate::exl2::invert(Some(perm), k)?;
    Ok(inverse
        .iter()
        .map(|&position| position / group_size as i32)
        .collect())
}

/// Smallest and largest weight of each group and column, including zero, as `[block][group][column]`.
fn ranges(source: &Blocked, g_idx: &[i32], groups: usize, run: Executor<'_>) -> Vec<(f32, f32)> {
    let mut ranges = vec![(0.0f32, 0.0f32); source.blocks() * groups * COLUMNS];
    let parts: Vec<_> = ranges
        .chunks_mut(groups * COLUMNS)
        .map(Mutex::new)
        .collect();
    run(source.blocks(), &|block| {
        let mut part = parts[block].lock().expect("no task panics");
        let rows = source.rows(block, 0..g_idx.len()).chunks(COLUMNS);
        for (row, &g) in rows.zip(g_idx) {
            for ((low, high), &w) in part[g as usize * COLUMNS..][..COLUMNS].iter_mut().zip(row) {
                *low = low.min(w);
                *high = high.max(w);
            }
        }
    });
    drop(parts);
    ranges
}

/// Scale and zero point for weights in `low..=high`; the stored convention can express the zero point.
fn scale_and_zero((low, high): (f32, f32), settings: Settings) -> (f16, f32) {
    let steps = largest(settings.bits);
    let first = if settings.zeros == Zeros::Classic {
        1.0
    } else {
        0.0
    };
    let middle = f32::midpoint(steps, 1.0).max(first);
    let span = if settings.symmetric {
        2.0 * high.max(-low)
    } else {
        high - low
    };
    let scale = f16::from_f32((span / steps).min(f16::MAX.to_f32()));
    if scale == f16::ZERO {
        return (f16::ONE, middle);
    }
    let zero = if settings.symmetric {
        middle
    } else {
        limit(round(-low / scale.to_f32()), first, steps)
    };
    (scale, zero)
}

fn store_zeros(matrix: &mut GptqMatrix, points: &[f32], settings: Settings) {
    let n = matrix.out_features;
    let minus = if settings.zeros == Zeros::Classic {
        1.0
    } else {
        0.0
    };
    let words = n * settings.bits as usize / 32;
    for (row, points) in matrix.qzeros.chunks_mut(words).zip(points.chunks(n)) {
        let stored: Vec<u8> = points.iter().map(|point| (point - minus) as u8).collect();
        bits::pack_stream(&stored, settings.bits, row);
    }
}

fn store_codes(
    matrix: &mut GptqMatrix,
    source: &Blocked,
    points: &[f32],
    width: u32,
    run: Executor<'_>,
) {
    let n = matrix.out_features;
    let (scales, g_idx) = (&matrix.scales, &matrix.g_idx);
    // 32 rows fill whole words at every width.
    let parts: Vec<_> = matrix
        .qweight
        .chunks_mut(width as usize * n)
        .map(Mutex::new)
        .collect();
    run(parts.len(), &|part| {
        let mut words = parts[part].lock().expect("no task panics");
        let mut codes = vec![0u8; n];
        for local in 0..32 {
            let k = 32 * part + local;
            let at = g_idx[k] as usize * n;
            for (block, codes) in codes.chunks_mut(COLUMNS).enumerate() {
                let at = at + block * COLUMNS;
                let weights = source.rows(block, k..k + 1);
                for (j, code) in codes.iter_mut().enumerate() {
                    let steps = weights[j] / scales[at + j].to_f32() + points[at + j];
                    *code = round(limit(steps, 0.0, largest(width))) as u8;
                }
            }
            bits::pack_row(&codes, local, width, &mut words);
        }
    });
}
