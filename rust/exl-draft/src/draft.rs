//! Guesses for one request.

use crate::automaton::Match;
use crate::history::{Followed, History};
use crate::rates::{Evidence, Rates};

/// Guesses of a class after which a request's earlier ones count half.
const MEMORY: f32 = 32.0;

/// Rules for the contexts that guesses may depend on.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// fewest tokens of a context
    pub shortest: u32,
    /// times that the first guess must have followed its context; each further guess needs one more, if this is more than 1
    pub threshold: u32,
    /// other texts are consulted only where the request's own text has no match; otherwise the longest match decides
    pub fallback: bool,
}

/// A guess with its evidence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    pub found: Match,
    /// probability that this guess and all guesses before it hold
    pub chance: f32,
}

/// The text of one request, and the guesses at its next tokens.
pub struct TextDraft {
    history: History,
    rates: Rates,
    /// first id that is no token: it is part of contexts, and never proposed
    limit: u32,
    /// the text's end in the shared history, after `placed` tokens
    shared: Followed,
    placed: usize,
    read: usize,
    /// the last guesses, to be compared with the tokens that follow
    last: Vec<(u32, Evidence)>,
    /// tokens that the last guesses have been compared with
    checked: usize,
}

impl TextDraft {
    /// Make the draft of an empty text; see [`History::new`]. Ids from `limit` on are never proposed.
    pub fn new(order: u32, capacity: usize, limit: u32) -> Self {
        Self {
            history: History::new(order, capacity),
            rates: Rates::new(MEMORY),
            limit,
            shared: Followed::default(),
            placed: 0,
            read: 0,
            last: Vec::new(),
            checked: 0,
        }
    }

    /// Tokens read so far.
    pub fn read(&self) -> usize {
        self.read
    }

    /// The text as read so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Follow the text `ids`, of which at most `budget` further tokens are read. Returns whether all of it has been read.
    ///
    /// If tokens that were read have been withdrawn, contexts begin again at the text's present end. `wider` learns how the last guesses
    /// fared.
    pub fn follow(&mut self, ids: &[i64], budget: usize, wider: &mut Rates) -> bool {
        if !self.continues(ids) {
            self.restart(ids);
        }
        let end = ids.len().min(self.read.saturating_add(budget));
        for &id in &ids[self.read..end] {
            self.take(id, wider);
        }
        self.read = end;
        end == ids.len()
    }

    /// Propose up to `most` tokens that follow the text, from its own history and a shared one.
    pub fn guess(
        &mut self,
        most: usize,
        rules: Rules,
        shared: Option<&History>,
        wider: &Rates,
        found: &mut Vec<Guess>,
    ) {
        found.clear();
        self.last.clear();
        self.checked = 0;
        let mut own = self.history.end();
        let mut other = shared.map(|texts| (texts, self.place(texts)));
        let mut chance = 1.0;
        while found.len() < most {
            let further = if rules.threshold > 1 {
                found.len() as u32
            } else {
                0
            };
            let needed = rules.threshold.saturating_add(further);
            let mut best = self.history.best(own, rules.shortest, needed);
            if let Some((texts, at)) = other {
                let shortest = match best {
                    None => Some(rules.shortest),
                    Some(_) if rules.fallback => None,
                    Some(mine) => Some(mine.length + 1),
                };
                let theirs = shortest.and_then(|least| texts.best(at, least, needed));
                best = theirs.or(best);
            }
            let Some(matched) = best else { break };
            let evidence = Evidence::of(&matched);
            chance *= self.rates.chance(evidence, wider);
            found.push(Guess {
                found: matched,
                chance,
            });
            self.last.push((matched.token, evidence));
            if found.len() < most {
                own = self.history.advance(own, matched.token);
                other = other.map(|(texts, at)| (texts, texts.advance(at, matched.token)));
            }
        }
    }

    /// Return the text's end in the shared history.
    fn place(&mut self, texts: &History) -> Followed {
        let recent = self.history.recent();
        let new = self.read - self.placed;
        let known = if new > recent.len() {
            Followed::default()
        } else {
            self.shared
        };
        let before = recent.len() - new.min(recent.len());
        let at = texts.find(known, recent.range(..before));
        let added = recent.range(before..);
        self.shared = added.fold(at, |at, &token| texts.advance(at, token));
        self.placed = self.read;
        self.shared
    }

    /// Whether the text read so far is the beginning of `ids`, as far as contexts reach back.
    fn continues(&self, ids: &[i64]) -> bool {
        let recent = self.history.recent();
        ids.len() >= self.read
            && ids[self.read - recent.len().min(self.read)..self.read]
                .iter()
                .zip(recent)
                .all(|(&id, &token)| id == i64::from(token))
    }

    fn restart(&mut self, ids: &[i64]) {
        let reach = self.history.recent().len();
        self.history.cut();
        self.last.clear();
        self.shared = Followed::default();
        self.read = self.read.min(ids.len());
        self.placed = self.read;
        for &id in &ids[self.read.saturating_sub(reach)..self.read] {
            if let Ok(token) = u32::try_from(id) {
                self.history.push(token, false);
            }
        }
    }

    fn take(&mut self, id: i64, wider: &mut Rates) {
        let Ok(token) = u32::try_from(id) else {
            self.history.cut();
            self.last.clear();
            self.shared = Followed::default();
            return;
        };
        if let Some(&(guess, evidence)) = self.last.get(self.checked) {
            let held = guess == token;
            self.rates.learn(evidence, held);
            wider.learn(evidence, held);
            self.checked = if held { self.checked + 1 } else { usize::MAX };
        }
        self.history.push(token, token < self.limit);
    }
}
