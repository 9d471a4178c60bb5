//! RMSNorm and LayerNorm of float32 rows.

use crate::isa::Isa;
use crate::pool;
use crate::simd::{Kernel, Lanes, dispatch};

/// Elements below which a call stays on the calling thread.
const PARALLEL_FROM: usize = 1 << 15;

/// A norm of each row. Weights hold one or more rows of `dim`, used cyclically (one a head).
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// x * (weight + offset) / sqrt(mean(x^2) + eps)
    Rms { weight: &'a [f32], offset: f32 },
    /// (x - mean) * weight / sqrt(var + eps) + bias
    Layer {
        weight: &'a [f32],
        bias: Option<&'a [f32]>,
    },
}

impl<'a> Norm<'a> {
    /// Number of weights.
    pub fn weights(&self) -> usize {
        self.weight().len()
    }

    fn weight(&self) -> &'a [f32] {
        match *self {
            Norm::Rms { weight, .. } | Norm::Layer { weight, .. } => weight,
        }
    }
}

/// Normalize each row of `dim` elements of `x` into `out`. Panics unless `out` is as long as `x` and `dim` divides both and the weights.
pub fn normalize(norm: Norm<'_>, x: &[f32], dim: usize, eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "out must be as long as x");
    // SAFETY: both slices hold the elements, and they are different slices.
    unsafe { normalize_raw(norm, x.as_ptr(), x.len(), dim, eps, out.as_mut_ptr()) }
}

/// Like [`normalize`], in place.
pub fn normalize_in_place(norm: Norm<'_>, x: &mut [f32], dim: usize, eps: f32) {
    let (p, len) = (x.as_mut_ptr(), x.len());
    // SAFETY: source and destination may be the same memory.
    unsafe { normalize_raw(norm, p, len, dim, eps, p) }
}

/// # Safety
/// `len` floats at `x`, room for as many at `out`; `out` is `x` or does not overlap it; no other thread uses them meanwhile.
pub unsafe fn normalize_raw(
    norm: Norm<'_>,
    x: *const f32,
    len: usize,
    dim: usize,
    eps: f32,
    out: *mut f32,
) {
    if len == 0 {
        return;
    }
    let weights = norm.weight().len();
    assert!(
        dim > 0 && len.is_multiple_of(dim),
        "dim must divide the length"
    );
    assert!(
        weights > 0 && weights.is_multiple_of(dim),
        "dim must divide the weights"
    );
    if let Norm::Layer {
        bias: Some(bias), ..
    } = norm
    {
        assert_eq!(bias.len(), weights, "bias must be as long as the weight");
    }
    let rows = len / dim;
    let per_task = if len < PARALLEL_FROM {
        rows
    } else {
        (PARALLEL_FROM / 4 / dim).max(1)
    };
    let (isa, x, out) = (Isa::current(), x as usize, out as usize);
    pool::run(rows.div_ceil(per_task), &|task| {
        let first = task * per_task;
        dispatch(
            isa,
            Rows {
                norm,
                x: x as *const f32,
                out: out as *mut f32,
                dim,
                eps,
                first,
                last: (first + per_task).min(rows),
            },
        );
    });
}

struct Rows<'a> {
    norm: Norm<'a>,
    x: *const f32,
    out: *mut f32,
    dim: usize,
    eps: f32,
    first: usize,
    last: usize,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let weights = self.norm.weight();
        for row in self.first..self.last {
            let at = (row * self.dim) % weights.len();
            let w = &weights[at..at + self.dim];
            // SAFETY: `row` is below the number of rows that `normalize_raw` derived from the length.
            let (x, out) = unsafe { (self.x.add(row * self.dim), self.out.add(row * self.dim)) };
            match self.norm {
                Norm::Rms { offset, .. } => rms::<V>(x, w, offset, self.eps, out),
                Norm::Layer { bias, .. } => {
                    layer::<V>(x, w, bias.map(|b| &b[at..at + self.dim]), self.eps, out);
                }
            }
        }
    }
}

/// Sum over a row of x - centre, or of its square, in four interleaved chains.
#[inline(always)]
fn reduce<V: Lanes, const SQUARE: bool>(x: *const f32, n: usize, centre: f32) -> f32 {
    let mut sums = [V::splat(0.0); 4];
    let at = V::splat(centre);
    let mut i = 0;
    // SAFETY: the caller's row has `n` elements.
    unsafe {
        while i + 4 * V::LANES <= n {
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = add_term::<V, SQUARE>(V::load(x.add(i + c * V::LANES)).sub(at), *sum);
            }
            i += 4 * V::LANES;
        }
        while i + V::LANES <= n {
            sums[0] = add_term::<V, SQUARE>(V::load(x.add(i)).sub(at), sums[0]);
            i += V::LANES;
        }
        let mut total = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
        while i < n {
            let c = *x.add(i) - centre;
            total += if SQUARE { c * c } else { c };
            i += 1;
        }
        total
    }
}

#[inline(always)]
fn add_term<V: Lanes, const SQUARE: bool>(c: V, sum: V) -> V {
    if SQUARE { c.fma(c, sum) } else { sum.add(c) }
}

#[inline(always)]
fn rms<V: Lanes>(x: *const f32, weight: &[f32], offset: f32, eps: f32, out: *mut f32) {
    let n = weight.len();
    let scale = 1.0 / (reduce::<V, true>(x, n, 0.0) / n as f32 + eps).sqrt();
    scale_row::<V>(x, 0.0, scale, weight, offset, None, out);
}

#[inline(always)]
fn layer<V: Lanes>(x: *const f32, weight: &[f32], bias: Option<&[f32]>, eps: f32, out: *mut f32) {
    let n = weight.len();
    let mean = reduce::<V, false>(x, n, 0.0) / n as f32;
    let scale = 1.0 / (reduce::<V, true>(x, n, mean) / n as f32 + eps).sqrt();
    scale_row::<V>(x, mean, scale, weight, 0.0, bias, out);
}

/// out = (x - centre) * scale * (weight + offset) + bias
#[inline(always)]
fn scale_row<V: Lanes>(
    x: *const f32,
    centre: f32,
    scale: f32,
    weight: &[f32],
    offset: f32,
    bias: Option<&[f32]>,
    out: *mut f32,
) {
    let n = weight.len();
    let (centre, scale, offset) = (V::splat(centre), V::splat(scale), V::splat(offset));
    let mut i = 0;
    // SAFETY: the caller's rows have as many elements as the weight.
    unsafe {
        while i < n {
            let k = V::LANES.min(n - i);
            let y = load_at::<V>(x, i, k).sub(centre).mul(scale);
            let mut y = y.mul(load_at::<V>(weight.as_ptr(), i, k).add(offset));
            if let Some(bias) = bias {
                y = y.add(load_at::<V>(bias.as_ptr(), i, k));
            }
            if k == V::LANES {
                y.store(out.add(i));
            } else {
                y.store_partial(out.add(i), k);
            }
            i += V::LANES;
        }
    }
}

#[inline(always)]
unsafe fn load_at<V: Lanes>(p: *const f32, at: usize, n: usize) -> V {
    // SAFETY: the caller has `at + n` floats at `p`.
    unsafe {
        if n == V::LANES {
            V::load(p.add(at))
        } else {
            V::load_partial(p.add(at), n)
        }
    }
}
