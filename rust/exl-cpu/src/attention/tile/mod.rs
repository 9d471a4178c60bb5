//! One tile: query tokens of one sequence, the heads that share one key/value head, and all their visible keys.

mod block;

use self::block::BlockRows;
use super::math::{ROWS, accumulate, cap, exp_scalar, largest, logits, scale_by, weigh};
use super::{Attention, KEY_BLOCK, SPLIT, visible};
use crate::kv::{Plane, hadamard_rows};
use crate::simd::{Kernel, Lanes, MAX_LANES};

/// Tokens `first..first + tokens` of sequence `row`, and the union `from..to` of the keys they see.
#[derive(Debug)]
pub(super) struct Tile {
    pub first: usize,
    pub tokens: usize,
    /// Query heads of one key/value head.
    pub groups: usize,
    pub row: usize,
    pub from: usize,
    pub to: usize,
}

impl Tile {
    /// Query rows: row `t * groups + g` is head g of token t.
    pub fn rows(&self) -> usize {
        self.tokens * self.groups
    }

    pub fn work<'a>(&'a self, args: &'a Attention<'a>, head: usize) -> Work<'a> {
        let dim = args.pages.head_dim;
        let stored = |plane: &Plane| {
            let unit = if plane.codec().is_hadamard() {
                crate::kv::BLOCK
            } else {
                MAX_LANES
            };
            dim.next_multiple_of(unit)
        };
        Work {
            tile: self,
            args,
            head,
            key_dim: stored(&args.pages.key),
            value_dim: stored(&args.pages.value),
        }
    }
}

/// A tile for one key/value head.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    tile: &'a Tile,
    args: &'a Attention<'a>,
    head: usize,
    /// Floats of a decoded key, including padding.
    key_dim: usize,
    value_dim: usize,
}

/// Running softmax of a tile's rows: largest logit, sum of weights, weighted sum of values.
#[derive(Clone, Copy)]
pub(super) struct State {
    max: *mut f32,
    sum: *mut f32,
    acc: *mut f32,
}

impl State {
    /// Floats of a state of `rows` rows.
    pub fn floats(rows: usize, args: &Attention<'_>) -> usize {
        rows * (2 + args.pages.head_dim.next_multiple_of(crate::kv::BLOCK))
    }

    /// A state in `floats` floats at `p`.
    fn at(p: *mut f32, rows: usize) -> Self {
        Self {
            max: p,
            sum: p.wrapping_add(rows),
            acc: p.wrapping_add(2 * rows),
        }
    }
}

/// Buffers that a thread keeps between tiles.
#[derive(Default)]
pub(super) struct Scratch {
    /// Queries [rows, key_dim], scaled, and transformed if the keys are.
    q: Vec<f32>,
    /// Values of a block, [KEY_BLOCK, value_dim].
    values: Vec<f32>,
    /// Keys of a block, [key_dim, KEY_BLOCK].
    keys: Vec<f32>,
    /// Logits, then weights, [rows, KEY_BLOCK].
    weights: Vec<f32>,
    states: Vec<f32>,
    mask: Vec<f32>,
}

impl Scratch {
    pub fn reserve(&mut self, work: &Work<'_>) {
        let rows = work.tile.rows();
        let grow = |v: &mut Vec<f32>, n: usize| {
            if v.len() < n {
                v.resize(n, 0.0);
            }
        };
        grow(&mut self.q, rows * work.key_dim);
        grow(&mut self.values, KEY_BLOCK * work.value_dim);
        grow(&mut self.keys, KEY_BLOCK * work.key_dim);
        grow(&mut self.weights, rows * KEY_BLOCK);
        grow(&mut self.states, 2 * State::floats(rows, work.args));
        grow(&mut self.mask, KEY_BLOCK);
    }
}

