//! Many candidates in descending order, without ids. Used for cuts that keep so many candidates that listing and sorting them with all
//! their data would take most of the time.
//!
//! A logit's weight depends only on its distance from the largest logit, so only the distances are sorted. The bits of a float that is not
//! negative have the order of the float. Every cut leaves one range of ranks, "typical" at most two. Candidates of one distance have the
//! order (logit descending, id ascending); only those at the ends of a range are ever distinguished.

use std::ops::{Range, RangeInclusive};

use super::candidates::Candidates;
use super::chain::share;
use super::peaks::place;
use super::radix;
use super::weights::{self, Slope};
use crate::isa::Isa;
use crate::simd::{Kernel, Lanes, MAX_LANES, dispatch};

/// Weights that share a stored sum.
const BLOCK: usize = 256;

/// Distances of candidates from the largest logit, ascending, and the ranks that are kept.
#[derive(Default)]
pub struct Ranked {
    /// distances of all candidates as bits, ascending; entries after them are undefined
    distances: Vec<u32>,
    near: Vec<u32>,
    spare: Vec<u32>,
    /// weights of the distances
    q: Vec<u64>,
    /// weight of the blocks before each
    before: Vec<u64>,
    kept: Vec<Range<usize>>,
    count: usize,
    isa: Isa,
    slope: Slope,
}

impl Ranked {
    /// Rank every finite logit of `x`.
    pub fn rank(&mut self, isa: Isa, slope: Slope, x: &[f32]) {
        self.read(isa, slope, x);
        radix::sort(&mut self.distances, &mut self.spare, self.count);
        self.weigh();
    }

    /// Set `c` to the smallest prefix of the descending order whose share of the weight is `part`, in ascending order of id, without
    /// ranking all candidates. A sample bounds the distance of the last one.
    pub fn list_share(&mut self, isa: Isa, slope: Slope, x: &[f32], part: f64, c: &mut Candidates) {
        self.read(isa, slope, x);
        self.weigh();
        let target = share(part, self.total());
        let (nearest, farthest) = self.bracket(part);
        let mut found = self.reach(target, nearest, farthest);
        if found.is_none() {
            found = self.reach(target, 0, u32::MAX);
        }
        let (distance, all, kept) = found.unwrap_or((u32::MAX, 0, 0));
        c.gather_within(isa, x, slope.peak, 0.0..=f32::from_bits(distance));
        if kept < all {
            let last = nth_place(c, slope.peak, distance, kept);
            c.retain_by_logit(|x, id| {
                ((slope.peak - x).to_bits(), place(x, id)) < (distance, last)
            });
        }
    }

    /// Distances of every finite logit, not sorted yet.
    fn read(&mut self, isa: Isa, slope: Slope, x: &[f32]) {
        let room = x.len() + MAX_LANES;
        if self.distances.len() < room {
            self.distances.resize(room, 0);
            self.near.resize(room, 0);
            self.spare.resize(room, 0);
        }
        let (peak, out) = (slope.peak, &mut self.distances);
        self.count = dispatch(isa, Distances { x, peak, out });
        (self.isa, self.slope) = (isa, slope);
    }

    fn weigh(&mut self) {
        self.q.resize(self.count, 0);
        self.before.clear();
        let weigh = Weigh {
            slope: self.slope,
            distances: &self.distances[..self.count],
            q: &mut self.q,
            before: &mut self.before,
        };
        dispatch(self.isa, weigh);
        self.kept.clear();
        self.kept.push(0..self.count);
    }

    /// Distances between which a share of the weight is most likely reached.
    fn bracket(&self, part: f64) -> (u32, u32) {
        // The bracket reaches over 80 of 1024 samples to either side: five standard deviations of the rank of a share.
        const SAMPLES: usize = 1024;
        const REACH: usize = 80;
        let step = (self.count / SAMPLES).max(1);
        let ranks = (0..self.count).step_by(step);
        let mut sample: Vec<(u32, u64)> = ranks.map(|i| (self.distances[i], self.q[i])).collect();
        sample.sort_unstable();
        let target = part * sample.iter().map(|s| s.1 as f64).sum::<f64>();
        let mut sum = 0.0;
        let at = sample.iter().take_while(|s| {
            sum += s.1 as f64;
            sum < target
        });
        let at = at.count();
        let nearest = at.checked_sub(REACH).map_or(0, |i| sample[i].0);
        let farthest = sample.get(at + REACH).map_or(u32::MAX, |s| s.0);
        (nearest, farthest)
    }

