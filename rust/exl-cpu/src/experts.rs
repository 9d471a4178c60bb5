//! Mixtures of experts: the chosen experts of all rows in one call.
//!
//! Rows are sorted by expert, so that an expert's weights are read once for all rows that chose it (64 at a time). Work is split over
//! experts and columns. A row's experts are added in the order of its choice, whatever other rows are in the call.

use std::sync::Arc;

use crate::activation::Activation;
use crate::block::Scratch;
use crate::matmul::{Group, Operation, QuantMatrix, Shared, multiply};
use crate::pool;

/// Most values of intermediate results at once; a call with more rows takes them in parts.
const MOST_VALUES: usize = 24 << 20;
/// Fewest rows of such a part.
const FEWEST_ROWS: usize = 64;
/// Values that one task of the last sum reads, about.
const PER_TASK: usize = 1 << 15;

/// Why experts or operands are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpertsError {
    #[error("there are no experts")]
    None,
    #[error("{what} of expert {expert}: {got}, expected {expected}")]
    Expert {
        what: &'static str,
        expert: usize,
        got: usize,
        expected: usize,
    },
    #[error("{what}: {got}, expected {expected}")]
    Size {
        what: &'static str,
        got: usize,
        expected: usize,
    },
    #[error("row {row} chooses expert {got} of {experts}")]
    Choice {
        row: usize,
        got: i64,
        experts: usize,
    },
}

/// One gated MLP: down(activation(gate(h)) * up(h)).
#[derive(Clone, Debug)]
pub struct Expert {
    gate: Arc<QuantMatrix>,
    up: Arc<QuantMatrix>,
    down: Arc<QuantMatrix>,
    packs_alike: bool,
}

impl Expert {
    /// The matrices of an expert; [`Experts::new`] checks whether they fit.
    pub fn new(gate: Arc<QuantMatrix>, up: Arc<QuantMatrix>, down: Arc<QuantMatrix>) -> Self {
        let packs_alike = gate.packs_like(&up);
        Self {
            gate,
            up,
            down,
            packs_alike,
        }
    }

    /// Rejects matrices that do not fit one another, or whose rows do not have `hidden` values; `expert` names it in the error.
    fn check(&self, expert: usize, hidden: usize) -> Result<(), ExpertsError> {
        let inner = self.up.out_features();
        for (what, got, expected) in [
            ("inputs of gate", self.gate.in_features(), hidden),
            ("inputs of up", self.up.in_features(), hidden),
            ("outputs of gate", self.gate.out_features(), inner),
            ("inputs of down", self.down.in_features(), inner),
            ("outputs of down", self.down.out_features(), hidden),
        ] {
            if got != expected {
                return Err(ExpertsError::Expert {
                    what,
                    expert,
                    got,
                    expected,
                });
            }
        }
        Ok(())
    }
}

/// The experts of a layer.
#[derive(Debug)]
pub struct Experts {
    /// The shared expert, where there is one, comes last.
    all: Vec<Expert>,
    has_shared: bool,
    activation: Activation,
}

/// Whether and which result of a shared expert is added to the chosen ones'.
#[derive(Clone, Copy, Debug)]
pub enum SharedExpert<'a> {
    /// None, though the layer may have one.
    Absent,
    /// The layer's own shared expert.
    Own,
    /// The given one, [rows, hidden].
    Given(&'a [f32]),
}

/// Operands of a call.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// [rows, hidden]
    pub h: &'a [f32],
    /// [rows, chosen], numbers of experts
    pub ids: &'a [i64],
    /// [rows, chosen]
    pub weights: &'a [f32],
    pub chosen: usize,
    pub shared: SharedExpert<'a>,
    /// [rows]; ones where there are none.
    pub shared_weights: Option<&'a [f32]>,
}

impl Choice<'_> {
    fn rows(&self, first: usize, last: usize, hidden: usize) -> Self {
        let pairs = first * self.chosen..last * self.chosen;
        Self {
            h: &self.h[first * hidden..last * hidden],
            ids: &self.ids[pairs.clone()],
            weights: &self.weights[pairs],
            shared: match self.shared {
                SharedExpert::Given(y) => SharedExpert::Given(&y[first * hidden..last * hidden]),
                shared => shared,
            },
            shared_weights: self.shared_weights.map(|weights| &weights[first..last]),
            ..*self
        }
    }
}

