//! The part of the C preprocessor that defines kernels: function-like macros with `##`. Conditions are not evaluated; no kernel is within
//! one.

use std::collections::{BTreeMap, BTreeSet};

/// Most macros within macros.
const DEPTH: usize = 16;

pub fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// A function-like macro: the file that defines it, names of its parameters, body.
struct Macro {
    file: String,
    parameters: Vec<String>,
    body: String,
}

/// The macros of a source and its headers that expand to kernels.
#[derive(Default)]
pub struct Macros {
    all: BTreeMap<String, Macro>,
}

impl Macros {
    /// Collect the macros of `file` and return its text without directives.
    pub fn take_from(&mut self, file: &str, text: &str) -> Result<String, String> {
        let mut rest = String::new();
        for line in text.replace("\\\n", " ").lines() {
            let Some(directive) = line.trim_start().strip_prefix('#') else {
                rest.push_str(line);
                rest.push('\n');
                continue;
            };
            let Some(definition) = directive.trim_start().strip_prefix("define ") else {
                continue;
            };
            let definition = definition.trim_start();
            let end = definition.find(|c| !is_word(c)).unwrap_or(definition.len());
            let (name, after) = definition.split_at(end);
            let Some((parameters, body)) = after
                .strip_prefix('(')
                .and_then(|after| after.split_once(')'))
            else {
                continue;
            };
            let defined = Macro {
                file: file.to_owned(),
                parameters: parameters.split(',').map(|p| p.trim().to_owned()).collect(),
                body: body.to_owned(),
            };
            if self.all.insert(name.to_owned(), defined).is_some() {
                return Err(format!("{name} is defined twice"));
            }
        }
        Ok(rest)
    }

    /// Call `found` with the text after each `__global__` of `text`, which is part of `file`, and the name of the file that writes it.
    pub fn each_definition(
        &self,
        text: &str,
        file: &str,
        found: &mut dyn FnMut(&str, &str) -> Result<(), String>,
    ) -> Result<(), String> {
        let relevant = self.of_kernels();
        self.expand(text, file, &relevant, DEPTH, found)
    }

    /// Macros whose body has a kernel, or one of these macros.
    fn of_kernels(&self) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        loop {
            let before = found.len();
            for (name, Macro { body, .. }) in &self.all {
                if words(body).any(|(_, word)| word == "__global__" || found.contains(word)) {
                    found.insert(name.as_str());
                }
            }
            if found.len() == before {
                return found;
            }
        }
    }

    fn expand(
        &self,
        text: &str,
        file: &str,
        relevant: &BTreeSet<&str>,
        depth: usize,
        found: &mut dyn FnMut(&str, &str) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut from = 0;
        for (at, word) in words(text) {
            if at < from {
                continue;
            }
            let rest = &text[at + word.len()..];
            if word == "__global__" {
                found(rest, file)?;
            }
            if !relevant.contains(word) {
                continue;
            }
            let Some((arguments, length)) = arguments(rest) else {
                continue;
            };
            let Macro {
                file: of,
                parameters,
                body,
            } = &self.all[word];
            if arguments.len() != parameters.len() {
                return Err(format!(
                    "{word} has {} arguments instead of {}",
                    arguments.len(),
                    parameters.len()
                ));
            }
            if depth == 0 {
                return Err(format!("{word}: more than {DEPTH} macros within macros"));
            }
            let body = substituted(body, parameters, &arguments);
            // A kernel belongs to the file whose macro has its `__global__`.
            self.expand(&body, of, relevant, depth - 1, found)?;
            from = at + word.len() + length;
        }
        Ok(())
    }
}

/// A macro's body with arguments for parameters; `##` joins what is on both sides of it.
fn substituted(body: &str, parameters: &[String], arguments: &[&str]) -> String {
    let mut text = String::new();
    let mut from = 0;
    for (at, word) in words(body) {
        text.push_str(&body[from..at]);
        let place = parameters.iter().position(|parameter| parameter == word);
        text.push_str(place.map_or(word, |place| arguments[place]));
        from = at + word.len();
    }
    text.push_str(&body[from..]);
    let parts: Vec<&str> = text.split("##").collect();
    let last = parts.len() - 1;
    let joined = parts.iter().enumerate().map(|(i, part)| {
        let part = if i > 0 { part.trim_start() } else { part };
        if i < last { part.trim_end() } else { part }
    });
    joined.collect()
}

/// The arguments in the parentheses with which `text` begins, and their length in bytes. None if it begins otherwise.
fn arguments(text: &str) -> Option<(Vec<&str>, usize)> {
    let open = text.find(|c: char| !c.is_whitespace())?;
    if !text[open..].starts_with('(') {
        return None;
    }
    let (mut depth, mut begin, mut found) = (0, open + 1, Vec::new());
    for (at, c) in text.char_indices().skip_while(|&(at, _)| at < open) {
        match c {
            '(' => depth += 1,
            ')' if depth == 1 => {
                found.push(text[begin..at].trim());
                return Some((found, at + 1));
            }
            ')' => depth -= 1,
            ',' if depth == 1 => {
                found.push(text[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    None
}

/// Identifiers and numbers of `text`, with their places.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let begin = at + text[at..].find(is_word)?;
        let rest = &text[begin..];
        at = begin + rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        Some((begin, &text[begin..at]))
    })
}

/// The text without comments to the end of a line, which are the only ones of the sources.
pub fn without_comments(text: &str) -> String {
    let code = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    code.flat_map(|line| [line, "\n"]).collect()
}
