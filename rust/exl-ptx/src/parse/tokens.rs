//! Words, strings and marks of a PTX text.

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'a> {
    Word(&'a str),
    Text,
    Mark(char),
}

pub(super) struct Tokens<'a> {
    list: Vec<(Token<'a>, u32)>,
    at: usize,
}

pub(super) fn tokens(text: &str) -> Result<Tokens<'_>, String> {
    let bytes = text.as_bytes();
    let mut list = Vec::new();
    let (mut at, mut line) = (0, 1u32);
    let of_word = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.');
    while at < bytes.len() {
        let c = bytes[at];
        match c {
            b'\n' => {
                line += 1;
                at += 1;
            }
            b' ' | b'\t' | b'\r' => at += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                let end = text[at..].find("*/").ok_or("a comment does not end")? + at + 2;
                line += text[at..end].matches('\n').count() as u32;
                at = end;
            }
            b'"' => {
                let end = text[at + 1..].find('"').ok_or("a string does not end")? + at + 2;
                list.push((Token::Text, line));
                at = end;
            }
            _ if of_word(c) => {
                let start = at;
                while at < bytes.len() {
                    if of_word(bytes[at]) {
                        at += 1;
                    } else if bytes[at] == b':' && bytes.get(at + 1) == Some(&b':') {
                        at += 2;
                    } else {
                        break;
                    }
                }
                list.push((Token::Word(&text[start..at]), line));
            }
            _ => {
                list.push((Token::Mark(c as char), line));
                at += 1;
            }
        }
    }
    Ok(Tokens { list, at: 0 })
}

impl<'a> Tokens<'a> {
    pub(super) fn peek(&self) -> Option<&Token<'a>> {
        self.list.get(self.at).map(|(token, _)| token)
    }

    pub(super) fn line(&self) -> u32 {
        self.list
            .get(self.at.min(self.list.len().saturating_sub(1)))
            .map_or(0, |&(_, line)| line)
    }

    pub(super) fn next(&mut self) -> Result<Token<'a>, String> {
        let token = self.list.get(self.at).ok_or("the text ends early")?;
        self.at += 1;
        Ok(token.0.clone())
    }

    pub(super) fn is(&self, mark: char) -> bool {
        self.peek() == Some(&Token::Mark(mark))
    }

    pub(super) fn take(&mut self, mark: char) -> bool {
        let found = self.is(mark);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect(&mut self, mark: char) -> Result<(), String> {
        if self.take(mark) {
            Ok(())
        } else {
            Err(format!("expected {mark:?}, found {:?}", self.peek()))
        }
    }

    pub(super) fn word(&mut self) -> Result<&'a str, String> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => Err(format!("expected a word, found {other:?}")),
        }
    }

    pub(super) fn peek_word(&self) -> Option<&'a str> {
        match self.peek() {
            Some(Token::Word(word)) => Some(word),
            _ => None,
        }
    }

    pub(super) fn skip_to(&mut self, mark: char) -> Result<(), String> {
        while self.next()? != Token::Mark(mark) {}
        Ok(())
    }
}
