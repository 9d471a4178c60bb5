//! A text in bounded memory.

use std::collections::VecDeque;

use crate::automaton::{Automaton, Cursor, Match};

/// A text of which at least the last half of `capacity` tokens can be found.
///
/// Tokens go to the young automaton. When it holds half of the capacity, it becomes the old one, and the old one is dropped as a whole: a
/// removal costs no walk over the text.
pub struct History {
    order: u32,
    half: usize,
    young: Automaton,
    old: Option<Automaton>,
    /// the text's end in `old`
    in_old: Cursor,
    /// the text's end, `order` - 1 tokens
    recent: VecDeque<u32>,
    version: u64,
}

/// The end of another text in a history.
#[derive(Clone, Copy, Debug, Default)]
pub struct Followed {
    young: Cursor,
    old: Cursor,
    /// version of the history that the cursors belong to; 0: none
    version: u64,
}

impl History {
    /// Make an empty history. `order`: see [`Automaton::new`]; `capacity`: most tokens kept, at least 2 * `order`.
    pub fn new(order: u32, capacity: usize) -> Self {
        Self {
            order,
            half: (capacity / 2).max(order as usize),
            young: Automaton::new(order),
            old: None,
            in_old: Cursor::default(),
            recent: VecDeque::with_capacity(order as usize),
            version: 1,
        }
    }

    /// Tokens kept.
    pub fn tokens(&self) -> usize {
        self.young.tokens() + self.old.as_ref().map_or(0, Automaton::tokens)
    }

    /// Bytes of memory in use.
    pub fn bytes(&self) -> usize {
        self.young.bytes() + self.old.as_ref().map_or(0, Automaton::bytes)
    }

    /// The last tokens of the text, at most as many as a context has.
    pub fn recent(&self) -> &VecDeque<u32> {
        &self.recent
    }

    /// Append a token; see [`Automaton::push`].
    pub fn push(&mut self, token: u32, counted: bool) {
        self.version += 1;
        if self.young.tokens() >= self.half {
            self.turn_over();
        }
        self.young.push(token, counted);
        if let Some(old) = &self.old {
            self.in_old = old.advance(self.in_old, token);
        }
        self.remember(token);
    }

    /// End a text; see [`Automaton::cut`].
    pub fn cut(&mut self) {
        self.young.cut();
        self.in_old = Cursor::default();
        self.recent.clear();
    }

    /// The end of this text.
    pub fn end(&self) -> Followed {
        Followed {
            young: self.young.end(),
            old: self.in_old,
            version: self.version,
        }
    }

    /// Return the place of a text that ends with `recent`, if `followed` belongs to an older version of this history.
    pub fn find<'a>(
        &self,
        followed: Followed,
        recent: impl IntoIterator<Item = &'a u32>,
    ) -> Followed {
        if followed.version == self.version {
            return followed;
        }
        let start = Followed {
            version: self.version,
            ..Followed::default()
        };
        recent
            .into_iter()
            .fold(start, |at, &token| self.advance(at, token))
    }

    /// Move over the next token of the other text.
    pub fn advance(&self, followed: Followed, token: u32) -> Followed {
        Followed {
            young: self.young.advance(followed.young, token),
            old: match &self.old {
                Some(old) => old.advance(followed.old, token),
                None => Cursor::default(),
            },
            version: followed.version,
        }
    }

    /// Return the continuation of the longest context in both automata; see [`Automaton::best`].
    pub fn best(&self, followed: Followed, shortest: u32, needed: u32) -> Option<Match> {
        let young = self.young.best(followed.young, shortest, needed);
        let Some(old) = &self.old else {
            return young;
        };
        let longer = match young {
            None => shortest,
            Some(found) => found.length + 1,
        };
        if followed.old.length() < longer {
            return young;
        }
        old.best(followed.old, longer, needed).or(young)
    }

    fn turn_over(&mut self) {
        let full = std::mem::replace(&mut self.young, Automaton::new(self.order));
        self.in_old = full.end();
        self.old = Some(full);
        // Contexts reach over the border, and no continuation counts twice.
        for &token in &self.recent {
            self.young.push(token, false);
        }
    }

    fn remember(&mut self, token: u32) {
        if self.recent.len() + 1 >= self.order as usize {
            self.recent.pop_front();
        }
        self.recent.push_back(token);
    }
}
