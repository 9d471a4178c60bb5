//! Weights: e^l as fixed-point numbers, bitwise identical on all processors.

use crate::isa::Isa;
use crate::simd::{Kernel, Lanes, dispatch};

/// The weight of the most probable token: 2^44.
pub const ONE: f64 = (1u64 << 44) as f64;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// 1.5 * 2^23: adding it rounds to an integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;
// ln 2 in two parts, the first with few enough bits that n * LN2_HIGH is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this, a weight is under 2^-44.
const LOWEST: f32 = -31.0;

/// The map from a logit to the logarithm of a weight.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slope {
    pub peak: f32,
    pub scale: f32,
    pub smooth: bool,
}

impl Slope {
    /// l of logit `x`: at most 0 for x up to the peak.
    #[inline(always)]
    pub fn log_weight(self, x: f32) -> f32 {
        self.log_weight_at(self.peak - x)
    }

    /// l of the logit at `distance` below the peak.
    #[inline(always)]
    pub fn log_weight_at(self, distance: f32) -> f32 {
        let d = if self.smooth {
            distance * distance
        } else {
            distance
        };
        -d * self.scale
    }

    /// Weight of the logit at the distance with these bits below the peak.
    #[inline(always)]
    pub fn weight_at(self, distance: u32) -> u64 {
        fixed(weight(self.log_weight_at(f32::from_bits(distance))))
    }

    /// Bits of the largest distance at which a logit has at least this weight; None if the peak has less.
    pub fn reach(self, least: u64) -> Option<u32> {
        // A weight never increases with the distance, and distances have the order of their bits.
        let (mut low, mut high) = (0, f32::INFINITY.to_bits() + 1);
        while low < high {
            let half = low + (high - low) / 2;
            if self.weight_at(half) >= least {
                low = half + 1;
            } else {
                high = half;
            }
        }
        low.checked_sub(1)
    }
}

/// e^l for l <= 0 within 2 units in the last place, monotonic in l, 0 below -31. Multiplications and additions are separate on purpose: a
/// fused one rounds differently, and not every processor has it.
#[inline(always)]
pub fn weight(l: f32) -> f32 {
    let held = if l > -40.0 { l } else { -40.0 };
    let t = held * LOG2_E + ROUNDER;
    let n = t - ROUNDER;
    let r = held - n * LN2_HIGH;
    let r = r - n * LN2_LOW;
    // Taylor series to r^7 for |r| <= ln(2) / 2: the next term is below 2^-25. In this form a larger l never has a lower weight.
    let z = r * r;
    let mut p = 1.0f32 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let p = (p * z + r) + 1.0;
    let exponent = (t.to_bits() as i32).wrapping_sub(ROUNDER.to_bits() as i32) + 127;
    let w = p * f32::from_bits((exponent << 23) as u32);
    if l >= LOWEST { w } else { 0.0 }
}

/// floor(w * 2^44) for w in 0..=1.
#[inline(always)]
pub fn fixed(w: f32) -> u64 {
    let bits = w.to_bits();
    let mantissa = u64::from(bits & 0x007f_ffff | 0x0080_0000);
    let down = 127u32.wrapping_sub(bits >> 23).min(63);
    (mantissa << 21) >> down
}

/// floor(e^l * |l| * 2^44): the terms of an entropy.
#[inline(always)]
pub fn fixed_surprise(l: f32) -> u64 {
    let w = weight(l);
    fixed(if w > 0.0 { w * -l } else { 0.0 })
}

/// l and q of each logit.
pub fn weigh(isa: Isa, slope: Slope, x: &[f32], l: &mut [f32], q: &mut [u64]) {
    dispatch(isa, Weigh { slope, x, l, q });
}

struct Weigh<'a> {
    slope: Slope,
    x: &'a [f32],
    l: &'a mut [f32],
    q: &'a mut [u64],
}

impl Kernel for Weigh<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let n = self.x.len();
        let (l, q) = (&mut self.l[..n], &mut self.q[..n]);
        for i in 0..n {
            l[i] = self.slope.log_weight(self.x[i]);
            q[i] = fixed(weight(l[i]));
        }
    }
}

/// l := (l - highest) * scale, with q updated.
pub fn reweigh(isa: Isa, highest: f32, scale: f32, l: &mut [f32], q: &mut [u64]) {
    dispatch(
        isa,
        Reweigh {
            highest,
            scale,
            l,
            q,
        },
    );
}