    /// The distance at which the weight `target` is reached, the number of candidates there and how many of them it takes. None if the
    /// distance is not within these bounds.
    fn reach(&mut self, target: u64, nearest: u32, farthest: u32) -> Option<(u32, usize, usize)> {
        let split = Split {
            distances: &self.distances[..self.count],
            q: &self.q,
            between: nearest..=farthest,
            out: &mut self.near,
        };
        let (mut sum, count) = dispatch(self.isa, split);
        if sum >= target {
            return None;
        }
        radix::sort(&mut self.near, &mut self.spare, count);
        let near = &self.near[..count];
        for (at, &d) in near.iter().enumerate() {
            sum += self.slope.weight_at(d);
            if sum >= target {
                let first = near.partition_point(|&other| other < d);
                let all = near.partition_point(|&other| other <= d) - first;
                return Some((d, all, at + 1 - first));
            }
        }
        None
    }

    pub fn len(&self) -> usize {
        self.kept.iter().map(Range::len).sum()
    }

    /// Weight of all candidates that are kept.
    pub fn total(&self) -> u64 {
        self.kept.iter().map(|r| self.weight(r.clone())).sum()
    }

    /// Weight of the first candidate.
    pub fn highest(&self) -> u64 {
        self.kept.first().map_or(0, |r| self.q[r.start])
    }

    /// Keep the smallest prefix whose weight reaches `target`.
    pub fn keep_mass(&mut self, target: u64) {
        let kept = self.prefix();
        let block = self.before.partition_point(|&b| b < target) - 1;
        let mut sum = self.before[block];
        let mut at = block * BLOCK;
        while at < kept.end {
            sum += self.q[at];
            at += 1;
            if sum >= target {
                break;
            }
        }
        self.kept[0].end = at;
    }

    /// Keep the candidates of at least this weight, or the first one.
    pub fn keep_weight(&mut self, least: u64) {
        let first = self.kept[0].start;
        for range in &mut self.kept {
            let heavy = self.q[range.clone()].partition_point(|&q| q >= least);
            range.end = range.start + heavy;
        }
        self.kept.retain(|r| !r.is_empty());
        if self.kept.is_empty() {
            self.kept.push(first..first + 1);
        }
    }

    /// Keep one more than the leading terms of |second difference| whose running share is at most z.
    pub fn keep_tail_free(&mut self, z: f64) {
        let kept = self.prefix();
        let least = (1e-8 * self.total() as f64).ceil() as u64;
        let count = self.q[kept].partition_point(|&q| q >= least);
        if count < 3 {
            return;
        }
        let q = &self.q[..count];
        let mut sums = vec![0; (count - 2).div_ceil(BLOCK)];
        dispatch(self.isa, Curves { q, sums: &mut sums });
        let total: u64 = sums.iter().sum();
        if total == 0 {
            return;
        }
        let limit = (z * total as f64) as u64;
        let mut running = 0;
        let mut leading = 0;
        for sum in sums {
            if running + sum > limit {
                break;
            }
            running += sum;
            leading = (leading + BLOCK).min(count - 2);
        }
        while leading < count - 2 {
            running += curve(q, leading);
            if running > limit {
                break;
            }
            leading += 1;
        }
        self.kept[0].end = leading + 1;
    }

