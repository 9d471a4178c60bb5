//! The arithmetic of a block: logits, weights, weighted values. Each function has a fixed order of operations, so that a result never
//! depends on other results of the call.

use super::KEY_BLOCK;
use crate::simd::{Lanes, MAX_LANES, exp, tanh};

/// Query rows that a matrix kernel processes together.
pub(super) const ROWS: usize = 4;

/// values *= factor
#[inline(always)]
pub(super) fn scale_by<V: Lanes>(values: &mut [f32], factor: f32) {
    let p = values.as_mut_ptr();
    let mut e = 0;
    while e < values.len() {
        // SAFETY: scratch rows are multiples of MAX_LANES long.
        unsafe { V::load(p.add(e)).mul(V::splat(factor)).store(p.add(e)) };
        e += V::LANES;
    }
}

/// logits = softcap * tanh(logits / softcap)
#[inline(always)]
pub(super) fn cap<V: Lanes>(logits: &mut [f32; KEY_BLOCK], softcap: f32) {
    let p = logits.as_mut_ptr();
    let mut e = 0;
    while e < KEY_BLOCK {
        // SAFETY: as above.
        unsafe {
            let x = V::load(p.add(e)).mul(V::splat(1.0 / softcap));
            tanh(x).mul(V::splat(softcap)).store(p.add(e));
        }
        e += V::LANES;
    }
}

/// logits = exp(logits - reference); returns their sum.
#[inline(always)]
pub(super) fn weigh<V: Lanes>(logits: &mut [f32; KEY_BLOCK], reference: f32) -> f32 {
    let p = logits.as_mut_ptr();
    let mut total = V::splat(0.0);
    let mut e = 0;
    while e < KEY_BLOCK {
        // SAFETY: as above.
        unsafe {
            let weight = exp(V::load(p.add(e)).sub(V::splat(reference)));
            total = total.add(weight);
            weight.store(p.add(e));
        }
        e += V::LANES;
    }
    total.sum()
}

#[inline(always)]
pub(super) fn largest<V: Lanes>(logits: &[f32; KEY_BLOCK], start: f32) -> f32 {
    let mut max = V::splat(f32::NEG_INFINITY);
    for e in (0..KEY_BLOCK).step_by(V::LANES) {
        // SAFETY: `logits` has KEY_BLOCK floats.
        max = max.max(unsafe { V::load(logits.as_ptr().add(e)) });
    }
    let max = max.largest();
    if max > start { max } else { start }
}

#[inline(always)]
pub(super) fn exp_scalar<V: Lanes>(x: f32) -> f32 {
    let mut lanes = [0.0; MAX_LANES];
    // SAFETY: MAX_LANES floats.
    unsafe { exp(V::splat(x)).store(lanes.as_mut_ptr()) };
    lanes[0]
}

/// weights[row, key] = q[row] . keys[.., key], summed in order of the dimension.
#[inline(always)]
pub(super) fn logits<V: Lanes>(
    q: &[f32],
    q_stride: usize,
    dim: usize,
    rows: usize,
    keys: &[f32],
    weights: &mut [f32],
) {
    let (q, keys, weights) = (q.as_ptr(), keys.as_ptr(), weights.as_mut_ptr());
    let mut row = 0;
    // SAFETY: q has rows * q_stride floats, keys dim * KEY_BLOCK, weights rows * KEY_BLOCK.
    unsafe {
        while row + ROWS <= rows {
            dots::<V, ROWS>(
                q.add(row * q_stride),
                q_stride,
                dim,
                keys,
                weights.add(row * KEY_BLOCK),
            );
            row += ROWS;
        }
        while row < rows {
            dots::<V, 1>(
                q.add(row * q_stride),
                q_stride,
                dim,
                keys,
                weights.add(row * KEY_BLOCK),
            );
            row += 1;
        }
    }
}

#[inline(always)]
unsafe fn dots<V: Lanes, const R: usize>(
    q: *const f32,
    q_stride: usize,
    dim: usize,
    keys: *const f32,
    out: *mut f32,
) {
    let mut key = 0;
    // SAFETY: as `logits` says.
    unsafe {
        while key < KEY_BLOCK {
            if V::COLUMNS == 4 {
                dots_columns::<V, R, 4>(q, q_stride, dim, keys.add(key), out.add(key));
            } else {
                dots_columns::<V, R, 2>(q, q_stride, dim, keys.add(key), out.add(key));
            }
            key += V::COLUMNS * V::LANES;
        }
    }
}

#[inline(always)]
unsafe fn dots_columns<V: Lanes, const R: usize, const C: usize>(
    q: *const f32,
    q_stride: usize,
    dim: usize,
    keys: *const f32,
    out: *mut f32,
) {
    let mut acc = [[V::splat(0.0); C]; R];
    // SAFETY: as `logits` says.
    unsafe {
        for d in 0..dim {
            let mut column = [V::splat(0.0); C];
            for (c, column) in column.iter_mut().enumerate() {
                *column = V::load(keys.add(d * KEY_BLOCK + c * V::LANES));
            }
            for r in 0..R {
                let x = V::splat(*q.add(r * q_stride + d));
                for c in 0..C {
                    acc[r][c] = x.fma(column[c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                acc[r][c].store(out.add(r * KEY_BLOCK + c * V::LANES));
            }
        }
    }
}

/// acc[r] += weights[r, key] * values[key] for key in from..to, in order.
#[inline(always)]
pub(super) unsafe fn accumulate<V: Lanes, const R: usize>(
    weights: *const f32,
    values: *const f32,
    dim: usize,
    from: usize,
    to: usize,
    acc: *mut f32,
) {
    if from >= to {
        return;
    }
    let mut e = 0;
    // SAFETY: as `add_values` says.
    unsafe {
        while e + V::COLUMNS * V::LANES <= dim {
            if V::COLUMNS == 4 {
                accumulate_columns::<V, R, 4>(weights, values.add(e), dim, from, to, acc.add(e));
            } else {
                accumulate_columns::<V, R, 2>(weights, values.add(e), dim, from, to, acc.add(e));
            }
            e += V::COLUMNS * V::LANES;
        }
        while e < dim {
            accumulate_columns::<V, R, 1>(weights, values.add(e), dim, from, to, acc.add(e));
            e += V::LANES;
        }
    }
}

#[inline(always)]
unsafe fn accumulate_columns<V: Lanes, const R: usize, const C: usize>(
    weights: *const f32,
    values: *const f32,
    dim: usize,
    from: usize,
    to: usize,
    acc: *mut f32,
) {
    // SAFETY: as `add_values` says.
    unsafe {
        let mut sums = [[V::splat(0.0); C]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = V::load(acc.add(r * dim + c * V::LANES));
            }
        }
        for key in from..to {
            let mut value = [V::splat(0.0); C];
            for (c, value) in value.iter_mut().enumerate() {
                *value = V::load(values.add(key * dim + c * V::LANES));
            }
            for r in 0..R {
                let w = V::splat(*weights.add(r * KEY_BLOCK + key));
                for c in 0..C {
                    sums[r][c] = w.fma(value[c], sums[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C {
                sums[r][c].store(acc.add(r * dim + c * V::LANES));
            }
        }
    }
}