struct Reweigh<'a> {
    highest: f32,
    scale: f32,
    l: &'a mut [f32],
    q: &'a mut [u64],
}

impl Kernel for Reweigh<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let n = self.l.len();
        let q = &mut self.q[..n];
        for i in 0..n {
            self.l[i] = (self.l[i] - self.highest) * self.scale;
            q[i] = fixed(weight(self.l[i]));
        }
    }
}

/// Sum of the terms of an entropy.
pub fn surprises(isa: Isa, l: &[f32]) -> u64 {
    dispatch(isa, Surprises { l })
}

struct Surprises<'a> {
    l: &'a [f32],
}

impl Kernel for Surprises<'_> {
    type Output = u64;
    #[inline(always)]
    fn run<V: Lanes>(self) -> u64 {
        self.l.iter().map(|&l| fixed_surprise(l)).sum()
    }
}

/// The same for distances from the peak as bits.
pub fn surprises_at(isa: Isa, slope: Slope, distances: &[u32]) -> u64 {
    dispatch(isa, SurprisesAt { slope, distances })
}

struct SurprisesAt<'a> {
    slope: Slope,
    distances: &'a [u32],
}

impl Kernel for SurprisesAt<'_> {
    type Output = u64;
    #[inline(always)]
    fn run<V: Lanes>(self) -> u64 {
        let term = |&d: &u32| fixed_surprise(self.slope.log_weight_at(f32::from_bits(d)));
        self.distances.iter().map(term).sum()
    }
}

/// Sum of q.
pub fn sum(isa: Isa, slope: Slope, x: &[f32]) -> u64 {
    dispatch(isa, Sum { slope, x })
}

struct Sum<'a> {
    slope: Slope,
    x: &'a [f32],
}

impl Kernel for Sum<'_> {
    type Output = u64;
    #[inline(always)]
    fn run<V: Lanes>(self) -> u64 {
        let weight = |&v: &f32| fixed(weight(self.slope.log_weight(v)));
        self.x.iter().map(weight).sum()
    }
}

/// Sum of q over each block of `block` logits.
pub fn block_sums(isa: Isa, slope: Slope, x: &[f32], block: usize, sums: &mut Vec<u64>) {
    sums.clear();
    sums.resize(x.len().div_ceil(block), 0);
    dispatch(
        isa,
        BlockSums {
            slope,
            x,
            block,
            sums,
        },
    );
}

struct BlockSums<'a> {
    slope: Slope,
    x: &'a [f32],
    block: usize,
    sums: &'a mut [u64],
}

impl Kernel for BlockSums<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        for (sum, block) in self.sums.iter_mut().zip(self.x.chunks(self.block)) {
            *sum = block
                .iter()
                .map(|&v| fixed(weight(self.slope.log_weight(v))))
                .sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_close_and_identical_on_every_instruction_set() {
        let l: Vec<f32> = (0..200_000).map(|i| -(i as f32) * 1.7e-4).collect();
        let slope = Slope {
            peak: 0.0,
            scale: 1.0,
            smooth: false,
        };
        let run = |isa| {
            let (mut out, mut q) = (vec![0.0; l.len()], vec![0; l.len()]);
            weigh(isa, slope, &l, &mut out, &mut q);
            q
        };
        let plain = run(Isa::Scalar);
        assert_eq!(plain[0], 1 << 44);
        for (&q, &l) in plain.iter().zip(&l) {
            let want = f64::from(l).exp() * ONE;
            assert!((q as f64 - want).abs() <= want * 3e-7 + 1.0, "{l}");
        }
        for isa in [Isa::Avx2, Isa::Avx512] {
            if isa <= Isa::detect() {
                assert_eq!(run(isa), plain);
            }
        }
        // Every float: a larger logit never has a lower weight.
        let mut last = f32::INFINITY;
        for bits in 1e-9f32.to_bits()..=31.0f32.to_bits() {
            let w = weight(-f32::from_bits(bits));
            assert!(w <= last, "{}", f32::from_bits(bits));
            last = w;
        }
        for l in [f32::NEG_INFINITY, -1e30, -31.1] {
            assert_eq!((fixed(weight(l)), fixed_surprise(l)), (0, 0));
        }
    }
}