    /// Keep the smallest set by |surprise - entropy| that reaches the weight `target`, as [`super::chain`] defines it.
    pub fn keep_typical(&mut self, target: u64) {
        let kept = self.prefix();
        let expected = self.expected_surprise();
        let away = |i: usize| (-f64::from(self.log_weight(i)) - expected).abs();
        // Left of `middle` the surprise is below the entropy: there, candidates further left are further away.
        let middle = first_of(kept.clone(), |i| -f64::from(self.log_weight(i)) >= expected);
        let within = |a: f64, strictly: bool| {
            let near = |i: usize| away(i) < a || (!strictly && away(i) == a);
            first_of(kept.start..middle, near)..first_of(middle..kept.end, |i| !near(i))
        };
        // The distance at which the weight is reached: floats of one sign order as their bits.
        let (mut low, mut high) = (0, away(kept.start).max(away(kept.end - 1)).to_bits());
        while low < high {
            let half = low + (high - low) / 2;
            if self.weight(within(f64::from_bits(half), false)) >= target {
                high = half;
            } else {
                low = half + 1;
            }
        }
        let (inner, outer) = (
            within(f64::from_bits(low), true),
            within(f64::from_bits(low), false),
        );
        let mut sum = self.weight(inner.clone());
        let mut left = outer.start;
        while left < inner.start && sum < target {
            sum += self.q[left];
            left += 1;
        }
        let mut right = inner.end;
        while right < outer.end && sum < target {
            sum += self.q[right];
            right += 1;
        }
        let (near, far) = if left < inner.start {
            (outer.start..left, inner)
        } else {
            (outer.start..right, right..right)
        };
        self.kept.clear();
        self.kept.extend([near, far]);
        self.kept.retain(|r| !r.is_empty());
    }

    /// Set `c` to the kept candidates in ascending order of id. `x`: the row that they come from; None if `c` holds all ranked candidates.
    pub fn list(&self, x: Option<&[f32]>, c: &mut Candidates) {
        let (first, last) = (
            self.kept[0].start,
            self.kept.last().map_or(0, |r| r.end - 1),
        );
        let (nearest, farthest) = (self.distances[first], self.distances[last]);
        if let Some(x) = x {
            c.gather_within(
                self.isa,
                x,
                self.slope.peak,
                f32::from_bits(nearest)..=f32::from_bits(farthest),
            );
        }
        let whole = |range: &Range<usize>| {
            let cut = |at: usize| {
                at > 0 && at < self.count && self.distances[at - 1] == self.distances[at]
            };
            !cut(range.start) && !cut(range.end)
        };
        if x.is_some() && self.kept.len() == 1 && whole(&self.kept[0]) {
            return;
        }
        let ends: Vec<_> = self
            .kept
            .iter()
            .map(|r| (self.end(r.start, c), self.end(r.end, c)))
            .collect();
        let peak = self.slope.peak;
        c.retain_by_logit(|x, id| {
            let at = ((peak - x).to_bits(), place(x, id));
            ends.iter().any(|&(from, to)| from <= at && at < to)
        });
    }

    /// (distance, place) from which on candidates have rank `rank` or higher.
    fn end(&self, rank: usize, c: &Candidates) -> (u32, u64) {
        let distances = &self.distances[..self.count];
        let Some(&distance) = distances.get(rank) else {
            return (u32::MAX, u64::MAX);
        };
        let start = distances.partition_point(|&d| d < distance);
        if start == rank {
            return (distance, 0);
        }
        (
            distance,
            nth_place(c, self.slope.peak, distance, rank - start),
        )
    }

    /// The kept ranks while they form a prefix, before "typical".
    fn prefix(&self) -> Range<usize> {
        debug_assert!(self.kept.len() == 1 && self.kept[0].start == 0);
        self.kept[0].clone()
    }

    fn weight(&self, ranks: Range<usize>) -> u64 {
        self.weight_before(ranks.end.max(ranks.start)) - self.weight_before(ranks.start)
    }

    fn weight_before(&self, rank: usize) -> u64 {
        let block = rank / BLOCK;
        self.before[block] + self.q[block * BLOCK..rank].iter().sum::<u64>()
    }

    fn log_weight(&self, rank: usize) -> f32 {
        self.slope
            .log_weight_at(f32::from_bits(self.distances[rank]))
    }

    fn expected_surprise(&self) -> f64 {
        let distances = &self.distances[self.prefix()];
        let sum = weights::surprises_at(self.isa, self.slope, distances);
        sum as f64 / self.total() as f64
    }
}

/// Place of the candidate that follows `before` others of its distance.
fn nth_place(c: &Candidates, peak: f32, distance: u32, before: usize) -> u64 {
    let equal = (0..c.id.len()).filter(|&i| (peak - c.x[i]).to_bits() == distance);
    let mut places: Vec<u64> = equal.map(|i| place(c.x[i], c.id[i])).collect();
    *places.select_nth_unstable(before).1
}

