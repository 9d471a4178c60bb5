//! Edits of single logits: penalties over the context, DRY, and discouraged or banned ids.

use std::cell::RefCell;

/// Logit of a token that is used only if no other is possible.
pub const DISCOURAGED: f64 = -1e30;

/// x := (x > 0 ? x / factor : x * factor) - minus, in f64; x := -minus if `factor` is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Edit {
    pub factor: f64,
    pub minus: f64,
    pub id: u32,
}

impl Edit {
    /// Set a logit.
    pub fn set(id: u32, value: f64) -> Self {
        Self {
            factor: 0.0,
            minus: -value,
            id,
        }
    }

    #[inline(always)]
    pub fn apply(&self, x: f32) -> f32 {
        let x = f64::from(x);
        let scaled = if self.factor == 0.0 {
            0.0
        } else if x > 0.0 {
            x / self.factor
        } else {
            x * self.factor
        };
        (scaled - self.minus) as f32
    }
}

/// Repetition, presence and frequency penalties.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    pub repetition: f64,
    pub presence: f64,
    pub frequency: f64,
    /// tokens at full strength; negative: all
    pub sustain: i64,
    /// tokens over which the strength then falls to 0
    pub decay: i64,
}

impl Penalties {
    pub fn active(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }

    /// One edit for each token of the context, newest first. Repetition and presence act once, with the strength of the most recent
    /// occurrence; frequency acts at each occurrence. Ids outside `width` are skipped.
    pub fn edits(&self, context: &[i64], width: usize) -> Vec<Edit> {
        thread_local! {
            static PLACES: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
        }
        let n = context.len() as i64;
        let (sustain, reach) = if self.sustain < 0 {
            (n, n)
        } else {
            (self.sustain, n.min(self.sustain.saturating_add(self.decay)))
        };
        PLACES.with_borrow_mut(|places| {
            // places[id]: 1 + the id's index in `found`, which holds the summed strengths; all 0 between calls.
            places.resize(places.len().max(width), 0);
            let mut found: Vec<Edit> = Vec::new();
            for (d, &id) in (0..reach).zip(context.iter().rev()) {
                let Some(place) = usize::try_from(id).ok().filter(|&id| id < width) else {
                    continue;
                };
                let strength = if d <= sustain {
                    1.0
                } else {
                    1.0 - (d - sustain) as f64 / self.decay as f64
                };
                match places[place] {
                    0 => {
                        found.push(Edit {
                            factor: strength,
                            minus: strength,
                            id: place as u32,
                        });
                        places[place] = found.len() as u32;
                    }
                    at => found[at as usize - 1].minus += strength,
                }
            }
            for edit in &mut found {
                places[edit.id as usize] = 0;
                let (once, total) = (edit.factor, edit.minus);
                edit.factor = 1.0 + (self.repetition - 1.0) * once;
                edit.minus = self.presence * once + self.frequency * total;
            }
            found
        })
    }
}

/// DRY: a token that would extend a repeat of L >= `allowed_length` tokens loses multiplier * base^(L - allowed_length).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dry<'a> {
    pub multiplier: f64,
    pub base: f64,
    pub allowed_length: usize,
    pub max_ngram: usize,
    /// newest tokens that count; 0: all
    pub window: usize,
    /// packed ids
    pub breakers: &'a [i32],
}

impl Dry<'_> {
    fn breaks(&self, id: i64) -> bool {
        id < 0 || contains(self.breakers, id as usize)
    }

    /// One edit for each penalized token, in ascending order of id. L is the longest suffix of the context, up to `max_ngram` tokens and
    /// without breakers, that occurred before, followed by that token.
    pub fn edits(&self, context: &[i64], width: usize) -> Vec<Edit> {
        let context = match self.window {
            0 => context,
            window => &context[context.len().saturating_sub(window)..],
        };
        let n = context.len();
        let Some(&last) = context.last() else {
            return Vec::new();
        };
        // Longest suffix without a breaker.
        let free = context
            .iter()
            .rev()
            .take(self.max_ngram)
            .take_while(|&&id| !self.breaks(id))
            .count();
        let mut found: Vec<(u32, usize)> = Vec::new();
        for end in 0..n - 1 {
            if free == 0 || context[end] != last {
                continue;
            }
            let next = context[end + 1];
            let length = (0..free.min(end + 1))
                .take_while(|&back| context[end - back] == context[n - 1 - back])
                .count();
            let inside = next >= 0 && (next as u64) < width as u64;
            if length >= self.allowed_length && inside && !self.breaks(next) {
                found.push((next as u32, length));
            }
        }
        found.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        found.dedup_by_key(|entry| entry.0);
        let edit = |(id, length): (u32, usize)| Edit {
            factor: 1.0,
            minus: self.multiplier * power(self.base, length - self.allowed_length),
            id,
        };
        found.into_iter().map(edit).collect()
    }
}

fn power(base: f64, exponent: usize) -> f64 {
    base.powi(i32::try_from(exponent).unwrap_or(i32::MAX))
}

/// Whether a packed set holds `id`.
#[inline(always)]
pub fn contains(set: &[i32], id: usize) -> bool {
    set.get(id / 32)
        .is_some_and(|word| word >> (id % 32) & 1 == 1)
}