impl<'a> Work<'a> {
    /// All splits in sequence, with the result in `out`.
    pub fn whole(self, scratch: &'a mut Scratch, out: *mut f32) -> Span<'a> {
        let splits = self.tile.split_range();
        Span {
            work: self,
            scratch,
            splits,
            target: Target::Out(out),
        }
    }

    /// One split, with its state in `partial`.
    pub fn split(self, scratch: &'a mut Scratch, split: usize, partial: *mut f32) -> Span<'a> {
        let splits = split..split + 1;
        Span {
            work: self,
            scratch,
            splits,
            target: Target::Partial(partial),
        }
    }

    /// Joins the states of the splits in order, with the result in `out`.
    pub fn join(self, parts: &'a [*mut f32], out: *mut f32) -> Join<'a> {
        Join {
            work: self,
            parts,
            out,
        }
    }
}

/// Consecutive splits of a tile.
pub(super) struct Span<'a> {
    work: Work<'a>,
    scratch: &'a mut Scratch,
    splits: std::ops::Range<usize>,
    target: Target,
}

enum Target {
    /// The finished result.
    Out(*mut f32),
    /// The state.
    Partial(*mut f32),
}

pub(super) struct Join<'a> {
    work: Work<'a>,
    parts: &'a [*mut f32],
    out: *mut f32,
}

impl Kernel for Span<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Self {
            work,
            scratch,
            splits,
            target,
        } = self;
        let rows = work.tile.rows();
        let own = scratch.states.as_mut_ptr();
        let part = State::at(own, rows);
        let total = match target {
            Target::Out(_) => State::at(own.wrapping_add(State::floats(rows, work.args)), rows),
            Target::Partial(p) => State::at(p, rows),
        };
        // SAFETY: `reserve` sized the scratch for this work; a partial has room for a state, `out` has room for every query.
        unsafe {
            work.load_queries::<V>(scratch.q.as_mut_ptr());
            work.clear(total);
            for split in splits.clone() {
                let state = if split == splits.start { total } else { part };
                work.clear(state);
                work.run_split::<V>(scratch, split, state);
                if split > splits.start {
                    work.merge::<V>(total, part);
                }
            }
            if let Target::Out(out) = target {
                work.finish::<V>(total, out);
            }
        }
    }
}

impl Kernel for Join<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let rows = self.work.tile.rows();
        let mut empty = vec![
            0.0;
            if self.parts.is_empty() {
                State::floats(rows, self.work.args)
            } else {
                0
            }
        ];
        let first = self.parts.first().copied().unwrap_or(empty.as_mut_ptr());
        let total = State::at(first, rows);
        // SAFETY: every part holds the state of one split of this work.
        unsafe {
            if self.parts.is_empty() {
                self.work.clear(total);
            }
            for &part in self.parts.iter().skip(1) {
                self.work.merge::<V>(total, State::at(part, rows));
            }
            self.work.finish::<V>(total, self.out);
        }
    }
}