/// First element of `range` from which on `holds` is true; its end if it never is.
fn first_of(range: Range<usize>, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let half = low + (high - low) / 2;
        if holds(half) {
            high = half;
        } else {
            low = half + 1;
        }
    }
    low
}

/// |second difference| at `i`
#[inline(always)]
fn curve(q: &[u64], i: usize) -> u64 {
    (q[i] as i64 - 2 * q[i + 1] as i64 + q[i + 2] as i64).unsigned_abs()
}

struct Distances<'a> {
    x: &'a [f32],
    peak: f32,
    out: &'a mut [u32],
}

impl Kernel for Distances<'_> {
    type Output = usize;
    #[inline(always)]
    fn run<V: Lanes>(self) -> usize {
        let mut count = 0;
        let peak = V::splat(self.peak);
        let to = self.out.as_mut_ptr().cast::<f32>();
        let whole = self.x.chunks_exact(V::LANES);
        for &x in whole.remainder() {
            self.out[count] = (self.peak - x).to_bits();
            count += usize::from(x.is_finite());
        }
        for chunk in whole {
            // SAFETY: a chunk has `LANES` floats; `out` has room for `MAX_LANES` more than `x` has.
            unsafe {
                let x = V::load(chunk.as_ptr());
                let mask = x.within(f32::MIN, f32::MAX);
                peak.sub(x).store_chosen(mask, to.add(count));
                count += mask.count_ones() as usize;
            }
        }
        count
    }
}

struct Weigh<'a> {
    slope: Slope,
    distances: &'a [u32],
    q: &'a mut [u64],
    before: &'a mut Vec<u64>,
}

impl Kernel for Weigh<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let mut sum = 0;
        self.before.push(0);
        for (q, distances) in self.q.chunks_mut(BLOCK).zip(self.distances.chunks(BLOCK)) {
            for (q, &d) in q.iter_mut().zip(distances) {
                *q = self.slope.weight_at(d);
            }
            sum += q.iter().sum::<u64>();
            self.before.push(sum);
        }
    }
}

struct Split<'a> {
    distances: &'a [u32],
    q: &'a [u64],
    between: RangeInclusive<u32>,
    out: &'a mut [u32],
}

impl Kernel for Split<'_> {
    /// weight of all nearer distances, and number of those in between, which are written
    type Output = (u64, usize);
    #[inline(always)]
    fn run<V: Lanes>(self) -> Self::Output {
        let (nearest, farthest) = (*self.between.start(), *self.between.end());
        let mut sum = 0;
        for (&d, &q) in self.distances.iter().zip(self.q) {
            sum += if d < nearest { q } else { 0 };
        }
        // No distance is NaN, and infinity is the largest.
        let (low, high) = (
            f32::from_bits(nearest),
            f32::from_bits(farthest.min(INFINITE)),
        );
        let mut count = 0;
        let whole = self.distances.chunks_exact(V::LANES);
        for &d in whole.remainder() {
            self.out[count] = d;
            count += usize::from(nearest <= d && d <= farthest);
        }
        for chunk in whole {
            // SAFETY: a chunk has `LANES` elements; `out` has room for `MAX_LANES` more than there are distances.
            unsafe {
                let d = V::load(chunk.as_ptr().cast());
                let mask = d.within(low, high);
                d.store_chosen(mask, self.out.as_mut_ptr().add(count).cast());
                count += mask.count_ones() as usize;
            }
        }
        (sum, count)
    }
}

const INFINITE: u32 = f32::INFINITY.to_bits();

struct Curves<'a> {
    q: &'a [u64],
    sums: &'a mut [u64],
}

impl Kernel for Curves<'_> {
    type Output = ();
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let most = self.q.len() - 2;
        for (b, slot) in self.sums.iter_mut().enumerate() {
            let (from, to) = (b * BLOCK, ((b + 1) * BLOCK).min(most));
            let q = &self.q[from..to + 2];
            let (a, b, c) = (&q[..to - from], &q[1..], &q[2..]);
            let mut sum = 0;
            for ((&a, &b), &c) in a.iter().zip(b).zip(c) {
                sum += (a as i64 - 2 * b as i64 + c as i64).unsigned_abs();
            }
            *slot = sum;
        }
    }
}
