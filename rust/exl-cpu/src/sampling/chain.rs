//! Steps 9 to 22: from shaped logits to the draw.

use super::candidates::Candidates;
use super::edits::contains;
use super::peaks::{self, BLOCK, finite, key};
use super::ranked::Ranked;
use super::shape::shape;
use super::weights::{self, Slope};
use super::{Chain, Failure, Late, MAX_LOGITS, Row, Sampled, scalar};
use crate::isa::Isa;

/// Log-weights below this are probability 0 even in float64: such candidates do not count in an entropy's maximum.
const VANISHED: f32 = -745.0;
/// Temperatures of dynamic temperature are at least this.
const COLDEST: f64 = 1e-4;

/// Buffers of one thread.
#[derive(Default)]
pub struct Scratch {
    shaped: Vec<f32>,
    maxima: Vec<i32>,
    sums: Vec<u64>,
    keys: Vec<i32>,
    places: Vec<u64>,
    candidates: Candidates,
    ranked: Ranked,
}

/// Shorter lists of candidates are collected and cut one after the other.
const RANKED_FROM: usize = 2048;
/// Largest share of the blocks (1 / FEW) for which reading them one by one is faster than reading the whole row.
const FEW: usize = 16;

/// The cuts after top-k, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cut {
    TopP,
    TopA,
    MinP,
    Tfs,
    Typical,
    Mirostat,
}

impl Chain {
    fn cuts(&self) -> Vec<Cut> {
        let all = [
            (Cut::TopP, self.top_p),
            (Cut::TopA, self.top_a),
            (Cut::MinP, self.min_p),
            (Cut::Tfs, self.tfs),
            (Cut::Typical, self.typical),
            (Cut::Mirostat, self.mirostat),
        ];
        let active = all.iter().filter(|(_, value)| *value > 0.0);
        active.map(|(cut, _)| *cut).collect()
    }

    /// Whether the draw is over all logits unchanged.
    fn is_plain(&self) -> bool {
        self.late == Late::None && self.xtc_probability == 0.0 && !self.descending
    }

    /// Least weight that a cut by threshold keeps; None for the other cuts.
    fn least_weight(&self, cut: Cut, total: u64, highest: u64) -> Option<u64> {
        let (total, highest) = (total as f64, highest as f64);
        let least = match cut {
            Cut::TopA => self.top_a * highest * highest / total,
            Cut::MinP => self.min_p * highest,
            Cut::Mirostat => self.mirostat * total,
            Cut::TopP | Cut::Tfs | Cut::Typical => return None,
        };
        Some(least.ceil() as u64)
    }
}

/// Weight of a share of `total`: at least 1, at most all.
pub(super) fn share(part: f64, total: u64) -> u64 {
    ((part * total as f64).ceil() as u64).clamp(1, total.max(1))
}

/// Weight that a draw must exceed.
fn draw_target(uniform: f64, total: u64) -> u64 {
    ((uniform * total as f64) as u64).min(total - 1)
}

struct View<'a> {
    x: &'a [f32],
    slope: Slope,
    /// lowest id of the largest logit
    best: usize,
}

pub fn run(isa: Isa, row: &Row<'_>, scratch: &mut Scratch) -> Result<Sampled, Failure> {
    let Scratch {
        shaped,
        maxima,
        sums,
        keys,
        places,
        candidates: c,
        ranked,
    } = scratch;
    let view = look(isa, row, shaped, maxima)?;
    if row.chain.greedy {
        return Ok(only(view.best, row.top_n));
    }
    if unrestricted(row, view.x) {
        weights::block_sums(isa, view.slope, view.x, BLOCK, sums);
        let (token, probability) = draw_all(&view, sums, row.uniform);
        let total: u64 = sums.iter().sum();
        let top = match row.top_n {
            0 => Vec::new(),
            n => {
                gather_top(&view, maxima, n, keys, places, c);
                c.weigh(isa, view.slope);
                c.total = total;
                c.top(n)
            }
        };
        return Ok(Sampled {
            token,
            probability,
            top,
        });
    }
    select(isa, row, &view, maxima, sums, keys, places, c, ranked);
    let i = draw(c, &row.chain, row.uniform);
    Ok(Sampled {
        token: c.id[i],
        probability: c.q[i] as f64 / c.total as f64,
        top: if row.top_n > 0 {
            c.top(row.top_n)
        } else {
            Vec::new()
        },
    })
}

pub fn distribution(
    isa: Isa,
    row: &Row<'_>,
    scratch: &mut Scratch,
) -> Result<Vec<(u32, u64)>, Failure> {
    let Scratch {
        shaped,
        maxima,
        sums,
        keys,
        places,
        candidates: c,
        ranked,
    } = scratch;
    let view = look(isa, row, shaped, maxima)?;
    if row.chain.greedy {
        return Ok(vec![(view.best as u32, 1)]);
    }
    select(isa, row, &view, maxima, sums, keys, places, c, ranked);
    Ok(c.id.iter().copied().zip(c.q.iter().copied()).collect())
}

