//! The candidates of a row, in ascending order of id, and the borders of their orders.

use std::ops::RangeInclusive;

use super::peaks::{BLOCK, finite, key, place};
use super::weights::{self, Slope};
use crate::isa::Isa;
use crate::simd::{Kernel, Lanes, MAX_LANES, dispatch};

/// Bins of a histogram over an order.
const BINS: usize = 2048;
/// Shorter lists are sorted directly.
const SORTED_AT_ONCE: usize = 96;
/// Longer lists are sorted by radix.
const RADIX_FROM: usize = 1536;

/// Ids above -inf that have not been cut, with logits, log-weights and weights. `total` is the sum of `q`.
#[derive(Default, Debug)]
pub struct Candidates {
    pub id: Vec<u32>,
    pub x: Vec<f32>,
    pub l: Vec<f32>,
    pub q: Vec<u64>,
    pub total: u64,
}

/// The last place of an order that is kept: candidates of earlier bins, and those of this bin up to `last`.
#[derive(Clone, Copy, Debug)]
pub struct Border {
    binned: bool,
    bin: usize,
    last: (u64, u64),
}

impl Border {
    /// Whether a candidate of this bin and place is kept.
    #[inline(always)]
    pub fn keeps(self, bin: usize, place: impl FnOnce() -> (u64, u64)) -> bool {
        if self.binned && bin != self.bin {
            return bin < self.bin;
        }
        place() <= self.last
    }

    /// Place of the last candidate that is kept.
    pub fn last(self) -> (u64, u64) {
        self.last
    }
}

impl Candidates {
    pub fn len(&self) -> usize {
        self.id.len()
    }

    pub fn clear(&mut self) {
        self.id.clear();
        self.x.clear();
    }

    pub fn push(&mut self, id: usize, x: f32) {
        self.id.push(id as u32);
        self.x.push(x);
    }

    /// Collect every logit for which `keep` is true from the blocks for which `look` is true.
    pub fn gather(&mut self, x: &[f32], look: impl Fn(usize) -> bool, keep: impl Fn(f32) -> bool) {
        self.clear();
        for (b, block) in x.chunks(BLOCK).enumerate() {
            if !look(b) {
                continue;
            }
            let at = self.id.len();
            self.id.resize(at + BLOCK, 0);
            self.x.resize(at + BLOCK, 0.0);
            // Written always, counted conditionally: no branch to mispredict.
            let (ids, xs) = (&mut self.id[at..], &mut self.x[at..]);
            let mut count = 0;
            for (j, &v) in block.iter().enumerate() {
                ids[count] = (b * BLOCK + j) as u32;
                xs[count] = v;
                count += usize::from(keep(v) && finite(key(v)));
            }
            self.id.truncate(at + count);
            self.x.truncate(at + count);
        }
    }

    /// Collect every logit above -inf whose distance from the peak is within `distances`.
    pub fn gather_within(
        &mut self,
        isa: Isa,
        x: &[f32],
        peak: f32,
        distances: RangeInclusive<f32>,
    ) {
        self.clear();
        self.id.reserve(x.len() + MAX_LANES);
        self.x.reserve(x.len() + MAX_LANES);
        let (id, to) = (self.id.as_mut_ptr(), self.x.as_mut_ptr());
        let within = Within {
            x,
            peak,
            distances,
            id,
            to,
        };
        let count = dispatch(isa, within);
        // SAFETY: the kernel has written `count` elements.
        unsafe {
            self.id.set_len(count);
            self.x.set_len(count);
        }
    }

    /// Keep the candidates for which `keep` is true by logit and id; weights are not computed yet.
    pub fn retain_by_logit(&mut self, keep: impl Fn(f32, u32) -> bool) {
        let mut to = 0;
        for i in 0..self.id.len() {
            (self.id[to], self.x[to]) = (self.id[i], self.x[i]);
            to += usize::from(keep(self.x[to], self.id[to]));
        }
        self.id.truncate(to);
        self.x.truncate(to);
    }

