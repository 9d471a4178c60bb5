//! How probable a guess is, learned from the outcome of earlier ones.

use crate::automaton::Match;

const LENGTHS: usize = 8;
const KINDS: usize = 4;

/// The evidence for a guess, in classes: the length of the matched context, and how clearly its continuations agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence(u8);

impl Evidence {
    /// Classify a match.
    pub fn of(found: &Match) -> Self {
        let length = match found.length {
            0 | 1 => 0,
            2 => 1,
            3 => 2,
            4..=5 => 3,
            6..=8 => 4,
            9..=12 => 5,
            13..=20 => 6,
            _ => 7,
        };
        let kind = match (found.seen, found.continued) {
            (1, 1) => 0,
            (seen, all) if seen == all => 1,
            (seen, all) if 2 * seen >= all => 2,
            _ => 3,
        };
        Self((length * KINDS + kind) as u8)
    }

    /// The probability that the guess holds, before anything was learned.
    fn prior(self) -> f32 {
        let length = [0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.93, 0.95][self.0 as usize / KINDS];
        let kind = [0.95, 1.0, 0.7, 0.4][self.0 as usize % KINDS];
        length * kind
    }
}

/// The share of guesses that held, by evidence. Recent guesses count more.
#[derive(Clone, Debug)]
pub struct Rates {
    /// (held, tried) of each class
    counts: [(f32, f32); LENGTHS * KINDS],
    /// guesses of a class after which the earlier ones count half
    memory: f32,
}

impl Rates {
    /// Make rates that forget: after `memory` guesses of a class, earlier ones count half.
    pub fn new(memory: f32) -> Self {
        Self {
            counts: [(0.0, 0.0); LENGTHS * KINDS],
            memory: memory.max(1.0),
        }
    }

    /// Record whether a guess held.
    pub fn learn(&mut self, evidence: Evidence, held: bool) {
        let (good, tried) = &mut self.counts[evidence.0 as usize];
        if *tried >= self.memory {
            *good *= 0.5;
            *tried *= 0.5;
        }
        *good += f32::from(u8::from(held));
        *tried += 1.0;
    }

    /// The probability that a guess holds: this rate, and with little evidence that of `wider`.
    pub fn chance(&self, evidence: Evidence, wider: &Rates) -> f32 {
        let known = wider.rate(evidence, evidence.prior(), 8.0);
        self.rate(evidence, known, 4.0)
    }

    fn rate(&self, evidence: Evidence, prior: f32, weight: f32) -> f32 {
        let (good, tried) = self.counts[evidence.0 as usize];
        (good + weight * prior) / (tried + weight)
    }
}
