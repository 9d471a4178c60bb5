//! Steps 1 to 8: the logits from which a row is sampled. Arithmetic of single tokens is float64, rounded once.

use super::weights::{self, Slope};
use super::{Bias, Edit, Row, peaks};
use crate::isa::Isa;
use crate::simd::{Kernel, Lanes, dispatch};

/// Write the shaped logits of ids below the vocabulary's size into `out`, or return the row itself if nothing changes it.
pub fn shape<'a>(isa: Isa, row: &Row<'a>, out: &'a mut Vec<f32>) -> &'a [f32] {
    let size = row.size.min(row.logits.len());
    let plain = row.negative.is_none()
        && row.bias.is_empty()
        && row.mask.is_none()
        && row.only.is_none()
        && row
            .before
            .iter()
            .chain(&row.after)
            .all(|list| list.is_empty());
    if plain {
        return &row.logits[..size];
    }
    out.clear();
    match row.negative {
        // The whole width takes part in the mix, including padding.
        Some((negative, scale)) => mix(isa, row.logits, negative, scale, out),
        None => out.extend_from_slice(&row.logits[..size]),
    }
    out.truncate(size);
    row.before.iter().for_each(|list| apply(list, out));
    add(isa, row.bias, out);
    row.after.iter().for_each(|list| apply(list, out));
    if let Some(mask) = row.mask {
        dispatch(isa, Mask { x: out, mask });
    }
    if let Some(only) = row.only {
        keep_only(only, out);
    }
    out
}

fn apply(edits: &[Edit], x: &mut [f32]) {
    for edit in edits {
        if let Some(v) = x.get_mut(edit.id as usize) {
            *v = edit.apply(*v);
        }
    }
}

fn add(isa: Isa, bias: Bias<'_>, x: &mut [f32]) {
    match bias {
        Bias::Dense(bias) => dispatch(isa, Add { x, bias }),
        Bias::Sparse { ids, values, rest } => {
            let own: Vec<(usize, f32)> = ids
                .iter()
                .zip(values)
                .filter_map(|(&id, value)| {
                    let id = usize::try_from(id).ok()?;
                    Some((id, *x.get(id)? + value))
                })
                .collect();
            if rest != 0.0 {
                for v in x.iter_mut() {
                    *v += rest;
                }
            }
            for (id, v) in own {
                x[id] = v;
            }
        }
    }
}

fn keep_only(ids: &[i64], x: &mut [f32]) {
    let kept: Vec<(usize, f32)> = ids
        .iter()
        .filter_map(|&id| usize::try_from(id).ok())
        .filter_map(|id| Some((id, *x.get(id)?)))
        .collect();
    x.fill(f32::NEG_INFINITY);
    for (id, v) in kept {
        x[id] = v;
    }
}

/// scale * logsoftmax(positive) + (1 - scale) * logsoftmax(negative). The sums include every logit of both rows, masked or not: the mix is
/// NaN if one of them is NaN or +inf. Ids that the positive row excludes stay excluded.
fn mix(isa: Isa, positive: &[f32], negative: &[f32], scale: f64, out: &mut Vec<f32>) {
    let shift = scale * log_sum(isa, positive) + (1.0 - scale) * log_sum(isa, negative);
    let broken = shift.is_nan();
    let pairs = positive.iter().zip(negative);
    out.extend(pairs.map(|(&a, &b)| {
        let mixed = (scale * f64::from(a) + (1.0 - scale) * f64::from(b) - shift) as f32;
        if a == f32::NEG_INFINITY && !broken {
            a
        } else {
            mixed
        }
    }));
}

/// ln of the sum of e^x; NaN if one of them is NaN or +inf, or all are -inf.
fn log_sum(isa: Isa, x: &[f32]) -> f64 {
    let mut maxima = Vec::new();
    if peaks::block_maxima(isa, x, &mut maxima) {
        return f64::NAN;
    }
    let peak = x.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    if peak == f32::NEG_INFINITY {
        return f64::NAN;
    }
    let slope = Slope {
        peak,
        scale: 1.0,
        smooth: false,
    };
    let mut sums = Vec::new();
    weights::block_sums(isa, slope, x, peaks::BLOCK, &mut sums);
    let total: u64 = sums.iter().sum();
    f64::from(peak) + super::scalar::ln(total as f64 / weights::ONE)
}

struct Add<'a> {
    x: &'a mut [f32],
    bias: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (v, b) in self.x.iter_mut().zip(self.bias) {
            *v += b;
        }
    }
}

struct Mask<'a> {
    x: &'a mut [f32],
    mask: &'a [i32],
}

impl Kernel for Mask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (i, block) in self.x.chunks_mut(32).enumerate() {
            match self.mask.get(i).copied().unwrap_or(0) {
                -1 => {}
                0 => block.fill(f32::NEG_INFINITY),
                word => {
                    for (j, v) in block.iter_mut().enumerate() {
                        *v = if word >> j & 1 == 1 {
                            *v
                        } else {
                            f32::NEG_INFINITY
                        };
                    }
                }
            }
        }
    }
}
