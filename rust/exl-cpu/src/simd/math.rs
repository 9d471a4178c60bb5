//! Elementary functions on lanes.

use super::Lanes;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2 in two parts, the first with few enough bits that n * LN2_HIGH is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
const EXP_MIN: f32 = -87.3;
const EXP_MAX: f32 = 88.3;

/// e^x within 2 units in the last place; exactly 0 below -87.3 (so for -inf), limited to e^88.3 above; NaN stays.
#[inline(always)]
pub(crate) fn exp<V: Lanes>(x: V) -> V {
    // The bound comes first: `max` and `min` return the second operand if either is NaN.
    let clamped = V::splat(EXP_MIN).max(V::splat(EXP_MAX).min(x));
    let n = clamped.mul(V::splat(LOG2_E)).round();
    let r = n.fma(V::splat(-LN2_HIGH), clamped);
    let r = n.fma(V::splat(-LN2_LOW), r);
    // Taylor series to r^7 for |r| <= ln(2) / 2: the next term is below 2^-25.
    let mut p = V::splat(1.0 / 5040.0);
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p.fma(r, V::splat(c));
    }
    p.mul(n.exp2_int()).zero_below(x, EXP_MIN)
}

/// 1 / (1 + e^-x)
#[inline(always)]
pub(crate) fn sigmoid<V: Lanes>(x: V) -> V {
    let e = exp(V::splat(0.0).sub(x));
    V::splat(1.0).div(V::splat(1.0).add(e))
}

/// tanh x within a few units in the last place.
#[inline(always)]
pub(crate) fn tanh<V: Lanes>(x: V) -> V {
    // 1 - 2 / (e^2x + 1) loses digits near zero, so an odd polynomial (minimax up to 0.625) is used there.
    const SPLIT: f32 = 0.625;
    const BELOW: f32 = 0.624_999_94;
    let negative = V::splat(0.0).sub(x);
    let magnitude = x.max(negative);
    let far = sigmoid(x.add(x)).fma(V::splat(2.0), V::splat(-1.0));
    let z = x.mul(x);
    let mut p = V::splat(-5.704_988_7e-3);
    for c in [2.063_909e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_8] {
        p = p.fma(z, V::splat(c));
    }
    let near = p.mul(z).fma(x, x);
    let reversed = V::splat(0.0).sub(magnitude);
    far.zero_below(magnitude, SPLIT)
        .add(near.zero_below(reversed, -BELOW))
}
