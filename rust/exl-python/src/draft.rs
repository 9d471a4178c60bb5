//! Bindings of the drafts from text.

// PyO3 hands extracted arguments over by value.
#![allow(clippy::needless_pass_by_value)]

use exl_draft::{Guess, History, Rates, Rules, TextDraft};
use pyo3::prelude::*;

use crate::cpu::sampling::{Ids, elements};

/// Tokens from which other Python threads may run while a text is read.
const DETACH_FROM: usize = 256;

/// The share of guesses that held, by evidence; see exl_kernels.drafting.
#[pyclass(module = "exl_kernels._native")]
pub struct DraftRates {
    rates: Rates,
}

#[pymethods]
impl DraftRates {
    /// After `memory` guesses of one kind, earlier ones count half.
    #[new]
    fn new(memory: f32) -> Self {
        Self {
            rates: Rates::new(memory),
        }
    }
}

/// Texts in bounded memory, which the guesses of many requests may depend on.
#[pyclass(module = "exl_kernels._native")]
pub struct DraftHistory {
    history: History,
    limit: u32,
}

#[pymethods]
impl DraftHistory {
    /// `order`: longest n-gram; `capacity`: most tokens; ids from `limit` on are never proposed.
    #[new]
    fn new(order: u32, capacity: usize, limit: u32) -> Self {
        Self {
            history: History::new(order, capacity),
            limit,
        }
    }

    /// Append these ids to the present text.
    fn append(&mut self, py: Python<'_>, ids: Ids) -> PyResult<()> {
        let ids = elements(&ids.0, "ids")?;
        let mut append = || {
            for &id in ids {
                match u32::try_from(id) {
                    Ok(token) => self.history.push(token, token < self.limit),
                    Err(_) => self.history.cut(),
                }
            }
        };
        if ids.len() < DETACH_FROM {
            append();
        } else {
            py.detach(append);
        }
        Ok(())
    }

    /// End the present text.
    fn cut(&mut self) {
        self.history.cut();
    }

    /// Tokens that can be found.
    #[getter]
    fn tokens(&self) -> usize {
        self.history.tokens()
    }

    /// Bytes in use.
    #[getter]
    fn memory(&self) -> usize {
        self.history.bytes()
    }
}

/// The text of one request, and guesses at its next tokens.
#[pyclass(module = "exl_kernels._native")]
pub struct DraftText {
    draft: TextDraft,
    found: Vec<Guess>,
}

#[pymethods]
impl DraftText {
    /// `order`: longest n-gram; `capacity`: most tokens kept; ids from `limit` on are never proposed.
    #[new]
    fn new(order: u32, capacity: usize, limit: u32) -> Self {
        Self {
            draft: TextDraft::new(order, capacity, limit),
            found: Vec::new(),
        }
    }

    /// Read at most `budget` further ids of the text. Returns whether all of it has been read.
    fn follow(
        &mut self,
        py: Python<'_>,
        ids: Ids,
        budget: usize,
        rates: &mut DraftRates,
    ) -> PyResult<bool> {
        let ids = elements(&ids.0, "ids")?;
        let wider = &mut rates.rates;
        if ids.len().saturating_sub(self.draft.read()).min(budget) < DETACH_FROM {
            return Ok(self.draft.follow(ids, budget, wider));
        }
        Ok(py.detach(|| self.draft.follow(ids, budget, wider)))
    }

    /// Return up to `most` guesses at the next tokens, and for each the probability that it and those before it hold.
    /// `shortest`: fewest tokens of a context; `threshold`: times that the first guess must have followed it; `fallback`: other texts count
    /// only where this one has no match.
    #[pyo3(signature = (most, shared, rates, *, shortest, threshold, fallback))]
    fn guess(
        &mut self,
        most: usize,
        shared: Option<&DraftHistory>,
        rates: &DraftRates,
        shortest: u32,
        threshold: u32,
        fallback: bool,
    ) -> (Vec<u32>, Vec<f32>) {
        let rules = Rules {
            shortest,
            threshold,
            fallback,
        };
        let texts = shared.map(|texts| &texts.history);
        self.draft
            .guess(most, rules, texts, &rates.rates, &mut self.found);
        let tokens = self.found.iter().map(|guess| guess.found.token);
        let chances = self.found.iter().map(|guess| guess.chance);
        (tokens.collect(), chances.collect())
    }

    /// Tokens read.
    #[getter]
    fn read(&self) -> usize {
        self.draft.read()
    }

    /// Bytes in use.
    #[getter]
    fn memory(&self) -> usize {
        self.draft.history().bytes()
    }
}