/// Rows sorted by expert.
struct Sorted {
    /// (expert, its rows), the shared expert last.
    experts: Vec<(usize, Vec<u32>)>,
    /// Where a pair's result is among all, [rows, chosen].
    places: Vec<u32>,
}

impl Experts {
    /// Experts of the same `hidden` inputs and outputs; inner sizes and formats may differ. Raises an error where matrices do not fit.
    pub fn new(
        mut experts: Vec<Expert>,
        shared: Option<Expert>,
        activation: Activation,
    ) -> Result<Self, ExpertsError> {
        let hidden = experts.first().ok_or(ExpertsError::None)?.up.in_features();
        let has_shared = shared.is_some();
        experts.extend(shared);
        for (number, expert) in experts.iter().enumerate() {
            expert.check(number, hidden)?;
        }
        Ok(Self {
            all: experts,
            has_shared,
            activation,
        })
    }

    /// Inputs and outputs of every expert.
    pub fn hidden(&self) -> usize {
        self.all[0].up.in_features()
    }

    /// Experts that rows choose among.
    pub fn len(&self) -> usize {
        self.all.len() - usize::from(self.has_shared)
    }

    /// Never: there is at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is a shared expert.
    pub fn has_shared(&self) -> bool {
        self.has_shared
    }

    /// `out` [rows, hidden] = the sum over c of weights[:, c] * expert ids[:, c] of `h`, in that order, + the shared expert's result,
    /// times its weights if there are any. With `add`, this sum is added to `out`.
    pub fn forward(
        &self,
        call: &Choice<'_>,
        out: &mut [f32],
        add: bool,
    ) -> Result<(), ExpertsError> {
        let hidden = self.hidden();
        let rows = self.check(call, out)?;
        let widest = self.all[..self.len()]
            .iter()
            .map(|expert| expert.up.out_features())
            .max()
            .unwrap_or(0);
        let each = (MOST_VALUES / ((call.chosen + 1) * (hidden + widest))).max(FEWEST_ROWS);
        for first in (0..rows).step_by(each) {
            let last = (first + each).min(rows);
            let part = call.rows(first, last, hidden);
            self.forward_part(&part, &mut out[first * hidden..last * hidden], add);
        }
        Ok(())
    }

    /// The number of rows. Rejects operands that do not fit.
    fn check(&self, call: &Choice<'_>, out: &[f32]) -> Result<usize, ExpertsError> {
        let (hidden, chosen) = (self.hidden(), call.chosen);
        let rows = call.ids.len().checked_div(chosen).unwrap_or(0);
        let given = match call.shared {
            SharedExpert::Given(y) => y.len(),
            _ => rows * hidden,
        };
        let own = matches!(call.shared, SharedExpert::Own);
        for (what, got, expected) in [
            ("ids", call.ids.len(), rows * chosen),
            ("weights", call.weights.len(), rows * chosen),
            ("values of h", call.h.len(), rows * hidden),
            ("values of out", out.len(), rows * hidden),
            ("values of the shared expert's result", given, rows * hidden),
            (
                "weights of the shared expert",
                call.shared_weights.map_or(rows, <[f32]>::len),
                rows,
            ),
            (
                "shared experts",
                usize::from(self.has_shared),
                usize::from(own || self.has_shared),
            ),
        ] {
            if got != expected {
                return Err(ExpertsError::Size {
                    what,
                    got,
                    expected,
                });
            }
        }
        let experts = self.len();
        let outside = call
            .ids
            .iter()
            .position(|&id| usize::try_from(id).map_or(true, |id| id >= experts));
        match outside {
            Some(pair) => Err(ExpertsError::Choice {
                row: pair / chosen,
                got: call.ids[pair],
                experts,
            }),
            None => Ok(rows),
        }
    }

