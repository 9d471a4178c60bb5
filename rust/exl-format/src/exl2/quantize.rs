//! Round-to-nearest EXL2 quantization, without error compensation.

use std::sync::Mutex;

use half::f16;

use super::view::{scale, smax};
use super::{Exl2Matrix, Plan};
use crate::error::Problem;
use crate::source::{Blocked, COLUMNS, Weight, largest, limit, round};
use crate::{Executor, bits};

/// Candidates for the factor on a group's largest scale: 0.70 .. 1.20.
const FACTORS: usize = 97;

/// Search method for a group's largest scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Search {
    /// Try 97 factors and keep the one with the least sum of |error|^3.5.
    Grid,
    /// Take the factor 1: much faster, slightly less accurate.
    None,
}

/// Quantize `weight` `[out, in]`. Packed row k takes input feature `perm[k]` (most important first, so that it gets the widest code), or k
/// without `perm`. Columns are padded with zero weights to a multiple of 32.
///
/// The result does not depend on `run`.
pub fn quantize(
    weight: Weight<'_>,
    shape: [usize; 2],
    plan: &Plan,
    perm: Option<&[u32]>,
    search: Search,
    run: Executor<'_>,
) -> Result<Exl2Matrix, Problem> {
    let n = shape[0].next_multiple_of(32);
    let groups = plan.groups(shape[1])?;
    let mut matrix = Exl2Matrix::empty(&groups, n, perm)?;
    let source = Blocked::new(weight, shape, perm, n, run)?;
    let outputs = split(&mut matrix, &groups);
    run(groups.len(), &|g| {
        let mut output = outputs[g].lock().expect("no task panics");
        quantize_group(&source, &mut output, n, search);
    });
    drop(outputs);
    Ok(matrix)
}

/// The output of one group.
struct Output<'m> {
    bits: u32,
    rows: std::ops::Range<usize>,
    words: &'m mut [i32],
    scales: &'m mut [i32],
    scale_max: &'m mut f16,
}

fn split<'m>(matrix: &'m mut Exl2Matrix, groups: &[(u32, usize)]) -> Vec<Mutex<Output<'m>>> {
    let n = matrix.out_features;
    let mut rest = &mut matrix.q_weight[..];
    let mut first = 0;
    let places = matrix
        .q_scale
        .chunks_mut(n / 8)
        .zip(&mut matrix.q_scale_max);
    groups
        .iter()
        .zip(places)
        .map(|(&(bits, rows), (scales, scale_max))| {
            let (words, other) =
                std::mem::take(&mut rest).split_at_mut(rows / 32 * bits as usize * n);
            rest = other;
            let output = Output {
                bits,
                rows: first..first + rows,
                words,
                scales,
                scale_max,
            };
            first += rows;
            Mutex::new(output)
        })
        .collect()
}

fn quantize_group(source: &Blocked, out: &mut Output<'_>, n: usize, search: Search) {
    let (base, widest) = column_scales(source, out);
    // c1 in 1..=16 is the factor (c1 / 16)^2 of the widest column's scale.
    let codes: Vec<f32> = base
        .iter()
        .map(|base| {
            (16.0 * (base / widest).sqrt())
                .round_ties_even()
                .clamp(1.0, 16.0)
        })
        .collect();
    let factor = match search {
        Search::Grid => best_factor(source, out, &codes, widest),
        Search::None => 1.0,
    };
    let zero = (1u32 << (out.bits - 1)) as f32;
    *out.scale_max = f16::from_f32((widest * factor).min(f16::MAX.to_f32() / zero));
    let smax = smax(*out.scale_max);
    let stored: Vec<u8> = codes.iter().map(|&code| code as u8 - 1).collect();
    bits::pack_stream(&stored[..n], 4, out.scales);
    let scales: Vec<f32> = stored
        .iter()
        .map(|&code| scale(smax, code.into()).to_f32())
        .collect();

    let (low, high) = (-zero, largest(out.bits) - zero);
    let mut row_codes = vec![0u8; source.blocks() * COLUMNS];
    for (local, k) in out.rows.clone().enumerate() {
        for (block, (codes, scales)) in row_codes
            .chunks_mut(COLUMNS)
            .zip(scales.chunks(COLUMNS))
            .enumerate()
        {
            let weights = source.rows(block, k..k + 1);
            for ((code, &w), &s) in codes.iter_mut().zip(weights).zip(scales) {
                let steps = if s == 0.0 { 0.0 } else { w / s };
                *code = (round(limit(steps, low, high)) + zero) as u8;
            }
        }
        bits::pack_row(&row_codes[..n], local, out.bits, out.words);
    }
}

/// The smallest scale that covers each column, and the largest of these.
fn column_scales(source: &Blocked, out: &Output<'_>) -> (Vec<f32>, f32) {
    let half_range = largest(out.bits) / 2.0;
    let mut base = vec![0.0f32; source.blocks() * COLUMNS];
    for (block, peak) in base.chunks_mut(COLUMNS).enumerate() {
        for row in source.rows(block, out.rows.clone()).chunks(COLUMNS) {
            for (peak, w) in peak.iter_mut().zip(row) {
                let w = w.abs();
                *peak = if w > *peak { w } else { *peak };
            }
        }
        for peak in peak {
            *peak = (*peak + 1e-12) / half_range;
        }
    }
    let widest = base.iter().copied().fold(0.0, f32::max);
    (base, widest)
}

/// The factor of the grid with the least sum over the group of |error|^3.5; the first of equal ones.
fn best_factor(source: &Blocked, out: &Output<'_>, codes: &[f32], widest: f32) -> f32 {
    let zero = (1u32 << (out.bits - 1)) as f32;
    let (low, high) = (-zero, largest(out.bits) - zero);
    let factor = |i: usize| 0.70 + i as f32 * (0.5 / (FACTORS - 1) as f32);
    let mut costs = [0.0f64; FACTORS];
    for (block, codes) in codes.chunks(COLUMNS).enumerate() {
        let weights = source.rows(block, out.rows.clone());
        for (i, cost) in costs.iter_mut().enumerate() {
            let mut scales = [0.0f32; COLUMNS];
            let mut inverses = [0.0f32; COLUMNS];
            for ((scale, inverse), &code) in scales.iter_mut().zip(&mut inverses).zip(codes) {
                *scale = code * code / 256.0 * widest * factor(i);
                *inverse = 1.0 / *scale;
            }
            *cost += block_cost(weights, &scales, &inverses, low, high, 1.0 / widest);
        }
    }
    let mut best = 0;
    for (i, cost) in costs.iter().enumerate() {
        if *cost < costs[best] {
            best = i;
        }
    }
    factor(best)
}

/// Sum of |round(w / s) s - w|^3.5 in units of the widest scale, which avoids underflow of the powers.
#[inline(never)]
fn block_cost(
    weights: &[f32],
    scales: &[f32; COLUMNS],
    inverses: &[f32; COLUMNS],
    low: f32,
    high: f32,
    unit: f32,
) -> f64 {
    let mut sums = [0.0f32; COLUMNS];
    for row in weights.chunks_exact(COLUMNS) {
        for j in 0..COLUMNS {
            let steps = round(limit(row[j] * inverses[j], low, high));
            let error = (steps * scales[j] - row[j]).abs() * unit;
            sums[j] += error * error * error * error.sqrt();
        }
    }
    sums.iter().map(|&sum| f64::from(sum)).sum()
}
