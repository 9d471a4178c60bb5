//! Comparison with searches over the plain text.

use std::collections::BTreeMap;

use exl_draft::{
    Automaton, Cursor, Evidence, Followed, Guess, History, Match, Rates, Rules, TextDraft,
};
use proptest::prelude::*;

/// A text as runs of (token, whether it is a counted continuation).
#[derive(Clone, Default)]
struct Plain {
    runs: Vec<Vec<(u32, bool)>>,
}

impl Plain {
    fn push(&mut self, token: u32, counted: bool) {
        if self.runs.is_empty() {
            self.cut();
        }
        self.runs.last_mut().unwrap().push((token, counted));
    }

    fn cut(&mut self) {
        self.runs.push(Vec::new());
    }

    fn occurs(&self, context: &[u32]) -> bool {
        let tokens = |run: &Vec<(u32, bool)>| run.iter().map(|&(t, _)| t).collect::<Vec<_>>();
        context.is_empty()
            || self
                .runs
                .iter()
                .any(|run| tokens(run).windows(context.len()).any(|w| w == context))
    }

    /// The longest suffix of `text`, of at most `order` - 1 tokens, that occurs.
    fn longest<'a>(&self, text: &'a [u32], order: usize) -> &'a [u32] {
        (0..=text.len().min(order - 1))
            .rev()
            .map(|n| &text[text.len() - n..])
            .find(|context| self.occurs(context))
            .unwrap()
    }

    fn best(&self, text: &[u32], order: usize, shortest: u32, needed: u32) -> Option<Match> {
        for n in (shortest as usize..=text.len().min(order - 1)).rev() {
            let context = &text[text.len() - n..];
            // count, and position of the latest occurrence
            let mut found: BTreeMap<u32, (u32, usize)> = BTreeMap::new();
            let mut at = 0;
            for run in &self.runs {
                for end in 0..run.len() {
                    at += 1;
                    let (token, counted) = run[end];
                    let before: Vec<u32> = run[..end].iter().map(|&(t, _)| t).collect();
                    if counted && before.ends_with(context) {
                        let entry = found.entry(token).or_default();
                        *entry = (entry.0 + 1, at);
                    }
                }
            }
            let best = found.iter().max_by_key(|(_, value)| **value);
            if let Some((&token, &(seen, _))) = best
                && seen >= needed.max(1)
            {
                let continued = found.values().map(|(seen, _)| seen).sum();
                return Some(Match {
                    token,
                    length: n as u32,
                    seen,
                    continued,
                });
            }
        }
        None
    }
}

#[derive(Clone, Debug)]
enum Act {
    Push(u32, bool),
    Cut,
}

fn acts(alphabet: u32, most: usize) -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        16 => (0..alphabet, prop::bool::weighted(0.9)).prop_map(|(t, counted)| Act::Push(t, counted)),
        1 => Just(Act::Cut),
    ];
    prop::collection::vec(act, 0..most)
}