    /// Compute l, q and the total from the logits.
    pub fn weigh(&mut self, isa: Isa, slope: Slope) {
        self.l.resize(self.x.len(), 0.0);
        self.q.resize(self.x.len(), 0);
        weights::weigh(isa, slope, &self.x, &mut self.l, &mut self.q);
        self.total = self.q.iter().sum();
    }

    /// p^(scale), relative to the candidates' own highest.
    pub fn reweigh(&mut self, isa: Isa, scale: f32) {
        let highest = self.l.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        weights::reweigh(isa, highest, scale, &mut self.l, &mut self.q);
        self.total = self.q.iter().sum();
    }

    /// Keep the first k by (logit descending, id ascending); weights are not computed yet.
    pub fn keep_top(&mut self, k: usize, scratch: &mut Vec<u64>) {
        if self.len() <= k {
            return;
        }
        scratch.clear();
        scratch.extend(self.id.iter().zip(&self.x).map(|(&id, &x)| place(x, id)));
        let last = *scratch.select_nth_unstable(k - 1).1;
        self.retain_by_logit(|x, id| place(x, id) <= last);
    }

    /// Keep the candidates at the indices for which `keep` is true.
    pub fn retain(&mut self, keep: impl Fn(&Self, usize) -> bool) {
        let mut to = 0;
        for i in 0..self.len() {
            let kept = keep(self, i);
            self.id[to] = self.id[i];
            self.x[to] = self.x[i];
            self.l[to] = self.l[i];
            self.q[to] = self.q[i];
            to += usize::from(kept);
        }
        self.id.truncate(to);
        self.x.truncate(to);
        self.l.truncate(to);
        self.q.truncate(to);
        self.total = self.q.iter().sum();
    }

    /// Place of a candidate in descending order.
    #[inline(always)]
    pub fn descending(&self, i: usize) -> (u64, u64) {
        (!self.q[i], place(self.x[i], self.id[i]))
    }

    /// Index of the first candidate in descending order.
    pub fn first(&self) -> usize {
        let order = |&i: &usize| self.descending(i);
        (0..self.len()).min_by_key(order).unwrap_or(0)
    }

    /// Keep the candidates of at least this weight, or the first one.
    pub fn keep_weight(&mut self, least: u64) {
        if self.q.iter().any(|&q| q >= least) {
            self.retain(|c, i| c.q[i] >= least);
        } else {
            let first = self.first();
            self.retain(|_, i| i == first);
        }
    }

    /// Border of the smallest prefix of the descending order whose weight reaches `target`.
    pub fn descending_border(&self, target: u64) -> Border {
        self.border(target, |c, i| bin_of_weight(c.q[i]), Self::descending)
    }

    pub fn keep_descending(&mut self, border: Border) {
        self.retain(|c, i| border.keeps(bin_of_weight(c.q[i]), || c.descending(i)));
    }

    /// Border of the smallest prefix whose weight reaches `target`, in the order of `order`, along which `bin` must not decrease.
    pub fn border(
        &self,
        target: u64,
        bin: impl Fn(&Self, usize) -> usize,
        order: impl Fn(&Self, usize) -> (u64, u64),
    ) -> Border {
        let mut below = 0;
        let mut at = 0;
        let many = self.len() > SORTED_AT_ONCE;
        if many {
            let mut sums = [0u64; BINS];
            for i in 0..self.len() {
                sums[bin(self, i)] += self.q[i];
            }
            while at < BINS - 1 && below + sums[at] < target {
                below += sums[at];
                at += 1;
            }
        }
        let mut inside: Vec<((u64, u64), u64)> = (0..self.len())
            .filter(|&i| !many || bin(self, i) == at)
            .map(|i| (order(self, i), self.q[i]))
            .collect();
        inside.sort_unstable();
        let mut last = (u64::MAX, u64::MAX);
        for (place, q) in inside {
            last = place;
            below += q;
            if below >= target {
                break;
            }
        }
        Border {
            bin: at,
            last,
            binned: many,
        }
    }