impl Work<'_> {
    #[inline(always)]
    fn query_visible(&self, row: usize) -> (usize, usize) {
        let token = self.tile.first + row / self.tile.groups;
        visible(self.args.positions[token], self.args.window)
    }

    /// Address of a query row in `q` or `out`, in floats.
    #[inline(always)]
    fn query_offset(&self, row: usize) -> usize {
        let token = self.tile.first + row / self.tile.groups;
        let head = self.head * self.tile.groups + row % self.tile.groups;
        (token * self.args.q_heads + head) * self.args.pages.head_dim
    }

    #[inline(always)]
    unsafe fn load_queries<V: Lanes>(&self, q: *mut f32) {
        let dim = self.args.pages.head_dim;
        let transformed = self.args.pages.key.codec().is_hadamard();
        for row in 0..self.tile.rows() {
            let source = &self.args.q[self.query_offset(row)..][..dim];
            // SAFETY: the scratch has `rows * key_dim` floats.
            let target =
                unsafe { std::slice::from_raw_parts_mut(q.add(row * self.key_dim), self.key_dim) };
            target[..dim].copy_from_slice(source);
            target[dim..].fill(0.0);
            if transformed {
                hadamard_rows::<V>(target, self.args.scale / 32.0);
            } else {
                for x in &mut target[..dim] {
                    *x *= self.args.scale;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn clear(&self, state: State) {
        let rows = self.tile.rows();
        // SAFETY: a state holds `rows` rows.
        unsafe {
            std::slice::from_raw_parts_mut(state.max, rows).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(state.sum, rows).fill(0.0);
            std::slice::from_raw_parts_mut(state.acc, rows * self.value_dim).fill(0.0);
        }
    }

    /// Add the keys of one split to an empty state.
    #[inline(always)]
    unsafe fn run_split<V: Lanes>(&self, scratch: &mut Scratch, split: usize, state: State) {
        let begin = (split * SPLIT).max(self.tile.from) / KEY_BLOCK;
        let end = ((split + 1) * SPLIT).min(self.tile.to).div_ceil(KEY_BLOCK);
        let rows = self.tile.rows();
        if begin >= end {
            return;
        }
        let last = self.tile.to.div_ceil(KEY_BLOCK) - 1;
        let mut next = self.locate(begin);
        for block in begin..end {
            let here = next;
            next = self.locate((block + 1).min(last));
            // SAFETY: the scratch is sized for this work, the located rows lie within the pages.
            unsafe {
                self.load_keys::<V>(&here, &next, &mut scratch.keys);
                // Padded dimensions are zero on both sides unless the rows are transformed; then all dimensions count.
                let dim = if self.args.pages.key.codec().is_hadamard() {
                    self.key_dim
                } else {
                    self.args.pages.head_dim
                };
                logits::<V>(
                    &scratch.q,
                    self.key_dim,
                    dim,
                    rows,
                    &scratch.keys,
                    &mut scratch.weights,
                );
                self.load_mask(&here, &mut scratch.mask);
                self.softmax::<V>(scratch, &here, state);
                self.load_values::<V>(&here, &next, &mut scratch.values);
                self.drop_masked_values(scratch, &here);
                self.add_values::<V>(scratch, &here, state);
            }
        }
    }

    /// A query row's visible keys within a block, relative to the block.
    #[inline(always)]
    fn visible_in(&self, row: usize, here: &BlockRows) -> (usize, usize) {
        let (from, to) = self.query_visible(row);
        let from = from.max(here.first_key) - here.first_key;
        let to = to
            .min(here.first_key + KEY_BLOCK)
            .saturating_sub(here.first_key);
        (from, to)
    }

    /// Turn logits into weights exp(logit - max), and update the row's running max, sum and accumulator.
    #[inline(always)]
    unsafe fn softmax<V: Lanes>(&self, scratch: &mut Scratch, here: &BlockRows, state: State) {
        let softcap = self.args.softcap;
        for row in 0..self.tile.rows() {
            let (from, to) = self.visible_in(row, here);
            if from >= to {
                continue;
            }
            let logits = &mut scratch.weights.as_chunks_mut::<KEY_BLOCK>().0[row];
            if softcap > 0.0 {
                cap::<V>(logits, softcap);
            }
            if self.args.key_mask.is_some() {
                for (x, &m) in logits[from..to].iter_mut().zip(&scratch.mask[from..to]) {
                    *x = if m == f32::NEG_INFINITY { m } else { *x + m };
                }
            }
            logits[..from].fill(f32::NEG_INFINITY);
            logits[to..].fill(f32::NEG_INFINITY);
            // SAFETY: the state holds every row of the tile.
            unsafe {
                let (max, sum) = (&mut *state.max.add(row), &mut *state.sum.add(row));
                let before = *max;
                *max = largest::<V>(logits, before);
                // If there was no key so far, the weights are exp(-inf) = 0 for any finite reference.
                let reference = if *max == f32::NEG_INFINITY { 0.0 } else { *max };
                let total = weigh::<V>(logits, reference);
                if before == *max {
                    *sum += total;
                } else {
                    let factor = exp_scalar::<V>(before - reference);
                    *sum = *sum * factor + total;
                    let acc = std::slice::from_raw_parts_mut(
                        state.acc.add(row * self.value_dim),
                        self.value_dim,
                    );
                    scale_by::<V>(acc, factor);
                }
            }
        }
    }

    /// A masked key has weight 0, but 0 times a NaN or infinite value would be NaN.
    #[inline(always)]
    fn drop_masked_values(&self, scratch: &mut Scratch, here: &BlockRows) {
        if self.args.key_mask.is_none() {
            return;
        }
        for key in here.from..here.to {
            if scratch.mask[key] == f32::NEG_INFINITY {
                scratch.values[key * self.value_dim..][..self.value_dim].fill(0.0);
            }
        }
    }

    /// acc += weights x values, each row over its visible keys in order.
    #[inline(always)]
    unsafe fn add_values<V: Lanes>(&self, scratch: &Scratch, here: &BlockRows, state: State) {
        let rows = self.tile.rows();
        let values = scratch.values.as_ptr();
        let dim = self.value_dim;
        let mut row = 0;
        while row < rows {
            let spans: [(usize, usize); ROWS] = std::array::from_fn(|r| {
                if row + r < rows {
                    self.visible_in(row + r, here)
                } else {
                    (0, 0)
                }
            });
            let weights = scratch.weights[row * KEY_BLOCK..].as_ptr();
            let together = row + ROWS <= rows
                && spans.iter().all(|s| s.0 == spans[0].0)
                && spans[0].0 < spans[0].1;
            // SAFETY: `weights`, `values` and the accumulators have the sizes of `reserve` and `State::floats`.
            unsafe {
                let acc = state.acc.add(row * dim);
                if together {
                    let common = spans.iter().map(|s| s.1).min().unwrap_or(0).max(spans[0].0);
                    accumulate::<V, ROWS>(weights, values, dim, spans[0].0, common, acc);
                    for (r, span) in spans.iter().enumerate() {
                        accumulate::<V, 1>(
                            weights.add(r * KEY_BLOCK),
                            values,
                            dim,
                            common,
                            span.1,
                            acc.add(r * dim),
                        );
                    }
                    row += ROWS;
                } else {
                    accumulate::<V, 1>(weights, values, dim, spans[0].0, spans[0].1, acc);
                    row += 1;
                }
            }
        }
    }

    /// total = total joined with part, whose keys come later.
    #[inline(always)]
    unsafe fn merge<V: Lanes>(&self, total: State, part: State) {
        for row in 0..self.tile.rows() {
            // SAFETY: both states hold every row.
            unsafe {
                let (a, b) = (*total.max.add(row), *part.max.add(row));
                // A part without keys must change nothing; otherwise the result would depend on the other rows of the tile.
                if b == f32::NEG_INFINITY && *part.sum.add(row) == 0.0 {
                    continue;
                }
                let (to, from) = (
                    total.acc.add(row * self.value_dim),
                    part.acc.add(row * self.value_dim),
                );
                if a == f32::NEG_INFINITY && *total.sum.add(row) == 0.0 {
                    *total.max.add(row) = b;
                    *total.sum.add(row) = *part.sum.add(row);
                    std::ptr::copy_nonoverlapping(from, to, self.value_dim);
                    continue;
                }
                let max = if b > a || b.is_nan() { b } else { a };
                let reference = if max == f32::NEG_INFINITY { 0.0 } else { max };
                let (fa, fb) = (
                    exp_scalar::<V>(a - reference),
                    exp_scalar::<V>(b - reference),
                );
                *total.max.add(row) = max;
                let sum = &mut *total.sum.add(row);
                *sum = *sum * fa + *part.sum.add(row) * fb;
                for e in (0..self.value_dim).step_by(V::LANES) {
                    let scaled = V::load(from.add(e)).mul(V::splat(fb));
                    V::load(to.add(e))
                        .mul(V::splat(fa))
                        .add(scaled)
                        .store(to.add(e));
                }
            }
        }
    }

    /// Write acc / sum to `out`, transformed back; zeros if no key was seen.
    #[inline(always)]
    unsafe fn finish<V: Lanes>(&self, state: State, out: *mut f32) {
        let dim = self.args.pages.head_dim;
        for row in 0..self.tile.rows() {
            // SAFETY: the state holds every row; `out` has room for every query.
            unsafe {
                let sum = *state.sum.add(row);
                let acc = std::slice::from_raw_parts_mut(
                    state.acc.add(row * self.value_dim),
                    self.value_dim,
                );
                let out = std::slice::from_raw_parts_mut(out.add(self.query_offset(row)), dim);
                if sum == 0.0 {
                    out.fill(0.0);
                    continue;
                }
                if self.args.pages.value.codec().is_hadamard() {
                    hadamard_rows::<V>(acc, 1.0 / 32.0);
                }
                for (o, a) in out.iter_mut().zip(acc) {
                    *o = *a / sum;
                }
            }
        }
    }
}