/// Shape the row and find its largest logit.
fn look<'a>(
    isa: Isa,
    row: &Row<'a>,
    shaped: &'a mut Vec<f32>,
    maxima: &mut Vec<i32>,
) -> Result<View<'a>, Failure> {
    assert!(row.logits.len() <= MAX_LOGITS, "a row is at most 2^19 wide");
    let x = shape(isa, row, shaped);
    if peaks::block_maxima(isa, x, maxima) {
        return Err(Failure::NotFinite);
    }
    let high = maxima.iter().copied().max().filter(|&high| finite(high));
    let high = high.ok_or(Failure::Empty)?;
    let block = maxima.iter().position(|&m| m == high).unwrap_or(0) * BLOCK;
    let inside = x[block..].iter().position(|&v| key(v) == high);
    let best = block + inside.unwrap_or(0);
    let slope = Slope {
        peak: x[best],
        scale: row.chain.scale,
        smooth: row.chain.smooth,
    };
    Ok(View { x, slope, best })
}

fn only(best: usize, top_n: usize) -> Sampled {
    let top = if top_n > 0 {
        vec![(best as u32, 1.0)]
    } else {
        Vec::new()
    };
    Sampled {
        token: best as u32,
        probability: 1.0,
        top,
    }
}

/// Whether no cut or order applies: the draw can then read the row directly.
fn unrestricted(row: &Row<'_>, x: &[f32]) -> bool {
    let all = row.chain.top_k == 0 || row.chain.top_k >= x.len();
    all && row.chain.is_plain() && row.chain.cuts().is_empty()
}

/// A draw over all logits in ascending order of id.
fn draw_all(view: &View<'_>, sums: &[u64], uniform: f64) -> (u32, f64) {
    let total: u64 = sums.iter().sum();
    let target = draw_target(uniform, total);
    let mut running = 0;
    let mut block = 0;
    while running + sums[block] <= target {
        running += sums[block];
        block += 1;
    }
    let mut id = block * BLOCK;
    loop {
        let q = weights::fixed(weights::weight(view.slope.log_weight(view.x[id])));
        running += q;
        if running > target {
            return (id as u32, q as f64 / total as f64);
        }
        id += 1;
    }
}

fn gather_top(
    view: &View<'_>,
    maxima: &[i32],
    count: usize,
    keys: &mut Vec<i32>,
    places: &mut Vec<u64>,
    c: &mut Candidates,
) {
    let border = peaks::border(maxima, count, keys);
    c.gather(view.x, |b| maxima[b] >= border, |v| key(v) >= border);
    c.keep_top(count, places);
}

/// Fill the candidates with the result of all stages, with final weights.
#[allow(clippy::too_many_arguments)] // scratch buffers that the rows of a call share
fn select(
    isa: Isa,
    row: &Row<'_>,
    view: &View<'_>,
    maxima: &[i32],
    sums: &mut Vec<u64>,
    keys: &mut Vec<i32>,
    places: &mut Vec<u64>,
    c: &mut Candidates,
    ranked: &mut Ranked,
) {
    let chain = &row.chain;
    let mut cuts = chain.cuts();
    let needs_order = |cut: &Cut| matches!(cut, Cut::Tfs | Cut::Typical);
    let mut whole = false;
    if chain.top_k > 0 && chain.top_k < view.x.len() {
        gather_top(view, maxima, chain.top_k, keys, places, c);
        c.weigh(isa, view.slope);
    } else if stays_wide(isa, chain, cuts.first().copied(), view, maxima, keys) {
        whole = cuts.len() > 1 || cuts.iter().any(needs_order);
        if !whole {
            ranked.list_share(isa, view.slope, view.x, chain.top_p, c);
            c.weigh(isa, view.slope);
            cuts.remove(0);
        }
    } else {
        let first = cuts.first().copied();
        if gather_first(isa, chain, first, view, maxima, sums, keys, c) {
            cuts.remove(0);
        }
    }
    if whole || (c.len() >= RANKED_FROM && cuts.iter().any(needs_order)) {
        ranked.rank(isa, view.slope, if whole { view.x } else { &c.x });
        for cut in cuts {
            if ranked.len() > 1 {
                apply_ranked(chain, cut, ranked);
            }
        }
        ranked.list(whole.then_some(view.x), c);
        c.weigh(isa, view.slope);
    } else {
        for cut in cuts {
            if c.len() > 1 {
                apply(isa, chain, cut, c);
            }
        }
    }
    if c.len() > 1 {
        late(isa, chain, c);
    }
    if chain.xtc_probability > 0.0 {
        xtc(chain, row.xtc_ignored, c);
    }
}