    /// Indices of all candidates in descending order, before XTC: by logit.
    pub fn sorted(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.len() as u32).collect();
        if order.len() < RADIX_FROM {
            order.sort_unstable_by_key(|&i| self.descending(i as usize));
            return order;
        }
        let mut from: Vec<u64> = (0..self.len())
            .map(|i| place(self.x[i], 0) | i as u64)
            .collect();
        let mut to = vec![0; from.len()];
        for shift in [32, 43, 54] {
            radix_pass(&from, &mut to, shift);
            std::mem::swap(&mut from, &mut to);
        }
        for (slot, entry) in order.iter_mut().zip(&from) {
            *slot = *entry as u32;
        }
        order
    }

    /// The first `n` in descending order with their probabilities.
    pub fn top(&self, n: usize) -> Vec<(u32, f64)> {
        let mut order: Vec<usize> = (0..self.len()).collect();
        if n < order.len() && n > 0 {
            order.select_nth_unstable_by_key(n - 1, |&i| self.descending(i));
        }
        order.truncate(n);
        order.sort_unstable_by_key(|&i| self.descending(i));
        let total = self.total.max(1) as f64;
        order
            .into_iter()
            .map(|i| (self.id[i], self.q[i] as f64 / total))
            .collect()
    }
}

/// `id` and `to` have room for `MAX_LANES` more elements than `x` has.
struct Within<'a> {
    x: &'a [f32],
    peak: f32,
    distances: RangeInclusive<f32>,
    id: *mut u32,
    to: *mut f32,
}

impl Kernel for Within<'_> {
    type Output = usize;
    #[inline(always)]
    fn run<V: Lanes>(self) -> usize {
        let (low, high) = (*self.distances.start(), *self.distances.end());
        let peak = V::splat(self.peak);
        // Indices of lanes, carried through float registers.
        let lanes: [f32; MAX_LANES] = std::array::from_fn(|i| f32::from_bits(i as u32));
        // SAFETY: `MAX_LANES` floats.
        let lanes = unsafe { V::load(lanes.as_ptr()) };
        let mut count = 0;
        let whole = self.x.len() / V::LANES * V::LANES;
        for at in (0..whole).step_by(V::LANES) {
            // SAFETY: `whole` is a multiple of `LANES`; there is room for a vector after `count`, all of which is written.
            unsafe {
                let x = V::load(self.x.as_ptr().add(at));
                let mask = peak.sub(x).within(low, high) & x.within(f32::MIN, f32::MAX);
                x.store_chosen(mask, self.to.add(count));
                lanes.store_chosen(mask, self.id.add(count).cast());
                for id in std::slice::from_raw_parts_mut(self.id.add(count), V::LANES) {
                    *id = id.wrapping_add(at as u32);
                }
                count += mask.count_ones() as usize;
            }
        }
        for at in whole..self.x.len() {
            let x = self.x[at];
            // SAFETY: at most as many elements are written as there are logits.
            unsafe {
                self.id.add(count).write(at as u32);
                self.to.add(count).write(x);
            }
            let distance = self.peak - x;
            count += usize::from(x.is_finite() && low <= distance && distance <= high);
        }
        count
    }
}

/// Bins from the largest weights to 0, 32 an octave.
#[inline(always)]
fn bin_of_weight(q: u64) -> usize {
    const LOWEST: u32 = 127 << 5;
    // A weight that rounds up to the next octave keeps the order.
    let bits = (q as f32).to_bits() >> 18;
    BINS - 1 - (bits.max(LOWEST) - LOWEST).min(BINS as u32 - 1) as usize
}

/// One stable pass by 11 bits.
fn radix_pass(from: &[u64], to: &mut [u64], shift: u32) {
    let mut starts = [0usize; 2048];
    for entry in from {
        starts[(entry >> shift & 2047) as usize] += 1;
    }
    let mut at = 0;
    for start in &mut starts {
        at += std::mem::replace(start, at);
    }
    for &entry in from {
        let slot = &mut starts[(entry >> shift & 2047) as usize];
        to[*slot] = entry;
        *slot += 1;
    }
}