fn tail(text: &[u32], order: usize) -> &[u32] {
    &text[text.len().saturating_sub(order - 1)..]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// After every token: the continuation of the text's end, and that of another text which a cursor follows.
    #[test]
    fn automaton_counts_as_a_search_does(
        order in 2usize..9, acts in (1u32..5).prop_flat_map(|a| acts(a, 60)),
        other in prop::collection::vec(0u32..5, 60), shortest in 0u32..4, needed in 1u32..4,
    ) {
        let (mut automaton, mut plain) = (Automaton::new(order as u32), Plain::default());
        let (mut text, mut second, mut cursor) = (Vec::new(), Vec::new(), Cursor::default());
        for (act, next) in acts.iter().zip(other) {
            match *act {
                Act::Push(token, counted) => {
                    automaton.push(token, counted);
                    plain.push(token, counted);
                    text.push(token);
                }
                Act::Cut => {
                    automaton.cut();
                    plain.cut();
                    text.clear();
                }
            }
            prop_assert_eq!(automaton.end().length() as usize, tail(&text, order).len());
            prop_assert_eq!(automaton.best(automaton.end(), shortest, needed), plain.best(&text, order, shortest, needed));
            // A cursor does not search again for what the text has gained: it knows at least what a fresh one knew.
            cursor = automaton.advance(cursor, next);
            second.push(next);
            let fresh = tail(&second, order).iter().fold(Cursor::default(), |at, &t| automaton.advance(at, t));
            prop_assert_eq!(fresh.length() as usize, plain.longest(&second, order).len());
            prop_assert!(cursor.length() <= fresh.length());
            prop_assert_eq!(automaton.best(fresh, shortest, needed), plain.best(&second, order, shortest, needed));
        }
    }

    /// A history finds what its two parts hold, forgets the rest, and holds no more tokens than allowed.
    #[test]
    fn history_forgets_its_oldest_half(
        order in 2usize..7, capacity in 0usize..40, acts in (1u32..4).prop_flat_map(|a| acts(a, 120)), shortest in 1u32..3,
    ) {
        let mut history = History::new(order as u32, capacity);
        let half = (capacity / 2).max(order);
        let (mut young, mut old, mut size) = (Plain::default(), Plain::default(), 0);
        let mut text = Vec::new();
        for act in &acts {
            match *act {
                Act::Push(token, counted) => {
                    if size >= half {
                        old = std::mem::take(&mut young);
                        size = tail(&text, order).len();
                        for &token in tail(&text, order) {
                            young.push(token, false);
                        }
                    }
                    history.push(token, counted);
                    young.push(token, counted);
                    text.push(token);
                    size += 1;
                }
                Act::Cut => {
                    history.cut();
                    young.cut();
                    text.clear();
                }
            }
            let best = young.best(&text, order, shortest, 1);
            let older = old.best(&text, order, shortest, 1);
            let wanted = match (best, older) {
                (Some(best), Some(older)) if older.length > best.length => Some(older),
                (best, older) => best.or(older),
            };
            prop_assert_eq!(history.best(history.end(), shortest, 1), wanted);
            prop_assert!(history.tokens() <= 2 * half);
            let place = history.find(Followed::default(), tail(&text, order));
            prop_assert_eq!(history.best(place, shortest, 1), wanted);
        }
    }

    /// Guesses follow the rule "longest context first" one after the other, however the text arrives.
    #[test]
    fn guesses_are_those_of_a_search(
        order in 2usize..9, text in (1u32..5).prop_flat_map(|a| prop::collection::vec(0..a, 1..60)),
        shared in (1u32..5).prop_flat_map(|a| prop::collection::vec(0..a, 0..60)),
        steps in prop::collection::vec(1usize..9, 60), shortest in 1u32..4, threshold in 1u32..4, fallback: bool,
    ) {
        let limit = 3;
        let rules = Rules { shortest, threshold, fallback };
        let mut wider = Rates::new(64.0);
        let mut draft = TextDraft::new(order as u32, 1000, limit);
        let (mut texts, mut other) = (History::new(order as u32, 1000), Plain::default());
        let ids: Vec<i64> = text.iter().map(|&t| i64::from(t)).collect();
        let (mut found, mut end, mut grown) = (Vec::<Guess>::new(), 0, 0);
        for step in steps {
            end = (end + step).min(ids.len());
            prop_assert!(draft.follow(&ids[..end], usize::MAX, &mut wider));
            if step % 3 == 0 {
                for &token in &shared[grown..(grown + 2 * step).min(shared.len())] {
                    texts.push(token, true);
                    other.push(token, true);
                }
                grown = (grown + 2 * step).min(shared.len());
            }
            draft.guess(5, rules, Some(&texts), &wider, &mut found);
            let mut plain = Plain::default();
            for &token in &text[..end] {
                plain.push(token, token < limit);
            }
            let mut context = text[..end].to_vec();
            let mut wanted = Vec::new();
            while wanted.len() < 5 {
                let needed = if threshold > 1 { threshold + wanted.len() as u32 } else { 1 };
                let own = plain.best(&context, order, shortest, needed);
                let theirs = other.best(&context, order, shortest, needed);
                let best = match (own, theirs) {
                    (Some(own), Some(theirs)) if !fallback && theirs.length > own.length => Some(theirs),
                    (own, theirs) => own.or(theirs),
                };
                let Some(best) = best else { break };
                wanted.push(best);
                context.push(best.token);
            }
            prop_assert_eq!(found.iter().map(|guess| guess.found).collect::<Vec<_>>(), wanted);
            let mut before = 1.0;
            for guess in &found {
                prop_assert!(guess.chance > 0.0 && guess.chance <= before);
                before = guess.chance;
            }
        }
    }

    /// After withdrawn tokens, contexts hold the tokens that are left, and what was withdrawn is still known.
    #[test]
    fn a_rewound_text_continues(
        order in 2usize..7, text in prop::collection::vec(0i64..3, 2..40), gone in 1usize..10, more in prop::collection::vec(0i64..3, 0..20),
    ) {
        let rules = Rules { shortest: 1, threshold: 1, fallback: false };
        let (mut wider, mut found) = (Rates::new(64.0), Vec::new());
        let mut draft = TextDraft::new(order as u32, 1000, 100);
        draft.follow(&text, usize::MAX, &mut wider);
        let left = text.len() - gone.min(text.len());
        draft.follow(&text[..left], usize::MAX, &mut wider);
        let now = [&text[..left], more.as_slice()].concat();
        draft.follow(&now, usize::MAX, &mut wider);
        draft.guess(1, rules, None, &wider, &mut found);

        let mut plain = Plain::default();
        for &token in &text {
            plain.push(token as u32, true);
        }
        plain.cut();
        for (at, &token) in now.iter().enumerate().skip((left + 1).saturating_sub(order)) {
            plain.push(token as u32, at >= left);
        }
        let end: Vec<u32> = now.iter().map(|&t| t as u32).collect();
        prop_assert_eq!(found.first().map(|guess| guess.found), plain.best(&end, order, 1, 1));
    }
}