/// Whether the first cut leaves so many candidates of a long row, or needs so many in order, that ranking all is faster than listing them.
/// This is a heuristic; results are the same either way.
fn stays_wide(
    isa: Isa,
    chain: &Chain,
    first: Option<Cut>,
    view: &View<'_>,
    maxima: &[i32],
    keys: &mut Vec<i32>,
) -> bool {
    /// One block in this many is examined.
    const STRIDE: usize = 16;
    if view.x.len() < RANKED_FROM {
        return false;
    }
    match first {
        Some(Cut::Tfs | Cut::Typical) => true,
        Some(Cut::TopP) => {
            let border = peaks::border(maxima, 48, keys);
            let (mut high, mut low) = (0u64, 0u64);
            for (b, block) in view.x.chunks(BLOCK).enumerate() {
                if maxima[b] >= border {
                    high += weights::sum(isa, view.slope, block);
                } else if b % STRIDE == 0 && finite(maxima[b]) {
                    low += weights::sum(isa, view.slope, block);
                }
            }
            let all = high as f64 + STRIDE as f64 * low as f64;
            4.0 * (high as f64) < chain.top_p * all
        }
        _ => false,
    }
}

/// The candidates without top-k. If the first cut can be made while reading, the cut candidates are not listed, and the result is true.
#[allow(clippy::too_many_arguments)] // scratch buffers that the rows of a call share
fn gather_first(
    isa: Isa,
    chain: &Chain,
    first: Option<Cut>,
    view: &View<'_>,
    maxima: &[i32],
    sums: &mut Vec<u64>,
    keys: &mut Vec<i32>,
    c: &mut Candidates,
) -> bool {
    let Some(cut) = first.filter(|&cut| !matches!(cut, Cut::Tfs | Cut::Typical)) else {
        c.gather(view.x, |_| true, |_| true);
        c.weigh(isa, view.slope);
        return false;
    };
    weights::block_sums(isa, view.slope, view.x, BLOCK, sums);
    let total: u64 = sums.iter().sum();
    if cut == Cut::TopP {
        let target = share(chain.top_p, total);
        for count in [48, 768] {
            let border = peaks::border(maxima, count, keys);
            c.gather(view.x, |b| maxima[b] >= border, |v| key(v) >= border);
            c.weigh(isa, view.slope);
            if c.total >= target {
                break;
            }
        }
        if c.total < target {
            c.gather(view.x, |b| sums[b] > 0, |_| true);
            c.weigh(isa, view.slope);
        }
        let border = c.descending_border(target);
        c.keep_descending(border);
        return true;
    }
    let least = chain.least_weight(cut, total, view.slope.weight_at(0));
    let least = least.unwrap_or(0);
    c.clear();
    if let Some(reach) = view.slope.reach(least) {
        let near = |v: f32| (view.slope.peak - v).to_bits() <= reach;
        // A block's sum is at least its largest weight.
        let blocks = sums.iter().filter(|&&sum| sum >= least).count();
        if blocks > sums.len() / FEW {
            let distances = 0.0..=f32::from_bits(reach);
            c.gather_within(isa, view.x, view.slope.peak, distances);
        } else {
            c.gather(view.x, |b| sums[b] >= least, near);
        }
    }
    if c.len() == 0 {
        c.push(view.best, view.x[view.best]);
    }
    c.weigh(isa, view.slope);
    true
}

fn apply(isa: Isa, chain: &Chain, cut: Cut, c: &mut Candidates) {
    let highest = c.q.iter().copied().max().unwrap_or(0);
    match cut {
        Cut::TopP => {
            let border = c.descending_border(share(chain.top_p, c.total));
            c.keep_descending(border);
        }
        Cut::Tfs => tail_free(chain.tfs, c),
        Cut::Typical => typical(isa, chain.typical, c),
        Cut::TopA | Cut::MinP | Cut::Mirostat => {
            let least = chain.least_weight(cut, c.total, highest).unwrap_or(0);
            c.keep_weight(least);
        }
    }
}

fn apply_ranked(chain: &Chain, cut: Cut, ranked: &mut Ranked) {
    match cut {
        Cut::TopP => ranked.keep_mass(share(chain.top_p, ranked.total())),
        Cut::Tfs => ranked.keep_tail_free(chain.tfs),
        Cut::Typical => ranked.keep_typical(share(chain.typical, ranked.total())),
        Cut::TopA | Cut::MinP | Cut::Mirostat => {
            let least = chain.least_weight(cut, ranked.total(), ranked.highest());
            ranked.keep_weight(least.unwrap_or(0));
        }
    }
}

