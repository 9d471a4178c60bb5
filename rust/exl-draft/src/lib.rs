//! Draft tokens from text: what followed the longest match of a text's end, and how probably it follows again.
//!
//! [`Automaton`] indexes all substrings of a text and counts continuations. [`History`] is a text in bounded memory: two automata, of
//! which the older one is dropped as a whole. [`TextDraft`] follows the text of one request and proposes guesses from its own history and
//! from a shared one. [`Rates`] learns from the outcome of guesses how probable further ones are.

mod automaton;
mod draft;
mod history;
mod rates;

pub use automaton::{Automaton, Cursor, Match};
pub use draft::{Guess, Rules, TextDraft};
pub use history::{Followed, History};
pub use rates::{Evidence, Rates};