#[test]
fn a_text_has_at_most_two_nodes_and_three_edges_a_token() {
    for alphabet in [1u32, 2, 3, 1000] {
        let mut automaton = Automaton::new(33);
        let mut state = 1u32;
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            automaton.push((state >> 8) % alphabet, true);
        }
        // 32 bytes a node, 12 an edge, up to 34 for one in the table; spare capacity doubles it.
        assert!(
            automaton.bytes() <= 2 * 20_000 * (2 * 32 + 3 * 12 + 34),
            "{}",
            automaton.bytes()
        );
    }
}

#[test]
fn rates_learn_from_outcomes() {
    let found = Match {
        token: 1,
        length: 7,
        seen: 1,
        continued: 1,
    };
    let evidence = Evidence::of(&found);
    let (mut own, mut wider) = (Rates::new(32.0), Rates::new(256.0));
    let before = own.chance(evidence, &wider);
    for _ in 0..200 {
        own.learn(evidence, false);
        wider.learn(evidence, false);
    }
    let never = own.chance(evidence, &wider);
    assert!(never < 0.01 && never < before);
    assert!(
        Rates::new(32.0).chance(evidence, &wider) < 0.1,
        "a new request begins with what others have learned"
    );
    for _ in 0..200 {
        own.learn(evidence, true);
    }
    assert!(own.chance(evidence, &wider) > 0.75);
}

#[test]
fn a_guess_that_failed_is_less_probable_next_time() {
    let rules = Rules {
        shortest: 1,
        threshold: 1,
        fallback: false,
    };
    let (mut wider, mut found) = (Rates::new(256.0), Vec::new());
    let mut draft = TextDraft::new(4, 1 << 12, 1 << 20);
    let mut ids = Vec::new();
    let mut chances = Vec::new();
    for at in 0..200i64 {
        ids.extend([1, 2, 3, 100 + at]); // never what followed the last time
        draft.follow(&ids[..ids.len() - 1], usize::MAX, &mut wider);
        draft.guess(1, rules, None, &wider, &mut found);
        chances.extend(found.first().map(|guess| guess.chance));
    }
    assert!(chances[chances.len() - 1] < 0.05, "{chances:?}");
}