/// Keep one more than the leading terms of |second difference| whose running share is at most z.
fn tail_free(z: f64, c: &mut Candidates) {
    let least = (1e-8 * c.total as f64).ceil() as u64;
    let order = c.sorted();
    let kept = order
        .iter()
        .take_while(|&&i| c.q[i as usize] >= least)
        .count();
    if kept < 3 {
        return;
    }
    let q = |i: usize| c.q[order[i] as usize] as i64;
    let curve = |i: usize| (q(i) - 2 * q(i + 1) + q(i + 2)).unsigned_abs();
    let total: u64 = (0..kept - 2).map(curve).sum();
    if total == 0 {
        return;
    }
    let limit = (z * total as f64) as u64;
    let mut running = 0;
    let leading = (0..kept - 2)
        .take_while(|&i| {
            running += curve(i);
            running <= limit
        })
        .count();
    let last = c.descending(order[leading] as usize);
    c.retain(|c, i| c.descending(i) <= last);
}

/// The smallest set by |surprise - entropy| that reaches a mass, including the token that crosses it. With surprise = ln Z - l and entropy
/// = ln Z + E[-l], ln Z cancels.
fn typical(isa: Isa, mass: f64, c: &mut Candidates) {
    let expected = expected_surprise(isa, c);
    let away = move |c: &Candidates, i: usize| (-f64::from(c.l[i]) - expected).abs();
    let bin = move |c: &Candidates, i: usize| (away(c, i) * 64.0).min(2047.0) as usize;
    let order = move |c: &Candidates, i: usize| {
        let last = super::peaks::place(c.x[i], c.id[i]);
        (away(c, i).to_bits(), last)
    };
    let border = c.border(share(mass, c.total), bin, order);
    c.retain(|c, i| border.keeps(bin(c, i), || order(c, i)));
}

/// E[-l] over the candidates.
fn expected_surprise(isa: Isa, c: &Candidates) -> f64 {
    weights::surprises(isa, &c.l) as f64 / c.total as f64
}

/// Step 18: dynamic temperature replaces the late temperature.
fn late(isa: Isa, chain: &Chain, c: &mut Candidates) {
    match chain.late {
        Late::None => {}
        Late::Fixed(scale) => c.reweigh(isa, scale),
        Late::Dynamic {
            low,
            high,
            exponent,
        } => {
            let alive = c.l.iter().filter(|&&l| l >= VANISHED).count();
            let most = scalar::ln(alive.max(1) as f64);
            let most = if most > 0.0 { most } else { 1.0 };
            let entropy = scalar::ln(c.total as f64 / weights::ONE) + expected_surprise(isa, c);
            let share = (entropy / most).clamp(0.0, 1.0);
            let temperature = low + (high - low) * scalar::pow(share, exponent);
            c.reweigh(isa, (1.0 / temperature.max(COLDEST)) as f32);
        }
    }
}

/// Exclude top choices in expectation: all candidates of at least the threshold except the last lose a share of their mass, which the
/// others gain in proportion.
fn xtc(chain: &Chain, ignored: &[i32], c: &mut Candidates) {
    let least = (chain.xtc_threshold * c.total as f64).ceil() as u64;
    let choice: Vec<usize> = (0..c.len())
        .filter(|&i| c.q[i] >= least && !contains(ignored, c.id[i] as usize))
        .collect();
    if choice.len() < 2 {
        return;
    }
    let spared = choice.iter().copied().max_by_key(|&i| c.descending(i));
    let mut out = vec![false; c.len()];
    for &i in &choice {
        out[i] = Some(i) != spared;
    }
    let excluded: u64 = (0..c.len()).filter(|&i| out[i]).map(|i| c.q[i]).sum();
    let rest = (c.total - excluded) as f64;
    if rest == 0.0 {
        return;
    }
    let gain = 1.0 + chain.xtc_probability * excluded as f64 / rest;
    for (q, out) in c.q.iter_mut().zip(out) {
        let factor = if out {
            1.0 - chain.xtc_probability
        } else {
            gain
        };
        *q = (*q as f64 * factor) as u64;
    }
    c.total = c.q.iter().sum();
}

/// Index of the drawn candidate.
fn draw(c: &Candidates, chain: &Chain, uniform: f64) -> usize {
    let target = draw_target(uniform, c.total);
    if chain.descending {
        // The first candidate whose running sum exceeds the target is the last of the smallest prefix that reaches one more.
        let border = c.descending_border(target + 1);
        let place = border.last();
        let found = (0..c.len()).find(|&i| c.descending(i) == place);
        return found.expect("the border is a candidate");
    }
    let mut running = 0;
    (0..c.len())
        .find(|&i| {
            running += c.q[i];
            running > target
        })
        .expect("the target is below the total")
}