    fn sort(&self, call: &Choice<'_>) -> Sorted {
        let rows = call.ids.len() / call.chosen;
        let mut counts = vec![0u32; self.all.len()];
        for &id in call.ids {
            counts[id as usize] += 1;
        }
        if matches!(call.shared, SharedExpert::Own) {
            counts[self.len()] = rows as u32;
        }
        let mut next = Vec::with_capacity(counts.len());
        let mut experts = Vec::new();
        let mut index = vec![0; counts.len()];
        let mut begin = 0;
        for (expert, &count) in counts.iter().enumerate() {
            next.push(begin);
            begin += count;
            if count > 0 {
                index[expert] = experts.len();
                experts.push((expert, Vec::with_capacity(count as usize)));
            }
        }
        let mut places = Vec::with_capacity(call.ids.len());
        for (pair, &id) in call.ids.iter().enumerate() {
            let id = id as usize;
            places.push(next[id]);
            next[id] += 1;
            experts[index[id]].1.push((pair / call.chosen) as u32);
        }
        if matches!(call.shared, SharedExpert::Own) {
            experts[index[self.len()]].1.extend(0..rows as u32);
        }
        Sorted { experts, places }
    }

    fn forward_part(&self, call: &Choice<'_>, out: &mut [f32], add: bool) {
        let hidden = self.hidden();
        let sorted = self.sort(call);
        let sizes: Vec<usize> = sorted
            .experts
            .iter()
            .map(|(expert, rows)| rows.len() * self.all[*expert].up.out_features())
            .collect();
        let mut inner = Scratch::new(sizes.iter().sum());
        let mut groups = Vec::with_capacity(sizes.len());
        let mut left = &mut *inner;
        for ((expert, rows), &size) in sorted.experts.iter().zip(&sizes) {
            let (own, rest) = left.split_at_mut(size);
            left = rest;
            let expert = &self.all[*expert];
            groups.push(Group {
                x: call.h,
                rows: Some(rows),
                operation: Operation::Gated {
                    gate: &expert.gate,
                    up: &expert.up,
                    activation: self.activation,
                    packs_alike: expert.packs_alike,
                },
                out: own,
                packed_as: None,
            });
        }
        multiply(&mut groups);
        let pairs: usize = sorted.experts.iter().map(|(_, rows)| rows.len()).sum();
        let mut parts = Scratch::new(pairs * hidden);
        let mut groups = Vec::with_capacity(sizes.len());
        let (mut x, mut left) = (&*inner, &mut *parts);
        for ((expert, rows), &size) in sorted.experts.iter().zip(&sizes) {
            let (own, rest) = left.split_at_mut(rows.len() * hidden);
            left = rest;
            groups.push(Group {
                x: &x[..size],
                rows: None,
                operation: Operation::One(&self.all[*expert].down),
                out: own,
                packed_as: None,
            });
            x = &x[size..];
        }
        multiply(&mut groups);
        add_up(call, &parts, &sorted.places, out, add);
    }
}

/// The weighted sum of each row's parts, in the order of its choice. The shared expert's results follow those of all pairs.
fn add_up(call: &Choice<'_>, parts: &[f32], places: &[u32], out: &mut [f32], add: bool) {
    let rows = places.len() / call.chosen;
    let hidden = out.len().checked_div(rows).unwrap_or(0);
    let shared = match call.shared {
        SharedExpert::Absent => None,
        SharedExpert::Own => Some(&parts[places.len() * hidden..]),
        SharedExpert::Given(y) => Some(y),
    };
    let width = (PER_TASK / (call.chosen + 1)).clamp(1, hidden.max(1));
    let columns = hidden.div_ceil(width);
    let out = Shared::new(out);
    pool::run(rows * columns, &|task| {
        let (row, first) = (task / columns, task % columns * width);
        let width = width.min(hidden - first);
        let mut sum = vec![0.0; width];
        let pairs = row * call.chosen..(row + 1) * call.chosen;
        for (choice, (&place, &weight)) in places[pairs.clone()]
            .iter()
            .zip(&call.weights[pairs])
            .enumerate()
        {
            let part = &parts[place as usize * hidden + first..][..width];
            for (sum, part) in sum.iter_mut().zip(part) {
                let weighted = part * weight;
                *sum = if choice == 0 {
                    weighted
                } else {
                    *sum + weighted
                };
            }
        }
        if let Some(shared) = shared {
            let weight = call.shared_weights.map_or(1.0, |weights| weights[row]);
            for (sum, part) in sum.iter_mut().zip(&shared[row * hidden + first..]) {
                *sum += part * weight;
            }
        }
        // SAFETY: tasks own disjoint columns of rows.
        let out = unsafe { out.slice(row * hidden + first, width) };
        for (out, sum) in out.iter_mut().zip(sum) {
            *out = if add { *out + sum } else { sum };
        }
    });
}
